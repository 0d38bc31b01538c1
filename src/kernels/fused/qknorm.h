/* tp_qknorm: RMSNorm of rows of q and k whose elements are spread over the ranks; only their sums
 * of squares travel.
 *
 *   y = x * 1/sqrt(sum over all ranks of x^2 / D + eps) * w      in fp32, each step rounded,
 *                                                                rounded once
 *
 * Token i of a chunk belongs to block i mod (G - 1) on every rank and to 8 bytes of each slot: the
 * sums of squares of its q and its k, two words that are never the sentinel, since a NaN sum is
 * canonical and no other looks like it. A rank's sums come from norm.h's tree and are added in rank
 * order: the same bits on all ranks.
 *
 * A block takes up to 8 tokens at once: load, sums of squares, barrier, send, hear, barrier, scale,
 * store. On a GPU whole rows stay in registers meanwhile, and half a warp serves a token: each of
 * its threads adds the warps' sums, sends to one peer and hears one, all add what they heard, and
 * one each works out the factor of q and that of k.
 *
 *   bytes sent per rank        8 (W-1) for a token
 *   hops on the critical path  1, and two barriers of a block for each batch
 *
 * Batches may differ between ranks, since they depend on alignment. A block hears a batch after it
 * has sent it and all before, so what it waits for a peer's block sends having heard earlier tokens
 * only: no circle.
 *
 * Reuse between calls is that of push_1shot.h. Between chunks, which take turns in two sub-slots, a
 * block sends of chunk c+1 after it has heard all of its tokens of chunk c, and any of these the
 * peer's block sent after it had heard and re-armed all of chunk c-1. On either side the thread
 * that re-armed or heard may not be the one that sends; a barrier lies between. So after a chunk
 * each thread has a fence before that barrier, and one after it. */
#ifndef OH_QKNORM_H
#define OH_QKNORM_H

#include "kernels/fused/norm.h"

/* Most tokens of a batch, and most units that a lane keeps of them. */
#define OH_QKNORM_TOKENS 8u
#define OH_QKNORM_KEPT   8u

/* How a body is cut for its rows, all constants: most tokens of a batch, units of a lane, whether a
 * lane keeps them and the weight's in registers. Kept rows are loaded and stored 16 bytes at once;
 * others are loaded twice, from a cache the second time. */
typedef struct oh_qk_shape {
    oh_u32 tokens, units, kept, dtype;
} oh_qk_shape;

/* Tokens first, first + step, ... of the message; the sums of the first have their place at `place`
 * of a slot. */
typedef struct oh_qk_batch {
    oh_u32 first, step, count;
    oh_u32 triggers; /* once the sums are heard, nothing is left to wait for */
    oh_u64 place;
} oh_qk_batch;

/* What a lane keeps: the addresses of its units in the first token, the units of all tokens, and
 * the weight's. */
typedef struct oh_qk_kept {
    oh_u64 at[OH_NORM_UNITS];
    oh_unit x[OH_QKNORM_KEPT];
    oh_sum w[OH_NORM_UNITS];
} oh_qk_kept;

/* The address of unit u, of q's or k's, in rows that begin at `q` and `k`. */
OH_FN oh_u64 oh_qk_at(const oh_qknorm_args *n, oh_u64 q, oh_u64 k, oh_u32 u) {
    const oh_u32 is_q = u < n->q_units;
    return (is_q ? q : k) + (oh_u64)(is_q ? u : u - n->q_units) * OH_UNIT_BYTES;
}

/* The same in the first token of a batch, and how far it is to the next. */
OH_FN oh_u64 oh_qk_first_at(const oh_qknorm_args *n, oh_qk_batch b, oh_u32 u) {
    return oh_qk_at(n, n->call.in, n->call.out, u) +
           b.first * (u < n->q_units ? n->q_stride : n->k_stride);
}
OH_FN oh_u64 oh_qk_jump(const oh_qknorm_args *n, oh_qk_batch b, oh_u32 u) {
    return b.step * (u < n->q_units ? n->q_stride : n->k_stride);
}

