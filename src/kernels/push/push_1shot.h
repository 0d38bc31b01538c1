/* 1shot_push: every rank stores its data into its own landing slot on every peer; readiness is in
 * the data.
 *
 * Steps, per thread and unit: load own unit; store it to slot (parity, me) of each peer, starting
 * at the next rank; poll slot (parity, s) of the own symmetric buffer for each source s; sum in
 * rank order, own value from registers; write the output; re-arm the words just read.
 *
 *   bytes sent per rank      (W-1) S
 *   hops on the critical path  1
 *   signals, barriers          none; one signature word per peer in a block of its own (call.h)
 *
 * Why no barrier is needed, and two parities suffice: I write a peer's parity p at sequence number
 * e+2 only because I finished e+1, for which I needed that peer's data of e+1, and it sent that
 * only after its call e had read and re-armed parity p: the end of its kernel e ordered the
 * re-arming before its stores of e+1. Sequence numbers wrap from 2^32-1 to 2, keeping parity.
 *
 * A message longer than a slot goes in chunks that take turns in the two halves (sub-slots) of this
 * call's slot; the parity flips once per call, never per chunk. Unit i of every chunk belongs to
 * the same thread on every rank, and a thread pushes chunk c only after it has read chunk c-1 from
 * every peer. Chunk c+1 of a peer thus tells that it has read and re-armed chunk c-1, whose
 * sub-slot c+1 uses. No kernel boundary orders the two here, so one acq_rel fence per chunk stands
 * between a thread's re-arming and its next push; it pairs with the same fence of the peer's
 * thread.
 *
 * All slot accesses are relaxed: each 32-bit word validates itself (not the sentinel: it is data),
 * and nothing else is concluded from its arrival within the call.
 *
 * What the caller guarantees: calls of one communicator are ordered on each rank; the grid fits on
 * the smallest rank's device at once; all ranks pass the same count, type and grid (checked by the
 * signature). */
#ifndef OH_PUSH_1SHOT_H
#define OH_PUSH_1SHOT_H

#include "kernels/call.h"
#include "kernels/unit.h"

/* Stores a unit to this rank's slot on every peer; `there` is the offset from parity 0's slot. */
OH_FN void oh_push_unit(const oh_args *a, oh_u64 there, oh_unit v, oh_u32 dtype, oh_u32 world) {
    const oh_unit clean = oh_sanitise(v, dtype);
    oh_u32 k;
    OH_UNROLL
    for (k = 0; k + 1 < world; k++) oh_st_relaxed_sys_unit(a->peers[k].there + there, clean);
}

/* Loads one unit of every source at once, so that W-1 loads are in flight together. The first that
 * has not arrived, or -1. */
OH_FN oh_i32 oh_look(const oh_args *a, oh_u64 at, oh_unit *v, oh_u32 world) {
    oh_i32 missing = -1;
    oh_u32 j;
    OH_UNROLL
    for (j = 0; j + 1 < world; j++) v[j] = oh_ld_relaxed_sys_unit(a->peers[j].from + at);
    OH_UNROLL
    for (j = 0; j + 1 < world; j++)
        if (missing < 0 && !oh_unit_arrived(v[j])) missing = (oh_i32)j;
    return missing;
}

/* The sum in rank order, own value at its place, not yet rounded. Two terms commute. */
OH_FN oh_sum oh_add_sources(const oh_args *a, const oh_unit *v, oh_unit own, oh_u32 dtype,
                            oh_u32 world) {
    oh_sum sum;
    oh_u32 j;
    if (world == 2) return oh_sum_add(oh_sum_of(own, dtype), v[0], dtype);
    sum = oh_sum_of(a->rank == 0 ? own : v[0], dtype);
    OH_UNROLL
    for (j = 1; j < world; j++) {
        oh_unit term = own;
        if (j < a->rank && j + 1 < world) term = v[j + 1 < world ? j : 0];
        if (j > a->rank) term = v[j - 1];
        sum = oh_sum_add(sum, term, dtype);
    }
    return sum;
}

