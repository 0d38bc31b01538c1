/* How a wait ends when it should not go on: deadline, abort, lost peers, and the verdict on which
 * all ranks agree. Everything here is off the fast path: bodies poll OH_POLLS times bare, then call
 * oh_wait_slow once.
 *
 * Failing, step by step:
 *   1. One thread of the rank takes local.claim; the others wait for local.stop.
 *   2. A verdict of another rank, if there is one, is adopted.
 *   3. Else, when its time is over or another rank has told whom it waits for, it writes {peer it
 *      waits for, sequence number} into its word of `waits` in every control page, its own
 *      included, and gives the others OH_WAITS_TOLD_NS to do the same.
 *   4. It follows these words from its own: the rank reached that wrote none is the culprit. So all
 *      ranks name the same one. (Words in a circle mean lost data; then the lowest rank of the
 *      circle.)
 *   5. The verdict goes to every control page and given_up after it, the record to host memory;
 *      then all sequence words are marked dead and local.stop is set: all waits of this rank
 *      return, and its calls that are still queued do nothing.
 * The call of a rank that gave up ends, and its inputs and outputs belong to its program again. A
 * peer that still reads them has perhaps all the signals that it needs. So a call that reads peers'
 * inputs looks at given_up once it has done with them (oh_none_gave_up); nothing else reads memory
 * of the program's. A rank that comes late finds the verdict at its first slow look. Slots of a
 * dead communicator are never used again, so nothing is cleaned up. All accesses are relaxed: each
 * word is meaningful by itself, and single (verdicts, waits and left are written by one rank
 * each). */
#ifndef OH_GUARD_H
#define OH_GUARD_H

#include "kernels/prim/prim.h"
#include "protocol/args.h"

/* How long after a peer is seen gone its last stores may still be on their way, or unread by us. */
#define OH_GRACE_NS 20000000ull

/* State of a wait: 0 before the first slow look, then two counts of ticks of half a millisecond:
 * one more than it has waited, above the time of its last look. Once the peer is seen gone,
 * OH_GONE, and the wait counts from there: it goes on polling, since what the peer sent last may be
 * all that it needs. Of the time between two looks OH_MAX_LOOK_TICKS count. More is a pause of this
 * processor (a stopped process, a suspended machine, a preempted kernel), for which no peer is to
 * blame; base/wait.h. Scalars only, here and below: the address of a local variable would put it
 * into local memory. */
#define OH_GONE           0x8000000000000000ull
#define OH_TICK_SHIFT     19
#define OH_LOOK_BITS      31
#define OH_LOOK_MASK      ((1ull << OH_LOOK_BITS) - 1)
#define OH_MAX_LOOK_TICKS 190u /* 100 ms */

OH_FN oh_u64 oh_waited_ns(oh_u64 state) {
    return state ? (((state & ~OH_GONE) >> OH_LOOK_BITS) - 1) << OH_TICK_SHIFT : 0;
}

/* The state after a look at `now`. The 31 bits go round in 13 days; a clock that steps back counts
 * nothing. */
OH_FN oh_u64 oh_wait_looked(oh_u64 state, oh_u64 now) {
    const oh_u64 tick = now >> OH_TICK_SHIFT & OH_LOOK_MASK;
    oh_u64 passed = (tick - state) & OH_LOOK_MASK;
    if (!state) return 1ull << OH_LOOK_BITS | tick;
    if (passed >> (OH_LOOK_BITS - 1)) passed = 0;
    if (passed > OH_MAX_LOOK_TICKS) passed = OH_MAX_LOOK_TICKS;
    return ((state & ~OH_LOOK_MASK) + (passed << OH_LOOK_BITS)) | tick;
}

OH_FN oh_u64 oh_control_of(const oh_args *a, oh_u32 rank) {
    return a->buffers[rank] + a->regions.control;
}

OH_FN oh_u64 oh_sequence_word(const oh_args *a, oh_u32 block) {
    return a->local + OH_LOCAL_SEQUENCES + 8ull * block;
}

OH_FN oh_u32 oh_stopped(const oh_args *a) {
    return oh_ld_relaxed_gpu_u32(OH_MEMBER(a->local, oh_local, stop));
}

