/* All-reduce, residual add and RMSNorm in one call: checks, choice, launch. */
#include "ops/fused.h"

#include <math.h>
#include <string.h>

#define NAME        "all_reduce_norm"
#define K           ((size_t)1 << 10)
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

/* ---- choice ---------------------------------------------------------------------------------- */

static size_t box_bytes(const onehop_comm *comm) {
    return OH_BOX_BYTES(comm->dispatch.regions.pull_bytes, (size_t)comm->world);
}

/* host_norm, where a row fits half of a mailbox. */
static bool fits_host(const onehop_comm *comm, size_t row_room) {
    return comm->dispatch.kind == ONEHOP_DEVICE_HOST && row_room <= box_bytes(comm) / 2;
}

static void cut_host(const onehop_comm *comm, size_t row_room, oh_norm_args *n,
                     onehop_choice *choice) {
    const size_t box = box_bytes(comm), total = n->rows * row_room;
    const size_t whole = box < 64 * K ? box : 64 * K;
    const size_t half = box / 2 < 64 * K ? box / 2 : 64 * K; /* holds a row: at most 32 KiB */
    n->chunk_rows =
        oh_fused_cut(n->rows, total <= whole ? n->rows : half / row_room, 1, &choice->chunks);
    n->call.chunk_bytes = n->chunk_rows * row_room;
}

/* A message that fits its slot goes whole; else in halves of it. */
static void cut_1shot(const onehop_comm *comm, size_t row_room, oh_norm_args *n,
                      onehop_choice *choice) {
    const size_t slot = comm->dispatch.regions.slot_bytes;
    n->chunk_rows = oh_fused_cut(
        n->rows, n->rows * row_room <= slot ? n->rows : slot / 2 / row_room, 1, &choice->chunks);
    n->call.chunk_bytes = n->chunk_rows * row_room;
}

/* A message whose shards fit half a slot each goes whole; else they take a quarter at most. */
static void cut_2shot(const onehop_comm *comm, size_t row_room, oh_norm_args *n,
                      onehop_choice *choice) {
    const size_t slot = comm->dispatch.regions.slot_bytes, world = (size_t)comm->world;
    const size_t shard = (n->rows + world - 1) / world;
    n->chunk_rows = oh_fused_cut(
        n->rows, shard * row_room <= slot / 2 ? shard * world : slot / 4 / row_room * world,
        (uint32_t)comm->world, &choice->chunks);
    n->call.chunk_bytes = n->chunk_rows * row_room;
}

/* Every rank owns a row, and its rows fit. */
static bool fits_2shot(const onehop_comm *comm, size_t row_room, const oh_norm_args *n) {
    const size_t slot = comm->dispatch.regions.slot_bytes, world = (size_t)comm->world;
    const size_t shard = (n->rows + world - 1) / world;
    return n->rows >= world && (shard * row_room <= slot / 2 || row_room <= slot / 4);
}

/* One-shot sends (W-1) S, two-shot 2 S (W-1)/W and one hop later, some 1.2 us, in which a link
 * moves some 400 KB. So two ranks never gain by it. (From the floor of two H200, not measured with
 * more ranks.) */
static bool prefers_2shot(const onehop_comm *comm, size_t bytes) {
    const size_t world = (size_t)comm->world;
    return bytes * (world - 1) * (world - 2) > 400 * K * world;
}

static onehop_algorithm best_algorithm(const onehop_comm *comm, size_t row_room,
                                       const oh_norm_args *n) {
    if (fits_host(comm, row_room)) return ONEHOP_HOST_1SHOT;
    return prefers_2shot(comm, n->rows * row_room) ? ONEHOP_2SHOT_PUSH : ONEHOP_1SHOT_PUSH;
}

