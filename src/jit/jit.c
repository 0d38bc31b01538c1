/* See jit.h. */
#include "jit/jit.h"

#include <stdlib.h>
#include <string.h>

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

onehop_result oh_jit_build(oh_device *device, const oh_program *program, const oh_kernel *kernel,
                           oh_function *out) {
    oh_device_info info;
    oh_digest key;
    oh_jit_image image = {NULL, 0};
    if (!device->ops->load_built)
        return oh_error(ONEHOP_ERR_UNSUPPORTED,
                        "%s cannot be built: the host device has no compiler at run time",
                        kernel->name);
    onehop_result result = device->ops->info(device, &info);
    if (!result) result = oh_jit_name(program, info.capability, info.driver_version, &key);
    if (!result) result = device->ops->load_built(device, &key, NULL, kernel, out);
    if (result || out->handle) return result;
    result = oh_jit_get(program, info.capability, &key, &image);
    if (!result) result = device->ops->load_built(device, &key, image.bytes, kernel, out);
    free(image.bytes);
    return result;
}

onehop_result oh_jit_try(const oh_program *program, uint32_t arch) {
    oh_digest key;
    oh_jit_image image = {NULL, 0};
    onehop_result result = oh_jit_name(program, arch, 0, &key);
    if (!result) result = oh_jit_get(program, arch, &key, &image);
    free(image.bytes);
    return result;
}
