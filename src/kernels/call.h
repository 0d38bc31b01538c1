/* Begin and end of every call: epoch words, signatures, the guard against overlap.
 *
 * Epoch words. Local memory holds one word {dead, epoch of the last call} per possible block;
 * blocks write the lower half, the thread that concludes a failure (guard.h) the upper halves of
 * all. Block b of a grid of G reads word b once; at its end, after a group_sync, it writes words b,
 * b+G, b+2G, ... So any grid may follow any grid without idle blocks or atomics. Never one word
 * bumped by one block (late blocks would read the new value), never only the active blocks' words
 * (a wider grid would find old ones).
 *
 * Signatures. In every call every rank tells every peer {epoch, hash of all that must agree}, and
 * the call does not end before it has read all peers'. That is credit (b) of docs/design.md for
 * every algorithm, and finds disagreement at once. The last block of a grid does it and nothing
 * else. Relaxed: the word is complete in itself, 8 bytes are written at once. Reuse after two calls
 * is covered by the credit rule itself.
 *
 * Overlap. The signature block swaps the call's epoch into local.running: finding its own epoch
 * there means that two grids read the same epoch words. And every epoch word must be the last
 * call's, or this call's already: an older one belongs to a block of the call before that has not
 * ended. Off the critical path: asked before the peers' signatures are polled, looked at after. */
#ifndef OH_CALL_H
#define OH_CALL_H

#include "kernels/guard.h"

typedef struct oh_call_state {
    oh_u32 epoch;
    oh_u32 phase;
    oh_u32 dead; /* this thread has given up, or found the communicator dead */
} oh_call_state;

/* A dead communicator's calls that are still queued must send nothing: data would land in slots
 * that peers have not read yet, and a signature would let a peer finish on it. The mark comes with
 * the epoch, in one load: a load of its own costs 0.03 to 0.09 us (docs/tuning-log.md). */
OH_FN oh_call_state oh_call_begin(oh_u64 epoch_word) {
    const oh_u64 word = oh_ld_relaxed_gpu_u64(epoch_word);
    oh_call_state c;
    c.epoch = OH_EPOCH_NEXT((oh_u32)word);
    c.phase = c.epoch & 1u;
    c.dead = (oh_u32)(word >> 32);
    return c;
}

/* The end of a call for a thread that knows: all threads of the block have read their epoch word, and
 * all that the block waits for has come. */
OH_FN void oh_call_leave(const oh_args *a, oh_grid g, oh_call_state c) {
    oh_u32 b;
    if (!a->early_trigger) oh_pdl_trigger();
    OH_NO_UNROLL
    for (b = g.block + g.thread * g.blocks; b < a->planes.max_blocks; b += g.blocks * g.threads)
        oh_st_relaxed_gpu_u32(oh_epoch_word(a, b), c.epoch);
}

/* Reached by all threads of a block at one place: group_sync is a barrier. The first thread that
 * triggers does so for its block: hence after the barrier, when all have had their last poll. */
OH_FN void oh_call_end(const oh_args *a, oh_grid g, oh_call_state c) {
    oh_group_sync();
    oh_call_leave(a, g, c);
}

OH_FN oh_u64 oh_signature_address(const oh_args *a, oh_u32 from, oh_u32 to, oh_u32 phase) {
    return OH_MEMBER(oh_control_of(a, OH_SIGNATURE_HOME(from, to)), oh_control,
                     lines[phase][from].signature);
}

/* Waits for the signature of `from`. 0: the communicator died meanwhile. */
OH_FN oh_u64 oh_signature_await(const oh_args *a, oh_u32 from, oh_u32 epoch, oh_i32 looks_at_host) {
    const oh_u64 p = oh_signature_address(a, from, a->rank, epoch & 1u);
    oh_u64 v, state = 0;
    oh_u32 n;
    for (;;) {
        OH_NO_UNROLL
        for (n = 0; n < OH_POLLS; n++) {
            v = oh_ld_relaxed_sys_u64(p);
            if ((oh_u32)v == epoch) return v;
        }
        state = oh_wait_slow(a, state, OH_WAIT_FOR(OH_SITE_SIGNATURE, from, looks_at_host), epoch,
                             epoch, (oh_u32)v);
        if (!state) return 0;
    }
}

