/* See nccl.h and nccl_api.h. NCCL works on the device that is current in the calling thread: every
 * call of it runs with the rank's primary context pushed. */
#include "device/nccl/nccl_api.h"

#include "device/cuda/cuda_device.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum {
    NCCL_FLOAT16 = 6,
    NCCL_FLOAT32 = 7,
    NCCL_BFLOAT16 = 9,
};

oh_nccl_table oh_nccl;

static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
OH_RESET_IN_CHILD(opening)
static bool opened;

/* The name of a function that the library lacks, or NULL. */
static const char *look_up(void *library) {
    const char *missing = NULL;
    void *symbol;
#define NCCL_FIND(name, parameters)                                                                \
    symbol = dlsym(library, #name);                                                                \
    if (!symbol) missing = #name;                                                                  \
    memcpy(&oh_nccl.name, &symbol, sizeof symbol);
    OH_NCCL_WINDOW_FUNCTIONS(NCCL_FIND)
    oh_nccl.windows = !missing;
    missing = NULL;
    NCCL_FIND(ncclGetErrorString, )
    OH_NCCL_FUNCTIONS(NCCL_FIND)
#undef NCCL_FIND
    return missing;
}

static onehop_result open_once(const char *name) {
    int version = 0;
    char why[256];
    void *library = oh_library_open(name, why, sizeof why);
    if (!library)
        return oh_error(ONEHOP_ERR_UNSUPPORTED, "NCCL cannot be used: %s; %s names its library",
                        why, oh_env_describe(OH_ENV_NCCL_LIB)->name);
    const char *missing = look_up(library);
    if (missing) {
        dlclose(library);
        return oh_error(ONEHOP_ERR_UNSUPPORTED, "NCCL cannot be used: %s has no %s", name, missing);
    }
    onehop_result result = oh_nccl_check(oh_nccl.ncclGetVersion(&version), "ncclGetVersion");
    snprintf(oh_nccl.version, sizeof oh_nccl.version, "%d.%d.%d", version / 10000,
             version / 100 % 100, version % 100);
    opened = !result;
    return result;
}

onehop_result oh_nccl_open(const char *path) {
    const char *name = path ? path : oh_env_text(OH_ENV_NCCL_LIB);
    if (!name) name = oh_env_describe(OH_ENV_NCCL_LIB)->default_text;
    pthread_mutex_lock(&opening);
    onehop_result result = opened ? ONEHOP_OK : open_once(name);
    pthread_mutex_unlock(&opening);
    return result;
}

onehop_result oh_nccl_check(int result, const char *call) {
    if (result == 0) return ONEHOP_OK;
    return oh_error(ONEHOP_ERR_DRIVER, "%s failed: %s", call, oh_nccl.ncclGetErrorString(result));
}

int oh_nccl_type(onehop_dtype dtype) {
    return dtype == ONEHOP_FLOAT32   ? NCCL_FLOAT32
           : dtype == ONEHOP_FLOAT16 ? NCCL_FLOAT16
                                     : NCCL_BFLOAT16;
}

onehop_result oh_nccl_make_id(oh_nccl_id *out) {
    return oh_nccl_check(oh_nccl.ncclGetUniqueId(out), "ncclGetUniqueId");
}

onehop_result oh_nccl_connect(oh_device *device, const oh_nccl_id *id, int rank, int world,
                              void **comm_out) {
    bool pushed;
    onehop_result result = oh_cuda_push(oh_cuda_of(device), &pushed);
    if (result) return result;
    result =
        oh_nccl_check(oh_nccl.ncclCommInitRank(comm_out, world, *id, rank), "ncclCommInitRank");
    oh_cuda_pop(pushed);
    return result;
}

void oh_nccl_disconnect(oh_device *device, void *comm, bool dead) {
    bool pushed;
    if (oh_cuda_push(oh_cuda_of(device), &pushed)) return;
    (dead ? oh_nccl.ncclCommAbort : oh_nccl.ncclCommDestroy)(comm);
    oh_cuda_pop(pushed);
}

onehop_result oh_nccl_all_reduce(oh_device *device, void *comm, const void *in, void *out,
                                 size_t count, onehop_dtype dtype, onehop_stream stream) {
    bool pushed;
    onehop_result result = oh_cuda_push(oh_cuda_of(device), &pushed);
    if (result) return result;
    result = oh_nccl_check(
        oh_nccl.ncclAllReduce(in, out, count, oh_nccl_type(dtype), OH_NCCL_SUM, comm, stream),
        "ncclAllReduce");
    oh_cuda_pop(pushed);
    return result;
}
