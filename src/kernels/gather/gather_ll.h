/* gather_ll: all-gather of short messages by LL words; readiness is in each word.
 *
 * Any pattern of bits may be data, so no value can say "not there". A flag word is 8 bytes, 4 of
 * data and the sequence number, stored and loaded as a whole; two make a pair, which carries a
 * piece of 8 bytes. Steps of a thread: load its pieces of the input and store each to place
 * (parity, me) of the LL region of every peer, and to the own part of the output; then poll the
 * pair of every source s at (parity, s) of the own region until both words hold this sequence
 * number, and store its data to part s of the output.
 *
 *   bytes sent per rank        2 (W-1) S
 *   hops on the critical path  1
 *   signals, barriers          none; one signature word per peer in a block of its own (call.h)
 *
 * Words. Each place has one writer, and holds the sequence number of the call that wrote it last.
 * Nothing is armed: a word of an earlier call has another sequence number. One that no call has
 * overwritten for exactly one turn of the counter, 2^32-2 calls, would be taken for new, as a
 * signal would (pull.h). There is one place for each piece and call: with sub-slots a word of an
 * earlier chunk would pass for a later one's. So a message is at most half of a source's place, and
 * goes in one chunk.
 *
 * Why two parities suffice: a peer's place of parity p is written again at sequence number e+2, by
 * a rank that has finished e+1, for which it needed the peer's signature of e+1, sent after the
 * peer's call e had ended, its polls with it. Accesses are relaxed: a word is complete in itself,
 * and nothing else is concluded from it.
 *
 * In place: the input is the own part of the output. It is read only; all other parts are written
 * only. */
#ifndef OH_GATHER_LL_H
#define OH_GATHER_LL_H

#include "kernels/call.h"

#define OH_PIECE_BYTES 8
#define OH_PAIR_BYTES  16

/* ---- pieces of bytes at any address ---------------------------------------------------------- */
/* `left` bytes of the message begin at the address. */
OH_SLOW_FN oh_u64 oh_load_piece_bytes(oh_u64 in, oh_u32 left) {
    const oh_u32 bytes = left < OH_PIECE_BYTES ? left : OH_PIECE_BYTES;
    oh_u64 v = 0;
    oh_u32 i;
    OH_NO_UNROLL
    for (i = 0; i < bytes; i++) v |= (oh_u64)oh_ld_u8(in + i) << 8 * i;
    return v;
}

OH_SLOW_FN void oh_store_piece_bytes(oh_u64 out, oh_u32 left, oh_u64 v) {
    const oh_u32 bytes = left < OH_PIECE_BYTES ? left : OH_PIECE_BYTES;
    oh_u32 i;
    OH_NO_UNROLL
    for (i = 0; i < bytes; i++) oh_st_u8(out + i, (oh_u8)(v >> 8 * i));
}

/* Piece `u` of a part of `bytes`; `whole` pieces are loaded and stored at once. */
OH_FN oh_u64 oh_load_piece(oh_u64 part, oh_u32 u, oh_u32 whole, oh_u32 bytes) {
    const oh_u64 p = part + (oh_u64)u * OH_PIECE_BYTES;
    return u < whole ? oh_ld_u64(p) : oh_load_piece_bytes(p, bytes - u * OH_PIECE_BYTES);
}
OH_FN void oh_store_piece(oh_u64 part, oh_u32 u, oh_u32 whole, oh_u32 bytes, oh_u64 v) {
    const oh_u64 p = part + (oh_u64)u * OH_PIECE_BYTES;
    if (u < whole)
        oh_st_u64(p, v);
    else
        oh_store_piece_bytes(p, bytes - u * OH_PIECE_BYTES, v);
}

/* ---- pairs ----------------------------------------------------------------------------------- */
OH_FN oh_u64 oh_flag_place(const oh_args *a, oh_u32 parity, oh_u32 source, oh_u32 reader) {
    return a->buffers[reader] + a->regions.ll +
           (oh_u64)(parity * a->world + source) * a->regions.ll_bytes;
}

OH_FN oh_pair oh_pair_of(oh_u64 data, oh_u32 sequence) {
    oh_pair v;
    v.w[0] = (data & 0xFFFFFFFFu) << 32 | sequence;
    v.w[1] = (data >> 32) << 32 | sequence;
    return v;
}
OH_FN oh_u32 oh_pair_arrived(oh_pair v, oh_u32 sequence) {
    return (oh_u32)v.w[0] == sequence && (oh_u32)v.w[1] == sequence;
}
OH_FN oh_u64 oh_pair_data(oh_pair v) {
    return v.w[0] >> 32 | (v.w[1] >> 32) << 32;
}

