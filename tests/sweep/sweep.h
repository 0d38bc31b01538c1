/* The sweep: one fault in one rank, at every place, and what all ranks make of it.
 *
 *   inject.c   fails, kills or stops a rank at the n-th call of a system function
 *   life.c     what a rank does, from create to destroy, and what it leaves behind
 *   judge.c    what is wrong with how the ranks of one run ended
 *   cases.c    the list of runs
 *   runs.c     one run; all of them
 *   totals.c   what came of them
 *   sweep.c    the command */
#ifndef OH_SWEEP_H
#define OH_SWEEP_H

#include "inject.h"

#include <onehop.h>
#include <stdbool.h>
#include <sys/types.h>

#define SWEEP_RANKS 3 /* the most */

/* X(name): what a rank does one after another. A collective one makes or ends something
 * together. */
#define LIFE_STEPS(X)                                                                              \
    X(create)                                                                                      \
    X(all_reduce_small)                                                                            \
    X(all_reduce_large)                                                                            \
    X(push_1shot)                                                                                  \
    X(push_2shot)                                                                                  \
    X(pull_1shot)                                                                                  \
    X(pull_2shot)                                                                                  \
    X(reduce_scatter)                                                                              \
    X(all_gather)                                                                                  \
    X(norm)                                                                                        \
    X(qknorm)                                                                                      \
    X(prepare)                                                                                     \
    X(mem_alloc)                                                                                   \
    X(stream_create)                                                                               \
    X(capture_begin)                                                                               \
    X(capture)                                                                                     \
    X(capture_end)                                                                                 \
    X(launch)                                                                                      \
    X(synchronize)                                                                                 \
    X(group_open)                                                                                  \
    X(symmetric_alloc)                                                                             \
    X(storage_arm)                                                                                 \
    X(barrier)                                                                                     \
    X(comm_create)                                                                                 \
    X(comm_all_reduce)                                                                             \
    X(status)                                                                                      \
    X(last_barrier)                                                                                \
    X(destroy)

typedef enum life_step {
#define LIFE_ENUM(name) AT_##name,
    LIFE_STEPS(LIFE_ENUM)
#undef LIFE_ENUM
    LIFE_STEPS_COUNT
} life_step;

/* Written by the rank into memory that outlives it. */
typedef struct life_report {
    float late;           /* seconds that it was ready to run and had no processor */
    int step;             /* where it is, or where it failed */
    onehop_result result; /* of the failed step */
    int peer;             /* of onehop_status after it; -1: says nothing */
    char text[512];       /* onehop_last_error after it */
    float longest;        /* seconds of the longest step */
    int longest_step;
    bool ended; /* after destroy and the looks at what is left */
    bool wrong; /* a sum, though the step said OK */
    int fds_left, heap_left, threads_left;
    char left[160]; /* the first descriptor or mapping that is left */
    bool maps_left;
    uint32_t counts[IN_COUNT];
    uint32_t sends_before; /* of counts, when the step began */
} life_report;

typedef struct life_plan {
    int rank, world;
    const char *name; /* of the group; a second one is opened under another */
    uint32_t limit_ms;
    inject_plan fault;
} life_plan;

const char *life_step_name(int step);

/* Lives, in a process of its own. */
void life_run(const life_plan *plan, life_report *report);

/* ---- one case and its verdict ---------------------------------------------------------------- */

typedef struct sweep_case {
    int world, rank; /* where the fault is */
    inject_plan fault;
} sweep_case;

/* X(name, text): what can be wrong; the most serious first. */
#define SWEEP_FAULTS(X)                                                                            \
    X(wrong, "a wrong sum that said OK")                                                           \
    X(crash, "a process ended by a signal")                                                        \
    X(hang, "a step took more than a second beyond the limit")                                     \
    X(culprit, "a survivor names an innocent, or nobody")                                          \
    X(split, "a collective step failed on one rank and not on another")                            \
    X(slow, "survivors needed more than a second, and the limit came first")                       \
    X(fds, "descriptors are left")                                                                 \
    X(maps, "mappings are left")                                                                   \
    X(threads, "threads are left")                                                                 \
    X(heap, "memory of the heap is left")

typedef enum sweep_fault {
#define SWEEP_ENUM(name, text) BAD_##name,
    SWEEP_FAULTS(SWEEP_ENUM)
#undef SWEEP_ENUM
    BAD_COUNT
} sweep_fault;

typedef struct rank_end {
    int status; /* of waitpid; -1: ended by the sweep, for it was stopped or hung */
    bool hung;
} rank_end;

typedef struct sweep_verdict {
    uint32_t bad;   /* bits of sweep_fault */
    bool reached;   /* the fault was carried out */
    bool noticed;   /* some rank reports an error */
    int step;       /* of the rank with the fault */
    char text[360]; /* of the most serious */
} sweep_verdict;

void judge(const sweep_case *c, uint32_t limit_ms, const life_report *reports, const rank_end *ends,
           sweep_verdict *verdict);

/* ---- all of them ----------------------------------------------------------------------------- */

typedef struct sweep_options {
    uint32_t sample; /* runs; 0: all */
    uint64_t seed;
    int jobs;
    uint32_t limit_ms;
    uint32_t stop_limit_ms; /* of runs in which a rank stops: they always take that long */
    int world;              /* 0: both */
    const char *only;       /* a function; NULL: all */
    const char *one;        /* a single run */
    int times;
    bool list;
} sweep_options;

extern sweep_options options;

typedef struct sweep_outcome {
    sweep_verdict verdict; /* of the first run that was wrong, else of the only one */
    uint8_t runs, bad_runs;
    bool done;
} sweep_outcome;

typedef struct sweep_list {
    sweep_case *cases;
    sweep_outcome *outcomes; /* shared with the workers */
    uint32_t count;
} sweep_list;

/* cases.c */
void count_all_calls(void); /* ends the program if a run without a fault fails */
void print_counts(void);
void add_all(sweep_list *list);
void draw_sample(sweep_list *list);
uint64_t seed_of_commit(void);

/* runs.c */
void *shared_memory(size_t bytes); /* with children; zeroed */
uint32_t limit_of(const sweep_case *c);
void run_case(const sweep_case *c, life_report *reports, rank_end *ends);
void run_all(sweep_list *list);

/* totals.c */
void print_reports(const sweep_case *c, const life_report *reports, const rank_end *ends);
int print_totals(const sweep_list *list); /* exit status */

#endif
