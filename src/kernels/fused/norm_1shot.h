/* All-reduce, residual add and RMSNorm in one launch, one hop: every rank pushes its rows whole, as
 * in push_1shot.h, and each works out all rows.
 *
 * Row i of a chunk belongs to block i mod (G - 1) on every rank, unit u of a row to lane u mod L:
 * so a place in a slot belongs to the same thread on all ranks and in all chunks, and all that
 * push_1shot.h says of reuse holds here. A block pushes its next row of a chunk before it finishes
 * one, so that the link is busy meanwhile; on a host all of them. What it waits for the same block
 * of a peer pushes before it finishes any row but earlier ones.
 *
 *   bytes sent per rank        (W-1) S
 *   hops on the critical path  1, and two barriers of a block for each row
 *
 * In place: x, residual_in and the outputs may be the same rows. Each position is loaded and stored
 * by one thread, which has loaded (and pushed) x before it stores there.
 *
 * A call of few rows lasts as long as its instructions take, and as long as they take to be
 * fetched. So the usual case has a path of its own (oh_norm_fast): a specialised kernel, one chunk
 * of whole units, two a lane at most, nothing quantised. It loads x, weight and residual together
 * with the sequence number, keeps the weight, calls no function but where a wait is long, and needs
 * no barrier at its end: the one in the last row's tree tells that all threads have had their last
 * poll. */
#ifndef OH_NORM_1SHOT_H
#define OH_NORM_1SHOT_H

#include "kernels/fused/norm.h"

/* ---- the fast path: `each` units of a lane at most ------------------------------------------- */

/* How the path is cut, all constants: units of a lane at most, and how many of them are waited for
 * together. Two units of more sources than one and all else do not fit in registers. */
typedef struct oh_norm_shape {
    oh_u32 dtype, world, each, together;
} oh_norm_shape;

/* The lanes' units of a row that begins at `row`. */
OH_FN void oh_norm_load(const oh_norm_args *n, oh_grid g, oh_u64 row, oh_unit *v, oh_u32 each) {
    oh_u32 lane, i;
    OH_LANES(lane, g, n->lanes) {
        OH_UNROLL
        for (i = 0; i < each; i++) {
            const oh_u32 u = lane + i * n->lanes;
            if (u < n->call.units)
                v[OH_KEPT(lane, i, n->lanes)] = oh_ld_unit(row + (oh_u64)u * OH_UNIT_BYTES);
        }
    }
}

/* The same to all peers; `units` is 0 in a thread that has given up. */
OH_FN void oh_norm_push(const oh_norm_args *n, oh_grid g, oh_u64 place, const oh_unit *v,
                        oh_u32 units, oh_norm_shape s) {
    oh_u32 lane, i;
    OH_LANES(lane, g, n->lanes) {
        OH_UNROLL
        for (i = 0; i < s.each; i++) {
            const oh_u32 u = lane + i * n->lanes;
            if (u < units)
                oh_push_unit(&n->call, place + (oh_u64)u * OH_UNIT_BYTES,
                             v[OH_KEPT(lane, i, n->lanes)], s.dtype, s.world);
        }
    }
}

OH_FN void oh_norm_all_factors(const oh_norm_args *n, oh_grid g, const oh_unit *weight,
                               oh_sum *factors, oh_u32 dtype, oh_u32 each) {
    oh_u32 lane, i;
    OH_LANES(lane, g, n->lanes) {
        OH_UNROLL
        for (i = 0; i < each; i++) {
            const oh_u32 k = OH_KEPT(lane, i, n->lanes);
            factors[k] =
                oh_sum_here(oh_norm_factors(oh_unit_here(weight[k]), n->plus_one, dtype), dtype);
        }
    }
}

/* Out of the way of the fast path, which has no register for an oh_waiter. */
OH_SLOW_FN oh_i32 oh_norm_await_long(const oh_args *a, oh_u64 at, oh_u32 sequence,
                                     oh_i32 looks_at_host) {
    oh_waiter w;
    w.sequence = sequence;
    w.what = OH_WAIT_FOR(OH_SITE_PUSH_1SHOT, 0, looks_at_host);
    return oh_await_sources(a, at, w);
}

/* What a block has of its rows: one at which it works, and the next one. */
typedef struct oh_norm_rows {
    oh_unit own[OH_KEPT_ROOM(2)], next[OH_KEPT_ROOM(2)], residual[OH_KEPT_ROOM(2)];
    oh_unit r[OH_KEPT_ROOM(2)], weight[OH_KEPT_ROOM(2)];
    oh_sum factors[OH_KEPT_ROOM(2)];
    oh_u64 in, out, residual_in, residual_out; /* of the row; `in` of the next one */
    oh_u64 place, step;                        /* in the slots, and from row to row */
    oh_u32 row, stride, units;                 /* units 0: the thread has given up */
    float squares;                             /* of a lane's units of the row */
    oh_call_state c;
} oh_norm_rows;

