/* 1shot_pull and 2shot_pull over the graph source: zero copy. A captured call has a registration
 * (regions.h) with every rank's input and output address; blocks read the peers' inputs where they
 * lie.
 *
 * Steps of a block:
 *   load     the registration's {tag, mode}, its identity and the peers' addresses, before the wait
 *            for the previous
 *            grid: the host wrote them before this graph was launched; then the sequence word
 *   enter    tell the same block of each peer that this rank's kernel has begun; hear it from each
 *   reduce   1shot: units of the whole message, the sums to the own output
 *            2shot: units of the own shard, the sums to the own and to every peer's output
 *   exit     the same again: this block has done with the peers' memory; and no rank has given up
 *
 * Identity. The addresses in a registration are those of one captured call. If ranks replay graphs
 * crosswise, or one makes another call in this sequence number, they are of the wrong memory,
 * perhaps shorter than this message. So an enter word holds the number that the ranks gave to this
 * captured call, a block goes on only if every peer's word is {identity, sequence number} to the
 * bit, and no other kind of call writes such a word. The signature holds the identity and the mode
 * too: where a block waits for ever, the signature block finds the mismatch, names the culprit and
 * ends all waits. Nothing of the peers' has been read or stored by then.
 *
 *   bytes per rank             1shot: (W-1) S received; 2shot: S (W-1)/W received and as much sent
 *   hops on the critical path  1shot: 4 (a signal, a load and its answer, a signal); 2shot: 5,
 *                              since
 *                              the exit waits for the sums to have arrived
 *
 * Enter: what the peers read was written by earlier kernels of this rank, and what they write is
 * read by none of them any more: both are settled when pdl_wait returns. So a relaxed store does,
 * sent by a thread as soon as it knows the sequence number, without a barrier. Any block's signal
 * would speak for its whole rank; one per block lets all be read at the place that only this block
 * polls.
 *
 * Exit: the next kernel of this rank may overwrite its input, or read its output. 1shot: relaxed;
 * the barrier before it comes after all threads' sums, so after their loads have returned. 2shot: a
 * release after that barrier, so that the sums stored to a peer are there before the word is. Who
 * sees the word loads nothing more in this kernel that a peer has written, and the kernel's end
 * stands between it and all who will: no acquire.
 *
 * One barrier in a call. Every thread looks at the peers' words for itself: warps that poll the
 * same lines cost less than a barrier behind one that polls (0.1 us a call). The words stay while
 * they do: a peer writes enter again in its next call, which it begins after this block's exit,
 * sent behind the barrier; and exit again after this block's enter of the next call. For the same
 * reason the block may trigger and write its sequence words without another barrier: what one
 * thread has seen has come for all.
 *
 * A rank that gives up (deadline, abort) takes its memory back while a peer still reads it, and the
 * peer may have its exit already. So the last look at the exit words looks at given_up too
 * (guard.h), in the same breath: it costs no time. One thread of a block does, after the block's
 * barrier, hence after all its loads. In 2shot it also covers sums that another rank made of such
 * memory: that rank released its exit after reading, the reading came after the memory had changed,
 * and given_up was there before that. The two loads of one look are not ordered; between what they
 * would have to swap lie a kernel's end, a program's store and a load of a peer. On the host 2shot
 * also looks before each unit that it stores to the peers; on a GPU that would cost more than all
 * else here, and stores go on until the kernel ends.
 *
 * Threads may differ in `dead`: the mark in the sequence word may come between their loads of it,
 * and one may give up an enter that another has just seen. 1shot does not ask: an exit promises
 * only that the block will not read any more, which is as true of a thread that gave up; the own
 * rank fails by its record. In 2shot an exit promises sums, so one thread that is dead keeps it
 * back from all peers.
 *
 * In place: a position of a shard is read, on any rank, only by the shard's owner, whose thread has
 * the terms in registers when it stores the sum. 1shot would overwrite what a peer still reads: the
 * dispatch refuses it.
 *
 * Positions are 64-bit byte offsets: there are no chunks here, and a message may have more units
 * than 32 bits count. Addresses are aligned to 16 bytes, so that only the last unit is short. */
#ifndef OH_PULL_DIRECT_H
#define OH_PULL_DIRECT_H

#include "kernels/pull/pull.h"

/* ---- the registration ------------------------------------------------------------------------ */
/* Where the k-th next rank's memory is; [0]: the own. The host wrote the registration before this
 * graph was launched. */
