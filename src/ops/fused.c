/* See fused.h. */
#include "ops/fused.h"

#include "ops/ops.h"

#include <string.h>

/* Of GPU-shaped bodies on the host device, as of dispatch.c. */
#define HOST_BLOCKS 3

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

onehop_result oh_fused_begin(const char *operation, onehop_comm *comm, const onehop_context *ctx,
                             onehop_stream stream, oh_stream_info *info_out) {
    if (ctx && !oh_process_is(ctx->process)) return oh_process_refuse("context");
    if (!comm || comm->world == 1)
        return oh_error(ONEHOP_ERR_WORLD_SIZE, "%s: needs a group of 2 ranks at least", operation);
    return oh_op_begin(operation, comm, ctx, stream, info_out);
}

onehop_result oh_fused_run(onehop_comm *comm, onehop_context *ctx, const oh_fused_call *call,
                           const oh_stream_info *info) {
    const bool noted = ctx && ctx->capturing && info->capturing;
    const oh_plan plan = {call->choice, call->kernel, 0};
    oh_request q;
    onehop_result result = ONEHOP_OK;
    memset(&q, 0, sizeof q);
    q.count = call->count;
    q.dtype = call->dtype;
    q.stream = call->stream;
    if (noted) result = oh_capture_prepare(ctx, &plan, info, &q);
    if (!result) result = oh_comm_launch_fused(comm, call, info);
    if (result || !noted) return result;
    oh_capture_note(ctx, &q, &plan);
    ctx->captured[ctx->captured_count - 1].identity = (uint32_t)(call->identity >> 32);
    return ONEHOP_OK;
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

uint32_t oh_fused_cut(size_t rows, size_t max, uint32_t grain, uint32_t *chunks_out) {
    const size_t pieces = (rows + max - 1) / max;
    const size_t piece = oh_round_up((rows + pieces - 1) / pieces, grain);
    *chunks_out = (uint32_t)((rows + piece - 1) / piece);
    return (uint32_t)piece;
}

onehop_result oh_fused_grid(const char *operation, const onehop_comm *comm, const onehop_call *call,
                            size_t rows, uint32_t lanes, onehop_choice *choice) {
    const bool host = comm->dispatch.kind == ONEHOP_DEVICE_HOST;
    const uint32_t max = comm->dispatch.regions.max_blocks, usual = host ? HOST_BLOCKS : max;
    const uint32_t widest = usual < max ? usual : max, threads = host ? 1 : lanes;
    if (call->blocks && (call->blocks < 2 || call->blocks > max))
        return oh_error(ONEHOP_ERR_ALGORITHM, "%s: takes 2..%u blocks here, found %u", operation,
                        max, call->blocks);
    if (call->threads && call->threads != threads)
        return oh_error(ONEHOP_ERR_ALGORITHM,
                        "%s: takes %u threads a block for such rows, found %u", operation, threads,
                        call->threads);
    choice->blocks = call->blocks ? call->blocks : rows + 1 < widest ? (uint32_t)rows + 1 : widest;
    choice->threads = threads;
    return ONEHOP_OK;
}
