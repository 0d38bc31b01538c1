/* All-reduce, residual add and RMSNorm in one launch, one hop: every rank pushes its rows whole, as in
 * push_1shot.h, and each works out all rows.
 *
 * Row i of a chunk belongs to block i mod (G - 1) on every rank, unit u of a row to lane u mod L: so a
 * place in a slot belongs to the same thread on all ranks and in all chunks, and all that push_1shot.h
 * says of reuse holds here. A block pushes its next row of a chunk before it finishes one, so that the
 * link is busy meanwhile; on a host all of them. What it waits for the same block of a peer pushes before
 * it finishes any row but earlier ones.
 *
 *   bytes sent per rank        (W-1) S
 *   hops on the critical path  1, and two barriers of a block for each row
 *
 * In place: x, residual_in and the outputs may be the same rows. Each position is loaded and stored by
 * one thread, which has loaded (and pushed) x before it stores there. */
#ifndef OH_NORM_1SHOT_H
#define OH_NORM_1SHOT_H

#include "kernels/norm.h"

OH_FN void oh_norm_push_row(const oh_norm_args *n, oh_grid g, oh_u32 row, oh_u64 place,
                            oh_u32 dtype, oh_u32 world) {
    const oh_args *a = &n->call;
    const oh_u64 in = a->in + row * n->in_stride;
    oh_u32 lane, i;
    OH_LANES(lane, g, n->lanes) {
        oh_unit v[OH_NORM_UNITS];
        OH_UNROLL
        for (i = 0; i < OH_NORM_UNITS; i++) {
            const oh_u32 u = lane + i * n->lanes;
            v[i] = oh_unit_armed();
            if (u < a->units) v[i] = oh_row_load(n, in, u, dtype);
        }
        OH_UNROLL
        for (i = 0; i < OH_NORM_UNITS; i++) {
            const oh_u32 u = lane + i * n->lanes;
            if (u < a->units)
                oh_push_unit(a, place + (oh_u64)u * OH_UNIT_BYTES, v[i], dtype,
                             world ? world : a->world);
        }
    }
}

/* The kernel. `world` 0: any number of ranks. The last block carries the signature. */
OH_FN void oh_norm_1shot(const oh_norm_args *n, oh_grid g, oh_u32 dtype, oh_u32 world) {
    const oh_args *a = &n->call;
    const oh_u64 row_room = (oh_u64)a->units * OH_UNIT_BYTES;
    oh_unit r[OH_KEPT_ROOM(OH_NORM_UNITS)];
    const oh_u32 stride = g.blocks - 1;
    oh_u32 chunk, row, pushed, turn = 0;
    oh_call_state c;
    if (g.block + 1 < g.blocks && g.block < n->rows && g.thread < a->whole) {
        oh_prefetch(a->in + g.block * n->in_stride + g.thread * OH_UNIT_BYTES);
        oh_prefetch(n->weight + g.thread * OH_UNIT_BYTES);
    }
    if (oh_call_enter(a, g)) return;
    c = oh_call_begin(oh_epoch_word(a, g.block));
    OH_NO_UNROLL
    for (chunk = 0; chunk < a->chunks; chunk++) {
        const oh_u32 first = chunk * n->chunk_rows, left = n->rows - first;
        const oh_u32 rows = left < n->chunk_rows ? left : n->chunk_rows;
        const oh_u64 place = oh_push_place(a, c.phase, chunk);
        if (chunk) oh_fence_acq_rel_sys();
        pushed = g.block;
        OH_NO_UNROLL
        for (row = g.block; row < rows; row += stride) {
            OH_NO_UNROLL
            for (; pushed < rows && (OH_PUSH_WHOLE_CHUNK || pushed <= row + stride) && !c.dead;
                 pushed += stride)
                oh_norm_push_row(n, g, first + pushed, place + pushed * row_room, dtype, world);
            if (a->early_trigger) oh_pdl_trigger();
            c.dead = oh_norm_collect(n, g, c, first + row, place + row * row_room, r,
                                     OH_SITE_PUSH_1SHOT, dtype, world);
            oh_norm_row(n, g, first + row, r, turn++, !c.dead, dtype);
        }
    }
    oh_call_end(a, g, c);
}

#endif
