/* The communicator: a validated holder of pointers over memory that somebody else owns, and the one
 * place from which calls are launched. It allocates no device memory and exchanges nothing.
 *
 * Its state is in three places: device memory of this rank (oh_local: sequence numbers, stop), the
 * control pages of all symmetric buffers (verdicts), and host memory (oh_host_page.record: what a
 * kernel found). oh_comm_check reads the last, on every call; failure.c reads the others, when
 * asked. */
#ifndef OH_COMM_H
#define OH_COMM_H

#include "base/base.h"
#include "plan/dispatch.h"
#include "communicator/residency.h"
#include "device/device.h"
#include "kernels/kernels.h"
#include "rendezvous/rendezvous.h"

#include <pthread.h>

#define OH_LONGEST_TIMEOUT_MS (1u << 31)
#define OH_KNOWN_FLAGS                                                                             \
    (ONEHOP_FLAG_EARLY_TRIGGER | ONEHOP_FLAG_SHARE_GPU | ONEHOP_FLAG_NCCL | ONEHOP_FLAG_UNCAP |    \
     ONEHOP_FLAG_ORDERED)
/* Do calls run beside those of other communicators on the GPU? */
#define OH_COUNTS_ON_GPU(flags) (!((flags) & (ONEHOP_FLAG_EARLY_TRIGGER | ONEHOP_FLAG_ORDERED)))

/* Kinds of calls that were told, by hash (told.h); a kind may be told again once another has taken
 * its place. */
#define OH_TOLD 256

struct onehop_comm {
    oh_host_side side; /* first: where host_poll_argument points */
    uint64_t process;  /* that made it */
    oh_device *device;
    bool owns_device;
    oh_residency *residency; /* over the caller's memory; NULL: its context's, or not counted */
    oh_dispatch dispatch;
    int rank, world;
    uint32_t timeout_ms;
    oh_args args; /* template: all that does not change from call to call */
    oh_host_page *page;
    void *scratch;          /* on the host device */
    oh_function *functions; /* by kernel index */
    /* The last plain call that the tables chose for: programs repeat their calls, and to see that
     * is quicker than to choose again. */
    oh_question planned_for; /* bytes 0: none yet */
    oh_plan planned;
    onehop_group *group; /* to watch the peers; may be NULL */
    void *nccl;          /* NCCL's communicator; NULL without the hand-over */
    uint64_t group_looked_ns;
    uint64_t gone_since_ns; /* atomic: when a peer was first seen gone, 0: never */

    /* Streams of the last eager and the last captured call, to order calls that change streams. Ids
     * are one more than the device's, which gives 0 to the stream NULL; 0: none yet. */
    onehop_stream eager_stream, captured_stream;
    uint64_t eager_id, captured_id;

    uint32_t *registration_tags; /* per registration of the table: its tag while taken, else 0 */
    uint32_t registrations_used, last_tag;
    uint32_t first_row; /* none before it is free */

    pthread_mutex_t failure_lock;
    onehop_failure failure; /* set once */
    int dead;               /* atomic: failure is set */

    uint64_t *told; /* kinds of calls that the debug log has told of (told.h); NULL: it tells
                     * nothing */
    onehop_stats stats;
};

/* What a fused operation adds to a request. */
typedef struct oh_fused {
    oh_rows rows;
    oh_args *args; /* begun with the communicator's; all that follows from the plan is still to be
                    * set */
    size_t args_bytes;
    oh_u32 *chunk_rows; /* within them */
    uint64_t identity;  /* hash of all that must be equal on all ranks besides the choice */
} oh_fused;

/* One call, validated. */
typedef struct oh_request {
    const void *in;
    void *out;
    size_t count;       /* of one rank's part, where ranks have parts */
    onehop_dtype dtype; /* 0: bytes */
    onehop_op op;
    const onehop_call *call; /* NULL: automatic */
    onehop_stream stream;
    uint32_t registration; /* with source GRAPH; the caller's, or taken for this call */
    onehop_collective collective;
    const onehop_expression *custom; /* of an all-reduce; NULL: none */
    const onehop_expression_values *values;
    const oh_fused *fused; /* NULL: none; else `in` and `out` are NULL, and the args have them */
} oh_request;

/* Of the message, or of one rank's part. */
static inline size_t oh_request_bytes(const oh_request *q) {
    return q->dtype ? q->count * onehop_dtype_bytes(q->dtype) : q->count;
}

/* Equal on all ranks: where ranks have parts, one may be in place and another not. */
static inline bool oh_request_in_place(const oh_request *q) {
    return q->collective == ONEHOP_ALL_REDUCE && q->in == q->out;
}

/* What a communicator is made of besides its config. */
typedef struct oh_comm_parts {
    oh_device *device; /* open; taken over if `owns_device` */
    bool owns_device;
    onehop_group *group;         /* may be NULL */
    const oh_dispatch *dispatch; /* without regions; copied */
    void *nccl;                  /* borrowed; may be NULL */
    uint64_t multicast;          /* address of the group's memory; 0: off */
} oh_comm_parts;

onehop_result oh_comm_open(const onehop_comm_config *config, const oh_comm_parts *parts,
                           onehop_comm **comm_out);

/* Launches a planned call on a stream of which `info` tells. */
onehop_result oh_comm_launch(onehop_comm *comm, const oh_request *request, const oh_plan *plan,
                             const oh_stream_info *info);

/* ARGUMENT if the largest grid does not fit on the device at once. */
onehop_result oh_comm_check_fit(const onehop_comm *comm, int kernel, const oh_function *function,
                                uint32_t ranks_per_device);

/* Fills one registration that is taken. `number`: of the call, equal on all ranks and of no other
 * call. */
onehop_result oh_comm_registration_fill(onehop_comm *comm, uint32_t registration, uint32_t number,
                                        const void *const *in, void *const *out);
/* Fills registrations that are taken, their tags included; empties and releases them. */
onehop_result oh_comm_registrations_fill(onehop_comm *comm, const uint32_t *registrations,
                                         oh_registration *values, size_t count);
onehop_result oh_comm_registrations_release(onehop_comm *comm, const uint32_t *registrations,
                                            size_t count);

/* OK, or the error of a dead communicator, or of a forked child's copy. Reads host memory only. */
onehop_result oh_comm_check(onehop_comm *comm);

/* As oh_comm_check, after a look at the control page and the group. Since it may talk to the device
 * it is not for the launch path. */
onehop_result oh_comm_look(onehop_comm *comm);

/* Watches peers' processes while work is in flight: marks a lost one on the own control page, so
 * that the waiting kernel ends. */
void oh_comm_watch(onehop_comm *comm);

/* A peer was seen gone. What it sent before may still be all that a running call needs; true once
 * that is out of the question. */
bool oh_comm_gone_for_long(onehop_comm *comm);

/* Declares the communicator dead from outside a call and tells every rank. */
void oh_comm_kill(onehop_comm *comm, uint32_t kind, int culprit);

onehop_result oh_comm_wait(onehop_comm *comm, onehop_stream stream);
onehop_result oh_comm_set_timeout(onehop_comm *comm, uint32_t timeout_ms);

/* Tells the peers that this rank will send nothing more. */
void oh_comm_leave(onehop_comm *comm);

/* Words of device memory, seen whole by whoever reads them there. */
onehop_result oh_comm_store_u32(onehop_comm *comm, uint64_t address, uint32_t value);
onehop_result oh_comm_store_u64(onehop_comm *comm, uint64_t address, uint64_t value);
onehop_result oh_comm_load_u64s(onehop_comm *comm, uint64_t address, uint64_t *values,
                                size_t count);

#endif
