/* Property: calls by source multicast, which the host device emulates, give the bits of the scalar
 * reference, eager and replayed, in windows and whole, for threads and processes. Whatever keeps
 * multicast off on one rank keeps it off on all. */
/* labels: quick timeout=120 */
#include "harness.h"
#include "reference.h"
#include "rank_contexts.h"

#include "context/context.h"
#include "device/cuda/cuda_device.h"

#define MAX 20011 /* elements: many chunks of a pull buffer of 8 KiB */

static const onehop_algorithm algorithms[] = {ONEHOP_1SHOT_PULL, ONEHOP_2SHOT_PULL};

static onehop_call over(onehop_algorithm algorithm) {
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    call.algorithm = algorithm;
    call.source = ONEHOP_SOURCE_MULTICAST;
    return call;
}

/* ---- results --------------------------------------------------------------------------------- */
typedef struct own {
    onehop_context *context;
    int rank, world;
    guarded in, out;
    unsigned char *want;
    uint64_t seed;
} own;

static void one(own *o, onehop_algorithm algorithm, onehop_dtype dtype, size_t count,
                bool in_place) {
    const size_t size = reference_element_bytes(dtype), bytes = count * size;
    const size_t off =
        (o->seed * 7 + (size_t)o->rank * 3) % (16 / size) * size * (o->seed % 3 == 0);
    void *out = guarded_place(&o->out, bytes, off);
    void *in = in_place ? out : guarded_place(&o->in, bytes, off);
    onehop_call call = over(algorithm);
    char what[120];
    if (o->seed % 2) call.blocks = 2 + (uint32_t)(o->seed % 5);
    snprintf(what, sizeof what, "%s, rank %d of %d, type %d, %zu elements, %s",
             onehop_algorithm_name(algorithm), o->rank, o->world, (int)dtype, count,
             in_place ? "in place" : "out of place");
    input_fill(in, INPUT_MIXED, o->seed, o->rank, 0, count, dtype);
    CHECK_OK(onehop_all_reduce(o->context, in, out, count, dtype, ONEHOP_SUM, &call, NULL));
    reference_of_inputs(o->want, INPUT_MIXED, o->seed, o->world, 0, count, dtype);
    expect_equal(o->want, out, count, dtype, what);
    guarded_check(&o->out, what);
    o->seed++;
}

static void results(onehop_context *context, int rank, int world, void *argument) {
    static const size_t counts[] = {1, 2, 7, 8, 33, 127, 1024, 1031, 4099, MAX};
    own o = {context,         rank, world, guarded_make(MAX * 4), guarded_make(MAX * 4),
             malloc(MAX * 4), 1};
    (void)argument;
    for (int d = ONEHOP_FLOAT32; d <= ONEHOP_BFLOAT16; d++)
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
            for (int a = 0; a < 2; a++) {
                one(&o, algorithms[a], (onehop_dtype)d, counts[i], i % 2);
                if (world <= 4) one(&o, algorithms[a], (onehop_dtype)d, counts[i], i % 2 == 0);
            }
    guarded_free(&o.in);
    guarded_free(&o.out);
    free(o.want);
}

static void matrix(void) {
    static const int worlds[] = {2, 3, 4, 5, 6, 7, 8, 16};
    onehop_config windows = ONEHOP_CONFIG_INIT(onehop_config);
    windows.pull_bytes = 8192;
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++) {
        if (HARNESS_SANITIZED && worlds[i] > 3 && worlds[i] != 5) continue;
        ranks_run(RANKS_AS_THREADS, worlds[i], &windows, results, NULL);
        if (worlds[i] <= 3) ranks_run(RANKS_AS_PROCESSES, worlds[i], NULL, results, NULL);
    }
}

