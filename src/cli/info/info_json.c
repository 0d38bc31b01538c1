/* `onehop info --json`, schema onehop-info/1 (docs/cli.md). What is not known is null or "". */
#include "cli/info/info_json.h"

#include "cli/info/info_device.h"
#include "cli/shared/json.h"
#include "device/cuda/driver_api.h"
#include "device/host/vector.h"

#include <stdio.h>

static void print_member(const char *key, const char *value) {
    printf("\"%s\": ", key);
    json_string(stdout, value);
    printf(", ");
}

static void print_handle_kinds(uint32_t kinds) {
    const char *separator = "";
    printf("\"handle_types\": [");
    for (const info_handle_name *row = info_handle_names; row->name; row++) {
        if (!(kinds & row->kind)) continue;
        printf("%s", separator);
        json_string(stdout, row->name);
        separator = ", ";
    }
    printf("], ");
}

static void print_multicast(const oh_device_info *info) {
    const char *refusal = oh_multicast_refusal();
    printf("\"multicast\": {");
    print_member("support", info->device.kind == ONEHOP_DEVICE_HOST ? "emulated"
                            : info->multicast                       ? "reported"
                                                                    : "none");
    print_member("refusal", refusal ? refusal : "");
    printf("\"on\": %s}", !refusal && info->multicast ? "true" : "false");
}

/* Returns an exit code: a variable that is not understood is a mistake of the user. */
static int print_device(onehop_device which, const char *end) {
    oh_device_info info;
    const bool cuda = which.kind == ONEHOP_DEVICE_CUDA;
    const onehop_result result = info_ask(which, &info);
    printf("    {\"kind\": \"%s\", \"ordinal\": %d, ", cuda ? "cuda" : "host", which.ordinal);
    print_member("refusal", result == ONEHOP_OK ? "" : onehop_last_error());
    if (result != ONEHOP_OK) {
        printf("\"usable\": false}%s\n", end);
        return result == ONEHOP_ERR_ENVIRONMENT ? CLI_USAGE : CLI_OK;
    }
    printf("\"usable\": true, ");
    print_member("name", info.name);
    print_member("bus_id", info.bus_id);
    if (!cuda) print_member("instruction_set", oh_vector_table()->isa);
    printf("\"capability\": %u, \"%s\": %u, \"memory_bytes\": %llu, ", info.capability,
           cuda ? "multiprocessors" : "cores", info.multiprocessors,
           (unsigned long long)info.memory_bytes);
    print_handle_kinds(info.handle_kinds);
    print_multicast(&info);
    printf("}%s\n", end);
    return CLI_OK;
}

static int print_devices(const cuda_census *census) {
    printf("  \"devices\": [\n");
    int code = print_device((onehop_device){ONEHOP_DEVICE_HOST, 0}, census->count ? "," : "");
    for (int i = 0; i < census->count; i++) {
        const onehop_device gpu = {ONEHOP_DEVICE_CUDA, i};
        const int gpu_code = print_device(gpu, i + 1 < census->count ? "," : "");
        if (code == CLI_OK) code = gpu_code;
    }
    printf("  ],\n");
    json_text(stdout, "no_gpu", census->count ? "" : census->reason, ",");
    return code;
}

/* Row by row, from each GPU to each; "self" on the diagonal. */
static void print_links(int count) {
    printf("  \"links\": [");
    for (int from = 0; from < count; from++) {
        printf("%s[", from ? ", " : "");
        for (int to = 0; to < count; to++) {
            char link[16] = "self";
            if (to != from) cuda_describe_link(from, to, link, sizeof link);
            printf("%s", to ? ", " : "");
            json_string(stdout, link);
        }
        printf("]");
    }
    printf("],\n");
}

static void print_layout(const char *key, onehop_device_kind kind, int ranks) {
    onehop_layout_config config = ONEHOP_CONFIG_INIT(onehop_layout_config);
    onehop_layout layout;
    config.device_kind = kind;
    config.world_size = ranks;
    if (onehop_layout_get(&config, &layout) != ONEHOP_OK) {
        printf("\"%s\": null", key);
        return;
    }
    printf("\"%s\": {\"symmetric_bytes\": %zu, \"local_bytes\": %zu, \"host_bytes\": %zu}", key,
           layout.symmetric_bytes, layout.local_bytes, layout.host_bytes);
}

static void print_memory(void) {
    printf("  \"memory\": [\n");
    for (int ranks = 2; ranks <= 8; ranks++) {
        printf("    {\"ranks\": %d, ", ranks);
        print_layout("host", ONEHOP_DEVICE_HOST, ranks);
        printf(", ");
        print_layout("cuda", ONEHOP_DEVICE_CUDA, ranks);
        printf("}%s\n", ranks < 8 ? "," : "");
    }
    printf("  ],\n");
}

static void print_environment(void) {
    printf("  \"environment\": [\n");
    for (int id = 0; id < OH_ENV_COUNT; id++) {
        const oh_env_row *row = oh_env_describe((oh_env)id);
        const char *now = oh_env_text((oh_env)id);
        printf("    {");
        print_member("name", row->name);
        print_member("type", row->type);
        print_member("default", row->default_text);
        print_member("meaning", row->meaning);
        printf("\"value\": ");
        if (now)
            json_string(stdout, now);
        else
            printf("null");
        printf("}%s\n", id + 1 < OH_ENV_COUNT ? "," : "");
    }
    printf("  ]\n");
}

int info_print_json(const cuda_census *census) {
    printf("{\n  \"schema\": \"onehop-info/1\",\n");
    json_text(stdout, "version", cli_version(), ",");
    json_text(stdout, "commit", ONEHOP_COMMIT, ",");
    json_text(stdout, "oldest_driver", OH_CU_MIN_TEXT, ",");
    const int code = print_devices(census);
    print_links(census->count);
    print_memory();
    print_environment();
    printf("}\n");
    return code;
}
