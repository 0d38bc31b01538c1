/* onehop: all-reduce between the GPUs, or the CPU processes, of one machine.
 *
 * This header is the manual. It is the only header that is installed; it includes nothing of CUDA.
 *
 * How it fits together, from the bottom up:
 *   group          ranks that found each other: exchange of small blobs and descriptors
 *   symmetric      one allocation per rank, mapped by every rank of the group
 *   communicator   a thin pointer holder over such memory, whoever allocated it; runs all-reduces
 *   context        the easy way: group + memory + communicator + liveness + capture
 *                  (onehop_context)
 * Most programs need only onehop_create, onehop_all_reduce, onehop_synchronize, onehop_destroy.
 *
 * Rules that hold for every call below unless its comment says otherwise:
 *   - Functions that can fail return onehop_result: 0 is success, negative is an error.
 *     onehop_last_error() gives the calling thread a sentence about its last error. Outputs
 *     (`*_out`) come last and are written only on success.
 *   - Config structs begin with struct_size; set it to sizeof the struct (ONEHOP_CONFIG_INIT does)
 *     and leave every other byte zero: zero means "default" for each field that says so.
 *   - destroy, close and free take NULL, return void, are local and never wait for a peer.
 *   - An object may be used by any thread, by one thread at a time. Different objects are
 *     independent. onehop_abort, onehop_status and onehop_set_timeout may run beside other calls.
 *   - An object belongs to the process that made it. In a forked child every call on it gives
 *     STATE; destroy, close and free there release the child's copies and tell nobody anything. A
 *     child may make objects of its own (on CUDA, if its parent had not used the driver yet).
 *   - Ranks of one process on GPUs (threads, or onehop_create_all): set CUDA_MODULE_LOADING=EAGER
 *     before CUDA starts, or launch every kernel of the program once before the first call. By
 *     default CUDA loads a kernel at its first launch, and may wait for running kernels to do so.
 *     If rank A's call already runs, it waits for rank B; and rank B's thread cannot launch its
 *     call while a kernel is being loaded. Both end with TIMEOUT, whose sentence names the
 *     variable.
 *   - Nothing hangs for ever: a wait for a peer ends at the deadline (config timeout_ms, 300 s by
 *     default) with an error that names the peer. Time in which the process was stopped (SIGSTOP, a
 *     debugger, a suspended machine) does not count, in waits of the host; a GPU's clock goes on.
 *   - On a GPU calls of several communicators may be in flight together, in any order. But where
 *     the program makes one wait for another (by one stream, an event, or a wait of the host), it
 *     must do so on every rank. See onehop_layout_config.max_blocks.
 *   - The library never changes the environment, the current CUDA device or signal handlers, never
 *     calls exit, and starts no thread but the worker of a host stream you create. Its descriptors
 *     are close-on-exec and above 2, also while 0 to 2 are closed; those of the GPU driver and
 *     other libraries that it opens are theirs.
 *   - No function takes more than 16 KB of the caller's stack, besides what the GPU driver, NVRTC
 *     and NCCL take. A pthread_cancel does not end a function that may wait or that holds
 *     something: the request stays pending until the call returns.
 *
 * While the version is 0.x every rank of a group must run the same major.minor. */
#ifndef ONEHOP_H
#define ONEHOP_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define ONEHOP_API __attribute__((visibility("default")))
#else
#define ONEHOP_API
#endif

/* ---- version --------------------------------------------------------------------------------- */

#define ONEHOP_VERSION_MAJOR 0
#define ONEHOP_VERSION_MINOR 1
#define ONEHOP_VERSION_PATCH 0
#define ONEHOP_VERSION                                                                             \
    (ONEHOP_VERSION_MAJOR * 10000 + ONEHOP_VERSION_MINOR * 100 + ONEHOP_VERSION_PATCH)

/* Version of the loaded library, in the form of ONEHOP_VERSION. Compare it with the macro to find a
 * header that does not fit the library. Any thread, any time. Since 0.1. */
ONEHOP_API int onehop_version(void);

/* ---- results --------------------------------------------------------------------------------- */

/* Every result there is: X(name, value, text). The values are pinned; new ones are only added.
 *   -1xx  the caller's argument or order of calls; nothing was changed, the object is still good
 *   -2xx  the environment: machine, peers at start-up, memory; may be retried, nothing is left
 *   -3xx  the communicator is dead: every later call on it returns the same error; destroy it
 *   -4xx  a fault of onehop itself */
#define ONEHOP_RESULTS(X)                                                                          \
    X(ONEHOP_OK, 0, "success")                                                                     \
    X(ONEHOP_ERR_NULL, -101, "a required pointer is NULL")                                         \
    X(ONEHOP_ERR_ARGUMENT, -102, "an argument is out of its range")                                \
    X(ONEHOP_ERR_STRUCT_SIZE, -103, "struct_size fits no version of the struct")                   \
    X(ONEHOP_ERR_DTYPE, -104, "unknown or unsupported data type")                                  \
    X(ONEHOP_ERR_OP, -105, "unknown or unsupported reduction")                                     \
    X(ONEHOP_ERR_RANK, -106, "rank is outside 0..world_size-1")                                    \
    X(ONEHOP_ERR_WORLD_SIZE, -107, "world size is outside 1..16")                                  \
    X(ONEHOP_ERR_ALIGNMENT, -108, "pointer is not aligned to its element")                         \
    X(ONEHOP_ERR_OVERLAP, -109, "input and output overlap without being equal")                    \
    X(ONEHOP_ERR_TOO_LARGE, -110, "size exceeds what this object was made for")                    \
    X(ONEHOP_ERR_ALGORITHM, -111, "algorithm, source or grid cannot serve this call")              \
    X(ONEHOP_ERR_STREAM, -112, "stream cannot be used here")                                       \
    X(ONEHOP_ERR_STATE, -113, "call is out of order")                                              \
    X(ONEHOP_ERR_ENVIRONMENT, -114, "an environment variable has a value that is not understood")  \
    X(ONEHOP_ERR_NO_DEVICE, -201, "no such device, or no driver for it")                           \
    X(ONEHOP_ERR_UNSUPPORTED, -202, "not supported on this machine or by this build")              \
    X(ONEHOP_ERR_MEMORY, -203, "out of memory")                                                    \
    X(ONEHOP_ERR_SYSTEM, -204, "a system call failed")                                             \
    X(ONEHOP_ERR_DRIVER, -205, "a call of the GPU driver failed")                                  \
    X(ONEHOP_ERR_DUPLICATE_RANK, -206, "two ranks of the group have the same number")              \
    X(ONEHOP_ERR_MISSING_PEER, -207, "not all ranks arrived in time")                              \
    X(ONEHOP_ERR_DISAGREEMENT, -208, "ranks were set up with different versions or settings")      \
    X(ONEHOP_ERR_SEVERAL_HOSTS, -209, "the group spans hosts or network namespaces")               \
    X(ONEHOP_ERR_PEER_FAILED, -210, "another rank failed during a collective set-up call")         \
    X(ONEHOP_ERR_INTERRUPTED, -211, "the wait hook of the calling thread ended the wait")          \
    X(ONEHOP_ERR_TIMEOUT, -301, "a peer did not arrive within the deadline")                       \
    X(ONEHOP_ERR_PEER_LOST, -302, "a peer's process ended or left the group")                      \
    X(ONEHOP_ERR_MISMATCH, -303, "ranks made different calls")                                     \
    X(ONEHOP_ERR_ABORTED, -304, "aborted by onehop_abort")                                         \
    X(ONEHOP_ERR_CALLS_OVERLAP, -305, "two calls on one communicator overlapped in time")          \
    X(ONEHOP_ERR_REGISTRATION, -306, "a captured call ran before its inputs were registered")      \
    X(ONEHOP_ERR_INTERNAL, -401, "internal error")

typedef enum onehop_result {
#define ONEHOP_RESULT_ENUM(name, value, text) name = value,
    ONEHOP_RESULTS(ONEHOP_RESULT_ENUM)
#undef ONEHOP_RESULT_ENUM
    ONEHOP_RESULT_FORCE_INT = 0x7fffffff
} onehop_result;