/* Waits for a pair however long. 0: the communicator died. */
OH_SLOW_FN oh_u32 oh_await_pair(const oh_args *a, oh_u64 p, oh_u32 source, oh_u32 sequence,
                                oh_i32 looks_at_host) {
    oh_pair v;
    OH_WAIT_LOOP(v = oh_ld_relaxed_sys_pair(p), oh_pair_arrived(v, sequence), 1, a,
                 OH_WAIT_FOR(OH_SITE_LL, source, looks_at_host), sequence, sequence, (oh_u32)v.w[0])
}

/* ---- the call -------------------------------------------------------------------------------- */
OH_FN void oh_ll_store(const oh_args *a, oh_u32 parity, oh_u32 u, oh_pair v, oh_u32 ranks) {
    oh_u32 k;
    OH_UNROLL
    for (k = 1; k < ranks; k++)
        oh_st_relaxed_sys_pair(
            oh_flag_place(a, parity, a->rank, oh_next_rank(a, k)) + (oh_u64)u * OH_PAIR_BYTES, v);
}

/* Piece `u` of every source; with a known number of ranks their loads are in flight together. 0:
 * the communicator died. */
OH_FN oh_u32 oh_ll_collect(const oh_args *a, oh_grid g, oh_call_state c, oh_u32 u, oh_u32 whole,
                           oh_u32 world) {
    const oh_u64 here = oh_flag_place(a, c.parity, 0, a->rank) + (oh_u64)u * OH_PAIR_BYTES;
    const oh_u32 bytes = (oh_u32)a->count, ranks = world ? world : a->world;
    oh_pair v[OH_MAX_RANKS];
    oh_u32 k, n = 0, missing = 1;
    OH_NO_UNROLL
    while (world && missing && n++ < OH_POLLS) {
        missing = 0;
        OH_UNROLL
        for (k = 0; k + 1 < world; k++)
            v[k] = oh_ld_relaxed_sys_pair(here + oh_other_rank(a, k) * a->regions.ll_bytes);
        OH_UNROLL
        for (k = 0; k + 1 < world; k++) missing |= !oh_pair_arrived(v[k], c.sequence);
    }
    if (OH_UNLIKELY(missing)) {
        OH_NO_UNROLL
        for (k = 0; k + 1 < ranks; k++) {
            const oh_u32 source = oh_other_rank(a, k);
            const oh_u64 p = here + source * a->regions.ll_bytes;
            if (!oh_await_pair(a, p, source, c.sequence, g.thread == 0)) return 0;
            oh_store_piece(a->out + a->count * source, u, whole, bytes,
                           oh_pair_data(oh_ld_relaxed_sys_pair(p)));
        }
        return 1;
    }
    OH_UNROLL
    for (k = 0; k + 1 < world; k++)
        oh_store_piece(a->out + a->count * oh_other_rank(a, k), u, whole, bytes,
                       oh_pair_data(v[k]));
    return 1;
}

/* The kernel. `world` 0: the generic instance. The last block carries the signature. The first
 * piece is loaded together with the sequence number. */
OH_FN void oh_gather_ll(const oh_args *a, oh_grid g, oh_u32 world) {
    const oh_u32 i = g.block * g.threads + g.thread, stride = (g.blocks - 1) * g.threads;
    const oh_u32 bytes = (oh_u32)a->count, ranks = world ? world : a->world;
    const oh_u32 pieces = bytes / OH_PIECE_BYTES + (bytes % OH_PIECE_BYTES != 0),
                 whole = (a->in | a->out | a->count) % OH_PIECE_BYTES ? 0 : pieces;
    const oh_u64 mine = a->out + a->count * a->rank;
    oh_call_state c;
    oh_u64 own = 0;
    oh_u32 u;
    if (i < whole) oh_prefetch(a->in + (oh_u64)i * OH_PIECE_BYTES);
    if (oh_call_enter(a, g)) return;
    if (i < pieces) own = oh_load_piece(a->in, i, whole, bytes);
    c = oh_call_begin(oh_sequence_word(a, g.block));
    OH_NO_UNROLL
    for (u = i; u < pieces && !c.dead; u += stride) {
        if (u != i) own = oh_load_piece(a->in, u, whole, bytes);
        oh_ll_store(a, c.parity, u, oh_pair_of(own, c.sequence), ranks);
        if (a->in != mine) oh_store_piece(mine, u, whole, bytes, own);
    }
    if (a->early_trigger) oh_pdl_trigger();
    OH_NO_UNROLL
    for (u = i; u < pieces && !c.dead; u += stride)
        c.dead = !oh_ll_collect(a, g, c, u, whole, world);
    oh_call_end(a, g, c);
}

#endif