OH_FN void oh_rearm(const oh_args *a, oh_u64 at, oh_u32 world) {
    oh_u32 j;
    OH_UNROLL
    for (j = 0; j + 1 < world; j++) oh_st_relaxed_sys_unit(a->peers[j].from + at, oh_unit_armed());
}

/* The same, up to OH_POLLS times. Nonzero: all are there, in v. */
OH_FN oh_u32 oh_look_long(const oh_args *a, oh_u64 at, oh_unit *v, oh_u32 world) {
    oh_u32 n = 0;
    OH_NO_UNROLL
    while (oh_look(a, at, v, world) >= 0 && ++n < OH_POLLS) {
    }
    return n != OH_POLLS;
}

/* Waits until a unit of one source has arrived. 0: the communicator died. */
OH_FN oh_i32 oh_await_unit(const oh_args *a, oh_u64 p, oh_u32 source, oh_waiter w) {
    oh_unit v;
    OH_WAIT_LOOP(v = oh_ld_relaxed_sys_unit(p), oh_unit_arrived(v), 1, a, w.what | source << 8,
                 w.sequence, 0, OH_SENTINEL)
}

/* The same for all sources. */
OH_FN oh_i32 oh_await_sources(const oh_args *a, oh_u64 at, oh_waiter w) {
    oh_u32 j;
    OH_NO_UNROLL
    for (j = 0; j + 1 < a->world; j++)
        if (!oh_await_unit(a, a->peers[j].from + at, oh_other_rank(a, j), w)) return 0;
    return 1;
}

/* The sum for any number of ranks, nothing indexed by rank; re-arms as it reads. */
OH_FN oh_sum oh_add_and_rearm(const oh_args *a, oh_u64 at, oh_unit own, oh_u32 dtype) {
    oh_sum sum = oh_sum_of(own, dtype);
    oh_u32 j;
    OH_NO_UNROLL
    for (j = 0; j + 1 < a->world; j++) {
        const oh_unit v = oh_ld_relaxed_sys_unit(a->peers[j].from + at);
        oh_st_relaxed_sys_unit(a->peers[j].from + at, oh_unit_armed());
        /* Own value stands before source j if j is this rank's number, after all if there is no
         * such j. */
        if (j == a->rank && j > 0) sum = oh_sum_add(sum, own, dtype);
        sum = j == 0 && a->rank > 0 ? oh_sum_of(v, dtype) : oh_sum_add(sum, v, dtype);
    }
    if (j == a->rank) sum = oh_sum_add(sum, own, dtype);
    return sum;
}

/* Reads again what has arrived, sums it and re-arms: beside a wait the values would not fit in
 * registers. */
OH_FN oh_sum oh_collect_unit(const oh_args *a, oh_u64 at, oh_unit own, oh_stamp k) {
    oh_unit v[OH_MAX_RANKS];
    oh_sum sum;
    if (!k.world) return oh_add_and_rearm(a, at, own, k.dtype);
    oh_look(a, at, v, k.world);
    sum = oh_add_sources(a, v, own, k.dtype, k.world);
    oh_rearm(a, at, k.world);
    return sum;
}

/* Waits for one unit of all sources, however long, sums, stores, re-arms. The own value is loaded
 * last: the output has not overwritten it yet. 0: the communicator died. */
OH_FN oh_i32 oh_finish_unit(const oh_args *a, const oh_message *m, oh_u32 unit, oh_u64 at,
                            oh_waiter w, oh_stamp k) {
    oh_sum sum;
    if (!oh_await_sources(a, at, w)) return 0;
    sum = oh_collect_unit(a, at, oh_load_unit(m, unit, k.dtype), k);
    oh_store_unit(m, unit, oh_sum_finished(a, sum, oh_unit_offset(m, unit), k.dtype), k.dtype);
    return 1;
}

/* How far a thread has come: units of `chunk` before `unit` are done, `pushed` more are on their
 * way. */
typedef struct oh_push_state {
    oh_u32 chunk, unit, pushed;
} oh_push_state;

