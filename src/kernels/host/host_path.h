/* What the host paths share: begin and end of a call, memory, publishing, waiting for peers.
 *
 * A rank writes into halves of pull buffers (one half per parity) and then stores a word of its own
 * control page with release; every peer waits for that word with acquire and reads. Half p is
 * written again at sequence number e+2 only after this rank has finished e+1, for which every peer
 * had to send its signature of e+1, after it had finished reading in e: the credit rule of
 * docs/protocol.md, with release and acquire in place of the kernel boundary.
 *
 * What one peer alone reads goes through a mailbox (oh_mailbox), what all read is written once,
 * into the own half.
 *
 * signature = hash << 32 | sequence number, stored after a call's first data and before its first
 * wait. progress = steps << 32 | sequence number counts the steps of a call that has several; its
 * first is stored before the signature, so who has seen that reads no word of 2^32 calls ago. Both
 * start a call old (another sequence number), never zeroed.
 *
 * These bodies run as one block with one thread: they read sequence word 0 and write all words, so
 * that bodies with any grid may follow. */
#ifndef OH_HOST_PATH_H
#define OH_HOST_PATH_H

#include "kernels/call.h"
#include "device/host/vector.h"

/* Polls before a wait first gives the core away, which costs a system call. 4 KiB, two processes on
 * an idle AMD EPYC guest whose two cores are 150 ns of round trip apart: 1.6 times a bare exchange
 * with 64, 1.2 times with 1024; 16 ranks on those two cores are as fast with either
 * (test_exchange_speed, test_matrix, 2026-11-29). */
#define HOST_POLLS 1024

typedef struct oh_host_call {
    const oh_args *a;
    const oh_vector *vector;
    oh_u32 sequence, parity;
    oh_u32 site;
    size_t element; /* bytes */
    size_t bytes;   /* of the message, or of a part */
    size_t box;     /* bytes; a half of a pull buffer is cut into a box for each rank */
} oh_host_call;

static inline oh_u64 oh_line_of(const oh_host_call *c, oh_u32 rank) {
    return OH_MEMBER(oh_control_of(c->a, rank), oh_control, lines[c->parity][rank]);
}

/* This call's half of a rank's pull buffer. */
static inline char *oh_area_of(const oh_host_call *c, oh_u32 rank) {
    return OH_AT(char,
                 c->a->buffers[rank] + c->a->regions.pull + c->parity * c->a->regions.pull_bytes);
}

static inline char *oh_box(const oh_host_call *c, oh_u32 owner, oh_u32 of) {
    return oh_area_of(c, owner) + of * c->box;
}

/* What `from` has for `to` alone. Each pair has two boxes, one in either half, and the two change
 * directions with each use in a call, and from call to call of a parity: a rank writes where it has
 * read last time (not so after a call of an even number of uses, which costs time once). So the
 * lines are in its own cache already, and each travels once per use; where the reader always reads
 * and the writer always writes, each use takes a line away from its reader too, before it is
 * written.
 *
 * `use` counts how often a call has used the place before. Within a call no credit is needed, since
 * only this rank has read what it overwrites; the first use in a call has that of the half. */
static inline char *oh_mailbox(const oh_host_call *c, oh_u32 from, oh_u32 to, size_t use) {
    return (c->sequence >> 1 ^ use) & 1 ? oh_box(c, to, from) : oh_box(c, from, to);
}

/* False: the communicator is dead, or this call found another one running. */
static inline bool oh_host_begin(oh_host_call *c, const oh_args *a, oh_u32 site) {
    /* Acquire: pairs with the release in oh_host_end, the sequence word is the last call's. */
    const oh_u32 busy = oh_exchange_acquire_gpu_u32(OH_MEMBER(a->local, oh_local, busy), 1);
    c->a = a;
    c->vector = oh_vector_table();
    c->sequence = OH_SEQUENCE_NEXT((oh_u32)oh_ld_relaxed_gpu_u64(oh_sequence_word(a, 0)));
    c->parity = c->sequence & 1u;
    c->site = site;
    c->element = OH_ELEMENT_BYTES(a->dtype);
    c->bytes = a->count * c->element;
    c->box = OH_BOX_BYTES(a->regions.pull_bytes, a->world);
    if (busy) {
        oh_fail(a, OH_FAIL_AT(OH_FAIL_OVERLAP, OH_SITE_ENTRY), -1, c->sequence, 0, 1);
        return false;
    }
    /* Queued calls of a dead communicator do nothing. */
    bool runs = !oh_stopped(a);
    /* Other algorithms raise no busy: their guard (call.h) and this one meet here. */
    if (runs && oh_exchange_relaxed_gpu_u32(OH_MEMBER(a->local, oh_local, running), c->sequence) ==
                    c->sequence) {
        oh_fail(a, OH_FAIL_AT(OH_FAIL_OVERLAP, OH_SITE_ENTRY), -1, c->sequence, c->sequence, 1);
        runs = false;
    }
    if (!runs) oh_st_release_sys_u32(OH_MEMBER(a->local, oh_local, busy), 0);
    return runs;
}

