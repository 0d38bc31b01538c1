/* See rules.h. */
#include "plan/rules.h"

#include "plan/chunks.h"
#include "kernels/kernels.h"

int oh_kernel_for(const oh_dispatch *d, oh_operation o, unsigned algorithm, unsigned source,
                  int dtype) {
    return source == ONEHOP_SOURCE_MULTICAST ? d->multicast[algorithm][dtype]
                                             : d->kernels[o][algorithm][dtype];
}

bool oh_rule_is_for_group(const oh_tuning_rule *rule, const oh_dispatch_group *group) {
    const bool host = rule->device == OH_TUNING_HOST;
    if (host != (group->kind == ONEHOP_DEVICE_HOST)) return false;
    if (!host && rule->device != OH_TUNING_CUDA && rule->device != group->capability / 10)
        return false;
    return group->world >= rule->world_low && group->world <= rule->world_high;
}

const char *oh_rule_group_lacks(const oh_dispatch *d, const oh_dispatch_group *group,
                                const oh_tuning_rule *rule) {
    if (rule->algorithm == ONEHOP_NCCL) return group->nccl ? NULL : "nccl is off";
    for (int t = 0; t <= ONEHOP_BFLOAT16; t++)
        if (oh_kernel_for(d, rule->operation, rule->algorithm, rule->source, t) >= 0) return NULL;
    return rule->source == ONEHOP_SOURCE_MULTICAST ? "multicast is off"
                                                   : "there is no such kernel here";
}

const char *oh_rule_misses(const oh_tuning_rule *rule, const oh_question *q) {
    if (rule->operation != oh_operation_of(q)) return "it is for another operation";
    if (oh_collective_of(rule->algorithm) != q->collective) return "it is for another collective";
    if (!(rule->modes >> q->mode & 1))
        return q->mode == ONEHOP_MODE_GRAPH ? "it is for eager calls" : "it is for captured calls";
    if (q->bytes > rule->up_to) return "the message is longer";
    return q->bytes <= rule->above ? "the message is shorter" : NULL;
}

const char *oh_shape_lacks(const oh_dispatch *d, onehop_algorithm a, const oh_question *q) {
    if (q->rows) return oh_rows_lack(d, a, q->rows);
    if (a == ONEHOP_2SHOT_PUSH && (q->bytes + OH_UNIT_BYTES - 1) / OH_UNIT_BYTES < (size_t)d->world)
        return "there are less than 16 bytes for each rank"; /* it gives each a unit at least */
    /* Words of 4 bytes of data and an sequence number; there is no second piece. */
    if (a == ONEHOP_GATHER_LL && q->bytes > d->regions.ll_bytes / 2)
        return "the flag words of a rank hold less";
    return NULL;
}

/* Captured memory can be read by captured calls, and by 1shot_pull only out of place: a peer still
 * reads what it would overwrite. */
const char *oh_rule_call_lacks(const oh_dispatch *d, const oh_tuning_rule *rule,
                               const oh_question *q) {
    if (rule->algorithm == ONEHOP_NCCL) return NULL;
    if (oh_kernel_for(d, rule->operation, rule->algorithm, rule->source, q->dtype) < 0)
        return "there is no such kernel for the type";
    const char *why = oh_shape_lacks(d, rule->algorithm, q);
    if (why || rule->source != ONEHOP_SOURCE_GRAPH) return why;
    if (q->mode != ONEHOP_MODE_GRAPH) return "source graph is for captured calls";
    return rule->algorithm == ONEHOP_1SHOT_PULL && q->in_place
               ? "in place 1shot_pull would overwrite what peers still read"
               : NULL;
}

const oh_tuning_rule *oh_rule_for(const oh_dispatch *d, const oh_question *q,
                                  onehop_algorithm algorithm) {
    for (size_t i = 0; i < d->rule_count; i++) {
        const oh_tuning_rule *rule = &d->rules[i];
        if (algorithm != ONEHOP_ALGORITHM_AUTO && rule->algorithm != algorithm) continue;
        if (!oh_rule_misses(rule, q) && !oh_rule_call_lacks(d, rule, q)) return rule;
    }
    return NULL;
}
