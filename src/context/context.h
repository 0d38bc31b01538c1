/* The context: a group, this rank's memory and a communicator over it, made together.
 *
 * Setting up (setup.c) is steps that each rank does alone with exchanges between them, over
 * oh_members, so that ranks in processes, in threads, and all in one thread take one path:
 *   introduce   what this rank is and wants; its device is open           -> oh_introduction to all
 *   claim       settings compared; the grids that fit on this GPU         -> their blocks to all
 *   allocate    sizes agreed, memory made                                 -> oh_offer and a
 *                                                                         descriptor to all
 *   connect     the peers' memory mapped, own memory armed                -> barrier
 *   multicast   if all ranks allow it (multicast.c); a failure turns it off and is no error
 *   hand_over   with ONEHOP_FLAG_NCCL: NCCL's communicator, which waits for all ranks itself
 *   finish      the communicator
 * After each step the ranks agree that all succeeded; if not, all fail with the same message. */
#ifndef OH_CONTEXT_H
#define OH_CONTEXT_H

#include "communicator/comm.h"
#include "communicator/residency.h"
#include "device/nccl/nccl.h"

/* A captured call, compared across ranks. */
typedef struct oh_captured {
    uint64_t count;
    uint32_t dtype;
    uint32_t algorithm;
    uint32_t source;
    uint32_t blocks, threads;
    uint32_t in_place;
    uint32_t identity; /* of a fused call: hash of all that ranks must agree on */
} oh_captured;

/* What this rank alone knows of it. */
typedef struct oh_captured_memory {
    const void *in;
    void *out;
    size_t bytes;
    uint32_t registration; /* of a call over source GRAPH, else OH_NO_REGISTRATION */
} oh_captured_memory;

#define OH_NO_REGISTRATION UINT32_MAX

typedef struct oh_batch oh_batch;
typedef struct oh_members oh_members; /* members.h */

struct onehop_context {
    uint64_t process; /* that made it */
    onehop_group *group;
    bool owns_group;
    int rank, world;
    uint32_t init_timeout_ms;
    onehop_config config;
    oh_device *device;
    oh_device_info info;
    onehop_layout_config layout_config;
    onehop_layout layout;
    oh_regions regions;
    uint32_t ranks_per_device;
    oh_residency *residency; /* its grids among those on its GPU; NULL: not counted */
    uint32_t handle_kinds;   /* that work between all ranks */
    oh_mem buffers[ONEHOP_MAX_RANKS];
    oh_multicast multicast;
    oh_dispatch_group served;
    void *local;
    void *host, *host_device;
    void *nccl;         /* with the hand-over on */
    onehop_comm *comm;  /* NULL in a group of one rank */
    onehop_stats alone; /* of a group of one rank */
    oh_tuning tuning;
    oh_dispatch dispatch;

    bool capturing;
    oh_captured *captured;
    oh_captured_memory *captured_memory;
    size_t captured_count, captured_room;
    uint32_t numbered;    /* captured calls that have a number; agreed when a capture ends */
    oh_batch *open_batch; /* of the capture that is going on, once a call took a registration */
    oh_batch *batches;    /* of earlier ones, until their graphs are gone */
};

/* Takes new contexts through all steps. `mine`: what happened here before. After a failure they are
 * what they became so far. */
onehop_result oh_context_set_up(const oh_members *m, onehop_result mine);
/* The step of multicast.c. Errors are those of the exchange. */
onehop_result oh_multicast_set_up(const oh_members *m);

/* Every public function of a context begins with it. Errors: NULL, STATE (a forked child's
 * copy). */
onehop_result oh_context_check(const onehop_context *ctx, const char *call);

/* The contexts of a call on all ranks: the whole group, in rank order. */
onehop_result oh_check_all(onehop_context *const *contexts, int n, const char *call);

#endif