static onehop_result choose_algorithm(const onehop_comm *comm, const onehop_call *call,
                                      size_t row_room, const oh_norm_args *n,
                                      onehop_algorithm *out) {
    const size_t slot = comm->dispatch.regions.slot_bytes;
    *out = call->algorithm ? call->algorithm : best_algorithm(comm, row_room, n);
    if (*out == ONEHOP_HOST_1SHOT && fits_host(comm, row_room)) return ONEHOP_OK;
    if (*out == ONEHOP_HOST_1SHOT)
        return oh_error(ONEHOP_ERR_ALGORITHM,
                        NAME ": host_1shot is for the host device, and rows of %zu bytes at most "
                             "here",
                        box_bytes(comm) / 2);
    if (*out != ONEHOP_1SHOT_PUSH && *out != ONEHOP_2SHOT_PUSH)
        return oh_error(ONEHOP_ERR_ALGORITHM,
                        NAME ": there is no %s; expected 1shot_push, 2shot_push, or on the host "
                             "host_1shot",
                        onehop_algorithm_name(call->algorithm));
    if (row_room > slot / 2)
        return oh_error(ONEHOP_ERR_TOO_LARGE,
                        NAME ": a row takes %zu bytes, but push slots of %zu hold rows of %zu; see "
                             "push_bytes",
                        row_room, slot, slot / 2);
    if (!fits_2shot(comm, row_room, n)) *out = ONEHOP_1SHOT_PUSH;
    return ONEHOP_OK;
}

static onehop_result choose(const onehop_comm *comm, const onehop_call *call, oh_norm_args *n,
                            oh_fused_call *f) {
    const size_t row_room = (size_t)n->call.units * OH_UNIT_BYTES, world = (size_t)comm->world;
    onehop_choice *choice = &f->choice;
    onehop_result result = choose_algorithm(comm, call, row_room, n, &choice->algorithm);
    if (result) return result;
    if (choice->algorithm == ONEHOP_HOST_1SHOT) {
        cut_host(comm, row_room, n, choice);
        choice->blocks = choice->threads = 1;
        f->kernel = comm->fused[OH_HOST_NORM][f->dtype];
        return ONEHOP_OK;
    }
    if (choice->algorithm == ONEHOP_2SHOT_PUSH) {
        cut_2shot(comm, row_room, n, choice);
        f->kernel = comm->fused[OH_NORM_2SHOT][f->dtype];
        return oh_fused_grid(NAME, comm, call, (n->chunk_rows + world - 1) / world, n->lanes,
                             choice);
    }
    cut_1shot(comm, row_room, n, choice);
    f->kernel = comm->fused[OH_NORM_1SHOT][f->dtype];
    return oh_fused_grid(NAME, comm, call, n->chunk_rows, n->lanes, choice);
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
    const uint64_t agreed[] = {OH_NORM_1SHOT + 1,  n->rows, n->hidden,
                               (uint64_t)n->dtype, eps,     n->flags,
                               n->residual_in != 0};
    return oh_hash(0, agreed, sizeof agreed);
}

static onehop_result run(onehop_comm *comm, onehop_context *ctx, const onehop_norm *norm,
                         const onehop_call *call, onehop_stream stream) {
    onehop_norm n;
    onehop_call named;
    oh_stream_info info = {0, false, 0};
    oh_norm_args args;
    onehop_result result = oh_config_copy(&n, sizeof n, norm, "onehop_norm");
    if (!result) result = oh_fused_copy_call(NAME, call, &named);
    if (!result) result = check_values(&n);
    if (result || n.rows == 0) return result;
    const matrices m = matrices_of(&n);
    result = check_memory(&n, &m);
    if (!result) result = oh_fused_begin(NAME, comm, ctx, stream, &info);
    if (result) return result;
    fill(comm, &n, &m, &args);
    oh_fused_call f = {&args.call,        sizeof args, -1,     {0},   identity_of(&n),
                       n.rows * n.hidden, n.dtype,     stream, &named};
    result = choose(comm, &named, &args, &f);
    if (result) return result;
    args.call.chunks = f.choice.chunks;
    return oh_fused_run(comm, ctx, &f, &info);
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
