/* What every worker does before and after its body. */
#ifndef OH_CLI_PERF_SETUP_H
#define OH_CLI_PERF_SETUP_H

#include "cli/perf/perf_worker.h"

/* Sets up `ranks` ranks from number `first` on, runs the body, tears down. An exit code. */
int perf_work(perf_worker *worker, int first, int ranks);

#endif
