/* Begin and end of every call: sequence words, signatures, the guard against overlap.
 *
 * Sequence words. Local memory holds one word {dead, sequence number of the last call} per possible
 * block; blocks write the lower half, the thread that concludes a failure (guard.h) the upper
 * halves of all. Block b of a grid of G reads word b once; at its end, after a block_sync, it
 * writes words b, b+G, b+2G, ... So any grid may follow any grid without idle blocks or atomics.
 * Never one word bumped by one block (late blocks would read the new value), never only the active
 * blocks' words (a wider grid would find old ones).
 *
 * Signatures. In every call every rank tells every peer {sequence number, hash of all that must
 * agree}, and the call does not end before it has read all peers'. That is credit (b) of
 * docs/protocol.md for every algorithm, and finds disagreement at once. The last block of a grid
 * does it and nothing else. Relaxed: the word is complete in itself, 8 bytes are written at once.
 * Reuse after two calls is covered by the credit rule itself.
 *
 * Overlap. The signature block swaps the call's sequence number into local.running: finding its own
 * sequence number there means that two grids read the same sequence words. And every sequence word
 * must be the last call's, or this call's already: an older one belongs to a block of the call
 * before that has not ended. Off the critical path: asked before the peers' signatures are polled,
 * looked at after. */
#ifndef OH_CALL_H
#define OH_CALL_H

#include "kernels/guard.h"

/* The k-th next rank. */
OH_FN oh_u32 oh_next_rank(const oh_args *a, oh_u32 k) {
    const oh_u32 r = a->rank + k;
    return r < a->world ? r : r - a->world;
}

#define OH_WARP        32u
#define OH_GUARD_LOADS 4

typedef struct oh_call_state {
    oh_u32 sequence;
    oh_u32 parity;
    oh_u32 dead; /* this thread has given up, or found the communicator dead */
} oh_call_state;

/* A dead communicator's calls that are still queued must send nothing: data would land in slots
 * that peers have not read yet, and a signature would let a peer finish on it. The mark comes with
 * the sequence number, in one load: a load of its own costs 0.03 to 0.09 us
 * (docs/notes/tuning-log.md). */
OH_FN oh_call_state oh_call_begin(oh_u64 sequence_word) {
    const oh_u64 word = oh_ld_relaxed_gpu_u64(sequence_word);
    oh_call_state c;
    c.sequence = OH_SEQUENCE_NEXT((oh_u32)word);
    c.parity = c.sequence & 1u;
    c.dead = (oh_u32)(word >> 32);
    return c;
}

/* What a kernel is stamped for: constants of its body. */
typedef struct oh_stamp {
    oh_u32 dtype, world; /* world 0: any number of ranks */
} oh_stamp;

/* For whom a thread waits: the call, and OH_WAIT_FOR but for the peer. */
typedef struct oh_waiter {
    oh_u32 sequence, what;
} oh_waiter;

OH_FN oh_waiter oh_waiter_of(oh_call_state c, oh_grid g, oh_u32 site) {
    oh_waiter w;
    w.sequence = c.sequence;
    w.what = OH_WAIT_FOR(site, 0, g.thread == 0);
    return w;
}

/* The end of a call for a thread that knows: all threads of the block have read their sequence
 * word, and all that the block waits for has come. */
OH_FN void oh_call_leave(const oh_args *a, oh_grid g, oh_call_state c) {
    oh_u32 b;
    if (!a->early_trigger) oh_pdl_trigger();
    OH_NO_UNROLL
    for (b = g.block + g.thread * g.blocks; b < a->regions.max_blocks; b += g.blocks * g.threads)
        oh_st_relaxed_gpu_u32(oh_sequence_word(a, b), c.sequence);
}

/* Reached by all threads of a block at one place: block_sync is a barrier. The first thread that
 * triggers does so for its block: hence after the barrier, when all have had their last poll. */
OH_FN void oh_call_end(const oh_args *a, oh_grid g, oh_call_state c) {
    oh_block_sync();
    oh_call_leave(a, g, c);
}

OH_FN oh_u64 oh_signature_address(const oh_args *a, oh_u32 from, oh_u32 to, oh_u32 parity) {
    return OH_MEMBER(oh_control_of(a, OH_SIGNATURE_HOME(from, to)), oh_control,
                     lines[parity][from].signature);
}

