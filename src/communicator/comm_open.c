/* Making and unmaking a communicator. */
#include "communicator/comm.h"

#include "base/wait.h"
#include "jit/function.h"

#include "protocol/layout.h"

#include <stdlib.h>
#include <string.h>

static onehop_result check_pointer(const void *p, size_t alignment, const char *what, int rank) {
    if (!p) return oh_error(ONEHOP_ERR_NULL, "communicator: %s of rank %d is NULL", what, rank);
    if ((uintptr_t)p % alignment)
        return oh_error(ONEHOP_ERR_ALIGNMENT,
                        "communicator: %s of rank %d at %p is not aligned to %zu", what, rank, p,
                        alignment);
    return ONEHOP_OK;
}

static onehop_result check_config(const onehop_comm_config *c) {
    onehop_result result = ONEHOP_OK;
    if (c->world_size < 1 || c->world_size > ONEHOP_MAX_RANKS)
        return oh_error(ONEHOP_ERR_WORLD_SIZE, "communicator: world size is %d, expected 1..%d",
                        c->world_size, ONEHOP_MAX_RANKS);
    if (c->rank < 0 || c->rank >= c->world_size)
        return oh_error(ONEHOP_ERR_RANK, "communicator: rank is %d, expected 0..%d", c->rank,
                        c->world_size - 1);
    if (!c->layout) return oh_error(ONEHOP_ERR_NULL, "communicator: layout is NULL");
    if (c->layout->world_size != c->world_size)
        return oh_error(ONEHOP_ERR_WORLD_SIZE,
                        "communicator: layout is for %d ranks, world size is %d",
                        c->layout->world_size, c->world_size);
    if (c->flags & ~OH_KNOWN_FLAGS)
        return oh_error(ONEHOP_ERR_ARGUMENT, "communicator: flags 0x%x has unknown bits", c->flags);
    for (int r = 0; r < c->world_size && !result; r++)
        result = check_pointer(c->symmetric[r], 4096, "symmetric memory", r);
    if (!result) result = check_pointer(c->local, 256, "local memory", c->rank);
    if (!result) result = check_pointer(c->host, 256, "host memory", c->rank);
    return result;
}

/* The timeout of the config, of the environment, or the default. */
static onehop_result resolve_timeout(uint32_t given, uint32_t *out) {
    int64_t value = given;
    if (given > OH_LONGEST_TIMEOUT_MS)
        return oh_error(ONEHOP_ERR_ARGUMENT,
                        "communicator: timeout_ms is %u, expected 1..2^31, or 0 for the default",
                        given);
    onehop_result result =
        given ? ONEHOP_OK : oh_env_integer(OH_ENV_TIMEOUT_MS, 1, INT32_MAX, 300000, &value);
    if (!result) *out = (uint32_t)value;
    return result;
}

onehop_result oh_comm_check_fit(const onehop_comm *comm, int kernel, const oh_function *function,
                                uint32_t ranks_per_device) {
    size_t count;
    const oh_kernel *k = &oh_kernel_list(&count)[kernel];
    const uint32_t blocks = comm->dispatch.regions.max_blocks;
    uint32_t resident = 0;
    onehop_result result =
        comm->device->ops->resident_blocks(comm->device, function, k->max_threads, &resident);
    if (!result && comm->dispatch.kind == ONEHOP_DEVICE_CUDA &&
        (uint64_t)blocks * ranks_per_device > resident)
        result = oh_error(ONEHOP_ERR_ARGUMENT,
                          "communicator: max_blocks is %u with %u ranks on a GPU, but only %u "
                          "blocks of %s fit at once",
                          blocks, ranks_per_device, resident, k->name);
    return result;
}

static onehop_result load_functions(onehop_comm *comm, uint32_t ranks_per_device) {
    size_t count;
    (void)oh_kernel_list(&count);
    comm->functions = calloc(count, sizeof *comm->functions);
    if (!comm->functions)
        return oh_error(ONEHOP_ERR_MEMORY, "communicator: no memory for %zu functions", count);
    if (comm->dispatch.kind == ONEHOP_DEVICE_CUDA) oh_cuda_set_images(oh_kernel_images);
    /* Only what this world size can use. */
    for (size_t i = 0; i < count; i++) {
        if (!oh_dispatch_uses(&comm->dispatch, (int)i)) continue;
        onehop_result result = oh_jit_function(comm->device, (int)i, &comm->functions[i]);
        if (!result)
            result = oh_comm_check_fit(comm, (int)i, &comm->functions[i], ranks_per_device);
        if (result) return result;
    }
    return ONEHOP_OK;
}

static int poll_peers(void *argument);

