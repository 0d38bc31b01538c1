/* The CUDA device: opening and closing, context manners, plain memory, fill and copy. */
#include "device/cuda/cuda_device.h"

#include <stdlib.h>
#include <string.h>

/* ---- context manners ------------------------------------------------------------------------- */

onehop_result oh_cuda_push(const oh_cuda_device *device, bool *pushed_out) {
    oh_cu_context current = NULL;
    if (!oh_process_is(device->process)) return oh_process_refuse("device");
    oh_cu_result result = oh_cu.cuCtxGetCurrent(&current);
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error(result, "cuCtxGetCurrent", "using GPU %d", device->ordinal);
    *pushed_out = current != device->context;
    if (!*pushed_out) return ONEHOP_OK;
    result = oh_cu.cuCtxPushCurrent_v2(device->context);
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error(result, "cuCtxPushCurrent", "making GPU %d current", device->ordinal);
    return ONEHOP_OK;
}

void oh_cuda_pop(bool pushed) {
    oh_cu_context popped;
    if (pushed) oh_cu.cuCtxPopCurrent_v2(&popped);
}

onehop_result oh_cuda_enter(const oh_cuda_device *device, oh_cuda_scope *scope) {
    onehop_result result = oh_cuda_push(device, &scope->pushed);
    if (result != ONEHOP_OK) return result;
    scope->mode = OH_CU_CAPTURE_MODE_RELAXED;
    oh_cu.cuThreadExchangeStreamCaptureMode(&scope->mode);
    return ONEHOP_OK;
}

void oh_cuda_leave(const oh_cuda_scope *scope) {
    oh_cu_capture_mode mode = scope->mode;
    oh_cu.cuThreadExchangeStreamCaptureMode(&mode);
    oh_cuda_pop(scope->pushed);
}

/* ---- open and close -------------------------------------------------------------------------- */

static onehop_result ask(oh_cuda_device *device, oh_cu_device_attribute attribute, int *out) {
    oh_cu_result result = oh_cu.cuDeviceGetAttribute(out, attribute, device->device);
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error(result, "cuDeviceGetAttribute", "asking GPU %d for attribute %u",
                             device->ordinal, attribute);
    return ONEHOP_OK;
}

static onehop_result find_device(oh_cuda_device *device) {
    int count = 0, multiprocessors = 0, major = 0, minor = 0, multicast = 0;
    oh_cu_result result = oh_cu.cuDeviceGetCount(&count);
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error(result, "cuDeviceGetCount", "looking for GPU %d", device->ordinal);
    if (device->ordinal < 0 || device->ordinal >= count)
        return oh_error(ONEHOP_ERR_NO_DEVICE,
                        "there is no GPU %d: the driver shows %d, numbered from 0 (after "
                        "CUDA_VISIBLE_DEVICES)",
                        device->ordinal, count);
    result = oh_cu.cuDeviceGet(&device->device, device->ordinal);
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error(result, "cuDeviceGet", "looking for GPU %d", device->ordinal);
    onehop_result error = ask(device, OH_CU_DEVICE_MULTIPROCESSORS, &multiprocessors);
    if (error == ONEHOP_OK) error = ask(device, OH_CU_DEVICE_MAJOR, &major);
    if (error == ONEHOP_OK) error = ask(device, OH_CU_DEVICE_MINOR, &minor);
    if (oh_cu.cuDeviceGetAttribute(&multicast, OH_CU_DEVICE_MULTICAST, device->device) ==
        OH_CU_SUCCESS)
        device->multicast = multicast != 0;
    device->multiprocessors = (uint32_t)multiprocessors;
    device->capability = (uint32_t)(major * 10 + minor);
    return error;
}

static onehop_result make_stream_and_event(oh_cuda_device *device) {
    oh_cu_result result = oh_cu.cuStreamCreate(&device->stream, OH_CU_STREAM_NON_BLOCKING);
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error(result, "cuStreamCreate", "opening GPU %d", device->ordinal);
    result = oh_cu.cuEventCreate(&device->event, OH_CU_EVENT_DISABLE_TIMING);
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error(result, "cuEventCreate", "opening GPU %d", device->ordinal);
    return ONEHOP_OK;
}