/* ---- one thread for all ranks, a captured graph ---------------------------------------------- */
static void replays(void) {
    enum {
        W = 3,
        COUNT = 5003
    };
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    onehop_context *contexts[W];
    onehop_stream streams[W];
    onehop_host_graph *graphs[W];
    onehop_stats stats;
    static float in[W][COUNT], out[2][W][COUNT], want[COUNT];
    config.device.kind = ONEHOP_DEVICE_HOST;
    config.timeout_ms = 60000;
    CHECK_OK(onehop_create_all(&config, W, NULL, contexts));
    CHECK_OK(onehop_capture_begin_all(contexts, W));
    for (int r = 0; r < W; r++) {
        CHECK_OK(onehop_host_stream_create(&streams[r]));
        CHECK_OK(onehop_host_stream_capture_begin(streams[r]));
        for (int a = 0; a < 2; a++) {
            onehop_call call = over(algorithms[a]);
            CHECK_OK(onehop_all_reduce(contexts[r], in[r], out[a][r], COUNT, ONEHOP_FLOAT32,
                                       ONEHOP_SUM, &call, streams[r]));
        }
        CHECK_OK(onehop_host_stream_capture_end(streams[r], &graphs[r]));
    }
    CHECK_OK(onehop_capture_end_all(contexts, W));
    CHECK_OK(onehop_get_stats(contexts[0], &stats));
    CHECK_INT(0, stats.registrations_used); /* captured or not, it is staged */
    for (uint64_t replay = 0; replay < 4; replay++) {
        for (int r = 0; r < W; r++)
            input_fill(in[r], INPUT_REAL, replay, r, 0, COUNT, ONEHOP_FLOAT32);
        for (int r = 0; r < W; r++) CHECK_OK(onehop_host_graph_launch(graphs[r], streams[r]));
        for (int r = 0; r < W; r++) CHECK_OK(onehop_synchronize(contexts[r], streams[r]));
        reference_of_inputs(want, INPUT_REAL, replay, W, 0, COUNT, ONEHOP_FLOAT32);
        for (int r = 0; r < W; r++)
            for (int a = 0; a < 2; a++)
                expect_equal(want, out[a][r], COUNT, ONEHOP_FLOAT32, "a replay");
    }
    for (int r = 0; r < W; r++) {
        onehop_host_graph_destroy(graphs[r]);
        onehop_host_stream_destroy(streams[r]);
        onehop_destroy(contexts[r]);
    }
}

/* ---- rows of a table ------------------------------------------------------------------------- */
static void by_rule(onehop_context *context, int rank, int world, void *argument) {
    const bool on = *(const bool *)argument;
    onehop_choice choice;
    float data[64], want[64];
    CHECK_OK(would_use(context, 256, ONEHOP_FLOAT32, ONEHOP_SUM, ONEHOP_MODE_EAGER, 1, &choice));
    CHECK_INT(on ? ONEHOP_SOURCE_MULTICAST : ONEHOP_SOURCE_WORKSPACE, choice.source);
    input_fill(data, INPUT_REAL, 5, rank, 0, 64, ONEHOP_FLOAT32);
    reference_of_inputs(want, INPUT_REAL, 5, world, 0, 64, ONEHOP_FLOAT32);
    CHECK_OK(onehop_all_reduce(context, data, data, 64, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, NULL));
    expect_equal(want, data, 64, ONEHOP_FLOAT32, "by a row");
}

static void rows(void) {
    static const char text[] = "onehop-tuning 1\ndevice host\n2 any 1K 2shot_pull multicast 4 1\n"
                               "2 any 1K 1shot_pull workspace 3 1\n";
    char path[] = "/tmp/onehop-multicast-XXXXXX";
    const int fd = mkstemp(path);
    CHECK(fd >= 0 && write(fd, text, sizeof text - 1) == (ssize_t)sizeof text - 1);
    close(fd);
    setenv("ONEHOP_TUNING", path, 1);
    for (int on = 0; on < 2; on++) {
        bool argument = on;
        setenv("ONEHOP_MULTICAST", on ? "1" : "0", 1);
        ranks_run(RANKS_AS_PROCESSES, 2, NULL, by_rule, &argument);
    }
    unsetenv("ONEHOP_TUNING");
    unlink(path);
}

