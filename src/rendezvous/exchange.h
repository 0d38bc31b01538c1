/* Inside of an exchange: its state, shared by exchange.c (frames) and exchange_words.c (what is
 * said between them). */
#ifndef OH_EXCHANGE_H
#define OH_EXCHANGE_H

#include "rendezvous/group.h"

#define OH_FRAME_MAGIC 0x656d617246486e6full

typedef struct oh_frame {
    uint64_t magic;
    uint64_t sequence;
    uint64_t bytes;    /* of the blob that follows */
    uint64_t fd_mask;  /* which of the rank's descriptors come with the first byte */
    uint32_t fd_count; /* how many it was asked for; 0 for an all-gather */
    uint32_t reserved;
} oh_frame;

_Static_assert(sizeof(oh_frame) == 40, "a frame has no holes");

/* One peer's part. */
typedef struct oh_flow {
    int peer;
    size_t sent, received; /* of frame and blob together */
    oh_frame in;
    int fds[OH_MAX_FDS]; /* arrived, not yet given to the caller */
    int fd_count;
    bool throttled; /* too many descriptors in flight: try again in a moment */
} oh_flow;

typedef struct oh_run {
    oh_mesh *mesh;
    const oh_exchange *what;
    oh_frame out;
    size_t total;   /* bytes of each frame with its blob */
    int culprit;    /* rank whose end fails the exchange, -1 */
    oh_notice word; /* what the peers are told about a failure */
    uint32_t asked; /* ranks that were missing when the time was over, see mesh_ask.c */
    uint32_t here;  /* those that have answered */
    oh_flow flows[ONEHOP_MAX_RANKS];
} oh_run;

/* exchange.c: sends what the socket takes. */
onehop_result oh_flow_push(oh_run *run, oh_flow *flow);

/* exchange_words.c */
onehop_result oh_run_lost(oh_run *run, const oh_flow *flow); /* the peer sends no more */
/* A notice stands where a frame was expected: its beginning is in flow->in. */
onehop_result oh_run_hear(oh_run *run, oh_flow *flow);
/* The time is over: asks those that are missing, once. False: there is nothing to ask. */
bool oh_run_ask(oh_run *run);
onehop_result oh_run_missing(const oh_run *run);
void oh_run_answer(const oh_run *run); /* who asks whether this rank waits */
/* All peers hear why this rank takes no further part, at once: they may wait for it, and its end
 * must not be taken for the cause. */
void oh_run_say_last(oh_run *run, onehop_result result);

#endif
