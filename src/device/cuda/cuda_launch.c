/* Kernels: the embedded images, the functions made from them, and the launch.
 *
 * The images are loaded once per process (a CUlibrary belongs to no context) and stay loaded:
 * unloading waits for the GPU, and a destroy must not wait for anybody. Every function is loaded
 * completely when it is made, because lazy loading at the first launch waits for the GPU too, and
 * beside a kernel that spins for this very launch it would wait for ever. */
#include "device/cuda/cuda_device.h"

#include <pthread.h>
#include <string.h>

typedef struct libraries {
    oh_cu_library list[OH_CUDA_IMAGES];
    size_t count;
} libraries;

static struct {
    pthread_mutex_t lock;
    const void *const *images; /* as set */
    const void *const *loaded; /* the images `libraries` were made from; NULL: none */
    libraries libraries;
} image_state = {.lock = PTHREAD_MUTEX_INITIALIZER};

void oh_cuda_set_images(const void *const *images) {
    pthread_mutex_lock(&image_state.lock);
    image_state.images = images;
    pthread_mutex_unlock(&image_state.lock);
}

/* ---- loading --------------------------------------------------------------------------------- */

static onehop_result load_error(const oh_cuda_device *device, oh_cu_result result, const char *call,
                                const char *name) {
    if (result == OH_CU_NO_BINARY_FOR_GPU || result == OH_CU_UNSUPPORTED_PTX ||
        result == OH_CU_NO_JIT)
        return oh_cuda_error_as(ONEHOP_ERR_UNSUPPORTED, result, call,
                                "loading %s: this build has no code for GPU %d (sm_%u)", name,
                                device->ordinal, device->capability);
    if (result == OH_CU_NOT_FOUND)
        return oh_cuda_error_as(ONEHOP_ERR_INTERNAL, result, call,
                                "looking for %s: it is in no image", name);
    return oh_cuda_error(result, call, "loading %s on GPU %d", name, device->ordinal);
}

/* Under the lock. */
static onehop_result load_images(const oh_cuda_device *device) {
    libraries made = {.count = 0};
    for (; image_state.images[made.count]; made.count++) {
        oh_cu_result result = oh_cu.cuLibraryLoadData(
            &made.list[made.count], image_state.images[made.count], NULL, NULL, 0, NULL, NULL, 0);
        if (result != OH_CU_SUCCESS)
            return load_error(device, result, "cuLibraryLoadData", "the kernels");
    }
    image_state.libraries = made;
    image_state.loaded = image_state.images;
    return ONEHOP_OK;
}

/* Holds the lock while the driver loads: a second rank waits and finds it done. Images that were
 * replaced stay loaded, since functions made from them may be in use. */
static onehop_result get_libraries(const oh_cuda_device *device, libraries *out) {
    onehop_result error = ONEHOP_OK;
    pthread_mutex_lock(&image_state.lock);
    if (image_state.images == NULL || image_state.images[0] == NULL)
        error = oh_error(ONEHOP_ERR_UNSUPPORTED, "this build of onehop contains no GPU kernels");
    else if (image_state.loaded != image_state.images)
        error = load_images(device);
    *out = image_state.libraries;
    pthread_mutex_unlock(&image_state.lock);
    return error;
}

static onehop_result get_function(const oh_cuda_device *device, const libraries *from,
                                  const char *name, oh_cu_function *out) {
    oh_cu_kernel kernel = NULL;
    const char *call = "cuLibraryGetKernel";
    oh_cu_result result = OH_CU_NOT_FOUND;
    for (size_t i = 0; i < from->count && result == OH_CU_NOT_FOUND; i++)
        result = oh_cu.cuLibraryGetKernel(&kernel, from->list[i], name);
    if (result == OH_CU_SUCCESS) {
        call = "cuKernelGetFunction";
        result = oh_cu.cuKernelGetFunction(out, kernel);
    }
    if (result == OH_CU_SUCCESS) {
        call = "cuFuncLoad";
        result = oh_cu.cuFuncLoad(*out);
    }
    return result == OH_CU_SUCCESS ? ONEHOP_OK : load_error(device, result, call, name);
}

struct attributes {
    int max_threads, local_bytes, registers, ptx_version, blocks;
};

static onehop_result get_attributes(const oh_cuda_device *device, const oh_kernel *kernel,
                                    oh_cu_function function, struct attributes *out) {
    const char *call = "cuFuncGetAttribute";
    oh_cu_result result =
        oh_cu.cuFuncGetAttribute(&out->max_threads, OH_CU_FUNCTION_MAX_THREADS, function);
    if (result == OH_CU_SUCCESS)
        result = oh_cu.cuFuncGetAttribute(&out->local_bytes, OH_CU_FUNCTION_LOCAL_BYTES, function);
    if (result == OH_CU_SUCCESS)
        result = oh_cu.cuFuncGetAttribute(&out->registers, OH_CU_FUNCTION_REGISTERS, function);
    if (result == OH_CU_SUCCESS)
        result = oh_cu.cuFuncGetAttribute(&out->ptx_version, OH_CU_FUNCTION_PTX_VERSION, function);
    if (result == OH_CU_SUCCESS && (uint32_t)out->max_threads >= kernel->max_threads) {
        call = "cuOccupancyMaxActiveBlocksPerMultiprocessor";
        result = oh_cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(&out->blocks, function,
                                                                   (int)kernel->max_threads, 0);
    }
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error(result, call, "asking about %s on GPU %d", kernel->name,
                             device->ordinal);
    return ONEHOP_OK;
}

