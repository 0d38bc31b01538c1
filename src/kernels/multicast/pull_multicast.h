/* 1shot_pull and 2shot_pull over multicast: the switch adds. A load of the group's address gives
 * the sum of one place in all ranks' symmetric buffers, a store goes to all of them; so a rank
 * receives and sends one message's worth where it would be W-1. From sm_90 on; off unless asked
 * for, and never run on hardware: the host device emulates it, so that control flow, staging and
 * chunks are tested.
 *
 * Steps of a block, per chunk, as over the workspace (pull_1shot.h, pull_2shot.h):
 *   1shot  stage its units; meet; load its units' sums, store them to the output
 *   2shot  stage its sub-indices of every shard, the own one too; meet; load the sums of its
 *          sub-indices of the own shard, store them to the output and once to all pull buffers;
 *          meet; collect the other shards
 *
 *   bytes per rank             1shot: S received; 2shot: S/W received and sent, S from the others
 *   hops on the critical path  1shot: 3 (signal, load and answer); 2shot: 4, and the exit
 *   signals                    1shot: 1 per (block, peer, chunk), and an exit at the end; 2shot: 2
 *
 * Places, barriers and the reuse of halves and sub-slots are those of the workspace, for the same
 * reasons: block b reads of every rank what block b has staged there. One difference: 1shot ends
 * with an exit. A load of the group's address touches all symmetric buffers, through one object
 * that all ranks share; so no rank leaves a call, and perhaps gives back its memory, while a peer
 * still loads.
 *
 * Aliases. A place is staged and collected by its own address and loaded and stored by the group's.
 * Each path from one to the other goes through a barrier, and has a fence in front of it by the
 * thread that accessed first: after staging, and after storing sums to all.
 *
 * Numbers. The order of a sum is the switch's, in fp32 with one rounding: bits may differ from
 * those of other sources. 2shot gives equal bits on all ranks, since one rank asks for each; in
 * 1shot each rank asks for itself, and nothing promises that the answers are equal. A NaN becomes
 * ours. The short last unit was filled with zeros when it was staged. */
#ifndef OH_PULL_MULTICAST_H
#define OH_PULL_MULTICAST_H

#include "kernels/pull/pull_1shot.h"
#include "kernels/pull/pull_2shot.h"

/* The sum of the units at one offset of all symmetric buffers. */
OH_FN oh_unit oh_multicast_sum(const oh_args *a, oh_u64 offset, oh_u32 dtype) {
    oh_unit v;
    oh_u32 i;
    if (dtype == OH_F32) {
        v = oh_multimem_add_relaxed_sys_f32(a->multicast, offset);
        OH_UNROLL
        for (i = 0; i < 4; i++)
            if (oh_f32_of_bits(v.w[i]) != oh_f32_of_bits(v.w[i])) v.w[i] = 0x7FFFFFFFu;
        return v;
    }
    if (dtype == OH_F16)
        v = oh_multimem_add_relaxed_sys_f16x2(a->multicast, offset);
    else
        v = oh_multimem_add_relaxed_sys_bf16x2(a->multicast, offset);
    return oh_sum_rounded(oh_sum_of(v, dtype), dtype); /* exact, but for the bits of a NaN */
}

OH_FN void oh_multicast_1shot(const oh_args *a, oh_grid g, oh_u32 dtype) {
    const oh_u32 stride = (g.blocks - 1) * g.threads, first = g.block * g.threads + g.thread;
    oh_u32 chunk, u;
    oh_call_state c;
    if (oh_call_enter(a, g)) return;
    c = oh_call_begin(oh_sequence_word(a, g.block));
    OH_NO_UNROLL
    for (chunk = 0; chunk < a->chunks; chunk++) {
        const oh_message m = oh_message_of(a, dtype, chunk);
        const oh_u64 place = oh_pull_1shot_place(a, c.sequence, chunk),
                     here = oh_own_address(a, place);
        OH_NO_UNROLL
        for (u = first; u < m.units && !c.dead; u += stride)
            oh_st_unit(here + (oh_u64)u * OH_UNIT_BYTES, oh_load_unit(&m, u, dtype));
        oh_fence_proxy_alias();
        c.dead = oh_barrier(a, g, OH_SIGNAL_ENTER, c.sequence, chunk + 1, c.dead);
        if (a->early_trigger) oh_pdl_trigger();
        if (c.dead) break;
        OH_NO_UNROLL
        for (u = first; u < m.units; u += stride)
            oh_store_unit(&m, u, oh_multicast_sum(a, place + (oh_u64)u * OH_UNIT_BYTES, dtype),
                          dtype);
    }
    c.dead = oh_barrier(a, g, OH_SIGNAL_EXIT, c.sequence, 1, c.dead);
    oh_call_end(a, g, c);
}

/* The own shard too: its sums come from all pull buffers alike. */
OH_FN void oh_multicast_stage(const oh_args *a, const oh_portion *p, oh_u32 dtype) {
    const oh_u32 end = oh_shard_end(p->shards, a->rank, p->m.units);
    oh_u32 u;
    OH_NO_UNROLL
    for (u = oh_shard_begin(p->shards, a->rank) + p->first; u < end; u += p->stride)
        oh_st_unit(p->here + (oh_u64)u * OH_UNIT_BYTES, oh_load_unit(&p->m, u, dtype));
    oh_2shot_copy_rest(a, p, 0, 0, dtype);
}

OH_FN void oh_multicast_reduce(const oh_args *a, const oh_portion *p, oh_u64 place, oh_u32 dtype) {
    const oh_u32 end = oh_shard_end(p->shards, a->rank, p->m.units);
    oh_u32 u;
    OH_NO_UNROLL
    for (u = oh_shard_begin(p->shards, a->rank) + p->first; u < end; u += p->stride) {
        const oh_u64 offset = place + (oh_u64)u * OH_UNIT_BYTES;
        const oh_unit sum = oh_multicast_sum(a, offset, dtype);
        oh_multimem_st_relaxed_sys_unit(a->multicast, offset, sum);
        oh_store_unit(&p->m, u, sum, dtype);
    }
}

OH_FN void oh_multicast_2shot(const oh_args *a, oh_grid g, oh_u32 dtype) {
    oh_u64 place;
    oh_portion p;
    oh_u32 chunk;
    oh_call_state c;
    if (oh_call_enter(a, g)) return;
    c = oh_call_begin(oh_sequence_word(a, g.block));
    place = a->regions.pull + (c.parity ? a->regions.pull_bytes : 0);
    p.shards = oh_shards_of(a->units, a->world);
    p.here = oh_own_address(a, place);
    p.first = g.block * g.threads + g.thread;
    p.stride = (g.blocks - 1) * g.threads;
    OH_NO_UNROLL
    for (chunk = 0; chunk < a->chunks; chunk++) {
        p.m = oh_message_of(a, dtype, chunk);
        if (!c.dead) oh_multicast_stage(a, &p, dtype);
        oh_fence_proxy_alias();
        c.dead = oh_barrier(a, g, OH_SIGNAL_ENTER, c.sequence, chunk + 1, c.dead);
        if (a->early_trigger) oh_pdl_trigger();
        if (c.dead) break;
        oh_multicast_reduce(a, &p, place, dtype);
        oh_fence_proxy_alias();
        c.dead = oh_barrier(a, g, OH_SIGNAL_EXIT, c.sequence, chunk + 1, 0);
        if (c.dead) break;
        oh_2shot_copy_rest(a, &p, 0, 1, dtype);
    }
    oh_call_end(a, g, c);
}

#endif
