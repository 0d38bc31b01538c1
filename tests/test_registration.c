/* labels: quick Registration of captured memory on the host device: what kind of memory comes to be
 * read directly and what is staged, on all ranks alike; addresses that reach the peers' bytes;
 * replays; rows that are recycled; memory mapped anew at an old address; failures on one rank;
 * nothing left behind. Ranks are processes, threads, and all in one thread, and processes of two
 * threads. */
#include "capture/registration.h"
#include "support/rank_contexts.h"

#include "harness.h"

#include <sys/resource.h>

enum {
    PAGE = 4096,
    COUNT = 1500, /* floats of a call: 6000 bytes, more than a page */
    STRIDE = 8192,
    CALLS = 6,
    MAX_RANKS = 4
};

/* Where a rank's memory for one call lies. */
typedef enum place {
    SHARED,  /* onehop_mem_alloc, one allocation for all calls */
    FILES,   /* memfds of one page each, side by side: a call spans several */
    HEAP,    /* malloc: nobody else can map it */
    CROOKED, /* shared, but not aligned to 16 bytes */
    PLACES
} place;

/* ---- memory ---------------------------------------------------------------------------------- */

typedef struct memory {
    char *shared, *heap, *files;
    int fds[2 * CALLS * STRIDE / PAGE];
} memory;

enum {
    REGION = 2 * CALLS * STRIDE
};

static void map_page(char *at, int *fd_out) {
    *fd_out = memfd_create("test", MFD_CLOEXEC);
    CHECK(*fd_out >= 0 && ftruncate(*fd_out, PAGE) == 0);
    CHECK(mmap(at, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, *fd_out, 0) == at);
}