/* Loads the first row with the sequence number, pushes it, and loads the second. */
OH_FN void oh_norm_fast_begin(const oh_norm_args *n, oh_grid g, oh_norm_rows *k, oh_norm_shape s) {
    const oh_args *a = &n->call;
    oh_u32 lane, i;
    k->row = g.block;
    k->stride = g.blocks - 1;
    k->units = a->units;
    k->step = (oh_u64)k->stride * a->units * OH_UNIT_BYTES;
    k->in = a->in + g.block * n->in_stride;
    k->out = a->out + g.block * n->out_stride;
    k->residual_in = n->residual_in + g.block * n->residual_in_stride;
    k->residual_out = n->residual_out + g.block * n->residual_out_stride;
    oh_norm_load(n, g, k->in, k->own, s.each);
    k->c = oh_call_begin(oh_sequence_word(a, g.block));
    /* To add -0 changes nothing: no residual needs no code of its own. */
    OH_LANES(lane, g, n->lanes) {
        OH_UNROLL
        for (i = 0; i < s.each; i++)
            k->residual[OH_KEPT(lane, i, n->lanes)] = oh_unit_minus_zero(s.dtype);
    }
    if (n->residual_in) oh_norm_load(n, g, k->residual_in, k->residual, s.each);
    oh_norm_load(n, g, n->weight, k->weight, s.each);
    if (k->c.dead) k->units = 0;
    k->place = oh_push_place(a, k->c.parity, 0) + (oh_u64)k->row * a->units * OH_UNIT_BYTES;
    oh_norm_push(n, g, k->place, k->own, k->units, s);
    if (a->early_trigger) oh_pdl_trigger();
    k->in += k->stride * n->in_stride;
    if (k->row + k->stride < n->rows) oh_norm_load(n, g, k->in, k->next, s.each);
    if (s.each == 1) oh_norm_all_factors(n, g, k->weight, k->factors, s.dtype, s.each);
}

/* Waits for a lane's unit `first` of all sources and, if two are waited for together, for its next
 * one: all are looked at together, so that their loads are in flight together. 0: the communicator
 * died. */
OH_FN oh_i32 oh_norm_await_units(const oh_norm_args *n, oh_grid g, const oh_norm_rows *k,
                                 oh_u32 first, oh_unit v[][OH_MAX_RANKS], oh_norm_shape s) {
    const oh_args *a = &n->call;
    const oh_u64 apart = (oh_u64)n->lanes * OH_UNIT_BYTES;
    const oh_u64 at = k->place + (oh_u64)first * OH_UNIT_BYTES;
    const oh_u32 two = s.together == 2 && first + n->lanes < k->units;
    oh_u32 looks, missing, j;
    for (;;) {
        OH_NO_UNROLL
        for (looks = 0; looks < OH_POLLS; looks++) {
            missing = 0;
            OH_UNROLL
            for (j = 0; j + 1 < s.world; j++) {
                v[0][j] = oh_ld_relaxed_sys_unit(a->peers[j].from + at);
                if (two) v[1][j] = oh_ld_relaxed_sys_unit(a->peers[j].from + at + apart);
            }
            OH_UNROLL
            for (j = 0; j + 1 < s.world; j++)
                missing |= !oh_unit_arrived(v[0][j]) | (two && !oh_unit_arrived(v[1][j]));
            if (!missing) return 1;
        }
        if (!oh_norm_await_long(a, at, k->c.sequence, g.thread == 0) ||
            (two && !oh_norm_await_long(a, at + apart, k->c.sequence, g.thread == 0)))
            return 0;
    }
}

/* Waits for the lane's units of all sources and makes r of them, from unit i of the lane on as many
 * as are waited for together. Adds their squares to the lane's. */
