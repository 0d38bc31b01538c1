/* tp_qknorm: RMSNorm of rows of q and k whose elements are spread over the ranks; only their sums of squares travel.
 *
 *   y = x * 1/sqrt(sum over all ranks of x^2 / D + eps) * w      in fp32, each step rounded, rounded once
 *
 * Token i of a chunk belongs to block i mod (G - 1) on every rank and to 8 bytes of each slot: the sums of squares of
 * its q and its k, two words that are never the sentinel, since a NaN sum is canonical and no other looks like it. A
 * rank's sums come from norm.h's tree and are added in rank order: the same bits on all ranks.
 *
 * A block sends the sums of OH_QKNORM_AHEAD tokens before it waits for the first: the rows, which it loads a second
 * time to finish them, are in its L1 then, and are on their way while it waits. A thread per peer sends and hears, and
 * all threads share what was heard through a barrier.
 *
 *   bytes sent per rank        8 (W-1) for a token
 *   hops on the critical path  1
 *
 * Reuse between calls is that of push_1shot.h. Between chunks, which take turns in two sub-slots, a block sends of
 * chunk c+1 after it has heard all of its tokens of chunk c, which the peer's block sent after it had re-armed chunk
 * c-1. On either side the thread that re-armed or heard is not the one that sends; a barrier lies between. So it has a
 * fence before that barrier, and the sender one after it. */
#ifndef OH_QKNORM_H
#define OH_QKNORM_H

#include "kernels/norm.h"

/* Tokens under way in a block. */
#define OH_QKNORM_AHEAD 8u

OH_FN oh_unit oh_qk_load(const oh_qknorm_args *n, oh_u64 q, oh_u64 k, oh_u32 u, oh_u32 dtype) {
    const oh_u32 is_q = u < n->q_units, i = is_q ? u : u - n->q_units;
    const oh_u64 at = (is_q ? q : k) + (oh_u64)i * OH_UNIT_BYTES;
    if (i < (is_q ? n->q_whole : n->k_whole)) return oh_ld_unit(at);
    return oh_load_elements(at, (is_q ? n->q_bytes : n->k_bytes) - i * OH_UNIT_BYTES, dtype);
}

OH_FN void oh_qk_store(const oh_qknorm_args *n, oh_u32 token, oh_u32 u, oh_unit v, oh_u32 dtype) {
    const oh_u32 is_q = u < n->q_units, i = is_q ? u : u - n->q_units;
    const oh_u64 at =
        (is_q ? n->call.in + token * n->q_stride : n->call.out + token * n->k_stride) +
        (oh_u64)i * OH_UNIT_BYTES;
    if (i < (is_q ? n->q_whole : n->k_whole))
        oh_st_unit(at, v);
    else
        oh_store_elements(at, (is_q ? n->q_bytes : n->k_bytes) - i * OH_UNIT_BYTES, v, dtype);
}

/* The lanes' units of a token's rows. */
OH_FN void oh_qk_load_rows(const oh_qknorm_args *n, oh_grid g, oh_u32 token, oh_unit *x,
                           oh_u32 dtype) {
    oh_u32 lane, i;
    OH_LANES(lane, g, n->lanes) {
        OH_UNROLL
        for (i = 0; i < OH_NORM_UNITS; i++) {
            const oh_u32 u = lane + i * n->lanes;
            if (u < n->call.units)
                x[OH_KEPT(lane, i, n->lanes)] =
                    oh_qk_load(n, n->call.in + token * n->q_stride,
                               n->call.out + token * n->k_stride, u, dtype);
        }
    }
}

OH_FN void oh_qk_prefetch(const oh_qknorm_args *n, oh_grid g, oh_u32 token) {
    oh_u32 u;
    OH_NO_UNROLL
    for (u = g.thread; u < n->q_whole; u += g.threads)
        oh_prefetch(n->call.in + token * n->q_stride + (oh_u64)u * OH_UNIT_BYTES);
    OH_NO_UNROLL
    for (u = g.thread; u < n->k_whole; u += g.threads)
        oh_prefetch(n->call.out + token * n->k_stride + (oh_u64)u * OH_UNIT_BYTES);
}