/* ---- off ------------------------------------------------------------------------------------- */
static void refused(onehop_context *context, int rank, int world, void *argument) {
    float data[8] = {1}, zero[8] = {0};
    (void)rank;
    for (int a = 0; a < 2; a++) {
        onehop_call call = over(algorithms[a]);
        CHECK_RESULT(ONEHOP_ERR_ALGORITHM, onehop_all_reduce(context, data, data, 8, ONEHOP_FLOAT32,
                                                             ONEHOP_SUM, &call, NULL));
        CHECK_CONTAINS("source multicast is off", onehop_last_error());
        CHECK_CONTAINS(argument, onehop_last_error());
        CHECK_CONTAINS("ONEHOP_MULTICAST=1", onehop_last_error());
        CHECK_CONTAINS("not been validated on hardware", onehop_last_error());
        /* Nothing was launched, and other calls go on. */
        CHECK_OK(ranks_all_reduce(context, zero, zero, 8, ONEHOP_FLOAT32, algorithms[a], NULL));
    }
    CHECK(world > 1 && context->multicast.address == 0 && context->multicast.owner == NULL);
}

static void accepted(onehop_context *context, int rank, int world, void *argument) {
    float data[8] = {1};
    onehop_call call = over(ONEHOP_2SHOT_PULL);
    (void)rank;
    (void)argument;
    CHECK_OK(onehop_all_reduce(context, data, data, 8, ONEHOP_FLOAT32, ONEHOP_SUM, &call, NULL));
    CHECK(data[0] == (float)world);
}

