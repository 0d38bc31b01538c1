/* Property: on GPUs, reduce-scatter and all-gather give the bits of the scalar reference on all
 * ranks and write nothing else; ranks that make different calls all get the same error.
 *
 * Every world size that one and two GPUs serve, types, counts, addresses that are aligned to an
 * element only and differ from rank to rank, in place and out of place, eager and in graphs, one
 * piece and chunks, every algorithm by name, all-reduces in between. Outputs, inputs and guards lie
 * in one piece of memory, of which the host makes the image before and the image expected after.
 * After each batch every word of both parities of all push slots is armed. */
/* labels: timeout=180 */
#include "gpu_ranks.h"
#include "reference.h"

#define POISON     0xA5
#define GUARD      64
#define ARENA      ((size_t)24 << 20)
#define SMALL_SLOT 16384
#define MAX_CALLS  96

typedef struct parts_call {
    onehop_collective collective;
    onehop_algorithm algorithm;
    onehop_dtype dtype; /* of a gather only what its bytes are made as: none */
    size_t count;       /* of a part: elements, of a gather bytes */
    unsigned shift;     /* 0: everything on 16 bytes */
    bool in_place;
    uint32_t blocks, threads;
} parts_call;

/* One rank's memory. */
typedef struct bench {
    gpu_rank *rank;
    unsigned char *arena;            /* on the GPU */
    unsigned char *image, *expected; /* on the host */
    size_t used;
    size_t all[MAX_CALLS], part[MAX_CALLS]; /* places of a call's buffers */
} bench;

static size_t *compared; /* atomic: outputs */

/* ---- images ---------------------------------------------------------------------------------- */
static size_t element_of(const parts_call *c) {
    return c->collective == ONEHOP_ALL_GATHER ? 1 : reference_element_bytes(c->dtype);
}

static size_t room_of(size_t bytes) {
    return GUARD + oh_round_up(16 + bytes, 64) + GUARD;
}

static size_t cost_of(const parts_call *c, int world) {
    const size_t bytes = c->count * element_of(c);
    return room_of(bytes * (size_t)world) + room_of(bytes);
}

/* Any bits: runs of ones, of zeros, and others. */
static void fill_bytes(unsigned char *to, uint64_t seed, int rank, size_t bytes) {
    uint64_t random = seed * 1000003 + (uint64_t)rank * 8191;
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t word = random_next(&random);
        if (word % 4 == 0) word = UINT64_MAX;
        if (word % 4 == 1) word = 0;
        memcpy(to + i, &word, bytes - i < 8 ? bytes - i : 8);
    }
}

static void image_of_scatter(const bench *b, const parts_call *c, size_t index, uint64_t seed) {
    const size_t size = element_of(c), world = (size_t)b->rank->world;
    const size_t bytes = c->count * size, first = c->count * (size_t)b->rank->rank;
    unsigned char *sum =
        b->expected + (c->in_place ? b->all[index] + first * size : b->part[index]);
    input_fill(b->image + b->all[index], INPUT_MIXED, seed, b->rank->rank, 0, c->count * world,
               c->dtype);
    memcpy(b->expected + b->all[index], b->image + b->all[index], bytes * world);
    reference_of_inputs(sum, INPUT_MIXED, seed, (int)world, first, c->count, c->dtype);
}

static void image_of_gather(const bench *b, const parts_call *c, size_t index, uint64_t seed) {
    const size_t bytes = c->count, mine = bytes * (size_t)b->rank->rank;
    unsigned char *in = b->image + (c->in_place ? b->all[index] + mine : b->part[index]);
    fill_bytes(in, seed, b->rank->rank, bytes);
    if (!c->in_place) memcpy(b->expected + b->part[index], in, bytes);
    for (int r = 0; r < b->rank->world; r++)
        fill_bytes(b->expected + b->all[index] + bytes * (size_t)r, seed, r, bytes);
}

static void image_of_sum(const bench *b, const parts_call *c, size_t index, uint64_t seed) {
    const size_t bytes = c->count * element_of(c);
    unsigned char *sum = b->expected + (c->in_place ? b->part[index] : b->all[index]);
    input_fill(b->image + b->part[index], INPUT_MIXED, seed, b->rank->rank, 0, c->count, c->dtype);
    memcpy(b->expected + b->part[index], b->image + b->part[index], bytes);
    reference_of_inputs(sum, INPUT_MIXED, seed, b->rank->world, 0, c->count, c->dtype);
}

