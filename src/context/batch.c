/* What one capture holds: registrations of the table and mappings of the peers' memory, until every
 * graph of it is gone. The graphs hold a counter that outlives the context if need be; the device
 * tells of the end of each from a thread that may do nothing but count. So what is no longer needed
 * is given back later, by whoever captures next or destroys the context. */
#include "context/batch.h"

#include <stdlib.h>
#include <string.h>

/* Freed by the last holder: the batch is one, each graph another. */
typedef struct oh_holders {
    uint32_t count;
} oh_holders;

struct oh_batch {
    oh_batch *next;
    oh_holders *holders;
    uint64_t *captures; /* numbers of those whose graph is held to */
    size_t capture_count;
    oh_captured_memory *calls; /* once closed */
    size_t call_count;
    oh_mem *spans; /* of all peers; zeroed ones among them */
    size_t span_count;
};

/* Release and acquire: whoever finds itself alone sees that the graphs have let go. */
static void let_go(void *argument) {
    oh_holders *holders = argument;
    if (__atomic_sub_fetch(&holders->count, 1, __ATOMIC_ACQ_REL) == 0) free(holders);
}

static bool is_over(const oh_batch *b) {
    return __atomic_load_n(&b->holders->count, __ATOMIC_ACQUIRE) == 1;
}

static void drop(onehop_context *ctx, oh_batch *b) {
    for (size_t i = 0; i < b->span_count; i++)
        ctx->device->ops->mem_release(ctx->device, &b->spans[i]);
    let_go(b->holders);
    free(b->spans);
    free(b->calls);
    free(b->captures);
    free(b);
}

static onehop_result open_batch(onehop_context *ctx) {
    oh_batch *b = calloc(1, sizeof *b);
    oh_holders *holders = malloc(sizeof *holders);
    if (!b || !holders) {
        free(b);
        free(holders);
        return oh_error(ONEHOP_ERR_MEMORY, "capture: no memory");
    }
    holders->count = 1;
    b->holders = holders;
    ctx->open_batch = b;
    return ONEHOP_OK;
}

/* The next graph of this capture, unless it is held to already. Streams of one graph share the
 * number of their capture. */
static onehop_result hold_graph(onehop_context *ctx, oh_batch *b, onehop_stream stream,
                                uint64_t capture) {
    for (size_t i = b->capture_count; i > 0; i--)
        if (b->captures[i - 1] == capture) return ONEHOP_OK;
    uint64_t *grown = realloc(b->captures, (b->capture_count + 1) * sizeof *grown);
    if (!grown) return oh_error(ONEHOP_ERR_MEMORY, "capture: no memory");
    b->captures = grown;
    /* Relaxed: the batch itself is a holder. */
    __atomic_add_fetch(&b->holders->count, 1, __ATOMIC_RELAXED);
    onehop_result result = ctx->device->ops->graph_retain(ctx->device, stream, let_go, b->holders);
    if (!result) b->captures[b->capture_count++] = capture;
    return result;
}

onehop_result oh_batch_take_registration(onehop_context *ctx, onehop_stream stream,
                                         uint64_t capture, uint32_t *registration_out) {
    onehop_result result = ctx->open_batch ? ONEHOP_OK : open_batch(ctx);
    if (!result) result = hold_graph(ctx, ctx->open_batch, stream, capture);
    if (result) return result;
    if (ctx->comm->registrations_used == ctx->comm->stats.registrations_total)
        oh_batch_recycle(ctx);
    return onehop_comm_registration_take(ctx->comm, registration_out);
}

void oh_batch_close(onehop_context *ctx, oh_mem *spans, size_t span_count) {
    oh_batch *b = ctx->open_batch;
    if (!b) return;
    b->spans = spans;
    b->span_count = span_count;
    b->calls = ctx->captured_memory;
    b->call_count = ctx->captured_count;
    b->next = ctx->batches;
    ctx->batches = b;
    ctx->open_batch = NULL;
    ctx->captured_memory = NULL;
    ctx->captured_room = 0;
}

/* Its registrations, emptied. On failure they stay taken. */
static void give_registrations_back(onehop_context *ctx, const oh_batch *b) {
    size_t count = 0;
    uint32_t *registrations = malloc((b->call_count ? b->call_count : 1) * sizeof *registrations);
    if (!registrations) return;
    for (size_t i = 0; i < b->call_count; i++)
        if (b->calls[i].registration != OH_NO_REGISTRATION)
            registrations[count++] = b->calls[i].registration;
    if (oh_comm_registrations_release(ctx->comm, registrations, count))
        oh_log(ONEHOP_LOG_ERROR, "registrations of a graph that is gone stay taken: %s",
               onehop_last_error());
    free(registrations);
}

void oh_batch_recycle(onehop_context *ctx) {
    for (oh_batch **link = &ctx->batches; *link;) {
        oh_batch *b = *link;
        if (!is_over(b)) {
            link = &b->next;
            continue;
        }
        *link = b->next;
        give_registrations_back(ctx, b);
        drop(ctx, b);
    }
}

void oh_batch_drop_all(onehop_context *ctx) {
    for (oh_batch *b = ctx->batches, *next; b; b = next) {
        next = b->next;
        drop(ctx, b);
    }
    if (ctx->open_batch) drop(ctx, ctx->open_batch);
    ctx->batches = ctx->open_batch = NULL;
}
