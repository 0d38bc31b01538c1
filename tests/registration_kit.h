/* What the tests of captured memory share: memory of several kinds, a batch of calls over it, and a
 * look into the registrations that the batch has. */
#ifndef OH_TEST_REGISTRATION_KIT_H
#define OH_TEST_REGISTRATION_KIT_H

#include "capture/registration.h"
#include "support/rank_contexts.h"

#include "harness.h"

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

static inline void map_page(char *at, int *fd_out) {
    *fd_out = memfd_create("test", MFD_CLOEXEC);
    CHECK(*fd_out >= 0 && ftruncate(*fd_out, PAGE) == 0);
    CHECK(mmap(at, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, *fd_out, 0) == at);
}

static inline memory *memory_make(void) {
    memory *m = malloc(sizeof *m);
    const onehop_device device = {ONEHOP_DEVICE_HOST, 0};
    CHECK_OK(onehop_mem_alloc(device, REGION + STRIDE, (void **)&m->shared));
    m->heap = aligned_alloc(16, REGION);
    m->files = mmap(NULL, REGION, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(m->heap && m->files != MAP_FAILED);
    for (size_t i = 0; i < OH_LENGTH(m->fds); i++) map_page(m->files + i * PAGE, &m->fds[i]);
    return m;
}

static inline void memory_free(memory *m) {
    for (size_t i = 0; i < OH_LENGTH(m->fds); i++) close(m->fds[i]);
    CHECK(munmap(m->files, REGION) == 0);
    free(m->heap);
    onehop_mem_free(m->shared);
    free(m);
}

static inline float *slot_of(const memory *m, place p, size_t slot) {
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
static inline bool expect_direct(const call *c, bool one_process) {
    if (c->in == CROOKED || c->out == CROOKED) return false;
    if (one_process) return true;
    return c->in != HEAP && c->odd_rank < 0 &&
           (c->out != HEAP || c->algorithm == ONEHOP_1SHOT_PULL);
}

static inline float *input_of(const memory *m, const call *c, size_t i, int rank) {
    return slot_of(m, rank == c->odd_rank ? HEAP : c->in, 2 * i);
}

static inline float *output_of(const memory *m, const call *c, size_t i, int rank) {
    return c->in_place ? input_of(m, c, i, rank) : slot_of(m, c->out, 2 * i + 1);
}

static inline float value_of(int rank, size_t call_index, size_t element, int round) {
    return (float)((rank * 7 + (int)call_index * 3 + (int)element + round) % 61);
}

static inline void fill_inputs(const memory *m, int rank, int round) {
    for (size_t i = 0; i < CALLS; i++)
        for (size_t k = 0; k < COUNT; k++)
            input_of(m, &batch[i], i, rank)[k] = value_of(rank, i, k, round);
}

static inline void check_outputs(const memory *m, int rank, int world, int round) {
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

static inline void run_call(onehop_context *context, const memory *m, size_t i,
                            onehop_stream stream) {
    const call *c = &batch[i];
    const int rank = onehop_rank(context);
    CHECK_OK(ranks_all_reduce(context, input_of(m, c, i, rank), output_of(m, c, i, rank), COUNT,
                              ONEHOP_FLOAT32, c->algorithm, stream));
}

static inline onehop_host_graph *record(onehop_context *context, const memory *m,
                                        onehop_stream stream) {
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

static inline uint32_t registrations_used(const onehop_context *context) {
    onehop_stats stats;
    CHECK_OK(onehop_get_stats(context, &stats));
    return stats.registrations_used;
}

/* How the calls of all captures so far were registered. */
static inline void check_row_counts(const onehop_context *context, bool one_process,
                                    size_t captures) {
    onehop_stats stats;
    size_t direct = 0;
    for (size_t i = 0; i < CALLS; i++) direct += expect_direct(&batch[i], one_process);
    CHECK_OK(onehop_get_stats(context, &stats));
    CHECK_INT(captures * direct, stats.registrations_direct);
    CHECK_INT(captures * (CALLS - direct), stats.registrations_staged);
}

static const uint32_t first_rows[CALLS] = {0, 1, 2, 3, 4, 5};

/* The registrations of a batch: modes, and the peers' inputs as seen here. */
static inline void check_rows(const onehop_context *context, const uint32_t *registrations,
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
static inline void check_row_outputs(onehop_context *context, const memory *m, bool one_process) {
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

static inline int count_mappings(void) {
    char line[512];
    int count = 0;
    FILE *file = fopen("/proc/self/maps", "re");
    CHECK(file != NULL);
    while (fgets(line, sizeof line, file)) count += strstr(line, "/memfd:") != NULL;
    fclose(file);
    return count;
}

static inline void replay(onehop_context *context, const memory *m, onehop_host_graph *graph,
                          onehop_stream stream, int round) {
    fill_inputs(m, context->rank, round);
    CHECK_OK(onehop_host_graph_launch(graph, stream));
    CHECK_OK(onehop_synchronize(context, stream));
    check_outputs(m, context->rank, context->world, round);
}

#endif
