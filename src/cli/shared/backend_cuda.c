/* GPUs as perf's processors, through the driver alone.
 *
 * The library's table of driver functions has what the library needs; what only this tool needs
 * (capture, graphs, time stamps) is looked up here. Every function pushes the rank's context if it
 * is not current and pops it again: one thread may drive all GPUs. */
#include "cli/shared/backend.h"
#include "device/device.h"
#include "device/cuda/driver_api.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    CU_ATTRIBUTE_CLOCK_KHZ = 13,
    CU_ATTRIBUTE_MEMORY_CLOCK_KHZ = 36,
    CU_ATTRIBUTE_L2_BYTES = 38,
    CU_CAPTURE_RELAXED = 2, /* one thread may capture one rank while it instantiates another */
};

typedef struct CUgraphExec_st *cu_graph_exec;

/* X(exported name, parameters) */
#define TOOL_FUNCTIONS(X)                                                                          \
    X(cuStreamBeginCapture_v2, (oh_cu_stream, oh_cu_capture_mode))                                 \
    X(cuStreamEndCapture, (oh_cu_stream, oh_cu_graph *))                                           \
    X(cuGraphInstantiateWithFlags, (cu_graph_exec *, oh_cu_graph, unsigned long long))             \
    X(cuGraphLaunch, (cu_graph_exec, oh_cu_stream))                                                \
    X(cuGraphExecDestroy, (cu_graph_exec))                                                         \
    X(cuGraphDestroy, (oh_cu_graph))                                                               \
    X(cuEventElapsedTime, (float *, oh_cu_event, oh_cu_event))

static struct {
#define TOOL_MEMBER(name, parameters) oh_cu_result(*name) parameters;
    TOOL_FUNCTIONS(TOOL_MEMBER)
#undef TOOL_MEMBER
} tool;

typedef struct cuda_rank {
    oh_cu_device device;
    oh_cu_context context;
    oh_cu_event *events;
    size_t event_count;
} cuda_rank;

typedef struct cuda_graph {
    oh_cu_graph graph;
    cu_graph_exec exec;
} cuda_graph;

static onehop_result driver_error(oh_cu_result result, const char *what) {
    const char *name = NULL;
    oh_cu.cuGetErrorName(result, &name);
    onehop_result ours = result == OH_CU_OUT_OF_MEMORY ? ONEHOP_ERR_MEMORY : ONEHOP_ERR_DRIVER;
    return oh_error(ours, "%s failed: %s (%u)", what, name ? name : "unknown error", result);
}

/* Forwards a driver error as ours, naming the call. */
#define TRY(call, what)                                                                            \
    do {                                                                                           \
        oh_cu_result try_result = (call);                                                          \
        if (try_result != OH_CU_SUCCESS) return driver_error(try_result, what);                    \
    } while (0)

static const char *missing_symbol;