/* Waits for the signature of `from`. 0: the communicator died meanwhile. */
OH_FN oh_u64 oh_signature_await(const oh_args *a, oh_u32 from, oh_u32 sequence,
                                oh_i32 looks_at_host) {
    const oh_u64 p = oh_signature_address(a, from, a->rank, sequence & 1u);
    oh_u64 v;
    OH_WAIT_LOOP(v = oh_ld_relaxed_sys_u64(p), (oh_u32)v == sequence, v, a,
                 OH_WAIT_FOR(OH_SITE_SIGNATURE, from, looks_at_host), sequence, sequence, (oh_u32)v)
}

/* What this rank signs: of a call with a registration the registration's mode and identity too. */
OH_FN oh_u32 oh_hash_with_registration(const oh_args *a, oh_u64 head, oh_u64 identity) {
    return a->hash ^ ((oh_u32)identity << 2 | (oh_u32)(head >> 32)) * 0x9e3779b1u;
}
OH_FN oh_u32 oh_hash_signed(const oh_args *a) {
    if (!a->registration) return a->hash;
    return oh_hash_with_registration(
        a, oh_ld_host_u64(a->registration),
        oh_ld_host_u64(OH_MEMBER(a->registration, oh_registration, identity)));
}

/* A hash differs: collect all words first, then name the lowest rank that differs from rank 0, as
 * all ranks do. */
OH_SLOW_FN void oh_signature_mismatch(const oh_args *a, oh_u32 sequence) {
    const oh_u32 own = oh_hash_signed(a);
    oh_u32 hash0 = own, seen = own, r;
    oh_i32 culprit = -1;
    for (r = 0; r < a->world; r++) {
        oh_u32 hash = own;
        if (r != a->rank) {
            const oh_u64 v = oh_signature_await(a, r, sequence, 1);
            if (!v) return;
            hash = (oh_u32)(v >> 32);
        }
        if (r == 0) hash0 = hash;
        if (hash != hash0 && culprit < 0) {
            culprit = (oh_i32)r;
            seen = hash;
        }
    }
    oh_fail(a, OH_FAIL_AT(OH_FAIL_MISMATCH, OH_SITE_SIGNATURE), culprit, sequence, hash0, seen);
}

/* Waits for a signature however long. 0: it differs, or the communicator died meanwhile. */
OH_SLOW_FN oh_u32 oh_signature_accepted(const oh_args *a, oh_u32 from, oh_u32 sequence,
                                        oh_i32 looks_at_host) {
    const oh_u64 v = oh_signature_await(a, from, sequence, looks_at_host);
    const oh_u32 differs = v && (oh_u32)(v >> 32) != oh_hash_signed(a);
    if (differs) oh_signature_mismatch(a, sequence);
    return v && !differs;
}

/* Does an sequence word belong to neither the last call nor this one? */
OH_FN oh_u32 oh_is_stale(oh_u32 sequence, oh_call_state c) {
    return sequence != c.sequence && OH_SEQUENCE_NEXT(sequence) != c.sequence;
}

/* Thread t of `threads` that look at all sequence words, two to a load, the loads in flight
 * together: one after the other they would outlast the exchange of a small call. Nonzero: overlap
 * was found. */
OH_SLOW_FN oh_u32 oh_overlaps(const oh_args *a, oh_u32 t, oh_u32 threads, oh_call_state c) {
    oh_u32 k, b, stale = 0, running = 0;
    oh_unit two[OH_GUARD_LOADS];
    if (t == 0)
        running = oh_exchange_relaxed_gpu_u32(OH_MEMBER(a->local, oh_local, running), c.sequence);
    OH_UNROLL
    for (k = 0; k < OH_GUARD_LOADS; k++) {
        b = 2 * (t + k * threads);
        two[k].w[0] = two[k].w[2] = c.sequence;
        if (b < a->regions.max_blocks) two[k] = oh_ld_relaxed_sys_unit(oh_sequence_word(a, b));
        if (b + 1 >= a->regions.max_blocks) two[k].w[2] = c.sequence;
    }
    OH_UNROLL
    for (k = 0; k < OH_GUARD_LOADS; k++)
        stale += oh_is_stale(two[k].w[0], c) + oh_is_stale(two[k].w[2], c);
    OH_NO_UNROLL
    for (b = 2 * OH_GUARD_LOADS * threads + t; b < a->regions.max_blocks; b += threads)
        stale += oh_is_stale((oh_u32)oh_ld_relaxed_gpu_u64(oh_sequence_word(a, b)), c);
    stale += running == c.sequence;
    if (stale)
        oh_fail(a, OH_FAIL_AT(OH_FAIL_OVERLAP, OH_SITE_ENTRY), -1, c.sequence, running, stale);
    return stale;
}

