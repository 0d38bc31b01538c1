/* Property: registration keeps its promises at the limits. If a rank has no addresses or
 * descriptors left, all ranks stage, and each says so. A thousand captures leave nothing behind. A
 * thousand calls register in milliseconds. */
/* labels: quick */
#include "registration_kit.h"

#include <sys/resource.h>

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
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    int starved = RLIMIT_NOFILE;
    watchdog(100);
    CHECK(setenv("ONEHOP_LOG", "error", 1) == 0);
    ranks_run(RANKS_AS_PROCESSES, 2, NULL, thousand_captures, NULL);
    ranks_run(RANKS_AS_PROCESSES, 2, NULL, one_cannot_map, &starved);
    starved = RLIMIT_AS;
    if (!HARNESS_SANITIZED) ranks_run(RANKS_AS_PROCESSES, 2, NULL, one_cannot_map, &starved);
    config.max_registrations = MANY;
    for (int files = 1; files <= MANY_FILES; files += MANY_FILES - 1)
        ranks_run(RANKS_AS_PROCESSES, 2, &config, many, &files);
    return 0;
}
