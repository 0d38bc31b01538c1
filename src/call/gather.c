/* Reduce-scatter and all-gather. Ranks have parts: of reduce-scatter `out` is one, of all-gather
 * `in`; the other buffer holds all ranks' parts in rank order. */
#include "call/ops.h"

#include <string.h>

/* Where the parts lie. */
typedef struct parts {
    const char *part_name, *all_name;
    const void *part, *all;
} parts;

static parts parts_of(const oh_request *q) {
    const bool scatter = q->collective == ONEHOP_REDUCE_SCATTER;
    return (parts){scatter ? "out" : "in", scatter ? "in" : "out", scatter ? q->out : q->in,
                   scatter ? q->in : q->out};
}

static onehop_result check_alignment(const char *name, const char *what, const void *p,
                                     size_t size) {
    if ((uintptr_t)p % size == 0) return ONEHOP_OK;
    return oh_error(ONEHOP_ERR_ALIGNMENT, "%s: %s at %p is not aligned to its %zu-byte element",
                    name, what, p, size);
}

static onehop_result check_memory(const oh_request *q, int rank, int world) {
    const char *name = onehop_collective_name(q->collective);
    const size_t size = q->dtype ? onehop_dtype_bytes(q->dtype) : 1;
    const parts p = parts_of(q);
    if (!q->in || !q->out)
        return oh_error(ONEHOP_ERR_NULL, "%s: %s is NULL", name, q->in ? "out" : "in");
    onehop_result result = check_alignment(name, "in", q->in, size);
    if (!result) result = check_alignment(name, "out", q->out, size);
    if (result) return result;
    if (q->count > OH_MAX_BYTES / size / (size_t)world)
        return oh_error(ONEHOP_ERR_TOO_LARGE,
                        "%s: %d parts of %zu x %zu bytes, expected at most 2^40 bytes", name, world,
                        q->count, size);
    const size_t bytes = q->count * size;
    const uintptr_t part = (uintptr_t)p.part, all = (uintptr_t)p.all;
    if (part != all + (size_t)rank * bytes && part < all + (size_t)world * bytes &&
        all < part + bytes)
        return oh_error(ONEHOP_ERR_OVERLAP,
                        "%s: %s [%p, +%zu) overlaps %s [%p, +%zu); in place it is part %d of it, "
                        "at %p",
                        name, p.part_name, p.part, bytes, p.all_name, p.all, (size_t)world * bytes,
                        rank, (const void *)(all + (size_t)rank * bytes));
    return ONEHOP_OK;
}

static onehop_result on_comm(onehop_comm *comm, oh_request *q) {
    onehop_result result = check_memory(q, comm->rank, comm->world);
    return result ? result : oh_op_run(comm, NULL, q);
}

static onehop_result on_context(onehop_context *ctx, oh_request *q) {
    onehop_result result = check_memory(q, ctx->rank, ctx->world);
    if (result) return result;
    return ctx->comm ? oh_op_run(ctx->comm, ctx, q) : oh_op_copy_alone(ctx, q);
}

/* The request of arguments that are in order but for the memory. */
static onehop_result check_scatter(const oh_request *q, const onehop_call *call,
                                   onehop_call *known) {
    onehop_result result = oh_op_check_type(q->collective, q->dtype, q->op);
    return !result && call ? oh_op_check_call(call, known) : result;
}

onehop_result onehop_comm_reduce_scatter(onehop_comm *comm, const void *in, void *out, size_t count,
                                         onehop_dtype dtype, onehop_op op, const onehop_call *call,
                                         onehop_stream stream) {
    onehop_call known;
    oh_request q = {
        in,   out,  count, dtype, op, call ? &known : NULL, stream, 0, ONEHOP_REDUCE_SCATTER,
        NULL, NULL, NULL};
    if (!comm) return oh_error(ONEHOP_ERR_NULL, "onehop_comm_reduce_scatter: comm is NULL");
    onehop_result result = check_scatter(&q, call, &known);
    return result || !count ? result : on_comm(comm, &q);
}

onehop_result onehop_comm_all_gather(onehop_comm *comm, const void *in, void *out, size_t bytes,
                                     const onehop_call *call, onehop_stream stream) {
    onehop_call known;
    oh_request q = {
        in,   out,  bytes, 0, ONEHOP_SUM, call ? &known : NULL, stream, 0, ONEHOP_ALL_GATHER,
        NULL, NULL, NULL};
    if (!comm) return oh_error(ONEHOP_ERR_NULL, "onehop_comm_all_gather: comm is NULL");
    onehop_result result = call ? oh_op_check_call(call, &known) : ONEHOP_OK;
    return result || !bytes ? result : on_comm(comm, &q);
}

onehop_result onehop_reduce_scatter(onehop_context *context, const void *in, void *out,
                                    size_t count, onehop_dtype dtype, onehop_op op,
                                    const onehop_call *call, onehop_stream stream) {
    onehop_call known;
    oh_request q = {
        in,   out,  count, dtype, op, call ? &known : NULL, stream, 0, ONEHOP_REDUCE_SCATTER,
        NULL, NULL, NULL};
    if (!context) return oh_error(ONEHOP_ERR_NULL, "onehop_reduce_scatter: context is NULL");
    onehop_result result = check_scatter(&q, call, &known);
    return result || !count ? result : on_context(context, &q);
}

onehop_result onehop_all_gather(onehop_context *context, const void *in, void *out, size_t bytes,
                                const onehop_call *call, onehop_stream stream) {
    onehop_call known;
    oh_request q = {
        in,   out,  bytes, 0, ONEHOP_SUM, call ? &known : NULL, stream, 0, ONEHOP_ALL_GATHER,
        NULL, NULL, NULL};
    if (!context) return oh_error(ONEHOP_ERR_NULL, "onehop_all_gather: context is NULL");
    onehop_result result = call ? oh_op_check_call(call, &known) : ONEHOP_OK;
    return result || !bytes ? result : on_context(context, &q);
}
