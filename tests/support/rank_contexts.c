/* See rank_contexts.h. */
#include "rank_contexts.h"

#include "context/context.h"
#include "../harness.h"

typedef struct start {
    onehop_config config;
    onehop_group **groups; /* threads; NULL: by name */
    ranks_fn fn;
    void *argument;
} start;

void ranks_barrier(onehop_context *context) {
    CHECK_OK(onehop_group_barrier(context->group));
}

void ranks_expect_idle(onehop_context *context) {
    ranks_barrier(context);
    const oh_regions *p = &context->regions;
    const char *region = (const char *)context->buffers[context->rank].ptr + p->push;
    const size_t words = 2 * (size_t)context->world * p->slot_bytes / 8;
    for (size_t i = 0; i < words; i++) {
        uint64_t word;
        memcpy(&word, region + 8 * i, 8);
        if (word != UINT64_MAX)
            FAIL("rank %d: bytes %zu.. of its push slots hold 0x%llx: not armed", context->rank,
                 8 * i, (unsigned long long)word);
    }
    ranks_barrier(context);
}

static void rank_main(int rank, int world_size, void *argument) {
    const start *s = argument;
    onehop_config config = s->config;
    onehop_context *context;
    if (s->groups) {
        config.group = s->groups[rank];
    } else {
        config.rank = rank;
        config.world_size = world_size;
    }
    CHECK_OK(onehop_create(&config, &context));
    s->fn(context, rank, world_size, s->argument);
    CHECK_OK(onehop_status(context, NULL));
    ranks_expect_idle(context);
    onehop_destroy(context);
}

typedef struct pair {
    int first, world_size;
    void *argument;
} pair;

static void thread_of_pair(int thread, int threads, void *argument) {
    const pair *p = argument;
    (void)threads;
    rank_main(p->first + thread, p->world_size, p->argument);
}

static void pair_main(int process, int processes, void *argument) {
    pair p = {2 * process, 2 * processes, argument};
    run_threads(2, thread_of_pair, &p);
}

void ranks_run(ranks_layout layout, int world_size, const onehop_config *base, ranks_fn fn,
               void *argument) {
    static unsigned number;
    char name[64];
    onehop_group *groups[ONEHOP_MAX_RANKS];
    start s = {ONEHOP_CONFIG_INIT(onehop_config), NULL, fn, argument};
    if (base) s.config = *base;
    s.config.struct_size = sizeof s.config;
    s.config.device.kind = ONEHOP_DEVICE_HOST;
    if (!s.config.timeout_ms) s.config.timeout_ms = 60000;
    if (layout != RANKS_AS_THREADS) {
        snprintf(name, sizeof name, "onehop-test-%ld-%u", (long)getpid(), number++);
        s.config.name = name;
        if (layout == RANKS_AS_PROCESSES)
            run_ranks(world_size, rank_main, &s);
        else
            run_ranks(world_size / 2, pair_main, &s);
        return;
    }
    CHECK_OK(onehop_group_open_local(world_size, groups));
    s.groups = groups;
    run_threads(world_size, rank_main, &s);
    for (int r = 0; r < world_size; r++) onehop_group_close(groups[r]);
}

onehop_result ranks_all_reduce(onehop_context *context, const void *in, void *out, size_t count,
                               onehop_dtype dtype, onehop_algorithm algorithm,
                               onehop_stream stream) {
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    if (algorithm == ONEHOP_ALGORITHM_AUTO)
        return onehop_all_reduce(context, in, out, count, dtype, ONEHOP_SUM, NULL, stream);
    call.algorithm = algorithm;
    return onehop_all_reduce(context, in, out, count, dtype, ONEHOP_SUM, &call, stream);
}
