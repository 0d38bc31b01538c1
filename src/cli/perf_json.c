/* The results as JSON, schema onehop-perf/1 (docs/cli.md). Written beside the file and renamed over
 * it: readers see a whole file or the old one. */
#include "cli/perf.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

static void text(FILE *file, const char *key, const char *value) {
    fprintf(file, "  \"%s\": \"", key);
    for (const unsigned char *at = (const unsigned char *)value; *at; at++) {
        if (*at == '"' || *at == '\\')
            fprintf(file, "\\%c", *at);
        else if (*at < 0x20)
            fprintf(file, "\\u%04x", *at);
        else
            fputc(*at, file);
    }
    fprintf(file, "\",\n");
}

/* A number, or null for one that is not known: JSON has neither inf nor nan. */
static void number(FILE *file, const char *key, double value, const char *end) {
    if (value >= 0 && value < 1e300)
        fprintf(file, "\"%s\": %.6g%s", key, value, end);
    else
        fprintf(file, "\"%s\": null%s", key, end);
}

static void write_side(FILE *file, const char *name, const perf_side *side, const char *algorithm,
                       const char *end) {
    fprintf(file, "\n     \"%s\": {", name);
    number(file, "time_us", side->time_us, ", ");
    number(file, "p50", side->p50_us, ", ");
    number(file, "p99", side->p99_us, ", ");
    number(file, "algbw", side->algbw, ", ");
    number(file, "busbw", side->busbw, ", ");
    number(file, "wrong", (double)side->wrong, ", ");
    number(file, "percent_of_floor", side->floor_percent, ", ");
    if (side->ratio > 0) number(file, "ratio", side->ratio, ", ");
    fprintf(file, "\"calls\": %llu, \"algorithm\": \"%s\"}%s", (unsigned long long)side->calls,
            algorithm, end);
}

static void write_result(FILE *file, const perf_worker *worker, size_t index) {
    const perf_result *result = &worker->result[index];
    const perf_plan *plan = worker->plan;
    fprintf(
        file,
        "    {\"size\": %llu, \"count\": %llu, \"type\": \"%s\", \"redop\": \"%s\", \"root\": -1,",
        (unsigned long long)result->bytes, (unsigned long long)result->count,
        onehop_dtype_name(plan->dtype), onehop_op_name(ONEHOP_SUM));
    fprintf(file, " \"out_of_bounds\": %llu, ", (unsigned long long)result->outside);
    number(file, "floor_us", result->floor_us, ",");
    write_side(file, "out_of_place", &result->ours[0], result->algorithm[0], ",");
    write_side(file, "in_place", &result->ours[1], result->algorithm[1], "");
    for (int peer = 0; peer < PEERS; peer++) {
        if (!perf_has_peer(plan, peer)) continue;
        const char *name = perf_target_peer[peer].name;
        char key[64];
        snprintf(key, sizeof key, "%s_out_of_place", name);
        fprintf(file, ",");
        write_side(file, key, &result->theirs[peer][0], name, ",");
        snprintf(key, sizeof key, "%s_in_place", name);
        write_side(file, key, &result->theirs[peer][1], name, "");
    }
    fprintf(file, "}%s\n", index + 1 < worker->results ? "," : "");
}

static void write_machine(FILE *file, perf_worker *worker) {
    backend_rank *processor = &worker->rank[0].processor;
    struct utsname name;
    char line[256], processor_line[160];
    time_t now = time(NULL);
    struct tm broken_down;
    uname(&name);
    snprintf(line, sizeof line, "%.64s, %.64s %.64s", name.nodename, name.sysname, name.release);
    text(file, "machine", line);
    backend_host.describe(NULL, processor_line, sizeof processor_line);
    text(file, "cpu", processor_line);
    worker->backend->driver(processor, line, sizeof line);
    text(file, "driver", line);
    worker->backend->clocks(processor, line, sizeof line);
    text(file, "clocks", line);
    strftime(line, sizeof line, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &broken_down));
    text(file, "time", line);
}

static void write_config(FILE *file, const perf_worker *worker) {
    static const char *const layouts[] = {"process", "thread", "single"};
    const perf_plan *plan = worker->plan;
    bool cuda = plan->device == ONEHOP_DEVICE_CUDA;
    text(file, "version", cli_version());
    text(file, "commit", ONEHOP_COMMIT);
    text(file, "args", plan->command_line);
    text(file, "device", cuda ? "cuda" : "host");
    text(file, "layout", layouts[plan->layout]);
    text(file, "mode", plan->graph ? "graph" : "eager");
    text(file, "source", plan->source ? onehop_source_name(plan->source) : "");
    text(file, "input", worker->data == DATA_INTEGERS ? "integers" : "real");
    if (plan->peers) text(file, "nccl", perf_nccl_version());
    fprintf(file,
            "  \"ranks\": %d,\n  \"ranks_per_device\": %d,\n  \"rotate\": %s,\n"
            "  \"early_trigger\": %s,\n",
            plan->world_size, plan->ranks_per_device, plan->rotate ? "true" : "false",
            plan->early_trigger ? "true" : "false");
    fprintf(file, "  ");
    number(file, "floor_latency_us", worker->floor.known ? worker->floor.latency_us : -1, ",\n");
}

static void write_devices(FILE *file, const perf_worker *worker) {
    fprintf(file, "  \"devices\": [\n");
    for (int rank = 0; rank < worker->plan->world_size; rank++) {
        const board_row *row = &worker->board->row[rank];
        fprintf(file, "    {\"rank\": %d, \"pid\": %d, \"device\": \"%s\"}%s\n", rank,
                (int)row->pid, row->device, rank + 1 < worker->plan->world_size ? "," : "");
    }
    fprintf(file, "  ],\n");
}

static void write_geomeans(FILE *file, const perf_worker *worker) {
    const char *before = "";
    if (!worker->plan->peers) return;
    fprintf(file, "  \"geomean_ratio\": {");
    for (int peer = 0; peer < PEERS; peer++) {
        if (!perf_has_peer(worker->plan, peer)) continue;
        fprintf(file, "%s", before);
        number(file, perf_target_peer[peer].name, perf_geomean(worker, peer), "");
        before = ", ";
    }
    fprintf(file, "},\n");
}

static void write_all(FILE *file, perf_worker *worker) {
    fprintf(file, "{\n  \"schema\": \"onehop-perf/1\",\n");
    write_machine(file, worker);
    write_config(file, worker);
    write_devices(file, worker);
    fprintf(file, "  ");
    number(file, "average_busbw", perf_average_busbw(worker), ",\n");
    write_geomeans(file, worker);
    fprintf(file, "  \"results\": [\n");
    for (size_t i = 0; i < worker->results; i++) write_result(file, worker, i);
    fprintf(file, "  ]\n}\n");
}

onehop_result perf_write_json(perf_worker *worker) {
    const char *path = worker->plan->json_path;
    char temporary[4096];
    int length = snprintf(temporary, sizeof temporary, "%s.%d", path, (int)getpid());
    if (length >= (int)sizeof temporary)
        return oh_error(ONEHOP_ERR_SYSTEM, "-J: the path is too long");
    FILE *file = fopen(temporary, "we");
    if (!file) return oh_error_errno(ONEHOP_ERR_SYSTEM, errno, "-J %s", path);
    write_all(file, worker);
    bool failed = ferror(file) != 0;
    failed |= fclose(file) != 0;
    if (!failed && rename(temporary, path) == 0) return ONEHOP_OK;
    int cause = errno;
    unlink(temporary);
    return oh_error_errno(ONEHOP_ERR_SYSTEM, cause, "-J %s could not be written", path);
}
