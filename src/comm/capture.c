/* Capture on a context: between begin and end, captured calls are noted; end compares them across
 * the ranks, call by call, so that graphs that could only hang are found before they run. */
#include "comm/context.h"

#include <stdlib.h>
#include <string.h>

static onehop_result make_room(onehop_t *ctx) {
    const size_t room = ctx->captured_room ? 2 * ctx->captured_room : 64;
    oh_captured *calls = realloc(ctx->captured, room * sizeof *calls);
    if (calls) ctx->captured = calls;
    oh_captured_memory *memory = realloc(ctx->captured_memory, room * sizeof *memory);
    if (memory) ctx->captured_memory = memory;
    if (!calls || !memory)
        return oh_error(ONEHOP_ERR_MEMORY, "capture: no memory for %zu calls", room);
    ctx->captured_room = room;
    return ONEHOP_OK;
}

onehop_result oh_capture_note(onehop_t *ctx, const oh_request *q, const oh_plan *plan) {
    if (ctx->captured_count == ctx->captured_room) {
        onehop_result result = make_room(ctx);
        if (result) return result;
    }
    const size_t bytes = q->count * onehop_dtype_bytes(q->dtype);
    oh_captured *c = &ctx->captured[ctx->captured_count];
    memset(c, 0, sizeof *c);
    c->count = q->count;
    c->dtype = (uint32_t)q->dtype;
    c->algorithm = (uint32_t)plan->choice.algorithm;
    c->source = (uint32_t)plan->choice.source;
    c->blocks = plan->choice.blocks;
    c->threads = plan->choice.threads;
    c->in_place = q->in == q->out;
    ctx->captured_memory[ctx->captured_count++] =
        (oh_captured_memory){q->in, q->out, bytes, q->row};
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

static bool takes_row(const oh_captured *c) {
    return c->source == ONEHOP_SOURCE_GRAPH;
}

/* Fills the rows of the captured calls: with the addresses of in and out, [row taken][rank], or as
 * staged. */
static onehop_result fill_rows(onehop_t *ctx, const void *const *in, void *const *out) {
    onehop_result result = ONEHOP_OK;
    size_t row = 0;
    for (size_t i = 0; i < ctx->captured_count && !result; i++) {
        if (!takes_row(&ctx->captured[i])) continue;
        const size_t first = row++ * (size_t)ctx->world;
        result = onehop_comm_row_fill(ctx->comm, ctx->captured_memory[i].row,
                                      in ? in + first : NULL, in ? out + first : NULL);
    }
    return result;
}

onehop_result onehop_capture_begin(onehop_t *context) {
    return begin(context);
}

/* Ends one rank's capture: the ranks agree that their calls are alike. */
static onehop_result end_alike(onehop_t *ctx) {
    if (ctx->world > 1 && !ctx->group)
        return oh_error(ONEHOP_ERR_STATE,
                        "onehop_capture_end: this context was made by onehop_create_all; end all "
                        "ranks' captures with onehop_capture_end_all");
    ctx->capturing = false;
    return ctx->world == 1 ? ONEHOP_OK : compare_by_group(ctx);
}

onehop_result onehop_capture_end(onehop_t *context) {
    onehop_result result = check_end(context);
    if (!result) result = end_alike(context);
    return result ? result : fill_rows(context, NULL, NULL);
}

onehop_result onehop_capture_inputs(const onehop_t *context, onehop_captured_input *inputs_out,
                                    size_t room, size_t *count_out) {
    if (!context || !count_out || (room && !inputs_out))
        return oh_error(ONEHOP_ERR_NULL, "onehop_capture_inputs: a pointer is NULL");
    if (!context->capturing)
        return oh_error(ONEHOP_ERR_STATE, "onehop_capture_inputs: not capturing");
    size_t count = 0;
    for (size_t i = 0; i < context->captured_count; i++) {
        const oh_captured_memory *m = &context->captured_memory[i];
        if (!takes_row(&context->captured[i])) continue;
        if (count < room) inputs_out[count] = (onehop_captured_input){m->in, m->out, m->bytes};
        count++;
    }
    *count_out = count;
    return ONEHOP_OK;
}

onehop_result onehop_capture_end_mapped(onehop_t *context, const void *const *in, void *const *out,
                                        size_t count) {
    size_t rows = 0;
    onehop_result result = check_end(context);
    if (!result) result = onehop_capture_inputs(context, NULL, 0, &rows);
    if (result) return result;
    if (count && (!in || !out))
        return oh_error(ONEHOP_ERR_NULL, "onehop_capture_end_mapped: %s is NULL",
                        in ? "out" : "in");
    if (count != rows)
        return oh_error(ONEHOP_ERR_ARGUMENT,
                        "onehop_capture_end_mapped: count is %zu, but %zu captured calls take "
                        "addresses",
                        count, rows);
    result = end_alike(context);
    return result ? result : fill_rows(context, in, out);
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
    for (int r = 0; r < n && !result; r++) result = fill_rows(contexts[r], NULL, NULL);
    return result;
}
