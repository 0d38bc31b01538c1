/* The results as JSON, schema onehop-perf/1 (docs/cli.md). */
#include "cli/shared/json.h"
#include "cli/perf/perf_json.h"
#include "cli/perf/perf_nccl.h"
#include "cli/perf/perf_print.h"

#include <stdio.h>

static void write_side(FILE *file, const char *name, const perf_side *side, const char *algorithm,
                       const char *end) {
    fprintf(file, "\n     \"%s\": {", name);
    json_number(file, "time_us", side->time_us, ", ");
    json_number(file, "p50", side->p50_us, ", ");
    json_number(file, "p99", side->p99_us, ", ");
    json_number(file, "algbw", side->algbw, ", ");
    json_number(file, "busbw", side->busbw, ", ");
    json_number(file, "wrong", (double)side->wrong, ", ");
    json_number(file, "percent_of_floor", side->floor_percent, ", ");
    if (side->ratio > 0) json_number(file, "ratio", side->ratio, ", ");
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
        onehop_dtype_name(plan->dtype),
        plan->collective == ONEHOP_ALL_GATHER ? "none" : onehop_op_name(ONEHOP_SUM));
    fprintf(file, " \"out_of_bounds\": %llu, ", (unsigned long long)result->outside);
    json_number(file, "floor_us", result->floor_us, ",");
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

static void write_config(FILE *file, const perf_worker *worker) {
    static const char *const layouts[] = {"process", "thread", "single"};
    const perf_plan *plan = worker->plan;
    bool cuda = plan->device == ONEHOP_DEVICE_CUDA;
    json_text(file, "collective", onehop_collective_name(plan->collective), ",");
    json_text(file, "device", cuda ? "cuda" : "host", ",");
    json_text(file, "layout", layouts[plan->layout], ",");
    json_text(file, "mode", plan->graph ? "graph" : "eager", ",");
    json_text(file, "source", plan->source ? onehop_source_name(plan->source) : "", ",");
    json_text(file, "input", worker->data == DATA_INTEGERS ? "integers" : "real", ",");
    if (plan->peers) json_text(file, "nccl", perf_nccl_version(), ",");
    fprintf(file,
            "  \"ranks\": %d,\n  \"ranks_per_device\": %d,\n  \"rotate\": %s,\n"
            "  \"early_trigger\": %s,\n  \"pin\": %s,\n  \"nccl_handover\": %s,\n",
            plan->world_size, plan->ranks_per_device, plan->rotate ? "true" : "false",
            plan->early_trigger ? "true" : "false", plan->pin ? "true" : "false",
            plan->hand_over ? "true" : "false");
    fprintf(file, "  ");
    json_number(file, "floor_latency_us", worker->floor.known ? worker->floor.latency_us : -1,
                ",\n");
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
        json_number(file, perf_target_peer[peer].name, perf_geomean(worker, peer), "");
        before = ", ";
    }
    fprintf(file, "},\n");
}

static void write_all(FILE *file, void *user) {
    perf_worker *worker = user;
    backend_rank *processor = &worker->rank[0].processor;
    char driver[256], clocks[256];
    worker->backend->driver(processor, driver, sizeof driver);
    worker->backend->clocks(processor, clocks, sizeof clocks);
    fprintf(file, "{\n  \"schema\": \"onehop-perf/1\",\n");
    json_machine(file, driver, clocks);
    json_text(file, "args", worker->plan->command_line, ",");
    fprintf(file, "  \"complete\": %s,\n", worker->complete ? "true" : "false");
    write_config(file, worker);
    write_devices(file, worker);
    fprintf(file, "  ");
    json_number(file, "average_busbw", perf_average_busbw(worker), ",\n");
    write_geomeans(file, worker);
    fprintf(file, "  \"results\": [\n");
    for (size_t i = 0; i < worker->results; i++) write_result(file, worker, i);
    fprintf(file, "  ]\n}\n");
}

void perf_write_json_so_far(perf_worker *worker) {
    if (output_is_file(&worker->plan->file))
        (void)output_write(&worker->plan->file, write_all, worker);
}

onehop_result perf_write_json(perf_worker *worker) {
    worker->complete = true;
    return output_write(&worker->plan->file, write_all, worker);
}
