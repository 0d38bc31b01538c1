/* scatter_push: reduce-scatter by stores; readiness is in the data.
 *
 * The input has one shard of `count` elements for each rank. Steps, per thread and unit i of a
 * shard: load unit i of every peer's shard; store each to slot (parity, me) of the peer that it is
 * for; poll slot (parity, s) of the own symmetric buffer for each source s; sum in rank order with
 * unit i of the own shard at its place, round once; write the output; re-arm the words just read.
 *
 *   bytes sent per rank        (W-1) shards
 *   hops on the critical path  1
 *   signals, barriers          none; one signature word per peer in a block of its own (call.h)
 *
 * It is 1shot_push but for what goes to whom: the same slots, units, sub-slots, fence and credit,
 * so all that push_1shot.h says of reuse and wrap holds here, and the numbers are the same. Every
 * rank hears from every other in every unit.
 *
 * In place: the output is the own shard of the input. Unit i of it is read by the thread that
 * stores the sum there, before; all other shards are read only.
 *
 * What the caller guarantees: as 1shot_push. `a->whole` counts units that lie whole and aligned in
 * all shards. */
#ifndef OH_PUSH_SCATTER_H
#define OH_PUSH_SCATTER_H

#include "kernels/push/push_1shot.h"

/* Whole unit `unit` of every peer's shard; `in` is where the chunk begins in the first shard. */
OH_FN void oh_scatter_load(const oh_args *a, oh_u64 in, oh_u64 shard, oh_u32 unit, oh_unit *v,
                           oh_u32 world) {
    oh_u32 k;
    OH_UNROLL
    for (k = 0; k + 1 < world; k++)
        v[k] = oh_ld_unit(in + shard * oh_next_rank(a, k + 1) + (oh_u64)unit * OH_UNIT_BYTES);
}

OH_FN void oh_scatter_store(const oh_args *a, oh_u64 at, const oh_unit *v, oh_u32 dtype,
                            oh_u32 world) {
    oh_u32 k;
    OH_UNROLL
    for (k = 0; k + 1 < world; k++)
        oh_st_relaxed_sys_unit(a->peers[k].there + at, oh_sanitise(v[k], dtype));
}

/* Brings whole unit `unit` of all shards into the L2. */
OH_FN void oh_scatter_prefetch(oh_u64 in, oh_u64 shard, oh_u32 unit, oh_u32 world) {
    oh_u32 r;
    OH_UNROLL
    for (r = 0; r < world; r++) oh_prefetch(in + shard * r + (oh_u64)unit * OH_UNIT_BYTES);
}

/* The fast path: whole units that arrive within OH_POLLS looks. As in 1shot_push a thread pushes
 * its next unit before it polls this one, so that the link is busy while it waits, and never across
 * chunks; the one after it is on its way from memory meanwhile. `first` holds unit s.unit of the
 * first chunk. Returns where it stopped. */
OH_FN oh_push_state oh_scatter_fast(const oh_args *a, oh_grid g, oh_call_state c, oh_push_state s,
                                    const oh_unit *first, oh_stamp k) {
    const oh_u32 stride = (g.blocks - 1) * g.threads, dtype = k.dtype, world = k.world;
    const oh_u64 shard = oh_part_bytes(a, dtype);
    oh_u32 whole = a->whole;
    oh_u64 in = a->in, out = a->out, place = oh_push_place(a, c.parity, 0);
    if (s.unit < whole) {
        oh_scatter_store(a, place + (oh_u64)s.unit * OH_UNIT_BYTES, first, dtype, world);
        s.pushed = 1;
    }
    if (a->early_trigger) oh_pdl_trigger();
    for (;;) {
        OH_NO_UNROLL
        while (s.unit < whole) {
            const oh_u64 offset = (oh_u64)s.unit * OH_UNIT_BYTES, at = place + offset;
            const oh_unit own = oh_ld_unit(in + shard * a->rank + offset);
            oh_unit v[OH_MAX_RANKS];
            /* The next one goes out before this one is heard, the one after it comes nearer. */
            if (s.unit + 2 * stride < whole)
                oh_scatter_prefetch(in, shard, s.unit + 2 * stride, world);
            if (s.unit + stride < whole) {
                oh_scatter_load(a, in, shard, s.unit + stride, v, world);
                oh_scatter_store(a, at + (oh_u64)stride * OH_UNIT_BYTES, v, dtype, world);
                s.pushed = 2;
            }
            /* This unit of all peers: sum, store, and arm the place for the call after next. */
            if (OH_UNLIKELY(!oh_look_long(a, at, v, world))) return s;
            oh_st_unit(out + offset,
                       oh_sum_rounded(oh_add_sources(a, v, own, dtype, world), dtype));
            oh_rearm(a, at, world);
            s.pushed--;
            s.unit += stride;
        }
        /* The next chunk: the fence puts what was re-armed before what is pushed now. */
        if (s.chunk + 1 >= a->chunks) return s;
        s.chunk++;
        s.unit = g.block * g.threads + g.thread;
        in += a->chunk_bytes;
        out += a->chunk_bytes;
        place = oh_push_place(a, c.parity, s.chunk);
        whole = oh_push_whole(a, dtype, s.chunk);
        oh_fence_acq_rel_sys();
        if (s.unit < whole) {
            oh_unit v[OH_MAX_RANKS];
            oh_scatter_load(a, in, shard, s.unit, v, world);
            oh_scatter_store(a, place + (oh_u64)s.unit * OH_UNIT_BYTES, v, dtype, world);
            s.pushed = 1;
        }
    }
}

/* The kernel. `world` 0: the generic instance, which has no fast path. The last block carries the
 * signature. The first units are loaded together with the sequence number. */
OH_FN void oh_push_scatter(const oh_args *a, oh_grid g, oh_u32 dtype, oh_u32 world) {
    const oh_stamp stamp = {dtype, world};
    const oh_u32 fast = !OH_PUSH_WHOLE_CHUNK && world && a->whole,
                 i = g.block * g.threads + g.thread;
    const oh_u64 shard = oh_part_bytes(a, dtype);
    oh_unit first[OH_MAX_RANKS];
    oh_push_state s = {0, i, 0};
    oh_call_state c;
    oh_u32 k;
    OH_UNROLL
    for (k = 0; k + 1 < world; k++) first[k] = oh_unit_armed(); /* to be defined */
    if (i < a->whole) oh_prefetch(a->in + shard * oh_next_rank(a, 1) + (oh_u64)i * OH_UNIT_BYTES);
    if (oh_call_enter(a, g)) return;
    if (fast && i < a->whole) oh_scatter_load(a, a->in, shard, i, first, world);
    c = oh_call_begin(oh_sequence_word(a, g.block));
    if (fast && !c.dead) s = oh_scatter_fast(a, g, c, s, first, stamp);
    if (OH_UNLIKELY(!c.dead && (s.unit < a->units || s.chunk + 1 < a->chunks)))
        c.dead = oh_push_rest(a, g, c, s, stamp, 1);
    oh_call_end(a, g, c);
}

#endif
