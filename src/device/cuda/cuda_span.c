/* Foreign memory of peers, mapped here.
 *
 * Classic IPC: an opened handle is recorded in the device that opened it and counted, so that many
 * tensors in one allocation cost one mapping. The record is found by all that was received, not by
 * the address: addresses are reused, and then the driver gives the new allocation a handle of its
 * own. Nothing is kept open once the count is zero, as the owner must not free before all have
 * closed.
 *
 * Virtual memory: one range of addresses for a span, each chunk mapped at its place in it. The
 * mapping keeps the chunk, so its handle is let go at once.
 *
 * A process cannot open its own classic handle, and need not map its own chunks again: there the
 * pointer itself is shared, and the device given access. */
#include "device/cuda/cuda_device.h"
#include "device/foreign.h"

#include <assert.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* One handle of classic IPC, or one range of chunks. */
typedef struct oh_cuda_opened {
    oh_cuda_owner head;
    struct oh_cuda_opened *next; /* both guarded by `opened_lock`; classic IPC only */
    int references;
    oh_mem_handle handle; /* as received */
    oh_cu_ptr address;
    size_t bytes;         /* of a range; 0: classic IPC */
    struct chunk *chunks; /* mapped into the range */
} opened;

typedef struct chunk {
    struct chunk *next;
    oh_cu_ptr address;
    size_t bytes;
} chunk;

/* Held while a handle is opened or closed: of two threads that want one, the second finds it. */
static pthread_mutex_t opened_lock = PTHREAD_MUTEX_INITIALIZER;

static onehop_result no_record(void) {
    return oh_error(ONEHOP_ERR_MEMORY, "no memory for the record of a peer's memory");
}

static bool no_path(oh_cu_result result) {
    return result == OH_CU_PEER_UNSUPPORTED || result == OH_CU_TOO_MANY_PEERS ||
           result == OH_CU_INVALID_DEVICE || result == OH_CU_NOT_SUPPORTED;
}

/* ---- within the process ---------------------------------------------------------------------- */

/* Access for another GPU of this process. With cuMemAlloc it goes by context, for all its memory.
 * It is not taken back: the program may have come to rely on it, and it is not counted. */
static onehop_result reach_context(const oh_cuda_device *device, oh_cu_context context,
                                   const oh_mem_handle *piece) {
    if (context == device->context) return ONEHOP_OK;
    oh_cu_result result = oh_cu.cuCtxEnablePeerAccess(context, 0);
    if (result == OH_CU_SUCCESS || result == OH_CU_PEER_ALREADY_ENABLED) return ONEHOP_OK;
    return oh_cuda_error_as(no_path(result) ? ONEHOP_ERR_UNSUPPORTED : ONEHOP_ERR_DRIVER, result,
                            "cuCtxEnablePeerAccess",
                            "giving GPU %d access to memory of GPU %u of the same process",
                            device->ordinal, piece->device);
}

static onehop_result reach_allocation(const oh_cuda_device *device, const oh_mem_handle *piece) {
    oh_cu_pointer_attribute attribute = OH_CU_POINTER_CONTEXT;
    oh_cu_context context = NULL;
    void *answer = &context;
    oh_cu_result result = oh_cu.cuPointerGetAttributes(1, &attribute, &answer, piece->base);
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error(result, "cuPointerGetAttributes", "asking what memory lies at 0x%llx",
                             (unsigned long long)piece->base);
    if (context == NULL)
        return oh_error(ONEHOP_ERR_ARGUMENT,
                        "memory of GPU %u at 0x%llx was freed before another rank of this process "
                        "could share it",
                        piece->device, (unsigned long long)piece->base);
    return reach_context(device, context, piece);
}

/* What the rank of one GPU can use, all ranks of that GPU can. Within a scope. */
static onehop_result reach_own(const oh_cuda_device *device, const oh_mem_handle *piece) {
    if (piece->device == (uint32_t)device->ordinal) return ONEHOP_OK;
    switch (piece->kind) {
    case OH_HANDLE_IPC:
        return reach_allocation(device, piece);
    case OH_HANDLE_FD:
    case OH_HANDLE_FABRIC:
        return oh_cuda_give_access(device, piece->base, (size_t)piece->bytes);
    default:
        return oh_foreign_refuse(piece);
    }
}

