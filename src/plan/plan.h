/* What is asked when a call is planned, of whom, and what the answer is. */
#ifndef OH_PLAN_H
#define OH_PLAN_H

#include "plan/tuning.h"
#include "protocol/algorithms.h"
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

#endif
