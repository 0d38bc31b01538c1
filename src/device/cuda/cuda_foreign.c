/* Memory that somebody else allocated, given to other processes by classic CUDA IPC.
 *
 * What cuMemAlloc or cudaMalloc made can be shared in no other way: a handle of 64 bytes names the
 * whole allocation, and a process that opens it gets the whole mapped. So a pointer into the middle
 * travels as the handle of its allocation and an offset. Which memory this is, is asked of the
 * driver, pointer by pointer: allocators differ (pools, virtual memory in chunks) and programs mix
 * them.
 *
 * An opened handle is recorded in the device that opened it and counted, so that many tensors in
 * one allocation cost one mapping. The record is found by all that was received, not by the
 * address: addresses are reused, and then the driver gives the new allocation a handle of its own.
 * Nothing is kept open once the count is zero, as the owner must not free before all have closed.
 *
 * A process cannot open its own handle. It knows it by a random number made when it first exports
 * something, not by a pid, which repeats across pid namespaces; there the pointer itself is
 * shared. A child made by fork would inherit the number, but by then CUDA is in use, and such a
 * child cannot use it. */
#include "device/cuda/cuda_device.h"
#include "device/mem_registry.h"

#include <assert.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct oh_cuda_opened {
    oh_cuda_owner head;
    struct oh_cuda_opened *next; /* both guarded by `opened_lock` */
    int references;
    oh_mem_handle handle; /* as received */
    oh_cu_ptr address;
} opened;

/* Held while a handle is opened or closed: of two threads that want one, the second finds it. */
static pthread_mutex_t opened_lock = PTHREAD_MUTEX_INITIALIZER;

static struct {
    pthread_mutex_t lock;
    bool known;
    unsigned char bytes[16];
} own_tag = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* ---- whose handle it is ------------------------------------------------------------------ */

static onehop_result put_own_tag(oh_mem_handle *handle) {
    onehop_result error = ONEHOP_OK;
    pthread_mutex_lock(&own_tag.lock);
    if (!own_tag.known) error = oh_random(own_tag.bytes, sizeof own_tag.bytes);
    own_tag.known = error == ONEHOP_OK;
    memcpy(handle->tag, own_tag.bytes, sizeof handle->tag);
    pthread_mutex_unlock(&own_tag.lock);
    return error;
}

static bool is_own(const oh_mem_handle *handle) {
    pthread_mutex_lock(&own_tag.lock);
    bool own = own_tag.known && memcmp(handle->tag, own_tag.bytes, sizeof handle->tag) == 0;
    pthread_mutex_unlock(&own_tag.lock);
    return own;
}

/* ---- what kind of memory it is ----------------------------------------------------------- */

typedef struct range {
    oh_cu_ptr at;
    size_t bytes;
} range;

static onehop_result refuse(const range *want, const char *what) {
    return oh_error(ONEHOP_ERR_UNSUPPORTED,
                    "memory at 0x%llx cannot be mapped by other processes as it is: it is %s",
                    want->at, what);
}

/* Memory of this GPU that classic IPC cannot share. Asked only now, for the sentence. */
static onehop_result refuse_device_memory(const range *want) {
    oh_cu_pointer_attribute attribute = OH_CU_POINTER_POOL;
    oh_cu_ptr start = 0;
    size_t size = 0;
    void *pool = NULL, *answer = &pool;
    if (oh_cu.cuPointerGetAttributes(1, &attribute, &answer, want->at) == OH_CU_SUCCESS &&
        pool != NULL)
        return refuse(want, "from a memory pool (cuMemAllocAsync, cudaMallocAsync)");
    if (oh_cu.cuMemGetAddressRange_v2(&start, &size, want->at) == OH_CU_SUCCESS &&
        (want->at < start || want->at - start > size || want->bytes > size - (want->at - start)))
        return refuse(want, "virtual memory (cuMemMap) in several pieces");
    return refuse(want, "virtual memory (cuMemMap), which classic IPC does not share");
}

