/* See explain.h. */
#include "plan/explain.h"

#include "kernels/kernels.h"
#include "plan/rules.h"
#include "protocol/layout.h"

#include <stdlib.h>

/* As a context's, where its caller leaves all sizes open. */
static onehop_result lay_out(const oh_explain_group *g, oh_dispatch *d) {
    onehop_layout_config c = ONEHOP_CONFIG_INIT(onehop_layout_config);
    onehop_layout layout;
    c.device_kind = g->group.kind;
    c.world_size = g->group.world;
    c.max_blocks = g->max_blocks;
    onehop_result result = oh_layout_plan(&c, &layout, &d->regions);
    if (result || g->group.kind == ONEHOP_DEVICE_HOST) return result;
    oh_dispatch_sizes(d, 0, false, &layout, &c.push_bytes, &c.pull_bytes);
    return oh_layout_plan(&c, &layout, &d->regions);
}

oh_rows oh_explain_rows(oh_operation operation, size_t count, size_t bytes) {
    const uint32_t threads =
        operation == OH_NORM ? oh_lanes_of((uint32_t)(bytes / OH_UNIT_BYTES)) : 0;
    return (oh_rows){operation, count, bytes, threads};
}

/* Why the rule is not the one; a rule that serves, and is not, is of another algorithm than was
 * named. */
static const char *why_not(const oh_dispatch *d, const oh_dispatch_group *group,
                           const oh_question *q, const oh_tuning_rule *rule) {
    const char *why = oh_rule_misses(rule, q);
    if (!why) why = oh_rule_group_lacks(d, group, rule);
    if (!why) why = oh_rule_call_lacks(d, rule, q);
    return why ? why : "another algorithm was named";
}

typedef struct listener {
    oh_explain_fn tell;
    void *user;
} listener;

static void tell_rules(const oh_dispatch *d, const oh_dispatch_group *group, const oh_question *q,
                       const oh_tuning *tuning, const oh_tuning_rule *chosen, listener to) {
    for (size_t i = 0; i < tuning->count; i++) {
        const oh_tuning_rule *rule = &tuning->rules[i];
        char text[OH_TUNING_TEXT];
        if (!oh_rule_is_for_group(rule, group) || rule->operation != oh_operation_of(q) ||
            oh_collective_of(rule->algorithm) != q->collective)
            continue;
        const bool this_one = chosen && rule->place == chosen->place;
        oh_explained e = {.text = oh_tuning_text(rule, text)};
        e.table = oh_tuning_where(rule, &e.line);
        e.why = this_one ? NULL : why_not(d, group, q, rule);
        to.tell(to.user, &e);
        if (this_one) return;
    }
}

onehop_result oh_explain(const oh_explain_group *group, const oh_question *q, oh_explain_fn tell,
                         void *user, onehop_choice *choice_out) {
    oh_tuning tuning;
    oh_plan plan;
    oh_dispatch *d = malloc(sizeof *d);
    if (!d) return oh_error(ONEHOP_ERR_MEMORY, "no memory for the tables");
    onehop_result result = oh_tuning_load(&tuning);
    if (!result) result = oh_dispatch_init(d, &group->group, &tuning);
    if (!result && group->group.world > 1) result = lay_out(group, d);
    if (!result) result = oh_dispatch_choose(d, q, &plan);
    if (!result) {
        tell_rules(d, &group->group, q, &tuning, plan.rule, (listener){tell, user});
        *choice_out = oh_plan_choice(&plan);
    }
    oh_tuning_free(&tuning);
    free(d);
    return result;
}
