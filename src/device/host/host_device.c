/* The host device: ranks are processes or threads of one machine, kernels are C functions. It holds
 * no state, so every rank is handed the same object. */
#include "device/host/host_device.h"
#include "base/descriptor.h"
#include "device/host/vector.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PAGE 4096

/* Blocks of a host rank run one after another and a body waits for nothing but the same block of
 * its peers, so any grid "fits"; this is the largest that a communicator can ask for. */
#define RESIDENT_BLOCKS 1024

static void host_close(oh_device *device) {
    (void)device;
}

/* "model name" of /proc/cpuinfo; AArch64 has none. */
static void processor_name(char *name, size_t size) {
    char line[256];
    snprintf(name, size, "host");
    FILE *file = oh_fd_read_file("/proc/cpuinfo");
    if (file == NULL) return;
    while (fgets(line, sizeof line, file) != NULL) {
        char *text = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || text == NULL) continue;
        text += strspn(text, ": \t");
        text[strcspn(text, "\n")] = '\0';
        if (*text != '\0') snprintf(name, size, "%.*s", (int)size - 1, text);
        break;
    }
    fclose(file);
}

/* Cores this process may run on. The set grows until it holds the machine's highest core number. */
static uint32_t usable_cores(void) {
    for (int cores = 1024; cores <= 1 << 20; cores *= 4) {
        cpu_set_t *set = CPU_ALLOC((size_t)cores);
        if (set == NULL) break;
        size_t size = CPU_ALLOC_SIZE((size_t)cores);
        bool known = sched_getaffinity(0, size, set) == 0;
        int count = known ? CPU_COUNT_S(size, set) : 0;
        CPU_FREE(set);
        if (known) return (uint32_t)count;
    }
    return 1;
}

static onehop_result host_info(oh_device *device, oh_device_info *out) {
    (void)device;
    oh_device_info info = {0};
    info.device.kind = ONEHOP_DEVICE_HOST;
    processor_name(info.name, sizeof info.name);
    info.multiprocessors = usable_cores();
    info.handle_kinds = OH_HANDLE_FD;
    info.multicast = true;
    info.memory_bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    *out = info;
    return ONEHOP_OK;
}

static onehop_result host_local_alloc(oh_device *device, size_t bytes, void **out) {
    (void)device;
    void *memory = NULL;
    if (bytes == 0) return oh_error(ONEHOP_ERR_ARGUMENT, "host memory of 0 bytes was asked for");
    if (posix_memalign(&memory, PAGE, bytes) != 0)
        return oh_error(ONEHOP_ERR_MEMORY, "%zu bytes of host memory were refused", bytes);
    memset(memory, 0, bytes);
    *out = memory;
    return ONEHOP_OK;
}

static void host_local_free(oh_device *device, void *memory) {
    (void)device;
    free(memory);
}

static onehop_result host_host_alloc(oh_device *device, size_t bytes, void **host_out,
                                     void **device_out) {
    void *memory = NULL;
    onehop_result result = host_local_alloc(device, bytes, &memory);
    if (result == ONEHOP_OK) *host_out = *device_out = memory;
    return result;
}

static onehop_result host_address(oh_device *device, void *host, void **device_out) {
    (void)device;
    *device_out = host;
    return ONEHOP_OK;
}

static onehop_result host_fill(oh_device *device, void *ptr, int byte, size_t bytes) {
    (void)device;
    memset(ptr, byte, bytes);
    return ONEHOP_OK;
}

static onehop_result host_copy(oh_device *device, void *to, const void *from, size_t bytes) {
    (void)device;
    memmove(to, from, bytes);
    return ONEHOP_OK;
}

static onehop_result host_load(oh_device *device, const oh_kernel *kernels, size_t count,
                               oh_function *out) {
    (void)device;
    for (size_t i = 0; i < count; i++) {
        if (kernels[i].host == NULL)
            return oh_error(ONEHOP_ERR_UNSUPPORTED, "kernel %s has no body for the host device",
                            kernels[i].name);
    }
    for (size_t i = 0; i < count; i++) {
        /* POSIX lets a function pointer pass through void *. */
        oh_function function = {(void *)(uintptr_t)kernels[i].host, 0, RESIDENT_BLOCKS, false,
                                true};
        out[i] = function;
    }
    return ONEHOP_OK;
}

static onehop_result host_resident_blocks(oh_device *device, const oh_function *function,
                                          uint32_t threads, uint32_t *out) {
    (void)device;
    (void)function;
    (void)threads;
    *out = RESIDENT_BLOCKS;
    return ONEHOP_OK;
}

static const oh_device_ops host_ops = {
    .kind = ONEHOP_DEVICE_HOST,
    .close = host_close,
    .info = host_info,
    .mem_create = oh_host_mem_create,
    .mem_export = oh_host_mem_export,
    .mem_import = oh_host_mem_import,
    .mem_release = oh_host_mem_release,
    .multicast_create = oh_host_multicast_create,
    .multicast_join = oh_host_multicast_join,
    .multicast_bind = oh_host_multicast_bind,
    .multicast_map = oh_host_multicast_map,
    .multicast_release = oh_host_multicast_release,
    .foreign_find = oh_host_foreign_find,
    .foreign_descriptor = oh_host_foreign_descriptor,
    .foreign_map = oh_host_foreign_map,
    .local_alloc = host_local_alloc,
    .local_free = host_local_free,
    .host_alloc = host_host_alloc,
    .host_free = host_local_free,
    .host_address = host_address,
    .fill = host_fill,
    .copy = host_copy,
    .copy_on_stream = oh_host_copy_on_stream,
    .load = host_load,
    .resident_blocks = host_resident_blocks,
    .stream_info = oh_host_stream_info,
    .launch = oh_host_launch,
    .stream_order = oh_host_stream_order,
    .stream_idle = oh_host_stream_idle,
    .graph_retain = oh_host_graph_retain,
};

onehop_result oh_host_device_open(oh_device **out) {
    static oh_device device = {&host_ops};
    onehop_result result = oh_vector_check();
    if (result == ONEHOP_OK) *out = &device;
    return result;
}
