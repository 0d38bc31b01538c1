/* Property: the buffers of a context have the sizes that its config asks for; what is not asked for
 * follows max_bytes, and on GPUs the longest messages that the table sends that way. */
/* labels: quick */
#include "tuning_kit.h"

/* Buffers of GPUs follow the longest messages that go that way. */
static void sizes_on_gpus(void) {
    static const char text[] = CUDA "2 eager 3M 1shot_push - 3 64\n"
                                    "2 any 100M-any nccl - - -\n"
                                    "2 graph 1M 1shot_push - 3 64\n"
                                    "2 any any 2shot_pull workspace 3 64\n";
    static const struct {
        size_t max_bytes;
        bool uncap;
        size_t usual, push, pull; /* KiB */
    } cases[] = {
        {0, false, 8192, 3072, 32768}, /* what is usual, for all-gathers */
        {0, false, 2048, 2048, 32768},    {0, true, 2048, 3072, 102400},   /* nccl has the rest */
        {8192, false, 1024, 3072, 16384}, {2048, false, 1024, 2048, 4096}, /* twice as much */
        {1, false, 8192, 64, 1024},                                        /* the least */
    };
    onehop_layout usual = {.pull_bytes = (size_t)32 << 20};
    oh_dispatch d;
    size_t push, pull;
    init_text(&d, text, 90, 2, true);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        usual.push_bytes = cases[i].usual << 10;
        oh_dispatch_sizes(&d, cases[i].max_bytes << 10, cases[i].uncap, &usual, &push, &pull);
        CHECK_INT(cases[i].push << 10, push);
        CHECK_INT(cases[i].pull << 10, pull);
    }
    init_text(&d, CUDA "4 any 6M 2shot_push - 3 64\n4 any any 2shot_pull workspace 3 64\n", 90, 4,
              false);
    usual.push_bytes = 1 << 25;
    oh_dispatch_sizes(&d, 0, false, &usual, &push, &pull);
    if (oh_kernel_find(ONEHOP_DEVICE_CUDA, OH_PLAIN, ONEHOP_2SHOT_PUSH, ONEHOP_FLOAT32, 4) >= 0)
        CHECK_INT(3 << 20, push); /* two shards */
    init_text(&d, text, 90, 2, false);
    oh_dispatch_sizes(&d, 0, true, &usual, &push, &pull);
    CHECK_INT(OH_DISPATCH_MAX_BYTES, pull);
    oh_dispatch_sizes(&d, 2000001, false, &usual, &push, &pull);
    CHECK_INT(2002944, push); /* whole pages */
}

static void sizes(void) {
    static const struct {
        size_t max_bytes, push_bytes, pull_bytes; /* given */
        size_t push, pull;                        /* in force */
    } cases[] = {
        {0, 4096, 65536, 4096, 65536},
        {1 << 20, 8192, 0, 8192, 1 << 20},
        {100000, 0, 4096, 102400, 4096},
        {0, 0, 0, 1 << 20, 1 << 20},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
        onehop_context *contexts[2];
        onehop_stats stats;
        config.device.kind = ONEHOP_DEVICE_HOST;
        config.max_bytes = cases[i].max_bytes;
        config.push_bytes = cases[i].push_bytes;
        config.pull_bytes = cases[i].pull_bytes;
        config.flags = ONEHOP_FLAG_UNCAP; /* of no effect here */
        CHECK_OK(onehop_create_all(&config, 2, NULL, contexts));
        CHECK_OK(onehop_get_stats(contexts[1], &stats));
        CHECK_INT(cases[i].push, stats.push_bytes);
        CHECK_INT(cases[i].pull, stats.pull_bytes);
        CHECK(stats.symmetric_bytes >= 4 * cases[i].push + 2 * cases[i].pull);
        for (int r = 0; r < 2; r++) onehop_destroy(contexts[r]);
    }
}

int main(void) {
    watchdog(110);
    unsetenv("ONEHOP_TUNING");
    sizes_on_gpus();
    sizes();
    return 0;
}
