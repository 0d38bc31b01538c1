/* An all-gather by the real NCCL, of a record for each rank, over a small piece of the GPU's
 * memory: the one way that ranks have to reach each other before it is known where they are. A few
 * functions of the driver are opened for it, at the first communicator; on the host device memory
 * is memory. */
#include "nccl_shim/shim.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

typedef struct gpu_uuid {
    unsigned char bytes[16];
} gpu_uuid;

/* X(name, symbol, parameters); 0 is success. */
#define DRIVER(X)                                                                                  \
    X(device_get, "cuDeviceGet", (int *, int))                                                     \
    X(device_uuid, "cuDeviceGetUuid_v2", (gpu_uuid *, int))                                        \
    X(retain, "cuDevicePrimaryCtxRetain", (void **, int))                                          \
    X(release, "cuDevicePrimaryCtxRelease_v2", (int))                                              \
    X(push, "cuCtxPushCurrent_v2", (void *))                                                       \
    X(pop, "cuCtxPopCurrent_v2", (void **))                                                        \
    X(alloc, "cuMemAlloc_v2", (uint64_t *, size_t))                                                \
    X(free, "cuMemFree_v2", (uint64_t))                                                            \
    X(to_device, "cuMemcpyHtoDAsync_v2", (uint64_t, const void *, size_t, onehop_stream))          \
    X(from_device, "cuMemcpyDtoHAsync_v2", (void *, uint64_t, size_t, onehop_stream))              \
    X(stream_create, "cuStreamCreate", (onehop_stream *, unsigned))                                \
    X(stream_destroy, "cuStreamDestroy_v2", (onehop_stream))                                       \
    X(stream_query, "cuStreamQuery", (onehop_stream))                                              \
    X(is_capturing, "cuStreamIsCapturing", (onehop_stream, int *))                                 \
    X(capture_mode, "cuThreadExchangeStreamCaptureMode", (int *))

enum {
    CU_NOT_READY = 600,
    CU_STREAM_NON_BLOCKING = 1,
    CU_CAPTURE_RELAXED = 2
};

static struct {
#define DRIVER_MEMBER(name, symbol, parameters) int(*name) parameters;
    DRIVER(DRIVER_MEMBER)
#undef DRIVER_MEMBER
    bool there;
} cu;

static void open_driver(void) {
    char why[256] = "";
    void *library = oh_library_open("libcuda.so.1", why, sizeof why);
    cu.there = library;
#define DRIVER_LOAD(name, symbol, parameters)                                                      \
    *(void **)&cu.name = library ? dlsym(library, symbol) : NULL;                                  \
    cu.there = cu.there && cu.name;
    DRIVER(DRIVER_LOAD)
#undef DRIVER_LOAD
    if (!cu.there) oh_log(ONEHOP_LOG_WARN, "NCCL shim: no GPU driver (%s)", why);
}

static bool driver(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, open_driver);
    return cu.there;
}

void oh_shim_gpu_id(int device, unsigned char id_out[16]) {
    gpu_uuid id;
    int handle;
    memset(id_out, 0, 16);
    if (oh_shim_settings_get()->host || !driver() || cu.device_get(&handle, device) ||
        cu.device_uuid(&id, handle))
        return;
    memcpy(id_out, id.bytes, 16);
}

bool oh_shim_capturing(onehop_stream stream) {
    int status = 0;
    return !oh_shim_settings_get()->host && driver() && !cu.is_capturing(stream, &status) && status;
}

/* ---- one communicator ------------------------------------------------------------------------ */

static uint64_t memory_of(const oh_shim_exchange *e) {
    return (uint64_t)(uintptr_t)e->memory;
}

static int open_gpu(oh_shim_exchange *e) {
    uint64_t memory = 0;
    int result = cu.push(e->context);
    if (!result) result = cu.alloc(&memory, (size_t)e->ranks * sizeof e->own);
    e->memory = (void *)(uintptr_t)memory;
    if (!result) result = cu.stream_create(&e->stream, CU_STREAM_NON_BLOCKING);
    if (!result)
        result = cu.to_device(memory + (size_t)e->rank * sizeof e->own, &e->own, sizeof e->own,
                              e->stream);
    return result;
}

static int open_one(oh_shim_exchange *e) {
    void *before;
    if (oh_shim_settings_get()->host) return 0;
    if (!driver()) return OH_NCCL_SYSTEM;
    int result = cu.retain(&e->context, e->device);
    if (result) {
        e->context = NULL;
        return result;
    }
    result = open_gpu(e);
    (void)cu.pop(&before);
    return result;
}

static void close_one(oh_shim_exchange *e) {
    void *before;
    if (!e->context) return;
    if (!cu.push(e->context)) {
        if (e->stream) (void)cu.stream_destroy(e->stream);
        if (e->memory) (void)cu.free(memory_of(e));
        (void)cu.pop(&before);
    }
    (void)cu.release(e->device);
    e->context = e->memory = NULL;
    e->stream = NULL;
}

static int gather_one(oh_shim_exchange *e) {
    const void *own = &e->own;
    void *all = e->all;
    int result;
    if (e->context) {
        all = e->memory;
        own = (const char *)e->memory + (size_t)e->rank * sizeof e->own;
    }
    OH_REAL_CALL(result, oh_nccl_gather_fn, ncclAllGather, own, all, sizeof e->own, OH_NCCL_INT8,
                 e->comm, e->stream);
    return result;
}

/* A rank that runs without the shim never comes: it is not waited for in silence. */
static int wait_one(oh_shim_exchange *e) {
    const uint64_t begun = oh_clock_ns();
    bool told = false;
    int result;
    while ((result = cu.stream_query(e->stream)) == CU_NOT_READY) {
        oh_sleep_us(20);
        if (told || oh_clock_ns() - begun < 20000000000ull) continue;
        told = true;
        oh_log(
            ONEHOP_LOG_WARN,
            "NCCL shim: rank %d has waited 20 s for the other ranks' shims: is the shim loaded in "
            "all processes?",
            e->rank);
    }
    return result;
}

static int take_one(oh_shim_exchange *e) {
    void *before;
    if (!e->context) return 0;
    int result = cu.push(e->context);
    if (result) return result;
    result = cu.from_device(e->all, memory_of(e), (size_t)e->ranks * sizeof e->own, e->stream);
    if (!result) result = wait_one(e);
    (void)cu.pop(&before);
    return result;
}

/* ---- all of a group -------------------------------------------------------------------------- */

static int gather_all(oh_shim_exchange *exchanges, int count) {
    int result = 0, ended = 0;
    if (count > 1) OH_REAL_CALL(result, oh_nccl_void_fn, ncclGroupStart);
    for (int i = 0; i < count && !result; i++) result = gather_one(&exchanges[i]);
    if (count > 1) OH_REAL_CALL(ended, oh_nccl_void_fn, ncclGroupEnd);
    return result ? result : ended;
}

int oh_shim_exchange_run(oh_shim_exchange *exchanges, int count) {
    int result = 0, mode = CU_CAPTURE_RELAXED;
    /* Other threads may be capturing: what is done here is no part of it. */
    const bool gpu = !oh_shim_settings_get()->host && driver() && !cu.capture_mode(&mode);
    for (int i = 0; i < count && !result; i++) result = open_one(&exchanges[i]);
    if (!result) result = gather_all(exchanges, count);
    for (int i = 0; i < count && !result; i++) result = take_one(&exchanges[i]);
    for (int i = 0; i < count; i++) close_one(&exchanges[i]);
    if (gpu) (void)cu.capture_mode(&mode);
    return result;
}
