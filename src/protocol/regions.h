/* The memory map: what lies where in the memory of a communicator. The one file that describes it;
 * protocol/layout.c computes the offsets, kernels use them. In the dialect of kernels (see prim.h).
 *
 *   symmetric buffer, one per rank, mapped by all ranks
 *     push     2 parities x W sources x slot      Lamport slots: armed with 0xFF, "not there"
 *     ll       2 parities x W sources x ll_bytes  LL words: 4 bytes of data, the sequence number
 *     pull     2 parities x pull_bytes            staged input, or what peers stored for an
 *                                                 all-gather; on the host what a rank publishes,
 *                                                 and mailboxes: a box for each rank
 *     signals  max_blocks x 256 bytes             enter and exit words {step, sequence number} of
 *                                                 each peer, for pull kernels
 *     control  oh_control                         signatures, who waits for whom, verdicts
 *   local, one per rank, its own device alone
 *     oh_local, sequence words (max_blocks x 8 bytes), registrations of captured inputs
 *   host, one per rank, host memory that the device reaches
 *     oh_host_page
 *
 * Only the push slots are armed; all else starts as zero. No region is shared by two encodings. */
#ifndef OH_REGIONS_H
#define OH_REGIONS_H

#include "protocol/words.h"

/* A block's signals: one word per writing rank, of each kind. */
#define OH_SIGNAL_ENTER       0 /* my data is there */
#define OH_SIGNAL_EXIT        1 /* I have done with your memory */
#define OH_SIGNAL_KIND_BYTES  (8 * OH_MAX_RANKS)
#define OH_SIGNAL_BLOCK_BYTES (2 * OH_SIGNAL_KIND_BYTES)

/* Sequence numbers number the calls of a communicator: 2..2^32-1, then 2 again. 0 and 1 never name
 * a call, so zeroed memory holds no valid flag; the wrap keeps parity. parity = sequence number &
 * 1. */
#define OH_SEQUENCE_NEXT(sequence) ((sequence) + 1u < 2u ? 2u : (sequence) + 1u)

/* What one rank says in every call to every peer; a line of its own. On CUDA it lies in the
 * reader's symmetric buffer, on the host in the writer's (OH_SIGNATURE_HOME). */
typedef struct oh_signature_line {
    oh_u64 signature; /* hash << 32 | sequence number */
    oh_u64 progress;  /* host paths: steps done << 32 | sequence number */
    oh_u64 unused[14];
} oh_signature_line;

/* Of a half of the pull buffer, for host paths (host_path.h). */
#define OH_BOX_BYTES(pull_bytes, world) ((pull_bytes) / (world) / 128 * 128)

/* A rank's call, for the sentence that says how calls differ. `head` is stored last, with
 * release. */
typedef struct oh_facts {
    oh_u64 head; /* OH_CALLED << 32 | sequence number */
    oh_u64 count;
    oh_u64 grid; /* threads << 32 | blocks */
    oh_u64 chunk_bytes;
} oh_facts;

/* operation: oh_operation, 0 for a collective alone */
#define OH_CALLED(algorithm, source, dtype, operation)                                             \
    ((oh_u32)(algorithm) | (oh_u32)(source) << 8 | (oh_u32)(dtype) << 16 |                         \
     (oh_u32)(operation) << 24)

typedef struct oh_control {
    oh_signature_line lines[2][OH_MAX_RANKS]; /* [parity][writer] */
    /* Rank r, once it has given up, says here whom it waits for: sequence number << 32 | peer +
     * 1. */
    oh_u64 waits[OH_MAX_RANKS];
    /* Rank r's conclusion, see OH_VERDICT. The first one found wins. */
    oh_u64 verdicts[OH_MAX_RANKS];
    /* Nonzero: rank r has destroyed its communicator; it will send nothing more. */
    oh_u32 left[OH_MAX_RANKS];
    /* Nonzero: a verdict is there. In a line of its own, for it is read by calls that end well. */
    oh_u64 given_up;
    oh_u64 unused[7];
    /* Of rank r, once it has found or heard that calls differ. */
    oh_facts facts[OH_MAX_RANKS];
} oh_control;

/* sequence number << 32 | (culprit + 1) << 8 | kind; culprit -1: nobody. */
#define OH_VERDICT(kind, culprit, sequence)                                                        \
    ((oh_u64)(sequence) << 32 | (oh_u64)((oh_u32)((culprit) + 1) << 8) | (oh_u64)(kind))
