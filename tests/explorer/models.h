/* The project's protocols as programs for the machine. A model is a group, the calls it makes one
 * after another, and what is done otherwise than in src/kernels: all such fields zero is the
 * library's protocol. */
#ifndef OH_EXPLORER_MODELS_H
#define OH_EXPLORER_MODELS_H

#include "machine.h"

typedef enum algorithm {
    PUSH_1SHOT,
    PUSH_2SHOT,
    HOST_1SHOT,
    HOST_2SHOT,
    WRITE, /* a kernel of the rank's own: reads the output of the call before, writes its input */
    DIRECT_1SHOT, /* pull by a row's addresses, right after a WRITE */
    DIRECT_2SHOT,
    HOST_GATHER,
    GATHER_PUSH /* a block of one thread, with a unit in a chunk; units are chunks */
} algorithm;

typedef struct call {
    algorithm algorithm;
    int blocks, threads; /* kernels: of the grid, without the signature block */
    int units,
        chunk_units; /* of the message, of a chunk (0: one chunk); host paths: units are chunks */
} call;

typedef enum sequence_rule {
    SEQUENCES_BY_STRIDE,
    SEQUENCE_BUMPED_BY_ONE,
    SEQUENCES_OWN_ONLY
} sequence_rule;

/* Direct pull: when a block looks whether a rank has given up. */
typedef enum look_rule {
    LOOKS_LAST,
    LOOKS_NEVER,
    LOOKS_BEFORE_EXITS, /* before it hears them */
    LOOKS_BEFORE_LOADS
} look_rule;

typedef struct model {
    int world;
    bool lane; /* a rank is one host thread that runs block after block; else each (block, thread)
                  is one */
    call calls[MAX_CALLS + 1];
    int unit_words;    /* 0 means 1 */
    bool whole_chunks; /* OH_PUSH_WHOLE_CHUNK; always with `lane` */
    int last_sequence; /* before the first call; 0 means 1 */

    bool in_order, no_guard;
    /* push */
    sequence_rule sequences;
    int sub_slots; /* 0 means 2 */
    bool parity_per_chunk, one_parity, no_fence, units_wander;
    bool one_result;     /* 2shot_push: one sub-slot for sums */
    bool scatters_ahead; /* 2shot_push: chunk k+1 before it gathers chunk k */
    bool no_boundary, overlap, no_meeting, no_signatures, wraps_to_odd;
    /* direct pull */
    bool flags_relaxed; /* gather_push */
    bool no_enter, no_exit, exits_early, exits_unmet, exits_relaxed, one_signal;
    /* host paths */
    int host_sub_slots;     /* 0 means 2 of a mailbox, 4 in host_gather and gather_push */
    int results;            /* 0 means 2 */
    bool mail_one_way;      /* a mailbox never changes direction */
    bool publishes_relaxed; /* progress and signature without release */
    bool publishes_late;    /* host_1shot: chunk k after chunk k-1 is read */
    bool old_progress;      /* progress words are of the same sequence numbers, a turn of the count
                             * ago */
    bool signature_first;   /* before the first progress word of a call */
    /* Giving up. A rank is one thread: one of a grid, without signatures, or a lane. When its call
       has failed, its program poisons its inputs and makes no other call. gives_up: ranks that may
       in any wait, a bit each. The others do when they find a verdict, so they show that nobody
       waits for ever. */
    uint8_t gives_up;
    bool losses; /* verdicts are of losses: they do not end the calls before */
    look_rule looks;
    bool unlooked;        /* 2shot: no look before a unit is loaded */
    bool looks_per_unit;  /* 2shot: another before it is stored to peers, as on the host */
    bool tells_late;      /* the verdict and given_up, after the program has written */
    bool reuses_early;    /* nothing orders what the program writes after them */
    bool tells_one;       /* them, to the next rank alone */
    bool adopts_silently; /* who finds a verdict passes none on */
    bool spares_equal;    /* a verdict on this call is taken for one on a later call */
    bool dead_exits;      /* a rank that fails tells exit first */
    bool dead_goes_on;    /* its next call runs */
    /* Direct pull: in call crossed - 1 the last rank makes another captured call, of other
       memory. */
    int crossed;
    bool no_identity, identity_at_least;
} model;

void model_build(const model *m, machine *out);

#endif
