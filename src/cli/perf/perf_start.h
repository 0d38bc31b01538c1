/* The start of the ranks. */
#ifndef OH_CLI_PERF_START_H
#define OH_CLI_PERF_START_H

#include "cli/perf/perf_worker.h"

/* Runs the body in the workers of a plan, as processes, with copies of `user` unless its memory is
 * shared, or threads. An exit code; has printed why. */
int perf_start(const perf_plan *plan, perf_body body, void *user);

#endif
