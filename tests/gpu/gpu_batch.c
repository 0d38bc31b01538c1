/* See gpu_batch.h. */
#include "gpu_batch.h"

#define POISON 0xA5
#define GUARD  64
/* Calls of a piece: far fewer than a stream takes before a launch blocks, since a launch that
 * blocks holds a lock that the other ranks on the GPU need. */
#define PIECE 128

/* ---- data ------------------------------------------------------------------------------------ */

gpu_data *gpu_data_make(size_t room, int ranks) {
    gpu_data *data = shared_memory(sizeof *data);
    data->room = room;
    for (int r = 0; r < ranks; r++) data->in[r] = shared_memory(room * 4);
    data->sum = shared_memory(room * 4);
    return data;
}

void gpu_data_sum(gpu_data *data, gpu_rank *ranks, int here, onehop_dtype dtype, size_t elements) {
    const size_t size = reference_element_bytes(dtype);
    gpu_barrier(&ranks[0]);
    if (ranks[0].rank == 0) {
        data->dtype = dtype;
        data->elements = elements;
    }
    for (int i = 0; i < here; i++) {
        const size_t world = (size_t)ranks[i].world, share = (elements + world - 1) / world;
        const size_t first = share * (size_t)ranks[i].rank;
        const size_t mine = first >= elements          ? 0
                            : elements - first < share ? elements - first
                                                       : share;
        const void *in[ONEHOP_MAX_RANKS];
        for (size_t r = 0; r < world; r++) in[r] = data->in[r] + first * size;
        reference_sum(data->sum + first * size, in, (int)world, mine, dtype);
    }
    gpu_barrier(&ranks[0]);
}

void gpu_data_fill(gpu_data *data, gpu_rank *ranks, int here, input_kind kind, uint64_t seed,
                   onehop_dtype dtype, size_t elements) {
    if (elements > data->room) FAIL("%zu elements, room for %zu", elements, data->room);
    gpu_barrier(&ranks[0]); /* nobody reads the old data any more */
    for (int i = 0; i < here; i++)
        input_fill(data->in[ranks[i].rank], kind, seed, ranks[i].rank, 0, elements, dtype);
    gpu_data_sum(data, ranks, here, dtype, elements);
}

/* ---- benches --------------------------------------------------------------------------------- */

void gpu_bench_open(gpu_bench *b, gpu_rank *rank, const gpu_data *data, size_t arena_bytes) {
    const size_t copy = oh_round_up(data->room * 4, 256) + 256;
    memset(b, 0, sizeof *b);
    b->rank = rank;
    b->data = data;
    b->room = arena_bytes;
    b->inputs = gpu_alloc(rank, 2 * copy);
    b->arena = gpu_alloc(rank, arena_bytes);
    b->echo = gpu_alloc(rank, arena_bytes);
    b->image = gpu_alloc_pinned(rank, arena_bytes);
    b->expected = malloc(arena_bytes);
    b->places = calloc(PIECE, sizeof *b->places);
    CHECK(b->expected && b->places);
    b->in[0] = b->inputs;
    b->in[1] = b->inputs + copy;
}

void gpu_bench_load(gpu_bench *b) {
    const size_t size = reference_element_bytes(b->data->dtype), bytes = b->data->elements * size;
    const size_t copy = oh_round_up(b->data->room * 4, 256) + 256;
    b->in[1] = b->inputs + copy + (size_t)(2 * b->rank->rank + 1) % (16 / size) * size;
    for (int i = 0; i < 2; i++) gpu_write(b->rank, b->in[i], b->data->in[b->rank->rank], bytes);
}

void gpu_bench_close(gpu_bench *b) {
    gpu_barrier(b->rank);
    gpu_free(b->rank, b->inputs);
    gpu_free(b->rank, b->arena);
    gpu_free(b->rank, b->echo);
    gpu_free_pinned(b->rank, b->image);
    free(b->expected);
    free(b->places);
}

/* ---- one piece ------------------------------------------------------------------------------- */

/* The same on all ranks, whatever the offset. */
static size_t cost_of(const gpu_bench *b, const gpu_call *c) {
    return GUARD + oh_round_up(16 + c->count * reference_element_bytes(b->data->dtype), 64) + GUARD;
}

