/* Creating, asking and destroying contexts. */
#include "context/batch.h"
#include "context/members.h"

#include "base/wait.h"

#include <stdlib.h>
#include <string.h>

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

/* Who the new contexts are. */
typedef struct origin {
    const char *call; /* the public function, for messages */
    const onehop_config *config;
    const onehop_device *devices; /* of the ranks here; NULL: the config's */
    onehop_group *group;          /* NULL: all ranks are here */
    int first, count, world;
} origin;

static onehop_context *make_one(const origin *o, int i) {
    onehop_context *ctx = calloc(1, sizeof *ctx);
    if (!ctx) return NULL;
    ctx->process = oh_process();
    ctx->config = *o->config;
    if (o->devices) ctx->config.device = o->devices[i];
    ctx->group = o->group;
    ctx->rank = o->first + i;
    ctx->world = o->world;
    return ctx;
}

static onehop_result make(const origin *o, onehop_context **contexts_out) {
    onehop_context *ctx[ONEHOP_MAX_RANKS] = {NULL};
    onehop_result mine = ONEHOP_OK;
    for (int i = 0; i < o->count && !mine; i++) {
        ctx[i] = make_one(o, i);
        if (!ctx[i]) mine = oh_error(ONEHOP_ERR_MEMORY, "%s: no memory", o->call);
    }
    const oh_members m = {o->world > 1 ? o->group : NULL, ctx, o->first, o->count, o->world};
    onehop_result result = oh_context_set_up(&m, mine);
    for (int i = 0; i < o->count; i++) {
        if (!result)
            contexts_out[i] = ctx[i];
        else if (ctx[i])
            release(ctx[i]);
    }
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
    const origin o = {"onehop_create",         &known, NULL, group, onehop_group_rank(group), 1,
                      onehop_group_size(group)};
    result = make(&o, context_out);
    if (!result)
        (*context_out)->owns_group = !known.group;
    else if (!known.group)
        onehop_group_close(group);
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
    if (result) return result;
    const origin o = {"onehop_create_all", &known, devices, NULL, 0, n, n};
    return make(&o, contexts_out);
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

onehop_result oh_check_all(onehop_context *const *contexts, int n, const char *call) {
    if (!contexts) return oh_error(ONEHOP_ERR_NULL, "%s: contexts is NULL", call);
    for (int r = 0; r < n; r++) {
        if (!contexts[r]) return oh_error(ONEHOP_ERR_NULL, "%s: context %d is NULL", call, r);
        if (!oh_process_is(contexts[r]->process)) return oh_process_refuse("context");
        if (contexts[r]->rank != r || contexts[r]->world != n)
            return oh_error(ONEHOP_ERR_ARGUMENT,
                            "%s: context %d is rank %d of %d, expected rank %d of %d", call, r,
                            contexts[r]->rank, contexts[r]->world, r, n);
    }
    return n > 0 ? ONEHOP_OK : oh_error(ONEHOP_ERR_ARGUMENT, "%s: n is %d", call, n);
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