/* "ONEHOP_ERR_TIMEOUT" and the table's text for a result; "unknown result" for any other value.
 * Static strings, never NULL. Any thread. Since 0.1. */
ONEHOP_API const char *onehop_result_name(onehop_result result);
ONEHOP_API const char *onehop_result_text(onehop_result result);

/* The calling thread's last error as a sentence: what was expected, what was found, and which rank
 * is meant. It is an empty string if no call of this thread has failed. The library owns it; it is
 * valid until the thread's next failing call. Successful calls leave it as it is. Since 0.1. */
ONEHOP_API const char *onehop_last_error(void);

/* ---- types ----------------------------------------------------------------------------------- */

/* Most ranks of one group. */
#define ONEHOP_MAX_RANKS 16

/* A CUDA stream (cudaStream_t and CUstream convert without a cast), or on the host device a stream
 * made by onehop_host_stream_create. NULL is the legacy default stream on CUDA; on the host device
 * it means "run the call now, in the calling thread". */
typedef struct CUstream_st *onehop_stream;

typedef enum onehop_dtype {
    ONEHOP_FLOAT32 = 1,  /* IEEE 754 binary32, 4 bytes */
    ONEHOP_FLOAT16 = 2,  /* IEEE 754 binary16, 2 bytes */
    ONEHOP_BFLOAT16 = 3, /* upper half of binary32, 2 bytes */
} onehop_dtype;

/* Reductions. A sum is formed in fp32 in rank order 0..W-1, starting from rank 0's value, and
 * rounded once to the data type (nearest even). So every rank gets the same bits, by every
 * algorithm of onehop and for every message size. Two opt-in ways are outside this promise: source
 * multicast and the hand-over to NCCL. A NaN result is the canonical NaN 0x7FFF or 0x7FFFFFFF. */
typedef enum onehop_op {
    ONEHOP_SUM = 1,
} onehop_op;

typedef enum onehop_device_kind {
    ONEHOP_DEVICE_AUTO = 0, /* CUDA if a GPU can be used, else the host */
    ONEHOP_DEVICE_CUDA = 1, /* NVIDIA GPUs; the driver is opened at run time */
    ONEHOP_DEVICE_HOST =
        2, /* ranks are processes or threads of a CPU machine, over shared memory */
} onehop_device_kind;

/* Where a rank computes. `ordinal` is read only with kind ONEHOP_DEVICE_CUDA (the driver's order,
 * after CUDA_VISIBLE_DEVICES). AUTO takes the GPU whose number is LOCAL_RANK or the launcher's own
 * variable for it; if none is set, the rank modulo the number of GPUs. */
typedef struct onehop_device {
    onehop_device_kind kind;
    int ordinal;
} onehop_device;

typedef enum onehop_algorithm {
    ONEHOP_ALGORITHM_AUTO = 0,
    ONEHOP_1SHOT_PUSH = 1, /* every rank stores its data to every peer; readiness is in the data */
    /* scatter shards, reduce, push results; one launch, no barrier; with less than 16 bytes a rank
     * 1SHOT_PUSH runs in its place */
    ONEHOP_2SHOT_PUSH = 2,
    ONEHOP_1SHOT_PULL = 3, /* signals, then every rank reads every peer's memory */
    ONEHOP_2SHOT_PULL = 4, /* signals; each rank reduces its shard and writes it to all */
    ONEHOP_NCCL = 5,       /* handed to NCCL; only with ONEHOP_FLAG_NCCL */
    ONEHOP_HOST_1SHOT = 6, /* host device: give all to every peer, every rank reduces all */
    ONEHOP_HOST_2SHOT = 7, /* host device: give shards, reduce the own, gather them */
    ONEHOP_LOCAL_COPY = 8, /* world size 1: the output is a copy of the input's bits */
    /* reduce-scatter: shard d is stored to rank d; readiness is in the data */
    ONEHOP_SCATTER_PUSH = 9,
    /* all-gather: stored to every peer as words of 4 bytes of data and the number of the call */
    ONEHOP_GATHER_LL = 10,
    /* all-gather: plain stores to every peer, one flag for each block and chunk */
    ONEHOP_GATHER_PUSH = 11,
    ONEHOP_HOST_SCATTER = 12, /* reduce-scatter, host device: give shards, reduce the own */
    ONEHOP_HOST_GATHER = 13,  /* all-gather, host device: publish, copy from all */
} onehop_algorithm;

/* What ranks do together. Each algorithm serves one of these: SCATTER in its name is
 * reduce-scatter, GATHER is all-gather, and the others are all-reduce. LOCAL_COPY serves all
 * three. */
typedef enum onehop_collective {
    ONEHOP_ALL_REDUCE = 0,
    ONEHOP_REDUCE_SCATTER = 1,
    ONEHOP_ALL_GATHER = 2,
} onehop_collective;

/* Where a pull algorithm reads. Push algorithms have none. MULTICAST: the switch between the GPUs
 * adds, in fp32 with one rounding, in an order of its own. Its bits may differ from those of all
 * other sources; with 1SHOT_PULL, where each rank asks the switch for itself, also from rank to
 * rank. It has not been validated on hardware, and is off by default. It needs, on all ranks of a
 * context: ONEHOP_MULTICAST=1; NCCL_NVLS_ENABLE unset or 1 or 2 (any other text forbids it, as 0
 * does); TORCH_SYMM_MEM_DISABLE_MULTICAST unset or 0; and a GPU of the rank's own for which the
 * driver reports multicast. If its set-up fails it stays off, and a line in the log says so. The
 * host device emulates it, in rank order. While it is off, rules of the tuning table that name it
 * are passed over, and calls that name it get ALGORITHM. */
typedef enum onehop_source {
    ONEHOP_SOURCE_NONE = 0,
    ONEHOP_SOURCE_WORKSPACE = 1, /* the input is first staged into the pull buffer */
    ONEHOP_SOURCE_GRAPH = 2,     /* captured pointers, zero copy */
    ONEHOP_SOURCE_MULTICAST = 3, /* the switch adds; opt-in */
} onehop_source;

typedef enum onehop_mode {
    ONEHOP_MODE_EAGER = 0, /* the call is launched directly */
    ONEHOP_MODE_GRAPH = 1, /* the call is captured between onehop_capture_begin and _end */
} onehop_mode;

/* struct_size first, all else zero: `onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);` */
#ifdef __cplusplus
#define ONEHOP_CONFIG_INIT(type) onehop_config_init_<type>()
extern "C++" {
template <class T> inline T onehop_config_init_() {
    T config = T();
    config.struct_size = sizeof(T);
    return config;
}
}
#else
#define ONEHOP_CONFIG_INIT(type) {.struct_size = sizeof(type)}
#endif

/* "1shot_push" and so on for an algorithm, "graph" for a source, "bfloat16" for a type, "sum" for a
 * reduction; "unknown" for any other value. Static strings. Since 0.1. */
ONEHOP_API const char *onehop_algorithm_name(onehop_algorithm algorithm);
ONEHOP_API const char *onehop_collective_name(onehop_collective collective);
ONEHOP_API const char *onehop_source_name(onehop_source source);
ONEHOP_API const char *onehop_dtype_name(onehop_dtype dtype);
ONEHOP_API const char *onehop_op_name(onehop_op op);

/* Bytes of one element, 0 for an unknown type. Since 0.1. */
ONEHOP_API size_t onehop_dtype_bytes(onehop_dtype dtype);

/* ---- log ------------------------------------------------------------------------------------- */

typedef enum onehop_log_level {
    ONEHOP_LOG_ERROR = 1,
    ONEHOP_LOG_WARN = 2,
    ONEHOP_LOG_INFO = 3,
    ONEHOP_LOG_DEBUG = 4,
} onehop_log_level;

/* One line, without a newline, valid during the call. Must not call onehop. */
typedef void (*onehop_log_fn)(void *user, onehop_log_level level, const char *line);

