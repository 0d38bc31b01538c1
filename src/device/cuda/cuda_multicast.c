/* Multicast of NVSwitch: an object that all ranks' GPUs join, to which each binds its memory, and
 * which each maps; the switch then sends a store to all and adds what a load finds.
 *
 * NEVER RUN ON HARDWARE. The one file that makes such objects, and only after `allowed` has asked
 * the switches of the environment and the driver.
 *
 * Bindings are not undone one by one: a peer that is still running would find memory missing under
 * the address that all share. They end with the object, when the last rank has let it go. */
#include "device/cuda/cuda_device.h"

#include <stdlib.h>
#include <string.h>

typedef struct multicast {
    oh_cu_allocation object;
    size_t bytes;
    oh_cu_ptr address;
    bool mapped;
} multicast;

static onehop_result allowed(const oh_cuda_device *device) {
    const char *why = oh_multicast_refusal();
    if (why == NULL && (!device->multicast || device->capability < 90))
        why = "the driver does not report it for this GPU";
    if (why == NULL) return ONEHOP_OK;
    return oh_error(ONEHOP_ERR_UNSUPPORTED, "multicast is off on GPU %d: %s", device->ordinal, why);
}

/* Within a scope. Accepts any prefix. */
static void tear_down(multicast *m) {
    if (m->mapped) oh_cu.cuMemUnmap(m->address, m->bytes);
    if (m->address != 0) oh_cu.cuMemAddressFree(m->address, m->bytes);
    if (m->object != 0) oh_cu.cuMemRelease(m->object);
    free(m);
}

/* The device's part in an object that it holds. Within a scope. */
static onehop_result add_device(const oh_cuda_device *device, const multicast *m) {
    oh_cu_result result = oh_cu.cuMulticastAddDevice(m->object, device->device);
    if (result == OH_CU_SUCCESS) return ONEHOP_OK;
    return oh_cuda_error(result, "cuMulticastAddDevice", "joining GPU %d to a multicast object",
                         device->ordinal);
}

/* Within a scope. */
static onehop_result create_here(const oh_cuda_device *device, int ranks, uint32_t kind,
                                 multicast *m) {
    const oh_cu_multicast_kind wanted = {(unsigned)ranks, m->bytes, oh_cuda_handle_type(kind), 0};
    size_t unit = 0;
    oh_cu_result result =
        oh_cu.cuMulticastGetGranularity(&unit, &wanted, OH_CU_MULTICAST_GRANULARITY_MINIMUM);
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error(result, "cuMulticastGetGranularity", "asking GPU %d", device->ordinal);
    if (m->bytes % unit)
        return oh_error(ONEHOP_ERR_UNSUPPORTED,
                        "multicast is bound in pieces of %zu bytes, memory of %zu bytes is not",
                        unit, m->bytes);
    result = oh_cu.cuMulticastCreate(&m->object, &wanted);
    if (result != OH_CU_SUCCESS) {
        m->object = 0;
        return oh_cuda_error(result, "cuMulticastCreate", "making a multicast object of %zu bytes",
                             m->bytes);
    }
    return add_device(device, m);
}

/* Within a scope. */
static onehop_result export_here(const multicast *m, uint32_t kind, oh_mem_handle *handle_out,
                                 int *fd_out) {
    oh_cuda_handle_bytes bytes;
    oh_cu_result result = oh_cuda_export_bytes(m->object, kind, &bytes);
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error(result, "cuMemExportToShareableHandle",
                             "exporting a multicast object");
    memset(handle_out, 0, sizeof *handle_out);
    handle_out->kind = kind;
    handle_out->bytes = m->bytes;
    if (kind == OH_HANDLE_FD)
        *fd_out = bytes.fd;
    else
        memcpy(handle_out->data, bytes.fabric, sizeof bytes.fabric);
    return ONEHOP_OK;
}

/* A record in `out` and a scope; both end with `finish`. */
static onehop_result begin(const oh_cuda_device *device, size_t bytes, oh_multicast *out,
                           oh_cuda_scope *scope) {
    onehop_result error = allowed(device);
    if (error != ONEHOP_OK) return error;
    multicast *m = calloc(1, sizeof *m);
    if (m == NULL) return oh_error(ONEHOP_ERR_MEMORY, "no memory for the record of a multicast");
    m->bytes = bytes;
    error = oh_cuda_enter(device, scope);
    if (error == ONEHOP_OK)
        out->owner = m;
    else
        free(m);
    return error;
}

static onehop_result finish(onehop_result error, oh_multicast *out, const oh_cuda_scope *scope) {
    if (error != ONEHOP_OK) {
        tear_down(out->owner);
        out->owner = NULL;
    }
    oh_cuda_leave(scope);
    return error;
}

