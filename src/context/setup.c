/* The steps of setting up contexts; see context.h. */
#include "context/context.h"
#include "context/members.h"

#include "protocol/layout.h"

#include <stdlib.h>
#include <string.h>

/* Compared across ranks, or reduced to the smallest. */
typedef struct oh_introduction {
    uint32_t version_major, version_minor;
    uint32_t world;
    uint32_t device_kind;
    uint32_t flags;
    uint32_t max_blocks, max_registrations;
    uint32_t multiprocessors;
    uint32_t capability;
    uint32_t handle_kinds;
    uint32_t multicast; /* the device has it, and the environment allows it */
    uint32_t unused;
    uint64_t max_bytes, push_bytes, pull_bytes;
    uint64_t tuning; /* hash of the tables */
    uint64_t number; /* of rank 0: the communicator's own, in any process that has a rank of it */
    char bus_id[32]; /* to count the ranks that share a GPU */
} oh_introduction;

typedef struct oh_offer {
    oh_mem_handle handle;
    oh_nccl_id nccl; /* of rank 0, with the hand-over on */
} oh_offer;

/* What ranks tell each other, 5 KiB: too much for some threads' stacks. */
typedef struct tables {
    const oh_members *members;
    oh_introduction all[ONEHOP_MAX_RANKS];
    uint32_t blocks[ONEHOP_MAX_RANKS]; /* of the largest grid that fits there */
    oh_offer offers[ONEHOP_MAX_RANKS];
    int fds[ONEHOP_MAX_RANKS];
} tables;

/* ---- introduce ------------------------------------------------------------------------------- */

static onehop_result check_sizes(const onehop_config *c) {
    if (c->max_bytes > OH_DISPATCH_MAX_BYTES)
        return oh_error(ONEHOP_ERR_TOO_LARGE,
                        "max_bytes is %zu, expected at most 128 MiB; longer messages go in chunks",
                        c->max_bytes);
    if (c->flags & ~OH_KNOWN_FLAGS)
        return oh_error(ONEHOP_ERR_ARGUMENT, "flags 0x%x has unknown bits", c->flags);
    return ONEHOP_OK;
}

/* The environment's switch becomes the flag, so that ranks that differ in it are found. */
static onehop_result check_nccl(onehop_context *ctx) {
    int64_t on = 0;
    onehop_result result = oh_env_integer(OH_ENV_NCCL, 0, 1, 0, &on);
    if (on) ctx->config.flags |= ONEHOP_FLAG_NCCL;
    if (result || !(ctx->config.flags & ONEHOP_FLAG_NCCL)) return result;
    if (ctx->info.device.kind != ONEHOP_DEVICE_CUDA)
        return oh_error(ONEHOP_ERR_UNSUPPORTED,
                        "the hand-over to NCCL needs GPUs, the device is the host; "
                        "ONEHOP_FLAG_NCCL and %s must be off",
                        oh_env_describe(OH_ENV_NCCL)->name);
    return ctx->world > 1 ? oh_nccl_open(NULL) : ONEHOP_OK;
}

/* A number that no other communicator has, whatever process its rank 0 is in. */
static onehop_result number_of(uint64_t *out) {
    static uint64_t made; /* atomic; relaxed, for it orders nothing */
    oh_id128 process;
    onehop_result result = oh_process_id(&process);
    if (result) return result;
    const uint64_t here = __atomic_add_fetch(&made, 1, __ATOMIC_RELAXED);
    *out = oh_hash(oh_hash(OH_HASH_START, &process, sizeof process), &here, sizeof here);
    return ONEHOP_OK;
}

static onehop_result introduce(onehop_context *ctx, void *state) {
    oh_introduction *out = &((tables *)state)->all[ctx->rank];
    const onehop_config *c = &ctx->config;
    onehop_result result = oh_env_check();
    if (!result) result = check_sizes(c);
    if (!result) result = oh_tuning_load(&ctx->tuning);
    if (!result) result = oh_device_open(c->device, ctx->rank, &ctx->device);
    if (!result) result = ctx->device->ops->info(ctx->device, &ctx->info);
    if (!result) result = check_nccl(ctx);
    if (result) return result;
    out->version_major = ONEHOP_VERSION_MAJOR;
    out->version_minor = ONEHOP_VERSION_MINOR;
    out->world = (uint32_t)ctx->world;
    out->device_kind = ctx->info.device.kind;
    out->flags = ctx->config.flags;
    out->max_blocks = c->max_blocks;
    out->max_registrations = c->max_registrations;
    out->multiprocessors = ctx->info.multiprocessors;
    out->capability = ctx->info.capability;
    out->handle_kinds = ctx->info.handle_kinds;
    const char *refusal = oh_multicast_refusal();
    if (refusal && oh_env_text(OH_ENV_MULTICAST))
        oh_log(ONEHOP_LOG_INFO, "multicast is off: %s", refusal);
    out->multicast = ctx->info.multicast && !refusal;
    out->max_bytes = c->max_bytes;
    out->push_bytes = c->push_bytes;
    out->pull_bytes = c->pull_bytes;
    out->tuning = oh_tuning_hash(&ctx->tuning);
    memcpy(out->bus_id, ctx->info.bus_id, sizeof out->bus_id);
    return number_of(&out->number);
}

