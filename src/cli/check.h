/* The parts of `onehop check`: check.c runs, check_print.c reports. */
#ifndef OH_CLI_CHECK_H
#define OH_CLI_CHECK_H

#include "cli/perf.h"

#include <stdio.h>

enum {
    CHECK_ALGORITHMS = 16, /* values of onehop_algorithm, and so on */
    CHECK_SOURCES = 4,
    CHECK_DTYPES = 4,
    CHECK_COLUMNS = 40,
};

/* One algorithm over one source, in one mode, for one type, world size and layout. */
typedef struct check_cell {
    bool tried;
    uint64_t outputs;  /* compared: one per rank, call and replay */
    uint64_t wrong;    /* elements */
    uint64_t outside;  /* guard bytes that changed */
    char refused[200]; /* what the library said to the first call that it refused */
} check_cell;

/* The runs of one world size in one layout. */
typedef struct check_column {
    int world_size, ranks_per_device;
    perf_layout layout;
    int code;                                                          /* largest exit code */
    check_cell cell[CHECK_ALGORITHMS][CHECK_SOURCES][2][CHECK_DTYPES]; /* third index: graph */
} check_column;

/* In memory that all ranks share; zero at first. */
typedef struct check_report {
    onehop_device_kind device;
    bool progress;
    char command_line[512], line[160], driver[256], clocks[256];
    int columns;
    check_column column[CHECK_COLUMNS];
} check_report;

/* The algorithms and sources that fit a group of that many ranks, whether the machine has them or
 * not. */
bool check_applies(int algorithm, int source, int world_size);

typedef struct check_totals {
    uint64_t ran, skipped, failed, missing; /* cells */
    uint64_t outputs, wrong, outside;
} check_totals;

check_totals check_count(const check_report *report);
void check_print(const check_report *report);
void check_write_json(FILE *file, void *report);

#endif
