/* What was measured. */
#ifndef OH_CLI_PERF_RESULT_H
#define OH_CLI_PERF_RESULT_H

#include "cli/perf/perf_plan.h"

/* One column block of the table. Times are per call, the largest of all ranks; NAN if the library
 * does not serve such calls (calls is 0 then). */
typedef struct perf_side {
    double time_us, p50_us, p99_us, floor_percent; /* floor_percent < 0: not known */
    double algbw, busbw;                           /* GB/s, 1e9 */
    double ratio;                                  /* a peer's time over ours */
    uint64_t calls;                                /* timed ones */
    int64_t wrong;                                 /* elements on all ranks, -1: not checked */
} perf_side;

enum {
    SIDE_OUT_OF_PLACE,
    SIDE_IN_PLACE,
    SIDES
};

typedef struct perf_result {
    uint64_t bytes, count;
    const char *algorithm[SIDES];
    perf_side ours[SIDES], theirs[PEERS][SIDES];
    uint64_t outside; /* guard bytes that changed, on all ranks */
    double floor_us;  /* < 0: not known */
} perf_result;

#endif
