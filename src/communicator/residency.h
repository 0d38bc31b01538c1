/* Grids of all communicators of this process on one GPU: how large they may be so that calls in
 * flight together do not wait for each other until the deadline.
 *
 * The rule: on a GPU with S multiprocessors the grids of all its communicators, of all their ranks
 * there, but for the largest single one, together have fewer than S blocks.
 *
 * Why this suffices. A block of a call waits only for the block of the same number on its peers,
 * and a GPU starts the blocks of a grid in order (CUDA does not promise it, GPUs do it). So a call
 * goes on if on each GPU one block of each of its ranks finds room; its whole grid need not. Take,
 * of the calls in flight on all their ranks, one of the communicator with the largest grids. All
 * else that waits on a GPU, other communicators' grids and those of its own other ranks there, has
 * fewer blocks than there are multiprocessors. So whatever the GPU takes before this grid, it takes
 * whole; then one multiprocessor is free of it all and has room for a block of any kernel. The
 * lowest block that has not ended is therefore present on all ranks: it ends, then the next, and so
 * the call. The same holds for the calls that are left. Neither the order in which they began
 * matters nor the order in which communicators were made.
 *
 * What it takes from the program: an order that it imposes between calls of two communicators (one
 * stream, an event, a wait of the host) is the same on all ranks. A call that one rank does not
 * make before the other communicator's has ended, while another rank makes both at once, is safe
 * only if the grids together have at most S blocks, which max_blocks can see to.
 *
 * What is not counted: other processes on the GPU, and communicators whose calls are promised never
 * to run beside others' (ONEHOP_FLAG_ORDERED, ONEHOP_FLAG_EARLY_TRIGGER). Kernels that wait for no
 * peer end by themselves. Used when communicators are made and destroyed, never by a call. */
#ifndef OH_RESIDENCY_H
#define OH_RESIDENCY_H

#include "base/base.h"

/* Grids on a GPU: their blocks, and those of the largest. */
typedef struct oh_grids {
    uint64_t blocks;
    uint32_t largest;
} oh_grids;

/* May `ranks` grids of `blocks` each join what is there? If they may, fewer blocks may too. */
bool oh_residency_fits(const oh_grids *there, uint32_t multiprocessors, uint32_t ranks,
                       uint32_t blocks);

/* Blocks of a grid that is left open: all multiprocessors, divided by the ranks, if the rule allows
 * it, else half of what is left, so that others may follow. 0: not even 2 are left. */
uint32_t oh_residency_share(const oh_grids *there, uint32_t multiprocessors, uint32_t ranks);

/* What one communicator holds of one GPU. */
typedef struct oh_residency oh_residency;

typedef struct oh_claim {
    int gpu; /* ordinal */
    uint32_t multiprocessors;
    uint32_t ranks;  /* of the communicator on this GPU */
    uint32_t blocks; /* of a grid; 0: open */
    /* The same for all its ranks in this process, which share one claim; 0: for this rank alone. */
    uint64_t communicator;
} oh_claim;

/* Errors, where there is no room: ARGUMENT for the blocks given, UNSUPPORTED if they are open.
 * MEMORY. */
onehop_result oh_residency_claim(const oh_claim *claim, oh_residency **out);
uint32_t oh_residency_blocks(const oh_residency *residency);
/* Peers got less: gives back what is above `blocks`. */
void oh_residency_shrink(oh_residency *residency, uint32_t blocks);
void oh_residency_release(oh_residency *residency);

#endif