typedef struct oh_reach {
    oh_u64 in[OH_MAX_RANKS], out[OH_MAX_RANKS];
} oh_reach;

/* What a thread can know before the wait for the previous grid, since no kernel writes it. */
typedef struct oh_registration_view {
    oh_u64 head;   /* {tag, mode}; 0: there is no registration */
    oh_u64 direct; /* the head of this call's registration if the call may go by its addresses */
    oh_u64 identity;
    oh_reach to;
    oh_u64 tell,
        hear; /* enter words of this block: on the first peer that this thread tells, and here */
} oh_registration_view;

OH_FN oh_u64 oh_tell_address(const oh_args *a, oh_grid g, oh_u32 k) {
    return oh_signal_address(a, g.block, OH_SIGNAL_ENTER, a->rank, oh_next_rank(a, k));
}

OH_FN oh_registration_view oh_registration_view_of(const oh_args *a, oh_grid g, oh_u32 shots,
                                                   oh_u32 world) {
    oh_registration_view registration;
    oh_u32 k;
    registration.head = registration.tell = registration.identity = 0;
    registration.hear = oh_signal_address(a, g.block, OH_SIGNAL_ENTER, 0, a->rank);
    registration.direct = ~0ull;
    registration.to.in[0] = a->in;
    registration.to.out[0] = a->out;
    OH_UNROLL
    for (k = 1; k < (world ? world : 2); k++) registration.to.in[k] = registration.to.out[k] = 0;
    if (!a->registration) return registration;
    registration.head = oh_ld_host_u64(a->registration);
    registration.identity = oh_ld_host_u64(OH_MEMBER(a->registration, oh_registration, identity));
    OH_UNROLL
    for (k = 1; k < (world ? world : 2); k++) {
        const oh_u32 r = oh_next_rank(a, k);
        registration.to.in[k] = oh_ld_host_u64(OH_MEMBER(a->registration, oh_registration, in[r]));
        if (shots == 2)
            registration.to.out[k] =
                oh_ld_host_u64(OH_MEMBER(a->registration, oh_registration, out[r]));
    }
    if (((a->in | a->out) & (OH_UNIT_BYTES - 1)) == 0)
        registration.direct = (oh_u64)OH_REGISTRATION_DIRECT << 32 | a->tag;
    if (g.thread + 1 < a->world) registration.tell = oh_tell_address(a, g, g.thread + 1);
    return registration;
}

/* Is it this call's registration, filled for it, and does the call go by its addresses? One that
 * would have a thread store to nowhere, or access unaligned memory, is not. */
OH_FN oh_u32 oh_registration_is_direct(const oh_registration_view *registration, oh_u32 shots) {
    return registration->head == registration->direct &&
           (shots == 1 || registration->to.out[1] != 0);
}

/* There should be a registration, and it is not filled for this call: the call is dead. The
 * signature block says so. All threads of all blocks see the same registration. */
OH_FN oh_u32 oh_registration_refused(const oh_args *a, const oh_registration_view *registration,
                                     oh_u32 shots) {
    const oh_u64 staged = (oh_u64)OH_REGISTRATION_STAGED << 32 | a->tag;
    return a->registration && registration->head != staged &&
           !oh_registration_is_direct(registration, shots);
}

/* What the signature block of a call with or without a registration does. A rank with a wrong
 * registration fails before it has said anything, so all ranks name that and no mismatch. */
OH_FN void oh_registration_signature(const oh_args *a, oh_grid g, oh_u64 sequence_word,
                                     oh_signature_words words,
                                     const oh_registration_view *registration, oh_u32 shots) {
    const oh_u32 refused = oh_registration_refused(a, registration, shots);
    if (OH_UNLIKELY(refused) && g.thread == 0) {
        const oh_call_state c = oh_call_begin(sequence_word);
        if (!c.dead)
            oh_fail(a, OH_FAIL_AT(OH_FAIL_REGISTRATION, OH_SITE_ENTRY), (oh_i32)a->rank, c.sequence,
                    a->tag, (oh_u32)registration->head);
    }
    oh_signature_block(
        a, g, sequence_word, words,
        a->registration ? oh_hash_with_registration(a, registration->head, registration->identity)
                        : a->hash,
        refused);
}

/* What a block of a pull kernel does before its own work, as oh_call_enter, and what it knows of
 * the call's registration by then. Nonzero: it was the signature's, and has done it all. */
