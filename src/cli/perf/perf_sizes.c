/* See perf_sizes.h. */
#include "cli/perf/perf_sizes.h"

#include "cli/perf/perf_json.h"
#include "cli/perf/perf_nccl.h"
#include "cli/perf/perf_print.h"
#include "cli/perf/perf_run.h"

#include <math.h>

static size_t list_sizes(const perf_plan *plan, uint64_t *bytes) {
    size_t count = 0, grain = onehop_dtype_bytes(plan->dtype) * perf_parts(plan);
    for (uint64_t at = plan->min_bytes; at <= plan->max_bytes && count < PERF_MAX_SIZES;) {
        bytes[count++] = at / grain * grain;
        if (__builtin_mul_overflow(at, plan->factor, &at)) break;
    }
    return count;
}

static const char *algorithm_of(perf_worker *worker, size_t bytes, bool in_place) {
    const perf_plan *plan = worker->plan;
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    onehop_query query = ONEHOP_CONFIG_INIT(onehop_query);
    onehop_choice choice = {.algorithm = plan->algorithm};
    call.algorithm = plan->algorithm;
    call.source = plan->source;
    query.bytes = bytes / perf_parts(plan);
    query.collective = plan->collective;
    query.dtype = plan->dtype;
    query.mode = plan->graph ? ONEHOP_MODE_GRAPH : ONEHOP_MODE_EAGER;
    query.in_place = in_place;
    query.call = &call;
    const onehop_result result = onehop_would_use(worker->rank[0].context, &query, &choice);
    if (result != ONEHOP_OK && !plan->algorithm) return "unknown";
    return onehop_algorithm_name(choice.algorithm);
}

static double percent_of_floor(const perf_result *result, const perf_side *side) {
    return result->floor_us < 0 ? -1 : 100 * result->floor_us / side->p50_us;
}

static onehop_result one_size(perf_worker *worker, size_t index, size_t bytes) {
    static const perf_side not_served = {NAN, NAN, NAN, NAN, NAN, NAN, NAN, 0, -1};
    const perf_floor *floor = &worker->floor;
    perf_result *to = &worker->result[index];
    to->bytes = bytes;
    to->count = bytes / onehop_dtype_bytes(worker->plan->dtype);
    to->floor_us = floor->known ? floor->latency_us + floor->copy_us[index] : -1;
    for (int side = 0; side < SIDES; side++) {
        bool in_place = side == SIDE_IN_PLACE;
        perf_side *ours = &to->ours[side];
        to->algorithm[side] = algorithm_of(worker, bytes, in_place);
        *ours = not_served;
        for (int peer = 0; peer < PEERS; peer++) to->theirs[peer][side] = not_served;
        /* Alone, and in place: a call does nothing, so there is nothing to time. */
        if (in_place && worker->plan->world_size == 1) break;
        onehop_result result =
            perf_measure(worker, &perf_target_onehop, bytes, in_place, ours, &to->outside);
        /* A forced algorithm may serve only calls out of place. */
        if (result == ONEHOP_ERR_ALGORITHM && in_place) {
            *ours = not_served;
            result = ONEHOP_OK;
        }
        for (int peer = 0; peer < PEERS && result == ONEHOP_OK; peer++)
            if (perf_has_peer(worker->plan, peer))
                result = perf_measure(worker, &perf_target_peer[peer], bytes, in_place,
                                      &to->theirs[peer][side], &to->outside);
        if (result != ONEHOP_OK) return result;
        ours->floor_percent = percent_of_floor(to, ours);
        for (int peer = 0; peer < PEERS; peer++) {
            perf_side *theirs = &to->theirs[peer][side];
            theirs->floor_percent = percent_of_floor(to, theirs);
            theirs->ratio = theirs->time_us / ours->time_us;
        }
    }
    worker->results = index + 1;
    return ONEHOP_OK;
}

static onehop_result measure_sizes(perf_worker *worker) {
    uint64_t bytes[PERF_MAX_SIZES];
    size_t count = list_sizes(worker->plan, bytes);
    bool prints = worker->rank[0].rank == 0;
    if (prints && worker->plan->device == ONEHOP_DEVICE_HOST) {
        perf_pin(worker, false); /* it takes two */
        perf_measure_floor(bytes, count, &worker->floor);
        perf_pin(worker, true);
    }
    if (prints) perf_print_header(worker);
    onehop_result result = perf_barrier(worker);
    for (size_t i = 0; i < count && result == ONEHOP_OK; i++) {
        result = one_size(worker, i, bytes[i]);
        if (result != ONEHOP_OK || !prints) continue;
        perf_print_result(worker, &worker->result[i]);
        if (i + 1 < count) perf_write_json_so_far(worker);
    }
    return result;
}

onehop_result perf_all_sizes(perf_worker *worker, bool *wrong_out) {
    onehop_result result = measure_sizes(worker);
    if (result != ONEHOP_OK || worker->rank[0].rank != 0) return result;
    result = perf_write_json(worker);
    *wrong_out = perf_print_footer(worker) != 0;
    return result;
}
