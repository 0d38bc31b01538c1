/* The table on stdout: the columns and lines that users of nccl-tests know, then ours. Each line is
 * flushed, so that progress is seen through a pipe. */
#include "cli/perf/perf_print.h"
#include "cli/perf/perf_nccl.h"
#include "device/nccl/nccl_api.h"

#include <math.h>
#include <stdio.h>
#include <unistd.h>

static const char *const layout_names[] = {"process", "thread", "single"};

static void print_devices(const perf_worker *worker) {
    char host[64] = "?";
    gethostname(host, sizeof host - 1);
    printf("# Using devices\n");
    for (int rank = 0; rank < worker->plan->world_size; rank++) {
        const board_row *row = &worker->board->row[rank];
        printf("#  Rank %2d Group  0 Pid %6d on %10s %s\n", rank, (int)row->pid, host, row->device);
    }
}

/* What figures of ranks that have no GPU of their own are worth. */
static void print_sharing(const perf_plan *plan) {
    if (plan->device != ONEHOP_DEVICE_CUDA || plan->world_size <= plan->devices) return;
    printf("# ranks share a GPU: no link is crossed; ");
    if (plan->layout != LAYOUT_PROCESS)
        printf("they are threads of one process\n");
    else if (plan->mps)
        printf("they are processes under MPS, side by side\n");
    else
        printf("they are processes without MPS, which the GPU serves one after the other, "
               "milliseconds each\n");
}

static void print_method(const perf_worker *worker) {
    const perf_plan *plan = worker->plan;
    print_sharing(plan);
    printf("# calls: %s; p50 and p99 over %s\n", plan->graph ? "replayed graphs" : "eager",
           plan->graph ? "replays" : "calls or batches of calls");
    if (plan->source) printf("# source: %s\n", onehop_source_name(plan->source));
    if (plan->rotate)
        printf("# buffers: rotating over %.1f MiB of input and as much output per rank\n",
               (double)worker->area_bytes / (1 << 20));
    else
        printf("# buffers: one hot input and output per rank\n");
    if (plan->device == ONEHOP_DEVICE_CUDA)
        printf("# early_trigger: %s\n# hand-over to NCCL: %s\n", plan->early_trigger ? "on" : "off",
               plan->hand_over ? oh_nccl.version : "off");
    if (worker->floor.known)
        printf("# floor: %.3f us from core to core, plus one memcpy of the message\n",
               worker->floor.latency_us);
    else
        printf("# floor: n/a\n");
    printf("# input: %s\n", worker->data == DATA_INTEGERS
                                ? "small integers, exact in any order of summation"
                                : "random real numbers");
    if (plan->peers)
        printf("# compared with NCCL %s, multicast off (NCCL_NVLS_ENABLE=0)\n",
               perf_nccl_version());
}

enum {
    PEER_WIDTH = 36 /* of a peer's columns */
};

static void print_peer_titles(const perf_plan *plan, bool names) {
    for (int peer = 0; peer < PEERS; peer++) {
        char title[PEER_WIDTH];
        if (!perf_has_peer(plan, peer)) continue;
        snprintf(title, sizeof title, "%s us (ratio)", perf_target_peer[peer].name);
        if (names)
            printf("  %*s", PEER_WIDTH - 2, title);
        else
            printf("  %8s %8s %7s %8s", "out", "", "in", "");
    }
}

static void print_column_titles(const perf_plan *plan) {
    const char *side = "    time   algbw   busbw  #wrong     p50     p99  %floor";
    const char *units = "    (us)  (GB/s)  (GB/s)            (us)    (us)        ";
    printf("#\n# %10s  %12s  %8s  %6s  %6s  %-56s  %-56s", "", "", "", "", "",
           "                       out-of-place", "                         in-place");
    print_peer_titles(plan, true);
    printf("\n# %10s  %12s  %8s  %6s  %6s  %s  %s", "size", "count", "type", "redop", "root", side,
           side);
    print_peer_titles(plan, false);
    printf("  %s\n", "algorithm");
    printf("# %10s  %12s  %8s  %6s  %6s  %s  %s\n", "(B)", "(elements)", "", "", "", units, units);
}

void perf_print_header(const perf_worker *worker) {
    const perf_plan *plan = worker->plan;
    char iters[32] = "by time";
    if (plan->calls) snprintf(iters, sizeof iters, "%llu", (unsigned long long)plan->calls);
    printf("# onehop %s (commit %s)\n", cli_version(), ONEHOP_COMMIT);
    printf("# Collective test starting: %s\n", onehop_collective_name(plan->collective));
    printf(
        "# ranks %d layout %s ranks per device %d minBytes %llu maxBytes %llu step: %llu(factor) "
        "warmup iters: %llu iters: %s validation: %d graph: ",
        plan->world_size, layout_names[plan->layout], plan->ranks_per_device,
        (unsigned long long)plan->min_bytes, (unsigned long long)plan->max_bytes,
        (unsigned long long)plan->factor, (unsigned long long)plan->warmup, iters, plan->check);
    if (plan->graph && plan->samples)
        printf("%llu\n#\n", (unsigned long long)plan->samples);
    else
        printf("%s\n#\n", plan->graph ? "by time" : "0");
    print_devices(worker);
    print_method(worker);
    print_column_titles(plan);
    cli_flush();
}

