/* Setting up multicast once all ranks' memory is there: the steps of device.h, with an agreement
 * after each. What fails on any rank turns it off on all, with a line in the log: the calls it
 * would have served go another way. Nothing here runs unless every rank asked for it. */
#include "comm/context.h"

#include <string.h>
#include <unistd.h>

/* It goes to the others as the symmetric buffers do. */
static onehop_result create(onehop_context *ctx, oh_mem_handle *handle, int *fd) {
    const uint32_t kind = ctx->handle_kinds & OH_HANDLE_FD ? OH_HANDLE_FD : OH_HANDLE_FABRIC;
    return ctx->device->ops->multicast_create(ctx->device, ctx->buffers[ctx->rank].bytes,
                                              ctx->world, kind, &ctx->multicast, handle, fd);
}

static onehop_result join(onehop_context *ctx, const oh_mem_handle *handle, int fd) {
    return ctx->device->ops->multicast_join(ctx->device, handle, fd, &ctx->multicast);
}

static onehop_result bind_own(onehop_context *ctx) {
    return ctx->device->ops->multicast_bind(ctx->device, &ctx->buffers[ctx->rank], &ctx->multicast);
}

static onehop_result map(onehop_context *ctx) {
    return ctx->device->ops->multicast_map(ctx->device, ctx->buffers, ctx->world, &ctx->multicast);
}

/* The rows of the tables that need it go. */
static onehop_result turn_off(onehop_context *ctx) {
    oh_log(ONEHOP_LOG_WARN, "multicast is off: %s", onehop_last_error());
    ctx->device->ops->multicast_release(ctx->device, &ctx->multicast);
    ctx->served.multicast = false;
    return oh_dispatch_init(&ctx->dispatch, &ctx->served, &ctx->tuning);
}

/* Rank 0's handle and descriptor to all. */
static onehop_result hand_on(onehop_context *ctx, const oh_mem_handle *mine, int fd,
                             oh_mem_handle *handle_out, int *fd_out) {
    oh_mem_handle all[ONEHOP_MAX_RANKS];
    int fds[ONEHOP_MAX_RANKS];
    onehop_result result = oh_rendezvous_allgather(ctx->group, mine, all, sizeof *mine);
    *fd_out = -1;
    if (!result && all[0].kind == OH_HANDLE_FD) {
        result = oh_rendezvous_pass_fds(ctx->group, &fd, 1, fds);
        if (!result) *fd_out = fds[0];
    }
    if (!result) *handle_out = all[0];
    return result;
}

onehop_result oh_multicast_set_up(onehop_context *ctx) {
    const bool first = ctx->rank == 0;
    oh_mem_handle handle;
    int own = -1, fd = -1;
    if (!ctx->served.multicast) return ONEHOP_OK;
    memset(&handle, 0, sizeof handle);
    onehop_result result =
        oh_rendezvous_agree(ctx->group, first ? create(ctx, &handle, &own) : ONEHOP_OK);
    if (!result) result = hand_on(ctx, &handle, own, &handle, &fd);
    if (own >= 0) close(own);
    if (!result)
        result = oh_rendezvous_agree(ctx->group, first ? ONEHOP_OK : join(ctx, &handle, fd));
    if (fd >= 0) close(fd);
    if (!result) result = oh_rendezvous_agree(ctx->group, bind_own(ctx));
    if (!result) result = oh_rendezvous_agree(ctx->group, map(ctx));
    /* A broken group shows at the next agreement. */
    return result ? turn_off(ctx) : ONEHOP_OK;
}

onehop_result oh_multicast_set_up_all(onehop_context *const *ctx, int n) {
    oh_mem_handle handle;
    int fd = -1;
    if (!ctx[0]->served.multicast) return ONEHOP_OK;
    onehop_result result = create(ctx[0], &handle, &fd), off = ONEHOP_OK;
    for (int r = 1; r < n && !result; r++) result = join(ctx[r], &handle, fd);
    if (fd >= 0) close(fd);
    for (int r = 0; r < n && !result; r++) result = bind_own(ctx[r]);
    for (int r = 0; r < n && !result; r++) result = map(ctx[r]);
    for (int r = 0; r < n && result && !off; r++) off = turn_off(ctx[r]);
    return off;
}