static void find_tool_functions(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    void *symbol;
#define TOOL_FIND(name, parameters)                                                                \
    symbol = driver ? dlsym(driver, #name) : NULL;                                                 \
    if (!symbol) missing_symbol = #name;                                                           \
    memcpy(&tool.name, &symbol, sizeof symbol);
    TOOL_FUNCTIONS(TOOL_FIND)
#undef TOOL_FIND
}

static bool push(const cuda_rank *state) {
    oh_cu_context current = NULL;
    oh_cu.cuCtxGetCurrent(&current);
    return current != state->context && oh_cu.cuCtxPushCurrent_v2(state->context) == OH_CU_SUCCESS;
}

static void pop(bool pushed) {
    oh_cu_context ignored;
    if (pushed) oh_cu.cuCtxPopCurrent_v2(&ignored);
}

/* Runs one driver call in the rank's context. */
#define IN_CONTEXT(rank, call, what)                                                               \
    do {                                                                                           \
        bool pushed = push((rank)->state);                                                         \
        oh_cu_result in_result = (call);                                                           \
        pop(pushed);                                                                               \
        if (in_result != OH_CU_SUCCESS) return driver_error(in_result, what);                      \
    } while (0)

static oh_cu_ptr address(const void *memory) {
    return (oh_cu_ptr)(uintptr_t)memory;
}

static onehop_result create_stream(backend_rank *rank) {
    oh_cu_stream stream;
    IN_CONTEXT(rank, oh_cu.cuStreamCreate(&stream, OH_CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    rank->stream = stream;
    return ONEHOP_OK;
}

static onehop_result cuda_open(backend_rank *rank, onehop_device device, bool with_stream) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)with_stream; /* always: the legacy stream serialises with everything */
    if (oh_cuda_device_count() <= device.ordinal)
        return oh_error(ONEHOP_ERR_NO_DEVICE, "there is no GPU %d", device.ordinal);
    pthread_once(&once, find_tool_functions);
    if (missing_symbol)
        return oh_error(ONEHOP_ERR_UNSUPPORTED,
                        "the driver has no %s; " OH_CU_MIN_TEXT " is needed", missing_symbol);
    cuda_rank *state = calloc(1, sizeof *state);
    if (!state) return oh_error(ONEHOP_ERR_MEMORY, "out of memory");
    rank->device = device;
    rank->state = state;
    TRY(oh_cu.cuDeviceGet(&state->device, device.ordinal), "cuDeviceGet");
    TRY(oh_cu.cuDevicePrimaryCtxRetain(&state->context, state->device), "cuDevicePrimaryCtxRetain");
    return create_stream(rank);
}

static void cuda_close(backend_rank *rank) {
    cuda_rank *state = rank->state;
    if (!state) return;
    bool pushed = state->context && push(state);
    for (size_t i = 0; i < state->event_count; i++) oh_cu.cuEventDestroy_v2(state->events[i]);
    if (rank->stream) oh_cu.cuStreamDestroy_v2(rank->stream);
    pop(pushed);
    if (state->context) oh_cu.cuDevicePrimaryCtxRelease_v2(state->device);
    free(state->events);
    free(state);
    *rank = (backend_rank){0};
}

static onehop_result cuda_enter(backend_rank *rank) {
    push(rank->state);
    return ONEHOP_OK;
}

static onehop_result cuda_alloc(backend_rank *rank, size_t bytes, void **out) {
    oh_cu_ptr memory;
    IN_CONTEXT(rank, oh_cu.cuMemAlloc_v2(&memory, bytes), "cuMemAlloc");
    *out = (void *)(uintptr_t)memory;
    return ONEHOP_OK;
}

static void cuda_free(backend_rank *rank, void *memory, size_t bytes) {
    (void)bytes;
    if (!memory) return;
    bool pushed = push(rank->state);
    oh_cu.cuMemFree_v2(address(memory));
    pop(pushed);
}

static onehop_result cuda_wait(backend_rank *rank) {
    IN_CONTEXT(rank, oh_cu.cuStreamSynchronize(rank->stream), "cuStreamSynchronize");
    return ONEHOP_OK;
}

static onehop_result cuda_copy(backend_rank *rank, void *to, const void *from, size_t bytes) {
    IN_CONTEXT(rank, oh_cu.cuMemcpyAsync(address(to), address(from), bytes, rank->stream),
               "cuMemcpyAsync");
    return ONEHOP_OK;
}

static onehop_result cuda_copy_now(backend_rank *rank, void *to, const void *from, size_t bytes) {
    onehop_result result = cuda_copy(rank, to, from, bytes);
    return result == ONEHOP_OK ? cuda_wait(rank) : result;
}

static onehop_result cuda_fill(backend_rank *rank, void *to, int byte, size_t bytes) {
    IN_CONTEXT(rank, oh_cu.cuMemsetD8Async(address(to), (unsigned char)byte, bytes, rank->stream),
               "cuMemsetD8Async");
    return cuda_wait(rank);
}

static onehop_result cuda_capture_begin(backend_rank *rank) {
    IN_CONTEXT(rank, tool.cuStreamBeginCapture_v2(rank->stream, CU_CAPTURE_RELAXED),
               "cuStreamBeginCapture");
    return ONEHOP_OK;
}

static void cuda_graph_destroy(backend_rank *rank, void *graph) {
    cuda_graph *ours = graph;
    if (!ours) return;
    bool pushed = push(rank->state);
    if (ours->exec) tool.cuGraphExecDestroy(ours->exec);
    if (ours->graph) tool.cuGraphDestroy(ours->graph);
    pop(pushed);
    free(ours);
}

static onehop_result finish_capture(backend_rank *rank, cuda_graph *graph) {
    IN_CONTEXT(rank, tool.cuStreamEndCapture(rank->stream, &graph->graph), "cuStreamEndCapture");
    IN_CONTEXT(rank, tool.cuGraphInstantiateWithFlags(&graph->exec, graph->graph, 0),
               "cuGraphInstantiate");
    return ONEHOP_OK;
}

static onehop_result cuda_capture_end(backend_rank *rank, void **graph_out) {
    cuda_graph *graph = calloc(1, sizeof *graph);
    if (!graph) return oh_error(ONEHOP_ERR_MEMORY, "out of memory");
    onehop_result result = finish_capture(rank, graph);
    if (result != ONEHOP_OK) {
        cuda_graph_destroy(rank, graph);
        return result;
    }
    *graph_out = graph;
    return ONEHOP_OK;
}

static onehop_result cuda_graph_launch(backend_rank *rank, void *graph) {
    cuda_graph *ours = graph;
    IN_CONTEXT(rank, tool.cuGraphLaunch(ours->exec, rank->stream), "cuGraphLaunch");
    return ONEHOP_OK;
}

/* Makes events up to `index` on first use, which is in the warm-up. */
static onehop_result need_events(backend_rank *rank, size_t index) {
    cuda_rank *state = rank->state;
    if (index < state->event_count) return ONEHOP_OK;
    oh_cu_event *longer = realloc(state->events, (index + 1) * sizeof *longer);
    if (!longer) return oh_error(ONEHOP_ERR_MEMORY, "out of memory");
    state->events = longer;
    while (state->event_count <= index) {
        IN_CONTEXT(rank, oh_cu.cuEventCreate(&state->events[state->event_count], 0),
                   "cuEventCreate");
        state->event_count++;
    }
    return ONEHOP_OK;
}

static onehop_result cuda_event_record(backend_rank *rank, size_t index) {
    cuda_rank *state = rank->state;
    onehop_result result = need_events(rank, index);
    if (result != ONEHOP_OK) return result;
    IN_CONTEXT(rank, oh_cu.cuEventRecord(state->events[index], rank->stream), "cuEventRecord");
    return ONEHOP_OK;
}

static onehop_result cuda_event_elapsed(backend_rank *rank, size_t from, size_t to,
                                        double *us_out) {
    cuda_rank *state = rank->state;
    float ms;
    IN_CONTEXT(rank, tool.cuEventElapsedTime(&ms, state->events[from], state->events[to]),
               "cuEventElapsedTime");
    *us_out = (double)ms * 1000;
    return ONEHOP_OK;
}

static int attribute(const backend_rank *rank, oh_cu_device_attribute which) {
    const cuda_rank *state = rank->state;
    int value = 0;
    oh_cu.cuDeviceGetAttribute(&value, which, state->device);
    return value;
}

static size_t cuda_cache_bytes(backend_rank *rank) {
    return (size_t)attribute(rank, CU_ATTRIBUTE_L2_BYTES);
}

static void cuda_describe(backend_rank *rank, char *line, size_t size) {
    const cuda_rank *state = rank->state;
    char name[96] = "unknown", bus[32] = "";
    oh_cu.cuDeviceGetName(name, sizeof name, state->device);
    oh_cu.cuDeviceGetPCIBusId(bus, sizeof bus, state->device);
    snprintf(line, size, "device %2d [%s] %s", rank->device.ordinal, bus, name);
}

static void cuda_driver(backend_rank *rank, char *line, size_t size) {
    int version = 0;
    (void)rank;
    oh_cu.cuDriverGetVersion(&version);
    snprintf(line, size, "CUDA %d.%d", version / 1000, version % 1000 / 10);
}

static void cuda_clocks(backend_rank *rank, char *line, size_t size) {
    snprintf(line, size, "SM at most %d MHz, memory %d MHz",
             attribute(rank, CU_ATTRIBUTE_CLOCK_KHZ) / 1000,
             attribute(rank, CU_ATTRIBUTE_MEMORY_CLOCK_KHZ) / 1000);
}

void cuda_take_census(void *census_out) {
    cuda_census *census = census_out;
    census->count = oh_cuda_device_count();
    const char *reason = census->count ? NULL : oh_cuda_absent_reason();
    oh_cu_device device;
    int mps = 0;
    snprintf(census->reason, sizeof census->reason, "%s", reason ? reason : "no GPU was found");
    /* Older drivers do not know the question. */
    if (census->count && !oh_cu.cuDeviceGet(&device, 0) &&
        !oh_cu.cuDeviceGetAttribute(&mps, OH_CU_DEVICE_MPS, device))
        census->mps = mps != 0;
}

void cuda_describe_link(int from, int to, char *line, size_t size) {
    oh_cu_device a, b;
    int access = 0, rank = 0, atomics = 0;
    if (oh_cu.cuDeviceGet(&a, from) || oh_cu.cuDeviceGet(&b, to) ||
        oh_cu.cuDeviceGetP2PAttribute(&access, OH_CU_P2P_ACCESS, a, b)) {
        snprintf(line, size, "?");
        return;
    }
    oh_cu.cuDeviceGetP2PAttribute(&rank, OH_CU_P2P_RANK, a, b);
    oh_cu.cuDeviceGetP2PAttribute(&atomics, OH_CU_P2P_ATOMICS, a, b);
    if (access)
        snprintf(line, size, "P%d%s", rank, atomics ? "+a" : "");
    else
        snprintf(line, size, "-");
}

const perf_backend backend_cuda = {
    .events = true,
    .open = cuda_open,
    .close = cuda_close,
    .enter = cuda_enter,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .write = cuda_copy_now,
    .read = cuda_copy_now,
    .fill = cuda_fill,
    .copy = cuda_copy,
    .wait = cuda_wait,
    .capture_begin = cuda_capture_begin,
    .capture_end = cuda_capture_end,
    .graph_launch = cuda_graph_launch,
    .graph_destroy = cuda_graph_destroy,
    .event_record = cuda_event_record,
    .event_elapsed = cuda_event_elapsed,
    .cache_bytes = cuda_cache_bytes,
    .describe = cuda_describe,
    .driver = cuda_driver,
    .clocks = cuda_clocks,
};
