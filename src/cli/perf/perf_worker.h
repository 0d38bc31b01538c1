/* A worker: its ranks, what they work on, and how it keeps step with the others. */
#ifndef OH_CLI_PERF_WORKER_H
#define OH_CLI_PERF_WORKER_H

#include "cli/perf/perf_floor.h"
#include "cli/perf/perf_result.h"
#include "cli/shared/backend.h"
#include "cli/shared/board.h"

#include <sched.h>

typedef enum perf_data {
    DATA_REAL, /* and a few special values, but no subnormals, which some processors add slowly */
    DATA_INTEGERS, /* small ones: any order of summation gives the same bits */
    DATA_MIXED,    /* real numbers, special values and subnormals */
} perf_data;

/* Input and output areas, cut into slices. Element i of the input area is a pure function of rank
 * and i, so that everyone knows everyone's input. */
typedef struct perf_areas {
    void *in, *out;
} perf_areas;

typedef struct perf_rank {
    int rank;
    onehop_context *context;
    onehop_group *group; /* of thread ranks; NULL if the context has its own */
    backend_rank processor;
    void *foreign;          /* communicator of the library compared with */
    void *window_handle[2]; /* of the foreign library, for window.in and .out */
    perf_areas own, window;
    const perf_areas *areas;     /* those of the target under way */
    uint64_t *begin_ns, *end_ns; /* clock stamps by sample, where the back end has no events */
    double *sample_us;           /* by sample, per call */
} perf_rank;

/* What a worker does between set-up and tear-down. `wrong_out`: data were found that are wrong. */
struct perf_worker;
typedef onehop_result (*perf_body)(struct perf_worker *worker, bool *wrong_out);

/* One thread that drives `ranks` ranks: one, or all of them in the layout "single". */
typedef struct perf_worker {
    const perf_plan *plan;
    perf_body body;
    void *user;
    const perf_backend *backend;
    cpu_set_t allowed; /* processors, with `pin` */
    perf_board *board;
    onehop_symmetric *board_memory; /* where the board lies if no parent made it */
    onehop_group *board_group;
    int ranks;
    perf_rank rank[ONEHOP_MAX_RANKS];
    size_t area_bytes;
    size_t staging_bytes;
    unsigned char *staging;
    bool capturing;
    bool inline_calls;      /* eager calls of the host take no stream although there is one */
    int compared, verified; /* of the last rank so far, counting those under way or not */
    perf_data data;
    perf_floor floor;
    perf_result result[PERF_MAX_SIZES];
    size_t results;
    bool complete; /* all sizes have been measured */
} perf_worker;

/* Whose collective is timed. `count` is of one rank's part where ranks have parts. */
typedef struct perf_target {
    const char *name;
    bool registers; /* captures go between onehop_capture_begin and _end */
    bool window;    /* works on the areas of the foreign library's window */
    onehop_result (*call)(perf_worker *, perf_rank *, const void *in, void *out, size_t count);
    onehop_result (*wait)(perf_worker *, perf_rank *);
} perf_target;

extern const perf_target perf_target_onehop;

/* The largest number of timed samples. */
enum {
    PERF_MAX_SAMPLES = 50000
};

/* Slices: bytes kept between two outputs, and before the first, filled with a pattern. */
enum {
    PERF_GUARD = 256
};

/* How a message size is laid out in the areas. */
typedef struct perf_slices {
    size_t bytes, stride, count;
    size_t element; /* 0, or its size: slices begin between units, elsewhere on each rank */
} perf_slices;

perf_slices perf_slices_for(const perf_worker *worker, size_t bytes);
/* Bytes from the begin of a rank's input area. */
size_t perf_slice_offset(perf_slices slices, uint64_t call, int rank);
void *perf_slice_in(const perf_rank *rank, perf_slices slices, uint64_t call);
void *perf_slice_out(const perf_rank *rank, perf_slices slices, uint64_t call);

/* What could be used of the areas, at most. */
size_t perf_max_slices(const perf_plan *plan);

/* The areas that a target works on become those in use. */
void perf_use_areas(perf_worker *worker, const perf_target *target);

/* With `pin`: the calling thread stays on the processor of its rank, or may use all again. */
void perf_pin(const perf_worker *worker, bool on);

onehop_result perf_barrier(perf_worker *worker);
/* The largest value, or the sum, over all ranks; `value` has one entry per rank of the worker.
 * Collective. */
onehop_result perf_largest(perf_worker *worker, const double *value, double *out);

#endif
