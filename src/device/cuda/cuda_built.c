/* Kernels that were compiled at run time. Libraries are loaded once per process and key, and stay
 * loaded, as the embedded image does: unloading waits for the GPU. So contexts that come and go,
 * and expressions that are created again, find what is there. */
#include "device/cuda/cuda_device.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct built {
    oh_digest key;
    oh_cu_library library;
    struct built *next;
} built;

static struct {
    pthread_mutex_t lock;
    built *first;
} loaded = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* NULL: not loaded. */
static oh_cu_library find(const oh_digest *key) {
    const built *b = loaded.first;
    while (b && memcmp(&b->key, key, sizeof *key)) b = b->next;
    return b ? b->library : NULL;
}

/* The lock is held while the driver loads, not while a compiler runs; `image` NULL only looks. */
static onehop_result keep(oh_device *device, const oh_digest *key, const void *image,
                          oh_cu_library *out) {
    onehop_result result = ONEHOP_OK;
    pthread_mutex_lock(&loaded.lock);
    *out = find(key);
    built *b = !*out && image ? malloc(sizeof *b) : NULL;
    if (b) {
        result = oh_cuda_load_library(device, image, &b->library);
        if (result) {
            free(b);
        } else {
            b->key = *key;
            b->next = loaded.first;
            loaded.first = b;
            *out = b->library;
        }
    } else if (!*out && image) {
        result = oh_error(ONEHOP_ERR_MEMORY, "no memory to keep a kernel");
    }
    pthread_mutex_unlock(&loaded.lock);
    return result;
}

onehop_result oh_cuda_load_built(oh_device *device, const oh_digest *key, const void *image,
                                 const oh_kernel *kernel, oh_function *out) {
    oh_cu_library library;
    onehop_result result = keep(device, key, image, &library);
    if (result) return result;
    memset(out, 0, sizeof *out);
    return library ? oh_cuda_take_kernel(device, library, kernel, out) : ONEHOP_OK;
}