static void fill_template(onehop_comm *comm, const onehop_comm_config *c, void *device_page) {
    oh_args *a = &comm->args;
    for (int r = 0; r < c->world_size; r++) a->buffers[r] = (uintptr_t)c->symmetric[r];
    a->local = (uintptr_t)c->local;
    a->host = (uintptr_t)device_page;
    if (comm->dispatch.kind == ONEHOP_DEVICE_HOST) {
        a->host_poll = (uintptr_t)poll_peers;
        a->host_poll_argument = (uintptr_t)comm;
    }
    a->regions = comm->dispatch.regions;
    a->parity_bytes = a->regions.slot_bytes * (oh_u64)c->world_size;
    for (int k = 0; k < c->world_size - 1; k++) {
        const int peer = (c->rank + 1 + k) % c->world_size, source = k + (k >= c->rank);
        a->peers[k].there =
            a->buffers[peer] + a->regions.push + a->regions.slot_bytes * (oh_u64)c->rank;
        a->peers[k].from =
            a->buffers[c->rank] + a->regions.push + a->regions.slot_bytes * (oh_u64)source;
    }
    a->rank = (uint32_t)c->rank;
    a->world = (uint32_t)c->world_size;
    a->early_trigger = (c->flags & ONEHOP_FLAG_EARLY_TRIGGER) && c->ranks_per_device <= 1;
}

static onehop_result comm_init(onehop_comm *comm, const onehop_comm_config *c) {
    onehop_layout layout;
    void *device_page;
    comm->rank = c->rank;
    comm->world = c->world_size;
    comm->page = c->host;
    onehop_result result = oh_layout_plan(c->layout, &layout, &comm->dispatch.regions);
    if (!result) result = resolve_timeout(c->timeout_ms, &comm->timeout_ms);
    if (!result) result = comm->device->ops->host_address(comm->device, c->host, &device_page);
    if (result) return result;
    fill_template(comm, c, device_page);
    if (comm->dispatch.kind == ONEHOP_DEVICE_HOST) {
        comm->scratch = aligned_alloc(64, OH_SCRATCH_BYTES);
        if (!comm->scratch) return oh_error(ONEHOP_ERR_MEMORY, "communicator: no memory");
        comm->side.scratch = (uintptr_t)comm->scratch;
    }
    comm->registration_tags = calloc(layout.max_registrations, sizeof *comm->registration_tags);
    if (!comm->registration_tags)
        return oh_error(ONEHOP_ERR_MEMORY, "communicator: no memory for its registrations");
    comm->stats.symmetric_bytes = layout.symmetric_bytes;
    comm->stats.local_bytes = layout.local_bytes;
    comm->stats.host_bytes = layout.host_bytes;
    comm->stats.push_bytes = layout.push_bytes;
    comm->stats.pull_bytes = layout.pull_bytes;
    comm->stats.registrations_total = layout.max_registrations;
    result = load_functions(comm, c->ranks_per_device ? c->ranks_per_device : 1);
    return result ? result : oh_comm_set_timeout(comm, comm->timeout_ms);
}

onehop_result oh_comm_open(const onehop_comm_config *config, const oh_comm_parts *parts,
                           onehop_comm **comm_out) {
    onehop_comm *comm = calloc(1, sizeof *comm);
    if (!comm) return oh_error(ONEHOP_ERR_MEMORY, "communicator: no memory");
    pthread_mutex_init(&comm->failure_lock, NULL);
    comm->process = oh_process();
    comm->device = parts->device;
    comm->group = parts->group;
    comm->dispatch = *parts->dispatch;
    comm->nccl = parts->nccl;
    comm->args.multicast = parts->multicast;
    if (oh_log_wants(ONEHOP_LOG_DEBUG)) comm->told = calloc(OH_TOLD, sizeof *comm->told);
    onehop_result result = check_config(config);
    if (!result) result = comm_init(comm, config);
    if (result) {
        onehop_comm_destroy(comm);
        return result;
    }
    comm->owns_device = parts->owns_device;
    *comm_out = comm;
    return ONEHOP_OK;
}

/* The memory is there already, so its device is known. */
static onehop_result open_named(onehop_device which, oh_device **out) {
    if (which.kind == ONEHOP_DEVICE_AUTO)
        return oh_error(ONEHOP_ERR_ARGUMENT,
                        "device kind is AUTO; memory of the caller's own has kind CUDA or HOST");
    return oh_device_open(which, 0, out);
}

static onehop_result choose_rules(oh_device *device, const onehop_comm_config *c,
                                  oh_dispatch *out) {
    oh_device_info info;
    oh_tuning tuning;
    onehop_result result = device->ops->info(device, &info);
    if (result) return result;
    if (c->flags & ONEHOP_FLAG_NCCL)
        return oh_error(ONEHOP_ERR_UNSUPPORTED,
                        "communicator: ONEHOP_FLAG_NCCL is for contexts; a communicator over the "
                        "caller's memory exchanges nothing");
    const oh_dispatch_group group = {device->ops->kind,
                                     c->capability ? c->capability : info.capability, c->world_size,
                                     false, false};
    result = oh_tuning_load(&tuning);
    if (!result) result = oh_dispatch_init(out, &group, &tuning);
    oh_tuning_free(&tuning);
    return result;
}