/* Calls from the first that fit in every bench. */
static size_t piece_of(const gpu_bench *benches, int here, const gpu_call *calls, size_t count) {
    size_t fits = count < PIECE ? count : PIECE;
    for (int i = 0; i < here; i++) {
        size_t used = 0, n = 0;
        while (n < fits && used + cost_of(&benches[i], &calls[n]) <= benches[i].room)
            used += cost_of(&benches[i], &calls[n++]);
        fits = n;
    }
    if (!fits) FAIL("a call of %zu elements does not fit", calls[0].count);
    return fits;
}

static void prepare(gpu_bench *b, const gpu_call *calls, size_t n, bool echo) {
    const size_t size = reference_element_bytes(b->data->dtype);
    b->used = 0;
    for (size_t c = 0; c < n; c++) {
        const size_t off =
            calls[c].shift ? (calls[c].shift + 3 * (size_t)b->rank->rank) % (16 / size) * size : 0;
        b->places[c] = b->used + GUARD + off;
        b->used += cost_of(b, &calls[c]);
    }
    memset(b->image, POISON, b->used);
    memset(b->expected, POISON, b->used);
    for (size_t c = 0; c < n; c++) {
        const size_t from = calls[c].first * size, bytes = calls[c].count * size;
        if (calls[c].first + calls[c].count > b->data->elements)
            FAIL("call %zu: window beyond the data", c);
        if (calls[c].in_place)
            memcpy(b->image + b->places[c], b->data->in[b->rank->rank] + from, bytes);
        memcpy(b->expected + b->places[c], b->data->sum + from, bytes);
    }
    gpu_write(b->rank, b->arena, b->image, b->used);
    if (echo) gpu_fill(b->rank, b->echo, POISON, b->used);
}

static void make_call(gpu_bench *b, const gpu_call *c, size_t place, const gpu_how *how) {
    const gpu_rank *r = b->rank;
    const size_t size = reference_element_bytes(b->data->dtype);
    const onehop_stream stream = c->second ? r->second : r->stream;
    const int copy = c->shift ? (int)((c->shift + (unsigned)r->rank) & 1u) : 0;
    unsigned char *out = b->arena + place;
    const unsigned char *in = c->in_place ? out : b->in[copy] + c->first * size;
    onehop_call named = ONEHOP_CONFIG_INIT(onehop_call);
    named.blocks = c->blocks;
    named.threads = c->threads;
    named.algorithm = c->algorithm;
    if ((c->count + (size_t)r->rank) % 3 == 0) { /* a matter of each rank alone */
        named.prefetch = in;
        named.prefetch_bytes = c->count * size;
    }
    if (c->slow_us && c->slow_rank == r->rank) gpu_spin_later(r, c->slow_us, stream);
    if (c->blocks || c->threads || c->algorithm)
        CHECK_OK(onehop_all_reduce(r->context, in, out, c->count, b->data->dtype, ONEHOP_SUM,
                                   &named, stream));
    else
        CHECK_OK(onehop_all_reduce(r->context, in, out, c->count, b->data->dtype, ONEHOP_SUM, NULL,
                                   stream));
    if (how->echo) gpu_consume_later(r, b->echo + place, out, c->count * size, stream);
}

static void make_calls(gpu_bench *benches, int here, const gpu_call *calls, size_t n,
                       const gpu_how *how) {
    for (size_t c = 0; c < n; c++)
        for (int i = 0; i < here; i++) {
            gpu_bench *b = &benches[how->reverse && benches[0].rank->rank % 2 ? here - 1 - i : i];
            make_call(b, &calls[c], b->places[c], how);
        }
}

static void expect_image(const gpu_bench *b, const gpu_call *calls, size_t n, const gpu_how *how,
                         const char *of) {
    const size_t size = reference_element_bytes(b->data->dtype);
    char what[200];
    if (!memcmp(b->image, b->expected, b->used)) return;
    for (size_t c = 0; c < n; c++) {
        snprintf(what, sizeof what,
                 "%s%s, rank %d of %d, call %zu: %zu elements, shift %u, %s, %s, grid %ux%u",
                 how->what, of, b->rank->rank, b->rank->world, c, calls[c].count, calls[c].shift,
                 calls[c].in_place ? "in place" : "out of place", how->graph ? "graph" : "eager",
                 calls[c].blocks, calls[c].threads);
        expect_equal(b->expected + b->places[c], b->image + b->places[c], calls[c].count,
                     b->data->dtype, what);
    }
    for (size_t i = 0; i < b->used; i++) {
        size_t c = 0;
        if (b->image[i] == b->expected[i]) continue;
        while (c + 1 < n && b->places[c + 1] <= i) c++;
        FAIL("%s%s, rank %d of %d: byte %zu, after the output of call %zu (%zu bytes at %zu) or "
             "before, was overwritten",
             how->what, of, b->rank->rank, b->rank->world, i, c, calls[c].count * size,
             b->places[c]);
    }
}

