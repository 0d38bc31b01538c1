/* The host as perf's processor: plain memory, host streams and their graphs, the clock. */
#include "cli/shared/backend.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static onehop_result host_open(backend_rank *rank, onehop_device device, bool with_stream) {
    rank->device = device;
    return with_stream ? onehop_host_stream_create(&rank->stream) : ONEHOP_OK;
}

static void host_close(backend_rank *rank) {
    if (rank->stream) onehop_host_stream_destroy(rank->stream);
    rank->stream = NULL;
}

static onehop_result host_enter(backend_rank *rank) {
    (void)rank;
    return ONEHOP_OK;
}

/* Pages come when they are touched: a small test does not pay for a large maximum. */
static onehop_result host_alloc(backend_rank *rank, size_t bytes, void **out) {
    (void)rank;
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return oh_error(ONEHOP_ERR_MEMORY, "%zu bytes for a buffer could not be had", bytes);
    *out = memory;
    return ONEHOP_OK;
}

static void host_free(backend_rank *rank, void *memory, size_t bytes) {
    (void)rank;
    if (memory) munmap(memory, bytes);
}

static onehop_result host_copy(backend_rank *rank, void *to, const void *from, size_t bytes) {
    (void)rank;
    memcpy(to, from, bytes);
    return ONEHOP_OK;
}

static onehop_result host_fill(backend_rank *rank, void *to, int byte, size_t bytes) {
    (void)rank;
    memset(to, byte, bytes);
    return ONEHOP_OK;
}

static onehop_result host_wait(backend_rank *rank) {
    return rank->stream ? onehop_host_stream_synchronize(rank->stream) : ONEHOP_OK;
}

static onehop_result host_capture_begin(backend_rank *rank) {
    return onehop_host_stream_capture_begin(rank->stream);
}

static onehop_result host_capture_end(backend_rank *rank, void **graph_out) {
    onehop_host_graph *graph;
    onehop_result result = onehop_host_stream_capture_end(rank->stream, &graph);
    if (result == ONEHOP_OK) *graph_out = graph;
    return result;
}

static onehop_result host_graph_launch(backend_rank *rank, void *graph) {
    return onehop_host_graph_launch(graph, rank->stream);
}

static void host_graph_destroy(backend_rank *rank, void *graph) {
    (void)rank;
    onehop_host_graph_destroy(graph);
}

static size_t host_cache_bytes(backend_rank *rank) {
    (void)rank;
    long level3 = sysconf(_SC_LEVEL3_CACHE_SIZE), level2 = sysconf(_SC_LEVEL2_CACHE_SIZE);
    if (level3 > 0) return (size_t)level3;
    return level2 > 0 ? (size_t)level2 : (size_t)32 << 20;
}

/* Value of the first line of /proc/cpuinfo that starts with `key`. */
static void cpuinfo(const char *key, char *value, size_t size) {
    char line[256];
    FILE *file = fopen("/proc/cpuinfo", "re");
    value[0] = 0;
    while (file && !value[0] && fgets(line, sizeof line, file)) {
        char *colon = strchr(line, ':');
        if (strncmp(line, key, strlen(key)) != 0 || !colon) continue;
        snprintf(value, size, "%s", colon + 1 + (colon[1] == ' '));
        value[strcspn(value, "\n")] = 0;
    }
    if (file) fclose(file);
}

static void host_describe(backend_rank *rank, char *line, size_t size) {
    char model[128];
    (void)rank;
    cpuinfo("model name", model, sizeof model);
    snprintf(line, size, "host, %ld cores [%s]", sysconf(_SC_NPROCESSORS_ONLN),
             model[0] ? model : "unknown processor");
}

static void host_driver(backend_rank *rank, char *line, size_t size) {
    (void)rank;
    if (size) line[0] = 0;
}

static void host_clocks(backend_rank *rank, char *line, size_t size) {
    char rate[64];
    (void)rank;
    cpuinfo("cpu MHz", rate, sizeof rate);
    line[0] = 0;
    if (rate[0]) snprintf(line, size, "cpu %s MHz at start", rate);
}

const perf_backend backend_host = {
    .events = false,
    .open = host_open,
    .close = host_close,
    .enter = host_enter,
    .alloc = host_alloc,
    .free = host_free,
    .write = host_copy,
    .read = host_copy,
    .fill = host_fill,
    .copy = host_copy,
    .wait = host_wait,
    .capture_begin = host_capture_begin,
    .capture_end = host_capture_end,
    .graph_launch = host_graph_launch,
    .graph_destroy = host_graph_destroy,
    .cache_bytes = host_cache_bytes,
    .describe = host_describe,
    .driver = host_driver,
    .clocks = host_clocks,
};
