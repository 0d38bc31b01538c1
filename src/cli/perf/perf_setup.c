/* What a rank does: set up, run the body, tear down. In the layout "single" one worker does it for
 * all ranks at once. */
#include "cli/perf/perf_setup.h"

#include "cli/perf/perf_check.h"
#include "cli/perf/perf_nccl.h"
#include "device/nccl/nccl.h"

#include <stdlib.h>
#include <unistd.h>

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
    size_t max = one * perf_max_slices(plan);
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