/* OK if classic IPC can share it. Within a scope. */
static onehop_result classify(const oh_cuda_device *device, const range *want) {
    unsigned int type = 0, managed = 0, capable = 0;
    int ordinal = -1;
    oh_cu_pointer_attribute attributes[] = {OH_CU_POINTER_MEMORY_TYPE, OH_CU_POINTER_MANAGED,
                                            OH_CU_POINTER_IPC, OH_CU_POINTER_ORDINAL};
    void *answers[] = {&type, &managed, &capable, &ordinal};
    /* Unlike the question for a single attribute, this one does not fail on a pointer that the
     * driver does not know: all answers are then 0. It does fail on memory of a graph's own
     * allocation nodes, which nobody can share. */
    oh_cu_result result =
        oh_cu.cuPointerGetAttributes(OH_LENGTH(attributes), attributes, answers, want->at);
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error_as(ONEHOP_ERR_UNSUPPORTED, result, "cuPointerGetAttributes",
                                "asking what memory lies at 0x%llx", want->at);
    if (type != OH_CU_MEMORY_HOST && type != OH_CU_MEMORY_DEVICE)
        return refuse(want, "plain host memory, unknown to CUDA");
    if (managed != 0) return refuse(want, "managed memory");
    if (type == OH_CU_MEMORY_HOST) return refuse(want, "pinned host memory");
    if (ordinal != device->ordinal)
        return oh_error(ONEHOP_ERR_UNSUPPORTED,
                        "memory at 0x%llx is not shared: it lies on GPU %d, this rank runs on GPU "
                        "%d",
                        want->at, ordinal, device->ordinal);
    return capable != 0 ? ONEHOP_OK : refuse_device_memory(want);
}

/* ---- export ------------------------------------------------------------------------------ */

static onehop_result check_inside(const range *want, const range *whole) {
    if (want->bytes > 0 && want->at >= whole->at && want->at - whole->at < whole->bytes &&
        want->bytes <= whole->bytes - (want->at - whole->at))
        return ONEHOP_OK;
    return oh_error(ONEHOP_ERR_ARGUMENT,
                    "%zu bytes at 0x%llx are not inside the allocation of %zu bytes at 0x%llx",
                    want->bytes, want->at, whole->bytes, whole->at);
}

/* Memory of onehop_mem_alloc knows its handle. */
static onehop_result export_registered(const oh_mem *memory, oh_device *maker, const range *want,
                                       oh_mem_handle *out, uint64_t *offset_out, int *fd_out) {
    const range whole = {(oh_cu_ptr)(uintptr_t)memory->ptr, memory->bytes};
    onehop_result error = check_inside(want, &whole);
    if (error == ONEHOP_OK) error = oh_cuda_mem_export(maker, memory, out, fd_out);
    if (error == ONEHOP_OK) *offset_out = want->at - whole.at;
    return error;
}

/* Within a scope. */
static onehop_result export_here(const oh_cuda_device *device, const range *want,
                                 oh_mem_handle *handle) {
    oh_cu_ipc_handle name;
    range whole = {0, 0};
    onehop_result error = classify(device, want);
    if (error != ONEHOP_OK) return error;
    oh_cu_result result = oh_cu.cuMemGetAddressRange_v2(&whole.at, &whole.bytes, want->at);
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error(result, "cuMemGetAddressRange",
                             "looking for the allocation that holds 0x%llx", want->at);
    error = check_inside(want, &whole);
    if (error != ONEHOP_OK) return error;
    result = oh_cu.cuIpcGetMemHandle(&name, whole.at);
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error_as(ONEHOP_ERR_UNSUPPORTED, result, "cuIpcGetMemHandle",
                                "exporting %zu bytes of GPU %d that the driver says it can share",
                                whole.bytes, device->ordinal);
    memset(handle, 0, sizeof *handle);
    handle->kind = OH_HANDLE_IPC;
    handle->device = (uint32_t)device->ordinal;
    handle->bytes = whole.bytes;
    handle->base = whole.at;
    memcpy(handle->data, name.bytes, sizeof handle->data);
    return put_own_tag(handle);
}

