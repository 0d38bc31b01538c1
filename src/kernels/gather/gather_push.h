/* gather_push: all-gather of long messages by plain stores, with one release flag per (block,
 * chunk).
 *
 * In this call's half of a rank's pull buffer each rank has a part, in four sub-slots of a chunk.
 * Steps of a block, for c = 0, 1, ..., chunks:
 *   push   its units of chunk c of the input to sub-slot c mod 4 of its part in every peer's half,
 *          and
 *          to the own part of the output; a barrier; enter word c+1 to the same block of each peer,
 *          with release (signals: pull.h)
 *   copy   see every peer's enter word of c, that is of chunk c-1, with acquire; its units of chunk
 *          c-1 of
 *          every source from the own half to the output
 * One chunk is pushed ahead: while a flag is on its way, and while a block copies, its stores of
 * the next chunk keep the link busy. One launch, and no barrier of a grid: block b copies only what
 * block b of each rank has stored, since the map from units to blocks is the same on all ranks and
 * in all chunks.
 *
 *   bytes sent per rank        (W-1) S, and (W-1) S copied locally
 *   hops on the critical path  1, with a release: what it covers must have arrived before it is
 *                              sent
 *   signals                    1 per (block, peer, chunk)
 *
 * Why four sub-slots. Chunk c+4 lands where chunk c did. A block pushes it after it has seen every
 * peer's flag of chunk c+2 (it copies c+2 before). The peer's block sent that flag behind a barrier
 * that all its threads reached after they had copied chunk c: in its order push c+2 follows copy c,
 * their loads have returned, and the release covers them. With three, chunk c+3 would land on chunk
 * c, and flag c+1, which this block has seen by then, was sent before copy c.
 *
 * Every thread looks at the flags for itself, then loads one of each with acquire: warps that poll
 * a line cost less than a barrier behind one that polls, and a warp that waits for a release holds
 * up no other. Each thread's own acquire also throws from the L1 what it held of the chunk four
 * before.
 *
 * Which words count is said in pull.h: a peer may be chunks ahead, or a call, never two.
 *
 * Why no barrier at the end: as in 1shot_pull. A half is written again, by whomever, at call e+2,
 * by a rank that has finished e+1, for which it needed the signatures of e+1 of all ranks, each
 * sent after that rank's call e had ended, its copying with it. So the pull kernels, which stage or
 * store sums in these halves, and the host paths, which publish there, may come before and after.
 * The half of the other parity may still be read by a peer that is in the call before; nothing is
 * stored there.
 *
 * A thread that finds the communicator dead pushes nothing more, and its block sends no flag after.
 * It may have stored some units in a half of the parity at hand, of which no reader is told.
 *
 * In place: as gather_ll. What the caller guarantees: as 1shot_pull. */
#ifndef OH_GATHER_PUSH_H
#define OH_GATHER_PUSH_H

#include "kernels/gather/gather_ll.h"
#include "kernels/pull/pull.h"

#define OH_GATHER_SUB_SLOTS 4
/* Units a thread has in flight at once. */
#define OH_GATHER_UNITS 4

/* ---- units of bytes at any address ----------------------------------------------------------- */
OH_FN oh_unit oh_load_unit_bytes(oh_u64 p, oh_u32 left) {
    const oh_u64 low = oh_load_piece_bytes(p, left),
                 high = left > 8 ? oh_load_piece_bytes(p + 8, left - 8) : 0;
    oh_unit v;
    v.w[0] = (oh_u32)low;
    v.w[1] = (oh_u32)(low >> 32);
    v.w[2] = (oh_u32)high;
    v.w[3] = (oh_u32)(high >> 32);
    return v;
}
OH_FN void oh_store_unit_bytes(oh_u64 p, oh_u32 left, oh_unit v) {
    oh_store_piece_bytes(p, left, (oh_u64)v.w[1] << 32 | v.w[0]);
    if (left > 8) oh_store_piece_bytes(p + 8, left - 8, (oh_u64)v.w[3] << 32 | v.w[2]);
}

/* ---- one chunk ------------------------------------------------------------------------------- */
/* This thread's units of a chunk: first, first + stride, ... */
typedef struct oh_gather_part {
    oh_u32 first, stride;
    oh_u32 bytes, units; /* of the chunk */
    oh_u32 whole;        /* units before this one are loaded and stored at once, in all parts */
    oh_u64 at;           /* of the chunk in a part of the message, in bytes */
    oh_u64 place;        /* of its sub-slots in every symmetric buffer; rank r's is r chunks
                          * further */
} oh_gather_part;

