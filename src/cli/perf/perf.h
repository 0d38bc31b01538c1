/* The parts of `onehop perf`.
 *   perf.c        flags, the plan made of them
 *   perf_start.c  the device, the start of the ranks
 *   perf_worker.c what each rank does: set-up, the sizes one after another
 *   perf_run.c    the timed part
 *   perf_check.c  inputs, scalar reference, comparison
 *   perf_floor.c  what the machine could do at best
 *   perf_nccl.c   the foreign libraries beside us
 *   perf_print.c, perf_json.c  the results
 * `onehop check` makes plans of its own and runs them with another body. */
#ifndef OH_CLI_PERF_H
#define OH_CLI_PERF_H

#include "cli/shared/backend.h"
#include "cli/shared/output.h"
#include "cli/shared/ranks.h"

#include <sched.h>

typedef enum perf_layout {
    LAYOUT_PROCESS,
    LAYOUT_THREAD,
    LAYOUT_SINGLE
} perf_layout;

/* What is timed beside us. */
enum {
    PEER_NCCL,
    PEER_NCCL_SYMM, /* the same library on buffers of a symmetric window */
    PEERS
};

/* Decided before any rank starts; equal on all ranks. */
typedef struct perf_plan {
    onehop_device_kind device; /* CUDA or HOST */
    perf_layout layout;
    int world_size;
    int ranks_per_device;
    bool mps;     /* processes share GPUs through the driver's MPS daemon */
    int devices;  /* GPUs that this process sees */
    int env_rank; /* >= 0: this process is one rank, started by a launcher */
    int env_local_rank;
    char name[64]; /* of the group; "" takes the environment's */
    uint64_t min_bytes, max_bytes, factor;
    onehop_collective collective;
    onehop_dtype dtype;
    onehop_algorithm algorithm; /* AUTO or forced */
    onehop_source source;       /* NONE or forced */
    bool graph;                 /* replay graphs; else call eagerly */
    uint64_t calls;             /* per sample: in one graph, or one batch; 0: by size and time */
    uint64_t samples;           /* replays or batches; 0: by time */
    uint64_t warmup;            /* calls before the timed part; replays are one at least */
    bool check, rotate, early_trigger, pin;
    bool hand_over;                /* with NCCL as one of our algorithms */
    size_t push_bytes, pull_bytes; /* 0: defaults */
    uint32_t timeout_ms;
    bool mapped;      /* buffers from onehop_mem_alloc, which peers can map */
    bool with_stream; /* also where calls are eager */
    int corrupt;      /* > 0: the last rank's comparison that meets a flipped bit, for tests */
    uint32_t peers;   /* a bit for each of PEER_ */
    const char *nccl_path;
    output file; /* of -J, in tune of -o */
    char command_line[512];
} perf_plan;

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

enum {
    PERF_MAX_SIZES = 64
};

typedef enum perf_data {
    DATA_REAL, /* and a few special values, but no subnormals, which some processors add slowly */
    DATA_INTEGERS, /* small ones: any order of summation gives the same bits */
    DATA_MIXED,    /* real numbers, special values and subnormals */
} perf_data;

/* Over multicast of GPUs sums have the switch's order. */
static inline bool perf_switch_may_add(const perf_plan *plan) {
    return plan->device == ONEHOP_DEVICE_CUDA && !oh_multicast_refusal();
}

/* What the machine can do at best. The floor of a size is latency + its copy time. */
typedef struct perf_floor {
    bool known;
    double latency_us;              /* one way, core to core */
    double copy_us[PERF_MAX_SIZES]; /* by number of the size */
} perf_floor;

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
extern const perf_target perf_target_peer[PEERS];

static inline bool perf_has_peer(const perf_plan *plan, int peer) {
    return plan->peers >> peer & 1;
}

/* Parts that a message has, and pointers to the calling rank's: a message is what all ranks' parts
 * make together. The other ranks' parts of a reduce-scatter's output are not looked at. */
