/* 2shot_pull, and how it goes over the workspace (captured addresses: pull_direct.h):
 * reduce-scatter by reading, and the results stored into all ranks' pull buffers.
 *
 * A chunk is cut into W balanced shards, shard d reduced by rank d. Sub-index j of every shard
 * belongs to the same (block, thread) on every rank. Steps of a block, per chunk:
 *   stage    its sub-indices of every other rank's shard, from the input into the own pull buffer
 *   meet     enter: the same block of every peer has staged (pull.h)
 *   reduce   its sub-indices of the own shard: own value from the input, the others' from their
 *            pull buffers; the sum
 *            goes to the output and, at the same place, into every peer's pull buffer
 *   meet     exit: the same block of every peer has stored its sums
 *   collect  its sub-indices of the other ranks' shards, from the own pull buffer to the output
 * One launch: what block b reads, block b of some rank has written, so no barrier of a whole grid
 * is needed.
 *
 *   bytes per rank             S (W-1)/W received, as much sent, and twice as much copied locally
 *   hops on the critical path  3: signal, load and answer, results with the second signal behind
 *                              them
 *   signals                    2 per (block, peer, chunk)
 *
 * Why a sum may go where inputs were staged: position (d, j) of any pull buffer is read before the
 * exit only by rank d, whose thread has the data in registers when it stores the sum there.
 *
 * Reuse. A call's half of the pull buffer is written again at call e+2, after every peer's
 * signature of e+1, sent after it had finished e: as in 1shot_pull. Within a call one place serves
 * all chunks: this block stages chunk c+1 after it has met all peers at the exit of chunk c, each
 * of which had read chunk c's data and stored its sums before, and after it has collected those
 * sums itself. That needs position (d, j) to belong to the same block in every chunk: shards are
 * cut from the length of a whole chunk, also in the last one, where some may be short or empty.
 * (Chunks are made equal by the dispatch, so that the last one is hardly shorter.)
 *
 * In place: position by position, a thread loads the input before it stores the output, and nobody
 * else touches either.
 *
 * All ranks are heard at the barriers, so empty shards do no harm. The caller guarantees what
 * 1shot_pull wants. */
#ifndef OH_PULL_2SHOT_H
#define OH_PULL_2SHOT_H

#include "kernels/pull/pull_direct.h"

/* One thread's part in one chunk. */
typedef struct oh_portion {
    oh_message m;
    oh_shards shards;
    oh_u64 here;          /* the chunk's place in the own pull buffer */
    oh_u32 first, stride; /* sub-indices of each shard: first, first + stride, ... */
} oh_portion;

/* Copies units from..units-1 of the chunk that are this thread's in other ranks' shards: in to pull
 * buffer, or pull buffer to out; one at a time, of any alignment. */
OH_FN void oh_2shot_copy_rest(const oh_args *a, const oh_portion *p, oh_u32 from, oh_u32 collects,
                              oh_u32 dtype) {
    oh_u32 k, u;
    if (from >= p->m.units) return;
    OH_NO_UNROLL
    for (k = 1; k < a->world; k++) {
        const oh_u32 owner = oh_next_rank(a, k), end = oh_shard_end(p->shards, owner, p->m.units);
        OH_NO_UNROLL
        for (u = oh_shard_begin(p->shards, owner) + p->first; u < end; u += p->stride) {
            const oh_u64 at = p->here + (oh_u64)u * OH_UNIT_BYTES;
            if (u < from) continue;
            if (collects)
                oh_store_unit(&p->m, u, oh_ld_unit(at), dtype);
            else
                oh_st_unit(at, oh_load_unit(&p->m, u, dtype));
        }
    }
}

/* The same; whole units of several shards together, so that their loads are in flight together.
 * Four at a time: with all seven of eight ranks, ptxas keeps begin and end of every shard in
 * registers, and spills on sm_100 and sm_120. */
