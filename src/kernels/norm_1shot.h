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

#include "kernels/norm.h"

/* ---- the fast path: `each` units of a lane at most ------------------------------------------- */

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
                        oh_u32 units, oh_u32 dtype, oh_u32 world, oh_u32 each) {
    oh_u32 lane, i;
    OH_LANES(lane, g, n->lanes) {
        OH_UNROLL
        for (i = 0; i < each; i++) {
            const oh_u32 u = lane + i * n->lanes;
            if (u < units)
                oh_push_unit(&n->call, place + (oh_u64)u * OH_UNIT_BYTES,
                             v[OH_KEPT(lane, i, n->lanes)], dtype, world);
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

/* Waits for a unit of all sources, however long. 0: the communicator died. */
OH_SLOW_FN oh_i32 oh_norm_await_long(const oh_args *a, oh_u64 at, oh_u32 sequence,
                                     oh_i32 looks_at_host) {
    oh_u32 j;
    for (j = 0; j + 1 < a->world; j++)
        if (!oh_poll_unit(a, a->peers[j].from + at,
                          OH_WAIT_FOR(OH_SITE_PUSH_1SHOT, oh_other_rank(a, j), looks_at_host),
                          sequence))
            return 0;
    return 1;
}

/* Waits for all sources' units at `at` and, `apart` bytes on, at the second place, if there are
 * two: all are looked at together, so that their loads are in flight together. 0: the communicator
 * died. */
OH_FN oh_i32 oh_norm_await_units(const oh_args *a, oh_u64 at, oh_u64 apart, oh_u32 two,
                                 oh_unit v[][OH_MAX_RANKS], oh_u32 sequence, oh_i32 looks_at_host,
                                 oh_u32 world) {
    oh_u32 looks, missing, j;
    for (;;) {
        OH_NO_UNROLL
        for (looks = 0; looks < OH_POLLS; looks++) {
            missing = 0;
            OH_UNROLL
            for (j = 0; j + 1 < world; j++) {
                v[0][j] = oh_ld_relaxed_sys_unit(a->peers[j].from + at);
                if (two) v[1][j] = oh_ld_relaxed_sys_unit(a->peers[j].from + at + apart);
            }
            OH_UNROLL
            for (j = 0; j + 1 < world; j++)
                missing |= !oh_unit_arrived(v[0][j]) | (two && !oh_unit_arrived(v[1][j]));
            if (!missing) return 1;
        }
        if (!oh_norm_await_long(a, at, sequence, looks_at_host) ||
            (two && !oh_norm_await_long(a, at + apart, sequence, looks_at_host)))
            return 0;
    }
}

/* All rows of a block that has some. */
OH_FN void oh_norm_fast(const oh_norm_args *n, oh_grid g, oh_u32 dtype, oh_u32 world, oh_u32 each) {
    const oh_args *a = &n->call;
    /* Two units of more sources than one and all else do not fit in registers. */
    const oh_u32 together = world > 2 ? 1 : each;
    const oh_u32 stride = g.blocks - 1;
    const oh_u64 apart = (oh_u64)n->lanes * OH_UNIT_BYTES;
    const oh_u64 step = (oh_u64)stride * a->units * OH_UNIT_BYTES;
    oh_unit own[OH_KEPT_ROOM(2)], next[OH_KEPT_ROOM(2)], residual[OH_KEPT_ROOM(2)];
    oh_unit r[OH_KEPT_ROOM(2)], weight[OH_KEPT_ROOM(2)];
    oh_sum factors[OH_KEPT_ROOM(2)];
    oh_u64 in = a->in + g.block * n->in_stride, out = a->out + g.block * n->out_stride;
    oh_u64 residual_in = n->residual_in + g.block * n->residual_in_stride;
    oh_u64 residual_out = n->residual_out + g.block * n->residual_out_stride, place;
    float squares[OH_KEPT_ROOM(1)], inverse;
    oh_u32 row = g.block, units = a->units, turn = 0, lane, i, j;
    oh_call_state c;
    oh_norm_load(n, g, in, own, each);
    c = oh_call_begin(oh_sequence_word(a, g.block));
    /* To add -0 changes nothing: no residual needs no code of its own. */
    OH_LANES(lane, g, n->lanes) {
        OH_UNROLL
        for (i = 0; i < each; i++) residual[OH_KEPT(lane, i, n->lanes)] = oh_unit_minus_zero(dtype);
    }
    if (n->residual_in) oh_norm_load(n, g, residual_in, residual, each);
    oh_norm_load(n, g, n->weight, weight, each);
    if (c.dead) units = 0;
    place = oh_push_place(a, c.parity, 0) + (oh_u64)row * a->units * OH_UNIT_BYTES;
    oh_norm_push(n, g, place, own, units, dtype, world, each);
    if (a->early_trigger) oh_pdl_trigger();
    in += stride * n->in_stride;
    if (row + stride < n->rows) oh_norm_load(n, g, in, next, each);
    if (each == 1) oh_norm_all_factors(n, g, weight, factors, dtype, each);
    OH_NO_UNROLL
    for (;;) {
        const oh_u32 more = row + stride < n->rows;
        if (more) oh_norm_push(n, g, place + step, next, units, dtype, world, each);
        OH_LANES(lane, g, n->lanes) {
            float sum = 0.0f;
            OH_UNROLL
            for (i = 0; i < each; i += together) {
                const oh_u32 first = lane + i * n->lanes;
                const oh_u64 at = place + (oh_u64)first * OH_UNIT_BYTES;
                oh_unit v[2][OH_MAX_RANKS];
                /* Where registers allow it before the wait. */
                oh_sum mine = oh_sum_of(own[OH_KEPT(lane, i, n->lanes)], dtype);
                oh_sum plus = oh_sum_of(residual[OH_KEPT(lane, i, n->lanes)], dtype);
                if (each == 1) {
                    mine = oh_sum_here(mine, dtype);
                    plus = oh_sum_here(plus, dtype);
                }
                if (first < units &&
                    !oh_norm_await_units(a, at, apart, together == 2 && first + n->lanes < units, v,
                                         c.sequence, g.thread == 0, world))
                    units = 0;
                OH_UNROLL
                for (j = 0; j < together; j++) {
                    const oh_u32 k = OH_KEPT(lane, i + j, n->lanes);
                    const oh_u64 u = first + j * n->lanes;
                    oh_sum s;
                    if (each == 2) plus = oh_sum_of(residual[k], dtype);
                    s = each == 1 && world == 2 ? oh_sum_add(mine, v[j][0], dtype)
                                                : oh_add_sources(a, v[j], own[k], dtype, world);
                    r[k] = oh_sum_rounded(oh_sums_added(s, plus, dtype), dtype);
                    if (u >= units) continue;
                    sum += oh_unit_squares(r[k], dtype);
                    oh_rearm(a, at + j * apart, world);
                    if (n->residual_out) oh_st_unit(residual_out + u * OH_UNIT_BYTES, r[k]);
                }
            }
            squares[OH_KEPT(lane, 0, n->lanes)] = sum;
        }
        if (more) {
            OH_LANES(lane, g, n->lanes) {
                OH_UNROLL
                for (i = 0; i < each; i++)
                    own[OH_KEPT(lane, i, n->lanes)] = next[OH_KEPT(lane, i, n->lanes)];
            }
            residual_in += stride * n->residual_in_stride;
            in += stride * n->in_stride;
            if (n->residual_in) oh_norm_load(n, g, residual_in, residual, each);
            if (row + 2 * stride < n->rows) oh_norm_load(n, g, in, next, each);
        }
        if (each == 2) oh_norm_all_factors(n, g, weight, factors, dtype, each);
        inverse = oh_norm_inverse(n, oh_block_sum(squares, n->lanes, turn++));
        if (!more && !a->early_trigger) oh_pdl_trigger();
        OH_LANES(lane, g, n->lanes) {
            OH_UNROLL
            for (i = 0; i < each; i++) {
                const oh_u32 u = lane + i * n->lanes, k = OH_KEPT(lane, i, n->lanes);
                const oh_sum y = oh_norm_values(r[k], factors[k], inverse, dtype);
                if (u < units)
                    oh_st_unit(out + (oh_u64)u * OH_UNIT_BYTES, oh_sum_rounded(y, dtype));
            }
        }
        if (!more) break;
        row += stride;
        place += step;
        out += stride * n->out_stride;
        residual_out += stride * n->residual_out_stride;
    }
    oh_call_leave(a, g, c);
}

/* ---- any case -------------------------------------------------------------------------------- */

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

OH_FN void oh_norm_general(const oh_norm_args *n, oh_grid g, oh_u32 dtype, oh_u32 world) {
    const oh_args *a = &n->call;
    const oh_u64 row_room = (oh_u64)a->units * OH_UNIT_BYTES;
    OH_KEEP(oh_unit, r, OH_NORM_UNITS, a, OH_PLACE_ROW);
    const oh_u32 stride = g.blocks - 1;
    oh_u32 chunk, row, pushed, turn = 0;
    oh_call_state c = oh_call_begin(oh_sequence_word(a, g.block));
    OH_NO_UNROLL
    for (chunk = 0; chunk < a->chunks; chunk++) {
        const oh_u32 first = chunk * n->chunk_rows, left = n->rows - first;
        const oh_u32 rows = left < n->chunk_rows ? left : n->chunk_rows;
        const oh_u64 place = oh_push_place(a, c.parity, chunk);
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

/* The kernel. `world` 0: any number of ranks. The last block carries the signature. All threads of
 * a block take one way, so each may have an end of its own. */
OH_FN void oh_norm_1shot(const oh_norm_args *n, oh_grid g, oh_u32 dtype, oh_u32 world) {
    const oh_args *a = &n->call;
    /* Units of a lane for which there are registers. */
    const oh_u32 max = world <= 4 && dtype == OH_BF16 ? 2 : 1;
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
        oh_norm_general(n, g, dtype, world);
    else if (max == 1 || a->units <= n->lanes)
        oh_norm_fast(n, g, dtype, world, 1);
    else
        oh_norm_fast(n, g, dtype, world, 2);
}

#endif