/* The place of a chunk, from a slot's begin in parity 0. */
OH_FN oh_u64 oh_push_place(const oh_args *a, oh_u32 parity, oh_u32 chunk) {
    return (parity ? a->parity_bytes : 0) + (chunk & 1 ? a->chunk_bytes : 0);
}

/* ---- what the fast path has left: any alignment, any wait ------------------------------------ */

OH_FN oh_u64 oh_part_bytes(const oh_args *a, oh_u32 dtype) {
    return a->count * OH_ELEMENT_BYTES(dtype);
}

/* One chunk of one rank's shard; all shards are cut alike. */
OH_FN oh_message oh_shard_message(const oh_args *a, oh_u32 dtype, oh_u64 chunk, oh_u32 rank) {
    oh_message m = oh_message_of(a, dtype, chunk);
    m.in += oh_part_bytes(a, dtype) * rank;
    if (!a->whole) m.whole = 0;
    return m;
}

/* Stores unit `unit` of every peer's shard to that peer; any alignment. */
OH_SLOW_FN void oh_scatter_unit(const oh_args *a, oh_u32 chunk, oh_u32 unit, oh_u64 at,
                                oh_u32 dtype, oh_u32 ranks) {
    oh_u32 k;
    OH_NO_UNROLL
    for (k = 0; k + 1 < ranks; k++) {
        const oh_message m = oh_shard_message(a, dtype, chunk, oh_next_rank(a, k + 1));
        oh_st_relaxed_sys_unit(a->peers[k].there + at,
                               oh_sanitise(oh_load_unit(&m, unit, dtype), dtype));
    }
}

/* What is left of a call for one thread; `parts`: of a reduce-scatter. Nonzero: the communicator is
 * dead. */
OH_FN oh_u32 oh_push_rest(const oh_args *a, oh_grid g, oh_call_state c, oh_push_state s, oh_stamp k,
                          oh_u32 parts) {
    const oh_u32 stride = (g.blocks - 1) * g.threads, ranks = k.world ? k.world : a->world;
    const oh_waiter w = oh_waiter_of(c, g, OH_SITE_PUSH_1SHOT);
    OH_NO_UNROLL
    for (; s.chunk < a->chunks; s.chunk++) {
        const oh_message m = parts ? oh_shard_message(a, k.dtype, s.chunk, a->rank)
                                   : oh_message_of(a, k.dtype, s.chunk);
        const oh_u64 place = oh_push_place(a, c.parity, s.chunk);
        oh_u32 u, ahead = s.unit + s.pushed * stride;
        OH_NO_UNROLL
        for (u = s.unit; u < m.units; u += stride) {
            /* The own data go out: on a host those of the whole chunk, else this unit's. */
            for (; ahead <= u || (OH_PUSH_WHOLE_CHUNK && ahead < m.units); ahead += stride) {
                const oh_u64 at = place + (oh_u64)ahead * OH_UNIT_BYTES;
                if (parts)
                    oh_scatter_unit(a, s.chunk, ahead, at, k.dtype, ranks);
                else
                    oh_push_unit(a, at, oh_load_unit(&m, ahead, k.dtype), k.dtype, ranks);
            }
            if (!oh_finish_unit(a, &m, u, place + (oh_u64)u * OH_UNIT_BYTES, w, k)) return 1;
        }
        s.unit = g.block * g.threads + g.thread;
        s.pushed = 0;
        if (s.chunk + 1 < a->chunks) oh_fence_acq_rel_sys();
    }
    return 0;
}

/* ---- the fast path --------------------------------------------------------------------------- */

/* Whole units before the end of a chunk, or before the message's. */
OH_FN oh_u32 oh_push_whole(const oh_args *a, oh_u32 dtype, oh_u32 chunk) {
    const oh_u64 units = a->chunk_bytes / OH_UNIT_BYTES,
                 left = a->count * OH_ELEMENT_BYTES(dtype) / OH_UNIT_BYTES - chunk * units;
    return a->whole ? (oh_u32)(left < units ? left : units) : 0;
}