/* Needs the context; accepts any prefix of what open acquires. */
static void destroy_stream_and_event(oh_cuda_device *device) {
    if (device->event != NULL) oh_cu.cuEventDestroy_v2(device->event);
    if (device->stream != NULL) oh_cu.cuStreamDestroy_v2(device->stream);
}

static onehop_result retain_and_fill(oh_cuda_device *device) {
    oh_cuda_scope scope;
    oh_cu_capture_mode mode = OH_CU_CAPTURE_MODE_RELAXED;
    oh_cu.cuThreadExchangeStreamCaptureMode(&mode); /* the first retain makes the context */
    oh_cu_result result = oh_cu.cuDevicePrimaryCtxRetain(&device->context, device->device);
    oh_cu.cuThreadExchangeStreamCaptureMode(&mode);
    if (result != OH_CU_SUCCESS) {
        device->context = NULL;
        return oh_cuda_error(result, "cuDevicePrimaryCtxRetain", "opening GPU %d", device->ordinal);
    }
    onehop_result error = oh_cuda_enter(device, &scope);
    if (error != ONEHOP_OK) return error;
    error = make_stream_and_event(device);
    if (error == ONEHOP_OK) device->handle_kinds = oh_cuda_try_handle_kinds(device);
    oh_cuda_leave(&scope);
    return error;
}

/* The last release of a primary context frees it, hence relaxed to the end. */
static void cuda_close(oh_device *base) {
    oh_cuda_device *device = oh_cuda_of(base);
    oh_cu_capture_mode mode = OH_CU_CAPTURE_MODE_RELAXED;
    bool pushed;
    if (device == NULL) return;
    if (device->context != NULL && oh_process_is(device->process)) {
        oh_cu.cuThreadExchangeStreamCaptureMode(&mode);
        if (oh_cuda_push(device, &pushed) == ONEHOP_OK) {
            destroy_stream_and_event(device);
            oh_cuda_pop(pushed);
        }
        oh_cu.cuDevicePrimaryCtxRelease_v2(device->device);
        oh_cu.cuThreadExchangeStreamCaptureMode(&mode);
    }
    free(device);
}

static onehop_result cuda_info(oh_device *base, oh_device_info *out) {
    oh_cuda_device *device = oh_cuda_of(base);
    oh_device_info info = {.device = {ONEHOP_DEVICE_CUDA, device->ordinal}};
    int version = 0;
    size_t bytes = 0;
    oh_cu_result result = oh_cu.cuDeviceGetName(info.name, (int)sizeof info.name, device->device);
    if (result == OH_CU_SUCCESS)
        result = oh_cu.cuDeviceGetPCIBusId(info.bus_id, (int)sizeof info.bus_id, device->device);
    if (result == OH_CU_SUCCESS) result = oh_cu.cuDeviceTotalMem_v2(&bytes, device->device);
    if (result == OH_CU_SUCCESS) result = oh_cu.cuDriverGetVersion(&version);
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error(result, "a query", "describing GPU %d", device->ordinal);
    info.multiprocessors = device->multiprocessors;
    info.capability = device->capability;
    info.driver_version = (uint32_t)version;
    info.handle_kinds = device->handle_kinds;
    info.memory_bytes = bytes;
    info.multicast = device->multicast;
    *out = info;
    return ONEHOP_OK;
}

/* ---- plain memory ---------------------------------------------------------------------------- */

onehop_result oh_cuda_fill_here(const oh_cuda_device *device, oh_cu_ptr to, int byte,
                                size_t bytes) {
    const char *call = "cuMemsetD8Async";
    oh_cu_result result = oh_cu.cuMemsetD8Async(to, (unsigned char)byte, bytes, device->stream);
    if (result == OH_CU_SUCCESS) {
        call = "cuStreamSynchronize";
        result = oh_cu.cuStreamSynchronize(device->stream);
    }
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error(result, call, "filling %zu bytes at 0x%llx on GPU %d", bytes, to,
                             device->ordinal);
    return ONEHOP_OK;
}

static onehop_result cuda_fill(oh_device *base, void *to, int byte, size_t bytes) {
    oh_cuda_device *device = oh_cuda_of(base);
    oh_cuda_scope scope;
    if (bytes == 0) return ONEHOP_OK;
    onehop_result error = oh_cuda_enter(device, &scope);
    if (error != ONEHOP_OK) return error;
    error = oh_cuda_fill_here(device, (oh_cu_ptr)(uintptr_t)to, byte, bytes);
    oh_cuda_leave(&scope);
    return error;
}

