/* All-reduce: checks of the caller's arguments, choice, launch. */
#include "comm/build.h"

#include <string.h>

#define MOST_BYTES ((size_t)1 << 40)

static onehop_result check_type(onehop_dtype dtype, onehop_op op) {
    if (!onehop_dtype_bytes(dtype))
        return oh_error(ONEHOP_ERR_DTYPE,
                        "all_reduce: data type %d is unknown; expected float32 (1), float16 (2) or "
                        "bfloat16 (3)",
                        (int)dtype);
    if (op != ONEHOP_SUM)
        return oh_error(ONEHOP_ERR_OP, "all_reduce: reduction %d is unknown; expected sum (1)",
                        (int)op);
    return ONEHOP_OK;
}

static onehop_result check_memory(const oh_request *q) {
    const size_t size = onehop_dtype_bytes(q->dtype);
    const uintptr_t in = (uintptr_t)q->in, out = (uintptr_t)q->out;
    if (!q->in || !q->out)
        return oh_error(ONEHOP_ERR_NULL, "all_reduce: %s is NULL", q->in ? "out" : "in");
    if (in % size || out % size)
        return oh_error(ONEHOP_ERR_ALIGNMENT,
                        "all_reduce: %s at %p is not aligned to its %zu-byte element",
                        in % size ? "in" : "out", in % size ? q->in : q->out, size);
    if (q->count > MOST_BYTES / size)
        return oh_error(ONEHOP_ERR_TOO_LARGE,
                        "all_reduce: %zu elements of %zu bytes, expected at most 2^40 bytes",
                        q->count, size);
    const size_t bytes = q->count * size;
    if (in != out && in < out + bytes && out < in + bytes)
        return oh_error(ONEHOP_ERR_OVERLAP,
                        "all_reduce: in [%p, +%zu) and out at %p overlap without being equal",
                        q->in, bytes, q->out);
    return ONEHOP_OK;
}

/* A call on no host stream runs to its end: made by the one thread that drives all ranks, it would
 * wait for ever. */
static onehop_result check_stream(const onehop_comm *comm, const onehop_t *ctx,
                                  onehop_stream_t stream) {
    if (stream || !ctx || ctx->group || comm->dispatch.kind != ONEHOP_DEVICE_HOST) return ONEHOP_OK;
    return oh_error(ONEHOP_ERR_STREAM, "all_reduce: stream is NULL, but the ranks of "
                                       "onehop_create_all are driven by one thread and "
                                       "need a host stream each");
}

static onehop_result check_call(const onehop_call *call, onehop_call *known) {
    return oh_config_copy(known, sizeof *known, call, "onehop_call");
}

/* The row that the caller of a communicator names. */
static onehop_result check_row(const onehop_comm *comm, oh_request *q) {
    q->row = q->call->row;
    if (q->row < comm->stats.rows_total && comm->row_tags[q->row]) return ONEHOP_OK;
    return oh_error(ONEHOP_ERR_ARGUMENT, "all_reduce: row %u of the call is not taken", q->row);
}

/* An expression is applied by our own bodies alone: what a table gives to NCCL or to multicast goes by
 * 2shot_pull. */
static onehop_result choose_own(const onehop_comm *comm, oh_question question, oh_plan *plan) {
    const onehop_call *named = question.call;
    onehop_call own = ONEHOP_CONFIG_INIT(onehop_call);
    if (plan->choice.algorithm <= ONEHOP_2SHOT_PULL &&
        plan->choice.source != ONEHOP_SOURCE_MULTICAST)
        return ONEHOP_OK;
    if (named && (named->algorithm || named->source))
        return oh_error(
            ONEHOP_ERR_ALGORITHM, "all_reduce: %s over source %s does not apply an expression",
            onehop_algorithm_name(plan->choice.algorithm), onehop_source_name(plan->choice.source));
    if (named) own = *named;
    own.algorithm = ONEHOP_2SHOT_PULL;
    own.source = ONEHOP_SOURCE_WORKSPACE;
    question.call = &own;
    return oh_dispatch_choose(&comm->dispatch, &question, plan);
}

/* Chooses and launches; the context, if there is one, notes captured calls. */
static onehop_result run(onehop_comm *comm, onehop_t *ctx, oh_request *q) {
    oh_plan plan;
    oh_stream_info info = {0, false, 0};
    onehop_result result = check_memory(q);
    if (!result) result = check_stream(comm, ctx, q->stream);
    if (!result) result = oh_comm_check(comm);
    if (!result) result = comm->device->ops->stream_info(comm->device, q->stream, &info);
    if (result) return result;
    const bool noted = ctx && ctx->capturing && info.capturing;
    const bool named = !ctx && q->call && q->call->source == ONEHOP_SOURCE_GRAPH;
    const oh_question question = {q->count * onehop_dtype_bytes(q->dtype), q->dtype,
                                  noted || named ? ONEHOP_MODE_GRAPH : ONEHOP_MODE_EAGER,
                                  q->in == q->out, q->call};
    result = oh_dispatch_choose(&comm->dispatch, &question, &plan);
    if (!result && q->custom) result = choose_own(comm, question, &plan);
    if (!result && noted) result = oh_capture_prepare(ctx, &plan, &info, q);
    if (!result && named) result = check_row(comm, q);
    if (result) return result;
    result = oh_comm_launch(comm, q, &plan, &info);
    if (result && noted && q->row != OH_NO_ROW) (void)onehop_comm_row_release(comm, q->row);
    if (!result && noted) oh_capture_note(ctx, q, &plan);
    return result;
}