static void prepare(bench *b, const parts_call *calls, size_t n, uint64_t seed) {
    b->used = 0;
    for (size_t i = 0; i < n; i++) {
        const parts_call *c = &calls[i];
        const size_t size = element_of(c), bytes = c->count * size;
        const size_t off =
            c->shift ? (c->shift + 3 * (size_t)b->rank->rank) % (16 / size) * size : 0;
        b->all[i] = b->used + GUARD + off;
        b->used += room_of(bytes * (size_t)b->rank->world);
        b->part[i] = b->used + GUARD + (c->shift ? (off + size) % 16 : 0);
        b->used += room_of(bytes);
    }
    if (b->used > ARENA) FAIL("%zu bytes of calls do not fit", b->used);
    memset(b->image, POISON, b->used);
    memset(b->expected, POISON, b->used);
    for (size_t i = 0; i < n; i++) {
        void (*const image[])(const bench *, const parts_call *, size_t,
                              uint64_t) = {image_of_sum, image_of_scatter, image_of_gather};
        image[calls[i].collective](b, &calls[i], i, seed + i);
    }
    gpu_write(b->rank, b->arena, b->image, b->used);
}

static void expect_image(const bench *b, const parts_call *calls, size_t n, const char *what) {
    size_t i = 0, at = 0;
    if (!memcmp(b->image, b->expected, b->used)) return;
    while (b->image[at] == b->expected[at]) at++;
    while (i + 1 < n && b->all[i + 1] <= at) i++;
    FAIL("%s, rank %d of %d: byte %zu is 0x%02x, expected 0x%02x; call %zu, %s by %s, %zu a part, "
         "shift %u, %s, "
         "grid %ux%u, has its parts at %zu and its part at %zu",
         what, b->rank->rank, b->rank->world, at, b->image[at], b->expected[at], i,
         onehop_collective_name(calls[i].collective), onehop_algorithm_name(calls[i].algorithm),
         calls[i].count, calls[i].shift, calls[i].in_place ? "in place" : "out of place",
         calls[i].blocks, calls[i].threads, b->all[i], b->part[i]);
}

/* ---- calls ----------------------------------------------------------------------------------- */
static void make_call(bench *b, const parts_call *c, size_t index) {
    const gpu_rank *r = b->rank;
    unsigned char *all = b->arena + b->all[index], *part = b->arena + b->part[index];
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    call.algorithm = c->algorithm;
    call.blocks = c->blocks;
    call.threads = c->threads;
    if (c->collective == ONEHOP_ALL_REDUCE) {
        CHECK_OK(onehop_all_reduce(r->context, part, c->in_place ? part : all, c->count, c->dtype,
                                   ONEHOP_SUM, &call, r->stream));
        return;
    }
    if (c->in_place) part = all + c->count * element_of(c) * (size_t)r->rank;
    if (c->collective == ONEHOP_REDUCE_SCATTER)
        CHECK_OK(onehop_reduce_scatter(r->context, all, part, c->count, c->dtype, ONEHOP_SUM, &call,
                                       r->stream));
    else
        CHECK_OK(onehop_all_gather(r->context, part, all, c->count, &call, r->stream));
}

static void run_piece(bench *benches, int here, const parts_call *calls, size_t n, bool graph,
                      const char *what, uint64_t seed) {
    gpu_rank *ranks[ONEHOP_MAX_RANKS] = {NULL};
    gpu_graph graphs[ONEHOP_MAX_RANKS];
    for (int i = 0; i < here; i++) {
        ranks[i] = benches[i].rank;
        prepare(&benches[i], calls, n, seed);
    }
    if (graph)
        gpu_capture_begin(ranks, here);
    else
        gpu_barrier(ranks[0]);
    for (size_t c = 0; c < n; c++)
        for (int i = 0; i < here; i++) make_call(&benches[i], &calls[c], c);
    if (graph) gpu_capture_end(ranks, here, graphs);
    for (int i = 0; i < here && graph; i++)
        gpu_graph_launch(ranks[i], &graphs[i], ranks[i]->stream);
    for (int i = 0; i < here; i++)
        if (onehop_synchronize(ranks[i]->context, ranks[i]->stream))
            FAIL("%s, rank %d of %d, %s: %s", what, ranks[i]->rank, ranks[i]->world,
                 graph ? "graph" : "eager", onehop_last_error());
    gpu_barrier(ranks[0]);
    for (int i = 0; i < here; i++) {
        gpu_read(benches[i].rank, benches[i].image, benches[i].arena, benches[i].used);
        expect_image(&benches[i], calls, n, what);
        if (graph) gpu_graph_free(ranks[i], &graphs[i]);
    }
    __atomic_fetch_add(compared, n * (size_t)here, __ATOMIC_RELAXED);
}

