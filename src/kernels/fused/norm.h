/* What the fused norms share: rows dealt to the lanes of a block, the sum of squares, the outputs.
 *
 *   r = round(sum over ranks of x, in fp32 and in rank order, + residual)   is residual_out
 *   y = r * 1/sqrt(mean(r^2) + eps) * w        in fp32, each step rounded to fp32, rounded once
 *
 * The sum over ranks is not rounded by itself. The norm is that of the rounded r, which is what the
 * next layer adds to: whoever has r has all that y depends on, so a two-shot sends r alone.
 *
 * Equal bits. A row is `units` units of 16 bytes; lane l of L has units l, l + L, ..., and L
 * follows from the number of units alone (oh_lanes_of), as does the tree that adds the lanes' sums
 * (oh_block_sum): so the bits of a row depend on neither grid, algorithm nor device.
 *
 * A thread whose wait has failed goes on through the barriers, and neither pushes nor stores. */
#ifndef OH_NORM_H
#define OH_NORM_H

#include "protocol/fused_args.h"
#include "kernels/push/push_1shot.h"

/* Units of a lane that are loaded and polled together; more would spill. Rows to 16 KiB have no
 * others. */
#define OH_NORM_TOGETHER 2u

/* ---- rows in memory -------------------------------------------------------------------------- */
OH_FN oh_unit oh_row_load(const oh_norm_args *n, oh_u64 row, oh_u32 u, oh_u32 dtype) {
    const oh_u64 at = row + (oh_u64)u * OH_UNIT_BYTES;
    if (u < n->call.whole) return oh_ld_unit(at);
    return oh_load_elements(at, n->row_bytes - u * OH_UNIT_BYTES, dtype);
}

OH_FN void oh_row_store(const oh_norm_args *n, oh_u64 row, oh_u32 u, oh_unit v, oh_u32 dtype) {
    const oh_u64 at = row + (oh_u64)u * OH_UNIT_BYTES;
    if (u < n->call.whole)
        oh_st_unit(at, v);
    else
        oh_store_elements(at, n->row_bytes - u * OH_UNIT_BYTES, v, dtype);
}

/* A byte per element: 8 of a unit of 16-bit elements, 4 of one of float32. */
OH_FN void oh_row_store_e4m3(const oh_norm_args *n, oh_u64 row, oh_u32 u, oh_sum y, float scale,
                             oh_u32 dtype) {
    const oh_u32 size = OH_ELEMENT_BYTES(dtype), max = OH_UNIT_BYTES / size;
    const oh_u64 at = row + (oh_u64)u * max;
    const oh_u32 left = n->row_bytes / size - u * max;
    oh_u64 packed = 0;
    oh_u32 i;
    OH_UNROLL
    for (i = 0; i < max; i += 2)
        packed |= (oh_u64)oh_e4m3x2_of_f32(oh_div_f32(y.f[i], scale), oh_div_f32(y.f[i + 1], scale))
                  << 8 * i;
    if (u < n->call.whole && dtype == OH_F32) {
        oh_st_u32(at, (oh_u32)packed);
    } else if (u < n->call.whole) {
        oh_st_u64(at, packed);
    } else {
        OH_NO_UNROLL
        for (i = 0; i < max && i < left; i++) oh_st_u8(at + i, (oh_u8)(packed >> 8 * i));
    }
}

/* ---- the norm of a row ----------------------------------------------------------------------- */
OH_FN float oh_unit_squares(oh_unit v, oh_u32 dtype) {
    const oh_sum s = oh_sum_of(v, dtype);
    const float low = (s.f[0] * s.f[0] + s.f[1] * s.f[1]) + (s.f[2] * s.f[2] + s.f[3] * s.f[3]);
    if (dtype == OH_F32) return low;
    return low + ((s.f[4] * s.f[4] + s.f[5] * s.f[5]) + (s.f[6] * s.f[6] + s.f[7] * s.f[7]));
}

OH_FN float oh_norm_inverse(const oh_norm_args *n, float squares) {
    return oh_reciprocal_f32(oh_sqrt_f32(squares * n->inverse_hidden + n->eps));
}

/* What a unit of values is multiplied by. To add -0 changes nothing. */
OH_FN oh_sum oh_norm_factors(oh_unit weight, oh_u32 plus_one, oh_u32 dtype) {
    const float more = plus_one ? 1.0f : -0.0f;
    oh_sum w = oh_sum_of(weight, dtype);
    oh_u32 i;
    OH_UNROLL
    for (i = 0; i < (dtype == OH_F32 ? 4u : 8u); i++) w.f[i] += more;
    return w;
}

