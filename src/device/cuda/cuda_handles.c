/* The kinds of handle under which memory of this GPU can be given to another process. Some machines
 * claim a kind and then refuse it (fabric handles need a channel that the administrator opens;
 * containers forbid things), so each claim is tried with one piece of memory: created, exported and
 * imported again. */
#include "base/descriptor.h"
#include "device/cuda/cuda_device.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

oh_cu_memory_kind oh_cuda_memory_kind(const oh_cuda_device *device, uint32_t kinds) {
    oh_cu_memory_kind kind;
    memset(&kind, 0, sizeof kind);
    kind.type = OH_CU_ALLOCATION_PINNED;
    kind.location.type = OH_CU_LOCATION_DEVICE;
    kind.location.id = device->ordinal;
    if (kinds & OH_HANDLE_FD) kind.handle_types |= OH_CU_HANDLE_FD;
    if (kinds & OH_HANDLE_FABRIC) kind.handle_types |= OH_CU_HANDLE_FABRIC;
    return kind;
}

oh_cu_handle_type oh_cuda_handle_type(uint32_t kind) {
    return kind == OH_HANDLE_FABRIC ? OH_CU_HANDLE_FABRIC : OH_CU_HANDLE_FD;
}

oh_cu_result oh_cuda_import_bytes(oh_cuda_handle_bytes *bytes, uint32_t kind,
                                  oh_cu_allocation *out) {
    void *handle = kind == OH_HANDLE_FD ? (void *)(intptr_t)bytes->fd : (void *)bytes->fabric;
    return oh_cu.cuMemImportFromShareableHandle(out, handle, oh_cuda_handle_type(kind));
}

oh_cu_result oh_cuda_export_bytes(oh_cu_allocation piece, uint32_t kind,
                                  oh_cuda_handle_bytes *out) {
    memset(out, 0, sizeof *out);
    oh_cu_result result =
        oh_cu.cuMemExportToShareableHandle(out, piece, oh_cuda_handle_type(kind), 0);
    if (result != OH_CU_SUCCESS || kind != OH_HANDLE_FD) return result;
    out->fd = oh_fd_high(out->fd);
    if (out->fd < 0) return OH_CU_OPERATING_SYSTEM;
    fcntl(out->fd, F_SETFD, FD_CLOEXEC);
    return OH_CU_SUCCESS;
}

/* Exports and imports the piece again; the step that failed, or NULL. */
static const char *try_round_trip(oh_cu_allocation piece, uint32_t kind, oh_cu_result *result) {
    oh_cuda_handle_bytes bytes;
    oh_cu_allocation twin = 0;
    *result = oh_cuda_export_bytes(piece, kind, &bytes);
    if (*result != OH_CU_SUCCESS) return "export";
    *result = oh_cuda_import_bytes(&bytes, kind, &twin);
    if (kind == OH_HANDLE_FD) close(bytes.fd);
    if (*result != OH_CU_SUCCESS) return "import";
    oh_cu.cuMemRelease(twin);
    return NULL;
}

/* *lasting becomes false if the failure may be gone the next time. */
static bool try_handle_kind(const oh_cuda_device *device, oh_handle_kind handle_kind,
                            oh_cu_device_attribute attribute, bool *lasting) {
    oh_cu_memory_kind kind = oh_cuda_memory_kind(device, (uint32_t)handle_kind);
    oh_cu_allocation piece = 0;
    size_t unit = 0;
    int claimed = 0;
    const char *step = "create";
    if (oh_cu.cuDeviceGetAttribute(&claimed, attribute, device->device) != OH_CU_SUCCESS ||
        claimed == 0)
        return false;
    oh_cu_result result =
        oh_cu.cuMemGetAllocationGranularity(&unit, &kind, OH_CU_GRANULARITY_RECOMMENDED);
    if (result == OH_CU_SUCCESS) result = oh_cu.cuMemCreate(&piece, unit, &kind, 0);
    if (result == OH_CU_SUCCESS) {
        step = try_round_trip(piece, (uint32_t)handle_kind, &result);
        oh_cu.cuMemRelease(piece);
    }
    if (result == OH_CU_OUT_OF_MEMORY) *lasting = false;
    if (step != NULL)
        oh_log(ONEHOP_LOG_DEBUG, "GPU %d: %s handles do not work here (%s: error %u)",
               device->ordinal, handle_kind == OH_HANDLE_FD ? "descriptor" : "fabric", step,
               result);
    return step == NULL;
}

/* Within a scope. The answer is kept for the life of the process, since devices are opened often.
 * Two threads may both try; they find the same, and the word stands for itself: relaxed. */
uint32_t oh_cuda_try_handle_kinds(const oh_cuda_device *device) {
    enum {
        TRIED = 0x100,
        KEPT = 64
    };
    static _Atomic uint32_t kept[KEPT];
    bool lasting = true;
    uint32_t kinds = 0;
    _Atomic uint32_t *place = device->ordinal < KEPT ? &kept[device->ordinal] : NULL;
    if (place != NULL) kinds = atomic_load_explicit(place, memory_order_relaxed);
    if (kinds & TRIED) return kinds & ~(uint32_t)TRIED;
    if (try_handle_kind(device, OH_HANDLE_FD, OH_CU_DEVICE_FD, &lasting)) kinds |= OH_HANDLE_FD;
    if (try_handle_kind(device, OH_HANDLE_FABRIC, OH_CU_DEVICE_FABRIC, &lasting))
        kinds |= OH_HANDLE_FABRIC;
    if (place != NULL && lasting) atomic_store_explicit(place, kinds | TRIED, memory_order_relaxed);
    return kinds;
}