/* Bytes of a row from unit u on, 0: it is whole. */
OH_FN oh_u32 oh_qk_left(const oh_qknorm_args *n, oh_u32 u, oh_qk_shape s) {
    const oh_u32 is_q = u < n->q_units, i = is_q ? u : u - n->q_units;
    if (s.kept || i < (is_q ? n->q_whole : n->k_whole)) return 0;
    return (is_q ? n->q_bytes : n->k_bytes) - i * OH_UNIT_BYTES;
}

OH_FN oh_unit oh_qk_load(const oh_qknorm_args *n, oh_u64 at, oh_u32 u, oh_qk_shape s) {
    const oh_u32 left = oh_qk_left(n, u, s);
    return left ? oh_load_elements(at, left, s.dtype) : oh_ld_unit(at);
}

OH_FN void oh_qk_store(const oh_qknorm_args *n, oh_u64 at, oh_u32 u, oh_unit v, oh_qk_shape s) {
    const oh_u32 left = oh_qk_left(n, u, s);
    if (left)
        oh_store_elements(at, left, v, s.dtype);
    else
        oh_st_unit(at, v);
}

/* The lanes' units of all tokens, if they are kept; `at`: where those of the first one lie, or 0 to
 * work it out. All loads are in flight together. With `x` 0 they are brought into the L2 only. */
OH_FN void oh_qk_load_batch(const oh_qknorm_args *n, oh_grid g, oh_qk_batch b, const oh_u64 *at,
                            oh_unit *x, oh_qk_shape s) {
    oh_u32 i, j;
    OH_UNROLL
    for (j = 0; s.kept && j < s.tokens; j++) {
        OH_UNROLL
        for (i = 0; i < s.units; i++) {
            const oh_u32 u = g.thread + i * n->lanes;
            if (j < b.count && u < n->call.units) {
                const oh_u64 p = (at ? at[i] : oh_qk_first_at(n, b, u)) + j * oh_qk_jump(n, b, u);
                if (x)
                    x[j * s.units + i] = oh_ld_unit(p);
                else
                    oh_prefetch(p);
            }
        }
    }
}

/* This rank's sums of squares of all tokens: of q at 2 j, of k at 2 j + 1. */
OH_FN void oh_qk_squares(const oh_qknorm_args *n, oh_grid g, oh_qk_batch b, const oh_unit *x,
                         oh_sums *sums, oh_qk_shape s) {
    OH_KEEP(float, v, 2 * OH_QKNORM_TOKENS, &n->call, OH_PLACE_ROW);
    oh_u32 i, j, lane;
    OH_UNROLL
    for (j = 0; j < OH_ROWS_OF(s.tokens, b.count); j++) {
        OH_LANES(lane, g, n->lanes) {
            float q = 0.0f, k = 0.0f;
            OH_UNROLL
            for (i = 0; i < s.units; i++) {
                const oh_u32 u = lane + i * n->lanes;
                if (j < b.count && u < n->call.units) {
                    const float squares = oh_unit_squares(
                        s.kept ? x[j * s.units + i]
                               : oh_qk_load(n, oh_qk_first_at(n, b, u) + j * oh_qk_jump(n, b, u), u,
                                            s),
                        s.dtype);
                    q += u < n->q_units ? squares : 0.0f;
                    k += u < n->q_units ? 0.0f : squares;
                }
            }
            v[OH_KEPT(lane, 2 * j, n->lanes)] = q;
            v[OH_KEPT(lane, 2 * j + 1, n->lanes)] = k;
        }
    }
    oh_sums_put(sums, v, 2 * OH_ROWS_OF(s.tokens, b.count), n->lanes);
}

OH_FN oh_u32 oh_qk_arrived(oh_u64 word) {
    return (oh_u32)word != OH_SENTINEL && (oh_u32)(word >> 32) != OH_SENTINEL;
}

/* What is left of a wait after OH_POLLS looks, out of the way of a kernel that has no register to
 * spare: `what` is the number of the peer among the others and, from bit 8 on, whether the thread
 * looks at the host; which rank that is is worked out here. All ones: the communicator died. */
OH_SLOW_FN oh_u64 oh_qk_hear_slowly(const oh_args *a, oh_u64 p, oh_u32 what, oh_u32 sequence) {
    oh_u64 state = 0;
    what = OH_WAIT_FOR(OH_SITE_PUSH_1SHOT, oh_other_rank(a, what & 0xffu), what >> 8);
    for (;;) {
        oh_u64 word;
        state = oh_wait_slow(a, state, what, sequence, 0, OH_SENTINEL);
        word = oh_ld_relaxed_sys_u64(p);
        if (!state || oh_qk_arrived(word)) return state ? word : ~0ull;
    }
}

