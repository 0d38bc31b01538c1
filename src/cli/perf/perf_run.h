/* The timed part. */
#ifndef OH_CLI_PERF_RUN_H
#define OH_CLI_PERF_RUN_H

#include "cli/perf/perf_worker.h"

/* Times and verifies one size on one side. Collective. */
onehop_result perf_measure(perf_worker *worker, const perf_target *target, size_t bytes,
                           bool in_place, perf_side *side, uint64_t *outside);
/* The same without timing: one call per slice onto fresh outputs, all verified. A graph is replayed
 * once more: perf_passes. Collective. */
onehop_result perf_try(perf_worker *worker, const perf_target *target, perf_slices slices,
                       bool in_place, int64_t *wrong, uint64_t *outside);

#endif
