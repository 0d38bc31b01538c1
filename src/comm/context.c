/* Creating, asking and destroying contexts. */
#include "comm/registration.h"

#include "base/wait.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* In a forked child it frees the child's copies; the devices know which calls are theirs. */
static void release(onehop_context *ctx) {
    /* Also where creation failed on some rank: NCCL would wait for it. */
    const bool dead = !ctx->comm || __atomic_load_n(&ctx->comm->dead, __ATOMIC_ACQUIRE);
    const bool ours = oh_process_is(ctx->process);
    oh_batch_drop_all(ctx);
    onehop_comm_destroy(ctx->comm);
    if (ctx->nccl && ours) oh_nccl_disconnect(ctx->device, ctx->nccl, dead);
    if (ctx->device) {
        const oh_device_ops *ops = ctx->device->ops;
        ops->multicast_release(ctx->device, &ctx->multicast);
        for (int r = 0; r < ctx->world; r++) ops->mem_release(ctx->device, &ctx->buffers[r]);
        if (ctx->local) ops->local_free(ctx->device, ctx->local);
        if (ctx->host) ops->host_free(ctx->device, ctx->host);
        ops->close(ctx->device);
    }
    if (ours) oh_residency_release(ctx->residency);
    if (ctx->owns_group) onehop_group_close(ctx->group);
    oh_tuning_free(&ctx->tuning);
    free(ctx->captured);
    free(ctx->captured_memory);
    free(ctx);
}

/* A group of one rank: no group, no memory; calls copy. */
static onehop_result make_alone(onehop_context *ctx) {
    oh_introduction unused;
    onehop_result result = oh_context_introduce(ctx, &unused);
    const oh_dispatch_group group = {ctx->info.device.kind, ctx->info.capability, 1, false, false};
    return result ? result : oh_dispatch_init(&ctx->dispatch, &group, &ctx->tuning);
}

/* Every rank's descriptor to every rank; descriptors of one set of ranks end with the step that
 * used them. */
static void close_fds(int *fds, int count) {
    for (int i = 0; i < count; i++)
        if (fds[i] >= 0) close(fds[i]);
}

/* What ranks tell each other, 5 KiB: too much for some threads' stacks. */
typedef struct tables {
    oh_introduction mine, all[ONEHOP_MAX_RANKS];
    oh_offer offer, offers[ONEHOP_MAX_RANKS];
    uint32_t claim, blocks[ONEHOP_MAX_RANKS];
} tables;

/* The steps of context.h through a group. After each one all agree. */
static onehop_result set_up_with(onehop_context *ctx, tables *t) {
    int fd = -1, fds[ONEHOP_MAX_RANKS];
    onehop_result result = oh_rendezvous_allgather(ctx->group, &t->mine, t->all, sizeof t->mine);
    if (!result) result = oh_rendezvous_agree(ctx->group, oh_context_claim(ctx, t->all, &t->claim));
    if (!result)
        result = oh_rendezvous_allgather(ctx->group, &t->claim, t->blocks, sizeof t->claim);
    if (result) return result;
    result = oh_rendezvous_agree(ctx->group,
                                 oh_context_allocate(ctx, t->all, t->blocks, &t->offer, &fd));
    if (!result)
        result = oh_rendezvous_allgather(ctx->group, &t->offer, t->offers, sizeof t->offer);
    for (int r = 0; r < ctx->world; r++) fds[r] = -1;
    if (!result && t->offers[0].handle.kind == OH_HANDLE_FD)
        result = oh_rendezvous_pass_fds(ctx->group, &fd, 1, fds);
    if (fd >= 0) close(fd);
    if (result) return result;

    result = oh_rendezvous_agree(ctx->group, oh_context_connect(ctx, t->offers, fds));
    close_fds(fds, ctx->world);
    if (!result) result = oh_multicast_set_up(ctx);
    if (!result) result = oh_rendezvous_agree(ctx->group, oh_context_hand_over(ctx, t->offers));
    return result ? result : oh_rendezvous_agree(ctx->group, oh_context_finish(ctx));
}

static onehop_result set_up(onehop_context *ctx) {
    tables *t = calloc(1, sizeof *t);
    onehop_result result =
        t ? oh_log_check() : oh_error(ONEHOP_ERR_MEMORY, "onehop_create: no memory");
    if (!result) result = oh_context_introduce(ctx, &t->mine);
    result = oh_rendezvous_agree(ctx->group, result);
    if (!result) result = set_up_with(ctx, t);
    free(t);
    return result;
}

static onehop_result open_group(const onehop_config *c, onehop_group **group_out) {
    onehop_group_config g = ONEHOP_CONFIG_INIT(onehop_group_config);
    if (c->group) {
        if (c->init_timeout_ms) oh_rendezvous_set_timeout_ms(c->group, c->init_timeout_ms);
        *group_out = c->group;
        return ONEHOP_OK;
    }
    g.rank = c->rank;
    g.world_size = c->world_size;
    g.name = c->name;
    g.timeout_ms = c->init_timeout_ms;
    return onehop_group_open(&g, group_out);
}

