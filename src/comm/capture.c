/* Capture on a context: between begin and end, captured calls are noted; end compares them across
 * the ranks, call by call, so that graphs that could only hang are found before they run. */
#include "comm/context.h"

#include <stdlib.h>
#include <string.h>

onehop_result oh_capture_note(onehop_t *ctx, const oh_request *q, const oh_plan *plan) {
    if (ctx->captured_count == ctx->captured_room) {
        const size_t room = ctx->captured_room ? 2 * ctx->captured_room : 64;
        oh_captured *grown = realloc(ctx->captured, room * sizeof *grown);
        if (!grown) return oh_error(ONEHOP_ERR_MEMORY, "capture: no memory for %zu calls", room);
        ctx->captured = grown;
        ctx->captured_room = room;
    }
    oh_captured *c = &ctx->captured[ctx->captured_count++];
    memset(c, 0, sizeof *c);
    c->count = q->count;
    c->dtype = (uint32_t)q->dtype;
    c->algorithm = (uint32_t)plan->choice.algorithm;
    c->source = (uint32_t)plan->choice.source;
    c->blocks = plan->choice.blocks;
    c->threads = plan->choice.threads;
    c->in_place = q->in == q->out;
    return ONEHOP_OK;
}

static onehop_result begin(onehop_t *ctx) {
    if (!ctx) return oh_error(ONEHOP_ERR_NULL, "onehop_capture_begin: context is NULL");
    if (ctx->capturing)
        return oh_error(ONEHOP_ERR_STATE, "onehop_capture_begin: already capturing");
    ctx->capturing = true;
    ctx->captured_count = 0;
    if (ctx->comm) ctx->comm->captured_id = 0;
    return ONEHOP_OK;
}

static onehop_result check_end(const onehop_t *ctx) {
    if (!ctx) return oh_error(ONEHOP_ERR_NULL, "onehop_capture_end: context is NULL");
    if (!ctx->capturing) return oh_error(ONEHOP_ERR_STATE, "onehop_capture_end: not capturing");
    return ONEHOP_OK;
}

/* Calls of rank `rank` against rank 0's. */
static onehop_result compare(const oh_captured *a, size_t count, const oh_captured *b,
                             size_t count0, int rank) {
    if (count != count0)
        return oh_error(ONEHOP_ERR_MISMATCH, "rank %d captured %zu calls, rank 0 %zu", rank, count,
                        count0);
    for (size_t i = 0; i < count; i++) {
        if (!memcmp(&a[i], &b[i], sizeof a[i])) continue;
        return oh_error(ONEHOP_ERR_MISMATCH,
                        "captured call %zu is %llu x %s by %s on %ux%u threads%s on rank %d, but "
                        "%llu x %s by %s on "
                        "%ux%u threads%s on rank 0",
                        i, (unsigned long long)a[i].count,
                        onehop_dtype_name((onehop_dtype)a[i].dtype),
                        onehop_algorithm_name((onehop_algorithm)a[i].algorithm), a[i].blocks,
                        a[i].threads, a[i].in_place ? " in place" : "", rank,
                        (unsigned long long)b[i].count, onehop_dtype_name((onehop_dtype)b[i].dtype),
                        onehop_algorithm_name((onehop_algorithm)b[i].algorithm), b[i].blocks,
                        b[i].threads, b[i].in_place ? " in place" : "");
    }
    return ONEHOP_OK;
}

/* Exchanges the lists through the group and compares all against rank 0's. */
static onehop_result compare_by_group(onehop_t *ctx) {
    uint64_t mine = ctx->captured_count, counts[ONEHOP_MAX_RANKS];
    onehop_result result = oh_rendezvous_allgather(ctx->group, &mine, counts, sizeof mine);
    if (result) return result;
    for (int r = 1; r < ctx->world && !result; r++)
        result = compare(NULL, counts[r] == counts[0] ? 0 : counts[r], NULL,
                         counts[r] == counts[0] ? 0 : counts[0], r);
    if (result || !mine) return result;
    const size_t bytes = mine * sizeof *ctx->captured;
    oh_captured *all = malloc(bytes * (size_t)ctx->world);
    result = oh_rendezvous_agree(
        ctx->group, all ? ONEHOP_OK : oh_error(ONEHOP_ERR_MEMORY, "capture: no memory to compare"));
    if (!result) result = oh_rendezvous_allgather(ctx->group, ctx->captured, all, bytes);
    for (int r = 1; r < ctx->world && !result; r++)
        result = compare(all + (size_t)r * mine, mine, all, mine, r);
    free(all);
    return result;
}

onehop_result onehop_capture_begin(onehop_t *context) {
    return begin(context);
}

onehop_result onehop_capture_end(onehop_t *context) {
    onehop_result result = check_end(context);
    if (result) return result;
    if (context->world > 1 && !context->group)
        return oh_error(ONEHOP_ERR_STATE,
                        "onehop_capture_end: this context was made by onehop_create_all; end all "
                        "ranks' captures with onehop_capture_end_all");
    context->capturing = false;
    return context->world == 1 ? ONEHOP_OK : compare_by_group(context);
}

/* The contexts of a call on all ranks: the whole group, in rank order. */
static onehop_result check_all(onehop_t *const *contexts, int n, const char *call) {
    if (!contexts) return oh_error(ONEHOP_ERR_NULL, "%s: contexts is NULL", call);
    for (int r = 0; r < n; r++) {
        if (!contexts[r]) return oh_error(ONEHOP_ERR_NULL, "%s: context %d is NULL", call, r);
        if (contexts[r]->rank != r || contexts[r]->world != n)
            return oh_error(ONEHOP_ERR_ARGUMENT,
                            "%s: context %d is rank %d of %d, expected rank %d of %d", call, r,
                            contexts[r]->rank, contexts[r]->world, r, n);
    }
    return n > 0 ? ONEHOP_OK : oh_error(ONEHOP_ERR_ARGUMENT, "%s: n is %d", call, n);
}

onehop_result onehop_capture_begin_all(onehop_t *const *contexts, int n) {
    onehop_result result = check_all(contexts, n, "onehop_capture_begin_all");
    for (int r = 0; r < n && !result; r++)
        if (contexts[r]->capturing)
            result = oh_error(ONEHOP_ERR_STATE,
                              "onehop_capture_begin_all: rank %d is already capturing", r);
    for (int r = 0; r < n && !result; r++) result = begin(contexts[r]);
    return result;
}

onehop_result onehop_capture_end_all(onehop_t *const *contexts, int n) {
    onehop_result result = check_all(contexts, n, "onehop_capture_end_all");
    for (int r = 0; r < n && !result; r++) result = check_end(contexts[r]);
    if (result) return result;
    for (int r = 0; r < n; r++) contexts[r]->capturing = false;
    for (int r = 1; r < n && !result; r++)
        result = compare(contexts[r]->captured, contexts[r]->captured_count, contexts[0]->captured,
                         contexts[0]->captured_count, r);
    return result;
}