/* Waits for the k-th peer's sums of a token and re-arms their place. All ones: the communicator
 * died. The first look stands before the loop: within it, the call takes half a microsecond longer
 * (docs/notes/tuning-log.md). */
OH_FN oh_u64 oh_qk_hear(const oh_args *a, oh_u64 p, oh_u32 k, oh_u32 sequence,
                        oh_i32 looks_at_host) {
    oh_u64 word = oh_ld_relaxed_sys_u64(p);
    oh_u32 n = 0;
    OH_NO_UNROLL
    while (!oh_qk_arrived(word) && ++n < OH_POLLS) word = oh_ld_relaxed_sys_u64(p);
    if (OH_UNLIKELY(!oh_qk_arrived(word)))
        word = oh_qk_hear_slowly(a, p, k | (oh_u32)looks_at_host << 8, sequence);
    if (word != ~0ull) oh_st_relaxed_sys_u64(p, ~0ull);
    return word;
}

/* Sends the sums of the tokens; `own` are those that the thread serves. */
OH_FN void oh_qk_send(const oh_args *a, oh_grid g, oh_call_state c, oh_qk_batch b,
                      const oh_sums *sums, oh_u64 *own) {
    oh_u32 j, k;
    OH_SERVED_ROWS(j, g, b.count) {
        const oh_u32 q = oh_canonical_f32(oh_sums_get(sums, 2 * j));
        const oh_u64 word = (oh_u64)oh_canonical_f32(oh_sums_get(sums, 2 * j + 1)) << 32 | q;
        own[OH_SERVED(j)] = word;
        OH_EACH_SERVER(k, g, a->world - 1) {
            if (j < b.count && !c.dead)
                oh_st_relaxed_sys_u64(a->peers[k].there + b.place + 8ull * (j * b.step), word);
        }
    }
}

/* Hears the tokens' sums from all peers, and works out the factors of q and k. */
OH_FN oh_u32 oh_qk_factors(const oh_qknorm_args *n, oh_grid g, oh_call_state c, oh_qk_batch b,
                           const oh_u64 *own, float (*factors)[OH_QKNORM_TOKENS]) {
    const oh_args *a = &n->call;
    oh_u64 words[OH_SERVERS == 1 ? OH_MAX_RANKS : 1];
    oh_u32 j, k, r, is_k;
    OH_SERVED_ROWS(j, g, b.count) {
        float of_q = 0.0f, of_k = 0.0f;
        words[0] = ~0ull;
        OH_EACH_SERVER(k, g, a->world - 1) {
            oh_u64 word = ~0ull;
            if (j < b.count && !c.dead) {
                word = oh_qk_hear(a, a->peers[k].from + b.place + 8ull * (j * b.step), k,
                                  c.sequence, g.thread == 0);
                if (word == ~0ull) c.dead = 1;
            }
            words[OH_SERVER_AT(k)] = word;
        }
        OH_NO_UNROLL
        for (r = 0; r < a->world; r++) {
            oh_u64 word = own[OH_SERVED(j)];
            if (r != a->rank) word = oh_server_word(words, r - (r > a->rank));
            of_q = r ? of_q + oh_f32_of_bits((oh_u32)word) : oh_f32_of_bits((oh_u32)word);
            of_k = r ? of_k + oh_f32_of_bits((oh_u32)(word >> 32))
                     : oh_f32_of_bits((oh_u32)(word >> 32));
        }
        if (b.triggers) oh_pdl_trigger();
        OH_EACH_SERVER(is_k, g, 2) {
            const float mean = (is_k ? of_k : of_q) * (is_k ? n->inverse_k : n->inverse_q);
            factors[is_k][j] = oh_div_f32(1.0f, oh_sqrt_f32(mean + n->eps));
        }
    }
    return c.dead;
}