OH_FN void oh_2shot_copy(const oh_args *a, const oh_portion *p, oh_u32 collects, oh_u32 dtype,
                         oh_u32 world) {
    const oh_u64 from = collects ? p->here : p->m.in, to = collects ? p->m.out : p->here;
    const oh_u32 max = world && p->m.whole ? oh_shard_max(p->shards) : 0, four = world < 2 ? 1
                                                                                 : world < 5
                                                                                     ? world - 1
                                                                                     : 4;
    oh_u32 j, k, i;
    OH_NO_UNROLL
    for (j = p->first; j < max; j += p->stride) {
        OH_NO_UNROLL
        for (k = 1; k < world; k += four) {
            oh_unit v[4];
            oh_u32 u[4];
            OH_UNROLL
            for (i = 0; i < four; i++) {
                const oh_u32 owner = oh_next_rank(a, k + i);
                v[i] = oh_unit_armed(); /* to be defined */
                u[i] = oh_shard_begin(p->shards, owner) + j;
                if (k + i >= world || u[i] >= oh_shard_end(p->shards, owner, p->m.whole))
                    u[i] = p->m.units;
                if (u[i] < p->m.units) v[i] = oh_ld_unit(from + (oh_u64)u[i] * OH_UNIT_BYTES);
            }
            OH_UNROLL
            for (i = 0; i < four; i++)
                if (u[i] < p->m.units) oh_st_unit(to + (oh_u64)u[i] * OH_UNIT_BYTES, v[i]);
        }
    }
    oh_2shot_copy_rest(a, p, world ? p->m.whole : 0, collects, dtype);
}

/* This thread's sub-indices of the own shard. `place` is the chunk's offset in every symmetric
 * buffer. */
OH_FN void oh_2shot_reduce(const oh_args *a, const oh_portion *p, oh_u64 place, oh_u32 dtype,
                           oh_u32 world) {
    const oh_u32 end = oh_shard_end(p->shards, a->rank, p->m.units),
                 ranks = world ? world : a->world;
    oh_u32 u, k;
    OH_NO_UNROLL
    for (u = oh_shard_begin(p->shards, a->rank) + p->first; u < end; u += p->stride) {
        const oh_u64 offset = place + (oh_u64)u * OH_UNIT_BYTES, shift = oh_peer_shift(a, offset);
        const oh_unit own = oh_load_unit(&p->m, u, dtype),
                      sum = oh_sum_finished(a, oh_pull_sum(a, own, offset, dtype, world),
                                            oh_unit_offset(&p->m, u), dtype);
        OH_UNROLL
        for (k = 0; k + 1 < ranks; k++) oh_st_unit(a->peers[k].there + shift, sum);
        oh_store_unit(&p->m, u, sum, dtype);
    }
}

/* The kernel. `world` 0: the generic instance. The last block carries the signature. */
OH_FN void oh_pull_2shot(const oh_args *a, oh_grid g, oh_u32 dtype, oh_u32 world) {
    const oh_stamp k = {dtype, world};
    oh_u64 place;
    oh_portion p;
    oh_u32 chunk;
    oh_registration_view registration;
    oh_call_state c;
    if (oh_pull_enter(a, g, &registration, 2, world)) return;
    c = oh_call_begin(oh_sequence_word(a, g.block));
    if (oh_registration_is_direct(&registration, 2)) {
        oh_pull_direct(a, g, c, &registration, 2, k);
        return;
    }
    c.dead |= oh_registration_refused(a, &registration, 2);
    place = a->regions.pull + (c.parity ? a->regions.pull_bytes : 0);
    p.shards = oh_shards_of(a->units, world ? world : a->world);
    p.here = oh_own_address(a, place);
    p.first = g.block * g.threads + g.thread;
    p.stride = (g.blocks - 1) * g.threads;
    OH_NO_UNROLL
    for (chunk = 0; chunk < a->chunks; chunk++) {
        p.m = oh_message_of(a, dtype, chunk);
        /* Stage the others' shards, meet, reduce the own one from all, meet, collect the sums. */
        if (!c.dead) oh_2shot_copy(a, &p, 0, dtype, world);
        c.dead = oh_barrier(a, g, OH_SIGNAL_ENTER, c.sequence, chunk + 1, c.dead);
        if (a->early_trigger) oh_pdl_trigger();
        if (c.dead) break;
        oh_2shot_reduce(a, &p, place, dtype, world);
        c.dead = oh_barrier(a, g, OH_SIGNAL_EXIT, c.sequence, chunk + 1, 0);
        if (c.dead) break;
        oh_2shot_copy(a, &p, 1, dtype, world);
    }
    oh_call_end(a, g, c);
}

#endif