onehop_result oh_cuda_foreign_export(oh_device *base, const void *ptr, size_t bytes,
                                     oh_mem_handle *out, uint64_t *offset_out, int *fd_out) {
    oh_cuda_device *device = oh_cuda_of(base);
    const range want = {(oh_cu_ptr)(uintptr_t)ptr, bytes};
    oh_device *maker = NULL;
    oh_mem_handle handle;
    oh_cuda_scope scope;
    const oh_mem *memory = oh_mem_find(ptr, 1, &maker);
    if (memory != NULL && maker->ops->kind == ONEHOP_DEVICE_CUDA)
        return export_registered(memory, maker, &want, out, offset_out, fd_out);
    onehop_result error = oh_cuda_enter(device, &scope);
    if (error != ONEHOP_OK) return error;
    error = export_here(device, &want, &handle);
    oh_cuda_leave(&scope);
    if (error != ONEHOP_OK) return error;
    *out = handle;
    *offset_out = want.at - handle.base;
    *fd_out = -1;
    return ONEHOP_OK;
}

/* ---- import and release ------------------------------------------------------------------ */

static bool no_path(oh_cu_result result) {
    return result == OH_CU_PEER_UNSUPPORTED || result == OH_CU_TOO_MANY_PEERS ||
           result == OH_CU_INVALID_DEVICE || result == OH_CU_NOT_SUPPORTED;
}

/* Access for another GPU of this process. With cuMemAlloc it goes by context, for all its memory.
 * It is not taken back: the program may have come to rely on it, and it is not counted. */
static onehop_result reach_context(const oh_cuda_device *device, oh_cu_context context,
                                   const oh_mem_handle *handle) {
    if (context == device->context) return ONEHOP_OK;
    oh_cu_result result = oh_cu.cuCtxEnablePeerAccess(context, 0);
    if (result == OH_CU_SUCCESS || result == OH_CU_PEER_ALREADY_ENABLED) return ONEHOP_OK;
    return oh_cuda_error_as(no_path(result) ? ONEHOP_ERR_UNSUPPORTED : ONEHOP_ERR_DRIVER, result,
                            "cuCtxEnablePeerAccess",
                            "giving GPU %d access to memory of GPU %u of the same process",
                            device->ordinal, handle->device);
}

/* Within a scope. There is nothing to undo, hence no owner. */
static onehop_result share_here(const oh_cuda_device *device, const oh_mem_handle *handle,
                                oh_mem *out) {
    oh_cu_pointer_attribute attribute = OH_CU_POINTER_CONTEXT;
    oh_cu_context context = NULL;
    void *answer = &context;
    oh_cu_result result = oh_cu.cuPointerGetAttributes(1, &attribute, &answer, handle->base);
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error(result, "cuPointerGetAttributes", "asking what memory lies at 0x%llx",
                             (unsigned long long)handle->base);
    if (context == NULL)
        return oh_error(ONEHOP_ERR_ARGUMENT,
                        "memory of GPU %u at 0x%llx was freed before another rank of this process "
                        "could share it",
                        handle->device, (unsigned long long)handle->base);
    onehop_result error = reach_context(device, context, handle);
    if (error != ONEHOP_OK) return error;
    const oh_mem shared = {(void *)(uintptr_t)handle->base, (size_t)handle->bytes, NULL};
    *out = shared;
    return ONEHOP_OK;
}