OH_FN oh_sum oh_qk_weight(const oh_qknorm_args *n, oh_u32 u, oh_qk_shape s) {
    oh_sum w = oh_sum_of(oh_qk_load(n, oh_qk_at(n, n->q_weight, n->k_weight, u), u, s), s.dtype);
    oh_u32 i;
    OH_UNROLL
    for (i = 0; i < (s.dtype == OH_F32 ? 4u : 8u); i++)
        w.f[i] = n->plus_one ? w.f[i] + 1.0f : w.f[i];
    return w;
}

OH_FN void oh_qk_load_weights(const oh_qknorm_args *n, oh_grid g, oh_sum *w, oh_qk_shape s) {
    oh_u32 i;
    OH_UNROLL
    for (i = 0; s.kept && i < s.units; i++)
        if (g.thread + i * n->lanes < n->call.units)
            w[i] = oh_qk_weight(n, g.thread + i * n->lanes, s);
}

OH_FN void oh_qk_store_batch(const oh_qknorm_args *n, oh_grid g, oh_qk_batch b,
                             const oh_qk_kept *kept, float (*factors)[OH_QKNORM_TOKENS],
                             oh_qk_shape s) {
    oh_u32 e, i, j, lane;
    OH_UNROLL
    for (j = 0; j < OH_ROWS_OF(s.tokens, b.count); j++) {
        OH_LANES(lane, g, n->lanes) {
            OH_UNROLL
            for (i = 0; i < s.units; i++) {
                const oh_u32 u = lane + i * n->lanes;
                if (j < b.count && u < n->call.units) {
                    const oh_u64 p =
                        (s.kept ? kept->at[i] : oh_qk_first_at(n, b, u)) + j * oh_qk_jump(n, b, u);
                    const float factor = factors[u >= n->q_units][j];
                    const oh_sum weight = s.kept ? kept->w[i] : oh_qk_weight(n, u, s);
                    oh_sum y = oh_sum_of(s.kept ? kept->x[j * s.units + i] : oh_qk_load(n, p, u, s),
                                         s.dtype);
                    OH_UNROLL
                    for (e = 0; e < (s.dtype == OH_F32 ? 4u : 8u); e++)
                        y.f[e] = y.f[e] * factor * weight.f[e];
                    oh_qk_store(n, p, u, oh_sum_rounded(y, s.dtype), s);
                }
            }
        }
    }
}

/* Tokens base, base + step, ... of a chunk of `tokens`, at most as many as are taken at once.
 * Without a division. */
OH_FN oh_qk_batch oh_qk_batch_of(oh_u32 chunk, oh_u32 tokens, oh_u32 base, oh_u32 step, oh_u32 max,
                                 oh_qk_shape s) {
    oh_qk_batch b = {0, 0, 0, 0, 0};
    oh_u32 j;
    b.first = chunk + base;
    b.step = step;
    OH_UNROLL
    for (j = 0; j < OH_QKNORM_TOKENS; j++)
        if (j < s.tokens) b.count += j < max && base + j * step < tokens;
    return b;
}

/* All of a block's tokens. The first rows, of which the lane's first unit lies at `unit`, are
 * loaded together with the sequence number; the weights, once the first sums are on their way. A
 * GPU's block has 64 threads at least, which serve 4 tokens. */