/* Within a scope. */
static onehop_result load_one(const oh_cuda_device *device, const libraries *from,
                              const oh_kernel *kernel, oh_function *out) {
    oh_cu_function function = NULL;
    struct attributes has;
    memset(&has, 0, sizeof has);
    onehop_result error = get_function(device, from, kernel->name, &function);
    if (error == ONEHOP_OK) error = get_attributes(device, kernel, function, &has);
    if (error != ONEHOP_OK) return error;
    /* Local memory is a spill, and its allocation at a first launch waits for the GPU. */
    if (has.local_bytes != 0)
        return oh_error(ONEHOP_ERR_INTERNAL, "%s uses %d bytes of local memory on GPU %d (sm_%u)",
                        kernel->name, has.local_bytes, device->ordinal, device->capability);
    if ((uint32_t)has.max_threads < kernel->max_threads)
        return oh_error(ONEHOP_ERR_INTERNAL, "%s runs with at most %d threads on GPU %d, not %u",
                        kernel->name, has.max_threads, device->ordinal, kernel->max_threads);
    out->handle = function;
    out->registers = (uint32_t)has.registers;
    out->blocks_per_multiprocessor = (uint32_t)has.blocks;
    /* The attribute is the virtual architecture (90 for compute_90), not the PTX language version:
     * code compiled for an older one, and only translated for this GPU, contains no wait for its
     * predecessor and must not overlap it. */
    out->pdl = has.ptx_version >= 90 && device->capability >= 90;
    out->exact = (uint32_t)has.ptx_version == device->capability;
    return ONEHOP_OK;
}

onehop_result oh_cuda_load(oh_device *base, const oh_kernel *kernels, size_t count,
                           oh_function *out) {
    oh_cuda_device *device = oh_cuda_of(base);
    libraries all;
    oh_cuda_scope scope;
    onehop_result error = oh_cuda_enter(device, &scope);
    if (error != ONEHOP_OK) return error;
    error = get_libraries(device, &all);
    for (size_t i = 0; error == ONEHOP_OK && i < count; i++)
        error = load_one(device, &all, &kernels[i], &out[i]);
    oh_cuda_leave(&scope);
    return error;
}

onehop_result oh_cuda_load_library(oh_device *base, const void *image, oh_cu_library *out) {
    oh_cuda_device *device = oh_cuda_of(base);
    oh_cuda_scope scope;
    onehop_result error = oh_cuda_enter(device, &scope);
    if (error != ONEHOP_OK) return error;
    oh_cu_result result = oh_cu.cuLibraryLoadData(out, image, NULL, NULL, 0, NULL, NULL, 0);
    oh_cuda_leave(&scope);
    return result == OH_CU_SUCCESS
               ? ONEHOP_OK
               : load_error(device, result, "cuLibraryLoadData", "a kernel built at run time");
}

onehop_result oh_cuda_take_kernel(oh_device *base, oh_cu_library library, const oh_kernel *kernel,
                                  oh_function *out) {
    oh_cuda_device *device = oh_cuda_of(base);
    oh_cuda_scope scope;
    onehop_result error = oh_cuda_enter(device, &scope);
    if (error != ONEHOP_OK) return error;
    error = load_one(device, &(libraries){{library}, 1}, kernel, out);
    oh_cuda_leave(&scope);
    return error;
}

onehop_result oh_cuda_resident_blocks(oh_device *base, const oh_function *function,
                                      uint32_t threads, uint32_t *out) {
    oh_cuda_device *device = oh_cuda_of(base);
    oh_cuda_scope scope;
    int blocks = 0;
    onehop_result error = oh_cuda_enter(device, &scope);
    if (error != ONEHOP_OK) return error;
    oh_cu_result result = oh_cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(
        &blocks, function->handle, (int)threads, 0);
    oh_cuda_leave(&scope);
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error(result, "cuOccupancyMaxActiveBlocksPerMultiprocessor",
                             "asking GPU %d for %u threads", device->ordinal, threads);
    *out = (uint32_t)blocks * device->multiprocessors;
    return ONEHOP_OK;
}

/* ---- launching ------------------------------------------------------------------------------- */

static onehop_result launch_error(const oh_cuda_device *device, const oh_launch *launch,
                                  oh_cu_result result) {
    return oh_cuda_error(result, "cuLaunchKernelEx", "launching %u blocks of %u threads on GPU %d",
                         launch->blocks, launch->threads, device->ordinal);
}

/* The hot path: one question about the context and the launch itself. A launch is recorded if the
 * stream is capturing, so this runs in the thread's own capture mode. */
onehop_result oh_cuda_launch(oh_device *base, const oh_launch *launch) {
    oh_cuda_device *device = oh_cuda_of(base);
    const oh_function *function = launch->function;
    oh_cu_launch_config config = {
        launch->blocks,         1, 1, launch->threads, 1, 1, 0, launch->stream, &device->pdl,
        function->pdl ? 1u : 0u};
    void *parameters[1] = {(void *)(uintptr_t)launch->args}; /* the driver only reads it */
    bool pushed;
    onehop_result error = oh_cuda_push(device, &pushed);
    if (error != ONEHOP_OK) return error;
    oh_cu_result result =
        oh_cu.cuLaunchKernelEx(&config, (oh_cu_function)function->handle, parameters, NULL);
    oh_cuda_pop(pushed);
    if (result != OH_CU_SUCCESS) return launch_error(device, launch, result);
    return ONEHOP_OK;
}
