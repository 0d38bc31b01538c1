/* 1shot_pull, and how it goes over the workspace (captured addresses: pull_direct.h): every rank
 * stages its input in its own pull buffer, then reads everybody's.
 *
 * Steps of a block, per chunk: copy its units of the input into this call's half of the own pull
 * buffer; meet the same block of every peer (pull.h); load its units from all ranks, sum in rank
 * order, store to the output. One launch: block b reads only what block b of each rank has staged,
 * since the map from units to blocks is the same on all ranks, so no barrier of a whole grid is
 * needed.
 *
 *   bytes received per rank    (W-1) S, and S copied locally
 *   hops on the critical path  2: the signal, then the load and its answer
 *   signals                    1 per (block, peer, chunk): enter
 *
 * Why no exit barrier: the half is written again at call e+2. This rank finished e+1 only with
 * every peer's signature of e+1, which each sent after its call e had ended, its reads with it.
 * (The signature block waits for all of them, and the grid of e+2 begins after the grid of e+1.)
 *
 * A message longer than a half goes in chunks of at most half a half, in two sub-slots in turn. A
 * block stages chunk c+1 over chunk c-1 after it has met its peers for chunk c; each peer's block
 * came there after reading chunk c-1 (the release of the barrier covers loads as well). Sub-slots
 * suffice because unit i of every chunk belongs to the same block in every chunk, so a block's
 * peers are the only ones who read what it overwrites; the last chunk may be shorter.
 *
 * In place: a thread loads unit i of the input before the barrier and stores unit i of the output
 * after it, and nobody else touches either.
 *
 * What the caller guarantees: as for 1shot_push; and that no rank's symmetric buffer vanishes while
 * a peer's call may run: a rank may finish while a peer still reads from it (the library's own
 * memory is counted by all who mapped it). */
#ifndef OH_PULL_1SHOT_H
#define OH_PULL_1SHOT_H

#include "kernels/pull/pull_direct.h"

/* Where a chunk lies in every rank's symmetric buffer. */
OH_FN oh_u64 oh_pull_1shot_place(const oh_args *a, oh_u32 sequence, oh_u32 chunk) {
    return a->regions.pull + (sequence & 1 ? a->regions.pull_bytes : 0) +
           (chunk & 1 ? a->chunk_bytes : 0);
}

/* The kernel. `world` 0: the generic instance. The last block carries the signature. The first unit
 * is loaded together with the sequence number, which says where to stage it. A dead communicator's
 * calls stage nothing: a peer may still read what an earlier call staged there. */
OH_FN void oh_pull_1shot(const oh_args *a, oh_grid g, oh_u32 dtype, oh_u32 world) {
    const oh_u32 stride = (g.blocks - 1) * g.threads, first = g.block * g.threads + g.thread;
    const oh_stamp k = {dtype, world};
    const oh_u64 sequence_word = oh_sequence_word(a, g.block);
    oh_unit own = oh_unit_armed();
    oh_u32 chunk, u = first;
    oh_registration_view registration;
    oh_call_state c;
    if (oh_pull_enter(a, g, &registration, 1, world)) return;
    if (oh_registration_is_direct(&registration, 1)) {
        oh_pull_direct(a, g, oh_call_begin(sequence_word), &registration, 1, k);
        return;
    }
    if (first < a->whole) own = oh_ld_unit(a->in + (oh_u64)first * OH_UNIT_BYTES);
    c = oh_call_begin(sequence_word);
    c.dead |= oh_registration_refused(a, &registration, 1);
    if (first < a->whole && !c.dead) {
        oh_st_unit(oh_own_address(a, oh_pull_1shot_place(a, c.sequence, 0)) +
                       (oh_u64)first * OH_UNIT_BYTES,
                   own);
        u += stride;
    }
    OH_NO_UNROLL
    for (chunk = 0; chunk < a->chunks; chunk++) {
        const oh_message m = oh_message_of(a, dtype, chunk);
        const oh_u64 place = oh_pull_1shot_place(a, c.sequence, chunk),
                     here = oh_own_address(a, place);
        /* Stage, in the half that no peer reads any more. */
        OH_NO_UNROLL
        for (; u < m.units && !c.dead; u += stride)
            oh_st_unit(here + (oh_u64)u * OH_UNIT_BYTES, oh_load_unit(&m, u, dtype));
        c.dead = oh_barrier(a, g, OH_SIGNAL_ENTER, c.sequence, chunk + 1, c.dead);
        if (a->early_trigger) oh_pdl_trigger();
        if (c.dead) break;
        /* Sum what the same block of every rank has staged. */
        OH_NO_UNROLL
        for (u = first; u < m.units; u += stride) {
            const oh_u64 at = (oh_u64)u * OH_UNIT_BYTES;
            own = oh_ld_unit(here + at);
            own = oh_sum_finished(a, oh_pull_sum(a, own, place + at, dtype, world), m.first + at,
                                  dtype);
            oh_store_unit(&m, u, own, dtype);
        }
        u = first;
    }
    oh_call_end(a, g, c);
}

#endif
