/* Property: a capture that cannot be registered as asked ends alike on all ranks. Calls that are
 * refused while a stream is captured take no registration; captures that differ between ranks are
 * refused on all; where one rank cannot map a peer's memory, all ranks stage. */
/* labels: quick */
#include "registration_kit.h"

#include <sys/resource.h>

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

int main(void) {
    ranks_layout layouts[] = {RANKS_AS_THREADS, RANKS_AS_PROCESSES};
    watchdog(100);
    CHECK(setenv("ONEHOP_LOG", "error", 1) == 0);
    for (int i = 0; i < 2; i++) {
        ranks_run(layouts[i], 3, NULL, unequal, NULL);
        ranks_run(layouts[i], 2, NULL, refusals, NULL);
    }
    int starved = RLIMIT_NOFILE;
    ranks_run(RANKS_AS_PROCESSES, 2, NULL, one_cannot_map, &starved);
    starved = RLIMIT_AS;
    if (!HARNESS_SANITIZED) ranks_run(RANKS_AS_PROCESSES, 2, NULL, one_cannot_map, &starved);
    return 0;
}
