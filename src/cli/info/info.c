/* `onehop info`: what onehop sees of this machine, and everything that can be set from outside. */
#include "cli/info/info_device.h"
#include "cli/info/info_json.h"

#include "cli/shared/options.h"
#include "device/cuda/driver_api.h"
#include "device/host/vector.h"

#include <stdio.h>

static void print_bytes(uint64_t bytes) {
    if (bytes >= (uint64_t)1 << 30)
        printf("%.1f GiB", (double)bytes / ((uint64_t)1 << 30));
    else
        printf("%.1f MiB", (double)bytes / (1 << 20));
}

static void print_handle_kinds(uint32_t kinds) {
    const char *separator = "";
    for (const info_handle_name *row = info_handle_names; row->name; row++) {
        if (!(kinds & row->kind)) continue;
        printf("%s%s", separator, row->name);
        separator = ", ";
    }
    printf("%s\n", *separator ? "" : "none");
}

static void print_multicast(const oh_device_info *info) {
    const char *why = oh_multicast_refusal();
    const bool host = info->device.kind == ONEHOP_DEVICE_HOST;
    printf("          multicast: %s; ", host              ? "emulated"
                                        : info->multicast ? "reported by the driver"
                                                          : "not reported by the driver");
    if (why)
        printf("off: %s\n", why);
    else if (info->multicast)
        printf("on%s\n", host ? "" : ", not validated on hardware");
    else
        printf("off\n");
}

/* Returns an exit code: a variable that is not understood is a mistake of the user. */
static int print_device(onehop_device which) {
    oh_device_info info;
    onehop_result result = info_ask(which, &info);
    if (which.kind == ONEHOP_DEVICE_CUDA)
        printf("  cuda %d: ", which.ordinal);
    else
        printf("  host:   ");
    if (result != ONEHOP_OK) {
        printf("cannot be used: %s\n", onehop_last_error());
        return result == ONEHOP_ERR_ENVIRONMENT ? CLI_USAGE : CLI_OK;
    }
    printf("%s%s%s, ", info.name, info.bus_id[0] ? ", " : "", info.bus_id);
    if (info.capability)
        printf("sm_%u, %u multiprocessors, ", info.capability, info.multiprocessors);
    else
        printf("%u cores, ", info.multiprocessors);
    print_bytes(info.memory_bytes);
    printf("\n          handle types that worked in a trial: ");
    print_handle_kinds(info.handle_kinds);
    print_multicast(&info);
    return CLI_OK;
}

static int print_devices(const cuda_census *census) {
    onehop_device host = {ONEHOP_DEVICE_HOST, 0};
    printf("devices\n");
    int code = print_device(host);
    printf("          instruction set in use: %s\n", oh_vector_table()->isa);
    for (int i = 0; i < census->count; i++) {
        onehop_device gpu = {ONEHOP_DEVICE_CUDA, i};
        int gpu_code = print_device(gpu);
        if (code == CLI_OK) code = gpu_code;
    }
    if (census->count == 0) printf("  cuda:   none: %s\n", census->reason);
    return code;
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

static void print_layout(onehop_device_kind kind, int ranks) {
    onehop_layout_config config = ONEHOP_CONFIG_INIT(onehop_layout_config);
    onehop_layout layout;
    config.device_kind = kind;
    config.world_size = ranks;
    if (onehop_layout_get(&config, &layout) != ONEHOP_OK) {
        printf("  %30s", "?");
        return;
    }
    printf("  %9.1f MiB %6zu KiB %3zu KiB", (double)layout.symmetric_bytes / (1 << 20),
           (layout.local_bytes + 1023) >> 10, (layout.host_bytes + 1023) >> 10);
}

static void print_memory(void) {
    printf("\nmemory per rank with default sizes, at most: shared with peers, own on the device, "
           "on the "
           "host\n"
           "  ranks  %30s  %30s\n",
           "host device", "GPU");
    for (int ranks = 2; ranks <= 8; ranks++) {
        printf("  %5d", ranks);
        print_layout(ONEHOP_DEVICE_HOST, ranks);
        print_layout(ONEHOP_DEVICE_CUDA, ranks);
        printf("\n");
    }
}

static void print_environment(void) {
    printf("\nenvironment variables\n  %-32s %-7s %-8s %s\n", "name", "type", "default", "meaning");
    for (int id = 0; id < OH_ENV_COUNT; id++) {
        const oh_env_row *row = oh_env_describe((oh_env)id);
        const char *now = oh_env_text((oh_env)id);
        printf("  %-32s %-7s %-8s %s", row->name, row->type,
               row->default_text[0] ? row->default_text : "-", row->meaning);
        if (now) printf("; now \"%s\"", now);
        printf("\n");
    }
}

int cli_info(int argc, char **argv) {
    cuda_census census;
    int64_t json = 0;
    static const option_row rows[] = {
        {0, "json", OPTION_SWITCH, 0, 0, 0, NULL, NULL, "the same as JSON, on standard output"},
    };
    static const char usage_text[] = "info [FLAGS]\n"
                                     "\n"
                                     "Devices, links, memory per rank and environment variables.\n"
                                     "\n";
    const int end = options_read(rows, OH_LENGTH(rows), usage_text, argc, argv, &json);
    if (end != OPTIONS_GO_ON) return end;
    cuda_take_census(&census);
    if (json) return info_print_json(&census);
    printf("onehop %s (commit %s)\n", cli_version(), ONEHOP_COMMIT);
    printf("oldest driver for GPUs: %s\n\n", OH_CU_MIN_TEXT);
    int code = print_devices(&census);
    print_links(census.count);
    print_memory();
    print_environment();
    return code;
}