static inline void oh_host_end(const oh_host_call *c) {
    for (oh_u32 b = 0; b < c->a->regions.max_blocks; b++)
        oh_st_relaxed_gpu_u32(oh_sequence_word(c->a, b), c->sequence);
    /* Release: the next call, perhaps on another thread, sees the words above. */
    oh_st_release_sys_u32(OH_MEMBER(c->a->local, oh_local, busy), 0);
}

static inline void oh_publish_signature(const oh_host_call *c) {
    /* Pairs with the acquire in oh_await_signature: in a call of one chunk it publishes the data
     * too. */
    oh_st_release_sys_u64(oh_line_of(c, c->a->rank), (oh_u64)c->a->hash << 32 | c->sequence);
}

static inline void oh_publish_progress(const oh_host_call *c, oh_u32 steps) {
    /* Pairs with the acquire in oh_await_progress: what the steps wrote, and that what they read is
     * read. */
    oh_st_release_sys_u64(OH_MEMBER(oh_line_of(c, c->a->rank), oh_signature_line, progress),
                          (oh_u64)steps << 32 | c->sequence);
}

/* False if the signature has arrived and differs; then the communicator is dead. */
static inline bool oh_signature_agrees(const oh_host_call *c, oh_u64 word) {
    if ((oh_u32)word != c->sequence || (oh_u32)(word >> 32) == c->a->hash) return true;
    oh_signature_mismatch(c->a, c->sequence);
    return false;
}

/* Waits for the signature of `rank` and compares it. False: the communicator is dead. */
static inline bool oh_await_signature(const oh_host_call *c, oh_u32 rank) {
    const oh_u64 p = oh_line_of(c, rank);
    oh_u64 state = 0;
    for (;;) {
        oh_u64 word = 0;
        for (int n = 0; n < HOST_POLLS; n++) {
            word = oh_ld_acquire_sys_u64(p);
            if ((oh_u32)word == c->sequence) return oh_signature_agrees(c, word);
        }
        state = oh_wait_slow(c->a, state, OH_WAIT_FOR(c->site, rank, 1), c->sequence, c->sequence,
                             (oh_u32)word);
        if (!state) return false;
    }
}

/* Waits until `rank` has done `steps` steps of this call. A rank that makes another call may never
 * do them: its signature tells. False: the communicator is dead. */
static inline bool oh_await_progress(const oh_host_call *c, oh_u32 rank, oh_u32 steps) {
    const oh_u64 line = oh_line_of(c, rank), p = OH_MEMBER(line, oh_signature_line, progress);
    oh_u64 state = 0;
    for (;;) {
        oh_u64 word = 0;
        for (int n = 0; n < HOST_POLLS; n++) {
            word = oh_ld_acquire_sys_u64(p);
            if ((oh_u32)word == c->sequence && (oh_u32)(word >> 32) >= steps) return true;
        }
        if (!oh_signature_agrees(c, oh_ld_acquire_sys_u64(line))) return false;
        state = oh_wait_slow(c->a, state, OH_WAIT_FOR(c->site, rank, 1), c->sequence, steps,
                             (oh_u32)(word >> 32));
        if (!state) return false;
    }
}

/* All peers. Their signatures first: they must agree, and before that a progress word may be 2^32
 * calls old. */
static inline bool oh_await_all(const oh_host_call *c, oh_u32 steps) {
    for (oh_u32 r = 0; r < c->a->world; r++) {
        if (r == c->a->rank) continue;
        if (steps == 1 && !oh_await_signature(c, r)) return false;
        if (!oh_await_progress(c, r, steps)) return false;
    }
    return true;
}

/* ---- calls in chunks ------------------------------------------------------------------------- */

static inline size_t oh_chunk_length(const oh_host_call *c, size_t chunk) {
    const size_t left = c->bytes - chunk * c->a->chunk_bytes;
    return left < c->a->chunk_bytes ? left : c->a->chunk_bytes;
}

typedef void oh_host_step(const void *call, size_t chunk);

/* Publish 0, publish 1, take 0, publish 2, take 1, ...: one chunk ahead, so that peers rarely wait.
 * One chunk alone: the signature is the flag. `call` is what the steps get. */
static inline void oh_host_chunks(const oh_host_call *c, size_t chunks, oh_host_step *publish,
                                  oh_host_step *take, const void *call) {
    publish(call, 0);
    if (chunks > 1) oh_publish_progress(c, 1);
    oh_publish_signature(c);
    if (chunks == 1) {
        for (oh_u32 r = 0; r < c->a->world; r++)
            if (r != c->a->rank && !oh_await_signature(c, r)) return;
        take(call, 0);
        return;
    }
    for (size_t i = 1; i <= chunks; i++) {
        if (i < chunks) {
            publish(call, i);
            oh_publish_progress(c, (oh_u32)i + 1);
        }
        if (!oh_await_all(c, (oh_u32)i)) return;
        take(call, i - 1);
    }
}

#endif