/* Sends the library's log lines to `log` instead of stderr; NULL restores stderr. Lines above the
 * level of the environment variable ONEHOP_LOG (default warn) are not made. The launch path logs
 * nothing, except at level debug: which rule chose, once for each kind of call. The call waits
 * until no other thread is inside the old function. Any thread. Since 0.1. */
ONEHOP_API void onehop_set_log(onehop_log_fn log, void *user);

/* ---- waits ----------------------------------------------------------------------------------- */

/* Called inside waits; nonzero ends the wait. */
typedef int (*onehop_wait_fn)(void *user);

/* Sets the calling thread's wait hook; NULL means none, which is the default. Every wait of this
 * thread inside the library calls it about every 50 ms, so that a program can handle signals, or
 * give up, while it waits for a peer. A call that need not wait does not call it. If the hook
 * returns nonzero,
 *   - a collective set-up call (group, create, capture end, prepare, allocation) fails with
 *     INTERRUPTED here, and on the other ranks as if this rank had failed: with INTERRUPTED, or
 *     with PEER_LOST that names it. (A rank that needed nothing more of this one succeeds, and
 *     fails in its next call.) Objects that exist already are broken then: later set-up calls on
 *     them fail too;
 *   - a call that runs in this thread, on the host device, ends as by onehop_abort;
 *   - onehop_synchronize, onehop_host_stream_synchronize and a call that waits for room in the
 *     queue of a host stream return INTERRUPTED; nothing has changed, and what was queued before
 *     goes on;
 *   - onehop_destroy ends the rank's calls as by onehop_abort, and returns when they have ended.
 * An all-gather of the caller's own (onehop_group_config.allgather) is not interrupted, nor is a
 * kernel that is being compiled; both end first. The hook runs without a lock of the library. It
 * may call onehop_abort, onehop_status and onehop_set_timeout on the object that is waited for, and
 * anything on other objects. It must return: no exception, no longjmp. Since 0.1. */
ONEHOP_API void onehop_set_wait_hook(onehop_wait_fn hook, void *user);

/* ---- group ----------------------------------------------------------------------------------- */

/* Ranks 0..world_size-1 that exchange blobs and descriptors. A group holds a mesh of close-on-exec
 * sockets (none within one process), through which it sees the end of a peer's process. */
typedef struct onehop_group onehop_group;

/* All-gather supplied by the caller: `bytes` from `send` of every rank into `recv`, which holds
 * world_size * bytes in rank order. Blocks until all ranks have called. Returns 0 on success. */
typedef int (*onehop_allgather_fn)(void *user, const void *send, void *recv, size_t bytes);

/* Optional companion: every rank gives one descriptor (-1 for none) and receives in `fds_out`
 * [world_size] a new descriptor for each rank's, which the library then owns. Returns 0 on
 * success. */
typedef int (*onehop_pass_fd_fn)(void *user, int fd, int *fds_out);

typedef struct onehop_group_config {
    size_t struct_size;
    /* world_size 1..16 and rank 0..world_size-1. world_size 0 takes both from the environment: the
     * first pair of which both are set among RANK and WORLD_SIZE (torchrun), OMPI_COMM_WORLD_RANK
     * and _SIZE (Open MPI), PMI_RANK and PMI_SIZE (MPICH, Intel MPI), SLURM_PROCID and
     * SLURM_STEP_NUM_TASKS (srun). */
    int rank;
    int world_size;
    /* Ranks that give equal names are one group. A name may have any length; it leaves nothing on
     * disk. NULL takes ONEHOP_NAME, else what tells jobs apart: MASTER_ADDR, MASTER_PORT and
     * TORCHELASTIC_RUN_ID of torchrun, PMIX_NAMESPACE of mpirun, or SLURM_JOB_ID and SLURM_STEP_ID.
     * Read only if allgather is NULL. Give each job a name of its own. If two jobs use one name,
     * the opening fails: with DISAGREEMENT if a launcher started both; otherwise, if their ranks
     * come within 0.1 s of each other, with DUPLICATE_RANK on all ranks. Jobs that come later than
     * that cannot be told apart. Therefore the first opening of a name takes 0.1 s where no
     * launcher says which job this is. Names belong to a user and do not cross network or user
     * namespaces. Another user cannot take or guess a name, because it holds a secret from the
     * kernel's keyring of this user. If the keyring is refused to some ranks (Docker's default
     * profile) and not to others, they do not find each other. If it is refused to all, anybody in
     * the same network namespace can guess names. */
    const char *name;
    /* Instead of a name; both stay valid until onehop_group_close. */
    onehop_allgather_fn allgather;
    onehop_pass_fd_fn pass_fd;
    void *user;
    uint32_t timeout_ms; /* how long to wait for all ranks; 0: ONEHOP_INIT_TIMEOUT_MS or 300000 */
    uint32_t reserved;   /* 0 */
} onehop_group_config;

/* Collective: returns when all ranks have called it, on all ranks alike. Errors: NULL, RANK,
 * WORLD_SIZE, ENVIRONMENT, DUPLICATE_RANK, MISSING_PEER (names the ranks that did not come),
 * PEER_FAILED (a peer died meanwhile), DISAGREEMENT (version or world size), SEVERAL_HOSTS,
 * STRUCT_SIZE, MEMORY, SYSTEM. If a rank fails or dies, the call ends on all ranks within a second,
 * and all name the same rank. There are two exceptions, in which ranks wait for their deadline: a
 * rank that calls more than half a second later, and all others if the dead rank had not yet spoken
 * to any of them. A rank that fails stays up to a second to tell the others. The call needs at most
 * 2 * world_size + 1 descriptors, and keeps 2 * (world_size - 1). Since 0.1. */
ONEHOP_API onehop_result onehop_group_open(const onehop_group_config *config,
                                           onehop_group **group_out);

/* A group within this process: groups_out[0..world_size-1] are its ranks, to be used by one thread
 * each; on GPUs see CUDA_MODULE_LOADING at the top. Not collective. Errors: NULL, WORLD_SIZE,
 * ENVIRONMENT, MEMORY. Since 0.1. */
ONEHOP_API onehop_result onehop_group_open_local(int world_size, onehop_group **groups_out);

/* Local. Objects made from the group must be gone before. */
ONEHOP_API void onehop_group_close(onehop_group *group);

/* This rank, -1 of NULL; and the number of ranks, 0 of NULL. Since 0.1. */
ONEHOP_API int onehop_group_rank(const onehop_group *group);
ONEHOP_API int onehop_group_size(const onehop_group *group);

/* Collective all-gather of `bytes` (at most 16 MiB, the same on all ranks) through the group;
 * `recv` holds world_size * bytes. It serves callers that supply their own storage and need to
 * exchange handles. After a failure other than NULL, ARGUMENT and STATE (forked) the group is
 * broken and must be closed. The rank that fails first tells its peers the reason, so that all name
 * the same rank. Errors: NULL, ARGUMENT, STATE, MISSING_PEER (deadline), INTERRUPTED (wait hook),
 * PEER_LOST, DISAGREEMENT (sizes differ), SYSTEM. Since 0.1. */
ONEHOP_API onehop_result onehop_group_allgather(onehop_group *group, const void *send, void *recv,
                                                size_t bytes);

/* Collective: returns after all ranks have called it. Errors as onehop_group_allgather. Since
 * 0.1. */
ONEHOP_API onehop_result onehop_group_barrier(onehop_group *group);

#ifdef ONEHOP_EXPERIMENTAL
/* EXPERIMENTAL, may change. Collective over the ranks that stay: a new group without the `count`
 * ranks in `lost`. The old group stays open and must be closed. This version returns
 * UNSUPPORTED. */
ONEHOP_API onehop_result onehop_group_shrink(onehop_group *group, const int *lost, int count,
                                             onehop_group **group_out);
#endif

/* ---- memory ---------------------------------------------------------------------------------- */

/* `bytes` of zeroed memory on `device` that peers can map, so that captured calls read and write it
 * without a copy. On the host it is memory of a sealed memfd, all of it reserved here (MEMORY names
 * the limit that is reached), on the calling thread's NUMA node. Aligned to a page at least. Not
 * collective. Kind AUTO chooses as onehop_create does. Errors: NULL, ARGUMENT (0 bytes),
 * ENVIRONMENT, NO_DEVICE, UNSUPPORTED, MEMORY, DRIVER, SYSTEM. Since 0.1. */