OH_FN oh_sum oh_norm_values(oh_unit r, oh_sum factors, float inverse, oh_u32 dtype) {
    oh_sum y = oh_sum_of(r, dtype);
    oh_u32 i;
    OH_UNROLL
    for (i = 0; i < (dtype == OH_F32 ? 4u : 8u); i++) y.f[i] = y.f[i] * inverse * factors.f[i];
    return y;
}

/* A row that a block has in hand. */
typedef struct oh_norm_turn {
    oh_u32 row, turn; /* `turn` counts the rows of the block */
    oh_u32 alive;     /* 0: the thread has given up, and stores nothing */
    float inverse;    /* 1/sqrt(mean of squares + eps), once it is known */
} oh_norm_turn;

/* The scale of a row of which the lanes hold r and the weight. */
OH_FN float oh_norm_row_scale(const oh_norm_args *n, oh_grid g, const oh_unit *r, const oh_unit *w,
                              oh_norm_turn t, oh_u32 dtype) {
    OH_KEEP(float, max, 1, &n->call, OH_PLACE_MAX);
    float scale;
    oh_u32 lane, i, k;
    OH_LANES(lane, g, n->lanes) {
        float m = 0.0f;
        OH_UNROLL
        for (i = 0; i < OH_NORM_UNITS; i++) {
            const oh_u32 at = OH_KEPT(lane, i, n->lanes);
            if (t.alive && lane + i * n->lanes < n->call.units) {
                const oh_sum y = oh_norm_values(r[at], oh_norm_factors(w[at], n->plus_one, dtype),
                                                t.inverse, dtype);
                OH_UNROLL
                for (k = 0; k < (dtype == OH_F32 ? 4u : 8u); k++)
                    m = oh_max_f32(m, oh_max_f32(y.f[k], -y.f[k]));
            }
        }
        max[OH_KEPT(lane, 0, n->lanes)] = m;
    }
    scale = oh_div_f32(oh_block_max(max, n->lanes, t.turn), OH_E4M3_MAX);
    return oh_max_f32(scale, OH_MIN_ROW_SCALE);
}

/* All that follows from r, of which the lanes hold their units. All threads of the block come here
 * together. */
OH_FN void oh_norm_row(const oh_norm_args *n, oh_grid g, oh_norm_turn t, const oh_unit *r,
                       oh_u32 dtype) {
    OH_KEEP(oh_unit, w, OH_NORM_UNITS, &n->call, OH_PLACE_WEIGHT);
    OH_KEEP(float, squares, 1, &n->call, OH_PLACE_SQUARES);
    float scale = n->scale;
    oh_u32 lane, i;
    /* The lanes' squares, and the weight, which is on its way meanwhile. */
    OH_LANES(lane, g, n->lanes) {
        float sum = 0.0f;
        OH_UNROLL
        for (i = 0; i < OH_NORM_UNITS; i++) {
            const oh_u32 u = lane + i * n->lanes, at = OH_KEPT(lane, i, n->lanes);
            if (t.alive && u < n->call.units) {
                w[at] = oh_row_load(n, n->weight, u, dtype);
                sum += oh_unit_squares(r[at], dtype);
            }
        }
        squares[OH_KEPT(lane, 0, n->lanes)] = sum;
    }
    t.inverse = oh_norm_inverse(n, oh_block_sum(squares, n->lanes, t.turn));
    if (n->row_scales) {
        scale = oh_norm_row_scale(n, g, r, w, t, dtype);
        if (g.thread == 0 && t.alive)
            oh_st_u32(n->row_scales + 4ull * t.row, oh_bits_of_f32(scale));
    }
    /* The outputs, of registers alone. */
    OH_LANES(lane, g, n->lanes) {
        OH_UNROLL
        for (i = 0; i < OH_NORM_UNITS; i++) {
            const oh_u32 u = lane + i * n->lanes, at = OH_KEPT(lane, i, n->lanes);
            if (t.alive && u < n->call.units) {
                const oh_sum y = oh_norm_values(r[at], oh_norm_factors(w[at], n->plus_one, dtype),
                                                t.inverse, dtype);
                if (n->call.out)
                    oh_row_store(n, n->call.out + t.row * n->out_stride, u,
                                 oh_sum_rounded(y, dtype), dtype);
                if (n->quantised)
                    oh_row_store_e4m3(n, n->quantised + t.row * n->quantised_stride, u, y, scale,
                                      dtype);
            }
        }
    }
}

/* ---- r of a row that lies in the slots ------------------------------------------------------- */

/* A row in the slots: the other ranks' units lie from `at` on. */
typedef struct oh_norm_place {
    oh_u32 row;
    oh_u64 at;
    oh_waiter wait;
} oh_norm_place;

