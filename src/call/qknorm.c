/* RMSNorm of q and k over all ranks' columns: checks, choice, launch. */
#include "call/fused.h"

#include <math.h>
#include <string.h>

#define NAME        "tp_qknorm"
#define MAX_TOKENS  ((size_t)1 << 31)
#define MAX_UNITS   ((size_t)OH_MAX_LANES * OH_NORM_UNITS)
#define TOKEN_BYTES 8

static size_t units_of(size_t width, size_t size) {
    return (width * size + OH_UNIT_BYTES - 1) / OH_UNIT_BYTES;
}

static onehop_result check_values(const onehop_qknorm *n) {
    const size_t size = onehop_dtype_bytes(n->dtype);
    if (!size)
        return oh_error(ONEHOP_ERR_DTYPE,
                        NAME ": data type %d is unknown; expected float32 (1), float16 (2) or "
                             "bfloat16 (3)",
                        (int)n->dtype);
    if (n->flags & ~ONEHOP_NORM_WEIGHT_PLUS_ONE || n->reserved)
        return oh_error(ONEHOP_ERR_ARGUMENT, NAME ": flags 0x%x or reserved 0x%x has unknown bits",
                        n->flags, n->reserved);
    if (!n->q_width || !n->k_width)
        return oh_error(ONEHOP_ERR_ARGUMENT, NAME ": %s is 0", n->q_width ? "k_width" : "q_width");
    if (n->q_width > MAX_UNITS * 16 || n->k_width > MAX_UNITS * 16 ||
        units_of(n->q_width, size) + units_of(n->k_width, size) > MAX_UNITS)
        return oh_error(ONEHOP_ERR_TOO_LARGE,
                        NAME
                        ": rows of q and k have %zu and %zu elements of %zu bytes, expected at "
                        "most %zu bytes together",
                        n->q_width, n->k_width, size, MAX_UNITS * OH_UNIT_BYTES);
    if (n->tokens >= MAX_TOKENS)
        return oh_error(ONEHOP_ERR_TOO_LARGE, NAME ": %zu tokens, expected fewer than 2^31",
                        n->tokens);
    if (!(n->eps >= 0.0f) || isinf(n->eps))
        return oh_error(ONEHOP_ERR_ARGUMENT, NAME ": eps is %g, expected a finite value >= 0",
                        (double)n->eps);
    return ONEHOP_OK;
}

typedef struct matrices {
    oh_matrix q, k, q_weight, k_weight;
} matrices;

static onehop_result check_memory(const onehop_qknorm *n, matrices *m) {
    const size_t size = onehop_dtype_bytes(n->dtype);
    const oh_matrix *const all[] = {&m->q, &m->k, &m->q_weight, &m->k_weight};
    onehop_result result = ONEHOP_OK;
    if (!n->q || !n->k || !n->q_weight || !n->k_weight)
        return oh_error(ONEHOP_ERR_NULL, NAME ": %s is NULL",
                        !n->q          ? "q"
                        : !n->k        ? "k"
                        : !n->q_weight ? "q_weight"
                                       : "k_weight");
    m->q = oh_matrix_of("q", n->q, n->tokens, n->q_width, n->q_stride, size);
    m->k = oh_matrix_of("k", n->k, n->tokens, n->k_width, n->k_stride, size);
    m->q_weight = oh_matrix_of("q_weight", n->q_weight, 1, n->q_width, 0, size);
    m->k_weight = oh_matrix_of("k_weight", n->k_weight, 1, n->k_width, 0, size);
    for (int i = 0; i < 4 && !result; i++) result = oh_matrix_check(NAME, all[i]);
    for (int i = 0; i < 2; i++)
        for (int j = i + 1; j < 4 && !result; j++)
            result = oh_matrix_check_apart(NAME, all[i], all[j], false);
    return result;
}

