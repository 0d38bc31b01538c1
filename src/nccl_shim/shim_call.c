/* A call of all-reduce, reduce-scatter or all-gather: whose it is, and how it is done. What decides
 * is equal on all ranks: count, type, reduction, group, and what was agreed at set-up; never an
 * address, which is one rank's own. A call that is captured into a graph is chosen as an eager one:
 * between onehop_capture_begin and _end alone does the library read captured addresses, so what is
 * captured here goes by push or over the workspace, and needs no exchange afterwards. */
#include "nccl_shim/shim.h"

/* 0: not one that is summed. */
static onehop_dtype dtype_of(int type) {
    switch (type) {
    case OH_NCCL_FLOAT16:
        return ONEHOP_FLOAT16;
    case OH_NCCL_FLOAT32:
        return ONEHOP_FLOAT32;
    case OH_NCCL_BFLOAT16:
        return ONEHOP_BFLOAT16;
    default:
        return 0;
    }
}

/* Bytes of NCCL's types, by number: int8, uint8, int32, uint32, int64, uint64, float16, float32,
 * float64, bfloat16, float8e4m3, float8e5m2. */
static size_t type_bytes(int type) {
    static const unsigned char bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && (size_t)type < OH_LENGTH(bytes) ? bytes[type] : 0;
}

/* ---- whose ----------------------------------------------------------------------------------- */

static bool ask(const onehop_context *context, const oh_shim_call *call, size_t bytes) {
    onehop_choice choice;
    onehop_query query = ONEHOP_CONFIG_INIT(onehop_query);
    query.bytes = bytes;
    query.collective = call->collective;
    query.dtype = dtype_of(call->dtype);
    query.in_place = 1; /* ranks may differ in it; the answer holds for both */
    return !onehop_would_use(context, &query, &choice) && choice.algorithm != ONEHOP_NCCL &&
           choice.source != ONEHOP_SOURCE_GRAPH;
}

/* What was asked once is remembered: a communicator is used by one thread at a time. */
static bool rule_is_ours(oh_shim_state *state, const onehop_context *context,
                         const oh_shim_call *call, size_t bytes) {
    const uint64_t key =
        (uint64_t)bytes << 8 | (uint64_t)call->collective << 4 | (uint64_t)dtype_of(call->dtype);
    oh_shim_choice *known = &state->choices[(key ^ key >> 13) * 0x9e3779b97f4a7c15ull >> 58];
    _Static_assert(OH_SHIM_CHOICES == 64, "the shift above");
    if (known->key != key) {
        known->ours = ask(context, call, bytes);
        known->key = key;
    }
    return known->ours;
}

static oh_shim_reason judge(oh_shim_state *state, const onehop_context *context,
                            const oh_shim_call *call) {
    const bool sums = call->collective != ONEHOP_ALL_GATHER;
    const size_t size = type_bytes(call->dtype);
    size_t bytes, whole;
    if (!context) return OH_SHIM_COMM;
    if (!size || (sums && !dtype_of(call->dtype))) return OH_SHIM_TYPE;
    if (sums && call->op != OH_NCCL_OP_SUM) return OH_SHIM_OP;
    if (!call->count) return OH_SHIM_TAKEN;
    if (__builtin_mul_overflow(call->count, size, &bytes)) return OH_SHIM_SIZE;
    const size_t parts = call->collective == ONEHOP_ALL_REDUCE ? 1 : (size_t)state->ranks;
    if (__builtin_mul_overflow(bytes, parts, &whole)) return OH_SHIM_SIZE;
    if (whole > oh_shim_settings_get()->max_bytes) return OH_SHIM_SIZE;
    return rule_is_ours(state, context, call, bytes) ? OH_SHIM_TAKEN : OH_SHIM_RULE;
}

oh_shim_reason oh_shim_judge(const oh_shim_call *call) {
    oh_shim_state *state = oh_shim_find(call->comm);
    if (!state) return OH_SHIM_COMM;
    const oh_shim_reason reason = judge(state, oh_shim_enter(state, call->comm), call);
    oh_shim_leave(state);
    return reason;
}

/* ---- doing it -------------------------------------------------------------------------------- */

static onehop_result run(onehop_context *context, const oh_shim_call *call) {
    const onehop_dtype dtype = dtype_of(call->dtype);
    if (call->collective == ONEHOP_ALL_REDUCE)
        return onehop_all_reduce(context, call->in, call->out, call->count, dtype, ONEHOP_SUM, NULL,
                                 call->stream);
    if (call->collective == ONEHOP_REDUCE_SCATTER)
        return onehop_reduce_scatter(context, call->in, call->out, call->count, dtype, ONEHOP_SUM,
                                     NULL, call->stream);
    return onehop_all_gather(context, call->in, call->out, call->count * type_bytes(call->dtype),
                             NULL, call->stream);
}

int oh_shim_run(const oh_shim_call *call) {
    oh_shim_state *state = oh_shim_find(call->comm);
    if (!state) return OH_NCCL_ARGUMENT;
    onehop_context *context = oh_shim_enter(state, call->comm);
    if (context && !state->captured) state->captured = oh_shim_capturing(call->stream);
    oh_shim_depth++;
    /* Without a context it was ended since the call was judged: by an abort in another thread. */
    const onehop_result result =
        context ? run(context, call)
                : oh_error(ONEHOP_ERR_ABORTED, "the communicator was ended beside the call");
    oh_shim_depth--;
    oh_shim_leave(state);
    if (!result) oh_shim_count_taken(call->collective);
    return oh_shim_fail(result);
}

int oh_shim_forward(const oh_shim_call *c) {
    int result;
    if (c->collective == ONEHOP_ALL_GATHER)
        OH_REAL_CALL(result, oh_nccl_gather_fn, ncclAllGather, c->in, c->out, c->count, c->dtype,
                     c->comm, c->stream);
    else if (c->collective == ONEHOP_ALL_REDUCE)
        OH_REAL_CALL(result, oh_nccl_reduce_fn, ncclAllReduce, c->in, c->out, c->count, c->dtype,
                     c->op, c->comm, c->stream);
    else
        OH_REAL_CALL(result, oh_nccl_reduce_fn, ncclReduceScatter, c->in, c->out, c->count,
                     c->dtype, c->op, c->comm, c->stream);
    return oh_shim_answered(result);
}