/* As many decimals as fit beside the digits before the point. */
static void print_number(int width, double value) {
    int decimals = value < 100 ? 2 : value < 10000 ? 1 : 0;
    if (isnan(value))
        printf(" %*s", width, "n/a");
    else
        printf(" %*.*f", width, decimals, value);
}

static void print_side(const perf_side *side) {
    print_number(8, side->time_us);
    print_number(7, side->algbw);
    print_number(7, side->busbw);
    if (side->wrong < 0)
        printf(" %7s", "N/A");
    else
        printf(" %7lld", (long long)side->wrong);
    print_number(7, side->p50_us);
    print_number(7, side->p99_us);
    if (side->floor_percent >= 0)
        printf(" %7.1f", side->floor_percent);
    else
        printf(" %7s", "n/a");
}

void perf_print_result(const perf_worker *worker, const perf_result *result) {
    const perf_plan *plan = worker->plan;
    printf("  %10llu  %12llu  %8s  %6s  %6d ", (unsigned long long)result->bytes,
           (unsigned long long)result->count, onehop_dtype_name(plan->dtype),
           plan->collective == ONEHOP_ALL_GATHER ? "none" : onehop_op_name(ONEHOP_SUM), -1);
    print_side(&result->ours[SIDE_OUT_OF_PLACE]);
    printf(" ");
    print_side(&result->ours[SIDE_IN_PLACE]);
    for (int peer = 0; peer < PEERS; peer++)
        for (int side = 0; side < SIDES && perf_has_peer(plan, peer); side++) {
            print_number(side ? 7 : 9, result->theirs[peer][side].time_us);
            printf(" %7.2fx", result->theirs[peer][side].ratio);
        }
    printf("  %s", result->algorithm[SIDE_OUT_OF_PLACE]);
    if (result->algorithm[SIDE_IN_PLACE] != result->algorithm[SIDE_OUT_OF_PLACE])
        printf(" / %s", result->algorithm[SIDE_IN_PLACE]);
    printf("\n");
    cli_flush();
}

double perf_average_busbw(const perf_worker *worker) {
    double sum = 0;
    int sides = 0;
    for (size_t i = 0; i < worker->results; i++)
        for (int side = 0; side < SIDES; side++) {
            if (!worker->result[i].ours[side].calls) continue;
            sum += worker->result[i].ours[side].busbw;
            sides++;
        }
    return sides ? sum / sides : 0;
}

double perf_geomean(const perf_worker *worker, int peer) {
    double sum = 0;
    int sides = 0;
    for (size_t i = 0; i < worker->results; i++)
        for (int side = 0; side < SIDES; side++) {
            if (!worker->result[i].ours[side].calls) continue;
            sum += log(worker->result[i].theirs[peer][side].ratio);
            sides++;
        }
    return sides ? exp(sum / sides) : NAN;
}

uint64_t perf_print_footer(const perf_worker *worker) {
    uint64_t wrong = 0, outside = 0;
    for (size_t i = 0; i < worker->results; i++) {
        const perf_result *result = &worker->result[i];
        outside += result->outside;
        for (int side = 0; side < SIDES; side++) {
            if (result->ours[side].wrong > 0) wrong += (uint64_t)result->ours[side].wrong;
            for (int peer = 0; peer < PEERS; peer++)
                if (result->theirs[peer][side].wrong > 0)
                    wrong += (uint64_t)result->theirs[peer][side].wrong;
        }
    }
    const char *unchecked = worker->plan->check ? NULL : "N/A (not checked)";
    printf("# Out of bounds values : %llu %s\n", (unsigned long long)outside,
           unchecked ? unchecked
           : outside ? "FAILED"
                     : "OK");
    printf("# Avg bus bandwidth    : %g\n", perf_average_busbw(worker));
    for (int peer = 0; peer < PEERS; peer++)
        if (perf_has_peer(worker->plan, peer))
            printf("# Time of %s over ours, geometric mean : %.2f\n", perf_target_peer[peer].name,
                   perf_geomean(worker, peer));
    printf("#\n# Collective test concluded: %s\n",
           onehop_collective_name(worker->plan->collective));
    if (unchecked)
        printf("# wrong values : %s\n", unchecked);
    else
        printf("# %llu wrong\n", (unsigned long long)wrong);
    cli_flush();
    return wrong + outside;
}