/* Either end may be device memory, pinned or pageable host memory: addresses are unified, and a
 * pageable end only makes the driver stage the bytes, on this same stream. */
static onehop_result cuda_copy(oh_device *base, void *to, const void *from, size_t bytes) {
    oh_cuda_device *device = oh_cuda_of(base);
    oh_cuda_scope scope;
    const char *call = "cuMemcpyAsync";
    if (bytes == 0) return ONEHOP_OK;
    onehop_result error = oh_cuda_enter(device, &scope);
    if (error != ONEHOP_OK) return error;
    oh_cu_result result = oh_cu.cuMemcpyAsync((oh_cu_ptr)(uintptr_t)to, (oh_cu_ptr)(uintptr_t)from,
                                              bytes, device->stream);
    if (result == OH_CU_SUCCESS) {
        call = "cuStreamSynchronize";
        result = oh_cu.cuStreamSynchronize(device->stream);
    }
    oh_cuda_leave(&scope);
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error(result, call, "copying %zu bytes from %p to %p on GPU %d", bytes, from,
                             to, device->ordinal);
    return ONEHOP_OK;
}

static onehop_result cuda_local_alloc(oh_device *base, size_t bytes, void **out) {
    oh_cuda_device *device = oh_cuda_of(base);
    oh_cuda_scope scope;
    oh_cu_ptr address = 0;
    onehop_result error = oh_cuda_enter(device, &scope);
    if (error != ONEHOP_OK) return error;
    oh_cu_result result = oh_cu.cuMemAlloc_v2(&address, bytes);
    if (result != OH_CU_SUCCESS) {
        error = oh_cuda_error(result, "cuMemAlloc", "allocating %zu bytes on GPU %d", bytes,
                              device->ordinal);
    } else {
        error = oh_cuda_fill_here(device, address, 0, bytes);
        if (error != ONEHOP_OK) oh_cu.cuMemFree_v2(address);
    }
    oh_cuda_leave(&scope);
    if (error == ONEHOP_OK) *out = (void *)(uintptr_t)address;
    return error;
}

static void cuda_local_free(oh_device *base, void *memory) {
    oh_cuda_scope scope;
    if (memory == NULL || oh_cuda_enter(oh_cuda_of(base), &scope) != ONEHOP_OK) return;
    oh_cu.cuMemFree_v2((oh_cu_ptr)(uintptr_t)memory);
    oh_cuda_leave(&scope);
}

static onehop_result cuda_host_address(oh_device *base, void *host, void **device_out) {
    oh_cuda_device *device = oh_cuda_of(base);
    oh_cuda_scope scope;
    oh_cu_ptr address = 0;
    onehop_result error = oh_cuda_enter(device, &scope);
    if (error != ONEHOP_OK) return error;
    oh_cu_result result = oh_cu.cuMemHostGetDevicePointer_v2(&address, host, 0);
    oh_cuda_leave(&scope);
    if (result == OH_CU_INVALID_VALUE || result == OH_CU_HOST_NOT_REGISTERED)
        return oh_cuda_error_as(ONEHOP_ERR_ARGUMENT, result, "cuMemHostGetDevicePointer",
                                "looking up %p: host memory must be pinned and mapped", host);
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error(result, "cuMemHostGetDevicePointer", "looking up %p for GPU %d", host,
                             device->ordinal);
    *device_out = (void *)(uintptr_t)address;
    return ONEHOP_OK;
}

static void cuda_host_free(oh_device *base, void *host) {
    oh_cuda_scope scope;
    if (host == NULL || oh_cuda_enter(oh_cuda_of(base), &scope) != ONEHOP_OK) return;
    oh_cu.cuMemFreeHost(host);
    oh_cuda_leave(&scope);
}

/* Portable and mapped: with unified addressing every GPU reaches it, and under the host's own
 * address. The address is asked for all the same. */
