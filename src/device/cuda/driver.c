/* Opens the CUDA driver at run time, so that one build of the library runs with and without a GPU.
 *
 * libcuda.so.1 is opened once and never closed: the driver does not survive that, and other
 * libraries of the process use it too. Symbols are taken by dlsym under their versioned names;
 * cuGetProcAddress would pick a version by number, which is one more thing to get wrong. */
#include "device/cuda/cuda_device.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

oh_cu_table oh_cu;

static pthread_once_t driver_once = PTHREAD_ONCE_INIT;
static char absent_reason[320]; /* empty: the driver can be used. Written inside the once only. */

struct symbol {
    const char *name;
    size_t offset; /* of its pointer in oh_cu_table */
};

static const struct symbol symbols[] = {
#define SYMBOL(name, parameters) {#name, offsetof(oh_cu_table, name)},
    OH_CU_FUNCTIONS(SYMBOL)
#undef SYMBOL
};

/* The driver's version for a message, "" if even that cannot be asked. */
static void version_text(void *library, char *text, size_t size) {
    oh_cu_result (*get)(int *) = NULL;
    void *address = dlsym(library, "cuDriverGetVersion");
    int version = 0;
    memcpy(&get, &address, sizeof get);
    text[0] = '\0';
    if (get != NULL && get(&version) == OH_CU_SUCCESS)
        snprintf(text, size, ", and supports CUDA %d.%d", version / 1000, version % 1000 / 10);
}

static bool take_symbols(void *library) {
    for (size_t i = 0; i < OH_LENGTH(symbols); i++) {
        void *address = dlsym(library, symbols[i].name);
        if (address == NULL) {
            char version[48];
            version_text(library, version, sizeof version);
            snprintf(absent_reason, sizeof absent_reason,
                     "the CUDA driver is too old: it lacks %s%s; %s or later is needed",
                     symbols[i].name, version, OH_CU_MIN_TEXT);
            return false;
        }
        /* C has no conversion from an object pointer to a function pointer; POSIX says the bits
         * fit. */
        memcpy((char *)&oh_cu + symbols[i].offset, &address, sizeof address);
    }
    return true;
}

static const char *error_name(oh_cu_result failure) {
    const char *name = NULL;
    if (oh_cu.cuGetErrorName(failure, &name) != OH_CU_SUCCESS || name == NULL) return "unknown";
    return name;
}

static const char *error_text(oh_cu_result failure) {
    const char *text = NULL;
    if (oh_cu.cuGetErrorString(failure, &text) != OH_CU_SUCCESS || text == NULL) return "no text";
    return text;
}

static void open_driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char *why = dlerror();
        snprintf(absent_reason, sizeof absent_reason,
                 "the CUDA driver library could not be opened: %s",
                 why != NULL ? why : "no reason");
        return;
    }
    if (!take_symbols(library)) return;
    oh_cu_result result = oh_cu.cuInit(0);
    if (result != OH_CU_SUCCESS)
        snprintf(absent_reason, sizeof absent_reason,
                 "the CUDA driver could not be initialised: cuInit failed with %s (%s)",
                 error_name(result), error_text(result));
}

const char *oh_cuda_absent_reason(void) {
    pthread_once(&driver_once, open_driver);
    return absent_reason[0] != '\0' ? absent_reason : NULL;
}

onehop_result oh_cuda_driver(void) {
    const char *reason = oh_cuda_absent_reason();
    if (reason != NULL) return oh_error(ONEHOP_ERR_NO_DEVICE, "CUDA cannot be used: %s", reason);
    return ONEHOP_OK;
}

int oh_cuda_device_count(void) {
    const char *reason = oh_cuda_absent_reason();
    int count = 0;
    if (reason != NULL) {
        oh_log(ONEHOP_LOG_INFO, "no GPU: %s", reason);
        return 0;
    }
    oh_cu_result result = oh_cu.cuDeviceGetCount(&count);
    if (result != OH_CU_SUCCESS) {
        oh_log(ONEHOP_LOG_INFO, "no GPU: cuDeviceGetCount failed with %s", error_name(result));
        return 0;
    }
    return count;
}

static onehop_result report(onehop_result result, oh_cu_result failure, const char *call,
                            const char *format, va_list arguments) {
    char doing[256];
    vsnprintf(doing, sizeof doing, format, arguments);
    /* cuInit has worked in this process image, so this can only be a child made by fork. */
    const char *hint = failure == OH_CU_NOT_INITIALIZED
                           ? "; CUDA cannot be used in a child forked after it was first used"
                           : "";
    return oh_error(result, "%s failed with %s (%s) while %s%s", call, error_name(failure),
                    error_text(failure), doing, hint);
}

onehop_result oh_cuda_error_as(onehop_result result, oh_cu_result failure, const char *call,
                               const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    result = report(result, failure, call, format, arguments);
    va_end(arguments);
    return result;
}

onehop_result oh_cuda_error(oh_cu_result failure, const char *call, const char *format, ...) {
    onehop_result result = failure == OH_CU_OUT_OF_MEMORY ? ONEHOP_ERR_MEMORY : ONEHOP_ERR_DRIVER;
    va_list arguments;
    va_start(arguments, format);
    result = report(result, failure, call, format, arguments);
    va_end(arguments);
    return result;
}