onehop_result oh_cuda_multicast_create(oh_device *base, size_t bytes, int ranks, uint32_t kind,
                                       oh_multicast *out, oh_mem_handle *handle_out, int *fd_out) {
    const oh_cuda_device *device = oh_cuda_of(base);
    oh_cuda_scope scope;
    *fd_out = -1;
    onehop_result error = begin(device, bytes, out, &scope);
    if (error != ONEHOP_OK) return error;
    error = create_here(device, ranks, kind, out->owner);
    if (error == ONEHOP_OK) error = export_here(out->owner, kind, handle_out, fd_out);
    return finish(error, out, &scope);
}

onehop_result oh_cuda_multicast_join(oh_device *base, const oh_mem_handle *handle, int fd,
                                     oh_multicast *out) {
    const oh_cuda_device *device = oh_cuda_of(base);
    oh_cuda_handle_bytes bytes;
    oh_cuda_scope scope;
    onehop_result error = begin(device, (size_t)handle->bytes, out, &scope);
    if (error != ONEHOP_OK) return error;
    multicast *m = out->owner;
    memset(&bytes, 0, sizeof bytes);
    if (handle->kind == OH_HANDLE_FD)
        bytes.fd = fd;
    else
        memcpy(bytes.fabric, handle->data, sizeof bytes.fabric);
    oh_cu_result result = oh_cuda_import_bytes(&bytes, handle->kind, &m->object);
    if (result != OH_CU_SUCCESS) {
        m->object = 0;
        error = oh_cuda_error(result, "cuMemImportFromShareableHandle",
                              "importing a multicast object for GPU %d", device->ordinal);
    }
    if (error == ONEHOP_OK) error = add_device(device, m);
    return finish(error, out, &scope);
}

onehop_result oh_cuda_multicast_bind(oh_device *base, const oh_mem *own, oh_multicast *out) {
    const oh_cuda_device *device = oh_cuda_of(base);
    const multicast *m = out->owner;
    oh_cuda_scope scope;
    onehop_result error = allowed(device);
    if (error == ONEHOP_OK && own->bytes < m->bytes)
        error = oh_error(ONEHOP_ERR_UNSUPPORTED,
                         "%zu bytes were to be bound to a multicast object, GPU %d has %zu",
                         m->bytes, device->ordinal, own->bytes);
    if (error == ONEHOP_OK) error = oh_cuda_enter(device, &scope);
    if (error != ONEHOP_OK) return error;
    oh_cu_result result =
        oh_cu.cuMulticastBindAddr(m->object, 0, (oh_cu_ptr)(uintptr_t)own->ptr, m->bytes, 0);
    oh_cuda_leave(&scope);
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error(result, "cuMulticastBindAddr",
                             "binding %zu bytes of GPU %d to a multicast object", m->bytes,
                             device->ordinal);
    return ONEHOP_OK;
}

/* Within a scope. */
static onehop_result map_here(const oh_cuda_device *device, multicast *m) {
    const size_t aligned_to = (size_t)2 << 20; /* a large page */
    oh_cu_result result = oh_cu.cuMemAddressReserve(&m->address, m->bytes, aligned_to, 0, 0);
    if (result != OH_CU_SUCCESS) {
        m->address = 0;
        return oh_cuda_error(result, "cuMemAddressReserve", "reserving addresses for %zu bytes",
                             m->bytes);
    }
    result = oh_cu.cuMemMap(m->address, m->bytes, 0, m->object, 0);
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error(result, "cuMemMap", "mapping a multicast object for GPU %d",
                             device->ordinal);
    m->mapped = true;
    return oh_cuda_give_access(device, m->address, m->bytes);
}

onehop_result oh_cuda_multicast_map(oh_device *base, const oh_mem *buffers, int ranks,
                                    oh_multicast *out) {
    const oh_cuda_device *device = oh_cuda_of(base);
    multicast *m = out->owner;
    oh_cuda_scope scope;
    (void)buffers;
    (void)ranks;
    onehop_result error = allowed(device);
    if (error == ONEHOP_OK) error = oh_cuda_enter(device, &scope);
    if (error != ONEHOP_OK) return error;
    error = map_here(device, m);
    oh_cuda_leave(&scope);
    if (error == ONEHOP_OK) out->address = m->address;
    return error;
}

void oh_cuda_multicast_release(oh_device *base, oh_multicast *out) {
    oh_cuda_scope scope;
    multicast *m = out->owner;
    memset(out, 0, sizeof *out);
    if (m == NULL || !oh_process_is(oh_cuda_of(base)->process)) return;
    /* These calls belong to no context, so they are made even if ours can no longer be entered. */
    const bool entered = oh_cuda_enter(oh_cuda_of(base), &scope) == ONEHOP_OK;
    tear_down(m);
    if (entered) oh_cuda_leave(&scope);
}