static onehop_result cuda_host_alloc(oh_device *base, size_t bytes, void **host_out,
                                     void **device_out) {
    oh_cuda_device *device = oh_cuda_of(base);
    oh_cuda_scope scope;
    void *host = NULL, *address = NULL;
    onehop_result error = oh_cuda_enter(device, &scope);
    if (error != ONEHOP_OK) return error;
    oh_cu_result result =
        oh_cu.cuMemHostAlloc(&host, bytes, OH_CU_HOST_PORTABLE | OH_CU_HOST_DEVICEMAP);
    oh_cuda_leave(&scope);
    if (result != OH_CU_SUCCESS) {
        char hint[OH_MEMLOCK_BYTES];
        return oh_cuda_error(result, "cuMemHostAlloc", "pinning %zu bytes of host memory%s", bytes,
                             oh_memlock_hint(hint));
    }
    memset(host, 0, bytes);
    error = cuda_host_address(base, host, &address);
    if (error != ONEHOP_OK) {
        cuda_host_free(base, host);
        return error;
    }
    *host_out = host;
    *device_out = address;
    return ONEHOP_OK;
}

/* ---- the table ------------------------------------------------------------------------------- */

static onehop_result cuda_copy_on_stream(oh_device *base, void *to, const void *from, size_t bytes,
                                         onehop_stream stream) {
    oh_cuda_device *device = oh_cuda_of(base);
    oh_cuda_scope scope;
    onehop_result error = oh_cuda_enter(device, &scope);
    if (error != ONEHOP_OK) return error;
    oh_cu_result result =
        oh_cu.cuMemcpyAsync((oh_cu_ptr)(uintptr_t)to, (oh_cu_ptr)(uintptr_t)from, bytes, stream);
    oh_cuda_leave(&scope);
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error(result, "cuMemcpyAsync", "copying %zu bytes from %p to %p on GPU %d",
                             bytes, from, to, device->ordinal);
    return ONEHOP_OK;
}

static const oh_device_ops cuda_ops = {
    .kind = ONEHOP_DEVICE_CUDA,
    .close = cuda_close,
    .info = cuda_info,
    .mem_create = oh_cuda_mem_create,
    .mem_export = oh_cuda_mem_export,
    .mem_import = oh_cuda_mem_import,
    .mem_release = oh_cuda_mem_release,
    .multicast_create = oh_cuda_multicast_create,
    .multicast_join = oh_cuda_multicast_join,
    .multicast_bind = oh_cuda_multicast_bind,
    .multicast_map = oh_cuda_multicast_map,
    .multicast_release = oh_cuda_multicast_release,
    .foreign_find = oh_cuda_foreign_find,
    .foreign_descriptor = oh_cuda_foreign_descriptor,
    .foreign_map = oh_cuda_foreign_map,
    .local_alloc = cuda_local_alloc,
    .local_free = cuda_local_free,
    .host_alloc = cuda_host_alloc,
    .host_free = cuda_host_free,
    .host_address = cuda_host_address,
    .fill = cuda_fill,
    .copy = cuda_copy,
    .copy_on_stream = cuda_copy_on_stream,
    .load = oh_cuda_load,
    .load_built = oh_cuda_load_built,
    .resident_blocks = oh_cuda_resident_blocks,
    .stream_info = oh_cuda_stream_info,
    .launch = oh_cuda_launch,
    .stream_order = oh_cuda_stream_order,
    .stream_idle = oh_cuda_stream_idle,
    .graph_retain = oh_cuda_graph_retain,
};

onehop_result oh_cuda_device_open(int ordinal, oh_device **out) {
    onehop_result error = oh_cuda_driver();
    if (error != ONEHOP_OK) return error;
    oh_cuda_device *device = calloc(1, sizeof *device);
    if (device == NULL)
        return oh_error(ONEHOP_ERR_MEMORY, "no memory for the record of GPU %d", ordinal);
    device->base.ops = &cuda_ops;
    device->process = oh_process();
    device->ordinal = ordinal;
    device->pdl.id = OH_CU_ATTRIBUTE_PDL;
    device->pdl.value.pdl_allowed = 1;
    error = find_device(device);
    if (error == ONEHOP_OK) error = retain_and_fill(device);
    if (error != ONEHOP_OK) {
        cuda_close(&device->base);
        return error;
    }
    *out = &device->base;
    return ONEHOP_OK;
}