#define OH_VERDICT_KIND(v)     ((oh_u32)(v) & 0xffu)
#define OH_VERDICT_CULPRIT(v)  ((oh_i32)((oh_u32)((v) >> 8) & 0xffu) - 1)
#define OH_VERDICT_SEQUENCE(v) ((oh_u32)((v) >> 32))

/* Kinds of failure. */
#define OH_FAIL_TIMEOUT      1
#define OH_FAIL_LOST         2
#define OH_FAIL_MISMATCH     3
#define OH_FAIL_ABORTED      4
#define OH_FAIL_OVERLAP      5
#define OH_FAIL_REGISTRATION 6

/* Places of the protocol, for the record of a failure. */
#define OH_SITE_SIGNATURE  1  /* waiting for a peer's signature */
#define OH_SITE_PUSH_1SHOT 2  /* waiting for a word of a landing slot */
#define OH_SITE_HOST_1SHOT 3  /* waiting for a peer's data */
#define OH_SITE_HOST_2SHOT 4  /* waiting for a peer's shards or sums */
#define OH_SITE_ENTRY      5  /* overlap or a wrong registration, found when the call began */
#define OH_SITE_OUTSIDE    6  /* found by the host between calls */
#define OH_SITE_PULL_ENTER 7  /* waiting for a peer's block to begin or to stage */
#define OH_SITE_PULL_EXIT  8  /* waiting for a peer's block to have read, or stored its sums */
#define OH_SITE_SCATTER    9  /* 2shot_push: waiting for a peer's part of the own shard */
#define OH_SITE_GATHER     10 /* 2shot_push: waiting for the sum of a peer's shard */
#define OH_SITE_LL         11 /* all-gather: waiting for an LL word */
#define OH_SITE_HOST_PARTS 12 /* host_scatter, host_gather: waiting for a peer's data */

typedef struct oh_local {
    oh_u32 stop;        /* nonzero: every wait gives up */
    oh_u32 claim;       /* taken by the one thread that records the failure */
    oh_u64 deadline_ns; /* of a wait; data, so that it also holds for graphs captured before */
    oh_u32 running;     /* sequence number of the call that started last */
    oh_u32 busy;        /* host paths: a call is running */
    oh_u32 unused[58];
    /* Followed by one word per possible block: the sequence number of its last call, and in the
     * upper half nonzero: dead. */
    oh_u64 sequences[1];
} oh_local;

#define OH_LOCAL_SEQUENCES 256

/* What the device tells the host. `kind` is stored last, with release. It is a peer's word as it
 * was found, hence the bit: a verdict without a kind is a failure too. */
#define OH_RECORD_WRITTEN 0x100u
typedef struct oh_record {
    oh_u32 kind; /* OH_FAIL_* and OH_RECORD_WRITTEN; 0: none */
    oh_u32 site;
    oh_i32 rank;
    oh_i32 peer;
    oh_u32 sequence;
    oh_u32 expected;
    oh_u32 seen;
    oh_u32 unused;
} oh_record;

typedef struct oh_host_page {
    oh_u32 abort; /* host to device: give up */
    oh_u32 unused[31];
    oh_record record;
} oh_host_page;

/* A registration of the table of captured inputs. All ranks fill the registration of a call with
 * the same mode and identity. */
typedef struct oh_registration {
    oh_u32 tag;      /* 0: not filled; else the number that the captured call expects */
    oh_u32 mode;     /* OH_ROW_* */
    oh_u64 identity; /* OH_REGISTRATION_IDENTITY of a number that the ranks gave to this call */
    oh_u64 in[OH_MAX_RANKS];
    oh_u64 out[OH_MAX_RANKS];
    oh_u64 unused[2];
} oh_registration;

#define OH_REGISTRATION_STAGED 1 /* the call stages its input as if it had no registration */
#define OH_REGISTRATION_DIRECT 2 /* all addresses are aligned to 16 bytes */

/* Upper half of an enter word of a call that goes by a registration's addresses. The highest bit
 * tells it from the step that other calls write there. */
#define OH_REGISTRATION_IDENTITY(number) (0x80000000u | (oh_u32)(number))

/* Offsets in a symmetric buffer and in local memory, with the sizes they follow from. */
typedef struct oh_regions {
    oh_u64 push, ll, pull, signals, control; /* in the symmetric buffer */
    oh_u64 registrations;                    /* in local memory */
    oh_u64 slot_bytes;                       /* one push slot */
    oh_u64 pull_bytes;                       /* one half of the pull buffer */
    oh_u64 ll_bytes;                         /* one source's LL words in one parity */
    oh_u32 max_blocks;
    oh_u32 max_registrations;
} oh_regions;

#endif
