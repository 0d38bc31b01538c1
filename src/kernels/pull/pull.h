/* What 1shot_pull and 2shot_pull share: signals between blocks, and reading all ranks' memory.
 *
 * Signals. Word [which][writer] of a block's signals in a rank's symmetric buffer is written
 * by block b of that one rank and read by block b of the symmetric buffer's owner: plain stores of
 * {step, sequence number}, steps of a call counted from 1. Two kinds, enter ("my data is there")
 * and exit ("I have done with your memory"). Over the workspace a step is a chunk; a call that goes
 * by a registration's addresses has the one step 1 of each kind, and shorter barriers
 * (pull_direct.h). A barrier of a block with the same block of every peer:
 *
 *   block_any; st_release to each peer; spin relaxed on each peer's word, then one ld_acquire of
 *   it; block_any
 *
 * The release comes after the first barrier, so it covers what all threads of the block stored and
 * loaded before; the acquire comes before the second, so all threads see it. Only the last load
 * acquires: on a GPU each acquire empties the L1, and would do so at every poll. Whatever of a
 * peer's memory is read after a barrier was either never in that L1 since the call began, or is
 * thrown out of it by that one acquire.
 *
 * Which words count. A word names {step, sequence number}, or of a call by addresses {identity,
 * sequence number}: identities are negative as steps go, so here they never count. It is enough if
 * it is this call's and of this step or a later one; a peer may be ahead within a call. It may also
 * be one whole call ahead: a 1shot_pull over the workspace ends without a barrier at its end, so a
 * peer whose block has heard from this block may finish, begin the next call, whatever its source,
 * and signal there, over a word that was not read yet. It cannot be two ahead: call e+2 begins only
 * after this rank's signature of e+1. So words of e and of the one after e count, and no others:
 * not "e or later" by signed difference, for a block that has not run a pull call for 2^31 calls
 * has a word that looks later (a zero word does, once e has passed 2^31). A word left alone for
 * exactly one turn of the counter, 2^32-2 calls, would be taken for new; grids that skip a block
 * for so long do not do so to the call.
 *
 * Numbers. Loads start at the next rank, so that ranks read from different links at a time; the sum
 * is formed in rank order from registers that are turned by this rank's number (log2 W selections a
 * register). The instance for any number of ranks has no such registers and loads in rank order. */
#ifndef OH_PULL_H
#define OH_PULL_H

#include "kernels/call.h"
#include "kernels/shards.h"
#include "kernels/unit.h"

/* ---- signals --------------------------------------------------------------------------------- */
OH_FN oh_u64 oh_signal_address(const oh_args *a, oh_u32 block, oh_u32 which, oh_u32 writer,
                               oh_u32 reader) {
    return a->buffers[reader] + a->regions.signals + (oh_u64)block * OH_SIGNAL_BLOCK_BYTES +
           which * OH_SIGNAL_KIND_BYTES + 8 * writer;
}

OH_FN oh_i32 oh_signal_reached(oh_u64 word, oh_u32 sequence, oh_u32 step) {
    return ((oh_u32)word == sequence && (oh_i32)(word >> 32) >= (oh_i32)step) ||
           (oh_u32)word == OH_SEQUENCE_NEXT(sequence);
}

/* 0: the communicator died. */
OH_FN oh_u32 oh_signal_await(const oh_args *a, oh_u64 p, oh_u32 what, oh_u32 sequence,
                             oh_u32 step) {
    oh_u64 word = 0;
    OH_WAIT_LOOP(word = oh_ld_relaxed_sys_u64(p), oh_signal_reached(word, sequence, step), 1, a,
                 what, sequence, step, (oh_u32)(word >> 32))
}

/* Meets the same block of every peer; reached by all threads of a block at one place. Thread t
 * serves the (t+1)-th next rank. `dead` may differ from thread to thread (the mark in the sequence
 * number word may come between their loads of it): if any brings it, nothing is sent. Nonzero, for
 * all threads alike: the communicator is dead. */
