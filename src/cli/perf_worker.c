/* What a rank does: set up, take the sizes one after another, report. In the layout "single" one
 * worker does it for all ranks at once. */
#include "cli/perf.h"
#include "device/nccl/nccl.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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

/* ---- slices ---------------------------------------------------------------------------------- */

/* More slices than calls would only be filled, never used. */
static size_t max_slices(const perf_plan *plan) {
    size_t calls = plan->calls ? plan->calls : 100;
    if (!plan->rotate) return 1;
    if (plan->graph) return calls;
    return plan->device == ONEHOP_DEVICE_CUDA ? calls * 20 : plan->calls ? calls : 1 << 16;
}

perf_slices perf_slices_for(const perf_worker *worker, size_t bytes) {
    perf_slices slices = {.bytes = bytes, .count = 1};
    slices.stride = oh_round_up(bytes, PERF_GUARD) + PERF_GUARD;
    size_t fit = worker->area_bytes / slices.stride, max = max_slices(worker->plan);
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

/* ---- set-up ---------------------------------------------------------------------------------- */

static onehop_device device_of(const perf_plan *plan, int rank) {
    onehop_device device = {plan->device, 0};
    if (plan->device != ONEHOP_DEVICE_CUDA) return device;
    device.ordinal = rank / plan->ranks_per_device;
    /* torchrun may show each rank all GPUs or only its own. */
    if (plan->env_rank >= 0) device.ordinal = plan->env_local_rank % plan->devices;
    return device;
}

#define MAX_BYTES_LIMIT ((size_t)128 << 20)

static void fill_config(const perf_plan *plan, onehop_config *config) {
    if (plan->early_trigger) config->flags |= ONEHOP_FLAG_EARLY_TRIGGER;
    if (plan->hand_over) config->flags |= ONEHOP_FLAG_NCCL;
    if (plan->device == ONEHOP_DEVICE_CUDA && plan->world_size > plan->devices)
        config->flags |= ONEHOP_FLAG_SHARE_GPU;
    /* On a GPU every message in one piece, as far as the library makes that. */
    if (plan->device == ONEHOP_DEVICE_CUDA && !plan->push_bytes)
        config->max_bytes = plan->max_bytes < MAX_BYTES_LIMIT ? plan->max_bytes : MAX_BYTES_LIMIT;
    config->push_bytes = plan->push_bytes;
    config->pull_bytes = plan->pull_bytes;
    config->timeout_ms = plan->timeout_ms;
}

/* Ranks started by somebody else have no shared memory yet: the library's own serves. */
static onehop_result find_board(perf_worker *worker, int rank) {
    if (worker->board) return ONEHOP_OK;
    onehop_group_config config = ONEHOP_CONFIG_INIT(onehop_group_config);
    onehop_device host = {ONEHOP_DEVICE_HOST, 0};
    config.rank = rank;
    config.world_size = worker->plan->world_size;
    onehop_result result = onehop_group_open(&config, &worker->board_group);
    if (result == ONEHOP_OK)
        result = onehop_symmetric_alloc(worker->board_group, host, sizeof(perf_board),
                                        &worker->board_memory);
    if (result == ONEHOP_OK) worker->board = onehop_symmetric_ptr(worker->board_memory, 0);
    return result;
}

static onehop_result create_context(perf_worker *worker, perf_rank *rank) {
    const perf_plan *plan = worker->plan;
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    fill_config(plan, &config);
    config.device = rank->processor.device;
    config.group = rank->group ? rank->group : worker->board_group;
    if (!config.group) {
        config.rank = rank->rank;
        config.world_size = plan->world_size;
        config.name = plan->name;
    }
    return onehop_create(&config, &rank->context);
}

static onehop_result create_all_contexts(perf_worker *worker) {
    const perf_plan *plan = worker->plan;
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    onehop_device devices[ONEHOP_MAX_RANKS];
    onehop_context *contexts[ONEHOP_MAX_RANKS];
    fill_config(plan, &config);
    for (int i = 0; i < worker->ranks; i++) devices[i] = worker->rank[i].processor.device;
    onehop_result result = onehop_create_all(&config, worker->ranks, devices, contexts);
    for (int i = 0; i < worker->ranks && result == ONEHOP_OK; i++)
        worker->rank[i].context = contexts[i];
    return result;
}

static onehop_result allocate(perf_worker *worker, perf_rank *rank, size_t bytes, void **out) {
    if (worker->plan->mapped) return onehop_mem_alloc(rank->processor.device, bytes, out);
    return worker->backend->alloc(&rank->processor, bytes, out);
}

static void release(perf_worker *worker, perf_rank *rank, size_t bytes, void *memory) {
    if (worker->plan->mapped)
        onehop_mem_free(memory);
    else
        worker->backend->free(&rank->processor, memory, bytes);
}

static onehop_result allocate_rank(perf_worker *worker, perf_rank *rank) {
    size_t bytes = worker->area_bytes;
    rank->begin_ns = calloc(PERF_MAX_SAMPLES, sizeof *rank->begin_ns);
    rank->end_ns = calloc(PERF_MAX_SAMPLES, sizeof *rank->end_ns);
    rank->sample_us = calloc(PERF_MAX_SAMPLES, sizeof *rank->sample_us);
    if (!rank->begin_ns || !rank->end_ns || !rank->sample_us)
        return oh_error(ONEHOP_ERR_MEMORY, "out of memory");
    onehop_result result = allocate(worker, rank, bytes, &rank->own.in);
    return result == ONEHOP_OK ? allocate(worker, rank, bytes + PERF_GUARD, &rank->own.out)
                               : result;
}

/* Without rotation one slice of the largest size; with it five times the cache that is in front. */
static size_t area_bytes(perf_worker *worker) {
    const perf_plan *plan = worker->plan;
    size_t one = oh_round_up(plan->max_bytes, PERF_GUARD) + PERF_GUARD;
    if (!plan->rotate) return one;
    size_t sharers = plan->device == ONEHOP_DEVICE_HOST ? (size_t)plan->world_size
                                                        : (size_t)plan->ranks_per_device;
    size_t max = one * max_slices(plan);
    size_t many = 5 * worker->backend->cache_bytes(&worker->rank[0].processor) / sharers;
    if (many > max) many = max;
    return many > one ? oh_round_up(many, 4096) : one;
}

static onehop_result open_processors(perf_worker *worker, int first) {
    const perf_plan *plan = worker->plan;
    bool with_stream = plan->with_stream || plan->graph || plan->layout == LAYOUT_SINGLE;
    for (int i = 0; i < worker->ranks; i++) {
        perf_rank *rank = &worker->rank[i];
        rank->rank = first + i;
        onehop_result result =
            worker->backend->open(&rank->processor, device_of(plan, rank->rank), with_stream);
        if (result != ONEHOP_OK) return result;
        board_row *row = &worker->board->row[rank->rank];
        row->pid = getpid();
        worker->backend->describe(&rank->processor, row->device, sizeof row->device);
    }
    return ONEHOP_OK;
}

static onehop_result set_up(perf_worker *worker, int first) {
    onehop_result result = find_board(worker, first);
    if (result == ONEHOP_OK) result = open_processors(worker, first);
    /* The library would look for it elsewhere. */
    if (result == ONEHOP_OK && worker->plan->nccl_path)
        result = oh_nccl_open(worker->plan->nccl_path);
    if (result == ONEHOP_OK)
        result = worker->plan->layout == LAYOUT_SINGLE ? create_all_contexts(worker)
                                                       : create_context(worker, &worker->rank[0]);
    if (result != ONEHOP_OK) return result;
    worker->area_bytes = area_bytes(worker);
    worker->staging_bytes = 1 << 18;
    worker->staging = malloc(worker->staging_bytes);
    if (!worker->staging) return oh_error(ONEHOP_ERR_MEMORY, "out of memory");
    for (int i = 0; i < worker->ranks && result == ONEHOP_OK; i++)
        result = allocate_rank(worker, &worker->rank[i]);
    perf_use_areas(worker, &perf_target_onehop);
    if (result == ONEHOP_OK) result = perf_fill_inputs(worker);
    if (result == ONEHOP_OK && worker->plan->peers) result = perf_nccl_open(worker);
    return result == ONEHOP_OK ? perf_barrier(worker) : result;
}

static void tear_down(perf_worker *worker) {
    perf_nccl_close(worker);
    for (int i = 0; i < worker->ranks; i++) {
        perf_rank *rank = &worker->rank[i];
        onehop_destroy(rank->context);
        release(worker, rank, worker->area_bytes, rank->own.in);
        release(worker, rank, worker->area_bytes + PERF_GUARD, rank->own.out);
        worker->backend->close(&rank->processor);
        free(rank->begin_ns);
        free(rank->end_ns);
        free(rank->sample_us);
    }
    free(worker->staging);
    onehop_symmetric_free(worker->board_memory);
    onehop_group_close(worker->board_group);
}

/* ---- the sizes ------------------------------------------------------------------------------- */

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
        if (result == ONEHOP_OK && prints) perf_print_result(worker, &worker->result[i]);
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

/* Tells everyone, so that nobody waits for this worker. */
static int fail(perf_worker *worker, onehop_result result, int first) {
    int code = cli_exit_for(result);
    const char *sentence = onehop_last_error();
    if (!sentence[0]) sentence = onehop_result_text(result);
    if (worker->board) board_fail(worker->board, first, code, sentence);
    if (worker->plan->env_rank >= 0) cli_fail(cli_command, code, "rank %d: %s", first, sentence);
    for (int i = 0; i < worker->ranks; i++)
        if (worker->rank[i].context) onehop_abort(worker->rank[i].context);
    return code;
}

int perf_work(perf_worker *worker, int first, int ranks) {
    bool wrong = false;
    worker->ranks = ranks;
    worker->backend = worker->plan->device == ONEHOP_DEVICE_CUDA ? &backend_cuda : &backend_host;
    worker->data =
        worker->plan->peers || worker->plan->hand_over || perf_switch_may_add(worker->plan)
            ? DATA_INTEGERS
            : DATA_REAL;
    onehop_result result = set_up(worker, first);
    if (result == ONEHOP_OK) result = worker->body(worker, &wrong);
    if (result == ONEHOP_OK) result = perf_barrier(worker); /* nobody leaves while peers call */
    int code = wrong ? CLI_WRONG_DATA : CLI_OK;
    if (result != ONEHOP_OK) code = fail(worker, result, first);
    tear_down(worker);
    return code;
}
