/* All-reduce, residual add and RMSNorm in one launch, two hops: rows are dealt to owners, who add
 * them up.
 *
 * Row i of a chunk belongs to rank i mod W, as its i div W-th; slot (parity, s) on rank d has two
 * halves, in the first of which lie the rows that s sends to their owner d, in the second the r of
 * those that s owns. Steps of a block, per chunk, for its q-th rows of every owner, q = b, b + (G -
 * 1), ...:
 *   scatter  own x of owner d's row to d's slot (parity, me), first half; for every other d
 *   reduce   wait for the own row of every source, re-arm, add in rank order, add the residual,
 *            round: r; push r to every
 *            peer's slot (parity, me), second half; then the outputs of the row
 *   gather   wait for r of every other owner's row, re-arm; the outputs of the row
 *
 *   bytes sent per rank        2 S (W-1)/W, as 2shot_push alone: y follows from r on every rank
 *   hops on the critical path  2, and a barrier or two of a block for each row
 *
 * The residual is read by the owner alone. Reuse, between calls and between chunks, is that of
 * push_2shot.h with positions in place of its units: unit u of the q-th row of an owner belongs to
 * the same block and lane on all ranks and in all chunks, and only the last chunk has fewer rows.
 * No sum looks like the sentinel. Nothing is waited for but what the same block of a peer has sent
 * in this pass or the one before.
 *
 * In place: each position is loaded and stored by one thread, which has sent its x of the chunk
 * before it stores any output of it, and loads x and residual of an own row before that row's. */
#ifndef OH_NORM_2SHOT_H
#define OH_NORM_2SHOT_H

#include "kernels/fused/norm.h"

/* One row to one rank: `there` is where, on it. */
OH_FN void oh_norm_scatter_row(const oh_norm_args *n, oh_grid g, oh_u32 row, oh_u64 there,
                               oh_u32 dtype) {
    const oh_u64 in = n->call.in + row * n->in_stride;
    oh_u32 lane, i;
    OH_LANES(lane, g, n->lanes) {
        oh_unit v[OH_NORM_UNITS];
        OH_UNROLL
        for (i = 0; i < OH_NORM_UNITS; i++) {
            const oh_u32 u = lane + i * n->lanes;
            v[i] = oh_unit_armed();
            if (u < n->call.units) v[i] = oh_row_load(n, in, u, dtype);
        }
        OH_UNROLL
        for (i = 0; i < OH_NORM_UNITS; i++) {
            const oh_u32 u = lane + i * n->lanes;
            if (u < n->call.units)
                oh_st_relaxed_sys_unit(there + (oh_u64)u * OH_UNIT_BYTES, oh_sanitise(v[i], dtype));
        }
    }
}

/* The lanes' units of r to every peer, `place` from the begin of a slot. */
OH_FN void oh_norm_push_r(const oh_norm_args *n, oh_grid g, oh_u64 place, const oh_unit *r,
                          oh_u32 world) {
    const oh_args *a = &n->call;
    oh_u32 lane, i, k;
    OH_LANES(lane, g, n->lanes) {
        OH_UNROLL
        for (i = 0; i < OH_NORM_UNITS; i++) {
            const oh_u32 u = lane + i * n->lanes;
            if (u >= a->units) continue;
            OH_UNROLL
            for (k = 0; k + 1 < world; k++)
                oh_st_relaxed_sys_unit(a->peers[k].there + place + (oh_u64)u * OH_UNIT_BYTES,
                                       r[OH_KEPT(lane, i, n->lanes)]);
        }
    }
}

/* Every lane's units of r of an owner's row, which lies in its slot; re-arms them and stores
 * residual_out. Nonzero: the communicator is dead. */
