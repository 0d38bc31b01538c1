/* Inputs, scalar reference, comparison. */
#ifndef OH_CLI_PERF_CHECK_H
#define OH_CLI_PERF_CHECK_H

#include "cli/perf/perf_worker.h"

/* Of the areas in use. */
onehop_result perf_fill_inputs(perf_worker *worker);
/* Pattern over outputs and guards of a size. */
onehop_result perf_poison(perf_worker *worker, perf_slices slices);
/* Compares the outputs of `calls` calls from number `first` on with the reference, on all ranks;
 * adds to the counters. Collective. */
onehop_result perf_verify(perf_worker *worker, perf_slices slices, uint64_t first, uint64_t calls,
                          int64_t *wrong, uint64_t *outside);

#endif