static onehop_result make(onehop_context *ctx, const onehop_config *config, onehop_group *group) {
    ctx->config = *config;
    ctx->group = group;
    ctx->owns_group = !config->group;
    ctx->rank = onehop_group_rank(group);
    ctx->world = onehop_group_size(group);
    return ctx->world == 1 ? make_alone(ctx) : set_up(ctx);
}

onehop_result onehop_create(const onehop_config *config, onehop_context **context_out) {
    OH_NO_CANCEL;
    if (!config || !context_out)
        return oh_error(ONEHOP_ERR_NULL, "onehop_create: %s is NULL",
                        config ? "context_out" : "config");
    onehop_config known;
    onehop_group *group = NULL;
    onehop_result result = oh_config_copy(&known, sizeof known, config, "onehop_config");
    /* The group first: what fails on this rank alone from here on, the others hear of. */
    if (!result) result = open_group(&known, &group);
    if (result) return result;
    onehop_context *ctx = calloc(1, sizeof *ctx);
    if (!ctx) {
        result = oh_error(ONEHOP_ERR_MEMORY, "onehop_create: no memory");
        result = oh_rendezvous_agree(group, result);
        if (!known.group) onehop_group_close(group);
        return result;
    }
    ctx->process = oh_process();
    result = make(ctx, &known, group);
    if (result) {
        release(ctx);
        return result;
    }
    *context_out = ctx;
    return ONEHOP_OK;
}

/* ---- all ranks in one thread ----------------------------------------------------------------- */

static onehop_result make_all(onehop_context **ctx, int n) {
    oh_introduction all[ONEHOP_MAX_RANKS];
    oh_offer offers[ONEHOP_MAX_RANKS];
    uint32_t blocks[ONEHOP_MAX_RANKS];
    int fds[ONEHOP_MAX_RANKS];
    onehop_result result = ONEHOP_OK;
    for (int r = 0; r < ONEHOP_MAX_RANKS; r++) fds[r] = -1;
    for (int r = 0; r < n && !result; r++) result = oh_context_introduce(ctx[r], &all[r]);
    for (int r = 0; r < n && !result; r++) result = oh_context_claim(ctx[r], all, &blocks[r]);
    for (int r = 0; r < n && !result; r++)
        result = oh_context_allocate(ctx[r], all, blocks, &offers[r], &fds[r]);
    for (int r = 0; r < n && !result; r++) result = oh_context_connect(ctx[r], offers, fds);
    close_fds(fds, n);
    if (!result) result = oh_multicast_set_up_all(ctx, n);
    for (int r = 0; r < n && !result; r++) result = oh_context_finish(ctx[r]);
    return result;
}

/* NCCL wants a thread for each rank, or calls in brackets. */
static onehop_result refuse_nccl(const onehop_config *config) {
    int64_t on = 0;
    onehop_result result = oh_env_integer(OH_ENV_NCCL, 0, 1, 0, &on);
    if (result || !(on || config->flags & ONEHOP_FLAG_NCCL)) return result;
    return oh_error(ONEHOP_ERR_UNSUPPORTED,
                    "onehop_create_all: the hand-over to NCCL needs a thread or a process for each "
                    "rank; ONEHOP_FLAG_NCCL and %s must be off",
                    oh_env_describe(OH_ENV_NCCL)->name);
}

onehop_result onehop_create_all(const onehop_config *config, int n, const onehop_device *devices,
                                onehop_context **contexts_out) {
    OH_NO_CANCEL;
    onehop_config known;
    onehop_context *ctx[ONEHOP_MAX_RANKS] = {NULL};
    if (!config || !contexts_out)
        return oh_error(ONEHOP_ERR_NULL, "onehop_create_all: %s is NULL",
                        config ? "contexts_out" : "config");
    if (n < 1 || n > ONEHOP_MAX_RANKS)
        return oh_error(ONEHOP_ERR_WORLD_SIZE, "onehop_create_all: n is %d, expected 1..%d", n,
                        ONEHOP_MAX_RANKS);
    onehop_result result = oh_config_copy(&known, sizeof known, config, "onehop_config");
    if (!result) result = oh_log_check();
    if (!result && (known.group || known.rank || known.world_size || known.name))
        result = oh_error(
            ONEHOP_ERR_ARGUMENT,
            "onehop_create_all: group, rank, world_size and name must be zero; all ranks are here");
    if (!result) result = refuse_nccl(&known);
    for (int r = 0; r < n && !result; r++) {
        ctx[r] = calloc(1, sizeof *ctx[r]);
        if (!ctx[r]) {
            result = oh_error(ONEHOP_ERR_MEMORY, "onehop_create_all: no memory");
            break;
        }
        ctx[r]->process = oh_process();
        ctx[r]->config = known;
        if (devices) ctx[r]->config.device = devices[r];
        ctx[r]->rank = r;
        ctx[r]->world = n;
    }
    if (!result) result = n == 1 ? make_alone(ctx[0]) : make_all(ctx, n);
    for (int r = 0; r < n; r++) {
        if (!result)
            contexts_out[r] = ctx[r];
        else if (ctx[r])
            release(ctx[r]);
    }
    return result;
}

