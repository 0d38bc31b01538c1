/* Property: if a rank that is a thread of this process does not come to a call, the error says how
 * CUDA's lazy loading of kernels could have held it up; it does not say so where lazy loading is
 * off. */
/* labels: timeout=60 */
#include "gpu_ranks.h"

static void one_calls(gpu_rank *ranks, int here, void *argument) {
    const bool *hinted = argument;
    onehop_failure failure;
    void *data = gpu_alloc(&ranks[0], 4096);
    (void)here;
    gpu_barrier(&ranks[0]);
    if (ranks[0].rank == 0) {
        CHECK_OK(onehop_all_reduce(ranks[0].context, data, data, 1000, ONEHOP_FLOAT32, ONEHOP_SUM,
                                   NULL, ranks[0].stream));
        CHECK_RESULT(ONEHOP_ERR_TIMEOUT, onehop_synchronize(ranks[0].context, ranks[0].stream));
        onehop_status(ranks[0].context, &failure);
        CHECK_CONTAINS("within the deadline", failure.text);
        CHECK(!strstr(failure.text, "CUDA_MODULE_LOADING=EAGER") == !*hinted);
    }
    gpu_barrier(&ranks[0]);
    gpu_free(&ranks[0], data);
}

static void run(gpu_layout layout, const char *loading, bool hinted) {
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    config.timeout_ms = 500;
    const gpu_setup setup = {
        .layout = layout, .world = 2, .gpus = 1, .config = &config, .dies = true};
    if (loading)
        setenv("CUDA_MODULE_LOADING", loading, 1);
    else
        unsetenv("CUDA_MODULE_LOADING");
    gpu_run(&setup, one_calls, &hinted);
}

int main(void) {
    gpu_main(60, 1);
    run(GPU_THREADS, NULL, true);
    run(GPU_THREADS, "LAZY", true);
    run(GPU_SINGLE, NULL, true);
    run(GPU_THREADS, "EAGER", false);
    return 0;
}
