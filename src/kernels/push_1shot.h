/* 1shot_push: every rank stores its data into its own landing slot on every peer; readiness is in the data.
 *
 * Steps, per thread and unit: load own unit; store it to slot (phase, me) of each peer, starting at the next
 * rank; poll slot (phase, s) of the own slab for each source s; sum in rank order, own value from registers; write
 * the output; re-arm the words just read.
 *
 *   bytes sent per rank      (W-1) S
 *   hops on the critical path  1
 *   signals, barriers          none; one signature word per peer in a block of its own (call.h)
 *
 * Why no barrier is needed, and two phases suffice: I write a peer's phase p at epoch e+2 only because I finished
 * e+1, for which I needed that peer's data of e+1, and it sent that only after its call e had read and re-armed
 * phase p: the end of its kernel e ordered the re-arming before its stores of e+1. Epochs wrap from 2^32-1 to 2,
 * keeping parity.
 *
 * A message longer than a slot goes in chunks that take turns in the two halves (sub-slots) of this call's slot;
 * the phase flips once per call, never per chunk. Unit i of every chunk belongs to the same thread on every rank,
 * and a thread pushes chunk c only after it has read chunk c-1 from every peer. Chunk c+1 of a peer thus
 * tells that it has read and re-armed chunk c-1, whose sub-slot c+1 uses. No kernel boundary orders the two here,
 * so one acq_rel fence per chunk stands between a thread's re-arming and its next push; it pairs with the same
 * fence of the peer's thread.
 *
 * All slot accesses are relaxed: each 32-bit word validates itself (not the sentinel: it is data), and nothing
 * else is concluded from its arrival within the call.
 *
 * What the caller guarantees: calls of one communicator are ordered on each rank; the grid fits on the smallest
 * rank's device at once; all ranks pass the same count, type and grid (checked by the signature). */
#ifndef OH_PUSH_1SHOT_H
#define OH_PUSH_1SHOT_H

#include "kernels/call.h"
#include "kernels/unit.h"

/* Slots of this call and chunk. */
typedef struct oh_push_place {
    oh_u64 mine;  /* this rank's landing area of source 0; source s is slot_bytes * s further */
    oh_u64 there; /* what to add to a peer's slab for this rank's slot */
} oh_push_place;

OH_FN oh_push_place oh_push_place_of(const oh_args *a, oh_u32 world, oh_u32 phase, oh_u32 sub_slot) {
    const oh_u64 plane = a->planes.push + a->planes.slot_bytes * world * phase + a->chunk_bytes * sub_slot;
    oh_push_place p;
    p.mine = a->slabs[a->rank] + plane;
    p.there = plane + a->planes.slot_bytes * a->rank;
    return p;
}

/* The next rank first, so that ranks load different links. */
OH_FN void oh_push_unit(const oh_args *a, oh_u32 world, oh_u64 where, oh_unit v, oh_u32 dtype) {
    const oh_unit clean = oh_sanitise(v, dtype);
    oh_u32 step;
    OH_UNROLL
    for (step = 1; step < world; step++) {
        oh_u32 peer = a->rank + step;
        if (peer >= world) peer -= world;
        oh_st_relaxed_sys_unit(a->slabs[peer] + where, clean);
    }
}

/* Loads one unit of every source at once, own value from registers, so that W-1 loads are in flight together. The
 * first source whose unit has not arrived, or -1. */
OH_FN oh_i32 oh_look(const oh_args *a, oh_u64 mine, oh_unit own, oh_unit *v, oh_u32 world) {
    oh_i32 missing = -1;
    oh_u32 s;
    OH_UNROLL
    for (s = 0; s < world; s++) {
        v[s] = own;
        if (s != a->rank) v[s] = oh_ld_relaxed_sys_unit(mine + a->planes.slot_bytes * s);
    }
    OH_UNROLL
    for (s = 0; s < world; s++)
        if (missing < 0 && s != a->rank && !oh_unit_arrived(v[s])) missing = (oh_i32)s;
    return missing;
}

/* Polls all sources of one unit, sums, stores, re-arms; `world` constant. 0: the communicator died. */
OH_FN oh_i32 oh_finish_unit(const oh_args *a, const oh_message *m, oh_u64 unit, oh_u64 mine, oh_unit own,
                            oh_u32 epoch, oh_i32 looks_at_host, oh_u32 dtype, oh_u32 world) {
    oh_unit v[OH_MAX_RANKS];
    oh_u64 state = 0;
    oh_sum sum;
    oh_i32 missing;
    oh_u32 s, n = 0;
    OH_NO_UNROLL
    while ((missing = oh_look(a, mine, own, v, world)) >= 0) {
        if (++n < OH_POLLS) continue;
        n = 0;
        state = oh_wait_slow(a, state, looks_at_host, OH_SITE_PUSH_1SHOT, missing, epoch, 0, OH_SENTINEL);
        if (!state) return 0;
    }
    sum = oh_sum_of(v[0], dtype);
    OH_UNROLL
    for (s = 1; s < world; s++) sum = oh_sum_add(sum, v[s], dtype);
    oh_store_unit(m, unit, oh_sum_rounded(sum, dtype), dtype);
    OH_UNROLL
    for (s = 0; s < world; s++)
        if (s != a->rank) oh_st_relaxed_sys_unit(mine + a->planes.slot_bytes * s, oh_unit_armed());
    return 1;
}

