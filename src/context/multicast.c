/* Setting up multicast once all ranks' memory is there: the steps of device.h, with an agreement
 * after each. What fails on any rank turns it off on all, with a line in the log: the calls it
 * would have served go another way. Nothing here runs unless every rank asked for it. */
#include "context/context.h"
#include "context/members.h"

#include <string.h>

/* Of rank 0 only: the others' places stay empty. */
typedef struct object {
    oh_mem_handle handles[ONEHOP_MAX_RANKS];
    int fds[ONEHOP_MAX_RANKS];
} object;

/* It goes to the others as the symmetric buffers do. */
static onehop_result create(onehop_context *ctx, void *state) {
    object *o = state;
    const uint32_t kind = ctx->handle_kinds & OH_HANDLE_FD ? OH_HANDLE_FD : OH_HANDLE_FABRIC;
    if (ctx->rank) return ONEHOP_OK;
    return ctx->device->ops->multicast_create(ctx->device, ctx->buffers[0].bytes, ctx->world, kind,
                                              &ctx->multicast, &o->handles[0], &o->fds[0]);
}

static onehop_result join(onehop_context *ctx, void *state) {
    const object *o = state;
    if (!ctx->rank) return ONEHOP_OK;
    return ctx->device->ops->multicast_join(ctx->device, &o->handles[0], o->fds[0],
                                            &ctx->multicast);
}

static onehop_result bind_own(onehop_context *ctx, void *state) {
    (void)state;
    return ctx->device->ops->multicast_bind(ctx->device, &ctx->buffers[ctx->rank], &ctx->multicast);
}

static onehop_result map(onehop_context *ctx, void *state) {
    (void)state;
    return ctx->device->ops->multicast_map(ctx->device, ctx->buffers, ctx->world, &ctx->multicast);
}

/* The rows of the tables that need it go. */
static onehop_result turn_off(onehop_context *ctx, void *state) {
    (void)state;
    oh_log(ONEHOP_LOG_WARN, "multicast is off: %s", onehop_last_error());
    ctx->device->ops->multicast_release(ctx->device, &ctx->multicast);
    ctx->served.multicast = false;
    return oh_dispatch_init(&ctx->dispatch, &ctx->served, &ctx->tuning);
}

onehop_result oh_multicast_set_up(const oh_members *m) {
    object o;
    if (!m->contexts[0]->served.multicast) return ONEHOP_OK;
    memset(&o, 0, sizeof o);
    oh_members_no_fds(m, o.fds, 1);
    onehop_result result = oh_members_each(m, create, &o);
    if (!result) result = oh_members_share(m, o.handles, sizeof o.handles[0]);
    if (!result && o.handles[0].kind == OH_HANDLE_FD) result = oh_members_pass_fds(m, o.fds, 1);
    if (!result) result = oh_members_each(m, join, &o);
    oh_members_close_fds(m, o.fds, 1);
    if (!result) result = oh_members_each(m, bind_own, NULL);
    if (!result) result = oh_members_each(m, map, NULL);
    /* A broken group shows at the next agreement. */
    return result ? oh_members_run(m, turn_off, NULL) : ONEHOP_OK;
}