ONEHOP_API onehop_result onehop_mem_alloc(onehop_device device, size_t bytes, void **ptr_out);

/* Frees what onehop_mem_alloc returned; no call that uses the memory may be in flight. */
ONEHOP_API void onehop_mem_free(void *ptr);

/* One zeroed allocation per rank, each mapped by all ranks of the group. */
typedef struct onehop_symmetric onehop_symmetric;

/* Collective; `bytes` equal on all ranks, rounded up to the device's granularity. Succeeds on all
 * ranks or fails on all. Errors: NULL, ARGUMENT, NO_DEVICE, UNSUPPORTED, MEMORY, DISAGREEMENT,
 * PEER_FAILED, DRIVER, SYSTEM. Since 0.1. */
ONEHOP_API onehop_result onehop_symmetric_alloc(onehop_group *group, onehop_device device,
                                                size_t bytes, onehop_symmetric **symmetric_out);

/* Address in this process of rank `rank`'s allocation; NULL if rank is out of range, and in a
 * forked child. */
ONEHOP_API void *onehop_symmetric_ptr(const onehop_symmetric *symmetric, int rank);

/* Local. In one process the last rank frees the memory. */
ONEHOP_API void onehop_symmetric_free(onehop_symmetric *symmetric);

/* ---- communicator over memory the caller owns ------------------------------------------------ */

/* Sizes of the regions. Equal on all ranks; zero fields take the default for the device and world
 * size. Fixed for the life of the memory. */
typedef struct onehop_layout_config {
    size_t struct_size;
    onehop_device_kind device_kind; /* CUDA or HOST */
    int world_size;
    /* Bytes of one push slot: what a rank may send to one peer in one piece; longer messages go in
     * chunks. A multiple of 4096, at most 4 GiB / (2 * world_size). Default: min(16 MiB, 64 MiB /
     * (2 world_size)) on CUDA, min(1 MiB, 4 MiB / (2 world_size)) on the host, rounded down to
     * 4096. */
    size_t push_bytes;
    /* Bytes of one half of the pull buffer (on the host: of what ranks exchange data in). A
     * multiple of 4096. Default: 32 MiB on CUDA, 1 MiB on the host. */
    size_t pull_bytes;
    /* Largest grid of any call, in blocks; all of them must fit at once on the device of the rank
     * with the smallest one. Default: 64 on CUDA, 16 on the host; at most 1024. Long messages are
     * fastest with a block for each multiprocessor, divided by the ranks on a GPU. Kernels wait on
     * the GPU for kernels of the peers. So take the grids of all communicators on a GPU, of all
     * their ranks there: without the largest one, they must together have fewer blocks than the GPU
     * has multiprocessors. If those of this process would have more, creation fails (with ARGUMENT;
     * where 0 was given, with UNSUPPORTED). Other processes on the GPU, NCCL and other kernels that
     * wait for peers cannot be counted: leave them room. If all grids together have at most as many
     * blocks as there are multiprocessors, ranks may even differ in which calls they make wait for
     * which. */
    uint32_t max_blocks;
    /* Most registrations of captured calls at a time. Default 4096 on CUDA, 256 on the host. */
    uint32_t max_registrations;
} onehop_layout_config;

typedef struct onehop_layout {
    size_t symmetric_bytes; /* per rank, mapped by all ranks; aligned to 4096 */
    size_t local_bytes;     /* per rank, device memory of this rank alone; aligned to 256 */
    size_t
        host_bytes; /* per rank, host memory that the device can read and write; aligned to 256 */
    size_t push_bytes; /* the values in force, after defaults */
    size_t pull_bytes;
    uint32_t max_blocks;
    uint32_t max_registrations;
    uint64_t reserved[4]; /* 0 in this version */
} onehop_layout;

/* Pure function. Errors: NULL, STRUCT_SIZE, ARGUMENT, WORLD_SIZE. Since 0.1. */
ONEHOP_API onehop_result onehop_layout_get(const onehop_layout_config *config,
                                           onehop_layout *layout_out);

/* Bits of the field `flags` of onehop_comm_config and onehop_config. Equal on all ranks. */
/* CUDA: lets the next kernel of the stream start once this call has begun to push. By setting it
 * you promise that nothing else that waits for peers (another communicator, NCCL) is in flight on
 * this GPU. As with ORDERED, the communicator's grids are not counted. */
#define ONEHOP_FLAG_EARLY_TRIGGER 1u
/* CUDA: allows several processes on one GPU. Without the driver's MPS daemon the GPU serves them in
 * turn, which takes milliseconds a call; so it is refused without this flag. */
#define ONEHOP_FLAG_SHARE_GPU 2u
/* CUDA, contexts only: hands messages to NCCL where the tuning table has a rule for it, and calls
 * that name it. ONEHOP_NCCL=1 does the same. Creation opens NCCL's library (ONEHOP_NCCL_LIB) and
 * makes a communicator of it, on all ranks or on none. Such calls run in the same stream and graph
 * and are counted, but NCCL sums in an order of its own: the bits may change with the message size.
 * They carry no signature and have no deadline: only onehop's own calls and onehop_status find
 * ranks that make different calls, and lost peers. onehop_destroy may wait for the peers to call it
 * as well. */
#define ONEHOP_FLAG_NCCL 4u
/* CUDA, contexts only: sizes that are 0 in the config follow the tuning table up to 128 MiB, not 16
 * MiB. */
#define ONEHOP_FLAG_UNCAP 8u
/* CUDA: you promise that no call of this communicator is in flight on a GPU beside one of another
 * communicator: they share a stream, or events order them, alike on all ranks. Then its grids are
 * as large as if it were alone, and are not counted with others'
 * (onehop_layout_config.max_blocks). */
#define ONEHOP_FLAG_ORDERED 16u

typedef struct onehop_comm onehop_comm;

typedef struct onehop_comm_config {
    size_t struct_size;
    onehop_device device; /* kind CUDA or HOST */
    int rank;
    int world_size;
    const onehop_layout_config
        *layout; /* as given to onehop_layout_get; read during the call only */
    void *symmetric[ONEHOP_MAX_RANKS]; /* address here of each rank's symmetric buffer, own
                                        * included */
    void *local;                       /* local_bytes */
    void *host;                        /* host_bytes */
    uint32_t ranks_per_device;         /* most ranks that share a GPU; 0: 1 */
    uint32_t timeout_ms;               /* deadline of a call; 0: ONEHOP_TIMEOUT_MS or 300000 */
    uint32_t flags;                    /* ONEHOP_FLAG_* */
    /* CUDA: the lowest compute capability of all ranks' GPUs, 90 for 9.0, by which the tuning table
     * is chosen; 0: this rank's. Equal on all ranks. */
    uint32_t capability;
} onehop_comm_config;

/* Initialises one rank's memory: push slots to 0xFF, and to zero all words that a call reads before
 * it writes them. Call it on every rank, once, on the rank's own memory; then hold a barrier of
 * your own before any rank's first call. Blocks until the memory is written. Do not arm the memory
 * of a communicator that died: allocate other memory. Errors: NULL, STRUCT_SIZE, ARGUMENT,
 * WORLD_SIZE, ALIGNMENT, NO_DEVICE, DRIVER. Since 0.1. */
ONEHOP_API onehop_result onehop_storage_arm(const onehop_layout_config *config,
                                            onehop_device device, void *symmetric, void *local,
                                            void *host);

/* A communicator over armed memory. The caller owns the memory, and keeps it until this rank's
 * communicator is destroyed and the calls of all ranks have ended, because peers read and write it.
 * Nothing is exchanged and no device memory is allocated. So if ranks read different tuning tables,
 * their calls end with MISMATCH; and since there is no group, the loss of a peer shows at the
 * deadline. Errors: NULL, STRUCT_SIZE, ARGUMENT, RANK, WORLD_SIZE, ALIGNMENT, ENVIRONMENT,
 * NO_DEVICE, UNSUPPORTED, MEMORY, DRIVER. Since 0.1. */
