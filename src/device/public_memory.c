/* onehop_mem_alloc and onehop_mem_free: memory with a list in front, so that onehop_mem_free needs
 * only the pointer. Each allocation opens its device anew: a device belongs to one owner, and
 * opening one is cheap beside the allocation. */
#include "device/device.h"

#include <pthread.h>
#include <stdlib.h>

typedef struct allocation {
    struct allocation *next;
    oh_device *device;
    oh_mem memory;
} allocation;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
OH_RESET_IN_CHILD(lock)
static allocation *allocations; /* guarded by lock */

/* There is no group to ask for the rank. */
static onehop_result open_device(onehop_device which, oh_device **out) {
    int64_t rank = 0;
    onehop_result result = ONEHOP_OK;
    const oh_launcher *launcher = oh_launcher_find();
    if (which.kind == ONEHOP_DEVICE_AUTO)
        result = oh_env_integer(launcher ? launcher->rank : OH_ENV_RANK, 0, INT32_MAX, 0, &rank);
    return result != ONEHOP_OK ? result : oh_device_open(which, (int)rank, out);
}

static void destroy(allocation *a) {
    if (a->device != NULL) {
        a->device->ops->mem_release(a->device, &a->memory);
        a->device->ops->close(a->device);
    }
    free(a);
}

onehop_result onehop_mem_alloc(onehop_device device, size_t bytes, void **ptr_out) {
    OH_NO_CANCEL;
    if (ptr_out == NULL) return oh_error(ONEHOP_ERR_NULL, "onehop_mem_alloc: ptr_out is NULL");
    if (bytes == 0) return oh_error(ONEHOP_ERR_ARGUMENT, "onehop_mem_alloc: bytes is 0");
    allocation *a = calloc(1, sizeof *a);
    if (a == NULL) return oh_error(ONEHOP_ERR_MEMORY, "onehop_mem_alloc: out of host memory");

    onehop_result result = open_device(device, &a->device);
    if (result == ONEHOP_OK) result = a->device->ops->mem_create(a->device, bytes, 0, &a->memory);
    if (result != ONEHOP_OK) {
        destroy(a);
        return result;
    }
    pthread_mutex_lock(&lock);
    a->next = allocations;
    allocations = a;
    pthread_mutex_unlock(&lock);
    *ptr_out = a->memory.ptr;
    return ONEHOP_OK;
}

void onehop_mem_free(void *ptr) {
    OH_NO_CANCEL;
    if (ptr == NULL) return;
    pthread_mutex_lock(&lock);
    allocation **link = &allocations, *found;
    while (*link != NULL && (*link)->memory.ptr != ptr) link = &(*link)->next;
    found = *link;
    if (found != NULL) *link = found->next;
    pthread_mutex_unlock(&lock);
    if (found == NULL)
        oh_log(ONEHOP_LOG_ERROR, "onehop_mem_free: %p is not from onehop_mem_alloc; ignored", ptr);
    else
        destroy(found);
}