OH_FN oh_gather_part oh_gather_part_of(const oh_args *a, oh_grid g, oh_u32 parity, oh_u32 chunk) {
    const oh_message m = oh_message_of(a, OH_BYTES, chunk);
    oh_gather_part p;
    p.first = g.block * g.threads + g.thread;
    p.stride = (g.blocks - 1) * g.threads;
    p.bytes = m.bytes;
    p.units = m.units;
    p.whole = a->whole ? m.whole : 0;
    p.at = (oh_u64)chunk * a->chunk_bytes;
    p.place = a->regions.pull + (parity ? a->regions.pull_bytes : 0) +
              chunk % OH_GATHER_SUB_SLOTS * a->world * a->chunk_bytes;
    return p;
}

/* Whole units u, u + stride, ...; of a batch that is not `full` those before p->whole: to all
 * peers, and to `mine` unless that is 0. */
OH_FN void oh_gather_push_batch(const oh_args *a, const oh_gather_part *p, oh_u64 mine, oh_u32 u,
                                oh_u32 full) {
    const oh_u64 in = a->in + p->at, place = p->place + a->chunk_bytes * a->rank;
    oh_unit v[OH_GATHER_UNITS];
    oh_u32 j, k;
    OH_UNROLL
    for (j = 0; j < OH_GATHER_UNITS; j++)
        if (full || u + j * p->stride < p->whole)
            v[j] = oh_ld_unit(in + (oh_u64)(u + j * p->stride) * OH_UNIT_BYTES);
        else
            v[j] = oh_unit_armed(); /* to be defined */
    OH_NO_UNROLL
    for (k = 1; k < a->world; k++) {
        const oh_u64 there = a->buffers[oh_next_rank(a, k)] + place;
        OH_UNROLL
        for (j = 0; j < OH_GATHER_UNITS; j++)
            if (full || u + j * p->stride < p->whole)
                oh_st_unit(there + (oh_u64)(u + j * p->stride) * OH_UNIT_BYTES, v[j]);
    }
    if (!mine) return;
    OH_UNROLL
    for (j = 0; j < OH_GATHER_UNITS; j++)
        if (full || u + j * p->stride < p->whole)
            oh_st_unit(mine + (oh_u64)(u + j * p->stride) * OH_UNIT_BYTES, v[j]);
}

OH_FN void oh_gather_push_chunk(const oh_args *a, const oh_gather_part *p) {
    const oh_u64 part = a->out + a->count * a->rank, mine = part == a->in ? 0 : part + p->at;
    const oh_u32 ahead = (OH_GATHER_UNITS - 1) * p->stride;
    oh_u32 u = p->first, k;
    OH_NO_UNROLL
    for (; u + ahead < p->whole; u += ahead + p->stride) oh_gather_push_batch(a, p, mine, u, 1);
    if (u < p->whole) oh_gather_push_batch(a, p, mine, u, 0);
    OH_NO_UNROLL
    for (; u < p->units; u += p->stride) {
        const oh_u64 offset = (oh_u64)u * OH_UNIT_BYTES;
        const oh_u32 left = p->bytes - u * OH_UNIT_BYTES;
        oh_unit v;
        if (u < p->whole) continue;
        v = oh_load_unit_bytes(a->in + p->at + offset, left);
        OH_NO_UNROLL
        for (k = 1; k < a->world; k++)
            oh_st_unit(
                a->buffers[oh_next_rank(a, k)] + p->place + a->chunk_bytes * a->rank + offset, v);
        if (mine) oh_store_unit_bytes(mine + offset, left, v);
    }
}

/* Brings this thread's whole units of a chunk into the L2. */
OH_FN void oh_gather_prefetch_chunk(const oh_args *a, const oh_gather_part *p) {
    oh_u32 u;
    OH_NO_UNROLL
    for (u = p->first; u < p->whole; u += p->stride)
        oh_prefetch(a->in + p->at + (oh_u64)u * OH_UNIT_BYTES);
}

OH_FN void oh_gather_copy_batch(const oh_gather_part *p, oh_u64 from, oh_u64 out, oh_u32 u,
                                oh_u32 full) {
    oh_unit v[OH_GATHER_UNITS];
    oh_u32 j;
    OH_UNROLL
    for (j = 0; j < OH_GATHER_UNITS; j++)
        if (full || u + j * p->stride < p->whole)
            v[j] = oh_ld_unit(from + (oh_u64)(u + j * p->stride) * OH_UNIT_BYTES);
        else
            v[j] = oh_unit_armed(); /* to be defined */
    OH_UNROLL
    for (j = 0; j < OH_GATHER_UNITS; j++)
        if (full || u + j * p->stride < p->whole)
            oh_st_unit(out + (oh_u64)(u + j * p->stride) * OH_UNIT_BYTES, v[j]);
}

