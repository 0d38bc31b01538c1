/* See jit.h.
 *
 * Libraries are loaded once per process and key, and stay loaded, as the embedded image does:
 * unloading waits for the GPU. So contexts that come and go, and expressions that are created
 * again, find what is there. */
#include "jit/jit.h"

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

/* With its end: two texts in a row are not one. */
static void add_text(oh_sha256 *hash, const char *text) {
    oh_sha256_add(hash, text, strlen(text) + 1);
}

oh_digest oh_jit_key(const oh_program *program, uint32_t arch, uint32_t compiler, uint32_t driver) {
    const uint32_t numbers[] = {arch, compiler, driver};
    oh_sha256 hash;
    oh_sha256_begin(&hash);
    add_text(&hash, OH_NVRTC_OPTIONS(OH_NVRTC_JOINED));
    oh_sha256_add(&hash, numbers, sizeof numbers);
    add_text(&hash, program->text);
    for (size_t i = 0; i < program->count; i++) {
        add_text(&hash, program->sources[i].name);
        add_text(&hash, program->sources[i].text);
    }
    return oh_sha256_end(&hash);
}

onehop_result oh_jit_allowed(void) {
    static const char *const words[] = {"off", "on", NULL};
    int on = 1;
    onehop_result result = oh_env_word(OH_ENV_JIT, words, 1, &on);
    if (!result && !on)
        result = oh_error(ONEHOP_ERR_UNSUPPORTED, "kernels are not built at run time: %s is off",
                          oh_env_describe(OH_ENV_JIT)->name);
    return result;
}

onehop_result oh_jit_name(const oh_program *program, uint32_t arch, uint32_t driver,
                          oh_digest *key_out) {
    uint32_t compiler;
    onehop_result result = oh_jit_allowed();
    if (!result) result = oh_nvrtc_open(&compiler);
    if (!result) *key_out = oh_jit_key(program, arch, compiler, driver);
    return result;
}

onehop_result oh_jit_get(const oh_program *program, uint32_t arch, const oh_digest *key,
                         oh_jit_image *image_out) {
    if (oh_jit_cache_read(key, image_out)) return ONEHOP_OK;
    const uint64_t start = oh_clock_ns();
    onehop_result result = oh_nvrtc_compile(program, arch, image_out);
    if (result) return result;
    oh_log(ONEHOP_LOG_INFO, "NVRTC compiled %zu bytes for sm_%u in %.2f s", image_out->size, arch,
           (double)(oh_clock_ns() - start) / 1e9);
    oh_jit_cache_write(key, image_out);
    return ONEHOP_OK;
}

/* ---- loaded ones ----------------------------------------------------------------------------- */

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

onehop_result oh_cuda_build(oh_device *device, const oh_program *program, const oh_kernel *kernel,
                            oh_function *out) {
    const uint32_t arch = oh_cuda_of(device)->capability;
    int driver = 0;
    oh_digest key;
    oh_jit_image image = {NULL, 0};
    oh_cu_library library = NULL;
    if (oh_cu.cuDriverGetVersion(&driver) != OH_CU_SUCCESS) driver = 0;
    onehop_result result = oh_jit_name(program, arch, (uint32_t)driver, &key);
    if (!result) result = keep(device, &key, NULL, &library);
    if (!result && !library) {
        result = oh_jit_get(program, arch, &key, &image);
        if (!result) result = keep(device, &key, image.bytes, &library);
        free(image.bytes);
    }
    return result ? result : oh_cuda_take_kernel(device, library, kernel, out);
}

onehop_result oh_cuda_try_build(const oh_program *program, uint32_t arch) {
    oh_digest key;
    oh_jit_image image = {NULL, 0};
    onehop_result result = oh_jit_name(program, arch, 0, &key);
    if (!result) result = oh_jit_get(program, arch, &key, &image);
    free(image.bytes);
    return result;
}