/* This rank's grids among those on its GPU. Ranks of one communicator claim one by one: what they
 * have in common is not known here. */
static onehop_result claim_grids(onehop_comm *comm, uint32_t flags) {
    oh_device_info info;
    if (comm->dispatch.kind != ONEHOP_DEVICE_CUDA || comm->world == 1 || !OH_COUNTS_ON_GPU(flags))
        return ONEHOP_OK;
    onehop_result result = comm->device->ops->info(comm->device, &info);
    if (result) return result;
    const oh_claim claim = {info.device.ordinal, info.multiprocessors, 1,
                            comm->dispatch.regions.max_blocks, 0};
    return oh_residency_claim(&claim, &comm->residency);
}

onehop_result onehop_comm_create(const onehop_comm_config *config, onehop_comm **comm_out) {
    OH_NO_CANCEL;
    if (!config || !comm_out)
        return oh_error(ONEHOP_ERR_NULL, "onehop_comm_create: %s is NULL",
                        config ? "comm_out" : "config");
    onehop_comm_config known;
    onehop_layout_config layout;
    oh_dispatch dispatch;
    oh_device *device = NULL;
    onehop_result result = oh_config_copy(&known, sizeof known, config, "onehop_comm_config");
    if (!result && known.layout) {
        result = oh_config_copy(&layout, sizeof layout, known.layout, "onehop_layout_config");
        known.layout = &layout;
    }
    if (!result) result = oh_env_check();
    if (!result) result = open_named(known.device, &device);
    if (!result && known.layout && layout.device_kind != device->ops->kind)
        result = oh_error(ONEHOP_ERR_ARGUMENT,
                          "communicator: layout is for device kind %d, the device is of kind %d",
                          (int)layout.device_kind, (int)device->ops->kind);
    if (!result) result = choose_rules(device, &known, &dispatch);
    const oh_comm_parts parts = {device, true, NULL, &dispatch, NULL, 0};
    onehop_comm *comm;
    if (!result) result = oh_comm_open(&known, &parts, &comm);
    if (result) {
        if (device) device->ops->close(device);
        return result;
    }
    result = claim_grids(comm, known.flags);
    if (result) {
        onehop_comm_destroy(comm); /* the device too */
        return result;
    }
    *comm_out = comm;
    return ONEHOP_OK;
}

void onehop_comm_destroy(onehop_comm *comm) {
    OH_NO_CANCEL;
    if (!comm) return;
    free(comm->functions);
    free(comm->registration_tags);
    free(comm->scratch);
    free(comm->told);
    pthread_mutex_destroy(&comm->failure_lock);
    if (comm->owns_device) comm->device->ops->close(comm->device);
    if (oh_process_is(comm->process)) oh_residency_release(comm->residency);
    free(comm);
}

onehop_result onehop_storage_arm(const onehop_layout_config *config, onehop_device device,
                                 void *symmetric, void *local, void *host) {
    OH_NO_CANCEL;
    if (!config || !symmetric || !local || !host)
        return oh_error(ONEHOP_ERR_NULL, "onehop_storage_arm: a pointer is NULL");
    if ((uintptr_t)symmetric % 4096 || (uintptr_t)local % 256 || (uintptr_t)host % 256)
        return oh_error(
            ONEHOP_ERR_ALIGNMENT,
            "onehop_storage_arm: expected alignments 4096, 256, 256 for symmetric, local, host");
    onehop_layout_config known;
    onehop_layout layout;
    oh_regions regions;
    oh_device *opened = NULL;
    onehop_result result = oh_config_copy(&known, sizeof known, config, "onehop_layout_config");
    if (!result) result = oh_layout_plan(&known, &layout, &regions);
    if (!result) result = open_named(device, &opened);
    if (!result)
        result = oh_storage_arm(opened, &regions, known.world_size, symmetric, local, host);
    if (opened) opened->ops->close(opened);
    return result;
}

/* The host device's waits look here; the sockets at most once a millisecond. Called by the thread
 * that runs the call, so group_looked_ns needs no lock, save that a call may run on a stream's
 * worker: then it is only there. */
static int poll_peers(void *argument) {
    onehop_comm *comm = argument;
    const uint64_t now = oh_clock_ns();
    if (oh_wait_interrupted()) oh_comm_kill(comm, OH_FAIL_ABORTED, -1);
    if (!comm->group || now - comm->group_looked_ns < 1000000) return -1;
    comm->group_looked_ns = now;
    const int gone = oh_rendezvous_lost_peer(comm->group);
    return gone >= 0 && oh_comm_gone_for_long(comm) ? gone + OH_GONE_FOR_LONG : gone;
}