/* ---- claim ----------------------------------------------------------------------------------- */

/* One setting of one rank against rank 0's. */
static onehop_result same(const char *what, int rank, uint64_t found, uint64_t expected) {
    if (found == expected) return ONEHOP_OK;
    return oh_error(ONEHOP_ERR_DISAGREEMENT,
                    "%s is %llu on rank %d and %llu on rank 0; it must be equal", what,
                    (unsigned long long)found, rank, (unsigned long long)expected);
}

static onehop_result compare(const oh_introduction *all, int rank) {
    const oh_introduction *a = &all[rank], *b = &all[0];
    onehop_result result = same("major version", rank, a->version_major, b->version_major);
    if (!result) result = same("minor version", rank, a->version_minor, b->version_minor);
    if (!result) result = same("world size", rank, a->world, b->world);
    if (!result) result = same("device kind", rank, a->device_kind, b->device_kind);
    if (!result) result = same("flags", rank, a->flags, b->flags);
    if (!result) result = same("max_blocks", rank, a->max_blocks, b->max_blocks);
    if (!result)
        result = same("max_registrations", rank, a->max_registrations, b->max_registrations);
    if (!result) result = same("max_bytes", rank, a->max_bytes, b->max_bytes);
    if (!result) result = same("push_bytes", rank, a->push_bytes, b->push_bytes);
    if (!result) result = same("pull_bytes", rank, a->pull_bytes, b->pull_bytes);
    if (!result)
        result = same("hash of the tuning tables (ONEHOP_TUNING)", rank, a->tuning, b->tuning);
    return result;
}

/* Most ranks on one GPU. Several processes there are time-sliced, milliseconds a call. */
static onehop_result count_sharing(onehop_context *ctx, const tables *t) {
    const oh_introduction *all = t->all;
    uint32_t max = 1;
    for (int i = 0; i < ctx->world; i++) {
        uint32_t here = 0;
        for (int j = 0; j < ctx->world; j++) {
            if (!all[i].bus_id[0] || memcmp(all[i].bus_id, all[j].bus_id, sizeof all[i].bus_id))
                continue;
            here++;
            if (!oh_members_share_process(t->members, i, j) &&
                !(ctx->config.flags & ONEHOP_FLAG_SHARE_GPU))
                return oh_error(ONEHOP_ERR_UNSUPPORTED,
                                "ranks %d and %d are processes on one GPU (%.31s), which would be "
                                "time-sliced; use threads of "
                                "one process, or ask for it with ONEHOP_FLAG_SHARE_GPU",
                                i < j ? i : j, i < j ? j : i, all[i].bus_id);
        }
        if (here > max) max = here;
    }
    ctx->ranks_per_device = max;
    return ONEHOP_OK;
}

/* The largest grid of any call that fits on this rank's GPU beside those of other communicators of
 * this process (residency.h). */
static onehop_result claim_blocks(onehop_context *ctx, const oh_introduction *all, uint32_t *out) {
    static const oh_grids none = {0, 0};
    const oh_device_info *gpu = &ctx->info;
    const oh_claim claim = {gpu->device.ordinal, gpu->multiprocessors, ctx->ranks_per_device,
                            all[0].max_blocks, all[0].number};
    const uint32_t whole = oh_residency_share(&none, claim.multiprocessors, claim.ranks);
    *out = claim.blocks ? claim.blocks : whole;
    if (!OH_COUNTS_ON_GPU(ctx->config.flags)) return ONEHOP_OK;
    onehop_result result = oh_residency_claim(&claim, &ctx->residency);
    if (result) return result;
    *out = oh_residency_blocks(ctx->residency);
    if (!claim.blocks && *out < whole)
        oh_log(ONEHOP_LOG_INFO,
               "rank %d: other communicators on GPU %d leave grids of %u blocks, not %u", ctx->rank,
               claim.gpu, *out, whole);
    return ONEHOP_OK;
}