static void run_calls(bench *benches, int here, const parts_call *calls, size_t count, bool graph,
                      const char *what) {
    const int world = benches[0].rank->world;
    for (size_t done = 0, n; done < count; done += n) {
        size_t used = 0;
        for (n = 0; n < MAX_CALLS && done + n < count; n++) {
            used += cost_of(&calls[done + n], world);
            if (used > ARENA) break;
        }
        if (!n) FAIL("a call of %zu does not fit", calls[done].count);
        run_piece(benches, here, calls + done, n, graph, what, 100 + 31 * done);
    }
}

/* ---- what is called -------------------------------------------------------------------------- */
static const onehop_dtype dtypes[] = {ONEHOP_FLOAT32, ONEHOP_FLOAT16, ONEHOP_BFLOAT16};

/* Call `number` of some; each number has its collective, type, place and form. */
static parts_call call_of(size_t number, size_t count, size_t max_flags) {
    static const onehop_algorithm named[][3] = {
        {ONEHOP_ALGORITHM_AUTO, ONEHOP_1SHOT_PUSH, ONEHOP_1SHOT_PULL},
        {ONEHOP_ALGORITHM_AUTO, ONEHOP_SCATTER_PUSH, ONEHOP_SCATTER_PUSH},
        {ONEHOP_ALGORITHM_AUTO, ONEHOP_GATHER_PUSH, ONEHOP_GATHER_LL}};
    parts_call c = {0};
    c.collective = number % 7 == 6 ? ONEHOP_ALL_REDUCE
                   : number % 2    ? ONEHOP_REDUCE_SCATTER
                                   : ONEHOP_ALL_GATHER;
    c.algorithm = named[c.collective][number / 2 % 3];
    if (c.algorithm == ONEHOP_GATHER_LL && count > max_flags) c.algorithm = ONEHOP_GATHER_PUSH;
    c.dtype = dtypes[number / 3 % 3];
    c.count = count;
    c.shift = number % 3 ? (unsigned)(number * 5 % 15) + 1 : 0;
    c.in_place = number / 5 % 2;
    if (number % 4 == 3) c.blocks = 2 + (uint32_t)(number / 4 % 3), c.threads = 64;
    return c;
}

static void open_benches(bench *benches, gpu_rank *ranks, int here) {
    for (int i = 0; i < here; i++) {
        bench *b = &benches[i];
        memset(b, 0, sizeof *b);
        b->rank = &ranks[i];
        b->arena = gpu_alloc(b->rank, ARENA);
        b->image = gpu_alloc_pinned(b->rank, ARENA);
        b->expected = malloc(ARENA);
        CHECK(b->expected != NULL);
    }
}

static void close_benches(bench *benches, int here) {
    for (int i = 0; i < here; i++) {
        gpu_barrier(benches[i].rank);
        gpu_free(benches[i].rank, benches[i].arena);
        gpu_free_pinned(benches[i].rank, benches[i].image);
        free(benches[i].expected);
    }
}

static void short_parts(gpu_rank *ranks, int here, void *argument) {
    bench *benches = calloc(ONEHOP_MAX_RANKS, sizeof *benches);
    parts_call calls[400];
    (void)argument;
    CHECK(benches != NULL);
    open_benches(benches, ranks, here);
    for (int graph = 0; graph < 2; graph++) {
        size_t n = 0;
        for (size_t count = 1; count <= 40; count++) {
            calls[n] = call_of(n + (size_t)graph, count, 1024), n++;
            calls[n] = call_of(n + 3 * (size_t)graph, count * 16, 1024), n++;
        }
        for (size_t count = 97; count < 1200; count += 61)
            for (size_t i = 0; i < 4; i++) calls[n] = call_of(n + i, count, 1024), n++;
        run_calls(benches, here, calls, n, graph, "short parts");
        gpu_expect_idle(ranks, here);
    }
    close_benches(benches, here);
    free(benches);
}

/* Around slots, sub-slots and chunks of regions of SMALL_SLOT bytes, and longer. */
static void chunks(gpu_rank *ranks, int here, void *argument) {
    bench *benches = calloc(ONEHOP_MAX_RANKS, sizeof *benches);
    const size_t counts[] = {SMALL_SLOT / 16,   SMALL_SLOT / 8 + 1, SMALL_SLOT / 4 - 1,
                             SMALL_SLOT / 2,    SMALL_SLOT - 8,     SMALL_SLOT + 8,
                             3 * SMALL_SLOT - 7};
    parts_call calls[64];
    (void)argument;
    CHECK(benches != NULL);
    open_benches(benches, ranks, here);
    for (int graph = 0; graph < 2; graph++) {
        size_t n = 0;
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
            for (size_t j = 0; j < 3; j++)
                calls[n] = call_of(n + j + (size_t)graph, counts[i], 1024), n++;
        run_calls(benches, here, calls, n, graph, "chunks");
        gpu_expect_idle(ranks, here);
    }
    close_benches(benches, here);
    free(benches);
}