/* The first verdict on this rank's page, 0 if none. */
OH_FN oh_u64 oh_verdict_found(const oh_args *a) {
    const oh_u64 control = oh_control_of(a, a->rank);
    oh_u32 r;
    for (r = 0; r < a->world; r++) {
        const oh_u64 v = oh_ld_relaxed_sys_u64(OH_MEMBER(control, oh_control, verdicts[r]));
        if (v) return v;
    }
    return 0;
}

/* A loss, or a wrong registration, found in a later call than `sequence number`: who found it has
 * completed this one, so all that this one needs was sent before; it may complete. */
#define OH_VERDICT_IS_FOR_LATER(v, sequence)                                                       \
    ((OH_VERDICT_KIND(v) == OH_FAIL_LOST || OH_VERDICT_KIND(v) == OH_FAIL_REGISTRATION) &&         \
     (oh_i32)(OH_VERDICT_SEQUENCE(v) - (sequence)) > 0)

/* True if a verdict on this rank's page ends the call. */
OH_SLOW_FN oh_i32 oh_verdict_ends(const oh_args *a, oh_u32 sequence) {
    const oh_u64 control = oh_control_of(a, a->rank);
    oh_u32 r;
    for (r = 0; r < a->world; r++) {
        const oh_u64 v = oh_ld_relaxed_sys_u64(OH_MEMBER(control, oh_control, verdicts[r]));
        if (v && !OH_VERDICT_IS_FOR_LATER(v, sequence)) return 1;
    }
    return 0;
}

/* True if another rank has given up. */
OH_SLOW_FN oh_i32 oh_wait_found(const oh_args *a) {
    const oh_u64 control = oh_control_of(a, a->rank);
    oh_u32 r;
    for (r = 0; r < a->world; r++)
        if (r != a->rank && oh_ld_relaxed_sys_u64(OH_MEMBER(control, oh_control, waits[r])))
            return 1;
    return 0;
}

/* Step 4. */
OH_SLOW_FN oh_i32 oh_culprit_by_waits(const oh_args *a, oh_i32 peer) {
    const oh_u64 control = oh_control_of(a, a->rank);
    oh_u32 seen = 0;
    oh_i32 r = peer;
    while (r >= 0 && !(seen >> r & 1u)) {
        const oh_u64 wait =
            oh_ld_relaxed_sys_u64(OH_MEMBER(control, oh_control, waits) + 8ull * (oh_u32)r);
        if (!wait) return r;
        seen |= 1u << r;
        r = (oh_i32)((oh_u32)wait & 31u) - 1; /* stays on the page, whatever a peer wrote */
    }
    for (r = 0; r < OH_MAX_RANKS; r++)
        if (seen >> r & 1u) return r;
    return peer;
}

/* This rank's conclusion. */
OH_FN oh_u64 oh_own_verdict(const oh_args *a) {
    return oh_ld_relaxed_sys_u64(
        OH_MEMBER(oh_control_of(a, a->rank), oh_control, verdicts[a->rank]));
}

/* Where calls differ: this rank's, to all, for the hosts' sentences. After the verdict, from which
 * it takes the sequence number. */
OH_SLOW_FN void oh_tell_call(const oh_args *a) {
    const oh_u32 sequence = OH_VERDICT_SEQUENCE(oh_own_verdict(a));
    oh_u32 r;
    for (r = 0; r < a->world; r++) {
        const oh_u64 f = OH_MEMBER(oh_control_of(a, r), oh_control, facts[a->rank]);
        oh_st_relaxed_sys_u64(OH_MEMBER(f, oh_facts, count), a->count);
        oh_st_relaxed_sys_u64(OH_MEMBER(f, oh_facts, grid), (oh_u64)a->threads << 32 | a->blocks);
        oh_st_relaxed_sys_u64(OH_MEMBER(f, oh_facts, chunk_bytes), a->chunk_bytes);
        /* Release: pairs with the fence in failure.c. */
        oh_st_release_sys_u64(OH_MEMBER(f, oh_facts, head), (oh_u64)a->called << 32 | sequence);
    }
}

/* Step 5. What is needed again is read again: values that live across these calls are registers
 * that the kernels do not have. */