OH_FN void oh_norm_fast_sum(const oh_norm_args *n, oh_grid g, oh_norm_rows *k, oh_u32 lane,
                            oh_u32 i, oh_norm_shape s) {
    const oh_args *a = &n->call;
    const oh_u64 apart = (oh_u64)n->lanes * OH_UNIT_BYTES;
    const oh_u32 first = lane + i * n->lanes;
    const oh_u64 at = k->place + (oh_u64)first * OH_UNIT_BYTES;
    oh_unit v[2][OH_MAX_RANKS];
    oh_u32 j;
    /* Where registers allow it before the wait. */
    oh_sum mine = oh_sum_of(k->own[OH_KEPT(lane, i, n->lanes)], s.dtype);
    oh_sum plus = oh_sum_of(k->residual[OH_KEPT(lane, i, n->lanes)], s.dtype);
    if (s.each == 1) {
        mine = oh_sum_here(mine, s.dtype);
        plus = oh_sum_here(plus, s.dtype);
    }
    if (first < k->units && !oh_norm_await_units(n, g, k, first, v, s)) k->units = 0;
    OH_UNROLL
    for (j = 0; j < s.together; j++) {
        const oh_u32 kept = OH_KEPT(lane, i + j, n->lanes);
        const oh_u64 u = first + j * n->lanes;
        oh_sum sum;
        if (s.each == 2) plus = oh_sum_of(k->residual[kept], s.dtype);
        sum = s.each == 1 && s.world == 2 ? oh_sum_add(mine, v[j][0], s.dtype)
                                          : oh_add_sources(a, v[j], k->own[kept], s.dtype, s.world);
        k->r[kept] = oh_sum_rounded(oh_sums_added(sum, plus, s.dtype), s.dtype);
        if (u >= k->units) continue;
        k->squares += oh_unit_squares(k->r[kept], s.dtype);
        oh_rearm(a, at + j * apart, s.world);
        if (n->residual_out) oh_st_unit(k->residual_out + u * OH_UNIT_BYTES, k->r[kept]);
    }
}

/* The next row, which has been pushed, becomes the block's own; the one after it is loaded. */
OH_FN void oh_norm_fast_load(const oh_norm_args *n, oh_grid g, oh_norm_rows *k, oh_norm_shape s) {
    oh_u32 lane, i;
    OH_LANES(lane, g, n->lanes) {
        OH_UNROLL
        for (i = 0; i < s.each; i++)
            k->own[OH_KEPT(lane, i, n->lanes)] = k->next[OH_KEPT(lane, i, n->lanes)];
    }
    k->residual_in += k->stride * n->residual_in_stride;
    k->in += k->stride * n->in_stride;
    if (n->residual_in) oh_norm_load(n, g, k->residual_in, k->residual, s.each);
    if (k->row + 2 * k->stride < n->rows) oh_norm_load(n, g, k->in, k->next, s.each);
}

OH_FN void oh_norm_fast_store(const oh_norm_args *n, oh_grid g, const oh_norm_rows *k,
                              float inverse, oh_norm_shape s) {
    oh_u32 lane, i;
    OH_LANES(lane, g, n->lanes) {
        OH_UNROLL
        for (i = 0; i < s.each; i++) {
            const oh_u32 u = lane + i * n->lanes, kept = OH_KEPT(lane, i, n->lanes);
            const oh_sum y = oh_norm_values(k->r[kept], k->factors[kept], inverse, s.dtype);
            if (u < k->units)
                oh_st_unit(k->out + (oh_u64)u * OH_UNIT_BYTES, oh_sum_rounded(y, s.dtype));
        }
    }
}

/* All rows of a block that has some. */
OH_FN void oh_norm_fast(const oh_norm_args *n, oh_grid g, oh_norm_shape s) {
    const oh_args *a = &n->call;
    oh_norm_rows k;
    float squares[OH_KEPT_ROOM(1)], inverse;
    oh_u32 turn = 0, lane, i;
    oh_norm_fast_begin(n, g, &k, s);
    OH_NO_UNROLL
    for (;;) {
        const oh_u32 more = k.row + k.stride < n->rows;
        /* The link is busy with the next row while this one is heard. */
        if (more) oh_norm_push(n, g, k.place + k.step, k.next, k.units, s);
        OH_LANES(lane, g, n->lanes) {
            k.squares = 0.0f;
            OH_UNROLL
            for (i = 0; i < s.each; i += s.together) oh_norm_fast_sum(n, g, &k, lane, i, s);
            squares[OH_KEPT(lane, 0, n->lanes)] = k.squares;
        }
        if (more) oh_norm_fast_load(n, g, &k, s);
        if (s.each == 2) oh_norm_all_factors(n, g, k.weight, k.factors, s.dtype, s.each);
        inverse = oh_norm_inverse(n, oh_block_sum(squares, n->lanes, turn++));
        if (!more && !a->early_trigger) oh_pdl_trigger();
        oh_norm_fast_store(n, g, &k, inverse, s);
        if (!more) break;
        k.row += k.stride;
        k.place += k.step;
        k.out += k.stride * n->out_stride;
        k.residual_out += k.stride * n->residual_out_stride;
    }
    oh_call_leave(a, g, k.c);
}