static void fill(const onehop_comm *comm, const onehop_qknorm *n, const matrices *m,
                 oh_qknorm_args *out) {
    const size_t size = m->q.element;
    memset(out, 0, sizeof *out);
    out->call = comm->args;
    out->call.in = m->q.at;
    out->call.out = m->k.at;
    out->call.count = n->tokens * (n->q_width + n->k_width);
    out->q_units = (uint32_t)units_of(n->q_width, size);
    out->call.units = out->q_units + (uint32_t)units_of(n->k_width, size);
    out->q_weight = m->q_weight.at;
    out->k_weight = m->k_weight.at;
    out->q_stride = m->q.stride;
    out->k_stride = m->k.stride;
    out->tokens = (uint32_t)n->tokens;
    out->q_bytes = (uint32_t)m->q.width;
    out->k_bytes = (uint32_t)m->k.width;
    if (oh_matrix_is_aligned(&m->q, 16) && oh_matrix_is_aligned(&m->q_weight, 16))
        out->q_whole = out->q_bytes / OH_UNIT_BYTES;
    if (oh_matrix_is_aligned(&m->k, 16) && oh_matrix_is_aligned(&m->k_weight, 16))
        out->k_whole = out->k_bytes / OH_UNIT_BYTES;
    out->lanes = oh_lanes_of(out->call.units);
    out->plus_one = n->flags & ONEHOP_NORM_WEIGHT_PLUS_ONE;
    out->eps = n->eps;
    out->inverse_q = 1.0f / (float)(n->q_width * (size_t)comm->world);
    out->inverse_k = 1.0f / (float)(n->k_width * (size_t)comm->world);
}

static uint64_t identity_of(const onehop_qknorm *n) {
    uint32_t eps;
    memcpy(&eps, &n->eps, sizeof eps);
    const uint64_t agreed[] = {OH_QKNORM,          n->tokens, n->q_width, n->k_width,
                               (uint64_t)n->dtype, eps,       n->flags};
    return oh_hash(0, agreed, sizeof agreed);
}

static onehop_result run(onehop_comm *comm, onehop_context *ctx, const onehop_qknorm *qknorm,
                         const onehop_call *call, onehop_stream stream) {
    onehop_qknorm n;
    onehop_call named;
    oh_qknorm_args args;
    matrices m;
    onehop_result result = oh_config_copy(&n, sizeof n, qknorm, "onehop_qknorm");
    if (!result) result = oh_fused_copy_call(NAME, call, &named);
    if (!result) result = check_values(&n);
    if (result || n.tokens == 0) return result;
    result = check_memory(&n, &m);
    if (!result) result = oh_fused_check(NAME, comm, ctx);
    if (result) return result;
    fill(comm, &n, &m, &args);
    const oh_fused fused = {{OH_QKNORM, n.tokens, TOKEN_BYTES, args.lanes},
                            &args.call,
                            sizeof args,
                            &args.chunk_tokens,
                            identity_of(&n)};
    return oh_fused_run(comm, ctx, &fused, n.dtype, &named, stream);
}

onehop_result onehop_tp_qknorm(onehop_context *context, const onehop_qknorm *qknorm,
                               const onehop_call *call, onehop_stream stream) {
    if (!context) return oh_error(ONEHOP_ERR_NULL, "onehop_tp_qknorm: context is NULL");
    return run(context->comm, context, qknorm, call, stream);
}

onehop_result onehop_comm_tp_qknorm(onehop_comm *comm, const onehop_qknorm *qknorm,
                                    const onehop_call *call, onehop_stream stream) {
    if (!comm) return oh_error(ONEHOP_ERR_NULL, "onehop_comm_tp_qknorm: comm is NULL");
    return run(comm, NULL, qknorm, call, stream);
}

onehop_result onehop_tp_qknorm_max_blocks(onehop_context *context, const onehop_qknorm *qknorm,
                                          uint32_t *blocks_out) {
    onehop_qknorm n;
    if (!context || !blocks_out)
        return oh_error(ONEHOP_ERR_NULL, "onehop_tp_qknorm_max_blocks: %s is NULL",
                        context ? "blocks_out" : "context");
    if (!oh_process_is(context->process)) return oh_process_refuse("context");
    onehop_result result = oh_config_copy(&n, sizeof n, qknorm, "onehop_qknorm");
    if (!result) result = check_values(&n);
    if (result) return result;
    const onehop_comm *comm = context->comm;
    if (!comm) return oh_error(ONEHOP_ERR_WORLD_SIZE, NAME ": needs a group of 2 ranks at least");
    const size_t size = onehop_dtype_bytes(n.dtype);
    const size_t units = units_of(n.q_width, size) + units_of(n.k_width, size);
    const int kernel = comm->dispatch.kernels[OH_QKNORM][ONEHOP_1SHOT_PUSH][n.dtype];
    return comm->device->ops->resident_blocks(comm->device, &comm->functions[kernel],
                                              oh_lanes_of((uint32_t)units), blocks_out);
}
