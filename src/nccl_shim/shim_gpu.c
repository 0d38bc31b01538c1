/* What the shim asks the GPU driver, of which a few functions are opened at the first
 * communicator. */
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
    X(is_capturing, "cuStreamIsCapturing", (onehop_stream, int *))

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
