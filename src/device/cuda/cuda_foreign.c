/* GPU memory that somebody else allocated: which of it other processes can map, and how.
 *
 * What cuMemAlloc or cudaMalloc made goes by classic IPC: a handle of 64 bytes names the whole
 * allocation. Virtual memory (cuMemCreate, cuMemMap; allocators with growing segments lay many
 * chunks side by side) goes chunk by chunk, by descriptor or fabric handle, if it was made so that
 * it can. Pools, managed and host memory go in no way.
 *
 * Which memory it is, is asked of the driver, address by address: programs mix allocators. */
#include "device/cuda/cuda_device.h"
#include "device/foreign.h"

#include <string.h>

typedef struct search {
    const oh_cuda_device *device;
    uint32_t kinds;
} search;

/* What the driver says of an address. */
typedef struct answers {
    unsigned int type, managed, ipc;
    int ordinal;
    uint64_t handle_types;
    void *pool;
} answers;

static bool ask(uint64_t at, answers *out) {
    memset(out, 0, sizeof *out);
    oh_cu_pointer_attribute attributes[] = {OH_CU_POINTER_MEMORY_TYPE,  OH_CU_POINTER_MANAGED,
                                            OH_CU_POINTER_IPC,          OH_CU_POINTER_ORDINAL,
                                            OH_CU_POINTER_HANDLE_TYPES, OH_CU_POINTER_POOL};
    void *places[] = {&out->type,    &out->managed,      &out->ipc,
                      &out->ordinal, &out->handle_types, &out->pool};
    /* Unlike the question for a single attribute, this one does not fail on a pointer that the
     * driver does not know: all answers are then 0. It does fail on memory of a graph's own
     * allocation nodes, which nobody can share. */
    return oh_cu.cuPointerGetAttributes(OH_LENGTH(attributes), attributes, places, at) ==
           OH_CU_SUCCESS;
}

/* ---- one piece ------------------------------------------------------------------------------- */

/* Why no piece of memory with these answers can be shared, or NULL. */
static const char *private_because(const oh_cuda_device *device, const answers *a) {
    if (a->type != OH_CU_MEMORY_HOST && a->type != OH_CU_MEMORY_DEVICE)
        return "plain host memory, unknown to CUDA";
    if (a->managed) return "managed memory";
    if (a->type == OH_CU_MEMORY_HOST) return "pinned host memory";
    if (a->ordinal != device->ordinal) return "memory of another GPU than its rank's";
    if (a->pool) return "from a memory pool (cuMemAllocAsync, cudaMallocAsync)";
    return NULL;
}

static const char *name_ipc(oh_mem_handle *piece) {
    oh_cu_ipc_handle name;
    if (oh_cu.cuIpcGetMemHandle(&name, piece->base) != OH_CU_SUCCESS)
        return "an allocation that cuIpcGetMemHandle refuses";
    memcpy(piece->data, name.bytes, sizeof piece->data);
    piece->kind = OH_HANDLE_IPC;
    return NULL;
}

static oh_cu_result export_chunk(const oh_mem_handle *piece, uint32_t kind,
                                 oh_cuda_handle_bytes *out) {
    oh_cu_allocation chunk = 0;
    oh_cu_result result = oh_cu.cuMemRetainAllocationHandle(&chunk, (void *)(uintptr_t)piece->base);
    if (result != OH_CU_SUCCESS) return result;
    result = oh_cuda_export_bytes(chunk, kind, out);
    oh_cu.cuMemRelease(chunk);
    return result;
}

static const char *name_chunk(oh_mem_handle *piece, uint32_t kinds, uint64_t types) {
    oh_cuda_handle_bytes bytes;
    if (kinds & OH_HANDLE_FD && types & OH_CU_HANDLE_FD) {
        piece->kind = OH_HANDLE_FD;
        return NULL;
    }
    if (!(kinds & OH_HANDLE_FABRIC && types & OH_CU_HANDLE_FABRIC))
        return "virtual memory (cuMemMap) without a handle that serves";
    if (export_chunk(piece, OH_HANDLE_FABRIC, &bytes) != OH_CU_SUCCESS)
        return "virtual memory (cuMemMap) whose fabric handle is refused";
    memcpy(piece->data, bytes.fabric, sizeof bytes.fabric);
    piece->kind = OH_HANDLE_FABRIC;
    return NULL;
}

/* Within a scope. */
static onehop_result locate(void *context, uint64_t at, uint64_t limit, oh_mem_handle *out) {
    const search *s = context;
    answers a;
    oh_cu_ptr base = 0;
    size_t bytes = 0;
    const char *why = NULL;
    out->device = (uint32_t)s->device->ordinal;
    if (!ask(at, &a))
        why = "memory of which the driver tells nothing";
    else
        why = private_because(s->device, &a);
    if (!why && (oh_cu.cuMemGetAddressRange_v2(&base, &bytes, at) != OH_CU_SUCCESS || at < base ||
                 at - base >= bytes))
        why = "memory without known bounds";
    if (why) {
        oh_foreign_private(out, at, limit - at, why);
        return ONEHOP_OK;
    }
    out->base = base;
    out->bytes = bytes;
    if (!a.ipc)
        why = name_chunk(out, s->kinds, a.handle_types);
    else if (s->kinds & OH_HANDLE_IPC)
        why = name_ipc(out);
    else
        why = "memory for classic IPC, which is not wanted";
    if (why) oh_foreign_private(out, base, bytes, why);
    return ONEHOP_OK;
}

/* ---- the operations -------------------------------------------------------------------------- */

onehop_result oh_cuda_foreign_find(oh_device *base, const oh_range *ranges, size_t count,
                                   uint32_t kinds, oh_mem_handle **pieces_out, size_t *count_out) {
    search s = {oh_cuda_of(base), kinds};
    oh_cuda_scope scope;
    onehop_result error = oh_cuda_enter(s.device, &scope);
    if (error != ONEHOP_OK) return error;
    error = oh_foreign_walk(ranges, count, locate, &s, pieces_out, count_out);
    oh_cuda_leave(&scope);
    return error;
}

onehop_result oh_cuda_foreign_descriptor(oh_device *base, const oh_mem_handle *piece, int *fd_out) {
    const oh_cuda_device *device = oh_cuda_of(base);
    oh_cuda_handle_bytes bytes;
    oh_cuda_scope scope;
    onehop_result error = oh_cuda_enter(device, &scope);
    if (error != ONEHOP_OK) return error;
    const oh_cu_result result = export_chunk(piece, OH_HANDLE_FD, &bytes);
    oh_cuda_leave(&scope);
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error(result, "cuMemExportToShareableHandle",
                             "exporting %llu bytes of GPU %d that somebody else allocated",
                             (unsigned long long)piece->bytes, device->ordinal);
    *fd_out = bytes.fd;
    return ONEHOP_OK;
}