/* ---- classic IPC ----------------------------------------------------------------------------- */

/* A new record at the head of the device's list. Within a scope, with the lock held. */
static onehop_result open_handle(oh_cuda_device *device, const oh_mem_handle *handle,
                                 opened **out) {
    oh_cu_ipc_handle name;
    opened *o = calloc(1, sizeof *o);
    if (o == NULL) return no_record();
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
    return a->base == b->base && a->bytes == b->bytes && oh_id128_equal(a->process, b->process) &&
           memcmp(a->data, b->data, sizeof a->data) == 0;
}

/* Within a scope. */
static onehop_result map_allocation(oh_cuda_device *device, const oh_mem_handle *piece,
                                    oh_mem *span) {
    onehop_result error = ONEHOP_OK;
    pthread_mutex_lock(&opened_lock);
    opened *o = device->opened;
    while (o != NULL && !same_handle(&o->handle, piece)) o = o->next;
    if (o == NULL) error = open_handle(device, piece, &o);
    if (error == ONEHOP_OK) {
        const oh_mem mapped = {(void *)(uintptr_t)o->address, (size_t)piece->bytes, o};
        o->references++;
        *span = mapped;
    }
    pthread_mutex_unlock(&opened_lock);
    return error;
}

/* Takes the record off the list if that was the last reference, so that nobody finds it while it is
 * being closed. */