OH_FN oh_u32 oh_barrier(const oh_args *a, oh_grid g, oh_u32 which, oh_u32 sequence, oh_u32 step,
                        oh_u32 dead) {
    const oh_u32 site = which == OH_SIGNAL_ENTER ? OH_SITE_PULL_ENTER : OH_SITE_PULL_EXIT;
    oh_u32 k;
    if (oh_block_any(dead)) return 1;
    dead = 0;
    OH_NO_UNROLL
    for (k = g.thread + 1; k < a->world; k += g.threads)
        oh_st_release_sys_u64(oh_signal_address(a, g.block, which, a->rank, oh_next_rank(a, k)),
                              (oh_u64)step << 32 | sequence);
    OH_NO_UNROLL
    for (k = g.thread + 1; k < a->world && !dead; k += g.threads) {
        const oh_u32 peer = oh_next_rank(a, k);
        const oh_u64 p = oh_signal_address(a, g.block, which, peer, a->rank);
        dead = !oh_signal_await(a, p, OH_WAIT_FOR(site, peer, g.thread == 0), sequence, step);
        /* Pairs with the release above: this word, or one the same block stored later. */
        (void)oh_ld_acquire_sys_u64(p);
    }
    return oh_block_any(dead);
}

/* ---- data ------------------------------------------------------------------------------------ */
/* Address of an offset of the own symmetric buffer, and what to add to peers[k].there to come to
 * the same offset on the (k+1)-th next rank. */
OH_FN oh_u64 oh_own_address(const oh_args *a, oh_u64 offset) {
    return a->buffers[a->rank] + offset;
}
OH_FN oh_u64 oh_peer_shift(const oh_args *a, oh_u64 offset) {
    return offset - a->regions.push - a->regions.slot_bytes * a->rank;
}

/* v[k] of the k-th next rank comes to v[r] of rank r. */
OH_FN void oh_in_rank_order(oh_unit *v, oh_u32 rank, oh_u32 world) {
    oh_u32 step, i, j;
    OH_UNROLL
    for (step = 1; step < world; step *= 2) {
        oh_unit turned[OH_MAX_RANKS];
        OH_UNROLL
        for (i = 0; i < world; i++) turned[(i + step) % world] = v[i];
        OH_UNROLL
        for (i = 0; i < world; i++) {
            OH_UNROLL
            for (j = 0; j < 4; j++) v[i].w[j] = rank & step ? turned[i].w[j] : v[i].w[j];
        }
    }
}

/* The sum in rank order of v[k], of the k-th next rank; not yet rounded. */
OH_FN oh_sum oh_add_turned(oh_unit *v, oh_u32 rank, oh_u32 dtype, oh_u32 world) {
    oh_sum sum;
    oh_u32 k;
    if (world > 2) oh_in_rank_order(v, rank, world); /* two terms commute */
    sum = oh_sum_of(v[0], dtype);
    OH_UNROLL
    for (k = 1; k < world; k++) sum = oh_sum_add(sum, v[k], dtype);
    return sum;
}

/* For any world size. `offset` in the symmetric buffers; rank 0's term may be the own one. */
OH_FN oh_sum oh_pull_sum_any(const oh_args *a, oh_unit own, oh_u64 offset, oh_u32 dtype) {
    oh_sum sum = oh_sum_of(a->rank ? oh_ld_unit(a->buffers[0] + offset) : own, dtype);
    oh_u32 r;
    OH_NO_UNROLL
    for (r = 1; r < a->world; r++) {
        oh_unit term = own;
        if (r != a->rank) term = oh_ld_unit(a->buffers[r] + offset);
        sum = oh_sum_add(sum, term, dtype);
    }
    return sum;
}

/* The sum of the units at one offset of all symmetric buffers, in rank order; the own one is given.
 * Not yet rounded. */
OH_FN oh_sum oh_pull_sum(const oh_args *a, oh_unit own, oh_u64 offset, oh_u32 dtype, oh_u32 world) {
    const oh_u64 shift = oh_peer_shift(a, offset);
    oh_unit v[OH_MAX_RANKS];
    oh_u32 k;
    if (!world) return oh_pull_sum_any(a, own, offset, dtype);
    v[0] = own;
    OH_UNROLL
    for (k = 1; k < world; k++) v[k] = oh_ld_unit(a->peers[k - 1].there + shift);
    return oh_add_turned(v, a->rank, dtype, world);
}

#endif