/* The k-th other rank, in rank order. */
OH_FN oh_u32 oh_other_rank(const oh_args *a, oh_u32 k) {
    return k + (k >= a->rank);
}

/* Where a thread of the signature block writes and reads in parity 0, for its k-th peer. */
typedef struct oh_signature_words {
    oh_u64 there, from;
} oh_signature_words;

OH_FN oh_signature_words oh_signature_words_of(const oh_args *a, oh_u32 k) {
    oh_signature_words w = {0, 0};
    if (k + 1 < a->world) {
        w.there = oh_signature_address(a, a->rank, oh_other_rank(a, k), 0);
        w.from = oh_signature_address(a, oh_other_rank(a, k), a->rank, 0);
    }
    return w;
}

/* What comes before the wait for the previous grid in the signature's block; those behind it, whose
 * work does not depend on that grid, end here. */
OH_FN oh_signature_words oh_signature_begin(const oh_args *a, oh_grid g) {
    if (g.block >= g.blocks) oh_prefetch_share(a->prefetch, a->prefetch_bytes, g);
    return oh_signature_words_of(a, g.thread);
}

/* All that the last block of a grid does. Thread t serves peers t, t + threads, ...; on a GPU one
 * each, and the warps after the first are the guard. It must be no slower than the data: `words` of
 * the first peer are found before the wait for the previous grid, and one comparison tells that the
 * peer's word is there and agrees. All else is out of the way. `hash` is what this rank says;
 * `refused`: it fails instead, and says nothing. */
OH_FN void oh_signature_block(const oh_args *a, oh_grid g, oh_u64 sequence_word,
                              oh_signature_words words, oh_u32 hash, oh_u32 refused) {
    const oh_u32 guards = g.threads > OH_WARP ? OH_WARP : 0;
    oh_call_state c = oh_call_begin(sequence_word);
    const oh_u64 parity = c.parity ? sizeof(oh_signature_line) * OH_MAX_RANKS : 0;
    const oh_u64 word = (oh_u64)hash << 32 | c.sequence;
    oh_signature_words w = words;
    oh_u32 k, n;
    c.dead |= refused;
    OH_NO_UNROLL
    for (k = g.thread; k + 1 < a->world && !c.dead; k += g.threads) {
        if (k != g.thread) w = oh_signature_words_of(a, k);
        oh_st_relaxed_sys_u64(w.there + parity, word);
    }
    if (a->early_trigger) oh_pdl_trigger();
    if (g.thread >= guards && !c.dead)
        c.dead = oh_overlaps(a, g.thread - guards, g.threads - guards, c);
    w = words;
    OH_NO_UNROLL
    for (k = g.thread; k + 1 < a->world && !c.dead; k += g.threads) {
        if (k != g.thread) w = oh_signature_words_of(a, k);
        n = 0;
        OH_NO_UNROLL
        while (oh_ld_relaxed_sys_u64(w.from + parity) != word && ++n < OH_POLLS) {
        }
        if (OH_UNLIKELY(n == OH_POLLS))
            c.dead = !oh_signature_accepted(a, oh_other_rank(a, k), c.sequence, g.thread == 0);
    }
    oh_call_end(a, g, c);
}

/* What a block does before its own work: the wait for the previous grid. Nonzero: it was the
 * signature's, and has done it all. */
OH_FN oh_u32 oh_call_enter(const oh_args *a, oh_grid g) {
    const oh_u64 sequence_word = oh_sequence_word(a, g.block);
    const oh_u32 signs = g.block >= g.blocks - 1;
    oh_signature_words words = {0, 0};
    if (signs) words = oh_signature_begin(a, g);
    oh_prefetch(sequence_word);
    oh_pdl_wait();
    if (signs) oh_signature_block(a, g, sequence_word, words, a->hash, 0);
    return signs;
}

#endif
