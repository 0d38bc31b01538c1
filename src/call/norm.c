/* All-reduce, residual add and RMSNorm in one call: checks, choice, launch. */
#include "call/fused.h"

#include <math.h>
#include <string.h>

#define NAME        "all_reduce_norm"
#define MAX_ROWS    ((size_t)1 << 31)
#define ROW_BYTES   ((size_t)OH_MAX_LANES * OH_NORM_UNITS * OH_UNIT_BYTES)
#define KNOWN_FLAGS ONEHOP_NORM_WEIGHT_PLUS_ONE

typedef struct matrices {
    oh_matrix x, residual_in, weight, normed, residual_out, quantised, row_scales;
} matrices;

static matrices matrices_of(const onehop_norm *n) {
    const size_t size = onehop_dtype_bytes(n->dtype);
    return (matrices){
        oh_matrix_of("x", n->x, n->rows, n->hidden, n->x_stride, size),
        oh_matrix_of("residual_in", n->residual_in, n->rows, n->hidden, n->residual_in_stride,
                     size),
        oh_matrix_of("weight", n->weight, 1, n->hidden, 0, size),
        oh_matrix_of("normed", n->normed, n->rows, n->hidden, n->normed_stride, size),
        oh_matrix_of("residual_out", n->residual_out, n->rows, n->hidden, n->residual_out_stride,
                     size),
        oh_matrix_of("quantised", n->quantised, n->rows, n->hidden, n->quantised_stride, 1),
        oh_matrix_of("row_scales", n->row_scales, 1, n->rows, 0, sizeof(float))};
}

static onehop_result check_values(const onehop_norm *n) {
    const size_t size = onehop_dtype_bytes(n->dtype);
    if (!size)
        return oh_error(ONEHOP_ERR_DTYPE,
                        NAME ": data type %d is unknown; expected float32 (1), float16 (2) or "
                             "bfloat16 (3)",
                        (int)n->dtype);
    if (n->flags & ~KNOWN_FLAGS)
        return oh_error(ONEHOP_ERR_ARGUMENT, NAME ": flags 0x%x has unknown bits", n->flags);
    if (n->hidden == 0) return oh_error(ONEHOP_ERR_ARGUMENT, NAME ": hidden is 0");
    if (n->hidden > ROW_BYTES / size)
        return oh_error(ONEHOP_ERR_TOO_LARGE, NAME ": hidden is %zu, expected 1..%zu for %s",
                        n->hidden, ROW_BYTES / size, onehop_dtype_name(n->dtype));
    if (n->rows >= MAX_ROWS)
        return oh_error(ONEHOP_ERR_TOO_LARGE, NAME ": %zu rows, expected fewer than 2^31", n->rows);
    if (!(n->eps >= 0.0f) || isinf(n->eps))
        return oh_error(ONEHOP_ERR_ARGUMENT, NAME ": eps is %g, expected a finite value >= 0",
                        (double)n->eps);
    if (n->quantised && !n->row_scales && (!(n->scale > 0.0f) || isinf(n->scale)))
        return oh_error(ONEHOP_ERR_ARGUMENT,
                        NAME ": scale is %g, expected a finite value > 0, or row_scales to be "
                             "computed",
                        (double)n->scale);
    return ONEHOP_OK;
}

static onehop_result check_memory(const onehop_norm *n, const matrices *m) {
    const oh_matrix *const in[] = {&m->x, &m->residual_in, &m->weight};
    const oh_matrix *const out[] = {&m->normed, &m->residual_out, &m->quantised, &m->row_scales};
    onehop_result result = ONEHOP_OK;
    if (!n->x || !n->weight)
        return oh_error(ONEHOP_ERR_NULL, NAME ": %s is NULL", n->x ? "weight" : "x");
    if (!n->normed && !n->quantised)
        return oh_error(ONEHOP_ERR_NULL, NAME ": normed and quantised are NULL");
    if (n->row_scales && !n->quantised)
        return oh_error(ONEHOP_ERR_NULL, NAME ": row_scales is given, but quantised is NULL");
    for (int i = 0; i < 3 && !result; i++) result = oh_matrix_check(NAME, in[i]);
    for (int o = 0; o < 4 && !result; o++) result = oh_matrix_check(NAME, out[o]);
    for (int o = 0; o < 4 && !result; o++) {
        /* Of a size: x, residual_in; normed, residual_out. */
        for (int i = 0; i < 3 && !result; i++)
            result = oh_matrix_check_apart(NAME, out[o], in[i], i < 2 && o < 2);
        for (int p = 0; p < o && !result; p++)
            result = oh_matrix_check_apart(NAME, out[o], out[p], false);
    }
    return result;
}