OH_FN void oh_conclude(const oh_args *a, oh_u64 verdict, oh_u32 site, oh_u32 expected,
                       oh_u32 seen) {
    const oh_u64 record = OH_MEMBER(a->host, oh_host_page, record);
    oh_u32 r;
    for (r = 0; r < a->world; r++)
        oh_st_relaxed_sys_u64(OH_MEMBER(oh_control_of(a, r), oh_control, verdicts[a->rank]),
                              verdict);
    oh_st_relaxed_sys_u32(OH_MEMBER(record, oh_record, site), site);
    oh_st_relaxed_sys_u32(OH_MEMBER(record, oh_record, rank), a->rank);
    oh_st_relaxed_sys_u32(OH_MEMBER(record, oh_record, peer), (oh_u32)OH_VERDICT_CULPRIT(verdict));
    oh_st_relaxed_sys_u32(OH_MEMBER(record, oh_record, sequence), OH_VERDICT_SEQUENCE(verdict));
    oh_st_relaxed_sys_u32(OH_MEMBER(record, oh_record, expected), expected);
    oh_st_relaxed_sys_u32(OH_MEMBER(record, oh_record, seen), seen);
    /* Pairs with oh_none_gave_up: who sees it finds the verdict. It is there before this call ends,
     * so before the program writes to the call's memory again. */
    for (r = 0; r < a->world; r++)
        oh_st_release_sys_u64(OH_MEMBER(oh_control_of(a, r), oh_control, given_up), 1);
    oh_boundary_fence();
    if (OH_VERDICT_KIND(verdict) == OH_FAIL_MISMATCH) oh_tell_call(a);
    /* Pairs with the host's acquiring load of kind: makes the fields above whole. */
    oh_st_release_sys_u32(OH_MEMBER(OH_MEMBER(a->host, oh_host_page, record), oh_record, kind),
                          OH_VERDICT_KIND(oh_own_verdict(a)) | OH_RECORD_WRITTEN);
    for (r = 0; r < a->regions.max_blocks; r++)
        oh_st_relaxed_gpu_u32(oh_sequence_word(a, r) + 4, 1);
    oh_st_relaxed_gpu_u32(OH_MEMBER(a->local, oh_local, stop), 1);
}

/* What failed and where, in one word. */
#define OH_FAIL_AT(kind, site) ((kind) << 8 | (site))

/* Ends this rank's part in the communicator; `what`: OH_FAIL_AT. `peer` is the culprit, or with
 * kind TIMEOUT the peer this rank waits for, from which the words of `waits` lead to the
 * culprit. */
OH_SLOW_FN void oh_fail(const oh_args *a, oh_u32 what, oh_i32 peer, oh_u32 sequence,
                        oh_u32 expected, oh_u32 seen) {
    const oh_u32 kind = what >> 8, site = what & 0xffu;
    oh_u64 verdict, since;
    oh_u32 r;
    if (oh_cas_relaxed_gpu_u32(OH_MEMBER(a->local, oh_local, claim), 0, 1) != 0) {
        /* Another thread concludes; it takes some OH_WAITS_TOLD_NS. */
        since = oh_now_ns();
        while (!oh_stopped(a) && oh_now_ns() - since < 100 * OH_WAITS_TOLD_NS) oh_rest();
        return;
    }
    verdict = oh_verdict_found(a);
    if (!verdict && kind == OH_FAIL_TIMEOUT) {
        const oh_u64 wait = (oh_u64)sequence << 32 | (oh_u32)(peer + 1);
        for (r = 0; r < a->world; r++)
            oh_st_relaxed_sys_u64(OH_MEMBER(oh_control_of(a, r), oh_control, waits[a->rank]), wait);
        since = oh_now_ns();
        while (!verdict && oh_now_ns() - since < OH_WAITS_TOLD_NS) {
            oh_rest();
            verdict = oh_verdict_found(a);
        }
        peer = oh_culprit_by_waits(a, peer);
        if (!verdict) verdict = oh_verdict_found(a);
    }
    if (!verdict) verdict = OH_VERDICT(kind, peer, sequence);
    /* A later call's verdict would tell peers that this rank has completed this call. */
    if ((oh_i32)(OH_VERDICT_SEQUENCE(verdict) - sequence) > 0)
        verdict = OH_VERDICT(OH_VERDICT_KIND(verdict), OH_VERDICT_CULPRIT(verdict), sequence);
    oh_conclude(a, verdict, site, expected, seen);
}

/* A call that accesses memory of a peer's program found given_up set, so what it reads there may be
 * anything. This rank fails with the verdict that it finds. */