/* In the regions that a context has by itself: one piece (perf in run.sh goes on to several). */
static void long_parts(gpu_rank *ranks, int here, void *argument) {
    bench *benches = calloc(ONEHOP_MAX_RANKS, sizeof *benches);
    const size_t max = ((size_t)4 << 20) / (size_t)ranks[0].world / 4;
    parts_call calls[7];
    (void)argument;
    CHECK(benches != NULL);
    open_benches(benches, ranks, here);
    for (int graph = 0; graph < 2; graph++) {
        for (size_t n = 0; n < 7; n++)
            calls[n] = call_of(n, n % 3 ? max / (n + 1) + n : max / 4 * 4, 16384);
        run_calls(benches, here, calls, 7, graph, "long parts");
        gpu_expect_idle(ranks, here);
    }
    close_benches(benches, here);
    free(benches);
}

/* The last rank makes another call. */
static void disagree(gpu_rank *ranks, int here, void *argument) {
    const int way = *(const int *)argument;
    void *memory[ONEHOP_MAX_RANKS];
    for (int i = 0; i < here; i++) memory[i] = gpu_alloc(&ranks[i], 1 << 16);
    gpu_barrier(&ranks[0]);
    for (int i = 0; i < here; i++) {
        gpu_rank *r = &ranks[i];
        const bool odd = r->rank == r->world - 1;
        unsigned char *in = memory[i], *out = in + (1 << 15);
        if (way == 0)
            CHECK_OK(odd ? onehop_reduce_scatter(r->context, in, out, 64, ONEHOP_BFLOAT16,
                                                 ONEHOP_SUM, NULL, r->stream)
                         : onehop_all_gather(r->context, in, out, 128, NULL, r->stream));
        else
            CHECK_OK(onehop_all_gather(r->context, in, out, odd ? 256 : 128, NULL, r->stream));
    }
    for (int i = 0; i < here; i++)
        gpu_expect_failure(&ranks[i], ONEHOP_ERR_MISMATCH, ranks[i].world - 1,
                           onehop_synchronize(ranks[i].context, ranks[i].stream), "ranks disagree");
    gpu_barrier(&ranks[0]);
    for (int i = 0; i < here; i++) gpu_free(&ranks[i], memory[i]);
}

static int gpus_found;

static void run(const char *what, gpu_layout layout, int world, int gpus) {
    onehop_config small = ONEHOP_CONFIG_INIT(onehop_config);
    small.push_bytes = small.pull_bytes = SMALL_SLOT;
    const gpu_setup few = {.layout = layout, .world = world, .gpus = gpus, .config = &small};
    const gpu_setup usual = {.layout = layout, .world = world, .gpus = gpus};
    const size_t before = *compared;
    const double start = seconds_now();
    gpu_run(&few, short_parts, NULL);
    gpu_run(&few, chunks, NULL);
    gpu_run(&usual, long_parts, NULL);
    printf("  %s, world size %d, %d GPU%s: %zu outputs, %.1f s\n", what, world, gpus,
           gpus > 1 ? "s" : "", *compared - before, seconds_now() - start);
}

static void in_one_process(void *argument) {
    static const int worlds[] = {2, 3, 4, 5, 8, 12, 16};
    const int gpus = gpus_found > 1 ? 2 : 1;
    (void)argument;
    for (size_t i = 0; i < 5; i++) run("threads", GPU_THREADS, worlds[i], 1);
    for (size_t i = 0; gpus == 2 && i < 7; i++) run("threads", GPU_THREADS, worlds[i], 2);
    run("one thread for all", GPU_SINGLE, 2, gpus);
    for (int way = 0; way < 2; way++) {
        const gpu_setup setup = {.layout = GPU_THREADS, .world = 3, .gpus = gpus, .dies = true};
        gpu_run(&setup, disagree, &way);
    }
}

int main(void) {
    gpus_found = gpu_main(170, 1);
    compared = shared_memory(sizeof *compared);
    const double start = seconds_now();
    gpu_apart(in_one_process, NULL);
    const int gpus = gpu_for_processes();
    if (gpus) run("process per rank", GPU_PROCESSES, 2, gpus);
    printf("%zu outputs compared with the reference, 0 wrong, all slots armed, %.1f s\n", *compared,
           seconds_now() - start);
    return 0;
}
