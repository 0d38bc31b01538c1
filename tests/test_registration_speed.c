/* Property: the registration of a capture of 1000 calls, in one allocation or spread over 40, is
 * direct and takes less than half a second. */
/* labels: quick */
#include "registration_kit.h"

enum {
    MANY = 1000,
    MANY_FILES = 40 /* more than go in two rounds of descriptors */
};

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
    watchdog(100);
    CHECK(setenv("ONEHOP_LOG", "error", 1) == 0);
    config.max_registrations = MANY;
    for (int files = 1; files <= MANY_FILES; files += MANY_FILES - 1)
        ranks_run(RANKS_AS_PROCESSES, 2, &config, many, &files);
    return 0;
}
