/* The sizes of `onehop perf`, one after another. */
#ifndef OH_CLI_PERF_SIZES_H
#define OH_CLI_PERF_SIZES_H

#include "cli/perf/perf_worker.h"

/* The body of `onehop perf`. */
onehop_result perf_all_sizes(perf_worker *worker, bool *wrong_out);

#endif