static void compare(gpu_bench *b, const gpu_call *calls, size_t n, const gpu_how *how) {
    gpu_read(b->rank, b->image, b->arena, b->used);
    expect_image(b, calls, n, how, "");
    if (!how->echo) return;
    gpu_read(b->rank, b->image, b->echo, b->used);
    expect_image(b, calls, n, how, " (as the next kernel saw it)");
}

/* Where a rank stands that gave up, and time for the others to say so too. */
static void tell_state(const gpu_rank *r) {
    uint64_t words[OH_LOCAL_SEQUENCES / 8 + 8];
    onehop_comm *comm = r->context->comm;
    const oh_local *head = (const oh_local *)words;
    if (oh_comm_load_u64s(comm, comm->args.local, words, OH_LENGTH(words))) return;
    fprintf(stderr, "rank %d of %d: running %u, stop %u, sequence numbers", r->rank, r->world,
            head->running, head->stop);
    for (int b = 0; b < 6; b++)
        fprintf(stderr, " %llx", (unsigned long long)words[OH_LOCAL_SEQUENCES / 8 + b]);
    fprintf(stderr, "; %s\n", onehop_last_error());
    sleep(1);
}

static void run_piece(gpu_bench *benches, int here, const gpu_call *calls, size_t n,
                      const gpu_how *how) {
    gpu_rank *ranks[ONEHOP_MAX_RANKS] = {NULL};
    gpu_graph graphs[ONEHOP_MAX_RANKS];
    for (int i = 0; i < here; i++) {
        ranks[i] = benches[i].rank;
        prepare(&benches[i], calls, n, how->echo);
    }
    if (how->graph) {
        gpu_capture_begin(ranks, here);
        make_calls(benches, here, calls, n, how);
        gpu_capture_end(ranks, here, graphs);
    } else {
        gpu_barrier(ranks[0]);
    }
    for (int i = 0; i < here && how->beside; i++) how->beside(&benches[i], how->argument);
    if (!how->graph) make_calls(benches, here, calls, n, how);
    for (int i = 0; i < here && how->graph; i++)
        gpu_graph_launch(ranks[i], &graphs[i], ranks[i]->stream);
    for (int i = 0; i < here; i++) {
        const onehop_result first = onehop_synchronize(ranks[i]->context, ranks[i]->stream);
        const onehop_result second = onehop_synchronize(ranks[i]->context, ranks[i]->second);
        if (first || second) tell_state(ranks[i]);
        if (first || second)
            FAIL("%s, rank %d of %d, %s, calls of %zu.. elements: %s", how->what, ranks[i]->rank,
                 ranks[i]->world, how->graph ? "graph" : "eager", calls[0].count,
                 onehop_last_error());
    }
    gpu_barrier(ranks[0]);
    for (int i = 0; i < here; i++) {
        compare(&benches[i], calls, n, how);
        if (how->graph) gpu_graph_free(ranks[i], &graphs[i]);
    }
}

size_t gpu_batch(gpu_bench *benches, int here, const gpu_call *calls, size_t count,
                 const gpu_how *how) {
    for (size_t done = 0, n; done < count; done += n) {
        n = piece_of(benches, here, calls + done, count - done);
        run_piece(benches, here, calls + done, n, how);
    }
    return count * (size_t)here;
}

size_t gpu_batch_once(gpu_rank *ranks, int here, gpu_data *data, input_kind kind, uint64_t seed,
                      onehop_dtype dtype, const gpu_call *calls, size_t count, const gpu_how *how) {
    gpu_bench benches[ONEHOP_MAX_RANKS];
    gpu_data_fill(data, ranks, here, kind, seed, dtype, data->room);
    for (int i = 0; i < here; i++) {
        gpu_bench_open(&benches[i], &ranks[i], data, (size_t)16 << 20);
        gpu_bench_load(&benches[i]);
    }
    const size_t compared = gpu_batch(benches, here, calls, count, how);
    for (int i = 0; i < here; i++) gpu_bench_close(&benches[i]);
    return compared;
}
