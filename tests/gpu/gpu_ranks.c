/* See gpu_ranks.h. */
#include "gpu_ranks.h"

#include <dlfcn.h>

/* Driver functions that the library has no use for: X(exported name, parameters). */
#define MORE_FUNCTIONS(X)                                                                          \
    X(cuStreamBeginCapture_v2, (oh_cu_stream, oh_cu_capture_mode))                                 \
    X(cuStreamEndCapture, (oh_cu_stream, oh_cu_graph *))                                           \
    X(cuGraphInstantiateWithFlags, (struct CUgraphExec_st **, oh_cu_graph, unsigned long long))    \
    X(cuGraphUpload, (struct CUgraphExec_st *, oh_cu_stream))                                      \
    X(cuGraphLaunch, (struct CUgraphExec_st *, oh_cu_stream))                                      \
    X(cuGraphExecDestroy, (struct CUgraphExec_st *))                                               \
    X(cuGraphDestroy, (oh_cu_graph))                                                               \
    X(cuMemsetD32Async, (oh_cu_ptr, unsigned int, size_t, oh_cu_stream))

static struct {
#define MORE_MEMBER(name, parameters) oh_cu_result(*name) parameters;
    MORE_FUNCTIONS(MORE_MEMBER)
#undef MORE_MEMBER
} more;

#define CAPTURE_THREAD_LOCAL 1u

typedef struct helper_args {
    uint64_t a, b, c, d;
} helper_args;

static pthread_once_t driver_once = PTHREAD_ONCE_INIT;
static oh_cu_library helper_library;

static void check_driver(oh_cu_result result, const char *file, int line, const char *call) {
    const char *name = NULL;
    if (result == OH_CU_SUCCESS) return;
    oh_cu.cuGetErrorName(result, &name);
    fprintf(stderr, "%s:%d: %s: %s (%u)\n", file, line, call, name ? name : "unknown error",
            result);
    _exit(1);
}
#define DRIVER(call) check_driver((call), __FILE__, __LINE__, #call)

