/* Many calls at once, compared byte by byte: outputs lie in one piece of memory with guards between
 * them, of which the host makes the image before and the image expected after. So a comparison
 * costs microseconds, and a byte written anywhere else shows.
 *
 * Inputs are windows of one array per rank; call to call the window moves, so what an earlier call
 * left behind is wrong. */
#ifndef OH_TEST_GPU_BATCH_H
#define OH_TEST_GPU_BATCH_H

#include "gpu_ranks.h"
#include "reference.h"

/* ---- data: inputs of all ranks and their sum, in memory shared by processes ------------------ */
typedef struct gpu_data {
    size_t room; /* elements */
    onehop_dtype dtype;
    size_t elements;
    unsigned char *in[ONEHOP_MAX_RANKS], *sum;
} gpu_data;

/* Before processes are forked. */
gpu_data *gpu_data_make(size_t room, int ranks);
/* Collective: each rank makes its input and a part of the sum. */
void gpu_data_fill(gpu_data *data, gpu_rank *ranks, int here, input_kind kind, uint64_t seed,
                   onehop_dtype dtype, size_t elements);
/* The second half of that, over inputs made by the caller. */
void gpu_data_sum(gpu_data *data, gpu_rank *ranks, int here, onehop_dtype dtype, size_t elements);

/* ---- calls ----------------------------------------------------------------------------------- */
typedef struct gpu_call {
    size_t count;
    size_t first;   /* of the window; a multiple of 8 if shift is 0 */
    unsigned shift; /* 0: in and out on 16 bytes; else both off by numbers that differ from rank to
                * rank */
    bool in_place;
    uint32_t blocks, threads; /* 0: automatic */
    int slow_rank;            /* its stream is busy for slow_us before the call */
    unsigned slow_us;
    bool second; /* on the rank's second stream */
    onehop_algorithm algorithm;
} gpu_call;

/* One rank's memory for batches. */
typedef struct gpu_bench {
    gpu_rank *rank;
    const gpu_data *data;
    unsigned char *inputs, *arena, *echo; /* on the GPU */
    unsigned char *in[2];                 /* aligned, and off by a few elements */
    unsigned char *image, *expected;      /* on the host */
    size_t room, used;
    size_t *places; /* offsets of the outputs of a piece */
} gpu_bench;

typedef struct gpu_how {
    const char *what;
    bool graph;
    bool echo;    /* a kernel that fills the GPU consumes each output */
    bool reverse; /* odd ranks go through the benches from the last to the first */
    void (*beside)(gpu_bench *bench,
                   void *argument); /* by each bench, right before the calls of a piece */
    void *argument;
} gpu_how;

void gpu_bench_open(gpu_bench *bench, gpu_rank *rank, const gpu_data *data, size_t arena_bytes);
/* To be called after the data has changed. */
void gpu_bench_load(gpu_bench *bench);
void gpu_bench_close(gpu_bench *bench);

/* Collective. Makes the calls in pieces and compares. Call c is made on every bench before call c+1
 * on any: several ranks of one thread, several communicators, or several types. Returns how many
 * outputs were compared. */
size_t gpu_batch(gpu_bench *benches, int here, const gpu_call *calls, size_t count,
                 const gpu_how *how);

/* The common frame: opens a bench per rank, runs `calls` over fresh data, closes. */
size_t gpu_batch_once(gpu_rank *ranks, int here, gpu_data *data, input_kind kind, uint64_t seed,
                      onehop_dtype dtype, const gpu_call *calls, size_t count, const gpu_how *how);

#endif