/* Waits until a unit of one source has arrived. 0: the communicator died. */
OH_FN oh_i32 oh_poll_unit(const oh_args *a, oh_u64 p, oh_u32 source, oh_u32 epoch, oh_i32 looks_at_host,
                          oh_unit *v) {
    oh_u64 state = 0;
    oh_u32 n;
    for (;;) {
        OH_NO_UNROLL
        for (n = 0; n < OH_POLLS; n++) {
            *v = oh_ld_relaxed_sys_unit(p);
            if (oh_unit_arrived(*v)) return 1;
        }
        state = oh_wait_slow(a, state, looks_at_host, OH_SITE_PUSH_1SHOT, (oh_i32)source, epoch, 0,
                             OH_SENTINEL);
        if (!state) return 0;
    }
}

/* The same for any world size: one source after the other, nothing indexed by rank. */
OH_FN oh_i32 oh_finish_unit_any(const oh_args *a, const oh_message *m, oh_u64 unit, oh_u64 mine, oh_unit own,
                                oh_u32 epoch, oh_i32 looks_at_host, oh_u32 dtype) {
    oh_sum sum = oh_sum_of(own, dtype);
    oh_u32 s;
    OH_NO_UNROLL
    for (s = 0; s < a->world; s++) {
        const oh_u64 p = mine + a->planes.slot_bytes * s;
        oh_unit v = own;
        if (s != a->rank) {
            if (!oh_poll_unit(a, p, s, epoch, looks_at_host, &v)) return 0;
            oh_st_relaxed_sys_unit(p, oh_unit_armed());
        }
        sum = s == 0 ? oh_sum_of(v, dtype) : oh_sum_add(sum, v, dtype);
    }
    oh_store_unit(m, unit, oh_sum_rounded(sum, dtype), dtype);
    return 1;
}

/* One chunk of `units` units that begins at unit `base` of the message. Nonzero: the communicator is dead. */
OH_FN oh_u32 oh_push_chunk(const oh_args *a, oh_grid g, const oh_message *m, oh_call_state c, oh_u64 base,
                           oh_u32 units, oh_push_place place, oh_u32 dtype, oh_u32 world) {
    const oh_u32 stride = (g.blocks - 1) * g.threads;
    const oh_u32 ranks = world ? world : a->world;
    oh_u32 i;
    if (OH_PUSH_WHOLE_CHUNK)
        for (i = g.block * g.threads + g.thread; i < units; i += stride)
            oh_push_unit(a, ranks, place.there + OH_UNIT_BYTES * i, oh_load_unit(m, base + i, dtype), dtype);
    OH_NO_UNROLL
    for (i = g.block * g.threads + g.thread; i < units; i += stride) {
        const oh_unit own = oh_load_unit(m, base + i, dtype);
        const oh_u64 mine = place.mine + OH_UNIT_BYTES * i;
        oh_i32 alive;
        if (!OH_PUSH_WHOLE_CHUNK) oh_push_unit(a, ranks, place.there + OH_UNIT_BYTES * i, own, dtype);
        if (a->early_trigger) oh_pdl_trigger();
        if (c.dead) return c.dead;
        alive = world ? oh_finish_unit(a, m, base + i, mine, own, c.epoch, g.thread == 0, dtype, world)
                      : oh_finish_unit_any(a, m, base + i, mine, own, c.epoch, g.thread == 0, dtype);
        if (!alive) return 1;
    }
    return 0;
}

/* The kernel. `world` 0: the generic instance. The last block carries the signature. */
OH_FN void oh_push_1shot(const oh_args *a, oh_grid g, oh_u32 dtype, oh_u32 world) {
    const oh_message m = oh_message_of(a, dtype);
    const oh_u32 chunk_units = (oh_u32)(a->chunk_bytes / OH_UNIT_BYTES);
    oh_call_state c;
    oh_pdl_wait();
    c = oh_call_begin(a, g);
    if (g.block == g.blocks - 1) {
        if (a->early_trigger) oh_pdl_trigger();
        c.dead = oh_signature_exchange(a, g, c);
    } else {
        oh_u64 base;
        oh_u32 chunk = 0;
        for (base = 0; base < m.units; base += chunk_units, chunk++) {
            const oh_u64 left = m.units - base;
            const oh_u32 units = left < chunk_units ? (oh_u32)left : chunk_units;
            const oh_push_place place =
                oh_push_place_of(a, world ? world : a->world, c.phase, chunk & 1u);
            if (chunk) oh_fence_acq_rel_sys();
            c.dead = oh_push_chunk(a, g, &m, c, base, units, place, dtype, world);
            if (c.dead) break;
        }
    }
    if (!a->early_trigger) oh_pdl_trigger();
    oh_call_end(a, g, c);
}

#endif