ONEHOP_API onehop_result onehop_comm_create(const onehop_comm_config *config,
                                            onehop_comm **comm_out);

/* Local. Calls in flight must have ended (see onehop_synchronize), unless the communicator is
 * dead. */
ONEHOP_API void onehop_comm_destroy(onehop_comm *comm);

/* How one call is to be done. Zero fields are chosen by onehop from values that are equal on all
 * ranks. All ranks must pass the same values, but for the prefetch. */
typedef struct onehop_call {
    size_t struct_size;
    onehop_algorithm algorithm;
    onehop_source source;
    uint32_t blocks; /* grid: 1..max_blocks, the signature's block included */
    /* Threads per block. CUDA: a multiple of 32 to 1024, to 512 for pull algorithms and for 6 ranks
     * and more; host: 1. */
    uint32_t threads;
    /* With source GRAPH on a communicator: the registration (onehop_comm_registration_take) that
     * will hold the addresses. A context takes its own and does not read this. */
    uint32_t registration;
    uint32_t reserved; /* 0 */
    /* Memory of this rank's GPU, for example weights of the next matrix product. While the call
     * waits, the processors that its grid leaves idle bring the first 8 MiB of it into the L2. It
     * must be readable until the call has ended (captured: in every replay). Reading begins, by
     * programmatic dependent launch, before earlier work of the stream has ended; it changes no
     * result. 0 bytes: none. It has no effect on the host device, in a group of one rank, in a grid
     * of all processors and where NCCL serves. */
    const void *prefetch;
    size_t prefetch_bytes;
} onehop_call;

/* As onehop_all_reduce, on a communicator. */
ONEHOP_API onehop_result onehop_comm_all_reduce(onehop_comm *comm, const void *in, void *out,
                                                size_t count, onehop_dtype dtype, onehop_op op,
                                                const onehop_call *call, onehop_stream stream);

/* As onehop_reduce_scatter and onehop_all_gather, on a communicator. */
ONEHOP_API onehop_result onehop_comm_reduce_scatter(onehop_comm *comm, const void *in, void *out,
                                                    size_t count, onehop_dtype dtype, onehop_op op,
                                                    const onehop_call *call, onehop_stream stream);
ONEHOP_API onehop_result onehop_comm_all_gather(onehop_comm *comm, const void *in, void *out,
                                                size_t bytes, const onehop_call *call,
                                                onehop_stream stream);

/* Registrations of captured calls, in a table of this rank's own. A registration holds every rank's
 * input and output address, as seen by this rank's device; a captured pull call over source GRAPH
 * holds only its number. `take` reserves one; calls may name it from then on, and run once it is
 * filled: a call that finds it empty or recycled fails with REGISTRATION on all ranks. The n-th
 * that a communicator takes belongs to the n-th of every peer: ranks take them in the same order.
 * Ranks that name different ones in a call get MISMATCH, before anything is read or stored. `fill`
 * gives it in[world_size] and out[world_size], aligned to 16 bytes (out may be NULL for 1shot_pull,
 * which writes only its own) or, with in NULL, marks it as staged: the call then goes over the
 * workspace. All ranks must fill a call's registration alike, staged or not. `release` recycles it
 * once no graph that uses it can run. Errors: NULL, ARGUMENT (no such registration), ALIGNMENT,
 * TOO_LARGE (table full), DRIVER. Since 0.1. */
ONEHOP_API onehop_result onehop_comm_registration_take(onehop_comm *comm,
                                                       uint32_t *registration_out);
ONEHOP_API onehop_result onehop_comm_registration_fill(onehop_comm *comm, uint32_t registration,
                                                       const void *const *in, void *const *out);
ONEHOP_API onehop_result onehop_comm_registration_release(onehop_comm *comm, uint32_t registration);

/* ---- context: the easy way ------------------------------------------------------------------- */

typedef struct onehop_context onehop_context;

typedef struct onehop_config {
    size_t struct_size;
    /* The group to use; borrowed until onehop_destroy. NULL: opened from rank, world_size and name
     * as in onehop_group_config, and owned. */
    onehop_group *group;
    int rank;
    int world_size;
    const char *name;
    onehop_device device;
    /* Storage; equal on all ranks. Messages of any length work, longer ones in chunks: sizes decide
     * about speed and memory only (onehop_stats tells the sizes in force). push_bytes and
     * pull_bytes, see onehop_layout_config, are taken as they are or refused. max_bytes: the
     * longest message that should go in one piece; at most 128 MiB. If push_bytes or pull_bytes is
     * 0, on CUDA it becomes the longest message that the tuning table sends by push or by pull, up
     * to max_bytes; without max_bytes, up to 16 MiB, and 64 MiB for all push slots together.
     * pull_bytes then is also at least twice that limit, but within 1 and 32 MiB, because
     * all-gathers of long parts fill it. On the host it becomes the layout's default, or max_bytes
     * for push. */
    size_t max_bytes;
    size_t push_bytes;
    size_t pull_bytes;
    /* See onehop_layout_config. 0 on CUDA means one block for each multiprocessor of the smallest
     * GPU, divided by the ranks on a GPU; if other communicators of the process leave less, half of
     * what is left. So give small communicators that are made first a max_blocks of their own.
     * onehop_would_use shows grids. */
    uint32_t max_blocks;
    uint32_t max_registrations;
    uint32_t timeout_ms; /* deadline of a call; 0: ONEHOP_TIMEOUT_MS or 300000 */
    /* Deadline of collective calls, which a borrowed group takes over; 0: the group's. */
    uint32_t init_timeout_ms;
    uint32_t flags;    /* ONEHOP_FLAG_* */
    uint32_t reserved; /* 0 */
} onehop_config;

/* Collective: succeeds on all ranks or fails on all with the same message. Blocks. With world size
 * 1 nothing is allocated. On CUDA the library retains the primary context of the device and
 * allocates the memory there. The tuning table is read here, and must have the same rules on all
 * ranks. Errors: those of onehop_group_open, onehop_symmetric_alloc, onehop_comm_create;
 * ENVIRONMENT for a table that is not understood, with its line, and for any ONEHOP_ variable whose
 * value is not understood, also one that only another device or a later call would read; ARGUMENT
 * or UNSUPPORTED if its grids do not fit beside those of other communicators on a GPU
 * (onehop_layout_config.max_blocks). Since 0.1. */
ONEHOP_API onehop_result onehop_create(const onehop_config *config, onehop_context **context_out);

/* All ranks of a group of `n` in one thread: rank i on devices[i] (NULL: config->device for all; a
 * device may repeat; CUDA_MODULE_LOADING, at the top, matters here too). config->group, rank,
 * world_size and name must be zero. Since 0.1. */
ONEHOP_API onehop_result onehop_create_all(const onehop_config *config, int n,
                                           const onehop_device *devices,
                                           onehop_context **contexts_out);

/* Local, never waits for a peer. Waits for this rank's own eager calls in flight, at most to their
 * deadline; replays of graphs must have ended. Peers that still call get PEER_LOST. On CUDA freeing
 * memory may wait for other work of the GPU, as cudaFree does. If the last call's stream is gone or
 * being captured the memory is kept and that is logged. */
ONEHOP_API void onehop_destroy(onehop_context *context);

/* This rank, -1 of NULL; and the number of ranks, 0 of NULL. Since 0.1. */
ONEHOP_API int onehop_rank(const onehop_context *context);
ONEHOP_API int onehop_world_size(const onehop_context *context);
/* The device in use, AUTO resolved. Kind AUTO if context is NULL. */
ONEHOP_API onehop_device onehop_get_device(const onehop_context *context);