onehop_result onehop_comm_all_reduce(onehop_comm *comm, const void *in, void *out, size_t count,
                                     onehop_dtype dtype, onehop_op op, const onehop_call *call,
                                     onehop_stream_t stream) {
    onehop_call known;
    if (!comm) return oh_error(ONEHOP_ERR_NULL, "onehop_comm_all_reduce: comm is NULL");
    onehop_result result = check_type(dtype, op);
    if (!result && call) result = check_call(call, &known);
    if (result || count == 0) return result;
    oh_request q = {in, out, count, dtype, op, call ? &known : NULL, stream, 0, NULL, NULL};
    return run(comm, NULL, &q);
}

/* A group of one rank. */
static onehop_result copy_alone(onehop_t *ctx, const oh_request *q) {
    oh_plan plan;
    onehop_result result = check_memory(q);
    const size_t bytes = q->count * onehop_dtype_bytes(q->dtype);
    const oh_question question = {bytes, q->dtype, ONEHOP_MODE_EAGER, q->in == q->out, q->call};
    if (!result) result = oh_dispatch_choose(&ctx->dispatch, &question, &plan);
    if (!result && q->in != q->out)
        result = ctx->device->ops->copy_on_stream(ctx->device, q->out, q->in, bytes, q->stream);
    if (result) return result;
    ctx->alone.calls++;
    ctx->alone.bytes += bytes;
    ctx->alone.calls_by[plan.choice.algorithm]++;
    return ONEHOP_OK;
}

static onehop_result all_reduce(onehop_t *ctx, oh_request *q) {
    onehop_result result = check_type(q->dtype, q->op);
    if (result || q->count == 0) return result;
    return ctx->comm ? run(ctx->comm, ctx, q) : copy_alone(ctx, q);
}

onehop_result onehop_all_reduce(onehop_t *context, const void *in, void *out, size_t count,
                                onehop_dtype dtype, onehop_op op, onehop_stream_t stream) {
    oh_request q = {in, out, count, dtype, op, NULL, stream, 0, NULL, NULL};
    if (!context) return oh_error(ONEHOP_ERR_NULL, "onehop_all_reduce: context is NULL");
    return all_reduce(context, &q);
}

onehop_result onehop_all_reduce_with(onehop_t *context, const void *in, void *out, size_t count,
                                     onehop_dtype dtype, onehop_op op, const onehop_call *call,
                                     onehop_stream_t stream) {
    onehop_call known;
    if (!context || !call)
        return oh_error(ONEHOP_ERR_NULL, "onehop_all_reduce_with: %s is NULL",
                        context ? "call" : "context");
    onehop_result result = check_call(call, &known);
    oh_request q = {in, out, count, dtype, op, &known, stream, 0, NULL, NULL};
    return result ? result : all_reduce(context, &q);
}

onehop_result onehop_all_reduce_op(onehop_t *context, const void *in, void *out, size_t count,
                                   const onehop_op_t *op, const onehop_op_values *values,
                                   const onehop_call *call, onehop_stream_t stream) {
    static const char name[] = "onehop_all_reduce_op";
    onehop_call known;
    onehop_op_values given;
    if (!context || !op)
        return oh_error(ONEHOP_ERR_NULL, "%s: %s is NULL", name, context ? "op" : "context");
    onehop_result result = ONEHOP_OK;
    memset(&given, 0, sizeof given);
    if (values) result = oh_config_copy(&given, sizeof given, values, "onehop_op_values");
    if (!result && call) result = check_call(call, &known);
    if (!result) result = oh_custom_check(op, context, &given);
    if (result) return result;
    oh_request q = {in, out, count, oh_custom_dtype(op), ONEHOP_SUM, call ? &known : NULL, stream,
                    0,  op,  &given};
    return all_reduce(context, &q);
}

onehop_result onehop_would_use(const onehop_t *context, size_t bytes, onehop_dtype dtype,
                               onehop_op op, onehop_mode mode, int in_place,
                               onehop_choice *choice_out) {
    oh_plan plan;
    if (!context || !choice_out)
        return oh_error(ONEHOP_ERR_NULL, "onehop_would_use: %s is NULL",
                        context ? "choice_out" : "context");
    onehop_result result = check_type(dtype, op);
    if (result) return result;
    if (mode != ONEHOP_MODE_EAGER && mode != ONEHOP_MODE_GRAPH)
        return oh_error(ONEHOP_ERR_ARGUMENT,
                        "onehop_would_use: mode is %d, expected eager (0) or graph (1)", (int)mode);
    if (bytes == 0 || bytes % onehop_dtype_bytes(dtype))
        return oh_error(ONEHOP_ERR_ARGUMENT,
                        "onehop_would_use: %zu bytes, expected a positive multiple of %zu", bytes,
                        onehop_dtype_bytes(dtype));
    if (bytes > MOST_BYTES)
        return oh_error(ONEHOP_ERR_TOO_LARGE, "onehop_would_use: %zu bytes, expected at most 2^40",
                        bytes);
    const oh_question question = {bytes, dtype, mode, in_place != 0, NULL};
    result = oh_dispatch_choose(&context->dispatch, &question, &plan);
    if (!result) *choice_out = plan.choice;
    return result;
}