/* 16 bytes at once if all rows allow it. */
static uint32_t whole_units(const matrices *m) {
    const size_t bytes = m->x.width, packed = 16 / m->x.element;
    const oh_matrix *const all[] = {&m->x, &m->residual_in, &m->weight, &m->normed,
                                    &m->residual_out};
    for (int i = 0; i < 5; i++)
        if (!oh_matrix_is_aligned(all[i], 16)) return 0;
    return oh_matrix_is_aligned(&m->quantised, packed) ? (uint32_t)(bytes / OH_UNIT_BYTES) : 0;
}

/* ---- the call -------------------------------------------------------------------------------- */

static void fill(const onehop_comm *comm, const onehop_norm *n, const matrices *m,
                 oh_norm_args *out) {
    memset(out, 0, sizeof *out);
    out->call = comm->args;
    out->call.in = m->x.at;
    out->call.out = m->normed.at;
    out->call.count = n->rows * n->hidden;
    out->call.units = (uint32_t)((m->x.width + OH_UNIT_BYTES - 1) / OH_UNIT_BYTES);
    out->call.whole = whole_units(m);
    out->residual_in = m->residual_in.at;
    out->weight = m->weight.at;
    out->residual_out = m->residual_out.at;
    out->quantised = m->quantised.at;
    out->row_scales = m->row_scales.at;
    out->in_stride = m->x.stride;
    out->residual_in_stride = m->residual_in.stride;
    out->out_stride = m->normed.stride;
    out->residual_out_stride = m->residual_out.stride;
    out->quantised_stride = m->quantised.stride;
    out->rows = (uint32_t)n->rows;
    out->row_bytes = (uint32_t)m->x.width;
    out->lanes = oh_lanes_of(out->call.units);
    out->plus_one = n->flags & ONEHOP_NORM_WEIGHT_PLUS_ONE;
    out->eps = n->eps;
    out->inverse_hidden = 1.0f / (float)n->hidden;
    out->scale = n->scale;
}

static uint64_t identity_of(const onehop_norm *n) {
    uint32_t eps;
    memcpy(&eps, &n->eps, sizeof eps);
    const uint64_t agreed[] = {OH_NORM, n->rows,  n->hidden,          (uint64_t)n->dtype,
                               eps,     n->flags, n->residual_in != 0};
    return oh_hash(0, agreed, sizeof agreed);
}

static onehop_result run(onehop_comm *comm, onehop_context *ctx, const onehop_norm *norm,
                         const onehop_call *call, onehop_stream stream) {
    onehop_norm n;
    onehop_call named;
    oh_norm_args args;
    onehop_result result = oh_config_copy(&n, sizeof n, norm, "onehop_norm");
    if (!result) result = oh_fused_copy_call(NAME, call, &named);
    if (!result) result = check_values(&n);
    if (result || n.rows == 0) return result;
    const matrices m = matrices_of(&n);
    result = check_memory(&n, &m);
    if (!result) result = oh_fused_check(NAME, comm, ctx);
    if (result) return result;
    fill(comm, &n, &m, &args);
    const oh_fused fused = {{OH_NORM, n.rows, (size_t)args.call.units * OH_UNIT_BYTES, args.lanes},
                            &args.call,
                            sizeof args,
                            &args.chunk_rows,
                            identity_of(&n)};
    return oh_fused_run(comm, ctx, &fused, n.dtype, &named, stream);
}

onehop_result onehop_all_reduce_norm(onehop_context *context, const onehop_norm *norm,
                                     const onehop_call *call, onehop_stream stream) {
    if (!context) return oh_error(ONEHOP_ERR_NULL, "onehop_all_reduce_norm: context is NULL");
    return run(context->comm, context, norm, call, stream);
}

onehop_result onehop_comm_all_reduce_norm(onehop_comm *comm, const onehop_norm *norm,
                                          const onehop_call *call, onehop_stream stream) {
    if (!comm) return oh_error(ONEHOP_ERR_NULL, "onehop_comm_all_reduce_norm: comm is NULL");
    return run(comm, NULL, norm, call, stream);
}