OH_FN oh_u32 oh_pull_enter(const oh_args *a, oh_grid g, oh_registration_view *registration,
                           oh_u32 shots, oh_u32 world) {
    const oh_u64 sequence_word = oh_sequence_word(a, g.block),
                 in = a->in + (oh_u64)(g.block * g.threads + g.thread) * OH_UNIT_BYTES;
    const oh_u32 signs = g.block >= g.blocks - 1;
    oh_signature_words words = {0, 0};
    if (signs) words = oh_signature_begin(a, g);
    *registration = oh_registration_view_of(a, g, shots, world);
    if (shots == 1 && g.block * g.threads + g.thread < a->whole) oh_prefetch(in);
    oh_prefetch(sequence_word);
    oh_pdl_wait();
    if (signs) oh_registration_signature(a, g, sequence_word, words, registration, shots);
    return signs;
}

/* ---- barriers -------------------------------------------------------------------------------- */
/* The word of a barrier: this call's identity and sequence number at its beginning; at its end,
 * where the peers are known, a step. */
OH_FN oh_u64 oh_direct_word(const oh_registration_view *registration, oh_u32 which,
                            oh_u32 sequence) {
    return (which == OH_SIGNAL_ENTER ? registration->identity << 32 : (oh_u64)1 << 32) | sequence;
}

/* Tells the same block of each peer, thread t the (t+1)-th next rank; `released`: with all stores
 * of the block, after a barrier. */
OH_FN void oh_tell_peers(const oh_args *a, oh_grid g, oh_u64 first, oh_u32 which, oh_u32 released,
                         oh_u64 word) {
    oh_u32 k;
    oh_boundary_fence();
    OH_PEERS(k, g, a->world) {
        const oh_u64 p =
            (k == g.thread + 1 ? first : oh_tell_address(a, g, k)) + which * OH_SIGNAL_KIND_BYTES;
        if (released)
            oh_st_release_sys_u64(p, word);
        else
            oh_st_relaxed_sys_u64(p, word);
    }
}

/* Nonzero: some rank has given up, in this call or another. */
OH_FN oh_u64 oh_given_up(const oh_args *a) {
    return oh_ld_relaxed_sys_u64(OH_MEMBER(oh_control_of(a, a->rank), oh_control, given_up));
}

/* Waits for a word, however long. 0: the communicator died. */
OH_FN oh_u32 oh_word_await(const oh_args *a, oh_u64 p, oh_u32 what, oh_u64 word) {
    oh_u64 seen = 0;
    OH_WAIT_LOOP(seen = oh_ld_relaxed_sys_u64(p), seen == word, 1, a, what, (oh_u32)word,
                 (oh_u32)(word >> 32), (oh_u32)(seen >> 32))
}

/* What is left when peers have not told within OH_POLLS looks. 0: the communicator died. */
OH_SLOW_FN oh_u32 oh_hear_slowly(const oh_args *a, oh_u64 words, oh_u32 site, oh_u64 word,
                                 oh_i32 looks_at_host) {
    oh_u32 k;
    for (k = 1; k < a->world; k++) {
        const oh_u32 peer = oh_next_rank(a, k);
        if (!oh_word_await(a, words + 8 * peer, OH_WAIT_FOR(site, peer, looks_at_host), word))
            return 0;
    }
    return 1;
}

/* Waits, each thread for itself, until the same block of every peer has told, and at the exit until
 * it is known that none has given up. 0: the communicator died. */
OH_FN oh_u32 oh_hear_peers(const oh_args *a, oh_grid g, oh_u64 words, oh_u32 which, oh_u64 word,
                           oh_u32 world) {
    const oh_u32 site = which == OH_SIGNAL_ENTER ? OH_SITE_PULL_ENTER : OH_SITE_PULL_EXIT;
    oh_u32 n = 0, k, alive = 1;
    oh_u64 missing = 1, gone = 0;
    words += which * OH_SIGNAL_KIND_BYTES;
    OH_NO_UNROLL
    while (world && missing && n++ < OH_POLLS) {
        missing = 0;
        OH_UNROLL
        for (k = 1; k < world; k++)
            missing |= oh_ld_relaxed_sys_u64(words + 8 * oh_next_rank(a, k)) ^ word;
        if (which == OH_SIGNAL_EXIT && g.thread == 0) gone = oh_given_up(a);
    }
    if (OH_UNLIKELY(missing | gone)) {
        alive = oh_hear_slowly(a, words, site, word, g.thread == 0);
        if (which == OH_SIGNAL_EXIT && alive && g.thread == 0)
            alive = oh_none_gave_up(a, site, (oh_u32)word);
    }
    oh_boundary_fence();
    return alive;
}

