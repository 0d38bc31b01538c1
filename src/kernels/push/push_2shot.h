/* 2shot_push: reduce-scatter and all-gather by stores; readiness is in the data.
 *
 * A chunk is cut into W shards (shards.h), shard d owned by rank d. Slot (parity, s) on rank d has
 * two halves: in the first lies what s sends of shard d, in the second the sums of shard s. Steps
 * of a thread, per chunk, for its sub-indices j, j + stride, ... of every shard:
 *   scatter  own units of shard d to owner d's slot (parity, me), first half; for every other d
 *   reduce   poll the first half of every source's slot, re-arm it, sum in rank order with the own
 *            value at its
 *            place, round once; store to the output and to every peer's slot (parity, me), second
 *            half
 *   gather   poll the second half of every other owner's slot, re-arm it, store to the output
 *
 *   bytes sent per rank        2 S (W-1)/W
 *   hops on the critical path  2
 *   signals, barriers          none; one signature word per peer in a block of its own (call.h)
 *
 * A thread waits only for what the same thread of its peers has sent in this pass or the one
 * before, which waits for nothing later: no deadlock, in whatever order blocks run. In place: each
 * position is touched by one thread, which has loaded all its units of a chunk, own ones apart,
 * before it stores any of the others' sums, and each own one before its sum.
 *
 * Reuse between calls: as in 1shot_push. Finishing call e+1 needed every peer's signature of e+1,
 * sent after its call e had read and re-armed both halves.
 *
 * Reuse between chunks. A message longer than W half slots goes in chunks that take turns in two
 * sub-slots of each half. Position j of a shard belongs to the same thread on all ranks and in all
 * chunks, and no shard grows from chunk to chunk (shards.h): so a thread that is about to store
 * chunk c+2 at j in some slot knows of chunks c and c+1 at j. One acq_rel fence F(c+1) stands
 * between a thread's chunks c and c+1.
 *   scatter, to owner d  d re-armed j of chunk c while reducing, before its F(c+1); after that it
 *                        stored
 *            its sum of c+1 at j, which this thread has polled in the gather of c+1, before F(c+2)
 *   reduce, sum to p     p re-armed j of chunk c while gathering, before its F(c+1); after that it
 *            scattered its unit of c+1 at j, which this thread has polled in the reduce of c+1,
 *            before F(c+2)
 * Both ways the peer's re-arming comes before its fence, and this thread's store after its own. For
 * the scatter one sub-slot would not do: only d's sum of chunk c tells that d has read, and d
 * re-arms after it has stored that sum. For the sums one would, if a store can be taken to stay
 * behind the load that its value comes from; the memory model does not say so, and the scatter
 * needs two anyway. Nothing is scattered ahead: with chunk c+1 scattered before c is gathered,
 * neither holds.
 *
 * A sum is canonical and never looks like the sentinel. The short last unit of a message is padded
 * with zeros, sent, polled and re-armed whole; its sum is too.
 *
 * What the caller guarantees: as 1shot_push; and a message of at least W units, so that every rank
 * owns some of it. */
#ifndef OH_PUSH_2SHOT_H
#define OH_PUSH_2SHOT_H

#include "kernels/push/push_1shot.h"
#include "kernels/shards.h"

/* One thread's part in one chunk. */
typedef struct oh_2shot_part {
    oh_message m;
    oh_shards shards;
    oh_u64 scatter, gather;              /* the chunk's sub-slots: offsets from parity 0's slot */
    oh_u32 stride;                       /* between this thread's sub-indices */
    oh_u32 scattered, reduced, gathered; /* the sub-index that each step comes to next */
} oh_2shot_part;

OH_FN oh_u64 oh_part_offset(const oh_2shot_part *p, oh_u32 rank, oh_u32 j) {
    return (oh_u64)(oh_shard_begin(p->shards, rank) + j) * OH_UNIT_BYTES;
}

OH_FN void oh_push_sum(const oh_args *a, oh_u64 at, oh_unit sum, oh_u32 world) {
    oh_u32 k;
    OH_UNROLL
    for (k = 0; k + 1 < world; k++) oh_st_relaxed_sys_unit(a->peers[k].there + at, sum);
}