/* ---- any case -------------------------------------------------------------------------------- */

OH_FN void oh_norm_push_row(const oh_norm_args *n, oh_grid g, oh_u32 row, oh_u64 place,
                            oh_stamp k) {
    const oh_args *a = &n->call;
    const oh_u64 in = a->in + row * n->in_stride;
    oh_u32 lane, i;
    OH_LANES(lane, g, n->lanes) {
        oh_unit v[OH_NORM_UNITS];
        OH_UNROLL
        for (i = 0; i < OH_NORM_UNITS; i++) {
            const oh_u32 u = lane + i * n->lanes;
            v[i] = oh_unit_armed();
            if (u < a->units) v[i] = oh_row_load(n, in, u, k.dtype);
        }
        OH_UNROLL
        for (i = 0; i < OH_NORM_UNITS; i++) {
            const oh_u32 u = lane + i * n->lanes;
            if (u < a->units)
                oh_push_unit(a, place + (oh_u64)u * OH_UNIT_BYTES, v[i], k.dtype,
                             k.world ? k.world : a->world);
        }
    }
}

OH_FN void oh_norm_general(const oh_norm_args *n, oh_grid g, oh_stamp k) {
    const oh_args *a = &n->call;
    const oh_u64 row_room = (oh_u64)a->units * OH_UNIT_BYTES;
    OH_KEEP(oh_unit, r, OH_NORM_UNITS, a, OH_PLACE_ROW);
    const oh_u32 stride = g.blocks - 1;
    oh_norm_turn t = {0, 0, 1, 0.0f};
    oh_norm_place p;
    oh_u32 chunk, row, pushed;
    oh_call_state c = oh_call_begin(oh_sequence_word(a, g.block));
    p.wait = oh_waiter_of(c, g, OH_SITE_PUSH_1SHOT);
    OH_NO_UNROLL
    for (chunk = 0; chunk < a->chunks; chunk++) {
        const oh_u32 first = chunk * n->chunk_rows;
        const oh_u32 rows = oh_rows_of_chunk(n->rows, n->chunk_rows, chunk);
        const oh_u64 place = oh_push_place(a, c.parity, chunk);
        if (chunk) oh_fence_acq_rel_sys();
        pushed = g.block;
        OH_NO_UNROLL
        for (row = g.block; row < rows; row += stride) {
            OH_NO_UNROLL
            for (; pushed < rows && (OH_PUSH_WHOLE_CHUNK || pushed <= row + stride) && !c.dead;
                 pushed += stride)
                oh_norm_push_row(n, g, first + pushed, place + pushed * row_room, k);
            if (a->early_trigger) oh_pdl_trigger();
            p.row = t.row = first + row;
            p.at = place + row * row_room;
            c.dead = oh_norm_collect(n, g, c.dead, p, r, k);
            t.alive = !c.dead;
            oh_norm_row(n, g, t, r, k.dtype);
            t.turn++;
        }
    }
    oh_call_end(a, g, c);
}

/* The kernel. `world` 0: any number of ranks. The last block carries the signature. All threads of
 * a block take one way, so each may have an end of its own. */
OH_FN void oh_norm_1shot(const oh_norm_args *n, oh_grid g, oh_u32 dtype, oh_u32 world) {
    const oh_args *a = &n->call;
    /* Units of a lane for which there are registers. */
    const oh_u32 max = world <= 4 && dtype == OH_BF16 ? 2 : 1;
    const oh_stamp stamp = {dtype, world};
    const oh_norm_shape one = {dtype, world, 1, 1}, two = {dtype, world, 2, world > 2 ? 1u : 2u};
    const oh_u32 fast = !OH_PUSH_WHOLE_CHUNK && world && a->chunks == 1 && a->whole == a->units &&
                        a->units <= max * n->lanes && !n->quantised && g.block < n->rows;
    if (g.block + 1 < g.blocks && g.block < n->rows && g.thread < a->whole) {
        oh_prefetch(a->in + g.block * n->in_stride + (oh_u64)g.thread * OH_UNIT_BYTES);
        oh_prefetch(n->weight + (oh_u64)g.thread * OH_UNIT_BYTES);
        oh_prefetch(
            (n->residual_in ? n->residual_in + g.block * n->residual_in_stride : n->weight) +
            (oh_u64)g.thread * OH_UNIT_BYTES);
    }
    if (oh_call_enter(a, g)) return;
    if (OH_UNLIKELY(!fast))
        oh_norm_general(n, g, stamp);
    else if (max == 1 || a->units <= n->lanes)
        oh_norm_fast(n, g, one);
    else
        oh_norm_fast(n, g, two);
}

#endif
