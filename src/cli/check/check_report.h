/* What `onehop check` finds, and how it is told. */
#ifndef OH_CLI_CHECK_REPORT_H
#define OH_CLI_CHECK_REPORT_H

#include "protocol/algorithms.h"
#include "cli/perf/perf_plan.h"

#include <stdio.h>

enum {
    CHECK_KINDS = OH_ALGORITHMS * 4 * 2, /* algorithms, sources, modes */
    CHECK_DTYPES = 4,
    CHECK_COLUMNS = 40,
};

/* A kind of call; the numbers 0 .. CHECK_KINDS - 1 name all there could be. */
typedef struct check_kind {
    onehop_algorithm algorithm;
    onehop_source source;
    bool graph;
} check_kind;

check_kind check_kind_of(int number);

/* Whether a group of that many ranks makes such calls, if the machine can. */
bool check_applies(check_kind kind, int world_size);

/* One kind of call for one type, world size and layout. */
typedef struct check_cell {
    bool tried;
    uint64_t outputs;  /* compared: one per rank, call and replay */
    uint64_t wrong;    /* elements */
    uint64_t outside;  /* guard bytes that changed */
    char refused[400]; /* what the library said to the first call that it refused */
} check_cell;

/* The runs of one world size in one layout. */
typedef struct check_column {
    int world_size, ranks_per_device;
    perf_layout layout;
    int code; /* largest exit code */
    int lost; /* runs that ended early */
    check_cell cell[CHECK_KINDS][CHECK_DTYPES];
} check_column;

/* In memory that all ranks share; zero at first. */
typedef struct check_report {
    onehop_device_kind device;
    bool progress;
    char command_line[512], line[160], driver[256], clocks[256];
    int columns;
    check_column column[CHECK_COLUMNS];
} check_report;

typedef struct check_totals {
    uint64_t ran, skipped, missing; /* cells */
    int lost;                       /* runs */
    uint64_t outputs, wrong, outside;
} check_totals;

check_totals check_count(const check_report *report);
void check_print(const check_report *report);
void check_write_json(FILE *file, void *report);

#endif
