/* Which algorithm, source and grid serve a call: the first rule of a table (tuning.h) that the call
 * can use. A pure function of values that are equal on all ranks, so that all ranks choose alike,
 * and total: no size is without an answer. */
#ifndef OH_DISPATCH_H
#define OH_DISPATCH_H

#include "protocol/algorithms.h"
#include "plan/tuning.h"
#include "protocol/regions.h"

#define OH_DISPATCH_RULES 192

/* What the choice may depend on besides the call; equal on all ranks. */
typedef struct oh_dispatch {
    onehop_device_kind kind;
    int world;
    bool nccl;          /* there is a communicator of NCCL beside ours */
    oh_regions regions; /* to be filled in once the layout is known, before the first choice */
    /* Those of the table that this group may use, in the order in which they are tried. */
    oh_tuning_rule rules[OH_DISPATCH_RULES];
    size_t rule_count;
    /* Looked up once: index in oh_kernel_list for [operation][algorithm][type], -1 for none, and
     * the launch bound of a plain one. */
    int16_t kernels[OH_OPERATIONS][OH_ALGORITHMS][ONEHOP_BFLOAT16 + 1];
    uint32_t bounds[OH_ALGORITHMS][ONEHOP_BFLOAT16 + 1];
    /* The same over multicast; -1 for all while it is off. */
    int16_t multicast[OH_ALGORITHMS][ONEHOP_BFLOAT16 + 1];
} oh_dispatch;

/* Whose calls are to be served. */
typedef struct oh_dispatch_group {
    onehop_device_kind kind;
    uint32_t capability; /* the lowest of its GPUs, 90 for sm_90 */
    int world;
    bool nccl;
    bool multicast; /* on, on all ranks */
} oh_dispatch_group;

/* Errors: ENVIRONMENT (too many rules for this group). */
onehop_result oh_dispatch_init(oh_dispatch *d, const oh_dispatch_group *group,
                               const oh_tuning *tuning);

/* The longest message that may set the size of a buffer. */
#define OH_DISPATCH_MAX_BYTES ((size_t)128 << 20)

/* Sizes of a GPU's push slots and of half its pull buffer, where the caller leaves them open: the
 * longest messages that the table sends by push and by pull, up to max_bytes; if that is 0, up to a
 * cap and the usual slot, or with `uncap` to the most. Never less than some calls need: 64 KiB of
 * push, of pull twice max_bytes or the cap, between 1 MiB and what is usual. */
void oh_dispatch_sizes(const oh_dispatch *d, size_t max_bytes, bool uncap,
                       const onehop_layout *usual, size_t *push_out, size_t *pull_out);

/* Whether any call of the group can launch the kernel. */
bool oh_dispatch_uses(const oh_dispatch *d, int kernel);

/* The message of a fused operation: rows that go whole. */
typedef struct oh_rows {
    oh_operation operation;
    size_t count, bytes; /* of what travels, a whole number of units or 8 */
    uint32_t threads;    /* of a block on GPUs: the width of a row says how many */
} oh_rows;

/* What is asked: all that a choice depends on. Equal on all ranks. */
typedef struct oh_question {
    size_t bytes; /* > 0; of one rank's part, where ranks have parts; of `rows`, all of them */
    onehop_dtype dtype; /* 0: bytes, not numbers */
    onehop_mode mode;   /* GRAPH: the call can take a registration */
    bool in_place;
    const onehop_call *call; /* NULL, or with zero fields: onehop chooses */
    onehop_collective collective;
    const oh_rows *rows; /* of a fused operation; NULL: none */
} oh_question;

typedef struct oh_plan {
    onehop_choice choice;
    int kernel;                 /* index in oh_kernel_list; -1 for a local copy and NCCL */
    size_t chunk_bytes;         /* pieces the message goes in */
    uint32_t chunk_rows;        /* and, of a fused operation, their rows */
    const oh_tuning_rule *rule; /* that chose, or gave a named algorithm its grid; NULL: none */
} oh_plan;

/* Filled in place, for a copy of a struct just written costs the launch path some 20 ns: after an
 * error it is not to be used. Errors: ALGORITHM, TOO_LARGE (rows of a fused operation). */
onehop_result oh_dispatch_choose(const oh_dispatch *d, const oh_question *q, oh_plan *plan);

/* `choice` with the place of the plan's rule. */
onehop_choice oh_plan_choice(const oh_plan *plan);

#endif
