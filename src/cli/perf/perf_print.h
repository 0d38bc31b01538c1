/* The results as a table. Rank 0's worker only. */
#ifndef OH_CLI_PERF_PRINT_H
#define OH_CLI_PERF_PRINT_H

#include "cli/perf/perf_worker.h"

void perf_print_header(const perf_worker *worker);
void perf_print_result(const perf_worker *worker, const perf_result *result);
/* Returns the number of wrong elements and changed guard bytes. */
uint64_t perf_print_footer(const perf_worker *worker);
double perf_average_busbw(const perf_worker *worker);
/* A peer's time over ours, over all sizes and both sides. */
double perf_geomean(const perf_worker *worker, int peer);

#endif