OH_FN oh_call_state oh_qk_run(const oh_qknorm_args *n, oh_grid g, oh_u64 unit, oh_sums *sums,
                              float (*factors)[OH_QKNORM_TOKENS], oh_qk_shape s) {
    const oh_args *a = &n->call;
    const oh_u32 step = g.blocks - 1;
    const oh_u32 max = s.tokens <= 4 || s.tokens < OH_ROWS_SERVED(g) ? s.tokens : OH_ROWS_SERVED(g);
    oh_qk_kept kept;
    oh_u64 own[OH_QKNORM_TOKENS];
    oh_u32 chunk, base, i;
    oh_call_state c = oh_call_begin(oh_sequence_word(a, g.block));
    oh_qk_batch b = oh_qk_batch_of(0, n->chunk_tokens < n->tokens ? n->chunk_tokens : n->tokens,
                                   g.block, step, max, s);
    OH_UNROLL
    for (i = 0; i < s.units; i++)
        kept.at[i] = i ? oh_qk_first_at(n, b, g.thread + i * n->lanes) : unit;
    oh_qk_load_batch(n, g, b, kept.at, kept.x, s);
    oh_sums_begin(sums, 2 * s.tokens, n->lanes);
    OH_NO_UNROLL
    for (chunk = 0; chunk < a->chunks; chunk++) {
        const oh_u32 first = chunk * n->chunk_tokens;
        const oh_u32 tokens = oh_rows_of_chunk(n->tokens, n->chunk_tokens, chunk);
        const oh_u64 place = oh_push_place(a, c.parity, chunk);
        if (chunk) oh_fence_acq_rel_sys();
        OH_NO_UNROLL
        for (base = g.block; base < tokens; base += max * step) {
            const oh_u32 is_first = base == g.block, next = base + max * step;
            const oh_u32 triggers = chunk + 1 == a->chunks && next >= tokens && !a->early_trigger;
            if (chunk || !is_first) {
                b = oh_qk_batch_of(first, tokens, base, step, max, s);
                OH_UNROLL
                for (i = 0; i < s.units; i++)
                    kept.at[i] = oh_qk_first_at(n, b, g.thread + i * n->lanes);
                oh_qk_load_batch(n, g, b, kept.at, kept.x, s);
            }
            oh_qk_squares(n, g, b, kept.x, sums, s);
            oh_block_sync();
            if (chunk && is_first) oh_fence_acq_rel_sys();
            b.place = place + 8ull * base;
            b.triggers = triggers && s.tokens <= OH_SERVED_TOGETHER;
            oh_qk_send(a, g, c, b, sums, own);
            if (a->early_trigger) oh_pdl_trigger();
            if (!chunk && is_first) oh_qk_load_weights(n, g, kept.w, s);
            if (next < tokens)
                oh_qk_load_batch(n, g, oh_qk_batch_of(first, tokens, next, step, max, s), 0, 0, s);
            c.dead = oh_qk_factors(n, g, c, b, own, factors);
            oh_block_sync();
            if (triggers && s.tokens > OH_SERVED_TOGETHER) oh_pdl_trigger();
            oh_qk_store_batch(n, g, b, &kept, factors, s);
        }
    }
    return c;
}

/* The kernel, for any number of ranks. The last block carries the signature. */
OH_FN void oh_qknorm(const oh_qknorm_args *n, oh_grid g, oh_u32 dtype, oh_u32 world) {
    const oh_args *a = &n->call;
    const oh_u32 step = g.blocks - 1, tokens = n->chunk_tokens;
    const oh_u32 whole = n->q_whole == n->q_units && n->q_whole + n->k_whole == a->units;
    const oh_qk_shape one = {1, 1, 1, dtype}, two = {2, 1, 1, dtype}, many = {8, 1, 1, dtype},
                      wide = {2, 2, 1, dtype}, any = {OH_ROWS_KEPT ? 1 : 8, 4, 0, dtype};
    OH_SHARED oh_sums sums;
    OH_SHARED float factors[2][OH_QKNORM_TOKENS];
    const oh_qk_batch first = {g.block < n->tokens ? g.block : 0, step, 1, 0, 0};
    const oh_u32 u = g.thread < a->units ? g.thread : 0;
    const oh_u64 unit = oh_qk_first_at(n, first, u);
    oh_call_state c;
    (void)world;
    /* By all threads, so that the address is there after the wait. */
    oh_prefetch(unit);
    oh_prefetch(oh_qk_at(n, n->q_weight, n->k_weight, u));
    if (oh_call_enter(a, g)) return;
    if (!OH_ROWS_KEPT || !whole || a->units > 2 * n->lanes)
        c = oh_qk_run(n, g, unit, &sums, factors, any);
    else if (a->units > n->lanes)
        c = oh_qk_run(n, g, unit, &sums, factors, wide);
    else if (tokens <= step)
        c = oh_qk_run(n, g, unit, &sums, factors, one);
    else if (tokens <= 2 * step)
        c = oh_qk_run(n, g, unit, &sums, factors, two);
    else
        c = oh_qk_run(n, g, unit, &sums, factors, many);
    /* A block that had tokens has met after its last poll. */
    if (g.block < n->tokens && g.block < tokens)
        oh_call_leave(a, g, c);
    else
        oh_call_end(a, g, c);
}

#endif
