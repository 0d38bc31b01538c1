/* See told.h. */
#include "call/told.h"

#include <stdio.h>

/* Is this the first call of its kind? */
static bool is_new(const onehop_comm *comm, const oh_question *q, const onehop_choice *c) {
    const uint64_t kind[] = {q->bytes,
                             (uint64_t)q->dtype,
                             (uint64_t)q->mode << 1 | q->in_place,
                             (uint64_t)q->collective << 8 | (q->rows ? q->rows->operation : 0),
                             q->rows ? q->rows->bytes : 0,
                             (uint64_t)c->algorithm << 32 | (uint64_t)c->source,
                             (uint64_t)c->blocks << 32 | c->threads,
                             (uint64_t)c->instead_of};
    const uint64_t hash = oh_hash(OH_HASH_START, kind, sizeof kind) | 1;
    uint64_t *place = &comm->told[hash / 2 % OH_TOLD];
    const bool known = *place == hash;
    *place = hash;
    return !known;
}

void oh_told(const onehop_comm *comm, const oh_question *q, const oh_plan *plan) {
    const onehop_choice c = oh_plan_choice(plan);
    char by[OH_TUNING_TEXT + 200] = "by no rule", instead[80] = "", rule[OH_TUNING_TEXT];
    if (!is_new(comm, q, &c)) return;
    if (plan->rule)
        snprintf(by, sizeof by, "by %s:%u (%s)", c.table, c.line, oh_tuning_text(plan->rule, rule));
    if (c.instead_of)
        snprintf(instead, sizeof instead, " instead of %s, which cannot serve it",
                 onehop_algorithm_name(c.instead_of));
    oh_log(ONEHOP_LOG_DEBUG, "%s of %zu bytes of %s, %s%s: %s%s%s%s, grid %ux%u, %u chunk%s, %s",
           q->rows ? oh_operation_name(q->rows->operation) : onehop_collective_name(q->collective),
           q->bytes, q->dtype ? onehop_dtype_name(q->dtype) : "any type",
           q->mode == ONEHOP_MODE_GRAPH ? "captured" : "eager", q->in_place ? " in place" : "",
           onehop_algorithm_name(c.algorithm), c.source ? " over " : "",
           c.source ? onehop_source_name(c.source) : "", instead, c.blocks, c.threads, c.chunks,
           c.chunks == 1 ? "" : "s", by);
}