static inline size_t perf_parts(const perf_plan *plan) {
    return plan->collective == ONEHOP_ALL_REDUCE ? 1 : (size_t)plan->world_size;
}

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

/* perf_start.c. perf_find_device: fills `device` and `devices`; `flag` is an index of
 * perf_device_words, or -1. perf_start: runs the body in the workers of a plan, as processes, with
 * copies of `user` unless its memory is shared, or threads. Both return an exit code and have
 * printed why. */
extern const char *const perf_device_words[];
/* For commands that start all ranks: not OK, and said, if this process is one of several. */
int perf_refuse_launcher(void);
/* A name for the group that nobody else has. */
void perf_fresh_name(perf_plan *plan);
void perf_command_line(int argc, char **argv, char *line, size_t size);
int perf_find_device(perf_plan *plan, int64_t flag);
int perf_start(const perf_plan *plan, perf_body body, void *user);

/* With `pin`: the calling thread stays on the processor of its rank, or may use all again. */
void perf_pin(const perf_worker *worker, bool on);

/* perf_worker.c. perf_all_sizes: the body of `onehop perf`. */
onehop_result perf_all_sizes(perf_worker *worker, bool *wrong_out);
int perf_work(perf_worker *worker, int first, int ranks);
onehop_result perf_barrier(perf_worker *worker);
/* The largest value, or the sum, over all ranks; `value` has one entry per rank of the worker.
 * Collective. */
onehop_result perf_largest(perf_worker *worker, const double *value, double *out);

/* perf_run.c: times and verifies one size on one side. Collective. */
onehop_result perf_measure(perf_worker *worker, const perf_target *target, size_t bytes,
                           bool in_place, perf_side *side, uint64_t *outside);
/* The same without timing: one call per slice onto fresh outputs, all verified. A graph is replayed
 * once more: perf_passes. Collective. */
onehop_result perf_try(perf_worker *worker, const perf_target *target, perf_slices slices,
                       bool in_place, int64_t *wrong, uint64_t *outside);
static inline int perf_passes(const perf_plan *plan) {
    return plan->graph ? 2 : 1;
}

/* perf_check.c */
/* Of the areas in use. */
onehop_result perf_fill_inputs(perf_worker *worker);
/* Pattern over outputs and guards of a size. */
onehop_result perf_poison(perf_worker *worker, perf_slices slices);
/* Compares the outputs of `calls` calls from number `first` on with the reference, on all ranks;
 * adds to the counters. Collective. */
onehop_result perf_verify(perf_worker *worker, perf_slices slices, uint64_t first, uint64_t calls,
                          int64_t *wrong, uint64_t *outside);

/* perf_numbers.c: a scalar's way from and to the data types, written apart from the library's. */
float perf_decode(onehop_dtype dtype, const void *element);
void perf_encode(onehop_dtype dtype, float value, void *element);

/* perf_floor.c */
void perf_measure_floor(const uint64_t *bytes, size_t count, perf_floor *out);

/* The areas that a target works on become those in use. */
void perf_use_areas(perf_worker *worker, const perf_target *target);

/* perf_nccl.c: opens the library and for each rank a communicator and, for PEER_NCCL_SYMM, windows.
 * Collective. */
onehop_result perf_nccl_open(perf_worker *worker);
void perf_nccl_close(perf_worker *worker);
const char *perf_nccl_version(void);

/* perf_print.c, perf_json.c: rank 0's worker only. */
void perf_print_header(const perf_worker *worker);
void perf_print_result(const perf_worker *worker, const perf_result *result);
/* Returns the number of wrong elements and changed guard bytes. */
uint64_t perf_print_footer(const perf_worker *worker);
double perf_average_busbw(const perf_worker *worker);
/* A peer's time over ours, over all sizes and both sides. */
double perf_geomean(const perf_worker *worker, int peer);
onehop_result perf_write_json(perf_worker *worker);

#endif
