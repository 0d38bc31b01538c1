/* What a kernel is given: one struct, passed by value (a grid constant on CUDA), written by the
 * host, read only. Fixed-width members; the same size and offsets for every compiler (asserted
 * below). */
#ifndef OH_ARGS_H
#define OH_ARGS_H

#include "protocol/regions.h"

/* Element types as constants of the bodies; the values of onehop_dtype, and bytes of any
 * meaning. */
#define OH_BYTES                0u
#define OH_F32                  1u
#define OH_F16                  2u
#define OH_BF16                 3u
#define OH_ELEMENT_BYTES(dtype) ((dtype) == OH_F32 ? 4u : (dtype) == OH_BYTES ? 1u : 2u)

/* Threads of a block that reads over multicast, as of other pull kernels. */
#define OH_MULTICAST_BOUND 512

/* Host device: what a rank's calls need besides their arguments. */
typedef struct oh_host_side {
    oh_u64 scratch; /* OH_SCRATCH_BYTES for what lanes keep, see prim_host.h; one call at a time */
} oh_host_side;

/* Added by an oh_host_poll to the rank it returns: gone for so long that no call can complete. */
#define OH_GONE_FOR_LONG 256

/* One other rank's place in the push region, slots of parity 0; the other parity is parity_bytes
 * further. */
typedef struct oh_peer {
    oh_u64 there; /* this rank's slot on the k-th next rank: ranks load different links */
    oh_u64 from;  /* here, the slot of the k-th source other than this rank, in rank order */
} oh_peer;

/* What the fast path of a small group reads lies together, from the last members of `regions` on:
 * each cache line of arguments that a launch touches for the first time is a wait. */
typedef struct oh_args {
    oh_regions regions;
    oh_u64 in, out;      /* addresses; equal or disjoint; element-aligned */
    oh_u64 local;        /* oh_local */
    oh_u64 parity_bytes; /* of the push region */
    oh_u32 units;        /* of the first chunk: 16-byte units, the last may be short */
    oh_u32 whole;        /* units at its begin that are loaded and stored 16 bytes at once */
    oh_u32 chunks;
    oh_u32 early_trigger; /* trigger once pushing has begun; else after the last poll */
    oh_u32 rank, world;
    oh_u32 hash;        /* of everything all ranks must agree on in this call */
    oh_u32 blocks;      /* of the grid; a GPU may launch more, which prefetch and leave */
    oh_u64 count;       /* elements, at least 1 */
    oh_u64 chunk_bytes; /* a message longer than this goes in chunks of this size */
    oh_peer peers[OH_MAX_RANKS - 1];
    oh_u64 buffers[OH_MAX_RANKS]; /* each rank's symmetric buffer, as this rank's device sees it */
    oh_u64 host;                  /* oh_host_page */
    oh_u64 host_poll;             /* host device: oh_host_poll and its argument, or 0 */
    oh_u64 host_poll_argument;    /* an address at which an oh_host_side begins */
    oh_u64 registration;          /* oh_registration with the captured addresses; 0: none, the
                                * workspace serves */
    oh_u32 tag;                   /* that the registration must have */
    oh_u32 dtype;                 /* for bodies that are not stamped per type */
    oh_u64 multicast; /* what multimem primitives call a group, offsets as in a symmetric buffer; 0:
                       * off */
    oh_u64 prefetch, prefetch_bytes; /* what the blocks behind the grid bring into the L2 */
    oh_u32 called, threads; /* OH_CALLED, threads of a block: for the sentence of a mismatch */
} oh_args;

OH_STATIC_ASSERT(sizeof(oh_regions) == 80, regions);
OH_STATIC_ASSERT(sizeof(oh_args) == 600, args);
OH_STATIC_ASSERT(sizeof(oh_signature_line) == 128, line);
OH_STATIC_ASSERT(sizeof(oh_control) == 4096 + 128 + 128 + 64 + 64 + 512, control);
OH_STATIC_ASSERT(sizeof(oh_local) == OH_LOCAL_SEQUENCES + 8, local);
OH_STATIC_ASSERT(sizeof(oh_registration) == 288, registration);
OH_STATIC_ASSERT(OH_SIGNAL_BLOCK_BYTES == 256, signals);

/* Address of a member of a struct that lies at `base`. */
#define OH_MEMBER(base, type, member) ((oh_u64) & ((type *)(base))->member)

#endif