/* out[i] = sum over ranks of in[i], i < count, on every rank. in, out: `count` elements each, in
 * memory of the rank's device, aligned to their element; equal (in place) or disjoint. Both must
 * stay valid until the call has run; a host call with stream NULL has run when it returns. count 0
 * does nothing, on all ranks. `call`: the algorithm, source or grid that you name; NULL, and onehop
 * chooses. Order: stream order; calls of one context run in the order in which they were made, also
 * on different streams (the streams of the last eager and of the last captured call must live until
 * the next such call or the destroy). All ranks must make the same calls in the same order; a
 * difference ends in MISMATCH on all ranks. Capture: allowed; inside onehop_capture_begin/_end pull
 * algorithms use the captured pointers. It does not block on CUDA, where it makes no allocation,
 * lock or system call beyond the launch. On a host stream it blocks only while 1024 calls are
 * queued; on the host with stream NULL it runs to its end. Errors, nothing launched: NULL, DTYPE,
 * OP, ALIGNMENT, OVERLAP, TOO_LARGE, STREAM, STATE; with a call STRUCT_SIZE, ALGORITHM (what it
 * names cannot serve). Errors of calls that ran come from later calls, onehop_synchronize and
 * onehop_status (host, NULL stream: from this call): TIMEOUT, PEER_LOST, MISMATCH, ABORTED,
 * CALLS_OVERLAP. Then the content of `out` is undefined. Since 0.1. */
ONEHOP_API onehop_result onehop_all_reduce(onehop_context *context, const void *in, void *out,
                                           size_t count, onehop_dtype dtype, onehop_op op,
                                           const onehop_call *call, onehop_stream stream);

/* out[i] = sum over ranks of in[rank * count + i], i < count, where `rank` is the calling rank:
 * each rank gets its shard of what onehop_all_reduce would give all, bit for bit. `in` holds
 * world_size * count elements, `out` count; `out` is in + rank * count (in place, as NCCL has it;
 * all other elements of `in` stay as they are) or disjoint from all of `in`. Ranks may differ in
 * that. In all else as onehop_all_reduce: count 0, order, capture (over the communicator's own
 * memory; nothing is registered), errors. Fastest where in, out and the bytes of a shard are
 * multiples of 16. Since 0.1. */
ONEHOP_API onehop_result onehop_reduce_scatter(onehop_context *context, const void *in, void *out,
                                               size_t count, onehop_dtype dtype, onehop_op op,
                                               const onehop_call *call, onehop_stream stream);

/* out[r * bytes + i] = byte i of rank r's `in`, i < bytes, on every rank. Bytes are moved as they
 * are, so any type will do. `in` holds `bytes` bytes, `out` world_size * bytes, at any address;
 * `in` is out + rank * bytes (in place, as NCCL has it) or disjoint from all of `out`. Ranks may
 * differ in that. All else as onehop_reduce_scatter; no DTYPE, OP, ALIGNMENT. Since 0.1. */
ONEHOP_API onehop_result onehop_all_gather(onehop_context *context, const void *in, void *out,
                                           size_t bytes, const onehop_call *call,
                                           onehop_stream stream);

typedef struct onehop_choice {
    onehop_algorithm algorithm;
    onehop_source source;
    uint32_t blocks;
    uint32_t threads;
    uint32_t chunks; /* pieces the message is cut into; 1 if it fits */
    /* The rule of the tuning tables that chose, or that gave a named algorithm its grid: line and
     * name of the table, a static string. 0 and NULL: none, in a group of one rank or where no rule
     * has a grid for it. */
    uint32_t line;
    const char *table;
    /* The algorithm that the call named, where it cannot serve it and another runs in its place;
     * else AUTO. */
    onehop_algorithm instead_of;
    uint32_t reserved[5];
} onehop_choice;

/* A call, as onehop_would_use is asked of it. */
typedef struct onehop_query {
    size_t struct_size;
    size_t bytes; /* of the message; of one rank's part, of a collective in parts */
    onehop_collective collective;
    onehop_dtype dtype; /* not read of ONEHOP_ALL_GATHER */
    onehop_op op;       /* 0: ONEHOP_SUM */
    onehop_mode mode;
    int in_place; /* read of ONEHOP_ALL_REDUCE */
    uint32_t reserved;
    const onehop_call *call; /* what the call names; NULL: nothing */
} onehop_query;

/* Says which way a call would go; it is exactly the way that it goes. That is by the first rule of
 * the tuning tables that serves it: those of the file that ONEHOP_TUNING names, then those compiled
 * in (docs/design.md). `onehop which` says why the rules before it were passed over. A pure
 * function of the context's settings and the query, the same on all ranks. A call with source GRAPH
 * is staged after all if at the end of the capture some rank's memory cannot be shared. NCCL has
 * blocks and threads 0. Errors: NULL, STRUCT_SIZE, DTYPE, OP, ARGUMENT, TOO_LARGE; ALGORITHM as of
 * the call. Since 0.1. */
ONEHOP_API onehop_result onehop_would_use(const onehop_context *context, const onehop_query *query,
                                          onehop_choice *choice_out);

/* Capture. Between begin and end, calls whose stream is really being captured register their
 * pointers. End is collective: it compares the captured calls of all ranks, exchanges handles and
 * fills the registrations. Capture the stream itself with the means of CUDA, or with
 * onehop_host_stream_capture_begin. The graphs may be launched after end. In every replay peers
 * read the memory that pull calls captured, and with 2SHOT_PULL write it. It must stay allocated
 * until the graphs of all ranks are destroyed; the peers unmap it at their next begin or destroy.
 * Memory that cannot be shared, or is not aligned to 16 bytes, costs a copy and is no error. Ranks
 * must replay the same captured calls in the same order: the calls of a capture are numbered, and
 * ranks that replay different ones get MISMATCH before anything is read or stored. After a failure
 * (-3xx) of a call over captured memory a peer's call may still be running: it reads this rank's
 * input and stores to this rank's output until it has ended. Such a peer never says OK: it fails as
 * this rank did. So after a failure do not write, free or use the memory of captured calls until
 * each peer's onehop_synchronize has returned, its context is destroyed or its process has ended. A
 * barrier of the program's own after onehop_synchronize is enough. Captures cannot be nested. The
 * _all forms serve one thread that drives all `n` ranks of a group. Errors: NULL, STATE; end:
 * MISMATCH (which call differs on which rank), PEER_LOST, MISSING_PEER, MEMORY, DRIVER. Since
 * 0.1. */
ONEHOP_API onehop_result onehop_capture_begin(onehop_context *context);
ONEHOP_API onehop_result onehop_capture_end(onehop_context *context);
ONEHOP_API onehop_result onehop_capture_begin_all(onehop_context *const *contexts, int n);
ONEHOP_API onehop_result onehop_capture_end_all(onehop_context *const *contexts, int n);

/* Memory that a captured call will read and write, on this rank. */
typedef struct onehop_captured_input {
    const void *in;
    void *out;
    size_t bytes;
} onehop_captured_input;

/* For callers whose ranks can already reach each other's memory: instead of onehop_capture_end.
 * `inputs` lists the calls captured so far that take addresses, in order. It writes at most `room`
 * of them, and their number to *count_out (inputs_out may be NULL with room 0). `end_mapped` is
 * collective, compares as end does, and fills their registrations with the caller's addresses: in[i
 * * world_size + r] and out[i * world_size + r] are where this rank's device reaches rank r's
 * memory of the i-th call. They are aligned to 16 bytes and valid as long as the graph. Errors:
 * NULL, STATE, ARGUMENT (count is not that of `inputs`), ALIGNMENT; those of onehop_capture_end.
 * Since 0.1. */
ONEHOP_API onehop_result onehop_capture_inputs(const onehop_context *context,
                                               onehop_captured_input *inputs_out, size_t room,
                                               size_t *count_out);
ONEHOP_API onehop_result onehop_capture_end_mapped(onehop_context *context, const void *const *in,
                                                   void *const *out, size_t count);

/* Waits until the stream's work is done, watching the peers: a lost process is seen at once, a
 * silent one by the deadline. Returns the context's state: OK, or the -3xx error. Errors: NULL,
 * STREAM, DRIVER, INTERRUPTED (by the wait hook: nothing has changed). Since 0.1. */
ONEHOP_API onehop_result onehop_synchronize(onehop_context *context, onehop_stream stream);