/* The fast path: whole units that arrive within OH_POLLS looks. It is kept short, since a small
 * call lasts as long as its instructions take; no function is called here, so registers stay free.
 * A thread pushes its next unit before it polls this one: then the link is busy while it waits, and
 * what it polls has mostly arrived. Never across chunks: chunk c+1 is pushed when chunk c is read.
 * `own` is unit `s.unit` of the first chunk. Returns where it stopped. */
OH_FN oh_push_state oh_push_fast(const oh_args *a, oh_grid g, oh_call_state c, oh_push_state s,
                                 oh_unit own, oh_stamp k) {
    const oh_u32 stride = (g.blocks - 1) * g.threads, dtype = k.dtype, world = k.world;
    oh_u32 whole = a->whole;
    oh_u64 in = a->in, out = a->out, place = oh_push_place(a, c.parity, 0);
    for (;;) {
        oh_unit next = own, later = own;
        /* The first unit of the chunk goes out, and the second comes from memory meanwhile. */
        if (s.unit < whole) {
            oh_push_unit(a, place + (oh_u64)s.unit * OH_UNIT_BYTES, own, dtype, world);
            s.pushed = 1;
        }
        if (a->early_trigger) oh_pdl_trigger();
        if (s.unit + stride < whole)
            next = oh_ld_unit(in + (oh_u64)(s.unit + stride) * OH_UNIT_BYTES);
        OH_NO_UNROLL
        while (s.unit < whole) {
            const oh_u64 at = place + (oh_u64)s.unit * OH_UNIT_BYTES;
            oh_unit v[OH_MAX_RANKS];
            /* The next one goes out before this one is heard. */
            if (s.unit + stride < whole) {
                oh_push_unit(a, at + (oh_u64)stride * OH_UNIT_BYTES, next, dtype, world);
                s.pushed = 2;
                if (s.unit + 2 * stride < whole)
                    later = oh_ld_unit(in + (oh_u64)(s.unit + 2 * stride) * OH_UNIT_BYTES);
            }
            /* This unit of all peers: sum, store, and arm the place for the call after next. */
            if (OH_UNLIKELY(!oh_look_long(a, at, v, world))) return s;
            oh_st_unit(out + (oh_u64)s.unit * OH_UNIT_BYTES,
                       oh_sum_finished(a, oh_add_sources(a, v, own, dtype, world),
                                       s.chunk * a->chunk_bytes + (oh_u64)s.unit * OH_UNIT_BYTES,
                                       dtype));
            oh_rearm(a, at, world);
            s.pushed--;
            s.unit += stride;
            own = next;
            next = later;
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
        if (s.unit < whole) own = oh_ld_unit(in + (oh_u64)s.unit * OH_UNIT_BYTES);
    }
}

/* The kernel. `world` 0: the generic instance. The last block carries the signature. The first unit
 * is loaded together with the sequence number. */
OH_FN void oh_push_1shot(const oh_args *a, oh_grid g, oh_u32 dtype, oh_u32 world) {
    const oh_stamp k = {dtype, world};
    const oh_u32 fast = !OH_PUSH_WHOLE_CHUNK && world && a->whole,
                 i = g.block * g.threads + g.thread;
    const oh_u64 in = a->in + (oh_u64)i * OH_UNIT_BYTES;
    oh_unit own = oh_unit_armed();
    oh_push_state s = {0, i, 0};
    oh_call_state c;
    if (i < a->whole) oh_prefetch(in);
    if (oh_call_enter(a, g)) return;
    if (fast && i < a->whole) own = oh_ld_unit(in);
    c = oh_call_begin(oh_sequence_word(a, g.block));
    if (fast && !c.dead) s = oh_push_fast(a, g, c, s, own, k);
    if (OH_UNLIKELY(!c.dead && (s.unit < a->units || s.chunk + 1 < a->chunks)))
        c.dead = oh_push_rest(a, g, c, s, k, 0);
    oh_call_end(a, g, c);
}

#endif
