/* What the ranks of `onehop tune` do: candidates, medians, crossovers. tune.c has the flags, the
 * table as a file and its trial. */
#ifndef OH_CLI_TUNE_MEASURE_H
#define OH_CLI_TUNE_MEASURE_H

#include "cli/perf/perf_worker.h"

enum {
    TUNE_RULES = 128, /* of one mode */
    TUNE_REPEATS = 3, /* medians of one way that must be alike, one after the other */
};

/* A way to do a call, and how long it takes. */
typedef struct tune_way {
    onehop_algorithm algorithm;
    onehop_source source;
    uint32_t blocks, threads; /* 0: it has none */
    double us;                /* INFINITY: it does not serve such calls */
} tune_way;

/* What serves messages up to so many bytes, and, if that is not the same, those in place. */
typedef struct tune_rule {
    uint64_t bytes;
    tune_way way, in_place;
} tune_rule;

/* In memory that all ranks share; rank 0 writes. */
typedef struct tune_report {
    tune_rule rules[2][TUNE_RULES]; /* by onehop_mode */
    size_t count[2];
    uint32_t capability; /* lowest; 0 on the host */
    char driver[96];
    char device[ONEHOP_MAX_RANKS][160];
    char noise[400]; /* why nothing may be written; "" */
} tune_report;

typedef struct tune_run {
    tune_report *report;
    double noise;  /* most that medians of one way may differ by, as a fraction */
    bool progress; /* on a terminal */
    /* Under way, of each rank. */
    perf_plan *plan;
    tune_way way;
    uint64_t bytes;
    uint32_t max_blocks;
    bool refused; /* for noise */
} tune_run;

/* The bodies of the two runs; `user` is a tune_run. The second compares what the library does with
 * the rules, and its results with the reference. */
onehop_result tune_measure(perf_worker *worker, bool *wrong_out);
onehop_result tune_try(perf_worker *worker, bool *wrong_out);

/* Are the last TUNE_REPEATS of `count` medians alike within `noise`, a fraction? They are in
 * us_out, sorted. Ways that do not serve, INFINITY all along, are. */
static inline bool tune_settled(const double *medians, int count, double noise, double *us_out) {
    if (count < TUNE_REPEATS) return false;
    for (int i = 0; i < TUNE_REPEATS; i++) {
        const double us = medians[count - TUNE_REPEATS + i];
        int at = i;
        for (; at > 0 && us_out[at - 1] > us; at--) us_out[at] = us_out[at - 1];
        us_out[at] = us;
    }
    return us_out[TUNE_REPEATS - 1] <= us_out[0] * (1 + noise);
}

bool tune_same_way(const tune_way *a, const tune_way *b);

/* "2shot_pull over graph, 65 x 512" */
void tune_name_way(const tune_way *way, char *text, size_t size);

#endif
