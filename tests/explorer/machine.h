/* A machine of threads with weakly ordered stores, and a search through everything it can do.
 *
 * What a thread stores becomes visible later, store by store, in any order, except that
 *   stores to one word become visible in program order;
 *   a release store becomes visible after all stores before it;
 *   no store after a fence becomes visible before a store in front of it;
 *   a kernel ends when all its stores are visible, and the rank's next one starts after that.
 * A thread sees its own stores at once. A store is visible to all others at the same time, and
 * loads happen in program order: so a missing acquire is not found here (ThreadSanitizer's job, in
 * the lane tests), a missing release is.
 *
 * Words carry {tag, sequence number}; tag and sequence number 0: an armed slot, or nothing yet.
 * Errors, noticed as soon as they happen: data that becomes visible in a slot that is not armed
 * (unread, or its re-arming is still to come and will wipe the new data); a store over any other
 * word that some rank must still read; a wrong value read; and in the end a thread that waits, or a
 * slot not armed.
 *
 * Giving up. A waiting op with `otherwise` may be left for the ops there: at any time by a rank of
 * `gives_up` (its deadline, an abort), by any rank once a verdict on its page ends the call. A
 * wrong value in the program's memory is then no error yet: it taints what the thread stores there.
 * It is an error if a kernel ends with a tainted thread that has not given up. Another error is a
 * thread that stores more than one unit to peers' programs though given_up is set on its page. Once
 * a rank has given up, slots need not be armed in the end. */
#ifndef OH_EXPLORER_MACHINE_H
#define OH_EXPLORER_MACHINE_H

#include <stdbool.h>
#include <stdint.h>

#define MAX_THREADS 12
#define MAX_WORDS   128
#define MAX_PENDING 24
#define MAX_OPS     512
#define MAX_CALLS   6

/* Four bits of sequence number, which run 2..15 and wrap to 2: as the library's, only sooner. */
#define SEQUENCE_BITS       4u
#define SEQUENCE_MASK       15u
#define WORD(tag, sequence) ((uint16_t)((tag) << SEQUENCE_BITS | (sequence)))
#define TAG_OF(word)        ((unsigned)(word) >> SEQUENCE_BITS)
#define SEQUENCE_OF(word)   ((unsigned)(word) & SEQUENCE_MASK)
#define POISON              WORD(0xFFFu, 0u) /* what a program writes that has its memory back */

typedef enum op_kind {
    OP_START,          /* waits until all threads of the rank have ended the call before */
    OP_SEQUENCE,       /* reads an sequence word; the register becomes its successor */
    OP_STORE,          /* relaxed, or release */
    OP_FENCE,          /* acq_rel */
    OP_AWAIT_DATA,     /* polls until the word is not armed; it must carry the tag */
    OP_AWAIT_SEQUENCE, /* polls until the word has this sequence number; it must carry the tag */
    OP_AWAIT_STEPS,    /* polls until the word has this sequence number and at least the tag, or the
                     * next sequence number if `or_next` */
    OP_AWAIT_WORD,     /* polls until the word is {tag, sequence number} */
    OP_READ,           /* reads at once; the word must carry the tag */
    OP_GUARD,          /* reads `span` sequence words: each must be the last call's or this one's */
    OP_BARRIER,        /* block_sync */
    OP_END,            /* of a kernel: waits until all stores are visible */
    OP_LOOK,           /* reads at once; not 0: goes to `otherwise` */
    OP_VERDICT, /* reads the rank's page; a verdict that ends the call: goes to `otherwise` */
    OP_FAIL,    /* adopts the first verdict of the page, or makes its own, for OP_STORE */
    OP_JUMP     /* to `otherwise` */
} op_kind;

typedef struct op {
    uint8_t kind;
    uint8_t word;
    uint8_t parity_step; /* further if the parity is 1 */
    uint8_t flips;       /* added to the sequence number, for parity and value */
    uint8_t readers;     /* OP_STORE, not to a slot: ranks that must read it, a bit each */
    uint8_t span;        /* OP_GUARD */
    uint8_t call;
    bool with_sequence; /* the value carries the sequence number */
    bool release;
    bool or_next;
    bool with_verdict;   /* OP_STORE: the sequence number is the number of the call that the verdict
                          * names */
    bool program_memory; /* OP_READ, OP_STORE: a wrong value taints */
    bool asks_verdict;   /* OP_LOOK: goes on unless a verdict ends the call */
    uint16_t tag;
    uint16_t otherwise; /* op number; 0: none */
} op;

typedef struct program {
    op ops[MAX_OPS];
    int count;
    int rank, block, thread;
    int met[MAX_CALLS], ended[MAX_CALLS]; /* op number of OP_BARRIER; of what follows OP_END */
    int begun[MAX_CALLS + 1];             /* of the first op of a call; of what follows the last */
    int normal_count;                     /* ops before those of giving up */
} program;

typedef struct machine {
    program threads[MAX_THREADS];
    int thread_count;
    int words, slot_words; /* the first slot_words must be armed in the end */
    uint16_t initial[MAX_WORDS];
    char names[MAX_WORDS][20];
    bool has_kernels;     /* between calls all threads of a rank meet, all stores visible */
    bool in_order;        /* a thread's stores become visible in program order, as on x86 */
    bool branches_on_all; /* every read is a step of its own: to check the search itself */
    bool wraps_to_odd;    /* sequence number 15 is followed by 3 */
    int world;
    int given_up;     /* a word for each rank */
    int verdicts;     /* a page of `world` words for each rank */
    uint8_t gives_up; /* ranks, a bit each */
    int spared_from;  /* verdicts on calls so much later, or more, do not end a call */
} machine;

typedef enum verdict {
    HOLDS,
    UNDECIDED, /* nothing found within the limit */
    OVERWRITES,
    READS_WRONG,
    DEADLOCKS,
    UNARMED,
    FALSE_ALARM,
} verdict;

typedef struct outcome {
    verdict verdict;
    uint64_t states;
    char detail[200];
} outcome;

/* Visits every reachable state once, at most `limit`. A visited state is remembered by 64 bits:
 * among n states the odds that one is taken for another are n^2 / 2^65, 3e-6 for ten million.
 * `trace`: prints the way to the error. */
outcome machine_explore(const machine *m, uint64_t limit, bool trace);

#endif