/* What killed a communicator. */
typedef struct onehop_failure {
    onehop_result result; /* -3xx, or ONEHOP_OK: none */
    int rank;             /* who recorded it */
    int peer;             /* the culprit, the same on all ranks; -1: none (abort, overlap) */
    uint32_t sequence;    /* number of the call, 2.. */
    uint32_t site;        /* place in the protocol, see docs/design.md */
    uint32_t expected;    /* word the wait or the comparison wanted */
    uint32_t seen;        /* word it found */
    char text[228];       /* the same as a sentence */
    uint32_t reserved[8];
} onehop_failure;

/* Looks at the peers and at the record without waiting. Returns OK or the -3xx error; failure_out
 * may be NULL and is written in both cases. May run beside any other call. Since 0.1. */
ONEHOP_API onehop_result onehop_status(onehop_context *context, onehop_failure *failure_out);

/* Ends calls in flight on all ranks within 100 ms; the context is dead afterwards (ABORTED). From
 * any thread, beside any call. Errors: NULL. Since 0.1. */
ONEHOP_API onehop_result onehop_abort(onehop_context *context);

/* New deadline for calls, also of graphs captured before. Need not be equal on all ranks. 1..2^31
 * ms. Errors: NULL, ARGUMENT, DRIVER. Since 0.1. */
ONEHOP_API onehop_result onehop_set_timeout(onehop_context *context, uint32_t timeout_ms);

typedef struct onehop_stats {
    uint64_t calls;           /* accepted, captured ones counted once */
    uint64_t bytes;           /* sum of their message sizes; of a collective in parts, one part */
    uint64_t calls_by[16];    /* by onehop_algorithm */
    uint64_t symmetric_bytes; /* memory of this rank */
    uint64_t local_bytes;
    uint64_t host_bytes;
    uint32_t registrations_used;
    uint32_t registrations_total;
    uint64_t push_bytes; /* sizes in force, see onehop_layout */
    uint64_t pull_bytes;
    /* Registrations filled so far, released ones included: of captured calls that read the ranks'
     * memory directly, and of those that go over the workspace. The same on all ranks. */
    uint64_t registrations_direct;
    uint64_t registrations_staged;
    uint64_t reserved[4];
} onehop_stats;

/* Errors: NULL. Since 0.1. */
ONEHOP_API onehop_result onehop_get_stats(const onehop_context *context, onehop_stats *stats_out);

/* ---- fused operations ------------------------------------------------------------------------ */

/* Flags of onehop_norm. w = weight + 1, as models of the Gemma family store it. */
#define ONEHOP_NORM_WEIGHT_PLUS_ONE 1u

/* Arguments of onehop_all_reduce_norm. Matrices are [rows, hidden] in memory of the rank's device,
 * aligned to their element, with inner stride 1; strides from row to row in elements, at least
 * hidden, 0: hidden. */
typedef struct onehop_norm {
    size_t struct_size;
    const void *x;           /* this rank's part of the sum */
    const void *residual_in; /* equal on all ranks; NULL: none */
    const void *weight;      /* [hidden] */
    void *normed;            /* NULL: only the quantised form is wanted */
    void *residual_out;      /* NULL: not wanted */
    void *quantised;         /* float8 e4m3, a byte each; NULL: not wanted */
    float *row_scales;       /* [rows], written: the scale of each row; NULL: `scale` serves all */
    size_t rows, hidden;     /* hidden: 1..16384, of float32 1..8192 */
    size_t x_stride, residual_in_stride, normed_stride, residual_out_stride, quantised_stride;
    onehop_dtype dtype; /* of x, residuals, weight and normed */
    uint32_t flags;     /* ONEHOP_NORM_* */
    float eps;          /* >= 0 */
    float scale;        /* > 0, read if quantised is given and row_scales is not */
} onehop_norm;

/* All-reduce, residual add and RMSNorm in one launch:
 *   r = round(sum over ranks of x, in fp32 and in rank order, + residual_in)     residual_out
 *   y = r * 1/sqrt(mean(r^2) + eps) * w      in fp32, each step rounded to fp32
 *   normed = round(y),   quantised = e4m3(y / scale), above 448 to 448,   w = weight or weight + 1
 * With row_scales the scale of a row is max|y| / 448, at least 2^-126. The sum over ranks is not
 * rounded by itself, so r is nearer to the exact value than after an all-reduce. The norm is that
 * of the r that residual_out shows. The squares are added by a tree that depends only on hidden and
 * type. So all ranks get the same bits, for every algorithm, grid and number of rows, on the host
 * and on GPUs. NaN as in onehop_all_reduce; a sum of squares beyond the range of fp32 makes y 0 or
 * NaN. normed or residual_out may be x or residual_in, with the same rows. Otherwise outputs are
 * disjoint from inputs and from each other; rows of one may lie between rows of another. `call`
 * (NULL: onehop chooses) may name 1SHOT_PUSH, 2SHOT_PUSH (with fewer rows than ranks, or rows
 * longer than a quarter of a slot, 1SHOT_PUSH runs in its place), on the host also HOST_1SHOT (rows
 * to pull_bytes / (2 world_size)), and a grid. rows 0 does nothing. Ranks must agree on rows,
 * hidden, dtype, flags, eps and on whether residual_in is given; else MISMATCH. A row, rounded up
 * to 16 bytes, must fit half a push slot (onehop_stats.push_bytes). Groups of 2 ranks and more.
 * Everything else as onehop_all_reduce, capture included. Errors, nothing launched: NULL, ARGUMENT,
 * STRUCT_SIZE, DTYPE, ALIGNMENT, OVERLAP, TOO_LARGE, ALGORITHM, WORLD_SIZE, STREAM. Since 0.1. */
ONEHOP_API onehop_result onehop_all_reduce_norm(onehop_context *context, const onehop_norm *norm,
                                                const onehop_call *call, onehop_stream stream);
ONEHOP_API onehop_result onehop_comm_all_reduce_norm(onehop_comm *comm, const onehop_norm *norm,
                                                     const onehop_call *call, onehop_stream stream);

/* Arguments of onehop_tp_qknorm. q and k: this rank's columns of matrices [tokens, D] whose columns
 * are dealt to the ranks in equal parts, in memory of the rank's device, aligned to their element,
 * with inner stride 1; strides from row to row in elements, at least the width, 0: the width. */
typedef struct onehop_qknorm {
    size_t struct_size;
    void *q;              /* [tokens, q_width], in place */
    void *k;              /* [tokens, k_width], in place */
    const void *q_weight; /* [q_width]: this rank's slice */
    const void *k_weight; /* [k_width] */
    size_t tokens;
    size_t q_width,
        k_width; /* D / world size, at least 1 each; each rounded up to 16 bytes, 32 KiB together at
                  * most */
    size_t q_stride, k_stride;
    onehop_dtype dtype; /* of all of them */
    uint32_t flags;     /* ONEHOP_NORM_WEIGHT_PLUS_ONE */
    float eps;          /* >= 0 */
    uint32_t reserved;  /* 0 */
} onehop_qknorm;

/* RMSNorm over all ranks' columns, of q and of k, in place:
 *   y = round(x * 1/sqrt(sum over all ranks of x^2 / D + eps) * w)   in fp32, each step rounded to
 *                                                                    fp32
 * with D = world size * width. Only sums of squares travel, 8 bytes a token. They are formed by a
 * tree that depends on width and type only, and added in rank order: every rank uses the same bits,
 * whatever grid and number of tokens, on the host and on GPUs. Any number of tokens; those beyond a
 * push slot (push_bytes / 8) go in chunks. q and k may lie between each other's rows. tokens 0 does
 * nothing. `call` (NULL: onehop chooses) may name 1SHOT_PUSH and a grid. Ranks must agree on
 * tokens, widths, dtype, flags and eps; else MISMATCH. Any communicator of 2 ranks and more serves;
 * a small one of its own (push_bytes 65536, pull_bytes 4096, max_blocks 16) lets such calls overlap
 * with those of another. Everything else, NaN and errors, as onehop_all_reduce_norm. Since 0.1. */
ONEHOP_API onehop_result onehop_tp_qknorm(onehop_context *context, const onehop_qknorm *qknorm,
                                          const onehop_call *call, onehop_stream stream);
