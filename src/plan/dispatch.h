/* Which algorithm, source and grid serve a call: the first rule of a table (tuning.h) that the call
 * can use. A pure function of values that are equal on all ranks, so that all ranks choose alike,
 * and total: no size is without an answer. */
#ifndef OH_DISPATCH_H
#define OH_DISPATCH_H

#include "plan/plan.h"

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

/* Filled in place, for a copy of a struct just written costs the launch path some 20 ns: after an
 * error it is not to be used. Errors: ALGORITHM, TOO_LARGE (rows of a fused operation). */
onehop_result oh_dispatch_choose(const oh_dispatch *d, const oh_question *q, oh_plan *plan);

/* `choice` with the place of the plan's rule. */
onehop_choice oh_plan_choice(const oh_plan *plan);

#endif