/* A hash differs: collect all words first, then name the lowest rank that differs from rank 0, as
 * all ranks do. */
OH_SLOW_FN void oh_signature_mismatch(const oh_args *a, oh_u32 epoch) {
    oh_u32 hash0 = a->hash, seen = a->hash, r;
    oh_i32 culprit = -1;
    for (r = 0; r < a->world; r++) {
        oh_u32 hash = a->hash;
        if (r != a->rank) {
            const oh_u64 v = oh_signature_await(a, r, epoch, 1);
            if (!v) return;
            hash = (oh_u32)(v >> 32);
        }
        if (r == 0) hash0 = hash;
        if (hash != hash0 && culprit < 0) {
            culprit = (oh_i32)r;
            seen = hash;
        }
    }
    oh_fail(a, OH_FAIL_MISMATCH, culprit, OH_SITE_SIGNATURE, epoch, hash0, seen);
}

OH_FN void oh_signature_send(const oh_args *a, oh_call_state c, oh_u32 peer) {
    oh_st_relaxed_sys_u64(oh_signature_address(a, a->rank, peer, c.phase),
                          (oh_u64)a->hash << 32 | c.epoch);
}

/* Does an epoch word belong to neither the last call nor this one? */
OH_FN oh_u32 oh_is_stale(oh_u32 epoch, oh_call_state c) {
    return epoch != c.epoch && OH_EPOCH_NEXT(epoch) != c.epoch;
}

/* The signature block: thread t serves peers t, t + threads, ... Returns nonzero if the
 * communicator died. What the guard against overlap reads is asked for first and looked at last, so
 * that nothing waits for it. */
OH_FN oh_u32 oh_signature_exchange(const oh_args *a, oh_grid g, oh_call_state c) {
    oh_u32 r, b, k, epochs[4], stale = 0, running = 0, dead = c.dead;
    OH_NO_UNROLL
    for (r = g.thread; r < a->world && !dead; r += g.threads)
        if (r != a->rank) oh_signature_send(a, c, r);
    if (g.thread == 0)
        running = oh_exchange_relaxed_gpu_u32(OH_MEMBER(a->local, oh_local, running), c.epoch);
    OH_UNROLL
    for (k = 0; k < 4; k++) {
        b = g.thread + k * g.threads;
        epochs[k] = c.epoch;
        if (b < a->planes.max_blocks)
            epochs[k] = (oh_u32)oh_ld_relaxed_gpu_u64(oh_epoch_word(a, b));
    }
    OH_NO_UNROLL
    for (r = g.thread; r < a->world && !dead; r += g.threads) {
        oh_u64 v;
        if (r == a->rank) continue;
        v = oh_signature_await(a, r, c.epoch, g.thread == 0);
        if (v && (oh_u32)(v >> 32) != a->hash) oh_signature_mismatch(a, c.epoch);
        if (!v || (oh_u32)(v >> 32) != a->hash) dead = 1;
    }
    OH_UNROLL
    for (k = 0; k < 4; k++) stale += oh_is_stale(epochs[k], c);
    OH_NO_UNROLL
    for (b = g.thread + 4 * g.threads; b < a->planes.max_blocks; b += g.threads)
        stale += oh_is_stale((oh_u32)oh_ld_relaxed_gpu_u64(oh_epoch_word(a, b)), c);
    if (!dead && (stale || running == c.epoch)) {
        oh_fail(a, OH_FAIL_OVERLAP, -1, OH_SITE_ENTRY, c.epoch, running, stale);
        dead = 1;
    }
    return dead;
}

/* All that the last block of a grid does. */
OH_FN void oh_signature_block(const oh_args *a, oh_grid g, oh_u64 epoch_word) {
    oh_call_state c = oh_call_begin(epoch_word);
    if (a->early_trigger) oh_pdl_trigger();
    c.dead = oh_signature_exchange(a, g, c);
    oh_call_end(a, g, c);
}

#endif
