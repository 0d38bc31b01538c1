/* What is to be measured, decided before any rank starts. */
#ifndef OH_CLI_PERF_PLAN_H
#define OH_CLI_PERF_PLAN_H

#include "cli/shared/output.h"

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

static inline bool perf_has_peer(const perf_plan *plan, int peer) {
    return plan->peers >> peer & 1;
}

/* Parts that a message has, and pointers to the calling rank's: a message is what all ranks' parts
 * make together. The other ranks' parts of a reduce-scatter's output are not looked at. */
static inline size_t perf_parts(const perf_plan *plan) {
    return plan->collective == ONEHOP_ALL_REDUCE ? 1 : (size_t)plan->world_size;
}

/* Times that a graph is launched where calls are not timed. */
static inline int perf_passes(const perf_plan *plan) {
    return plan->graph ? 2 : 1;
}

/* Over multicast of GPUs sums have the switch's order. */
static inline bool perf_switch_may_add(const perf_plan *plan) {
    return plan->device == ONEHOP_DEVICE_CUDA && !oh_multicast_refusal();
}

extern const char *const perf_device_words[];
/* For commands that start all ranks: not OK, and said, if this process is one of several. */
int perf_refuse_launcher(void);
/* A name for the group that nobody else has. */
void perf_fresh_name(perf_plan *plan);
void perf_command_line(int argc, char **argv, char *line, size_t size);
/* Fills `device` and `devices`; `flag` is an index of perf_device_words, or -1. An exit code; has
 * printed why. */
int perf_find_device(perf_plan *plan, int64_t flag);

#endif