/* Rows of a chunk, the first of which is chunk * n->chunk_rows. */
OH_FN oh_u32 oh_rows_of_chunk(oh_u32 rows, oh_u32 chunk_rows, oh_u32 chunk) {
    const oh_u32 left = rows - chunk * chunk_rows;
    return left < chunk_rows ? left : chunk_rows;
}

/* Waits for one unit of all sources; with `world` they are in v then. 0: the communicator died. */
OH_FN oh_i32 oh_norm_await(const oh_args *a, oh_u64 at, oh_unit *v, oh_waiter w, oh_u32 world) {
    if (world && OH_LIKELY(oh_look_long(a, at, v, world))) return 1;
    if (!oh_await_sources(a, at, w)) return 0;
    if (world) oh_look(a, at, v, world);
    return 1;
}

/* Looks at a lane's first units of the one source at once, so that their loads are in flight
 * together, until all are there or it has looked long enough. Nonzero: they are in v. */
OH_FN oh_u32 oh_norm_look_at_first(const oh_norm_args *n, oh_u32 lane, oh_u64 from, oh_unit *v) {
    oh_u32 i, looks, there;
    OH_NO_UNROLL
    for (looks = 0; looks < OH_POLLS; looks++) {
        there = 1;
        OH_UNROLL
        for (i = 0; i < OH_NORM_TOGETHER; i++) {
            const oh_u32 u = lane + i * n->lanes;
            if (u < n->call.units) v[i] = oh_ld_relaxed_sys_unit(from + (oh_u64)u * OH_UNIT_BYTES);
        }
        OH_UNROLL
        for (i = 0; i < OH_NORM_TOGETHER; i++)
            if (lane + i * n->lanes < n->call.units && !oh_unit_arrived(v[i])) there = 0;
        if (there) return 1;
    }
    return 0;
}

/* Every lane's units of r of a row; re-arms what it has read and stores residual_out. The first own
 * values and residuals are on their way while it waits. Nonzero: the communicator is dead. */
OH_FN oh_u32 oh_norm_collect(const oh_norm_args *n, oh_grid g, oh_u32 dead, oh_norm_place p,
                             oh_unit *r, oh_stamp stamp) {
    const oh_args *a = &n->call;
    const oh_u32 dtype = stamp.dtype, world = stamp.world, row = p.row;
    const oh_u64 in = a->in + row * n->in_stride,
                 residual_in = n->residual_in + row * n->residual_in_stride,
                 residual_out = n->residual_out + row * n->residual_out_stride;
    oh_u32 lane, i;
    OH_LANES(lane, g, n->lanes) {
        oh_unit first[OH_NORM_TOGETHER], residuals[OH_NORM_TOGETHER], theirs[OH_NORM_TOGETHER];
        oh_u32 there = 0;
        OH_UNROLL
        for (i = 0; i < OH_NORM_TOGETHER; i++) {
            const oh_u32 u = lane + i * n->lanes;
            first[i] = residuals[i] = theirs[i] = oh_unit_armed();
            if (u < a->units) {
                first[i] = oh_row_load(n, in, u, dtype);
                if (n->residual_in) residuals[i] = oh_row_load(n, residual_in, u, dtype);
            }
        }
        if (world == 2 && !dead)
            there = oh_norm_look_at_first(n, lane, a->peers[0].from + p.at, theirs);
        OH_UNROLL
        for (i = 0; i < OH_NORM_UNITS; i++) {
            const oh_u32 u = lane + i * n->lanes, k = i < OH_NORM_TOGETHER ? i : 0;
            const oh_u64 at = p.at + (oh_u64)u * OH_UNIT_BYTES;
            oh_unit v[OH_MAX_RANKS], own = first[k], residual = residuals[k];
            oh_sum sum;
            if (u >= a->units || dead) continue;
            if (i >= OH_NORM_TOGETHER) {
                own = oh_row_load(n, in, u, dtype);
                if (n->residual_in) residual = oh_row_load(n, residual_in, u, dtype);
            }
            v[0] = theirs[k];
            if (!(there && i < OH_NORM_TOGETHER) && !oh_norm_await(a, at, v, p.wait, world)) {
                dead = 1;
                continue;
            }
            sum = world ? oh_add_sources(a, v, own, dtype, world)
                        : oh_add_and_rearm(a, at, own, dtype);
            if (world) oh_rearm(a, at, world);
            if (n->residual_in) sum = oh_sum_add(sum, residual, dtype);
            r[OH_KEPT(lane, i, n->lanes)] = oh_sum_rounded(sum, dtype);
            if (n->residual_out)
                oh_row_store(n, residual_out, u, r[OH_KEPT(lane, i, n->lanes)], dtype);
        }
    }
    return dead;
}

#endif