/* Units of one source from the own half to the output. */
OH_FN void oh_gather_copy_source(const oh_gather_part *p, oh_u64 from, oh_u64 out) {
    const oh_u32 ahead = (OH_GATHER_UNITS - 1) * p->stride;
    oh_u32 u = p->first;
    OH_NO_UNROLL
    for (; u + ahead < p->whole; u += ahead + p->stride) oh_gather_copy_batch(p, from, out, u, 1);
    if (u < p->whole) oh_gather_copy_batch(p, from, out, u, 0);
    OH_NO_UNROLL
    for (; u < p->units; u += p->stride) {
        const oh_u64 offset = (oh_u64)u * OH_UNIT_BYTES;
        if (u < p->whole) continue;
        oh_store_unit_bytes(out + offset, p->bytes - u * OH_UNIT_BYTES, oh_ld_unit(from + offset));
    }
}

OH_FN void oh_gather_copy_chunk(const oh_args *a, const oh_gather_part *p) {
    oh_u32 k;
    OH_NO_UNROLL
    for (k = 1; k < a->world; k++) {
        const oh_u32 source = oh_next_rank(a, k);
        oh_gather_copy_source(p, oh_own_address(a, p->place + a->chunk_bytes * source),
                              a->out + a->count * source + p->at);
    }
}

/* ---- flags ----------------------------------------------------------------------------------- */
/* After a barrier: what the block has stored and loaded so far is covered. */
OH_FN void oh_gather_tell(const oh_args *a, oh_grid g, oh_u32 sequence, oh_u32 step) {
    oh_u32 k;
    OH_NO_UNROLL
    for (k = g.thread + 1; k < a->world; k += g.threads)
        oh_st_release_sys_u64(
            oh_signal_address(a, g.block, OH_SIGNAL_ENTER, a->rank, oh_next_rank(a, k)),
            (oh_u64)step << 32 | sequence);
}

/* Each thread for itself. 0: the communicator died. */
OH_FN oh_u32 oh_gather_hear(const oh_args *a, oh_grid g, oh_u32 sequence, oh_u32 step) {
    oh_u32 k;
    OH_NO_UNROLL
    for (k = 1; k < a->world; k++) {
        const oh_u32 peer = oh_next_rank(a, k);
        const oh_u64 p = oh_signal_address(a, g.block, OH_SIGNAL_ENTER, peer, a->rank);
        if (!oh_signal_await(a, p, OH_WAIT_FOR(OH_SITE_PULL_ENTER, peer, g.thread == 0), sequence,
                             step))
            return 0;
        /* Pairs with the release in oh_gather_tell: this word, or one the same block stored
         * later. */
        (void)oh_ld_acquire_sys_u64(p);
    }
    return 1;
}

/* The kernel, for any number of ranks. The last block carries the signature. */
OH_FN void oh_gather_push(const oh_args *a, oh_grid g) {
    oh_gather_part p, next;
    oh_call_state c;
    oh_u32 chunk;
    if (oh_call_enter(a, g)) return;
    c = oh_call_begin(oh_sequence_word(a, g.block));
    p = next = oh_gather_part_of(a, g, c.parity, 0);
    OH_NO_UNROLL
    for (chunk = 0; chunk <= a->chunks; chunk++) {
        if (chunk < a->chunks) {
            next = oh_gather_part_of(a, g, c.parity, chunk);
            if (!c.dead) oh_gather_push_chunk(a, &next);
            c.dead = oh_block_any(c.dead);
            if (c.dead) break;
            oh_gather_tell(a, g, c.sequence, chunk + 1);
            if (a->early_trigger) oh_pdl_trigger();
        }
        if (chunk + 1 < a->chunks) {
            const oh_gather_part later = oh_gather_part_of(a, g, c.parity, chunk + 1);
            oh_gather_prefetch_chunk(a, &later);
        }
        if (chunk) {
            if (!c.dead) c.dead = !oh_gather_hear(a, g, c.sequence, chunk);
            if (!c.dead) oh_gather_copy_chunk(a, &p);
        }
        p = next;
    }
    oh_call_end(a, g, c);
}

#endif