/* A new record at the head of the device's list. Within a scope, with the lock held. */
static onehop_result open_handle(oh_cuda_device *device, const oh_mem_handle *handle,
                                 opened **out) {
    oh_cu_ipc_handle name;
    opened *o = calloc(1, sizeof *o);
    if (o == NULL)
        return oh_error(ONEHOP_ERR_MEMORY, "no memory for the record of a peer's memory");
    memcpy(name.bytes, handle->data, sizeof name.bytes);
    oh_cu_result result =
        oh_cu.cuIpcOpenMemHandle_v2(&o->address, name, OH_CU_IPC_LAZY_PEER_ACCESS);
    if (result != OH_CU_SUCCESS) {
        free(o);
        return oh_cuda_error_as(no_path(result) ? ONEHOP_ERR_UNSUPPORTED : ONEHOP_ERR_DRIVER,
                                result, "cuIpcOpenMemHandle",
                                "mapping %llu bytes of a peer's GPU %u for GPU %d",
                                (unsigned long long)handle->bytes, handle->device, device->ordinal);
    }
    o->head.foreign = true;
    o->handle = *handle;
    o->next = device->opened;
    device->opened = o;
    *out = o;
    return ONEHOP_OK;
}

static bool same_handle(const oh_mem_handle *a, const oh_mem_handle *b) {
    return a->base == b->base && a->bytes == b->bytes &&
           memcmp(a->tag, b->tag, sizeof a->tag) == 0 &&
           memcmp(a->data, b->data, sizeof a->data) == 0;
}

/* Within a scope. */
static onehop_result import_here(oh_cuda_device *device, const oh_mem_handle *handle, oh_mem *out) {
    onehop_result error = ONEHOP_OK;
    pthread_mutex_lock(&opened_lock);
    opened *o = device->opened;
    while (o != NULL && !same_handle(&o->handle, handle)) o = o->next;
    if (o == NULL) error = open_handle(device, handle, &o);
    if (error == ONEHOP_OK) {
        const oh_mem mapped = {(void *)(uintptr_t)o->address, (size_t)handle->bytes, o};
        o->references++;
        *out = mapped;
    }
    pthread_mutex_unlock(&opened_lock);
    return error;
}

static onehop_result check_handle(const oh_mem_handle *handle) {
    static const unsigned char no_tag[sizeof handle->tag];
    if (handle->bytes == 0 || handle->bytes > SIZE_MAX / 2 || handle->base == 0 ||
        memcmp(handle->tag, no_tag, sizeof no_tag) == 0)
        return oh_error(ONEHOP_ERR_ARGUMENT,
                        "a peer's classic IPC handle is damaged: it names %llu bytes at 0x%llx",
                        (unsigned long long)handle->bytes, (unsigned long long)handle->base);
    return ONEHOP_OK;
}

onehop_result oh_cuda_foreign_import(oh_device *base, const oh_mem_handle *handle, oh_mem *out) {
    oh_cuda_device *device = oh_cuda_of(base);
    oh_cuda_scope scope;
    onehop_result error = check_handle(handle);
    if (error == ONEHOP_OK) error = oh_cuda_enter(device, &scope);
    if (error != ONEHOP_OK) return error;
    error = is_own(handle) ? share_here(device, handle, out) : import_here(device, handle, out);
    oh_cuda_leave(&scope);
    return error;
}

/* Takes the record off the list if that was the last reference, so that nobody finds it while it is
 * being closed. */
static void close_here(oh_cuda_device *device, opened *o) {
    pthread_mutex_lock(&opened_lock);
    if (--o->references == 0) {
        opened **link = &device->opened;
        while (*link != o) {
            assert(*link != NULL); /* released through the device that imported it */
            link = &(*link)->next;
        }
        *link = o->next;
        oh_cu_result result = oh_cu.cuIpcCloseMemHandle(o->address);
        if (result != OH_CU_SUCCESS)
            oh_log(ONEHOP_LOG_DEBUG, "GPU %d: cuIpcCloseMemHandle failed with error %u",
                   device->ordinal, result);
        free(o);
    }
    pthread_mutex_unlock(&opened_lock);
}

/* Without its context nothing is mapped any more, and the record goes all the same. */
void oh_cuda_foreign_release(oh_device *base, void *owner) {
    oh_cuda_scope scope;
    bool entered = oh_cuda_enter(oh_cuda_of(base), &scope) == ONEHOP_OK;
    close_here(oh_cuda_of(base), owner);
    if (entered) oh_cuda_leave(&scope);
}