/* This rank's sums of squares of a token, as they travel. */
OH_FN oh_u64 oh_qk_squares(const oh_qknorm_args *n, oh_grid g, const oh_unit *x, oh_u32 turn,
                           oh_u32 dtype) {
    float q[OH_KEPT_ROOM(1)], k[OH_KEPT_ROOM(1)];
    oh_u32 lane, i;
    oh_two_sums sums;
    OH_LANES(lane, g, n->lanes) {
        float of_q = 0.0f, of_k = 0.0f;
        OH_UNROLL
        for (i = 0; i < OH_NORM_UNITS; i++) {
            const oh_u32 u = lane + i * n->lanes;
            if (u < n->q_units)
                of_q += oh_unit_squares(x[OH_KEPT(lane, i, n->lanes)], dtype);
            else if (u < n->call.units)
                of_k += oh_unit_squares(x[OH_KEPT(lane, i, n->lanes)], dtype);
        }
        q[OH_KEPT(lane, 0, n->lanes)] = of_q;
        k[OH_KEPT(lane, 0, n->lanes)] = of_k;
    }
    sums = oh_group_sums(q, k, n->lanes, turn);
    return (oh_u64)oh_canonical_f32(sums.b) << 32 | oh_canonical_f32(sums.a);
}

OH_FN oh_u32 oh_qk_arrived(oh_u64 word) {
    return (oh_u32)word != OH_SENTINEL && (oh_u32)(word >> 32) != OH_SENTINEL;
}

/* Waits for a source's sums of a token and re-arms their place. All ones: the communicator died. */
OH_FN oh_u64 oh_qk_hear(const oh_args *a, oh_u64 p, oh_u32 peer, oh_u32 epoch,
                        oh_i32 looks_at_host) {
    oh_u64 state = 0, word;
    oh_u32 n = 0;
    OH_NO_UNROLL
    while (!oh_qk_arrived(word = oh_ld_relaxed_sys_u64(p))) {
        if (++n < OH_POLLS) continue;
        n = 0;
        state = oh_wait_slow(a, state, OH_WAIT_FOR(OH_SITE_PUSH_1SHOT, peer, looks_at_host), epoch,
                             0, OH_SENTINEL);
        if (!state) return ~0ull;
    }
    oh_st_relaxed_sys_u64(p, ~0ull);
    return word;
}

/* A token whose sums all ranks have sent: `x` are the lanes' units, `own` this rank's sums, `totals` memory of the
 * block. */
OH_FN oh_u32 oh_qk_finish(const oh_qknorm_args *n, oh_grid g, oh_call_state c, oh_u32 token,
                          oh_u64 place, const oh_unit *x, const oh_unit *w, oh_u64 *totals,
                          oh_u32 dtype) {
    const oh_args *a = &n->call;
    oh_u32 k, r, lane, i;
    float q = 0.0f, of_k = 0.0f;
    OH_NO_UNROLL
    for (k = g.thread; k + 1 < a->world; k += g.threads) {
        oh_u64 word = ~0ull;
        r = oh_other_rank(a, k);
        if (!c.dead) word = oh_qk_hear(a, a->peers[k].from + place, r, c.epoch, g.thread == 0);
        if (word == ~0ull) c.dead = 1;
        totals[r] = word;
    }
    oh_group_sync();
    OH_NO_UNROLL
    for (r = 0; r < a->world; r++) {
        q = r ? q + oh_f32_of_bits((oh_u32)totals[r]) : oh_f32_of_bits((oh_u32)totals[r]);
        of_k = r ? of_k + oh_f32_of_bits((oh_u32)(totals[r] >> 32))
                 : oh_f32_of_bits((oh_u32)(totals[r] >> 32));
    }
    q = oh_div_f32(1.0f, oh_sqrt_f32(q * n->inverse_q + n->eps));
    of_k = oh_div_f32(1.0f, oh_sqrt_f32(of_k * n->inverse_k + n->eps));
    OH_LANES(lane, g, n->lanes) {
        OH_UNROLL
        for (i = 0; i < OH_NORM_UNITS; i++) {
            const oh_u32 u = lane + i * n->lanes, at = OH_KEPT(lane, i, n->lanes);
            if (u < a->units)
                oh_qk_store(
                    n, token, u,
                    oh_sum_rounded(oh_norm_values(x[at], oh_norm_factors(w[at], n->plus_one, dtype),
                                                  u < n->q_units ? q : of_k, dtype),
                                   dtype),
                    dtype);
        }
    }
    return c.dead;
}

