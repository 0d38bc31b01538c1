/* The results as a file. Rank 0's worker only. */
#ifndef OH_CLI_PERF_JSON_H
#define OH_CLI_PERF_JSON_H

#include "cli/perf/perf_worker.h"

onehop_result perf_write_json(perf_worker *worker);

#endif
