/* Property: an eager all-reduce of 4 KB costs at most 0.7 us more than the bare launch of an empty
 * kernel with programmatic dependent launch, in the same loop of two processes on two GPUs.
 *
 * Two processes that share the only GPU wait for each other's kernels too: under MPS the limit is 3
 * us; without MPS, where a call takes milliseconds, the test is skipped.
 *
 * A round is 200 calls issued back to back. `issue` is the host's time for them, `wall` the time
 * until the stream is idle. Rounds of both kinds alternate; the figures are medians over rounds,
 * the largest of the ranks. */
#include "gpu_test.h"

#include "context/context.h"

#include <sys/mman.h>
#include <sys/wait.h>

enum {
    ROUNDS = 101,
    CALLS = 200,
    COUNT = 2048 /* bf16: 4 KB */
};

static const char empty_ptx[] = ".version 8.0\n.target sm_90\n.address_size 64\n"
                                ".visible .entry empty() {\n griddepcontrol.wait;\n ret;\n}\n";

typedef struct figures {
    double issue[2], wall[2]; /* ns a call; [0] empty launch, [1] all_reduce */
    int gpus;
} figures;

static onehop_context *context;
static oh_device *device;
static oh_cu_stream stream;
static void *in, *out;
static oh_function empty;
static int gpus;

static void load_empty(void) {
    oh_cu_result (*load)(void **, const void *);
    oh_cu_result (*get)(void **, void *, const char *);
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *module;
    void *symbols[2] = {dlsym(library, "cuModuleLoadData"), dlsym(library, "cuModuleGetFunction")};
    memcpy(&load, &symbols[0], sizeof load);
    memcpy(&get, &symbols[1], sizeof get);
    DRIVER(load(&module, empty_ptx));
    DRIVER(get(&empty.handle, module, "empty"));
    empty.pdl = true;
}

static void set_up(int rank, const char *name) {
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    unsigned short values[COUNT];
    config.rank = rank;
    config.world_size = 2;
    config.name = name;
    config.device.kind = ONEHOP_DEVICE_CUDA;
    config.device.ordinal = rank % gpus;
    if (gpus == 1) config.flags = ONEHOP_FLAG_SHARE_GPU;
    config.timeout_ms = 5000;
    config.init_timeout_ms = 20000;
    if (onehop_create(&config, &context)) CHECK(!"onehop_create");
    device = context->device;
    DRIVER(gpu.cuCtxSetCurrent(oh_cuda_of(device)->context));
    DRIVER(oh_cu.cuStreamCreate(&stream, OH_CU_STREAM_NON_BLOCKING));
    OK(device->ops->local_alloc(device, sizeof values, &in));
    OK(device->ops->local_alloc(device, sizeof values, &out));
    for (int i = 0; i < COUNT; i++) values[i] = (unsigned short)(0x3f80 + (i + rank) % 64);
    OK(device->ops->copy(device, in, values, sizeof values));
    load_empty();
}

static void one_round(int kind, double *issue, double *wall) {
    oh_launch launch = {&empty, NULL, 0, 1, 32, stream};
    const uint64_t start = oh_clock_ns();
    for (int i = 0; i < CALLS; i++) {
        onehop_result result = kind ? onehop_all_reduce(context, in, out, COUNT, ONEHOP_BFLOAT16,
                                                        ONEHOP_SUM, NULL, stream)
                                    : device->ops->launch(device, &launch);
        if (result) CHECK(!"a call failed");
    }
    *issue = (double)(oh_clock_ns() - start) / CALLS;
    for (bool idle = false; !idle;)
        if (device->ops->stream_idle(device, stream, &idle)) CHECK(!"stream_idle");
    *wall = (double)(oh_clock_ns() - start) / CALLS;
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static bool under_mps(void) {
    oh_cu_device first;
    int mps = 0;
    DRIVER(oh_cu.cuDeviceGet(&first, 0));
    return !oh_cu.cuDeviceGetAttribute(&mps, OH_CU_DEVICE_MPS, first) && mps;
}

static int rank_main(int rank, const char *name, figures *mine) {
    double issue[2][ROUNDS], wall[2][ROUNDS];
    alarm(60);
    gpu_begin();
    gpus = oh_cuda_device_count() < 2 ? 1 : 2;
    if (gpus == 1 && !under_mps()) {
        if (rank == 0) printf("SKIPPED: needs two GPUs, or one under MPS\n");
        return SKIP_STATUS;
    }
    mine->gpus = gpus;
    set_up(rank, name);
    for (int round = -3; round < ROUNDS; round++)
        for (int kind = 0; kind < 2; kind++) {
            double i, w;
            OK(onehop_group_barrier(context->group));
            one_round(kind, &i, &w);
            if (round < 0) continue;
            issue[kind][round] = i;
            wall[kind][round] = w;
        }
    if (onehop_synchronize(context, stream)) CHECK(!"synchronize");
    for (int kind = 0; kind < 2; kind++) {
        qsort(issue[kind], ROUNDS, sizeof(double), ascending);
        qsort(wall[kind], ROUNDS, sizeof(double), ascending);
        mine->issue[kind] = issue[kind][ROUNDS / 2];
        mine->wall[kind] = wall[kind][ROUNDS / 2];
    }
    onehop_destroy(context);
    return 0;
}

static double larger(double a, double b) {
    return a > b ? a : b;
}

int main(void) {
    char name[64];
    figures *all = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int status = 0, worst = 0;
    CHECK(all != MAP_FAILED);
    snprintf(name, sizeof name, "gpu eager %d", (int)getpid());
    for (int rank = 0; rank < 2; rank++)
        if (fork() == 0) exit(rank_main(rank, name, &all[rank]));
    while (wait(&status) > 0)
        if (WEXITSTATUS(status) > worst || !WIFEXITED(status))
            worst = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
    if (worst) return worst;
    const double bare = larger(all[0].wall[0], all[1].wall[0]);
    const double call = larger(all[0].wall[1], all[1].wall[1]);
    printf("empty launch: issue %.0f ns, wall %.0f ns; all_reduce of 4 KB: issue %.0f ns, wall "
           "%.0f ns\n",
           larger(all[0].issue[0], all[1].issue[0]), bare, larger(all[0].issue[1], all[1].issue[1]),
           call);
    const double limit = all[0].gpus > 1 ? 700 : 3000; /* ns */
    printf("an eager call costs %.2f us, %.2f us more than the bare launch (limit %.2f%s)\n",
           call / 1000, (call - bare) / 1000, limit / 1000,
           all[0].gpus > 1 ? "" : ", on one GPU that two processes share under MPS");
    return call - bare > limit;
}