static void switches(void) {
    static const struct {
        const char *name, *value, *why; /* NULL: on */
    } cases[] = {
        {"ONEHOP_MULTICAST", NULL, "ONEHOP_MULTICAST is not 1"},
        {"ONEHOP_MULTICAST", "0", "ONEHOP_MULTICAST is not 1"},
        {"NCCL_NVLS_ENABLE", "0", "NCCL_NVLS_ENABLE is neither 1 nor 2"},
        {"NCCL_NVLS_ENABLE", "off", "NCCL_NVLS_ENABLE is neither 1 nor 2"},
        {"NCCL_NVLS_ENABLE", "-1", "NCCL_NVLS_ENABLE is neither 1 nor 2"},
        {"NCCL_NVLS_ENABLE", "1", NULL},
        {"NCCL_NVLS_ENABLE", "2", NULL},
        {"TORCH_SYMM_MEM_DISABLE_MULTICAST", "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST is not 0"},
        {"TORCH_SYMM_MEM_DISABLE_MULTICAST", "maybe", "TORCH_SYMM_MEM_DISABLE_MULTICAST is not 0"},
        {"TORCH_SYMM_MEM_DISABLE_MULTICAST", "0", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        setenv("ONEHOP_MULTICAST", "1", 1);
        if (cases[i].value)
            setenv(cases[i].name, cases[i].value, 1);
        else
            unsetenv(cases[i].name);
        for (int layout = RANKS_AS_THREADS; layout <= RANKS_AS_PROCESSES; layout++)
            ranks_run((ranks_layout)layout, 2, NULL, cases[i].why ? refused : accepted,
                      (void *)(uintptr_t)cases[i].why);
        unsetenv(cases[i].name);
    }
    setenv("ONEHOP_MULTICAST", "1", 1);
}

/* Ranks of which one does not allow it, or on one of which a step fails: off on all, and no
 * error. */
typedef struct step {
    const char *what;
    int which;
} step;

static oh_device_ops broken;

static onehop_result fails(void) {
    return oh_error(ONEHOP_ERR_DRIVER, "a step was made to fail");
}
static onehop_result no_create(oh_device *d, size_t bytes, int ranks, uint32_t kind,
                               oh_multicast *m, oh_mem_handle *handle, int *fd) {
    (void)d, (void)bytes, (void)ranks, (void)kind, (void)m, (void)handle;
    *fd = -1;
    return fails();
}
static onehop_result no_join(oh_device *d, const oh_mem_handle *handle, int fd, oh_multicast *m) {
    (void)d, (void)handle, (void)fd, (void)m;
    return fails();
}
static onehop_result no_bind(oh_device *d, const oh_mem *own_memory, oh_multicast *m) {
    (void)d, (void)own_memory, (void)m;
    return fails();
}
static onehop_result no_map(oh_device *d, const oh_mem *buffers, int ranks, oh_multicast *m) {
    (void)d, (void)buffers, (void)ranks, (void)m;
    return fails();
}

static void break_step(int which) {
    oh_device *host;
    CHECK_OK(oh_host_device_open(&host));
    broken = *host->ops;
    if (which == 1) broken.multicast_create = no_create;
    if (which == 2) broken.multicast_join = no_join;
    if (which == 3) broken.multicast_bind = no_bind;
    if (which == 4) broken.multicast_map = no_map;
    host->ops = &broken;
}

static void uneven(int rank, int world_size, void *argument) {
    const step *s = argument;
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    onehop_context *context;
    char name[64];
    snprintf(name, sizeof name, "onehop-uneven-%ld-%d", (long)getppid(), s->which);
    config.device.kind = ONEHOP_DEVICE_HOST;
    config.rank = rank;
    config.world_size = world_size;
    config.name = name;
    config.timeout_ms = 60000;
    setenv("ONEHOP_LOG", "off", 1);
    if (rank == (s->which == 1 ? 0 : 1)) {
        if (s->which)
            break_step(s->which);
        else
            unsetenv("ONEHOP_MULTICAST");
    }
    CHECK_OK(onehop_create(&config, &context));
    refused(context, rank, world_size, (void *)(uintptr_t)(s->which ? "multicast" : s->what));
    onehop_destroy(context);
}

static void on_one_rank(void) {
    for (int which = 0; which <= 4; which++) {
        step s = {"is not 1. It needs", which};
        if (!which) s.what = "It needs";
        run_ranks(3, uneven, &s);
    }
}

/* ---- the devices themselves ------------------------------------------------------------------ */
static void refuses_all(oh_device *device, const oh_device_ops *ops, const char *why) {
    oh_multicast m = {0, NULL};
    oh_mem_handle handle = {.kind = OH_HANDLE_FD, .bytes = 4096};
    const oh_mem memory = {NULL, 0, NULL};
    int fd;
    onehop_result results_of[] = {
        ops->multicast_create(device, 4096, 2, OH_HANDLE_FD, &m, &handle, &fd),
        ops->multicast_join(device, &handle, -1, &m), ops->multicast_bind(device, &memory, &m),
        ops->multicast_map(device, &memory, 1, &m)};
    CHECK_CONTAINS(why, onehop_last_error());
    for (int i = 0; i < 4; i++) CHECK_RESULT(ONEHOP_ERR_UNSUPPORTED, results_of[i]);
    CHECK(m.address == 0 && m.owner == NULL);
    ops->multicast_release(device, &m);
}

/* Whoever calls a GPU's functions, they look first. The driver is not opened here: one that went on
 * would end at a function that is not there. */
static void guards(void) {
    static const oh_device_ops cuda_part = {.multicast_create = oh_cuda_multicast_create,
                                            .multicast_join = oh_cuda_multicast_join,
                                            .multicast_bind = oh_cuda_multicast_bind,
                                            .multicast_map = oh_cuda_multicast_map,
                                            .multicast_release = oh_cuda_multicast_release};
    static const struct {
        const char *name, *value;
    } off[] = {{"ONEHOP_MULTICAST", "0"},
               {"NCCL_NVLS_ENABLE", "0"},
               {"TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"}};
    static oh_cuda_device gpu;
    oh_device *host;
    CHECK_OK(oh_host_device_open(&host));
    for (size_t i = 0; i < sizeof off / sizeof *off; i++) {
        gpu.multicast = true;
        gpu.capability = 90;
        setenv(off[i].name, off[i].value, 1);
        refuses_all(host, host->ops, off[i].name);
        refuses_all(&gpu.base, &cuda_part, off[i].name);
        unsetenv(off[i].name);
        setenv("ONEHOP_MULTICAST", "1", 1);
    }
    gpu.multicast = false;
    refuses_all(&gpu.base, &cuda_part, "does not report it");
    gpu.multicast = true;
    gpu.capability = 80;
    refuses_all(&gpu.base, &cuda_part, "does not report it");
}

int main(void) {
    watchdog(110);
    setenv("ONEHOP_MULTICAST", "1", 1);
    unsetenv("NCCL_NVLS_ENABLE");
    unsetenv("TORCH_SYMM_MEM_DISABLE_MULTICAST");
    guards();
    matrix();
    replays();
    switches();
    on_one_rank();
    rows();
    return 0;
}
