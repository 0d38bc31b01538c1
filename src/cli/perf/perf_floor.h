/* What the machine could do at best. */
#ifndef OH_CLI_PERF_FLOOR_H
#define OH_CLI_PERF_FLOOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    PERF_MAX_SIZES = 64
};

/* What the machine can do at best. The floor of a size is latency + its copy time. */
typedef struct perf_floor {
    bool known;
    double latency_us;              /* one way, core to core */
    double copy_us[PERF_MAX_SIZES]; /* by number of the size */
} perf_floor;

void perf_measure_floor(const uint64_t *bytes, size_t count, perf_floor *out);

#endif
