/* What kernels of fused operations are given: oh_args and more. As args.h, for every compiler. */
#ifndef OH_FUSED_ARGS_H
#define OH_FUSED_ARGS_H

#include "protocol/args.h"

/* Most units of a lane: a row has at most OH_MAX_LANES times as many, 32 KiB. */
#define OH_NORM_UNITS 4u

/* Host device: places of what lanes keep (OH_KEEP), of a row's units, of one float a lane, and in
 * all. */
#define OH_PLACE_ROW     0u
#define OH_PLACE_WEIGHT  32768u
#define OH_PLACE_SQUARES 65536u
#define OH_PLACE_MAX     67584u
#define OH_SCRATCH_BYTES 69632u

/* The largest value of e4m3, and the least scale of a row. */
#define OH_E4M3_MAX      448.0f
#define OH_MIN_ROW_SCALE 1.17549435e-38f

/* 0 in place of an address: not given, or not wanted. */
typedef struct oh_norm_args {
    /* in: x; out: normed; units: of a row; whole: those of a row that are loaded and stored 16
     * bytes at once; chunk_bytes: of a sub-slot. */
    oh_args call;
    /* What the fast path reads comes first. Strides: bytes from row to row. */
    oh_u64 residual_in, weight, residual_out;
    oh_u64 in_stride, residual_in_stride, out_stride, residual_out_stride;
    oh_u64 quantised;
    oh_u32 rows, lanes;
    float eps, inverse_hidden;
    oh_u32 plus_one;   /* w = weight + 1 */
    oh_u32 chunk_rows; /* of a whole chunk */
    oh_u64 row_scales, quantised_stride;
    oh_u32 row_bytes;
    float scale;
} oh_norm_args;

OH_STATIC_ASSERT(sizeof(oh_norm_args) == 712, norm_args);

/* The norm of rows of q and k that are spread over the ranks. A lane's units are those of a row of
 * q and, after them, of k. */
typedef struct oh_qknorm_args {
    oh_args call; /* in: q; out: k; units: of both rows; chunk_bytes: of a sub-slot */
    oh_u64 q_weight, k_weight;
    oh_u64 q_stride, k_stride; /* bytes from row to row */
    oh_u32 tokens, chunk_tokens;
    oh_u32 q_units, q_whole, k_whole; /* whole: loaded and stored 16 bytes at once */
    oh_u32 q_bytes, k_bytes;          /* of a row */
    oh_u32 lanes;
    oh_u32 plus_one; /* w = weight + 1 */
    float eps, inverse_q, inverse_k;
} oh_qknorm_args;

OH_STATIC_ASSERT(sizeof(oh_qknorm_args) == 680, qknorm_args);

#endif