ONEHOP_API onehop_result onehop_comm_tp_qknorm(onehop_comm *comm, const onehop_qknorm *qknorm,
                                               const onehop_call *call, onehop_stream stream);

/* How many blocks of onehop_tp_qknorm this rank's device holds at once, for the widths and type of
 * `qknorm` (its pointers are not read). A larger max_blocks would be of no use to it. A grid has
 * one block for the signature and one for each token, and at most max_blocks. Errors: those of the
 * arguments, WORLD_SIZE, DRIVER. Since 0.1. */
ONEHOP_API onehop_result onehop_tp_qknorm_max_blocks(onehop_context *context,
                                                     const onehop_qknorm *qknorm,
                                                     uint32_t *blocks_out);

/* ---- kernels built at run time --------------------------------------------------------------- */

/* On CUDA the library's own sources can be compiled again while it runs, by NVRTC (a library of the
 * CUDA toolkit and of PyTorch's wheels, opened if it is there; ONEHOP_NVRTC names it), for exactly
 * the GPU that is there. What was compiled is kept on disk: ONEHOP_CACHE_DIR, else
 * $XDG_CACHE_HOME/onehop, else ~/.cache/onehop; if the cache cannot be used, the log says so and
 * kernels are compiled again. ONEHOP_JIT=off forbids all of this. If the library has no code for a
 * context's GPU, the context is created with such kernels. */

/* Build kernels also where those that are loaded were compiled for exactly this GPU already. */
#define ONEHOP_PREPARE_ALWAYS 1u

typedef struct onehop_prepare_config {
    size_t struct_size;
    uint32_t dtypes; /* a bit 1 << onehop_dtype for each type of the calls to come; 0: all */
    uint32_t flags;  /* ONEHOP_PREPARE_* */
} onehop_prepare_config;

/* Collective: the kernels that the context's calls can launch are compiled for this GPU, or loaded
 * from the cache, and take the place of those that were compiled for another (say, an older one of
 * its family). Ranks with GPUs of one kind share the work. Succeeds on all ranks or fails on all
 * with the same message; then the old kernels go on working. The bits of results do not change, nor
 * do graphs captured before. Blocks: seconds for what is not in the cache, and it may wait for work
 * of the GPU. Later calls compile nothing. On the host device and in a group of one rank there is
 * nothing to do. config may be NULL. The _all form serves one thread that drives all `n` ranks of a
 * group. Errors: NULL, STRUCT_SIZE, ARGUMENT, STATE (capturing), ENVIRONMENT, UNSUPPORTED (no
 * compiler, or it does not know the GPU), DISAGREEMENT, MEMORY, DRIVER, -3xx; those of
 * onehop_group_allgather. Since 0.1. */
ONEHOP_API onehop_result onehop_prepare(onehop_context *context,
                                        const onehop_prepare_config *config);
ONEHOP_API onehop_result onehop_prepare_all(onehop_context *const *contexts, int n,
                                            const onehop_prepare_config *config);

/* An expression of the caller's that is applied to each element of a sum, within the all-reduce and
 * before the one rounding: out[i] = round(expression), where x is the sum in fp32. */
typedef struct onehop_expression onehop_expression;

/* Most scalars, and most arrays, that an expression names. */
#define ONEHOP_OP_NAMES 8

typedef struct onehop_expression_config {
    size_t struct_size;
    /* CUDA C, of type float; to 4096 characters, over several lines if wanted. For example
     * "x * scale + bias[col]". It knows
     *   x         the sum, float
     *   i         index of the element in the message, unsigned 64 bits
     *   row, col  i / row_length and i % row_length
     * the scalars (float) and arrays (indexed, elements read as float) named below, and the device
     * functions of CUDA. A constant needs its f: 0.5f. It is code and runs as such: take it only
     * from people you trust. Indices into arrays are not checked. */
    const char *expression;
    onehop_dtype dtype;                   /* of the messages */
    uint32_t reserved;                    /* 0 */
    size_t row_length;                    /* elements; 0: the message is one row */
    const char *scalars[ONEHOP_OP_NAMES]; /* names; NULL: none */
    const char *arrays[ONEHOP_OP_NAMES];
    onehop_dtype array_dtypes[ONEHOP_OP_NAMES]; /* ONEHOP_FLOAT32, or dtype */
} onehop_expression_config;

/* Collective: compiles the expression into the kernels of all algorithms, for one type of messages.
 * All ranks give the same config. Blocks as onehop_prepare does. The strings are read during the
 * call only. Not for the host device, which has no compiler, nor for a group of one rank. Errors:
 * as onehop_prepare; ARGUMENT with the compiler's own message, in which "expression(2)" is the
 * second line of the expression; DTYPE, TOO_LARGE. Since 0.1. */
ONEHOP_API onehop_result onehop_expression_create(onehop_context *context,
                                                  const onehop_expression_config *config,
                                                  onehop_expression **op_out);
ONEHOP_API onehop_result onehop_expression_create_all(onehop_context *const *contexts, int n,
                                                      const onehop_expression_config *config,
                                                      onehop_expression **ops_out);

/* Local, at any time: calls that were made, and graphs, go on. */
ONEHOP_API void onehop_expression_destroy(onehop_expression *op);

/* What the names of an expression stand for in one call; each at the index it has in the config. */
typedef struct onehop_expression_values {
    size_t struct_size;
    float scalars[ONEHOP_OP_NAMES]; /* equal on all ranks: part of what is compared */
    /* Memory of this rank's device, aligned to an element, with equal content on all ranks, since
     * each rank may compute a part for all. Read in stream order: it may be written by work before
     * the call, must not overlap `out`, and stays valid like `in`. */
    const void *arrays[ONEHOP_OP_NAMES];
} onehop_expression_values;

/* As onehop_all_reduce, of op->dtype and ONEHOP_SUM, with the expression of `op`, which was
 * made from this context. call and, if the expression names nothing, values may be NULL. The same
 * bits on all ranks, by every algorithm and size; NaN is canonical. Neither NCCL nor multicast
 * takes such calls. In a graph scalars and addresses are those of the capture. Errors: those of
 * onehop_all_reduce, ARGUMENT (op of another context). Since 0.1. */
ONEHOP_API onehop_result onehop_all_reduce_expression(
    onehop_context *context, const void *in, void *out, size_t count, const onehop_expression *op,
    const onehop_expression_values *values, const onehop_call *call, onehop_stream stream);

/* ---- host streams ---------------------------------------------------------------------------- */

/* A queue with a worker thread, for the host device: what a CUDA stream is to a GPU. Needed when
 * one thread drives several ranks, and for capture and replay. A handle that is no host stream
 * gives STREAM. */
typedef struct onehop_host_graph onehop_host_graph;

/* Errors: NULL, MEMORY, SYSTEM. Since 0.1. */
ONEHOP_API onehop_result onehop_host_stream_create(onehop_stream *stream_out);

/* Waits until the queue is empty. Errors: NULL, STREAM, STATE (being captured), INTERRUPTED. Since
 * 0.1. */
ONEHOP_API onehop_result onehop_host_stream_synchronize(onehop_stream stream);

/* Until `end`, calls on the stream are recorded, not run. Errors: NULL, STREAM, STATE. Since
 * 0.1. */
ONEHOP_API onehop_result onehop_host_stream_capture_begin(onehop_stream stream);
ONEHOP_API onehop_result onehop_host_stream_capture_end(onehop_stream stream,
                                                        onehop_host_graph **graph_out);

/* Queues the recorded calls. The graph must live until they have run. Errors: NULL, STREAM, STATE,
 * MEMORY. Since 0.1. */
ONEHOP_API onehop_result onehop_host_graph_launch(onehop_host_graph *graph, onehop_stream stream);
ONEHOP_API void onehop_host_graph_destroy(onehop_host_graph *graph);

/* Waits for the queue, ends the worker. */
ONEHOP_API void onehop_host_stream_destroy(onehop_stream stream);

#ifdef __cplusplus
}
#endif
#endif /* ONEHOP_H */
