/* Which rules of the tables serve a call, and why the others do not. The reasons are static
 * strings, for `onehop which`; NULL is "it does". */
#ifndef OH_RULES_H
#define OH_RULES_H

#include "plan/plan.h"

static inline oh_operation oh_operation_of(const oh_question *q) {
    return q->rows ? q->rows->operation : OH_PLAIN;
}

int oh_kernel_for(const oh_dispatch *d, oh_operation o, unsigned algorithm, unsigned source,
                  int dtype);

/* The rule's device and number of ranks are the group's. */
bool oh_rule_is_for_group(const oh_tuning_rule *rule, const oh_dispatch_group *group);

/* What the group lacks for a rule that is for it. Such rules are not kept. */
const char *oh_rule_group_lacks(const oh_dispatch *d, const oh_dispatch_group *group,
                                const oh_tuning_rule *rule);

/* Why the rule is for other calls: operation, collective, mode or bytes. */
const char *oh_rule_misses(const oh_tuning_rule *rule, const oh_question *q);

/* Why an algorithm cannot serve a message of that shape. */
const char *oh_shape_lacks(const oh_dispatch *d, onehop_algorithm a, const oh_question *q);

/* Why a rule that is for such calls cannot be used by this one. */
const char *oh_rule_call_lacks(const oh_dispatch *d, const oh_tuning_rule *rule,
                               const oh_question *q);

/* The rule of a call, or with an algorithm the first that has it; NULL if there is none. */
const oh_tuning_rule *oh_rule_for(const oh_dispatch *d, const oh_question *q,
                                  onehop_algorithm algorithm);

#endif
