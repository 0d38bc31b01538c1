/* Copying and summing runs of elements on the host: what the host algorithms spend their time in.
 * One table per instruction set, chosen once at run time; every table gives the same bits. */
#ifndef OH_VECTOR_H
#define OH_VECTOR_H

#include "base/base.h"

typedef struct oh_vector {
    const char *isa;
    /* As memcpy: `to` and `from` are equal or disjoint. Any alignment. */
    void (*copy)(void *to, const void *from, size_t bytes);
    /* Indexed by onehop_dtype. out[i] = ((in[0][i] + in[1][i]) + in[2][i]) ... in fp32, rounded
     * once (nearest even) to the type; a NaN result is the canonical NaN. sources >= 1; `out` may
     * be any one of the inputs, else they are disjoint. Pointers need element alignment only. The
     * floating-point environment must be the default one (oh_host_run_worker sets it). */
    void (*reduce[4])(void *out, const void *const *in, int sources, size_t count);
} oh_vector;

/* The table in use. Any thread; one load after the first call. */
const oh_vector *oh_vector_table(void);

/* Refuses an ONEHOP_ISA that is not understood (ENVIRONMENT) or that this machine or build lacks
 * (UNSUPPORTED). Asked when a host device is opened; oh_vector_table itself takes the best set
 * then. */
onehop_result oh_vector_check(void);

/* Every table of this build that this machine can run, best first; NULL-terminated. For tests. */
const oh_vector *const *oh_vector_tables(void);

#endif