static onehop_result claim(onehop_context *ctx, void *state) {
    tables *t = state;
    onehop_result result = ONEHOP_OK;
    for (int r = 1; r < ctx->world && !result; r++) result = compare(t->all, r);
    if (!result) result = count_sharing(ctx, t);
    t->blocks[ctx->rank] = t->all[0].max_blocks;
    if (result || ctx->info.device.kind == ONEHOP_DEVICE_HOST) return result;
    return claim_blocks(ctx, t->all, &t->blocks[ctx->rank]);
}

/* ---- allocate -------------------------------------------------------------------------------- */

/* The least that a rank has claimed, for all. */
static uint32_t agreed_blocks(onehop_context *ctx, const uint32_t *blocks) {
    uint32_t min = blocks[0];
    for (int r = 1; r < ctx->world; r++)
        if (blocks[r] < min) min = blocks[r];
    if (ctx->residency) oh_residency_shrink(ctx->residency, min);
    return min;
}

static onehop_result choose_rules(onehop_context *ctx, const oh_introduction *all) {
    oh_dispatch_group *group = &ctx->served;
    group->kind = ctx->info.device.kind;
    group->capability = all[0].capability;
    group->world = ctx->world;
    group->nccl = ctx->config.flags & ONEHOP_FLAG_NCCL;
    group->multicast = ctx->ranks_per_device == 1 || group->kind == ONEHOP_DEVICE_HOST;
    for (int r = 0; r < ctx->world; r++) {
        if (all[r].capability < group->capability) group->capability = all[r].capability;
        group->multicast = group->multicast && all[r].multicast;
    }
    if (all[ctx->rank].multicast && !group->multicast)
        oh_log(ONEHOP_LOG_INFO, "multicast is off: not all ranks allow it, each with its own GPU");
    return oh_dispatch_init(&ctx->dispatch, group, &ctx->tuning);
}

/* Sizes that the caller leaves open. The host device exchanges data in the pull buffer, and only
 * calls that name a push algorithm take push slots. */
static onehop_result default_sizes(onehop_context *ctx) {
    onehop_layout_config *c = &ctx->layout_config;
    size_t push = oh_round_up(ctx->config.max_bytes, 4096), pull = 0;
    onehop_layout usual;
    oh_regions regions;
    onehop_result result = oh_layout_plan(c, &usual, &regions);
    if (result) return result;
    if (c->device_kind == ONEHOP_DEVICE_CUDA)
        oh_dispatch_sizes(&ctx->dispatch, ctx->config.max_bytes,
                          ctx->config.flags & ONEHOP_FLAG_UNCAP, &usual, &push, &pull);
    if (!c->push_bytes) c->push_bytes = push;
    if (!c->pull_bytes) c->pull_bytes = pull;
    return ONEHOP_OK;
}

static onehop_result allocate_own(onehop_context *ctx, tables *t) {
    const oh_device_ops *ops = ctx->device->ops;
    uint32_t kinds = OH_HANDLE_FD | OH_HANDLE_FABRIC;
    for (int r = 0; r < ctx->world; r++) kinds &= t->all[r].handle_kinds;
    if (!oh_members_can_pass_fds(t->members)) kinds &= ~(uint32_t)OH_HANDLE_FD;
    ctx->handle_kinds = kinds;
    if (!kinds)
        return oh_error(ONEHOP_ERR_UNSUPPORTED,
                        "no way to share memory that works on all ranks was found");
    onehop_result result =
        ops->mem_create(ctx->device, ctx->layout.symmetric_bytes,
                        kinds & OH_HANDLE_FD ? OH_HANDLE_FD : kinds, &ctx->buffers[ctx->rank]);
    if (!result) result = ops->local_alloc(ctx->device, ctx->layout.local_bytes, &ctx->local);
    if (!result)
        result =
            ops->host_alloc(ctx->device, ctx->layout.host_bytes, &ctx->host, &ctx->host_device);
    if (!result)
        result = ops->mem_export(ctx->device, &ctx->buffers[ctx->rank],
                                 &t->offers[ctx->rank].handle, &t->fds[ctx->rank]);
    return result;
}

static onehop_result allocate(onehop_context *ctx, void *state) {
    tables *t = state;
    const oh_introduction *all = t->all;
    onehop_layout_config *c = &ctx->layout_config;
    c->struct_size = sizeof *c;
    c->device_kind = ctx->info.device.kind;
    c->world_size = ctx->world;
    c->push_bytes = all[0].push_bytes;
    c->pull_bytes = all[0].pull_bytes;
    c->max_blocks = agreed_blocks(ctx, t->blocks);
    c->max_registrations = all[0].max_registrations;
    onehop_result result = choose_rules(ctx, all);
    if (!result) result = default_sizes(ctx);
    if (!result) result = oh_layout_plan(c, &ctx->layout, &ctx->regions);
    if (!result) result = allocate_own(ctx, t);
    if (!result && ctx->rank == 0 && ctx->dispatch.nccl)
        result = oh_nccl_make_id(&t->offers[0].nccl);
    return result;
}

