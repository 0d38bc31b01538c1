/* What the programs under tests/gpu share: checks, the exit for machines without a driver, driver
 * calls that only tests need, and a guard of the caller's state around a call. */
#ifndef GPU_TEST_H
#define GPU_TEST_H

#include "device/cuda/cuda_device.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SKIP_STATUS 77

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) gpu_fail(__FILE__, __LINE__, #condition);                                \
    } while (0)

/* The call gives `expected` and leaves this thread's current context and capture mode as they
 * were. */
#define EXPECT(expected, call)                                                                     \
    do {                                                                                           \
        struct gpu_state before_ = gpu_state_now();                                                \
        onehop_result result_ = (call);                                                            \
        struct gpu_state after_ = gpu_state_now();                                                 \
        if (result_ != (expected)) {                                                               \
            fprintf(stderr, "got %s, expected %s\n", onehop_result_name(result_), #expected);      \
            gpu_fail(__FILE__, __LINE__, #call);                                                   \
        }                                                                                          \
        if (before_.context != after_.context || before_.mode != after_.mode)                      \
            gpu_fail(__FILE__, __LINE__, "state of the caller changed by " #call);                 \
    } while (0)
#define OK(call)     EXPECT(ONEHOP_OK, call)
#define DRIVER(call) CHECK((call) == OH_CU_SUCCESS)

static inline void gpu_fail(const char *file, int line, const char *what) {
    fprintf(stderr, "%s:%d: FAILED: %s\n  last error: %s\n", file, line, what, onehop_last_error());
    _exit(1);
}

/* Driver functions of tests: X(exported name, parameters). */
typedef struct CUgraphExec_st *gpu_graph_exec;
#define GPU_FUNCTIONS(X)                                                                           \
    X(cuMemGetInfo_v2, (size_t *, size_t *))                                                       \
    X(cuCtxCreate_v2, (oh_cu_context *, unsigned int, oh_cu_device))                               \
    X(cuCtxDestroy_v2, (oh_cu_context))                                                            \
    X(cuCtxSetCurrent, (oh_cu_context))                                                            \
    X(cuStreamBeginCapture_v2, (oh_cu_stream, oh_cu_capture_mode))                                 \
    X(cuStreamEndCapture, (oh_cu_stream, oh_cu_graph *))                                           \
    X(cuGraphGetNodes, (oh_cu_graph, oh_cu_graph_node *, size_t *))                                \
    X(cuGraphInstantiateWithFlags, (gpu_graph_exec *, oh_cu_graph, unsigned long long))            \
    X(cuGraphLaunch, (gpu_graph_exec, oh_cu_stream))                                               \
    X(cuGraphExecDestroy, (gpu_graph_exec))                                                        \
    X(cuGraphDestroy, (oh_cu_graph))                                                               \
    X(cuLaunchHostFunc, (oh_cu_stream, void (*)(void *), void *))

static struct {
#define GPU_MEMBER(name, parameters) oh_cu_result(*name) parameters;
    GPU_FUNCTIONS(GPU_MEMBER)
#undef GPU_MEMBER
} gpu;

enum {
    GPU_CAPTURE_GLOBAL = 0,
    GPU_CAPTURE_THREAD_LOCAL = 1
};

struct gpu_state {
    oh_cu_context context;
    oh_cu_capture_mode mode;
};

static inline struct gpu_state gpu_state_now(void) {
    struct gpu_state state = {NULL, GPU_CAPTURE_GLOBAL};
    oh_cu_capture_mode back;
    oh_cu.cuCtxGetCurrent(&state.context);
    oh_cu.cuThreadExchangeStreamCaptureMode(&state.mode);
    back = state.mode;
    oh_cu.cuThreadExchangeStreamCaptureMode(&back);
    return state;
}

/* Opens the driver or ends the program as skipped. Call before anything else of CUDA, after
 * forks. */
static inline void gpu_begin(void) {
    const char *reason = oh_cuda_absent_reason();
    if (reason == NULL && oh_cuda_device_count() == 0) reason = "the driver shows no GPU";
    if (reason != NULL) {
        printf("SKIPPED: %s\n", reason);
        exit(SKIP_STATUS);
    }
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    CHECK(library != NULL);
#define GPU_TAKE(name, parameters)                                                                 \
    do {                                                                                           \
        void *address = dlsym(library, #name);                                                     \
        CHECK(address != NULL && #name != NULL);                                                   \
        memcpy(&gpu.name, &address, sizeof address);                                               \
    } while (0);
    GPU_FUNCTIONS(GPU_TAKE)
#undef GPU_TAKE
}

/* The device's copy of a buffer holds `byte` everywhere. */
static inline bool gpu_all(oh_device *device, const void *at, size_t bytes, unsigned char byte) {
    unsigned char *host = malloc(bytes);
    size_t wrong = 0;
    CHECK(host != NULL);
    memset(host, ~byte, bytes);
    OK(device->ops->copy(device, host, at, bytes));
    for (size_t i = 0; i < bytes; i++) wrong += host[i] != byte;
    free(host);
    return wrong == 0;
}

#endif
