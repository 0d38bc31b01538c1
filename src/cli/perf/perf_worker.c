/* See perf_worker.h. */
#include "cli/perf/perf_worker.h"

#include <pthread.h>

/* ---- together with the other workers --------------------------------------------------------- */

static onehop_result peers_alive(void *user) {
    perf_worker *worker = user;
    onehop_context *context = worker->rank[0].context;
    onehop_failure failure;
    if (!context) return ONEHOP_OK;
    onehop_result result = onehop_status(context, &failure);
    return result == ONEHOP_OK ? result : oh_error(result, "%s", failure.text);
}

#define BARRIER_MS 300000u

onehop_result perf_barrier(perf_worker *worker) {
    uint32_t parties =
        worker->plan->layout == LAYOUT_SINGLE ? 1 : (uint32_t)worker->plan->world_size;
    /* A rank may measure or print between two barriers, and no call of it is longer than its
     * deadline. */
    const uint32_t limit_ms =
        worker->plan->timeout_ms > BARRIER_MS ? worker->plan->timeout_ms : BARRIER_MS;
    return board_barrier(worker->board, parties, limit_ms, peers_alive, worker);
}

onehop_result perf_largest(perf_worker *worker, const double *value, double *out) {
    board_row *rows = worker->board->row;
    double largest = 0;
    for (int i = 0; i < worker->ranks; i++) rows[worker->rank[i].rank].value[0] = value[i];
    onehop_result result = perf_barrier(worker);
    for (int rank = 0; rank < worker->plan->world_size; rank++)
        if (rows[rank].value[0] > largest) largest = rows[rank].value[0];
    if (result == ONEHOP_OK) result = perf_barrier(worker); /* before anyone writes again */
    if (result == ONEHOP_OK) *out = largest;
    return result;
}

void perf_pin(const perf_worker *worker, bool on) {
    int left = worker->rank[0].rank % CPU_COUNT(&worker->allowed), cpu = 0;
    cpu_set_t one;
    if (!worker->plan->pin) return;
    while (!CPU_ISSET(cpu, &worker->allowed) || left-- > 0) cpu++;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    pthread_setaffinity_np(pthread_self(), sizeof one, on ? &one : &worker->allowed);
}

/* ---- slices ---------------------------------------------------------------------------------- */

/* More slices than calls would only be filled, never used. */
size_t perf_max_slices(const perf_plan *plan) {
    size_t calls = plan->calls ? plan->calls : 100;
    if (!plan->rotate) return 1;
    if (plan->graph) return calls;
    return plan->device == ONEHOP_DEVICE_CUDA ? calls * 20 : plan->calls ? calls : 1 << 16;
}

perf_slices perf_slices_for(const perf_worker *worker, size_t bytes) {
    perf_slices slices = {.bytes = bytes, .count = 1};
    slices.stride = oh_round_up(bytes, PERF_GUARD) + PERF_GUARD;
    size_t fit = worker->area_bytes / slices.stride, max = perf_max_slices(worker->plan);
    if (fit > 1) slices.count = fit < max ? fit : max;
    return slices;
}

/* Differs between ranks, and on one rank between input and output. */
static size_t shift(perf_slices slices, int salt) {
    enum {
        UNIT = 16
    };
    if (!slices.element) return 0;
    return (size_t)salt % (UNIT / slices.element) * slices.element;
}

size_t perf_slice_offset(perf_slices slices, uint64_t call, int rank) {
    return call % slices.count * slices.stride + shift(slices, 3 * rank + 1);
}

void *perf_slice_in(const perf_rank *rank, perf_slices slices, uint64_t call) {
    return (char *)rank->areas->in + perf_slice_offset(slices, call, rank->rank);
}

void *perf_slice_out(const perf_rank *rank, perf_slices slices, uint64_t call) {
    return (char *)rank->areas->out + PERF_GUARD + call % slices.count * slices.stride +
           shift(slices, 5 * rank->rank + 2);
}

void perf_use_areas(perf_worker *worker, const perf_target *target) {
    for (int i = 0; i < worker->ranks; i++) {
        perf_rank *rank = &worker->rank[i];
        rank->areas = target->window ? &rank->window : &rank->own;
    }
}

/* ---- our own as a target --------------------------------------------------------------------- */

static onehop_stream stream_of(const perf_worker *worker, const perf_rank *rank) {
    return worker->inline_calls ? NULL : rank->processor.stream;
}

static onehop_result onehop_call_target(perf_worker *worker, perf_rank *rank, const void *in,
                                        void *out, size_t count) {
    const perf_plan *plan = worker->plan;
    onehop_stream stream = stream_of(worker, rank);
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    call.algorithm = plan->algorithm;
    call.source = plan->source;
    /* Only captured calls have captured pointers; those that warm up and align take another. */
    if (plan->source == ONEHOP_SOURCE_GRAPH && plan->graph && !worker->capturing)
        call.source = ONEHOP_SOURCE_NONE;
    const onehop_call *named = call.algorithm || call.source ? &call : NULL;
    if (plan->collective == ONEHOP_REDUCE_SCATTER)
        return onehop_reduce_scatter(rank->context, in, out, count, plan->dtype, ONEHOP_SUM, named,
                                     stream);
    if (plan->collective == ONEHOP_ALL_GATHER)
        return onehop_all_gather(rank->context, in, out, count * onehop_dtype_bytes(plan->dtype),
                                 named, stream);
    return onehop_all_reduce(rank->context, in, out, count, plan->dtype, ONEHOP_SUM, named, stream);
}

static onehop_result onehop_wait(perf_worker *worker, perf_rank *rank) {
    return onehop_synchronize(rank->context, stream_of(worker, rank));
}

const perf_target perf_target_onehop = {
    .name = "onehop",
    .registers = true,
    .call = onehop_call_target,
    .wait = onehop_wait,
};
