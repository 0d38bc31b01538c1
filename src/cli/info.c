/* `onehop info`: what onehop sees of this machine, and everything that can be set from outside. */
#include "cli/backend.h"
#include "cli/options.h"
#include "device/cuda/driver_api.h"
#include "device/device.h"
#include "device/host/vector.h"

#include <stdio.h>

static void print_bytes(uint64_t bytes) {
    if (bytes >= (uint64_t)1 << 30)
        printf("%.1f GiB", (double)bytes / ((uint64_t)1 << 30));
    else
        printf("%.1f MiB", (double)bytes / (1 << 20));
}

static void print_handle_kinds(uint32_t kinds) {
    static const struct {
        uint32_t kind;
        const char *name;
    } names[] = {
        {OH_HANDLE_FD, "descriptor"}, {OH_HANDLE_FABRIC, "fabric"}, {OH_HANDLE_IPC, "classic IPC"}};
    const char *separator = "";
    for (size_t i = 0; i < OH_LENGTH(names); i++) {
        if (!(kinds & names[i].kind)) continue;
        printf("%s%s", separator, names[i].name);
        separator = ", ";
    }
    printf("%s\n", *separator ? "" : "none");
}

static void print_device(onehop_device which) {
    oh_device *device;
    oh_device_info info;
    onehop_result result = oh_device_open(which, which.ordinal, &device);
    if (result == ONEHOP_OK) {
        result = device->ops->info(device, &info);
        device->ops->close(device);
    }
    if (which.kind == ONEHOP_DEVICE_CUDA)
        printf("  cuda %d: ", which.ordinal);
    else
        printf("  host:   ");
    if (result != ONEHOP_OK) {
        printf("cannot be used: %s\n", onehop_last_error());
        return;
    }
    printf("%s%s%s, ", info.name, info.bus_id[0] ? ", " : "", info.bus_id);
    if (info.capability)
        printf("sm_%u, %u multiprocessors, ", info.capability, info.multiprocessors);
    else
        printf("%u cores, ", info.multiprocessors);
    print_bytes(info.memory_bytes);
    printf("\n          handle types that worked in a trial: ");
    print_handle_kinds(info.handle_kinds);
}

static void print_devices(const cuda_census *census) {
    onehop_device host = {ONEHOP_DEVICE_HOST, 0};
    printf("devices\n");
    print_device(host);
    printf("          instruction set in use: %s\n", oh_vector_table()->isa);
    for (int i = 0; i < census->count; i++) {
        onehop_device gpu = {ONEHOP_DEVICE_CUDA, i};
        print_device(gpu);
    }
    if (census->count == 0) printf("  cuda:   none: %s\n", census->reason);
}

static void print_links(int count) {
    if (count < 2) return;
    printf("\nlinks between GPUs (P: peer access, with the driver's performance rank, 0 is best; "
           "+a: atomics; -: none)\n      ");
    for (int to = 0; to < count; to++) printf(" %6d", to);
    for (int from = 0; from < count; from++) {
        printf("\n  %4d", from);
        for (int to = 0; to < count; to++) {
            char link[16] = "self";
            if (to != from) cuda_describe_link(from, to, link, sizeof link);
            printf(" %6s", link);
        }
    }
    printf("\n");
}

static void print_memory(void) {
    static const onehop_device_kind kinds[] = {ONEHOP_DEVICE_HOST, ONEHOP_DEVICE_CUDA};
    static const char *const names[] = {"host", "cuda"};
    printf("\nmemory per rank, default sizes: shared with peers + own device memory + host memory\n");
    printf("  ranks");
    for (int ranks = 2; ranks <= 8; ranks++) printf(" %21d", ranks);
    for (size_t i = 0; i < OH_LENGTH(kinds); i++) {
        printf("\n  %-5s", names[i]);
        for (int ranks = 2; ranks <= 8; ranks++) {
            onehop_layout_config config = {.struct_size = sizeof config};
            onehop_layout layout;
            char cell[64] = "?";
            config.device_kind = kinds[i];
            config.world_size = ranks;
            if (onehop_layout_get(&config, &layout) == ONEHOP_OK)
                snprintf(cell, sizeof cell, "%.1f M + %zu K + %zu K",
                         (double)layout.symmetric_bytes / (1 << 20), layout.local_bytes >> 10,
                         layout.host_bytes >> 10);
            printf(" %21s", cell);
        }
    }
    printf("\n");
}

static void print_environment(void) {
    printf("\nenvironment variables\n  %-20s %-7s %-8s %s\n", "name", "type", "default", "meaning");
    for (int id = 0; id < OH_ENV_COUNT; id++) {
        const oh_env_row *row = oh_env_describe((oh_env)id);
        const char *now = oh_env_text((oh_env)id);
        printf("  %-20s %-7s %-8s %s", row->name, row->type,
               row->default_text[0] ? row->default_text : "-", row->meaning);
        if (now) printf("; now \"%s\"", now);
        printf("\n");
    }
}

int cli_info(int argc, char **argv) {
    cuda_census census;
    switch (options_parse(NULL, 0, argc, argv, NULL)) {
    case OPTIONS_HELP:
        printf("usage: onehop info\n\nDevices, links, memory per rank and environment variables.\n");
        return CLI_OK;
    case OPTIONS_REFUSED: return CLI_USAGE;
    default: break;
    }
    cuda_take_census(&census);
    printf("onehop %s (commit %s)\n", cli_version(), ONEHOP_COMMIT);
    printf("oldest driver for GPUs: %s\n\n", OH_CU_MIN_TEXT);
    print_devices(&census);
    print_links(census.count);
    print_memory();
    print_environment();
    return CLI_OK;
}
