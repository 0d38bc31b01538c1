/* Ranks on GPUs for the programs of this folder: as threads (several per GPU if need be), as a
 * process per GPU, or all in one thread; with streams, memory, graphs and a few kernels to disturb
 * them.
 *
 * Manners that keep a wrong program from hanging: deadlines of calls are seconds; whatever may wait
 * for the whole GPU (allocating, freeing, loading, instantiating a graph) is done while no call is
 * in flight anywhere, between barriers; a process that forks never uses CUDA itself. */
#ifndef OH_TEST_GPU_RANKS_H
#define OH_TEST_GPU_RANKS_H

#include "harness.h"

#include "context/context.h"
#include "device/cuda/cuda_device.h"

#define GPU_TIMEOUT_MS   4000u
#define GPU_PINNED_BYTES ((size_t)4 << 20)

typedef enum gpu_layout {
    GPU_THREADS,
    GPU_PROCESSES,
    GPU_SINGLE
} gpu_layout;

typedef enum gpu_helper {
    HELPER_SPIN,
    HELPER_CONSUME,
    HELPER_COMPARE,
    HELPERS
} gpu_helper;

typedef struct gpu_rank {
    int rank, world, gpu;
    onehop_context *context;
    oh_cu_device device;
    oh_cu_context primary;
    onehop_stream stream, second; /* non-blocking */
    void *pinned;                 /* host memory, GPU_PINNED_BYTES */
    oh_cu_function helpers[HELPERS];
    uint32_t multiprocessors;
} gpu_rank;

/* The ranks that this thread drives: one, or all with GPU_SINGLE. */
typedef void (*gpu_fn)(gpu_rank *ranks, int here, void *argument);

typedef struct gpu_setup {
    gpu_layout layout;
    int world, gpus;             /* rank r is on GPU r % gpus, */
    const int *ordinals;         /* or on this one */
    const onehop_config *config; /* sizes and limits; may be NULL */
    const char *name;            /* processes: of the group; NULL: one of this program */
    bool dies; /* the communicators are expected to be dead in the end, and are not looked at */
} gpu_setup;

/* First call of every main: watchdog, environment, and the exit for machines with fewer than
 * `fewest` GPUs or a build without GPU kernels. Returns the number of GPUs. This process has not
 * used CUDA then. */
int gpu_main(unsigned seconds, int fewest);

/* gpu_main found one GPU, which all ranks share. */
bool gpu_is_shared(void);

/* After gpu_main: on how many GPUs two ranks run that are a process each. 2; or 1, if there is no
 * more and the driver's MPS daemon lets processes run on it side by side; else 0, with a line of
 * output: the GPU would serve them one after the other, milliseconds a call. */
int gpu_for_processes(void);

/* The ranks of one process want more queues than a client of MPS gets: this process, which has not
 * used CUDA yet, will use the GPU without the daemon. */
void gpu_leave_mps(void);

/* Runs `fn` in a process of its own, without MPS, which may use CUDA; fails if that fails. */
void gpu_apart(void (*fn)(void *), void *argument);

/* Runs `fn` on every rank of a new group and checks at the end that all is idle and armed.
 * GPU_PROCESSES forks; the others use CUDA in this process. */
void gpu_run(const gpu_setup *setup, gpu_fn fn, void *argument);

/* One rank, in this thread, of a group that others complete: by name, or `group`. */
void gpu_run_here(const gpu_setup *setup, int rank, onehop_group *group, gpu_fn fn, void *argument);

/* Collective; does nothing where one thread drives all. */
void gpu_barrier(const gpu_rank *rank);

/* Collective: every word of both parities of all push slots is armed. */
void gpu_expect_idle(gpu_rank *ranks, int here);

/* What remains of a dead communicator: the result, from status too, and the culprit. */
void gpu_expect_failure(gpu_rank *rank, onehop_result expected, int peer, onehop_result found,
                        const char *what);

/* ---- memory and work, in the context of the rank's GPU --------------------------------------- */
void *gpu_alloc(const gpu_rank *rank, size_t bytes);
void gpu_free(const gpu_rank *rank, void *memory);
void *gpu_alloc_pinned(const gpu_rank *rank, size_t bytes);
void gpu_free_pinned(const gpu_rank *rank, void *memory);

/* In order of the rank's stream; write, read and fill have ended on return. */
void gpu_write(const gpu_rank *rank, void *to, const void *from, size_t bytes);
void gpu_read(const gpu_rank *rank, void *to, const void *from, size_t bytes);
void gpu_fill(const gpu_rank *rank, void *to, int byte, size_t bytes);
void gpu_copy_later(const gpu_rank *rank, void *to, const void *from, size_t bytes,
                    onehop_stream stream);
void gpu_fill_later(const gpu_rank *rank, void *to, int byte, size_t bytes, onehop_stream stream);
void gpu_fill_words_later(const gpu_rank *rank, void *to, uint32_t word, size_t words,
                          onehop_stream stream);
bool gpu_stream_idle(const gpu_rank *rank, onehop_stream stream);

onehop_stream gpu_stream_make(const gpu_rank *rank);
void gpu_stream_free(const gpu_rank *rank, onehop_stream stream);

/* Keeps the stream busy for a while. */
void gpu_spin_later(const gpu_rank *rank, unsigned us, onehop_stream stream);
/* An ordinary kernel with programmatic dependent launch that fills the GPU: waits for its
 * predecessor, then copies. */
void gpu_consume_later(const gpu_rank *rank, void *to, const void *from, size_t bytes,
                       onehop_stream stream);
/* Adds to *count, on the GPU, how many words differ. */
void gpu_compare_later(const gpu_rank *rank, const void *found, const void *expected, size_t words,
                       uint32_t *count, onehop_stream stream);

typedef struct gpu_graph {
    oh_cu_graph graph;
    struct CUgraphExec_st *exec;
} gpu_graph;

/* Collective: between the two, work given to the ranks' first streams is captured. No call may be
 * in flight. */
void gpu_capture_begin(gpu_rank *const *ranks, int here);
void gpu_capture_end(gpu_rank *const *ranks, int here, gpu_graph *graphs_out);
/* The same for one rank, with the addresses of its rows: onehop_capture_end_mapped. */
void gpu_capture_end_mapped(gpu_rank *rank, const void *const *in, void *const *out, size_t count,
                            gpu_graph *graph_out);
void gpu_graph_launch(const gpu_rank *rank, const gpu_graph *graph, onehop_stream stream);
void gpu_graph_free(const gpu_rank *rank, gpu_graph *graph);

/* Text of the image `name`.fatbin beside this program; fails if it is missing. Never freed. */
const void *gpu_image(const char *name, size_t *bytes_out);

#endif