OH_FN oh_u32 oh_norm_gather_row(const oh_norm_args *n, oh_grid g, oh_norm_place p, oh_u32 owner,
                                oh_unit *r, oh_u32 dtype) {
    const oh_u64 residual_out = n->residual_out + p.row * n->residual_out_stride;
    oh_u32 dead = 0;
    oh_u32 lane, i;
    OH_LANES(lane, g, n->lanes) {
        OH_UNROLL
        for (i = 0; i < OH_NORM_UNITS; i++) {
            const oh_u32 u = lane + i * n->lanes, at = OH_KEPT(lane, i, n->lanes);
            const oh_u64 from = p.at + (oh_u64)u * OH_UNIT_BYTES;
            if (u >= n->call.units || dead) continue;
            r[at] = oh_ld_relaxed_sys_unit(from);
            if (!oh_unit_arrived(r[at])) {
                if (!oh_await_unit(&n->call, from, owner, p.wait)) {
                    dead = 1;
                    continue;
                }
                r[at] = oh_ld_relaxed_sys_unit(from);
            }
            oh_st_relaxed_sys_unit(from, oh_unit_armed());
            if (n->residual_out) oh_row_store(n, residual_out, u, r[at], dtype);
        }
    }
    return dead;
}

/* The kernel. `world` 0: any number of ranks. The last block carries the signature. */
OH_FN void oh_norm_2shot(const oh_norm_args *n, oh_grid g, oh_u32 dtype, oh_u32 world) {
    const oh_args *a = &n->call;
    const oh_u64 row_room = (oh_u64)a->units * OH_UNIT_BYTES;
    const oh_u32 ranks = world ? world : a->world, stride = g.blocks - 1;
    OH_KEEP(oh_unit, r, OH_NORM_UNITS, a, OH_PLACE_ROW);
    const oh_stamp stamp = {dtype, world};
    oh_norm_turn t = {0, 0, 1, 0.0f};
    oh_norm_place p;
    oh_u32 chunk, q, k;
    oh_call_state c;
    if (oh_call_enter(a, g)) return;
    c = oh_call_begin(oh_sequence_word(a, g.block));
    OH_NO_UNROLL
    for (chunk = 0; chunk < a->chunks; chunk++) {
        const oh_u32 first = chunk * n->chunk_rows;
        const oh_u32 rows = oh_rows_of_chunk(n->rows, n->chunk_rows, chunk);
        const oh_u64 scatter =
            (c.parity ? a->parity_bytes : 0) + (chunk & 1 ? a->regions.slot_bytes / 4 : 0);
        const oh_u64 gather = scatter + a->regions.slot_bytes / 2;
        if (chunk) oh_fence_acq_rel_sys();
        /* Scatter: each row to its owner. */
        OH_NO_UNROLL
        for (q = g.block; q * ranks < rows && !c.dead; q += stride) {
            OH_NO_UNROLL
            for (k = 0; k + 1 < ranks; k++) {
                const oh_u32 row = q * ranks + oh_next_rank(a, k + 1);
                if (row < rows)
                    oh_norm_scatter_row(n, g, first + row,
                                        a->peers[k].there + scatter + q * row_room, dtype);
            }
        }
        /* Reduce the own rows and send r to all, then gather those of the other owners. */
        OH_NO_UNROLL
        for (k = 0; k < ranks; k++) {
            const oh_u32 owner = k ? oh_other_rank(a, k - 1) : a->rank;
            if (k && a->early_trigger) oh_pdl_trigger();
            OH_NO_UNROLL
            for (q = g.block; q * ranks + owner < rows; q += stride) {
                const oh_u64 at = gather + q * row_room;
                p.row = t.row = first + q * ranks + owner;
                p.wait = oh_waiter_of(c, g, k ? OH_SITE_GATHER : OH_SITE_SCATTER);
                if (k) {
                    p.at = a->peers[k - 1].from + at;
                    if (!c.dead) c.dead = oh_norm_gather_row(n, g, p, owner, r, dtype);
                } else {
                    p.at = scatter + q * row_room;
                    c.dead = oh_norm_collect(n, g, c.dead, p, r, stamp);
                    if (!c.dead) oh_norm_push_r(n, g, at, r, ranks);
                }
                t.alive = !c.dead;
                oh_norm_row(n, g, t, r, dtype);
                t.turn++;
            }
        }
    }
    oh_call_end(a, g, c);
}

#endif
