/* All-reduce: checks of the caller's arguments, choice, launch. */
#include "call/ops.h"

#include "call/told.h"
#include "capture/capture.h"
#include "context/expression.h"

#include <string.h>

onehop_result oh_op_check_type(onehop_collective collective, onehop_dtype dtype, onehop_op op) {
    const char *name = onehop_collective_name(collective);
    if (!onehop_dtype_bytes(dtype))
        return oh_error(ONEHOP_ERR_DTYPE,
                        "%s: data type %d is unknown; expected float32 (1), float16 (2) or "
                        "bfloat16 (3)",
                        name, (int)dtype);
    if (op != ONEHOP_SUM)
        return oh_error(ONEHOP_ERR_OP, "%s: reduction %d is unknown; expected sum (1)", name,
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
    if (q->count > OH_MAX_BYTES / size)
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
onehop_result oh_op_begin(const char *operation, onehop_comm *comm, const onehop_context *ctx,
                          onehop_stream stream, oh_stream_info *info_out) {
    if (!stream && ctx && !ctx->group && comm->dispatch.kind == ONEHOP_DEVICE_HOST)
        return oh_error(ONEHOP_ERR_STREAM,
                        "%s: stream is NULL, but the ranks of onehop_create_all are driven by one "
                        "thread and need a host stream each",
                        operation);
    onehop_result result = oh_comm_check(comm);
    return result ? result : comm->device->ops->stream_info(comm->device, stream, info_out);
}

onehop_result oh_op_check_call(const onehop_call *call, onehop_call *known) {
    onehop_result result = oh_config_copy(known, sizeof *known, call, "onehop_call");
    if (!result && !known->prefetch && known->prefetch_bytes)
        result = oh_error(ONEHOP_ERR_NULL, "onehop_call: prefetch is NULL, its bytes are %zu",
                          known->prefetch_bytes);
    return result;
}

/* The registration that the caller of a communicator names. */
static onehop_result check_row(const onehop_comm *comm, oh_request *q) {
    q->registration = q->call->registration;
    if (q->registration < comm->stats.registrations_total &&
        comm->registration_tags[q->registration])
        return ONEHOP_OK;
    return oh_error(ONEHOP_ERR_ARGUMENT, "all_reduce: registration %u of the call is not taken",
                    q->registration);
}

/* An expression is applied by our own bodies alone: what a table gives to NCCL or to multicast goes
 * by 2shot_pull. */
static onehop_result choose_own(const onehop_comm *comm, oh_question question, oh_plan *plan) {
    const onehop_call *named = question.call;
    onehop_call own = ONEHOP_CONFIG_INIT(onehop_call);
    if (oh_takes_expression(plan->choice.algorithm) &&
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

static bool same_question(const oh_question *a, const oh_question *b) {
    return a->bytes == b->bytes && a->dtype == b->dtype && a->mode == b->mode &&
           a->in_place == b->in_place && a->collective == b->collective;
}

/* Leaves the choice to onehop. */
static bool names_nothing(const onehop_call *call) {
    return !call || (!call->algorithm && !call->source && !call->blocks && !call->threads);
}

/* The plan lies in `own`, or for a plain call that leaves the choice to onehop in the
 * communicator. */
static onehop_result make_plan(onehop_comm *comm, const oh_request *q, const oh_question *question,
                               oh_plan *own, const oh_plan **plan_out) {
    onehop_result result;
    if (!names_nothing(q->call) || q->fused || q->custom) {
        *plan_out = own;
        result = oh_dispatch_choose(&comm->dispatch, question, own);
        return !result && q->custom ? choose_own(comm, *question, own) : result;
    }
    *plan_out = &comm->planned;
    if (same_question(question, &comm->planned_for)) return ONEHOP_OK;
    result = oh_dispatch_choose(&comm->dispatch, question, &comm->planned);
    comm->planned_for = *question;
    if (result) comm->planned_for.bytes = 0;
    return result;
}

onehop_result oh_op_run(onehop_comm *comm, onehop_context *ctx, oh_request *q) {
    oh_plan own;
    const oh_plan *plan;
    oh_stream_info info = {0, false, 0};
    onehop_result result =
        oh_op_begin(onehop_collective_name(q->collective), comm, ctx, q->stream, &info);
    if (result) return result;
    const bool noted = ctx && ctx->capturing && info.capturing;
    const bool named = !ctx && q->call && q->call->source == ONEHOP_SOURCE_GRAPH;
    const oh_question question = {.bytes = q->fused ? q->fused->rows.count * q->fused->rows.bytes
                                                    : oh_request_bytes(q),
                                  .dtype = q->dtype,
                                  .mode = noted || named ? ONEHOP_MODE_GRAPH : ONEHOP_MODE_EAGER,
                                  .in_place = oh_request_in_place(q),
                                  .call = q->call,
                                  .collective = q->collective,
                                  .rows = q->fused ? &q->fused->rows : NULL};
    result = make_plan(comm, q, &question, &own, &plan);
    if (!result && comm->told) oh_told(comm, &question, plan);
    if (!result && noted) result = oh_capture_prepare(ctx, plan, &info, q);
    if (!result && named) result = check_row(comm, q);
    if (result) return result;
    result = oh_comm_launch(comm, q, plan, &info);
    if (result && noted && q->registration != OH_NO_REGISTRATION)
        (void)onehop_comm_registration_release(comm, q->registration);
    if (!result && noted) oh_capture_note(ctx, q, plan);
    return result;
}

static oh_request plain(const void *in, void *out, size_t count, onehop_dtype dtype, onehop_op op,
                        const onehop_call *call, onehop_stream stream) {
    const oh_request q = {.in = in,
                          .out = out,
                          .count = count,
                          .dtype = dtype,
                          .op = op,
                          .call = call,
                          .stream = stream,
                          .collective = ONEHOP_ALL_REDUCE};
    return q;
}

onehop_result onehop_comm_all_reduce(onehop_comm *comm, const void *in, void *out, size_t count,
                                     onehop_dtype dtype, onehop_op op, const onehop_call *call,
                                     onehop_stream stream) {
    onehop_call known;
    if (!comm) return oh_error(ONEHOP_ERR_NULL, "onehop_comm_all_reduce: comm is NULL");
    onehop_result result = oh_op_check_type(ONEHOP_ALL_REDUCE, dtype, op);
    if (!result && call) result = oh_op_check_call(call, &known);
    if (result || count == 0) return result;
    oh_request q = plain(in, out, count, dtype, op, call ? &known : NULL, stream);
    result = check_memory(&q);
    return result ? result : oh_op_run(comm, NULL, &q);
}

onehop_result oh_op_copy_alone(onehop_context *ctx, const oh_request *q) {
    oh_plan plan;
    if (!oh_process_is(ctx->process)) return oh_process_refuse("context");
    const size_t bytes = oh_request_bytes(q);
    const oh_question question = {
        bytes, q->dtype, ONEHOP_MODE_EAGER, oh_request_in_place(q), q->call, q->collective, NULL};
    onehop_result result = oh_dispatch_choose(&ctx->dispatch, &question, &plan);
    if (!result && q->in != q->out)
        result = ctx->device->ops->copy_on_stream(ctx->device, q->out, q->in, bytes, q->stream);
    if (result) return result;
    ctx->alone.calls++;
    ctx->alone.bytes += bytes;
    ctx->alone.calls_by[plan.choice.algorithm]++;
    return ONEHOP_OK;
}

static onehop_result all_reduce(onehop_context *ctx, oh_request *q) {
    onehop_result result = oh_op_check_type(ONEHOP_ALL_REDUCE, q->dtype, q->op);
    if (result || q->count == 0) return result;
    result = check_memory(q);
    if (result) return result;
    return ctx->comm ? oh_op_run(ctx->comm, ctx, q) : oh_op_copy_alone(ctx, q);
}

onehop_result onehop_all_reduce(onehop_context *context, const void *in, void *out, size_t count,
                                onehop_dtype dtype, onehop_op op, const onehop_call *call,
                                onehop_stream stream) {
    onehop_call known;
    if (!context) return oh_error(ONEHOP_ERR_NULL, "onehop_all_reduce: context is NULL");
    onehop_result result = call ? oh_op_check_call(call, &known) : ONEHOP_OK;
    oh_request q = plain(in, out, count, dtype, op, call ? &known : NULL, stream);
    return result ? result : all_reduce(context, &q);
}

onehop_result onehop_all_reduce_expression(onehop_context *context, const void *in, void *out,
                                           size_t count, const onehop_expression *op,
                                           const onehop_expression_values *values,
                                           const onehop_call *call, onehop_stream stream) {
    static const char name[] = "onehop_all_reduce_expression";
    onehop_call known;
    onehop_expression_values given;
    if (!context || !op)
        return oh_error(ONEHOP_ERR_NULL, "%s: %s is NULL", name, context ? "op" : "context");
    onehop_result result = ONEHOP_OK;
    memset(&given, 0, sizeof given);
    if (values) result = oh_config_copy(&given, sizeof given, values, "onehop_expression_values");
    if (!result && call) result = oh_op_check_call(call, &known);
    if (!result) result = oh_custom_check(op, context, &given);
    if (result) return result;
    oh_request q =
        plain(in, out, count, oh_custom_dtype(op), ONEHOP_SUM, call ? &known : NULL, stream);
    q.custom = op;
    q.values = &given;
    return all_reduce(context, &q);
}

/* A query's values; its call is checked and copied to `named`. */
static onehop_result check_query(const onehop_context *context, const onehop_query *q,
                                 onehop_call *named) {
    static const char name[] = "onehop_would_use";
    if ((unsigned)q->collective > ONEHOP_ALL_GATHER)
        return oh_error(ONEHOP_ERR_ARGUMENT, "%s: collective %d is unknown", name,
                        (int)q->collective);
    const bool typed = q->collective != ONEHOP_ALL_GATHER;
    onehop_result result =
        typed ? oh_op_check_type(q->collective, q->dtype, q->op ? q->op : ONEHOP_SUM) : ONEHOP_OK;
    if (!result && q->call) result = oh_op_check_call(q->call, named);
    if (result) return result;
    const size_t size = typed ? onehop_dtype_bytes(q->dtype) : 1;
    const size_t parts = q->collective == ONEHOP_ALL_REDUCE ? 1 : (size_t)context->world;
    if (q->mode != ONEHOP_MODE_EAGER && q->mode != ONEHOP_MODE_GRAPH)
        return oh_error(ONEHOP_ERR_ARGUMENT, "%s: mode is %d, expected eager (0) or graph (1)",
                        name, (int)q->mode);
    if (q->bytes == 0 || q->bytes % size)
        return oh_error(ONEHOP_ERR_ARGUMENT, "%s: %zu bytes, expected a positive multiple of %zu",
                        name, q->bytes, size);
    if (q->bytes > OH_MAX_BYTES / parts)
        return oh_error(ONEHOP_ERR_TOO_LARGE, "%s: %zu bytes, expected at most 2^40%s", name,
                        q->bytes, parts > 1 ? " for all ranks" : "");
    return ONEHOP_OK;
}

onehop_result onehop_would_use(const onehop_context *context, const onehop_query *query,
                               onehop_choice *choice_out) {
    onehop_query q;
    onehop_call named;
    oh_plan plan;
    if (!context || !choice_out)
        return oh_error(ONEHOP_ERR_NULL, "onehop_would_use: %s is NULL",
                        context ? "choice_out" : "context");
    if (!oh_process_is(context->process)) return oh_process_refuse("context");
    onehop_result result = oh_config_copy(&q, sizeof q, query, "onehop_query");
    if (!result) result = check_query(context, &q, &named);
    if (result) return result;
    const oh_question question = {.bytes = q.bytes,
                                  .dtype = q.collective == ONEHOP_ALL_GATHER ? 0 : q.dtype,
                                  .mode = q.mode,
                                  .in_place = q.collective == ONEHOP_ALL_REDUCE && q.in_place,
                                  .call = q.call ? &named : NULL,
                                  .collective = q.collective};
    result = oh_dispatch_choose(&context->dispatch, &question, &plan);
    if (!result) *choice_out = oh_plan_choice(&plan);
    return result;
}