static memory *memory_make(void) {
    memory *m = malloc(sizeof *m);
    const onehop_device device = {ONEHOP_DEVICE_HOST, 0};
    CHECK_OK(onehop_mem_alloc(device, REGION + STRIDE, (void **)&m->shared));
    m->heap = aligned_alloc(16, REGION);
    m->files = mmap(NULL, REGION, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(m->heap && m->files != MAP_FAILED);
    for (size_t i = 0; i < OH_LENGTH(m->fds); i++) map_page(m->files + i * PAGE, &m->fds[i]);
    return m;
}

static void memory_free(memory *m) {
    for (size_t i = 0; i < OH_LENGTH(m->fds); i++) close(m->fds[i]);
    CHECK(munmap(m->files, REGION) == 0);
    free(m->heap);
    onehop_mem_free(m->shared);
    free(m);
}

static float *slot_of(const memory *m, place p, size_t slot) {
    switch (p) {
    case FILES:
        return (float *)(m->files + slot * STRIDE);
    case HEAP:
        return (float *)(m->heap + slot * STRIDE);
    case CROOKED:
        return (float *)(m->shared + slot * STRIDE + 4);
    default:
        return (float *)(m->shared + slot * STRIDE);
    }
}

/* ---- a batch of calls ------------------------------------------------------------------------ */

typedef struct call {
    place in, out;
    onehop_algorithm algorithm;
    bool in_place;
    int odd_rank; /* this rank's input lies on the heap; -1: none */
} call;

static const call batch[CALLS] = {
    {SHARED, SHARED, ONEHOP_2SHOT_PULL, false, -1}, {FILES, FILES, ONEHOP_2SHOT_PULL, false, -1},
    {HEAP, SHARED, ONEHOP_2SHOT_PULL, false, -1},   {FILES, HEAP, ONEHOP_1SHOT_PULL, false, -1},
    {SHARED, SHARED, ONEHOP_2SHOT_PULL, true, 1},   {CROOKED, SHARED, ONEHOP_1SHOT_PULL, false, -1},
};

/* 1shot_pull stores to no peer. */
static bool expect_direct(const call *c, bool one_process) {
    if (c->in == CROOKED || c->out == CROOKED) return false;
    if (one_process) return true;
    return c->in != HEAP && c->odd_rank < 0 &&
           (c->out != HEAP || c->algorithm == ONEHOP_1SHOT_PULL);
}

static float *input_of(const memory *m, const call *c, size_t i, int rank) {
    return slot_of(m, rank == c->odd_rank ? HEAP : c->in, 2 * i);
}

static float *output_of(const memory *m, const call *c, size_t i, int rank) {
    return c->in_place ? input_of(m, c, i, rank) : slot_of(m, c->out, 2 * i + 1);
}

static float value_of(int rank, size_t call_index, size_t element, int round) {
    return (float)((rank * 7 + (int)call_index * 3 + (int)element + round) % 61);
}

static void fill_inputs(const memory *m, int rank, int round) {
    for (size_t i = 0; i < CALLS; i++)
        for (size_t k = 0; k < COUNT; k++)
            input_of(m, &batch[i], i, rank)[k] = value_of(rank, i, k, round);
}

static void check_outputs(const memory *m, int rank, int world, int round) {
    for (size_t i = 0; i < CALLS; i++)
        for (size_t k = 0; k < COUNT; k++) {
            float sum = 0;
            for (int r = 0; r < world; r++) sum += value_of(r, i, k, round);
            const float found = output_of(m, &batch[i], i, rank)[k];
            if (found != sum)
                FAIL("rank %d, round %d, call %zu, element %zu: expected %g, found %g", rank, round,
                     i, k, (double)sum, (double)found);
        }
}

static void run_call(onehop_context *context, const memory *m, size_t i, onehop_stream stream) {
    const call *c = &batch[i];
    const int rank = onehop_rank(context);
    CHECK_OK(ranks_all_reduce(context, input_of(m, c, i, rank), output_of(m, c, i, rank), COUNT,
                              ONEHOP_FLOAT32, c->algorithm, stream));
}

static onehop_host_graph *record(onehop_context *context, const memory *m, onehop_stream stream) {
    onehop_host_graph *graph;
    CHECK_OK(onehop_host_stream_capture_begin(stream));
    for (size_t i = 0; i < CALLS; i++) run_call(context, m, i, stream);
    CHECK_OK(onehop_host_stream_capture_end(stream, &graph));
    return graph;
}

/* ---- looking into the registrations ---------------------------------------------------------- */

static const oh_registration *row_at(const onehop_context *context, uint32_t registration) {
    const oh_args *args = &context->comm->args;
    return (const oh_registration *)(uintptr_t)(args->local + args->regions.registrations) +
           registration;
}

static uint32_t registrations_used(const onehop_context *context) {
    onehop_stats stats;
    CHECK_OK(onehop_get_stats(context, &stats));
    return stats.registrations_used;
}

/* How the calls of all captures so far were registered. */
static void check_row_counts(const onehop_context *context, bool one_process, size_t captures) {
    onehop_stats stats;
    size_t direct = 0;
    for (size_t i = 0; i < CALLS; i++) direct += expect_direct(&batch[i], one_process);
    CHECK_OK(onehop_get_stats(context, &stats));
    CHECK_INT(captures * direct, stats.registrations_direct);
    CHECK_INT(captures * (CALLS - direct), stats.registrations_staged);
}

static const uint32_t first_rows[CALLS] = {0, 1, 2, 3, 4, 5};

/* The registrations of a batch: modes, and the peers' inputs as seen here. */
static void check_rows(const onehop_context *context, const uint32_t *registrations,
                       bool one_process, int round) {
    for (uint32_t i = 0; i < CALLS; i++) {
        const oh_registration *registration = row_at(context, registrations[i]);
        const bool direct = expect_direct(&batch[i], one_process);
        CHECK(registration->tag == context->comm->registration_tags[registrations[i]] &&
              registration->tag != 0);
        CHECK_INT(direct ? OH_REGISTRATION_DIRECT : OH_REGISTRATION_STAGED, registration->mode);
        for (int r = 0; r < context->world; r++) {
            const float *in = (const float *)(uintptr_t)registration->in[r];
            CHECK((in != NULL) == direct);
            for (size_t k = 0; direct && k < COUNT; k++)
                if (in[k] != value_of(r, i, k, round))
                    FAIL("call %u: rank %d's input is not what is seen", i, r);
        }
    }
}

/* Every rank writes its word into all outputs, as 2shot_pull does, and finds the peers' in its
 * own. */
static void check_row_outputs(onehop_context *context, const memory *m, bool one_process) {
    const int rank = context->rank;
    for (uint32_t i = 0; i < CALLS; i++)
        for (int r = 0; r < context->world; r++) {
            float *out = (float *)(uintptr_t)row_at(context, i)->out[r];
            if (batch[i].algorithm == ONEHOP_2SHOT_PULL && expect_direct(&batch[i], one_process))
                out[COUNT - 1 - rank] = (float)(1000 + rank);
        }
    ranks_barrier(context);
    for (uint32_t i = 0; i < CALLS; i++)
        for (int r = 0; r < context->world; r++)
            if (batch[i].algorithm == ONEHOP_2SHOT_PULL && expect_direct(&batch[i], one_process))
                CHECK(output_of(m, &batch[i], i, rank)[COUNT - 1 - r] == (float)(1000 + r));
    ranks_barrier(context);
}

static int count_mappings(void) {
    char line[512];
    int count = 0;
    FILE *file = fopen("/proc/self/maps", "re");
    CHECK(file != NULL);
    while (fgets(line, sizeof line, file)) count += strstr(line, "/memfd:") != NULL;
    fclose(file);
    return count;
}

/* ---- all kinds of memory --------------------------------------------------------------------- */

static void replay(onehop_context *context, const memory *m, onehop_host_graph *graph,
                   onehop_stream stream, int round) {
    fill_inputs(m, context->rank, round);
    CHECK_OK(onehop_host_graph_launch(graph, stream));
    CHECK_OK(onehop_synchronize(context, stream));
    check_outputs(m, context->rank, context->world, round);
}

static void kinds(onehop_context *context, int rank, int world, void *argument) {
    const ranks_layout layout = *(const ranks_layout *)argument;
    const bool one_process = layout == RANKS_AS_THREADS, counted = layout == RANKS_AS_PROCESSES;
    memory *m = memory_make();
    for (int r = 0; r < world && layout == RANKS_IN_PAIRS; r++)
        CHECK_INT(r / 2 == rank / 2, oh_rendezvous_same_process(context->group, r));
    onehop_stream stream;
    CHECK_OK(onehop_host_stream_create(&stream));
    fill_inputs(m, rank, 0);
    /* eager: no registrations */
    for (size_t i = 0; i < CALLS; i++) run_call(context, m, i, stream);
    CHECK_OK(onehop_synchronize(context, stream));
    check_outputs(m, rank, world, 0);
    CHECK_INT(0, registrations_used(context));
    fill_inputs(m, rank, 1);
    ranks_barrier(context);
    const int fds = count_fds(), mappings = count_mappings();

    CHECK_OK(onehop_capture_begin(context));
    onehop_host_graph *graph = record(context, m, stream);
    CHECK_OK(onehop_capture_end(context));
    CHECK_INT(CALLS, registrations_used(context));
    check_row_counts(context, one_process, 1);
    ranks_barrier(context);
    check_rows(context, first_rows, one_process, 1);
    ranks_barrier(context);
    check_row_outputs(context, m, one_process);
    if (counted) {
        CHECK_INT(fds, count_fds());
        CHECK(count_mappings() > mappings);
    }
    for (int round = 2; round < 5; round++) replay(context, m, graph, stream, round);
    onehop_host_graph_destroy(graph);

    /* What the graph held goes with the next capture, here an empty one. */
    CHECK_OK(onehop_capture_begin(context));
    CHECK_OK(onehop_capture_end(context));
    CHECK_INT(0, registrations_used(context));
    check_row_counts(context, one_process, 1);
    ranks_barrier(context);
    if (counted) CHECK(count_fds() == fds && count_mappings() == mappings);
    ranks_barrier(context);
    onehop_host_stream_destroy(stream);
    memory_free(m);
}

/* ---- an address that is used again ----------------------------------------------------------- */

/* Unmapped, and other files mapped there: peers see the new bytes, eager and captured. */
static void same_address(onehop_context *context, int rank, int world, void *argument) {
    char *at = mmap(NULL, 2 * STRIDE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    float *in = (float *)at, *out = (float *)(at + STRIDE);
    onehop_stream stream;
    onehop_stats stats;
    int fds[2 * STRIDE / PAGE], before = 0, mappings = 0;
    (void)argument;
    CHECK(at != MAP_FAILED);
    CHECK_OK(onehop_host_stream_create(&stream));
    for (int round = 0; round < 6; round++) {
        onehop_host_graph *graph;
        for (size_t i = 0; i < OH_LENGTH(fds); i++) map_page(at + i * PAGE, &fds[i]);
        for (size_t k = 0; k < COUNT; k++) in[k] = value_of(rank, 0, k, round);
        CHECK_OK(
            ranks_all_reduce(context, in, out, COUNT, ONEHOP_FLOAT32, ONEHOP_1SHOT_PULL, stream));
        CHECK_OK(onehop_synchronize(context, stream));
        for (int replays = 0; replays < 3; replays++) {
            if (replays == 1) {
                CHECK_OK(onehop_capture_begin(context));
                CHECK_OK(onehop_host_stream_capture_begin(stream));
                CHECK_OK(ranks_all_reduce(context, in, out, COUNT, ONEHOP_FLOAT32,
                                          round % 2 ? ONEHOP_1SHOT_PULL : ONEHOP_2SHOT_PULL,
                                          stream));
                CHECK_OK(onehop_host_stream_capture_end(stream, &graph));
                CHECK_OK(onehop_capture_end(context));
            }
            if (replays) {
                memset(out, 0xA5, COUNT * sizeof *out);
                CHECK_OK(onehop_host_graph_launch(graph, stream));
                CHECK_OK(onehop_synchronize(context, stream));
            }
            for (size_t k = 0; k < COUNT; k++) {
                float sum = 0;
                for (int r = 0; r < world; r++) sum += value_of(r, 0, k, round);
                if (out[k] != sum)
                    FAIL("rank %d, round %d, element %zu: old bytes", rank, round, k);
            }
        }
        CHECK_OK(onehop_get_stats(context, &stats));
        CHECK(stats.registrations_direct == (uint64_t)round + 1 && stats.registrations_staged == 0);
        onehop_host_graph_destroy(graph);
        ranks_barrier(context);
        if (round == 1) before = count_fds(), mappings = count_mappings();
        if (round == 5) CHECK(count_fds() == before && count_mappings() == mappings);
        ranks_barrier(context);
        CHECK(munmap(at, 2 * STRIDE) == 0);
        CHECK(mmap(at, 2 * STRIDE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
              at);
        for (size_t i = 0; i < OH_LENGTH(fds); i++) close(fds[i]);
    }
    onehop_host_stream_destroy(stream);
    CHECK(munmap(at, 2 * STRIDE) == 0);
}

/* ---- all ranks in one thread ----------------------------------------------------------------- */

static void in_one_thread(void) {
    onehop_context *contexts[MAX_RANKS];
    onehop_stream streams[MAX_RANKS];
    onehop_host_graph *graphs[MAX_RANKS];
    memory *m[MAX_RANKS];
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    config.device.kind = ONEHOP_DEVICE_HOST;
    config.timeout_ms = 60000;
    CHECK_OK(onehop_create_all(&config, MAX_RANKS, NULL, contexts));
    CHECK_OK(onehop_capture_begin_all(contexts, MAX_RANKS));
    for (int r = 0; r < MAX_RANKS; r++) {
        m[r] = memory_make();
        CHECK_OK(onehop_host_stream_create(&streams[r]));
        fill_inputs(m[r], r, 0);
        graphs[r] = record(contexts[r], m[r], streams[r]);
    }
    CHECK_RESULT(ONEHOP_ERR_STATE, onehop_capture_end(contexts[0]));
    CHECK_OK(onehop_capture_end_all(contexts, MAX_RANKS));
    for (int r = 0; r < MAX_RANKS; r++) check_rows(contexts[r], first_rows, true, 0);
    for (int round = 1; round < 3; round++) {
        for (int r = 0; r < MAX_RANKS; r++) fill_inputs(m[r], r, round);
        for (int r = 0; r < MAX_RANKS; r++)
            CHECK_OK(onehop_host_graph_launch(graphs[r], streams[r]));
        for (int r = 0; r < MAX_RANKS; r++) CHECK_OK(onehop_synchronize(contexts[r], streams[r]));
        for (int r = 0; r < MAX_RANKS; r++) check_outputs(m[r], r, MAX_RANKS, round);
    }
    for (int r = 0; r < MAX_RANKS; r++) {
        onehop_destroy(contexts[r]);
        onehop_host_graph_destroy(graphs[r]); /* outlives its context */
        onehop_host_stream_destroy(streams[r]);
        memory_free(m[r]);
    }
}

/* ---- registrations and graphs ---------------------------------------------------------------- */

/* More captures than there are registrations, each graph gone before the next; then graphs that
 * stay, until there is no registration left. */
static void recycling(onehop_context *context, int rank, int world, void *argument) {
    memory *m = memory_make();
    onehop_stream streams[2];
    onehop_host_graph *graphs[2];
    const uint32_t registrations = context->comm->stats.registrations_total;
    const bool processes = *(const ranks_layout *)argument == RANKS_AS_PROCESSES;
    uint32_t last_tag = 0;
    for (int i = 0; i < 2; i++) CHECK_OK(onehop_host_stream_create(&streams[i]));
    ranks_barrier(context);
    const int fds = count_fds();
    ranks_barrier(context);
    for (int round = 0; round < 5; round++) { /* two graphs in one capture */
        CHECK_OK(onehop_capture_begin(context));
        for (int i = 0; i < 2; i++) graphs[i] = record(context, m, streams[i]);
        CHECK_OK(onehop_capture_end(context));
        CHECK_INT(2 * CALLS, registrations_used(context));
        check_row_counts(context, !processes, 2 * ((size_t)round + 1));
        CHECK(row_at(context, 0)->tag != last_tag);
        last_tag = row_at(context, 0)->tag;
        for (int i = 0; i < 2; i++) replay(context, m, graphs[i], streams[i], round);
        onehop_host_graph_destroy(graphs[0]);
        if (round == 0) { /* one graph of the two holds all */
            CHECK_OK(onehop_capture_begin(context));
            CHECK_OK(onehop_capture_end(context));
            CHECK_INT(2 * CALLS, registrations_used(context));
            replay(context, m, graphs[1], streams[1], 10);
        }
        onehop_host_graph_destroy(graphs[1]);
        ranks_barrier(context);
    }
    CHECK(5 * 2 * CALLS > registrations);
    CHECK_OK(onehop_capture_begin(context));
    CHECK_OK(onehop_host_stream_capture_begin(streams[0]));
    for (uint32_t i = 0; i < registrations; i++) run_call(context, m, 0, streams[0]);
    CHECK_RESULT(ONEHOP_ERR_TOO_LARGE,
                 ranks_all_reduce(context, slot_of(m, SHARED, 0), slot_of(m, SHARED, 1), COUNT,
                                  ONEHOP_FLOAT32, ONEHOP_2SHOT_PULL, streams[0]));
    CHECK_OK(onehop_host_stream_capture_end(streams[0], &graphs[0]));
    CHECK_OK(onehop_capture_end(context));
    CHECK_INT(registrations, registrations_used(context));
    onehop_host_graph_destroy(graphs[0]);

    /* A capture that finds the table full takes over what a graph has meanwhile let go. */
    CHECK_OK(onehop_capture_begin(context));
    CHECK_OK(onehop_capture_end(context));
    CHECK_OK(onehop_capture_begin(context));
    CHECK_OK(onehop_host_stream_capture_begin(streams[0]));
    for (uint32_t i = 0; i < registrations; i++) run_call(context, m, 0, streams[0]);
    CHECK_OK(onehop_host_stream_capture_end(streams[0], &graphs[0]));
    CHECK_OK(onehop_capture_end(context));
    CHECK_OK(onehop_capture_begin(context));
    onehop_host_graph_destroy(graphs[0]);
    graphs[0] = record(context, m, streams[0]);
    CHECK_OK(onehop_capture_end(context));
    replay(context, m, graphs[0], streams[0], 20);
    ranks_barrier(context);
    if (processes) CHECK_INT(fds, count_fds());
    ranks_barrier(context);
    onehop_host_graph_destroy(graphs[0]);
    for (int i = 0; i < 2; i++) onehop_host_stream_destroy(streams[i]);
    memory_free(m);
    (void)rank;
    (void)world;
}

/* Registrations need not be neighbours, nor have the same numbers on all ranks. */
static void gaps(onehop_context *context, int rank, int world, void *argument) {
    static const uint32_t registrations[2][CALLS] = {{0, 2, 5, 6, 7, 8}, {1, 3, 4, 6, 7, 8}};
    memory *m = memory_make();
    onehop_stream stream;
    uint32_t registration;
    (void)world;
    (void)argument;
    CHECK_OK(onehop_host_stream_create(&stream));
    for (int i = 0; i < 6; i++)
        CHECK_OK(onehop_comm_registration_take(context->comm, &registration));
    for (int i = 0; i < 3; i++)
        CHECK_OK(onehop_comm_registration_release(context->comm, registrations[rank][i]));
    fill_inputs(m, rank, 0);
    CHECK_OK(onehop_capture_begin(context));
    onehop_host_graph *graph = record(context, m, stream);
    CHECK_OK(onehop_capture_end(context));
    check_rows(context, registrations[rank], true, 0);
    ranks_barrier(context);
    replay(context, m, graph, stream, 1);
    ranks_barrier(context);
    onehop_host_graph_destroy(graph);
    onehop_host_stream_destroy(stream);
    memory_free(m);
}

/* A graph that outlives a registration of one rank, which is empty then or belongs to another call:
 * an error on all ranks, and no access by addresses that may be gone. */
static void stale(bool taken_again) {
    onehop_context *contexts[2];
    onehop_stream streams[2];
    onehop_host_graph *graphs[2];
    memory *m[2];
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    config.device.kind = ONEHOP_DEVICE_HOST;
    config.timeout_ms = 20000;
    CHECK_OK(onehop_create_all(&config, 2, NULL, contexts));
    CHECK_OK(onehop_capture_begin_all(contexts, 2));
    for (int r = 0; r < 2; r++) {
        m[r] = memory_make();
        fill_inputs(m[r], r, 0);
        CHECK_OK(onehop_host_stream_create(&streams[r]));
        graphs[r] = record(contexts[r], m[r], streams[r]);
    }
    CHECK_OK(onehop_capture_end_all(contexts, 2));
    const void *in[2] = {slot_of(m[0], SHARED, 0), slot_of(m[1], SHARED, 0)};
    void *out[2] = {slot_of(m[0], SHARED, 1), slot_of(m[1], SHARED, 1)};
    uint32_t registration = 99;
    CHECK_OK(onehop_comm_registration_release(contexts[1]->comm, 0));
    if (taken_again) {
        CHECK_OK(onehop_comm_registration_take(contexts[1]->comm, &registration));
        CHECK_INT(0, registration);
        CHECK_OK(onehop_comm_registration_fill(contexts[1]->comm, registration, in, out));
    }
    for (int r = 0; r < 2; r++) CHECK_OK(onehop_host_graph_launch(graphs[r], streams[r]));
    for (int r = 0; r < 2; r++)
        CHECK_RESULT(ONEHOP_ERR_REGISTRATION, onehop_synchronize(contexts[r], streams[r]));
    for (int r = 0; r < 2; r++) {
        onehop_host_graph_destroy(graphs[r]);
        onehop_destroy(contexts[r]);
        onehop_host_stream_destroy(streams[r]);
        memory_free(m[r]);
    }
}

/* Graphs that are gone before their capture is registered, on all ranks or on one, and a capture
 * that ends with its stream: registered as others are, and given back by the next begin. */
static void gone_early(onehop_context *context, int rank, int world, void *argument) {
    memory *m = memory_make();
    onehop_stream stream, dropped;
    onehop_host_graph *graph = NULL;
    (void)world, (void)argument;
    CHECK_OK(onehop_host_stream_create(&stream));
    ranks_barrier(context);
    const int fds = count_fds(), mappings = count_mappings();
    ranks_barrier(context);
    for (int what = 0; what < 9; what++) {
        const bool early = what % 3 == 0 || (what % 3 == 1 && rank == 1);
        CHECK_OK(onehop_capture_begin(context));
        CHECK_INT(0, registrations_used(context));
        if (what % 3 == 2) {
            CHECK_OK(onehop_host_stream_create(&dropped));
            CHECK_OK(onehop_host_stream_capture_begin(dropped));
            for (size_t i = 0; i < CALLS; i++) run_call(context, m, i, dropped);
            onehop_host_stream_destroy(dropped);
        } else {
            graph = record(context, m, stream);
            if (early) onehop_host_graph_destroy(graph);
        }
        CHECK_INT(CALLS, registrations_used(context));
        CHECK_OK(onehop_capture_end(context));
        if (what % 3 != 2 && !early) onehop_host_graph_destroy(graph);
        ranks_barrier(context);
    }
    CHECK_OK(onehop_capture_begin(context));
    CHECK_INT(0, registrations_used(context));
    ranks_barrier(context);
    CHECK(count_fds() == fds && count_mappings() == mappings);
    ranks_barrier(context);
    graph = record(context, m, stream);
    CHECK_OK(onehop_capture_end(context));
    replay(context, m, graph, stream, 3);
    ranks_barrier(context);
    onehop_host_graph_destroy(graph);
    onehop_host_stream_destroy(stream);
    memory_free(m);
}

/* Refused while a stream is captured: no registration is taken, nothing is recorded. 1shot_pull in
 * place cannot read the captured memory, and goes over the workspace unless that is asked for by
 * name. */
static void refusals(onehop_context *context, int rank, int world, void *argument) {
    memory *m = memory_make();
    float *in = slot_of(m, SHARED, 0), *out = slot_of(m, SHARED, 1);
    onehop_stream stream;
    onehop_host_graph *graph;
    onehop_stats before, after;
    onehop_call named = ONEHOP_CONFIG_INIT(onehop_call);
    (void)argument;
    named.algorithm = ONEHOP_1SHOT_PULL;
    named.source = ONEHOP_SOURCE_GRAPH;
    CHECK_OK(onehop_host_stream_create(&stream));
    CHECK_OK(onehop_capture_begin(context));
    CHECK_OK(onehop_host_stream_capture_begin(stream));
    CHECK_OK(onehop_get_stats(context, &before));
    for (int a = ONEHOP_1SHOT_PULL; a <= ONEHOP_2SHOT_PULL; a++) {
        CHECK_RESULT(ONEHOP_ERR_OVERLAP,
                     ranks_all_reduce(context, in, in + 4, COUNT, ONEHOP_FLOAT32,
                                      (onehop_algorithm)a, stream));
        CHECK_RESULT(ONEHOP_ERR_OVERLAP,
                     ranks_all_reduce(context, in + COUNT - 4, in, COUNT, ONEHOP_FLOAT32,
                                      (onehop_algorithm)a, stream));
    }
    CHECK_RESULT(ONEHOP_ERR_ALGORITHM, onehop_all_reduce(context, in, in, COUNT, ONEHOP_FLOAT32,
                                                         ONEHOP_SUM, &named, stream));
    CHECK_CONTAINS("out of place only", onehop_last_error());
    CHECK_OK(onehop_get_stats(context, &after));
    CHECK(before.calls == after.calls && after.registrations_used == 0);
    CHECK_OK(ranks_all_reduce(context, in, in, COUNT, ONEHOP_FLOAT32, ONEHOP_1SHOT_PULL, stream));
    CHECK_INT(0, registrations_used(context));
    CHECK_OK(ranks_all_reduce(context, in, out, COUNT, ONEHOP_FLOAT32, ONEHOP_2SHOT_PULL, stream));
    CHECK_OK(onehop_host_stream_capture_end(stream, &graph));
    CHECK_OK(onehop_capture_end(context));
    for (int round = 0; round < 3; round++) { /* the sum, and W times that */
        for (size_t k = 0; k < COUNT; k++) in[k] = value_of(rank, 0, k, round);
        CHECK_OK(onehop_host_graph_launch(graph, stream));
        CHECK_OK(onehop_synchronize(context, stream));
        for (size_t k = 0; k < COUNT; k++) {
            float sum = 0;
            for (int r = 0; r < world; r++) sum += value_of(r, 0, k, round);
            CHECK(in[k] == sum && out[k] == (float)world * sum);
        }
    }
    ranks_barrier(context);
    onehop_host_graph_destroy(graph);
    onehop_host_stream_destroy(stream);
    memory_free(m);
}

/* A line for each rank's capture in which calls are staged, none for others. */
static void count_line(void *user, onehop_log_level level, const char *line) {
    *(int *)user += level == ONEHOP_LOG_INFO && strstr(line, "go over the workspace") != NULL;
}

static void one_line(void) {
    enum {
        W = 3
    };
    onehop_context *contexts[W];
    onehop_stream streams[W];
    onehop_host_graph *graphs[W];
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    int lines = 0;
    config.device.kind = ONEHOP_DEVICE_HOST;
    CHECK(setenv("ONEHOP_LOG", "info", 1) == 0);
    onehop_set_log(count_line, &lines);
    CHECK_OK(onehop_create_all(&config, W, NULL, contexts));
    memory *m = memory_make();
    for (int r = 0; r < W; r++) CHECK_OK(onehop_host_stream_create(&streams[r]));
    for (int staged = 0; staged < 2; staged++) {
        CHECK_OK(onehop_capture_begin_all(contexts, W));
        for (int r = 0; r < W; r++) {
            CHECK_OK(onehop_host_stream_capture_begin(streams[r]));
            for (size_t i = 0; i < 4; i++)
                CHECK_OK(ranks_all_reduce(contexts[r], slot_of(m, SHARED, 2),
                                          slot_of(m, staged && i ? CROOKED : SHARED, (size_t)r + 4),
                                          COUNT, ONEHOP_FLOAT32, ONEHOP_2SHOT_PULL, streams[r]));
            CHECK_OK(onehop_host_stream_capture_end(streams[r], &graphs[r]));
        }
        CHECK_OK(onehop_capture_end_all(contexts, W));
        CHECK_INT(staged ? W : 0, lines);
        for (int r = 0; r < W; r++) onehop_host_graph_destroy(graphs[r]);
    }
    for (int r = 0; r < W; r++) {
        onehop_destroy(contexts[r]);
        onehop_host_stream_destroy(streams[r]);
    }
    onehop_set_log(NULL, NULL);
    CHECK(setenv("ONEHOP_LOG", "error", 1) == 0);
    memory_free(m);
}

/* Captures that differ are refused on all ranks; their registrations stay empty, and go with the
 * graph. */
static void unequal(onehop_context *context, int rank, int world, void *argument) {
    memory *m = memory_make();
    onehop_stream stream;
    onehop_host_graph *graph;
    (void)world;
    (void)argument;
    CHECK_OK(onehop_host_stream_create(&stream));
    for (int what = 0; what < 2; what++) {
        CHECK_OK(onehop_capture_begin(context));
        CHECK_OK(onehop_host_stream_capture_begin(stream));
        for (int i = 0; i < 2 + (what == 0 && rank == 1); i++) run_call(context, m, 0, stream);
        if (what == 1) /* the same call, on rank 1 in place */
            CHECK_OK(ranks_all_reduce(context, slot_of(m, SHARED, 0),
                                      slot_of(m, SHARED, rank == 1 ? 0 : 1), COUNT, ONEHOP_FLOAT32,
                                      ONEHOP_2SHOT_PULL, stream));
        CHECK_OK(onehop_host_stream_capture_end(stream, &graph));
        CHECK_RESULT(ONEHOP_ERR_MISMATCH, onehop_capture_end(context));
        CHECK(registrations_used(context) >= 2);
        for (uint32_t i = 0; i < 3; i++) CHECK_INT(0, row_at(context, i)->tag);
        onehop_host_graph_destroy(graph);
    }
    CHECK_OK(onehop_capture_begin(context));
    CHECK_INT(0, registrations_used(context));
    graph = record(context, m, stream);
    CHECK_OK(onehop_capture_end(context));
    replay(context, m, graph, stream, 0);
    ranks_barrier(context);
    onehop_host_graph_destroy(graph);
    onehop_host_stream_destroy(stream);
    memory_free(m);
}

/* ---- failures of one rank -------------------------------------------------------------------- */

static rlim_t set_limit(int which, rlim_t soft) {
    struct rlimit limit;
    CHECK(getrlimit(which, &limit) == 0);
    const rlim_t before = limit.rlim_cur;
    limit.rlim_cur = soft;
    CHECK(setrlimit(which, &limit) == 0);
    return before;
}

static rlim_t used_addresses(void) {
    unsigned long pages = 0;
    FILE *file = fopen("/proc/self/statm", "re");
    CHECK(file && fscanf(file, "%lu", &pages) == 1);
    fclose(file);
    return (rlim_t)pages * PAGE;
}

static rlim_t next_descriptor(void) {
    const int fd = dup(0);
    CHECK(fd >= 0);
    close(fd);
    return (rlim_t)fd;
}

/* Rank 1 has no addresses left for a large file, or but one descriptor: all ranks stage, and say
 * so. */
static void one_cannot_map(onehop_context *context, int rank, int world, void *argument) {
    const size_t large = (size_t)1 << 30;
    const onehop_device device = {ONEHOP_DEVICE_HOST, 0};
    const int starved = *(const int *)argument;
    onehop_stream stream;
    onehop_host_graph *graph;
    float *in;
    (void)world;
    CHECK_OK(onehop_mem_alloc(device, large, (void **)&in));
    CHECK_OK(onehop_host_stream_create(&stream));
    for (size_t k = 0; k < COUNT; k++) in[k] = value_of(rank, 0, k, 0);
    const int fds = count_fds(), mappings = count_mappings();
    CHECK_OK(onehop_capture_begin(context));
    CHECK_OK(onehop_host_stream_capture_begin(stream));
    CHECK_OK(ranks_all_reduce(context, in, in + 2 * COUNT + 8, COUNT, ONEHOP_FLOAT32,
                              ONEHOP_1SHOT_PULL, stream));
    CHECK_OK(onehop_host_stream_capture_end(stream, &graph));
    rlim_t before = 0;
    if (rank == 1)
        before = set_limit(starved, starved == RLIMIT_AS ? used_addresses() + large / 2
                                                         : next_descriptor() + 1);
    ranks_barrier(context);
    CHECK_OK(onehop_capture_end(context));
    if (rank == 1) set_limit(starved, before);
    CHECK_INT(OH_REGISTRATION_STAGED, row_at(context, 0)->mode);
    CHECK_INT(fds, count_fds());
    CHECK_OK(onehop_host_graph_launch(graph, stream));
    CHECK_OK(onehop_synchronize(context, stream));
    CHECK(in[2 * COUNT + 8] == value_of(0, 0, 0, 0) + value_of(1, 0, 0, 0));
    onehop_host_graph_destroy(graph);
    CHECK_OK(onehop_capture_begin(context));
    CHECK(count_fds() == fds && count_mappings() == mappings);
    CHECK_OK(onehop_capture_end(context));
    ranks_barrier(context);
    onehop_host_stream_destroy(stream);
    onehop_mem_free(in);
}

/* ---- addresses that the caller has ----------------------------------------------------------- */

static float *published[MAX_RANKS];

static void mapped_by_caller(onehop_context *context, int rank, int world, void *argument) {
    memory *m = memory_make();
    onehop_stream stream;
    onehop_captured_input inputs[4];
    const void *in[2 * MAX_RANKS];
    void *out[2 * MAX_RANKS];
    size_t count = 99;
    (void)argument;
    CHECK_OK(onehop_host_stream_create(&stream));
    fill_inputs(m, rank, 0);
    published[rank] = slot_of(m, SHARED, 0);
    CHECK_RESULT(ONEHOP_ERR_STATE, onehop_capture_inputs(context, NULL, 0, &count));
    CHECK_OK(onehop_capture_begin(context));
    CHECK_OK(onehop_host_stream_capture_begin(stream));
    run_call(context, m, 0, stream);
    CHECK_OK(ranks_all_reduce(context, slot_of(m, HEAP, 0), slot_of(m, HEAP, 1), COUNT,
                              /* takes no registration */
                              ONEHOP_FLOAT32, ONEHOP_1SHOT_PUSH, stream));
    run_call(context, m, 1, stream);
    onehop_host_graph *graph;
    CHECK_OK(onehop_host_stream_capture_end(stream, &graph));
    CHECK_RESULT(ONEHOP_ERR_NULL, onehop_capture_inputs(context, NULL, 1, &count));
    CHECK_OK(onehop_capture_inputs(context, NULL, 0, &count));
    CHECK_INT(2, count);
    CHECK_OK(onehop_capture_inputs(context, inputs, 1, &count));
    CHECK(count == 2 && inputs[0].in == slot_of(m, SHARED, 0) &&
          inputs[0].out == slot_of(m, SHARED, 1) && inputs[0].bytes == COUNT * sizeof(float));
    CHECK_OK(onehop_capture_inputs(context, inputs, 4, &count));
    CHECK(inputs[1].in == slot_of(m, FILES, 2));
    ranks_barrier(context);
    for (int i = 0; i < 2; i++)
        for (int r = 0; r < world; r++) {
            in[i * world + r] = published[r];
            out[i * world + r] = (char *)published[r] + STRIDE;
        }
    /* Wrong arguments of one rank: all refuse and go on capturing. */
    CHECK_RESULT(ONEHOP_ERR_ARGUMENT,
                 onehop_capture_end_mapped(context, in, out, rank == 1 ? 1 : 2));
    CHECK_RESULT(ONEHOP_ERR_NULL,
                 onehop_capture_end_mapped(context, in, rank == 0 ? NULL : out, 2));
    in[1] = rank == 1 ? (const char *)in[1] + 4 : in[1];
    CHECK_RESULT(ONEHOP_ERR_ALIGNMENT, onehop_capture_end_mapped(context, in, out, 2));
    in[1] = rank == 1 ? NULL : published[1];
    CHECK_RESULT(ONEHOP_ERR_NULL, onehop_capture_end_mapped(context, in, out, 2));
    in[1] = published[1];
    CHECK_OK(onehop_capture_end_mapped(context, in, out, 2));
    CHECK_RESULT(ONEHOP_ERR_STATE, onehop_capture_end_mapped(context, in, out, 2));
    for (uint32_t i = 0; i < 2; i++) {
        const oh_registration *registration = row_at(context, i);
        CHECK(registration->mode == OH_REGISTRATION_DIRECT &&
              registration->tag == context->comm->registration_tags[i]);
        for (int r = 0; r < world; r++)
            CHECK(registration->in[r] == (uintptr_t)published[r] &&
                  registration->out[r] == (uintptr_t)published[r] + STRIDE);
    }
    ranks_barrier(context);
    onehop_host_graph_destroy(graph);
    CHECK_OK(onehop_capture_begin(context));
    CHECK_INT(0, registrations_used(context));
    CHECK_OK(onehop_capture_end_mapped(context, NULL, NULL, 0)); /* nothing captured */
    onehop_host_stream_destroy(stream);
    ranks_barrier(context);
    memory_free(m);
}

/* ---- how long it takes ----------------------------------------------------------------------- */

enum {
    MANY = 1000,
    MANY_FILES = 40 /* more than go in two rounds of descriptors */
};

/* A capture after another, each released before the next: what they held is there again. */
static void thousand_captures(onehop_context *context, int rank, int world, void *argument) {
    const int captures = HARNESS_SANITIZED ? 100 : 1000;
    memory *m = memory_make();
    onehop_stream stream;
    int fds = 0, mappings = 0;
    (void)argument;
    CHECK_OK(onehop_host_stream_create(&stream));
    for (int i = 0; i < captures; i++) {
        onehop_host_graph *graph;
        const size_t which = (size_t)i % 4; /* shared, files, heap, files */
        CHECK_OK(onehop_capture_begin(context));
        CHECK_INT(0, registrations_used(context));
        if (i == 10) fds = count_fds(), mappings = count_mappings();
        CHECK_OK(onehop_host_stream_capture_begin(stream));
        run_call(context, m, which, stream);
        CHECK_OK(onehop_host_stream_capture_end(stream, &graph));
        CHECK_OK(onehop_capture_end(context));
        CHECK_INT(1, registrations_used(context));
        if (i % 16 < 4) {
            fill_inputs(m, rank, i);
            CHECK_OK(onehop_host_graph_launch(graph, stream));
            CHECK_OK(onehop_synchronize(context, stream));
            const float *out = output_of(m, &batch[which], which, rank);
            for (size_t k = 0; k < COUNT; k++) {
                float sum = 0;
                for (int r = 0; r < world; r++) sum += value_of(r, which, k, i);
                CHECK(out[k] == sum);
            }
        }
        onehop_host_graph_destroy(graph);
    }
    CHECK_OK(onehop_capture_begin(context));
    CHECK(registrations_used(context) == 0 && count_fds() == fds && count_mappings() == mappings);
    CHECK_OK(onehop_capture_end(context));
    ranks_barrier(context);
    onehop_host_stream_destroy(stream);
    memory_free(m);
}

static onehop_host_graph *record_many(onehop_context *context, char *const *memories, int files,
                                      onehop_stream stream) {
    onehop_host_graph *graph;
    CHECK_OK(onehop_host_stream_capture_begin(stream));
    for (int i = 0; i < MANY; i++) {
        char *at = memories[i % files] + 256 * (size_t)i;
        CHECK_OK(
            ranks_all_reduce(context, at, at + 128, 32, ONEHOP_FLOAT32, ONEHOP_2SHOT_PULL, stream));
    }
    CHECK_OK(onehop_host_stream_capture_end(stream, &graph));
    return graph;
}

/* 1000 calls, in one allocation or spread over 40; the best of five, as other work may be going
 * on. */
static void many(onehop_context *context, int rank, int world, void *argument) {
    const int files = *(const int *)argument;
    const onehop_device device = {ONEHOP_DEVICE_HOST, 0};
    onehop_stream stream;
    char *memories[MANY_FILES];
    double best = 1e9;
    (void)world;
    for (int i = 0; i < files; i++)
        CHECK_OK(onehop_mem_alloc(device, 256 * MANY, (void **)&memories[i]));
    CHECK_OK(onehop_host_stream_create(&stream));
    for (int i = 0; i < 5; i++) {
        CHECK_OK(onehop_capture_begin(context));
        onehop_host_graph *graph = record_many(context, memories, files, stream);
        ranks_barrier(context);
        const double start = seconds_now();
        CHECK_OK(onehop_capture_end(context));
        if (seconds_now() - start < best) best = seconds_now() - start;
        for (uint32_t k = 0; k < MANY; k++)
            CHECK_INT(OH_REGISTRATION_DIRECT, row_at(context, k)->mode);
        CHECK_INT(MANY, registrations_used(context));
        onehop_host_graph_destroy(graph);
    }
    if (rank == 0) printf("%d calls in %d files registered in %.1f ms\n", MANY, files, best * 1e3);
    CHECK(best < (HARNESS_SANITIZED ? 5 : 0.5)); /* 50 ms are wanted, on a machine of one's own */
    onehop_host_stream_destroy(stream);
    ranks_barrier(context);
    for (int i = 0; i < files; i++) onehop_mem_free(memories[i]);
}

int main(void) {
    ranks_layout layouts[] = {RANKS_AS_THREADS, RANKS_AS_PROCESSES};
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    watchdog(100);
    CHECK(setenv("ONEHOP_LOG", "error", 1) == 0);
    in_one_thread();
    one_line();
    stale(false);
    stale(true);
    for (int i = 0; i < 2; i++) {
        ranks_run(layouts[i], 2, NULL, kinds, &layouts[i]);
        ranks_run(layouts[i], 3, NULL, kinds, &layouts[i]);
        config.max_registrations = 32;
        ranks_run(layouts[i], 2, &config, recycling, &layouts[i]);
        ranks_run(layouts[i], 3, NULL, unequal, NULL);
        ranks_run(layouts[i], 2, NULL, refusals, NULL);
    }
    ranks_layout pairs = RANKS_IN_PAIRS;
    ranks_run(pairs, 4, NULL, kinds, &pairs);
    ranks_run(RANKS_AS_PROCESSES, 3, NULL, same_address, NULL);
    ranks_run(RANKS_AS_PROCESSES, 2, NULL, gone_early, NULL);
    ranks_run(RANKS_AS_PROCESSES, 2, NULL, thousand_captures, NULL);
    ranks_run(RANKS_AS_THREADS, 2, NULL, gaps, NULL);
    ranks_run(RANKS_AS_THREADS, 3, NULL, mapped_by_caller, NULL);
    int starved = RLIMIT_NOFILE;
    ranks_run(RANKS_AS_PROCESSES, 2, NULL, one_cannot_map, &starved);
    starved = RLIMIT_AS;
    if (!HARNESS_SANITIZED) ranks_run(RANKS_AS_PROCESSES, 2, NULL, one_cannot_map, &starved);
    config.max_registrations = MANY;
    for (int files = 1; files <= MANY_FILES; files += MANY_FILES - 1)
        ranks_run(RANKS_AS_PROCESSES, 2, &config, many, &files);
    return 0;
}