/* ---- connect, and the rest ------------------------------------------------------------------- */

static onehop_result connect_peers(onehop_context *ctx, void *state) {
    const tables *t = state;
    const oh_device_ops *ops = ctx->device->ops;
    for (int r = 0; r < ctx->world; r++) {
        if (r == ctx->rank) continue;
        onehop_result result =
            ops->mem_import(ctx->device, &t->offers[r].handle, t->fds[r], &ctx->buffers[r]);
        if (result) return result;
        if (ctx->buffers[r].bytes < ctx->layout.symmetric_bytes)
            return oh_error(ONEHOP_ERR_DISAGREEMENT,
                            "rank %d offers %zu bytes of symmetric memory, expected %zu", r,
                            ctx->buffers[r].bytes, ctx->layout.symmetric_bytes);
    }
    return oh_storage_arm(ctx->device, &ctx->regions, ctx->world, ctx->buffers[ctx->rank].ptr,
                          ctx->local, ctx->host);
}

static onehop_result hand_over(onehop_context *ctx, void *state) {
    const tables *t = state;
    if (!ctx->dispatch.nccl) return ONEHOP_OK;
    return oh_nccl_connect(ctx->device, &t->offers[0].nccl, ctx->rank, ctx->world, &ctx->nccl);
}

static onehop_result finish(onehop_context *ctx, void *state) {
    (void)state;
    onehop_comm_config c = ONEHOP_CONFIG_INIT(onehop_comm_config);
    c.device = ctx->info.device;
    c.rank = ctx->rank;
    c.world_size = ctx->world;
    c.layout = &ctx->layout_config;
    for (int r = 0; r < ctx->world; r++) c.symmetric[r] = ctx->buffers[r].ptr;
    c.local = ctx->local;
    c.host = ctx->host;
    c.ranks_per_device = ctx->ranks_per_device;
    c.timeout_ms = ctx->config.timeout_ms;
    c.flags = ctx->config.flags;
    const oh_comm_parts parts = {ctx->device,    false,     ctx->group,
                                 &ctx->dispatch, ctx->nccl, ctx->multicast.address};
    onehop_result result = oh_comm_open(&c, &parts, &ctx->comm);
    if (!result) ctx->dispatch = ctx->comm->dispatch;
    return result;
}

/* A group of one rank: no memory, calls copy. */
static onehop_result finish_alone(onehop_context *ctx, void *state) {
    (void)state;
    const oh_dispatch_group group = {ctx->info.device.kind, ctx->info.capability, 1, false, false};
    return oh_dispatch_init(&ctx->dispatch, &group, &ctx->tuning);
}

/* ---- all of them ----------------------------------------------------------------------------- */

static onehop_result make_memory(const oh_members *m, tables *t) {
    onehop_result result = oh_members_share(m, t->all, sizeof t->all[0]);
    if (!result) result = oh_members_each(m, claim, t);
    if (!result) result = oh_members_share(m, t->blocks, sizeof t->blocks[0]);
    if (!result) result = oh_members_each(m, allocate, t);
    if (!result) result = oh_members_share(m, t->offers, sizeof t->offers[0]);
    if (!result && t->offers[0].handle.kind == OH_HANDLE_FD)
        result = oh_members_pass_fds(m, t->fds, 1);
    if (!result) result = oh_members_each(m, connect_peers, t);
    oh_members_close_fds(m, t->fds, 1);
    return result;
}

onehop_result oh_context_set_up(const oh_members *m, onehop_result mine) {
    tables *t = mine ? NULL : calloc(1, sizeof *t);
    if (!mine) mine = t ? oh_log_check() : oh_error(ONEHOP_ERR_MEMORY, "onehop_create: no memory");
    if (!mine) {
        t->members = m;
        oh_members_no_fds(m, t->fds, 1);
        mine = oh_members_run(m, introduce, t);
    }
    onehop_result result = oh_members_agree(m, mine);
    if (!result && m->world == 1) {
        result = oh_members_run(m, finish_alone, NULL);
    } else if (!result) {
        result = make_memory(m, t);
        if (!result) result = oh_multicast_set_up(m);
        if (!result) result = oh_members_each(m, hand_over, t);
        if (!result) result = oh_members_each(m, finish, NULL);
    }
    free(t);
    return result;
}