/* ---- the fast path: sub-indices below `limit`, whole units in all shards, short waits -------- */

/* The last shard is the shortest. */
OH_FN oh_u32 oh_whole_in_all(const oh_2shot_part *p, oh_u32 world) {
    const oh_u32 last = oh_shard_begin(p->shards, world - 1);
    return p->m.whole > last ? p->m.whole - last : 0;
}

/* `dead` comes with the sequence number; the loads need not wait for it. */
OH_FN void oh_scatter_whole(const oh_args *a, oh_2shot_part *p, oh_u32 limit, oh_u32 dead,
                            oh_u32 dtype, oh_u32 world) {
    oh_unit v[OH_MAX_RANKS];
    oh_u32 k;
    OH_NO_UNROLL
    for (; p->scattered < limit; p->scattered += p->stride) {
        const oh_u64 at = p->scatter + (oh_u64)p->scattered * OH_UNIT_BYTES;
        OH_UNROLL
        for (k = 0; k + 1 < world; k++)
            v[k] = oh_ld_unit(p->m.in + oh_part_offset(p, oh_next_rank(a, k + 1), p->scattered));
        if (OH_UNLIKELY(dead)) return;
        OH_UNROLL
        for (k = 0; k + 1 < world; k++)
            oh_st_relaxed_sys_unit(a->peers[k].there + at, oh_sanitise(v[k], dtype));
    }
}

OH_FN void oh_reduce_whole(const oh_args *a, oh_2shot_part *p, oh_u32 limit, oh_u32 dtype,
                           oh_u32 world) {
    oh_unit v[OH_MAX_RANKS], own;
    OH_NO_UNROLL
    for (; p->reduced < limit; p->reduced += p->stride) {
        const oh_u64 place = (oh_u64)p->reduced * OH_UNIT_BYTES;
        const oh_u64 offset = oh_part_offset(p, a->rank, p->reduced);
        own = oh_ld_unit(p->m.in + offset);
        if (OH_UNLIKELY(!oh_look_long(a, p->scatter + place, v, world))) return;
        own =
            oh_sum_finished(a, oh_add_sources(a, v, own, dtype, world), p->m.first + offset, dtype);
        oh_push_sum(a, p->gather + place, own, world);
        oh_st_unit(p->m.out + offset, own);
        oh_rearm(a, p->scatter + place, world);
    }
}

OH_FN void oh_gather_whole(const oh_args *a, oh_2shot_part *p, oh_u32 limit, oh_u32 world) {
    oh_unit v[OH_MAX_RANKS];
    oh_u32 k;
    OH_NO_UNROLL
    for (; p->gathered < limit; p->gathered += p->stride) {
        const oh_u64 at = p->gather + (oh_u64)p->gathered * OH_UNIT_BYTES;
        if (OH_UNLIKELY(!oh_look_long(a, at, v, world))) return;
        OH_UNROLL
        for (k = 0; k + 1 < world; k++)
            oh_st_unit(p->m.out + oh_part_offset(p, oh_other_rank(a, k), p->gathered), v[k]);
        oh_rearm(a, at, world);
    }
}

/* ---- what the fast path has left: any alignment, any wait ------------------------------------ */

/* This thread's sub-indices of every other owner's shard go out. */
OH_FN void oh_scatter_shards(const oh_args *a, const oh_2shot_part *p, oh_u32 dtype) {
    oh_u32 k, u;
    OH_NO_UNROLL
    for (k = 0; k + 1 < a->world; k++) {
        const oh_u32 owner = oh_next_rank(a, k + 1), begin = oh_shard_begin(p->shards, owner),
                     end = oh_shard_end(p->shards, owner, p->m.units);
        OH_NO_UNROLL
        for (u = begin + p->scattered; u < end; u += p->stride)
            oh_st_relaxed_sys_unit(a->peers[k].there + p->scatter +
                                       (oh_u64)(u - begin) * OH_UNIT_BYTES,
                                   oh_sanitise(oh_load_unit(&p->m, u, dtype), dtype));
    }
}

