/* Which algorithm, grid and block serve a call. Data: a table of rows; a pure function of values
 * that are equal on all ranks, so that all ranks choose alike, and total: no size is without an
 * answer. */
#ifndef OH_DISPATCH_H
#define OH_DISPATCH_H

#include "base/base.h"
#include "device/planes.h"

/* What the choice may depend on besides the call; equal on all ranks. */
typedef struct oh_dispatch {
    onehop_device_kind kind;
    int world;
    oh_planes planes;
    /* Looked up once: index in oh_kernel_list for [algorithm][type], -1 for none, and its launch
     * bound. */
    int16_t kernels[ONEHOP_LOCAL_COPY + 1][ONEHOP_BFLOAT16 + 1];
    uint32_t bounds[ONEHOP_LOCAL_COPY + 1][ONEHOP_BFLOAT16 + 1];
} oh_dispatch;

void oh_dispatch_init(oh_dispatch *d, onehop_device_kind kind, int world, const oh_planes *planes);

/* What is asked: all that a choice depends on. Equal on all ranks. */
typedef struct oh_question {
    size_t bytes; /* > 0 */
    onehop_dtype dtype;
    onehop_mode mode; /* GRAPH: the call can take a row of the table of captured inputs */
    bool in_place;
    const onehop_call *call; /* NULL, or with zero fields: onehop chooses */
} oh_question;

typedef struct oh_plan {
    onehop_choice choice;
    int kernel;         /* index in oh_kernel_list; -1 for a local copy */
    size_t chunk_bytes; /* pieces the message goes in */
} oh_plan;

/* Errors: ALGORITHM. */
onehop_result oh_dispatch_choose(const oh_dispatch *d, const oh_question *q, oh_plan *plan_out);

#endif
