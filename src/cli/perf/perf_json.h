/* The results as a file. Rank 0's worker only. */
#ifndef OH_CLI_PERF_JSON_H
#define OH_CLI_PERF_JSON_H

#include "cli/perf/perf_worker.h"

/* After all sizes. */
onehop_result perf_write_json(perf_worker *worker);

/* After each size but the last: a run that is ended early leaves a whole file with what was
 * measured, marked as not complete. A failure is left to the last writing. */
void perf_write_json_so_far(perf_worker *worker);

#endif