/* This thread's sub-indices of the own shard. 0: the communicator died. */
OH_FN oh_i32 oh_reduce_shard(const oh_args *a, const oh_2shot_part *p, oh_waiter w, oh_stamp k) {
    const oh_u32 begin = oh_shard_begin(p->shards, a->rank),
                 end = oh_shard_end(p->shards, a->rank, p->m.units);
    oh_u32 u;
    OH_NO_UNROLL
    for (u = begin + p->reduced; u < end; u += p->stride) {
        const oh_u64 place = (oh_u64)(u - begin) * OH_UNIT_BYTES, at = p->scatter + place;
        oh_unit sum;
        if (!oh_await_sources(a, at, w)) return 0;
        sum = oh_sum_finished(a, oh_collect_unit(a, at, oh_load_unit(&p->m, u, k.dtype), k),
                              oh_unit_offset(&p->m, u), k.dtype);
        oh_push_sum(a, p->gather + place, sum, k.world ? k.world : a->world);
        oh_store_unit(&p->m, u, sum, k.dtype);
    }
    return 1;
}

/* This thread's sub-indices of every other owner's shard come in. 0: the communicator died. */
OH_FN oh_i32 oh_gather_shards(const oh_args *a, const oh_2shot_part *p, oh_waiter w, oh_u32 dtype) {
    oh_u32 k, u;
    OH_NO_UNROLL
    for (k = 0; k + 1 < a->world; k++) {
        const oh_u32 owner = oh_other_rank(a, k), begin = oh_shard_begin(p->shards, owner),
                     end = oh_shard_end(p->shards, owner, p->m.units);
        OH_NO_UNROLL
        for (u = begin + p->gathered; u < end; u += p->stride) {
            const oh_u64 at = a->peers[k].from + p->gather + (oh_u64)(u - begin) * OH_UNIT_BYTES;
            oh_unit sum;
            if (!oh_await_unit(a, at, owner, w)) return 0;
            sum = oh_ld_relaxed_sys_unit(at);
            oh_st_relaxed_sys_unit(at, oh_unit_armed());
            oh_store_unit(&p->m, u, sum, dtype);
        }
    }
    return 1;
}

/* The kernel. `world` 0: the generic instance, which has no fast path. The last block carries the
 * signature. */
OH_FN void oh_push_2shot(const oh_args *a, oh_grid g, oh_u32 dtype, oh_u32 world) {
    const oh_stamp k = {dtype, world};
    oh_2shot_part p;
    oh_u32 chunk, limit;
    oh_call_state c;
    if (oh_call_enter(a, g)) return;
    c = oh_call_begin(oh_sequence_word(a, g.block));
    p.shards = oh_shards_of(a->units, world ? world : a->world);
    p.stride = (g.blocks - 1) * g.threads;
    OH_NO_UNROLL
    for (chunk = 0; chunk < a->chunks; chunk++) {
        if (chunk) oh_fence_acq_rel_sys();
        p.m = oh_message_of(a, dtype, chunk);
        p.scatter = (c.parity ? a->parity_bytes : 0) + (chunk & 1 ? a->regions.slot_bytes / 4 : 0);
        p.gather = p.scatter + a->regions.slot_bytes / 2;
        p.scattered = p.reduced = p.gathered = g.block * g.threads + g.thread;
        limit = world ? oh_whole_in_all(&p, world) : 0;
        /* Whole units with short waits, step by step; each step stops where that ends. */
        oh_scatter_whole(a, &p, limit, c.dead, dtype, world);
        if (OH_UNLIKELY(c.dead)) break;
        oh_reduce_whole(a, &p, limit, dtype, world);
        if (a->early_trigger) oh_pdl_trigger();
        if (p.reduced >= limit) oh_gather_whole(a, &p, limit, world);
        /* What they have left. */
        if (OH_UNLIKELY(p.gathered < oh_shard_max(p.shards))) {
            oh_scatter_shards(a, &p, dtype);
            c.dead = !oh_reduce_shard(a, &p, oh_waiter_of(c, g, OH_SITE_SCATTER), k) ||
                     !oh_gather_shards(a, &p, oh_waiter_of(c, g, OH_SITE_GATHER), dtype);
        }
        if (OH_UNLIKELY(c.dead)) break;
    }
    oh_call_end(a, g, c);
}

#endif