/* The kernel, for any number of ranks. The last block carries the signature. */
OH_FN void oh_qknorm(const oh_qknorm_args *n, oh_grid g, oh_u32 dtype, oh_u32 world) {
    OH_SHARED oh_u64 totals[OH_QKNORM_AHEAD][OH_MAX_RANKS];
    const oh_args *a = &n->call;
    const oh_u32 stride = g.blocks - 1;
    oh_unit x[OH_KEPT_ROOM(OH_NORM_UNITS)], w[OH_KEPT_ROOM(OH_NORM_UNITS)];
    oh_u32 chunk, base, j, k, lane, i, turn = 0;
    oh_call_state c;
    (void)world;
    if (g.block + 1 < g.blocks && g.block < n->tokens && g.thread < n->q_whole) {
        oh_prefetch(a->in + g.block * n->q_stride + g.thread * OH_UNIT_BYTES);
        oh_prefetch(n->q_weight + g.thread * OH_UNIT_BYTES);
    }
    if (oh_call_enter(a, g)) return;
    c = oh_call_begin(oh_epoch_word(a, g.block));
    OH_LANES(lane, g, n->lanes) {
        OH_UNROLL
        for (i = 0; i < OH_NORM_UNITS; i++)
            if (lane + i * n->lanes < a->units)
                w[OH_KEPT(lane, i, n->lanes)] =
                    oh_qk_load(n, n->q_weight, n->k_weight, lane + i * n->lanes, dtype);
    }
    OH_NO_UNROLL
    for (chunk = 0; chunk < a->chunks; chunk++) {
        const oh_u32 first = chunk * n->chunk_tokens, left = n->tokens - first;
        const oh_u32 tokens = left < n->chunk_tokens ? left : n->chunk_tokens;
        const oh_u64 place = oh_push_place(a, c.phase, chunk);
        if (chunk) oh_fence_acq_rel_sys();
        OH_NO_UNROLL
        for (base = g.block; base < tokens; base += OH_QKNORM_AHEAD * stride) {
            OH_NO_UNROLL
            for (j = 1; j < OH_QKNORM_AHEAD && base + j * stride < tokens; j++)
                oh_qk_prefetch(n, g, first + base + j * stride);
            OH_NO_UNROLL
            for (j = 0; j < OH_QKNORM_AHEAD && base + j * stride < tokens; j++) {
                const oh_u32 token = base + j * stride;
                oh_u64 sums;
                oh_qk_load_rows(n, g, first + token, x, dtype);
                sums = oh_qk_squares(n, g, x, turn++, dtype);
                if (chunk && base == g.block && j == 0) oh_fence_acq_rel_sys();
                OH_NO_UNROLL
                for (k = g.thread; k + 1 < a->world && !c.dead; k += g.threads)
                    oh_st_relaxed_sys_u64(a->peers[k].there + place + 8ull * token, sums);
                if (g.thread == 0) totals[j][a->rank] = sums;
            }
            if (a->early_trigger) oh_pdl_trigger();
            OH_NO_UNROLL
            for (j = 0; j < OH_QKNORM_AHEAD && base + j * stride < tokens; j++) {
                const oh_u32 token = base + j * stride;
                oh_qk_load_rows(n, g, first + token, x, dtype);
                c.dead = oh_qk_finish(n, g, c, first + token, place + 8ull * token, x, w, totals[j],
                                      dtype);
            }
        }
    }
    oh_call_end(a, g, c);
}

#endif