static void find_driver(void) {
    size_t bytes;
    CHECK_OK(oh_cuda_driver());
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    CHECK(library != NULL);
#define MORE_FIND(name, parameters)                                                                \
    do {                                                                                           \
        void *address_ = dlsym(library, #name);                                                    \
        if (!address_) FAIL("the driver lacks %s", #name);                                         \
        memcpy(&more.name, &address_, sizeof address_);                                            \
    } while (0);
    MORE_FUNCTIONS(MORE_FIND)
#undef MORE_FIND
    DRIVER(oh_cu.cuLibraryLoadData(&helper_library, gpu_image("helper_kernels", &bytes), NULL, NULL,
                                   0, NULL, NULL, 0));
}

/* ---- context manners ------------------------------------------------------------------------- */

static bool enter(const gpu_rank *r) {
    oh_cu_context current = NULL;
    DRIVER(oh_cu.cuCtxGetCurrent(&current));
    if (current == r->primary) return false;
    DRIVER(oh_cu.cuCtxPushCurrent_v2(r->primary));
    return true;
}

static void leave(bool entered) {
    oh_cu_context popped;
    if (entered) DRIVER(oh_cu.cuCtxPopCurrent_v2(&popped));
}

#define IN_CONTEXT(rank, call)                                                                     \
    do {                                                                                           \
        const bool entered_ = enter(rank);                                                         \
        DRIVER(call);                                                                              \
        leave(entered_);                                                                           \
    } while (0)

static oh_cu_ptr address(const void *memory) {
    return (oh_cu_ptr)(uintptr_t)memory;
}

/* ---- ranks ----------------------------------------------------------------------------------- */

static void load_helpers(gpu_rank *r) {
    static const char *const names[HELPERS] = {"helper_spin", "helper_consume", "helper_compare"};
    for (int i = 0; i < HELPERS; i++) {
        oh_cu_kernel kernel = NULL;
        DRIVER(oh_cu.cuLibraryGetKernel(&kernel, helper_library, names[i]));
        DRIVER(oh_cu.cuKernelGetFunction(&r->helpers[i], kernel));
        DRIVER(oh_cu.cuFuncLoad(r->helpers[i]));
    }
}

static int ordinal_of(const gpu_setup *s, int rank) {
    return s->ordinals ? s->ordinals[rank] : rank % s->gpus;
}

static void wait_for(const gpu_rank *rank, onehop_stream stream) {
    IN_CONTEXT(rank, oh_cu.cuStreamSynchronize(stream));
}

/* All but the context of onehop. */
static void open_gpu(gpu_rank *r, const gpu_setup *s, int rank) {
    int multiprocessors = 0;
    pthread_once(&driver_once, find_driver);
    memset(r, 0, sizeof *r);
    r->rank = rank;
    r->world = s->world;
    r->gpu = ordinal_of(s, rank);
    DRIVER(oh_cu.cuDeviceGet(&r->device, r->gpu));
    DRIVER(oh_cu.cuDeviceGetAttribute(&multiprocessors, OH_CU_DEVICE_MULTIPROCESSORS, r->device));
    r->multiprocessors = (uint32_t)multiprocessors;
    DRIVER(oh_cu.cuDevicePrimaryCtxRetain(&r->primary, r->device));
    const bool entered = enter(r);
    load_helpers(r);
    leave(entered);
    r->stream = gpu_stream_make(r);
    r->second = gpu_stream_make(r);
    r->pinned = gpu_alloc_pinned(r, GPU_PINNED_BYTES);
    /* The first kernel of a stream may need the GPU idle, and would wait for the kernel of a peer
     * on this GPU that waits for it: each stream has run one before the first call. */
    gpu_spin_later(r, 1, r->stream);
    gpu_spin_later(r, 1, r->second);
    wait_for(r, r->stream);
    wait_for(r, r->second);
}

/* After the context of onehop, whose last call's stream must outlive it. The primary context stays:
 * to make it anew for every group would take longer than the tests. */
static void close_gpu(gpu_rank *r) {
    gpu_free_pinned(r, r->pinned);
    gpu_stream_free(r, r->stream);
    gpu_stream_free(r, r->second);
}

static onehop_config config_of(const gpu_setup *s) {
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    if (s->config) config = *s->config;
    config.struct_size = sizeof config;
    config.device.kind = ONEHOP_DEVICE_CUDA;
    if (!config.timeout_ms) config.timeout_ms = GPU_TIMEOUT_MS;
    if (!config.init_timeout_ms) config.init_timeout_ms = 60000;
    return config;
}

static void finish(gpu_rank *ranks, int here, const gpu_setup *s) {
    for (int i = 0; i < here && !s->dies; i++) CHECK_OK(onehop_status(ranks[i].context, NULL));
    if (!s->dies) gpu_expect_idle(ranks, here);
    gpu_barrier(&ranks[0]); /* nobody frees while a peer's kernels run */
    for (int i = 0; i < here; i++) onehop_destroy(ranks[i].context);
    for (int i = 0; i < here; i++) close_gpu(&ranks[i]);
}

void gpu_run_here(const gpu_setup *s, int rank, onehop_group *group, gpu_fn fn, void *argument) {
    onehop_config config = config_of(s);
    gpu_rank r;
    open_gpu(&r, s, rank);
    config.device.ordinal = r.gpu;
    config.group = group;
    if (!group) {
        config.rank = rank;
        config.world_size = s->world;
        config.name = s->name ? s->name : own_name("ranks");
        /* Ranks that find each other by name may be processes. */
        if (gpu_is_shared()) config.flags |= ONEHOP_FLAG_SHARE_GPU;
    }
    CHECK_OK(onehop_create(&config, &r.context));
    fn(&r, 1, argument);
    finish(&r, 1, s);
}

static void run_single(const gpu_setup *s, gpu_fn fn, void *argument) {
    onehop_config config = config_of(s);
    onehop_device devices[ONEHOP_MAX_RANKS];
    onehop_context *contexts[ONEHOP_MAX_RANKS] = {NULL};
    gpu_rank *ranks = calloc((size_t)s->world, sizeof *ranks);
    CHECK(ranks != NULL);
    for (int i = 0; i < s->world; i++) {
        open_gpu(&ranks[i], s, i);
        devices[i].kind = ONEHOP_DEVICE_CUDA;
        devices[i].ordinal = ranks[i].gpu;
    }
    CHECK_OK(onehop_create_all(&config, s->world, devices, contexts));
    for (int i = 0; i < s->world; i++) ranks[i].context = contexts[i];
    fn(ranks, s->world, argument);
    finish(ranks, s->world, s);
    free(ranks);
}

typedef struct job {
    const gpu_setup *setup;
    onehop_group **groups;
    gpu_fn fn;
    void *argument;
} job;

static void job_main(int rank, int world_size, void *argument) {
    const job *j = argument;
    (void)world_size;
    /* A process with one rank needs no queue per stream of many ranks, and under MPS the GPU has
     * only so many. */
    if (j->setup->layout == GPU_PROCESSES) unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
    gpu_run_here(j->setup, rank, j->groups ? j->groups[rank] : NULL, j->fn, j->argument);
}

void gpu_run(const gpu_setup *s, gpu_fn fn, void *argument) {
    onehop_group *groups[ONEHOP_MAX_RANKS];
    job j = {s, NULL, fn, argument};
    if (s->layout == GPU_SINGLE) {
        run_single(s, fn, argument);
    } else if (s->layout == GPU_PROCESSES) {
        run_ranks(s->world, job_main, &j);
    } else {
        CHECK_OK(onehop_group_open_local(s->world, groups));
        j.groups = groups;
        run_threads(s->world, job_main, &j);
        for (int r = 0; r < s->world; r++) onehop_group_close(groups[r]);
    }
}

void gpu_barrier(const gpu_rank *rank) {
    if (rank->context->group) CHECK_OK(onehop_group_barrier(rank->context->group));
}

void gpu_expect_idle(gpu_rank *ranks, int here) {
    gpu_barrier(&ranks[0]);
    for (int i = 0; i < here; i++) {
        const gpu_rank *r = &ranks[i];
        const oh_regions *p = &r->context->regions;
        const char *region = (const char *)r->context->buffers[r->rank].ptr + p->push;
        const size_t bytes = 2 * (size_t)r->world * p->slot_bytes;
        const uint64_t *words = r->pinned;
        for (size_t at = 0; at < bytes; at += GPU_PINNED_BYTES) {
            const size_t now = bytes - at < GPU_PINNED_BYTES ? bytes - at : GPU_PINNED_BYTES;
            gpu_read(r, r->pinned, region + at, now);
            for (size_t w = 0; w < now / 8; w++)
                if (words[w] != UINT64_MAX)
                    FAIL("rank %d of %d: bytes %zu.. of its push slots of %llu bytes hold 0x%llx: "
                         "not armed",
                         r->rank, r->world, at + 8 * w, (unsigned long long)p->slot_bytes,
                         (unsigned long long)words[w]);
        }
    }
    gpu_barrier(&ranks[0]);
}

void gpu_expect_failure(gpu_rank *rank, onehop_result expected, int peer, onehop_result found,
                        const char *what) {
    onehop_failure failure;
    if (found != expected)
        FAIL("%s: rank %d: expected %s, found %s (%s)", what, rank->rank,
             onehop_result_name(expected), onehop_result_name(found), onehop_last_error());
    CHECK_RESULT(expected, onehop_status(rank->context, &failure));
    if (failure.peer != peer)
        FAIL("%s: rank %d names rank %d, expected %d: %s", what, rank->rank, failure.peer, peer,
             failure.text);
    if (!gpu_stream_idle(rank, rank->stream))
        FAIL("%s: rank %d: its stream is not idle", what, rank->rank);
}

/* ---- memory and work ------------------------------------------------------------------------- */

void *gpu_alloc(const gpu_rank *rank, size_t bytes) {
    oh_cu_ptr memory = 0;
    IN_CONTEXT(rank, oh_cu.cuMemAlloc_v2(&memory, bytes));
    return (void *)(uintptr_t)memory;
}

void gpu_free(const gpu_rank *rank, void *memory) {
    IN_CONTEXT(rank, oh_cu.cuMemFree_v2(address(memory)));
}

void *gpu_alloc_pinned(const gpu_rank *rank, size_t bytes) {
    void *memory = NULL;
    IN_CONTEXT(rank, oh_cu.cuMemHostAlloc(&memory, bytes, OH_CU_HOST_PORTABLE));
    return memory;
}

void gpu_free_pinned(const gpu_rank *rank, void *memory) {
    IN_CONTEXT(rank, oh_cu.cuMemFreeHost(memory));
}

void gpu_write(const gpu_rank *rank, void *to, const void *from, size_t bytes) {
    gpu_copy_later(rank, to, from, bytes, rank->stream);
    wait_for(rank, rank->stream);
}

void gpu_read(const gpu_rank *rank, void *to, const void *from, size_t bytes) {
    gpu_write(rank, to, from, bytes); /* addresses are unified */
}

void gpu_fill(const gpu_rank *rank, void *to, int byte, size_t bytes) {
    gpu_fill_later(rank, to, byte, bytes, rank->stream);
    wait_for(rank, rank->stream);
}

void gpu_copy_later(const gpu_rank *rank, void *to, const void *from, size_t bytes,
                    onehop_stream stream) {
    if (bytes) IN_CONTEXT(rank, oh_cu.cuMemcpyAsync(address(to), address(from), bytes, stream));
}

void gpu_fill_later(const gpu_rank *rank, void *to, int byte, size_t bytes, onehop_stream stream) {
    if (bytes)
        IN_CONTEXT(rank, oh_cu.cuMemsetD8Async(address(to), (unsigned char)byte, bytes, stream));
}

void gpu_fill_words_later(const gpu_rank *rank, void *to, uint32_t word, size_t words,
                          onehop_stream stream) {
    IN_CONTEXT(rank, more.cuMemsetD32Async(address(to), word, words, stream));
}

bool gpu_stream_idle(const gpu_rank *rank, onehop_stream stream) {
    const bool entered = enter(rank);
    const oh_cu_result result = oh_cu.cuStreamQuery(stream);
    leave(entered);
    if (result != OH_CU_NOT_READY) DRIVER(result);
    return result == OH_CU_SUCCESS;
}

onehop_stream gpu_stream_make(const gpu_rank *rank) {
    oh_cu_stream stream = NULL;
    IN_CONTEXT(rank, oh_cu.cuStreamCreate(&stream, OH_CU_STREAM_NON_BLOCKING));
    return stream;
}

void gpu_stream_free(const gpu_rank *rank, onehop_stream stream) {
    IN_CONTEXT(rank, oh_cu.cuStreamDestroy_v2(stream));
}

static void launch(const gpu_rank *rank, gpu_helper helper, uint32_t blocks, uint32_t threads,
                   helper_args args, bool pdl, onehop_stream stream) {
    oh_cu_launch_attribute attribute = {OH_CU_ATTRIBUTE_PDL, 0, {{0}}};
    oh_cu_launch_config config = {blocks, 1, 1,      threads,    1,
                                  1,      0, stream, &attribute, pdl ? 1u : 0u};
    void *parameters[1] = {&args};
    attribute.value.pdl_allowed = 1;
    IN_CONTEXT(rank, oh_cu.cuLaunchKernelEx(&config, rank->helpers[helper], parameters, NULL));
}

void gpu_spin_later(const gpu_rank *rank, unsigned us, onehop_stream stream) {
    const helper_args args = {us * 1000ull, 0, 0, 0};
    launch(rank, HELPER_SPIN, 1, 32, args, false, stream);
}

void gpu_consume_later(const gpu_rank *rank, void *to, const void *from, size_t bytes,
                       onehop_stream stream) {
    const helper_args args = {(uintptr_t)to, (uintptr_t)from, bytes, 0};
    launch(rank, HELPER_CONSUME, 2 * rank->multiprocessors, 1024, args, true, stream);
}

void gpu_compare_later(const gpu_rank *rank, const void *found, const void *expected, size_t words,
                       uint32_t *count, onehop_stream stream) {
    const helper_args args = {(uintptr_t)found, (uintptr_t)expected, words, (uintptr_t)count};
    launch(rank, HELPER_COMPARE, rank->multiprocessors, 256, args, false, stream);
}

/* ---- graphs ---------------------------------------------------------------------------------- */

static int contexts_of(gpu_rank *const *ranks, int here, onehop_context **contexts) {
    for (int i = 0; i < here; i++) contexts[i] = ranks[i]->context;
    return contexts[0]->group ? 0 : here;
}

void gpu_capture_begin(gpu_rank *const *ranks, int here) {
    onehop_context *contexts[ONEHOP_MAX_RANKS] = {NULL};
    const int all = contexts_of(ranks, here, contexts);
    gpu_barrier(ranks[0]);
    if (all) CHECK_OK(onehop_capture_begin_all(contexts, all));
    for (int i = 0; i < here; i++) {
        if (!all) CHECK_OK(onehop_capture_begin(contexts[i]));
        IN_CONTEXT(ranks[i], more.cuStreamBeginCapture_v2(ranks[i]->stream, CAPTURE_THREAD_LOCAL));
    }
}

/* Uploaded too, so that a first launch has nothing left that could wait for the GPU. */
static void make_graph(gpu_rank *rank, gpu_graph *graph) {
    IN_CONTEXT(rank, more.cuGraphInstantiateWithFlags(&graph->exec, graph->graph, 0));
    IN_CONTEXT(rank, more.cuGraphUpload(graph->exec, rank->stream));
    wait_for(rank, rank->stream);
}

void gpu_capture_end(gpu_rank *const *ranks, int here, gpu_graph *graphs) {
    onehop_context *contexts[ONEHOP_MAX_RANKS] = {NULL};
    const int all = contexts_of(ranks, here, contexts);
    for (int i = 0; i < here; i++)
        IN_CONTEXT(ranks[i], more.cuStreamEndCapture(ranks[i]->stream, &graphs[i].graph));
    if (all) CHECK_OK(onehop_capture_end_all(contexts, all));
    for (int i = 0; i < here; i++) {
        if (!all) CHECK_OK(onehop_capture_end(contexts[i]));
        make_graph(ranks[i], &graphs[i]);
    }
    gpu_barrier(ranks[0]);
}

void gpu_capture_end_mapped(gpu_rank *rank, const void *const *in, void *const *out, size_t count,
                            gpu_graph *graph) {
    IN_CONTEXT(rank, more.cuStreamEndCapture(rank->stream, &graph->graph));
    CHECK_OK(onehop_capture_end_mapped(rank->context, in, out, count));
    make_graph(rank, graph);
    gpu_barrier(rank);
}

void gpu_graph_launch(const gpu_rank *rank, const gpu_graph *graph, onehop_stream stream) {
    IN_CONTEXT(rank, more.cuGraphLaunch(graph->exec, stream));
}

void gpu_graph_free(const gpu_rank *rank, gpu_graph *graph) {
    IN_CONTEXT(rank, more.cuGraphExecDestroy(graph->exec));
    IN_CONTEXT(rank, more.cuGraphDestroy(graph->graph));
}
