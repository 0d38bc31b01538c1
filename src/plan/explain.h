/* Which rule chooses for a call, and why those before it do not: for `onehop which`. Needs no GPU
 * and no context, so it can tell of any group. */
#ifndef OH_EXPLAIN_H
#define OH_EXPLAIN_H

#include "plan/dispatch.h"

typedef struct oh_explain_group {
    oh_dispatch_group group;
    uint32_t max_blocks; /* as of onehop_layout_config; 0: its default */
} oh_explain_group;

/* Told of each rule for this group, operation and collective, in order. `why`: it is passed over;
 * NULL: it is the one, the last that is told. */
typedef struct oh_explained {
    const char *table, *text, *why;
    uint32_t line;
} oh_explained;
typedef void (*oh_explain_fn)(void *user, const oh_explained *rule);

/* The message of a fused operation. Threads are those of rows that go whole; 0 of tp_qknorm, whose
 * rows stay where they are. */
oh_rows oh_explain_rows(oh_operation operation, size_t count, size_t bytes);

/* The call as a context with default sizes would make it. Errors: those of the tables and of the
 * choice. */
onehop_result oh_explain(const oh_explain_group *group, const oh_question *q, oh_explain_fn tell,
                         void *user, onehop_choice *choice_out);

#endif
