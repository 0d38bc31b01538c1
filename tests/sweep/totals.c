/* What came of all runs: what is wrong, kind by kind with a run of each to repeat, and the sums. */
#include "sweep.h"

#include <stdio.h>

/* ---- totals ---------------------------------------------------------------------------------- */

static const char *const fault_names[] = {
#define FAULT_NAME(name, text) #name,
    SWEEP_FAULTS(FAULT_NAME)
#undef FAULT_NAME
};
static const char *const fault_texts[] = {
#define FAULT_TEXT(name, text) text,
    SWEEP_FAULTS(FAULT_TEXT)
#undef FAULT_TEXT
};

static void print_case(const sweep_case *c) {
    printf("--case %d,%d,%s,%u,%s", c->world, c->rank, inject_name(c->fault.function), c->fault.nth,
           inject_action_name(c->fault.action));
}

static int worst(uint32_t bad) {
    return __builtin_ctz(bad);
}

/* Of one kind: the same fault after the same action in the same step. */
static bool alike(const sweep_list *list, uint32_t i, uint32_t j) {
    const sweep_case *a = &list->cases[i], *b = &list->cases[j];
    const sweep_outcome *x = &list->outcomes[i], *y = &list->outcomes[j];
    return y->verdict.bad && worst(x->verdict.bad) == worst(y->verdict.bad) &&
           a->fault.function == b->fault.function && a->fault.action == b->fault.action &&
           x->verdict.step == y->verdict.step;
}

static void print_kind(const sweep_list *list, int fault) {
    for (uint32_t i = 0; i < list->count; i++) {
        const sweep_outcome *o = &list->outcomes[i];
        uint32_t runs = 0, first = i;
        if (!o->verdict.bad || worst(o->verdict.bad) != fault) continue;
        for (uint32_t j = 0; j < list->count; j++) {
            if (!alike(list, i, j)) continue;
            if (j < first) first = j;
            runs++;
        }
        if (first < i) continue;
        printf("  %4u  ", runs);
        print_case(&list->cases[i]);
        printf("  at %s, %d of %d times\n        %s\n", life_step_name(o->verdict.step),
               o->bad_runs, o->runs, o->verdict.text);
    }
}

int print_totals(const sweep_list *list) {
    uint32_t missed = 0, quiet = 0, noticed = 0, bad = 0, lost = 0;
    uint32_t by[BAD_COUNT] = {0};
    for (uint32_t i = 0; i < list->count; i++) {
        const sweep_outcome *o = &list->outcomes[i];
        if (!o->done) {
            lost++;
        } else if (o->verdict.bad) {
            bad++;
            by[worst(o->verdict.bad)]++;
        } else if (!o->verdict.reached) {
            missed++;
        } else if (o->verdict.noticed) {
            noticed++;
        } else {
            quiet++;
        }
    }
    for (int f = 0; f < BAD_COUNT; f++) {
        if (!by[f]) continue;
        printf("\n%s: %u runs: %s\n", fault_names[f], by[f], fault_texts[f]);
        print_kind(list, f);
    }
    printf("\nof %u runs: %u ended with an error, as wanted, %u went on, %u did not come to their "
           "place; %u are wrong",
           list->count, noticed, quiet, missed, bad);
    for (int f = 0; f < BAD_COUNT; f++) printf("%s %s %u", f ? "," : ":", fault_names[f], by[f]);
    printf("\n");
    if (lost) printf("%u runs were not made: a worker died, or a signal came\n", lost);
    return bad || lost ? 1 : 0;
}

void print_reports(const sweep_case *c, const life_report *reports, const rank_end *ends) {
    for (int r = 0; r < c->world; r++) {
        const life_report *report = &reports[r];
        printf(
            "  rank %d: status 0x%x%s, at %s, %s, longest %s %.3f s, left %d fds %d blocks: %s\n",
            r, (unsigned)ends[r].status, ends[r].hung ? " (hung)" : "",
            life_step_name(report->step), onehop_result_name(report->result),
            life_step_name(report->longest_step), (double)report->longest, report->fds_left,
            report->heap_left, report->text);
    }
}