static void close_handle(oh_cuda_device *device, opened *o) {
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

/* ---- virtual memory -------------------------------------------------------------------------- */

static onehop_result reserve(const oh_cuda_device *device, size_t bytes, oh_mem *span) {
    const oh_cu_memory_kind kind = oh_cuda_memory_kind(device, OH_HANDLE_FD);
    size_t unit = 0;
    opened *o = calloc(1, sizeof *o);
    if (o == NULL) return no_record();
    oh_cu_result result =
        oh_cu.cuMemGetAllocationGranularity(&unit, &kind, OH_CU_GRANULARITY_RECOMMENDED);
    if (result == OH_CU_SUCCESS)
        result = oh_cu.cuMemAddressReserve(&o->address, oh_round_up(bytes, unit), unit, 0, 0);
    if (result != OH_CU_SUCCESS) {
        free(o);
        return oh_cuda_error(result, "cuMemAddressReserve", "reserving addresses for %zu bytes",
                             bytes);
    }
    o->head.foreign = true;
    o->bytes = oh_round_up(bytes, unit);
    const oh_mem reserved = {(void *)(uintptr_t)o->address, bytes, o};
    *span = reserved;
    return ONEHOP_OK;
}

static oh_cu_result map_imported(const oh_mem_handle *piece, int fd, oh_cu_ptr address) {
    oh_cuda_handle_bytes bytes;
    oh_cu_allocation allocation = 0;
    memset(&bytes, 0, sizeof bytes);
    if (piece->kind == OH_HANDLE_FD)
        bytes.fd = fd;
    else
        memcpy(bytes.fabric, piece->data, sizeof bytes.fabric);
    oh_cu_result result = oh_cuda_import_bytes(&bytes, piece->kind, &allocation);
    if (result != OH_CU_SUCCESS) return result;
    result = oh_cu.cuMemMap(address, (size_t)piece->bytes, 0, allocation, 0);
    oh_cu.cuMemRelease(allocation);
    return result;
}

/* Within a scope. */
static onehop_result map_chunk(const oh_cuda_device *device, const oh_mem_handle *piece, int fd,
                               uint64_t offset, opened *o) {
    chunk *c = calloc(1, sizeof *c);
    if (c == NULL) return no_record();
    c->address = o->address + offset;
    c->bytes = (size_t)piece->bytes;
    oh_cu_result result = map_imported(piece, fd, c->address);
    if (result != OH_CU_SUCCESS) {
        free(c);
        return oh_cuda_error_as(no_path(result) ? ONEHOP_ERR_UNSUPPORTED : ONEHOP_ERR_DRIVER,
                                result, "cuMemImportFromShareableHandle or cuMemMap",
                                "mapping %llu bytes of a peer's GPU %u for GPU %d",
                                (unsigned long long)piece->bytes, piece->device, device->ordinal);
    }
    c->next = o->chunks;
    o->chunks = c;
    return oh_cuda_give_access(device, c->address, c->bytes);
}

static void unmap_range(opened *o) {
    for (chunk *c = o->chunks, *next; c != NULL; c = next) {
        next = c->next;
        oh_cu.cuMemUnmap(c->address, c->bytes);
        free(c);
    }
    oh_cu.cuMemAddressFree(o->address, o->bytes);
    free(o);
}

/* ---- the operations -------------------------------------------------------------------------- */

/* Within a scope. */
static onehop_result map_here(oh_cuda_device *device, const oh_mem_handle *piece, int fd,
                              uint64_t offset, oh_mem *span, uint64_t span_bytes) {
    onehop_result error = ONEHOP_OK;
    if (oh_foreign_is_own(piece)) {
        error = reach_own(device, piece);
        if (error == ONEHOP_OK && span->ptr == NULL)
            oh_foreign_span_in_place(piece, span_bytes, offset, span);
        return error;
    }
    if (piece->kind == OH_HANDLE_IPC) return map_allocation(device, piece, span);
    if (span->ptr == NULL) error = reserve(device, (size_t)span_bytes, span);
    return error == ONEHOP_OK ? map_chunk(device, piece, fd, offset, span->owner) : error;
}

static onehop_result check(const oh_mem_handle *piece, int fd, uint64_t span_bytes, uint64_t offset,
                           const oh_mem *span) {
    static const oh_id128 nobody;
    onehop_result error = oh_foreign_check(piece, span_bytes, offset);
    if (error != ONEHOP_OK || oh_foreign_is_own(piece)) return error;
    switch (piece->kind) {
    case OH_HANDLE_IPC:
        if (span->ptr == NULL && span_bytes == piece->bytes &&
            !oh_id128_equal(piece->process, nobody))
            return ONEHOP_OK;
        return oh_error(ONEHOP_ERR_ARGUMENT,
                        "a peer's classic IPC handle is damaged: it names %llu bytes at 0x%llx",
                        (unsigned long long)piece->bytes, (unsigned long long)piece->base);
    case OH_HANDLE_FD:
        if (fd >= 0) return ONEHOP_OK;
        return oh_error(ONEHOP_ERR_ARGUMENT, "a peer's memory came without its descriptor");
    case OH_HANDLE_FABRIC:
        return ONEHOP_OK;
    default:
        return oh_foreign_refuse(piece);
    }
}

onehop_result oh_cuda_foreign_map(oh_device *base, const oh_mem_handle *piece, int fd,
                                  uint64_t span_bytes, uint64_t offset, oh_mem *span) {
    oh_cuda_scope scope;
    onehop_result error = check(piece, fd, span_bytes, offset, span);
    if (error == ONEHOP_OK) error = oh_cuda_enter(oh_cuda_of(base), &scope);
    if (error != ONEHOP_OK) return error;
    error = map_here(oh_cuda_of(base), piece, fd, offset, span, span_bytes);
    oh_cuda_leave(&scope);
    return error;
}

/* Without its context nothing is mapped any more, and the record goes all the same. */
void oh_cuda_foreign_release(oh_device *base, void *owner) {
    oh_cuda_scope scope;
    opened *o = owner;
    bool entered = oh_cuda_enter(oh_cuda_of(base), &scope) == ONEHOP_OK;
    if (o->bytes > 0)
        unmap_range(o);
    else
        close_handle(oh_cuda_of(base), o);
    if (entered) oh_cuda_leave(&scope);
}