/* ---- data ------------------------------------------------------------------------------------ */
/* Units of every rank that a thread has in flight at once: 32 registers of data. */
#define OH_DIRECT_MAX          4
#define OH_DIRECT_UNITS(world) ((world) == 2 ? 2u : (world) <= 4 ? 2u : 1u)

/* A thread's units of the bytes to `end`: at, at + step, ... `outs`: sums go to every rank. */
typedef struct oh_direct_part {
    oh_u64 at, step, end;
    oh_u32 outs;
} oh_direct_part;

/* Sums `units` units from p.at on; of a batch that is not `full` those before the end. 0: a rank
 * has given up, and what is left was not stored. */
OH_FN oh_u32 oh_direct_batch(const oh_args *a, const oh_reach *to, oh_direct_part p, oh_u32 units,
                             oh_u32 full, oh_stamp stamp) {
    const oh_u32 dtype = stamp.dtype, world = stamp.world, outs = p.outs;
    const oh_u64 at = p.at, step = p.step, end = p.end;
    oh_unit v[OH_DIRECT_MAX][OH_MAX_RANKS];
    oh_u32 j, k;
    OH_UNROLL
    for (j = 0; j < units; j++) {
        OH_UNROLL
        for (k = 0; k < world; k++) v[j][k] = oh_unit_armed(); /* to be defined */
        if (!full && j && at + j * step >= end) continue;
        OH_UNROLL
        for (k = 1; k < world; k++) v[j][k] = oh_ld_unit(to->in[k] + at + j * step);
        v[j][0] = oh_ld_unit(to->in[0] + at + j * step);
    }
    OH_UNROLL
    for (j = 0; j < units; j++) {
        oh_unit sum;
        if (!full && j && at + j * step >= end) continue;
        sum = oh_sum_finished(a, oh_add_turned(v[j], a->rank, dtype, world), at + j * step, dtype);
        if (OH_LOOKS_BEFORE_STORES && outs && oh_given_up(a)) return 0;
        OH_UNROLL
        for (k = 1; k < world && outs; k++) oh_st_unit(to->out[k] + at + j * step, sum);
        oh_st_unit(to->out[0] + at + j * step, sum);
    }
    return 1;
}

OH_FN oh_unit oh_direct_load(oh_u64 p, oh_u64 left, oh_u32 dtype) {
    return left < OH_UNIT_BYTES ? oh_load_elements(p, (oh_u32)left, dtype) : oh_ld_unit(p);
}
OH_FN void oh_direct_store(oh_u64 p, oh_u64 left, oh_unit v, oh_u32 dtype) {
    if (left < OH_UNIT_BYTES)
        oh_store_elements(p, (oh_u32)left, v, dtype);
    else
        oh_st_unit(p, v);
}

/* One unit, of which `left` bytes are there; any number of ranks, in rank order. 0: as
 * oh_direct_batch. */
OH_FN oh_u32 oh_direct_unit(const oh_args *a, oh_u64 at, oh_u64 left, oh_u32 outs, oh_u32 dtype) {
    oh_sum sum = oh_sum_of(oh_unit_armed(), dtype);
    oh_unit v;
    oh_u32 r;
    OH_NO_UNROLL
    for (r = 0; r < a->world; r++) {
        const oh_u64 in =
            r == a->rank ? a->in : oh_ld_u64(OH_MEMBER(a->registration, oh_registration, in[r]));
        v = oh_direct_load(in + at, left, dtype);
        sum = r ? oh_sum_add(sum, v, dtype) : oh_sum_of(v, dtype);
    }
    v = oh_sum_finished(a, sum, at, dtype);
    if (OH_LOOKS_BEFORE_STORES && outs && oh_given_up(a)) return 0;
    OH_NO_UNROLL
    for (r = 0; r < a->world && outs; r++)
        if (r != a->rank)
            oh_direct_store(oh_ld_u64(OH_MEMBER(a->registration, oh_registration, out[r])) + at,
                            left, v, dtype);
    oh_direct_store(a->out + at, left, v, dtype);
    return 1;
}

/* The same out of the way, for the end of a message. */
OH_SLOW_FN oh_u32 oh_direct_end(const oh_args *a, oh_u64 at, oh_u64 left, oh_u32 outs,
                                oh_u32 dtype) {
    return oh_direct_unit(a, at, left, outs, dtype);
}

