/* See fused.h. */
#include "call/fused.h"

#include <string.h>

oh_matrix oh_matrix_of(const char *name, const void *at, size_t rows, size_t width, size_t stride,
                       size_t element) {
    if (!stride) stride = width;
    return (oh_matrix){name, (uintptr_t)at, rows, width * element, stride * element, element};
}

onehop_result oh_matrix_check(const char *operation, const oh_matrix *m) {
    if (m->at % m->element)
        return oh_error(ONEHOP_ERR_ALIGNMENT, "%s: %s at %p is not aligned to its %zu-byte element",
                        operation, m->name, (void *)m->at, m->element);
    if (m->at && m->stride < m->width)
        return oh_error(ONEHOP_ERR_ARGUMENT,
                        "%s: rows of %s are %zu elements apart, expected at least their %zu, or 0",
                        operation, m->name, m->stride / m->element, m->width / m->element);
    return ONEHOP_OK;
}

/* Ranges that cross may still be rows between rows, if they are equally far apart. */
static bool crosses(const oh_matrix *a, const oh_matrix *b) {
    const uintptr_t a_end = a->at + (a->rows - 1) * a->stride + a->width;
    const uintptr_t b_end = b->at + (b->rows - 1) * b->stride + b->width;
    if (!a->at || !b->at || a_end <= b->at || b_end <= a->at) return false;
    if (a->stride != b->stride || a->rows == 1) return true;
    const size_t ahead = b->at >= a->at ? (b->at - a->at) % a->stride
                                        : (a->stride - (a->at - b->at) % a->stride) % a->stride;
    return ahead < a->width || ahead + b->width > a->stride;
}

onehop_result oh_matrix_check_apart(const char *operation, const oh_matrix *a, const oh_matrix *b,
                                    bool may_be_equal) {
    const bool equal =
        a->at == b->at && a->width == b->width && (a->stride == b->stride || a->rows == 1);
    if ((may_be_equal && equal) || !crosses(a, b)) return ONEHOP_OK;
    return oh_error(ONEHOP_ERR_OVERLAP, "%s: %s at %p and %s at %p overlap%s", operation, a->name,
                    (void *)a->at, b->name, (void *)b->at,
                    may_be_equal ? " without being equal" : "");
}

bool oh_matrix_is_aligned(const oh_matrix *m, size_t bytes) {
    return m->at % bytes == 0 && (m->rows == 1 || m->stride % bytes == 0);
}

onehop_result oh_fused_check(const char *operation, const onehop_comm *comm,
                             const onehop_context *ctx) {
    if (ctx && !oh_process_is(ctx->process)) return oh_process_refuse("context");
    if (comm && comm->world > 1) return ONEHOP_OK;
    return oh_error(ONEHOP_ERR_WORLD_SIZE, "%s: needs a group of 2 ranks at least", operation);
}

onehop_result oh_fused_copy_call(const char *operation, const onehop_call *call, onehop_call *out) {
    memset(out, 0, sizeof *out);
    if (!call) return ONEHOP_OK;
    onehop_result result = oh_op_check_call(call, out);
    if (!result && (out->source || out->registration))
        result = oh_error(ONEHOP_ERR_ALGORITHM,
                          "%s: source and registration of the call must be 0, found "
                          "%d and %u",
                          operation, (int)out->source, out->registration);
    return result;
}

onehop_result oh_fused_run(onehop_comm *comm, onehop_context *ctx, const oh_fused *fused,
                           onehop_dtype dtype, const onehop_call *named, onehop_stream stream) {
    oh_request q = {.count = fused->args->count,
                    .dtype = dtype,
                    .op = ONEHOP_SUM,
                    .call = named,
                    .stream = stream,
                    .fused = fused};
    return oh_op_run(comm, ctx, &q);
}