/* They end by themselves, at their deadline at the latest, or now if the wait hook does not want to
 * wait. */
static onehop_result await_own_calls(onehop_comm *comm) {
    onehop_result result = oh_comm_wait(comm, comm->eager_stream);
    if (result == ONEHOP_ERR_INTERRUPTED) oh_comm_kill(comm, OH_FAIL_ABORTED, -1);
    while (result == ONEHOP_ERR_INTERRUPTED) result = oh_comm_wait(comm, comm->eager_stream);
    return result;
}

void onehop_destroy(onehop_context *context) {
    OH_NO_CANCEL;
    if (!context) return;
    if (context->comm && oh_process_is(context->process)) {
        /* A CUDA stream that cannot be asked (say, being captured) may still run one: its memory
         * must stay. A host stream ends its calls before it goes. */
        onehop_result result = ONEHOP_OK;
        if (context->comm->eager_id) result = await_own_calls(context->comm);
        oh_comm_leave(context->comm);
        if (result && result > -300 && context->info.device.kind == ONEHOP_DEVICE_CUDA) {
            oh_log(ONEHOP_LOG_ERROR,
                   "onehop_destroy: memory is kept, the last call cannot be waited for: %s",
                   onehop_last_error());
            return;
        }
    }
    release(context);
}

/* ---- asking ---------------------------------------------------------------------------------- */

onehop_result oh_context_check(const onehop_context *ctx, const char *call) {
    if (!ctx) return oh_error(ONEHOP_ERR_NULL, "%s: context is NULL", call);
    return oh_process_check(ctx->process, "context");
}

int onehop_rank(const onehop_context *context) {
    return context ? context->rank : -1;
}

int onehop_world_size(const onehop_context *context) {
    return context ? context->world : 0;
}

onehop_device onehop_get_device(const onehop_context *context) {
    const onehop_device none = {ONEHOP_DEVICE_AUTO, 0};
    return context ? context->info.device : none;
}

onehop_result onehop_get_stats(const onehop_context *context, onehop_stats *stats_out) {
    onehop_result result = oh_context_check(context, "onehop_get_stats");
    if (result) return result;
    if (!stats_out) return oh_error(ONEHOP_ERR_NULL, "onehop_get_stats: stats_out is NULL");
    *stats_out = context->comm ? context->comm->stats : context->alone;
    if (context->comm) stats_out->registrations_used = context->comm->registrations_used;
    return ONEHOP_OK;
}

onehop_result onehop_synchronize(onehop_context *context, onehop_stream stream) {
    OH_NO_CANCEL;
    onehop_result result = oh_context_check(context, "onehop_synchronize");
    if (result) return result;
    if (context->comm) return oh_comm_wait(context->comm, stream);
    for (const uint64_t begun = oh_clock_ns();;) {
        bool idle = false;
        result = context->device->ops->stream_idle(context->device, stream, &idle);
        if (result || idle) return result;
        if (oh_wait_interrupted()) return oh_wait_ended("onehop_synchronize");
        oh_sleep_us(oh_wait_rest_us(oh_clock_ns() - begun));
    }
}

onehop_result onehop_status(onehop_context *context, onehop_failure *failure_out) {
    OH_NO_CANCEL;
    onehop_result result = oh_context_check(context, "onehop_status");
    if (result) return result;
    result = context->comm ? oh_comm_look(context->comm) : ONEHOP_OK;
    if (failure_out) {
        memset(failure_out, 0, sizeof *failure_out);
        failure_out->rank = context->rank;
        failure_out->peer = -1;
        if (result) *failure_out = context->comm->failure;
    }
    return result;
}

onehop_result onehop_abort(onehop_context *context) {
    OH_NO_CANCEL;
    onehop_result result = oh_context_check(context, "onehop_abort");
    if (!result && context->comm) oh_comm_kill(context->comm, OH_FAIL_ABORTED, -1);
    return result;
}

onehop_result onehop_set_timeout(onehop_context *context, uint32_t timeout_ms) {
    OH_NO_CANCEL;
    onehop_result result = oh_context_check(context, "onehop_set_timeout");
    if (result) return result;
    if (timeout_ms < 1 || timeout_ms > OH_LONGEST_TIMEOUT_MS)
        return oh_error(ONEHOP_ERR_ARGUMENT, "onehop_set_timeout: %u ms, expected 1..2^31",
                        timeout_ms);
    return context->comm ? oh_comm_set_timeout(context->comm, timeout_ms) : ONEHOP_OK;
}