OH_SLOW_FN void oh_fail_with_peer(const oh_args *a, oh_u32 site, oh_u32 sequence) {
    /* Acquire: pairs with the release in oh_conclude. */
    (void)oh_ld_acquire_sys_u64(OH_MEMBER(oh_control_of(a, a->rank), oh_control, given_up));
    oh_fail(a, OH_FAIL_AT(OH_FAIL_TIMEOUT, site), -1, sequence, 0, 0);
}

/* Asked after the last such access, when the peers have told that they are done too. 0: a rank gave
 * up in this call, and this rank has failed. */
OH_SLOW_FN oh_u32 oh_none_gave_up(const oh_args *a, oh_u32 site, oh_u32 sequence) {
    (void)oh_ld_acquire_sys_u64(OH_MEMBER(oh_control_of(a, a->rank), oh_control, given_up));
    if (!oh_verdict_ends(a, sequence)) return 1;
    oh_fail_with_peer(a, site, sequence);
    return 0;
}

OH_FN oh_i32 oh_wait_too_long(const oh_args *a, oh_u64 state) {
    return !(state & OH_GONE) &&
           oh_waited_ns(state) > oh_ld_relaxed_gpu_u64(OH_MEMBER(a->local, oh_local, deadline_ns));
}

/* What a wait waits for, in one word: few registers are free around a call. `looks_at_host` is set
 * for one thread of a block: host memory is far from a GPU. */
#define OH_WAIT_FOR(site, peer, looks_at_host)                                                     \
    ((site) | (oh_u32)(peer) << 8 | (oh_u32)(looks_at_host) << 16)

/* One slow look of a wait. Returns the wait's new state, or 0: give up, the communicator is
 * dead. */
OH_SLOW_FN oh_u64 oh_wait_slow(const oh_args *a, oh_u64 state, oh_u32 what, oh_u32 sequence,
                               oh_u32 expected, oh_u32 seen) {
    const oh_u32 site = what & 0xffu, looks_at_host = what >> 16;
    const oh_i32 peer = (oh_i32)(what >> 8 & 0xffu);
    oh_i32 lost;
    state = oh_wait_looked(state, oh_now_ns());
    lost = oh_host_wait(a->host_poll, a->host_poll_argument, oh_waited_ns(state));
    if (oh_stopped(a)) return 0;
    if (state & OH_GONE && oh_waited_ns(state) > OH_GRACE_NS) {
        oh_fail(a, OH_FAIL_AT(OH_FAIL_LOST, site), peer, sequence, expected, seen);
        return 0;
    }
    if (lost >= OH_GONE_FOR_LONG) {
        oh_fail(a, OH_FAIL_AT(OH_FAIL_LOST, site), lost - OH_GONE_FOR_LONG, sequence, expected,
                seen);
        return 0;
    }
    if (looks_at_host && oh_ld_relaxed_sys_u32(OH_MEMBER(a->host, oh_host_page, abort))) {
        oh_fail(a, OH_FAIL_AT(OH_FAIL_ABORTED, site), -1, sequence, expected, seen);
        return 0;
    }
    if (oh_verdict_ends(a, sequence) || oh_wait_found(a) || oh_wait_too_long(a, state)) {
        oh_fail(a, OH_FAIL_AT(OH_FAIL_TIMEOUT, site), peer, sequence, expected, seen);
        return 0;
    }
    if (state & OH_GONE) return state;
    if (lost == peer ||
        oh_ld_relaxed_sys_u32(OH_MEMBER(oh_control_of(a, a->rank), oh_control, left[peer])))
        return OH_GONE | 1ull << OH_LOOK_BITS | (state & OH_LOOK_MASK);
    return state;
}

/* The wait loop of every protocol, as the body of a function: `look` OH_POLLS times bare, then one
 * slow look, and so on. The function returns `found` once `there` is true, 0 when the communicator
 * has died. `expected` and `seen` are for the record of a failure. */
#define OH_WAIT_LOOP(look, there, found, a, what, sequence, expected, seen)                        \
    oh_u64 state = 0;                                                                              \
    oh_u32 looks;                                                                                  \
    for (;;) {                                                                                     \
        OH_NO_UNROLL                                                                               \
        for (looks = 0; looks < OH_POLLS; looks++) {                                               \
            look;                                                                                  \
            if (there) return found;                                                               \
        }                                                                                          \
        state = oh_wait_slow(a, state, what, sequence, expected, seen);                            \
        if (!state) return 0;                                                                      \
    }

#endif