/* All of a thread's units. A message of one unit a thread has a way of its own: a small call lasts
 * as long as its instructions take. 0: as oh_direct_batch. */
OH_FN oh_u32 oh_direct_reduce(const oh_args *a, const oh_reach *to, oh_direct_part p, oh_stamp k) {
    const oh_u64 end = p.end, step = p.step, ahead = (OH_DIRECT_UNITS(k.world) - 1) * step;
    const oh_u32 units = OH_DIRECT_UNITS(k.world);
    if (!k.world) {
        OH_NO_UNROLL
        for (; p.at < end; p.at += step)
            if (!oh_direct_unit(a, p.at, end - p.at, p.outs, k.dtype)) return 0;
        return 1;
    }
    p.end = end & ~(oh_u64)(OH_UNIT_BYTES - 1);
    if (OH_LIKELY(p.at + step >= p.end)) {
        if (p.at < p.end) {
            if (!oh_direct_batch(a, to, p, 1, 1, k)) return 0;
            p.at += step;
        }
    } else {
        OH_NO_UNROLL
        for (; p.at + ahead < p.end; p.at += ahead + step)
            if (!oh_direct_batch(a, to, p, units, 1, k)) return 0;
        if (p.at < p.end && !oh_direct_batch(a, to, p, units, 0, k)) return 0;
        while (p.at < p.end) p.at += step;
    }
    if (OH_UNLIKELY(p.at < end))
        return oh_direct_end(a, p.at, end - p.at, p.outs, k.dtype) || !OH_LOOKS_BEFORE_STORES;
    return 1;
}

/* ---- calls ----------------------------------------------------------------------------------- */
typedef struct oh_span {
    oh_u64 begin, end; /* bytes of the message */
} oh_span;

OH_FN oh_span oh_direct_shard(const oh_args *a, oh_u64 bytes, oh_u32 world) {
    const oh_u64 units = bytes / OH_UNIT_BYTES + (bytes % OH_UNIT_BYTES != 0);
    const oh_shards s = oh_shards_of(units, world ? world : a->world);
    oh_span shard;
    shard.begin = (oh_u64)oh_shard_grains(s, a->rank) * s.grain * OH_UNIT_BYTES;
    shard.end = (oh_u64)oh_shard_grains(s, a->rank + 1) * s.grain * OH_UNIT_BYTES;
    if (shard.end > bytes) shard.end = bytes;
    return shard;
}

/* All of a call but the signature. Ends the block. `shots` 1 or 2. */
OH_FN void oh_pull_direct(const oh_args *a, oh_grid g, oh_call_state c,
                          const oh_registration_view *registration, oh_u32 shots, oh_stamp k) {
    const oh_u64 bytes = a->count * OH_ELEMENT_BYTES(k.dtype);
    const oh_u64 enter = oh_direct_word(registration, OH_SIGNAL_ENTER, c.sequence),
                 exit = oh_direct_word(registration, OH_SIGNAL_EXIT, c.sequence);
    oh_direct_part p;
    oh_span part;
    part.begin = 0;
    part.end = bytes;
    /* Enter: the peers' memory is theirs no more, and it is of this call. */
    if (!c.dead) oh_tell_peers(a, g, registration->tell, OH_SIGNAL_ENTER, 0, enter);
    if (a->early_trigger) oh_pdl_trigger();
    if (shots == 2) part = oh_direct_shard(a, bytes, k.world);
    p.at = part.begin + (oh_u64)(g.block * g.threads + g.thread) * OH_UNIT_BYTES;
    p.step = (oh_u64)((g.blocks - 1) * g.threads) * OH_UNIT_BYTES;
    p.end = part.end;
    p.outs = shots == 2;
    if (!c.dead) c.dead = !oh_hear_peers(a, g, registration->hear, OH_SIGNAL_ENTER, enter, k.world);
    if (!c.dead && !oh_direct_reduce(a, &registration->to, p, k)) {
        oh_fail_with_peer(a, OH_SITE_PULL_EXIT, c.sequence);
        c.dead = 1;
    }
    /* Exit: all threads of the block have read, and with two shots stored. */
    if (shots == 2)
        c.dead = oh_block_any(c.dead);
    else
        oh_block_sync();
    if (!c.dead) oh_tell_peers(a, g, registration->tell, OH_SIGNAL_EXIT, shots == 2, exit);
    if (!c.dead) c.dead = !oh_hear_peers(a, g, registration->hear, OH_SIGNAL_EXIT, exit, k.world);
    oh_call_leave(a, g, c);
}

#endif
