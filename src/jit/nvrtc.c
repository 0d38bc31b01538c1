/* See nvrtc.h. What is declared here is NVRTC's published interface. */
#include "jit/nvrtc.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define OH_NVRTC_FUNCTIONS(X)                                                                      \
    X(nvrtcVersion, (int *, int *))                                                                \
    X(nvrtcCreateProgram,                                                                          \
      (void **, const char *, const char *, int, const char *const *, const char *const *))        \
    X(nvrtcDestroyProgram, (void **))                                                              \
    X(nvrtcCompileProgram, (void *, int, const char *const *))                                     \
    X(nvrtcGetCUBINSize, (void *, size_t *))                                                       \
    X(nvrtcGetCUBIN, (void *, char *))                                                             \
    X(nvrtcGetProgramLogSize, (void *, size_t *))                                                  \
    X(nvrtcGetProgramLog, (void *, char *))

#define PATH_BYTES 4096

static struct {
#define MEMBER(name, parameters) int(*name) parameters;
    OH_NVRTC_FUNCTIONS(MEMBER)
#undef MEMBER
} nvrtc;

static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
OH_RESET_IN_CHILD(opening)
static uint32_t version; /* 0: not open */

/* ---- opening --------------------------------------------------------------------------------- */

/* NVRTC opens this companion by name alone, which finds it once it is loaded. */
static void open_companion(int major, int minor) {
    Dl_info here;
    char path[PATH_BYTES];
    void *address;
    memcpy(&address, &nvrtc.nvrtcVersion, sizeof address);
    if (!dladdr(address, &here) || !here.dli_fname) return;
    const char *slash = strrchr(here.dli_fname, '/');
    const int folder = slash ? (int)(slash + 1 - here.dli_fname) : 0;
    snprintf(path, sizeof path, "%.*slibnvrtc-builtins.so.%d.%d", folder, here.dli_fname, major,
             minor);
    (void)dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

static onehop_result take(void *library, const char *name) {
    int major = 0, minor = 0;
    const char *missing = NULL;
    void *symbol;
#define FIND(function, parameters)                                                                 \
    symbol = dlsym(library, #function);                                                            \
    if (!symbol) missing = #function;                                                              \
    memcpy(&nvrtc.function, &symbol, sizeof symbol);
    OH_NVRTC_FUNCTIONS(FIND)
#undef FIND
    if (missing || nvrtc.nvrtcVersion(&major, &minor) || major < 12) {
        dlclose(library);
        if (missing)
            return oh_error(ONEHOP_ERR_UNSUPPORTED, "%s has no %s; NVRTC 12 or 13 is needed", name,
                            missing);
        return oh_error(ONEHOP_ERR_UNSUPPORTED, "%s is version %d.%d; NVRTC 12 or 13 is needed",
                        name, major, minor);
    }
    open_companion(major, minor);
    version = (uint32_t)(major * 1000 + minor * 10);
    return ONEHOP_OK;
}

static const char *const places[] = {"nvidia/cu13/lib/libnvrtc.so.13",
                                     "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"};

/* The loader shows a library of this process: its folder of packages may have NVRTC too. */
static int look_beside(struct dl_phdr_info *info, size_t size, void *argument) {
    static const char *const folders[] = {"/site-packages/", "/dist-packages/"};
    char *path = argument;
    (void)size;
    for (size_t i = 0; i < 4; i++) {
        const char *at = info->dlpi_name ? strstr(info->dlpi_name, folders[i / 2]) : NULL;
        if (!at) continue;
        const size_t length = (size_t)(at - info->dlpi_name) + strlen(folders[i / 2]);
        snprintf(path, PATH_BYTES, "%.*s%s", (int)length, info->dlpi_name, places[i % 2]);
        if (!access(path, R_OK)) return 1;
    }
    return 0;
}

static void *look_in(const char *folder, char *name) {
    void *library = NULL;
    for (int major = 13; major >= 12 && !library; major--) {
        snprintf(name, PATH_BYTES, "%slibnvrtc.so.%d", folder, major);
        library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    }
    return library;
}

static void *look(char *name) {
    void *library = look_in("", name);
    if (!library && dl_iterate_phdr(look_beside, name))
        library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    return library ? library : look_in("/usr/local/cuda/lib64/", name);
}

static onehop_result open_once(void) {
    const char *given = oh_env_text(OH_ENV_NVRTC);
    const char *variable = oh_env_describe(OH_ENV_NVRTC)->name;
    char name[PATH_BYTES], why[256];
    void *library;
    if (given) {
        snprintf(name, sizeof name, "%s", given);
        library = oh_library_open(name, why, sizeof why);
        if (!library)
            return oh_error(ONEHOP_ERR_UNSUPPORTED, "NVRTC cannot be used: %s (%s names it)", why,
                            variable);
    } else {
        library = look(name);
        if (!library)
            return oh_error(ONEHOP_ERR_UNSUPPORTED,
                            "NVRTC cannot be used: neither libnvrtc.so.13 nor .12 was found; %s "
                            "names its library (pip's package nvidia-cuda-nvrtc has it)",
                            variable);
    }
    return take(library, name);
}

onehop_result oh_nvrtc_open(uint32_t *version_out) {
    pthread_mutex_lock(&opening);
    onehop_result result = version ? ONEHOP_OK : open_once();
    *version_out = version;
    pthread_mutex_unlock(&opening);
    return result;
}

/* ---- compiling ------------------------------------------------------------------------------- */

/* The compiler's words into the sentence: of a caller's expression its first error, which is his to
 * mend; all of it into the log. */
static onehop_result refused(const oh_program *program, uint32_t arch, void *compiled) {
    size_t size = 0;
    char *log = NULL;
    if (!nvrtc.nvrtcGetProgramLogSize(compiled, &size) && size) log = calloc(1, size + 1);
    if (log && nvrtc.nvrtcGetProgramLog(compiled, log)) log[0] = '\0';
    oh_log(ONEHOP_LOG_INFO, "NVRTC, for sm_%u: %s", arch, log ? log : "no message");
    const char *first = log;
    if (log && program->expression && strstr(log, "expression("))
        first = strstr(log, "expression(");
    onehop_result result =
        program->expression
            ? oh_error(ONEHOP_ERR_ARGUMENT, "the compiler refuses the expression: %.400s",
                       first ? first : "no message")
            : oh_error(ONEHOP_ERR_INTERNAL, "the compiler refuses the kernels for sm_%u: %.400s",
                       arch, first ? first : "no message");
    free(log);
    return result;
}

static onehop_result fetch(void *compiled, uint32_t arch, oh_jit_image *image_out) {
    oh_jit_image image = {NULL, 0};
    if (!nvrtc.nvrtcGetCUBINSize(compiled, &image.size) && image.size)
        image.bytes = malloc(image.size);
    if (image.bytes && !nvrtc.nvrtcGetCUBIN(compiled, image.bytes)) {
        *image_out = image;
        return ONEHOP_OK;
    }
    free(image.bytes);
    return oh_error(ONEHOP_ERR_UNSUPPORTED, "NVRTC gave no code for sm_%u", arch);
}

onehop_result oh_nvrtc_compile(const oh_program *program, uint32_t arch, oh_jit_image *image_out) {
    enum {
        REFUSED = 6,
        NO_SUCH_OPTION = 5
    }; /* of nvrtcResult */
    char target[40];
    const char *options[] = {target, OH_NVRTC_OPTIONS(OH_NVRTC_LISTED) "--ptxas-options=-O0",
                             "--Ofast-compile=max"};
    const int option_count = (int)OH_LENGTH(options) - (program->quick ? 0 : 2);
    const char *names[OH_PROGRAM_SOURCES], *texts[OH_PROGRAM_SOURCES];
    void *compiled = NULL;
    snprintf(target, sizeof target, "--gpu-architecture=sm_%u", arch);
    for (size_t i = 0; i < program->count; i++) {
        names[i] = program->sources[i].name;
        texts[i] = program->sources[i].text;
    }
    int code = nvrtc.nvrtcCreateProgram(&compiled, program->text, "kernels.c", (int)program->count,
                                        texts, names);
    if (code)
        return oh_error(ONEHOP_ERR_UNSUPPORTED, "nvrtcCreateProgram failed with error %d", code);
    code = nvrtc.nvrtcCompileProgram(compiled, option_count, options);
    onehop_result result = ONEHOP_OK;
    if (code == REFUSED)
        result = refused(program, arch, compiled);
    else if (code == NO_SUCH_OPTION)
        result = oh_error(ONEHOP_ERR_UNSUPPORTED, "NVRTC %u.%u does not know sm_%u", version / 1000,
                          version % 1000 / 10, arch);
    else if (code)
        result = oh_error(ONEHOP_ERR_UNSUPPORTED, "nvrtcCompileProgram failed with error %d", code);
    if (!result) result = fetch(compiled, arch, image_out);
    nvrtc.nvrtcDestroyProgram(&compiled);
    return result;
}
