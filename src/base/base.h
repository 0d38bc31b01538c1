/* What every layer may use: errors, log, environment, clock. Nothing here knows of ranks or
 * devices.
 *
 * Error idiom: the function that first decides the error calls oh_error and returns its value;
 * callers forward the value untouched. Cleanup: zero first, acquire in order, one teardown that
 * accepts any prefix. */
#ifndef OH_BASE_H
#define OH_BASE_H

#include <onehop.h>

#include <stdbool.h>
#include <stdint.h>
#include <stddef.h>

/* Sets the thread's last-error sentence (cut at 511 bytes), logs it at debug level and returns
 * `result`. Keeps errno. The arguments may point into the old sentence. */
onehop_result oh_error(onehop_result result, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* As oh_error, with ": <strerror(errno value)>" appended. */
onehop_result oh_error_errno(onehop_result result, int errno_value, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* One line to the log function or stderr; nothing above the level in force. Keeps errno. Not for
 * the launch path. */
void oh_log(onehop_log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Whether lines of the level are made. */
bool oh_log_wants(onehop_log_level level);

/* Reads ONEHOP_LOG again and refuses a value that is no level. To be called by whatever creates an
 * object; until the first call, and after a refusal, a bad value counts as the default. */
onehop_result oh_log_check(void);

/* The rest of the block runs without being cancelled (pthread_cancel): for what makes system calls
 * with locks held, descriptors open or peers informed. A request stays pending. */
#define OH_NO_CANCEL                                                                               \
    __attribute__((cleanup(oh_cancel_restore), unused)) int oh_cancel_state = oh_cancel_forbid()
int oh_cancel_forbid(void);
void oh_cancel_restore(const int *state);

/* CLOCK_MONOTONIC. */
uint64_t oh_clock_ns(void);
void oh_sleep_us(unsigned us);

/* Every environment variable that onehop reads: X(id, name, type, default, meaning). `onehop info`
 * is made from this table; nothing else calls getenv. Types: ms, bytes,
 * bool, string, level. */
#define OH_ENV_TABLE(X)                                                                            \
    X(NAME, "ONEHOP_NAME", "string", "", "name of the group, if the program gives none")           \
    X(TIMEOUT_MS, "ONEHOP_TIMEOUT_MS", "ms", "300000", "deadline of a call")                       \
    X(INIT_TIMEOUT_MS, "ONEHOP_INIT_TIMEOUT_MS", "ms", "300000",                                   \
      "how long set-up waits for all ranks")                                                       \
    X(LOG, "ONEHOP_LOG", "level", "warn", "off, error, warn, info or debug")                       \
    X(DEVICE, "ONEHOP_DEVICE", "string", "auto", "device for AUTO: auto, cuda or host")            \
    X(ISA, "ONEHOP_ISA", "string", "auto",                                                         \
      "host device: auto, baseline, avx2, avx512 or neon; an error if the machine lacks it")       \
    X(TUNING, "ONEHOP_TUNING", "string", "", "tuning table to use before those compiled in")       \
    X(NCCL, "ONEHOP_NCCL", "bool", "0",                                                            \
      "1 hands long messages to NCCL, as ONEHOP_FLAG_NCCL; 0, if set, switches the NCCL shim off") \
    X(NCCL_LIB, "ONEHOP_NCCL_LIB", "string", "libnccl.so.2", "the NCCL library to open")           \
    X(NCCL_REAL, "ONEHOP_NCCL_REAL", "string", "",                                                 \
      "NCCL shim: full path of the real library; by default it is looked for")                     \
    X(NCCL_GROUPS, "ONEHOP_NCCL_GROUPS", "bool", "1",                                              \
      "NCCL shim: 0 leaves to NCCL what lies between ncclGroupStart and ncclGroupEnd")             \
    X(NCCL_MAX_BYTES, "ONEHOP_NCCL_MAX_BYTES", "bytes", "16777216",                                \
      "NCCL shim: longer messages are NCCL's; of collectives in parts, all parts together")        \
    X(NCCL_STATS, "ONEHOP_NCCL_STATS", "bool", "0",                                                \
      "NCCL shim: 1 prints at the end of a process what was taken and what not, and why")          \
    X(NCCL_BLOCKING, "NCCL_COMM_BLOCKING", "bool", "", "NCCL's; 0: the NCCL shim takes nothing")   \
    X(VLLM_NCCL, "VLLM_NCCL_SO_PATH", "string", "",                                                \
      "vLLM's; `onehop run` sets it, and takes what it names for the real NCCL")                   \
    X(SGLANG_NCCL, "SGLANG_NCCL_SO_PATH", "string", "", "SGLang's; the same")                      \
    X(PRELOAD, "LD_PRELOAD", "string", "", "`onehop run` puts the NCCL shim before it")            \
    X(PATH, "PATH", "string", "", "where `onehop run` looks for the command's Python")             \
    X(MULTICAST, "ONEHOP_MULTICAST", "bool", "0", "1 allows NVLink multicast; not validated")      \
    X(NVLS, "NCCL_NVLS_ENABLE", "int", "",                                                         \
      "anything but 1 and 2 forbids multicast to onehop; 0 to NCCL, too")                          \
    X(NO_MULTICAST, "TORCH_SYMM_MEM_DISABLE_MULTICAST", "bool", "",                                \
      "anything but 0 forbids multicast to PyTorch, and to onehop")                                \
    X(JIT, "ONEHOP_JIT", "string", "on", "on, or off: no kernel is compiled at run time")          \
    X(JIT_ARCH, "ONEHOP_JIT_ARCH", "int", "",                                                      \
      "host device: compiles kernels for this GPU (90 for sm_90), as a context on it would")       \
    X(NVRTC, "ONEHOP_NVRTC", "string", "",                                                         \
      "the NVRTC library to open; by default it is searched for")                                  \
    X(CACHE_DIR, "ONEHOP_CACHE_DIR", "string", "", "where kernels built at run time are kept")     \
    X(XDG_CACHE_HOME, "XDG_CACHE_HOME", "string", "",                                              \
      "without ONEHOP_CACHE_DIR they are in $XDG_CACHE_HOME/onehop")                               \
    X(HOME, "HOME", "string", "", "without both they are in $HOME/.cache/onehop")                  \
    X(MODULE_LOADING, "CUDA_MODULE_LOADING", "string", "",                                         \
      "of CUDA; set EAGER if ranks are threads, or loading a kernel can block a rank")             \
    X(RANK, "RANK", "int", "", "rank, if the program gives none (set by torchrun)")                \
    X(WORLD_SIZE, "WORLD_SIZE", "int", "", "number of ranks (torchrun)")                           \
    X(LOCAL_RANK, "LOCAL_RANK", "int", "", "GPU of this rank (torchrun)")                          \
    X(LOCAL_WORLD_SIZE, "LOCAL_WORLD_SIZE", "int", "", "ranks on this host (torchrun)")            \
    X(MASTER_ADDR, "MASTER_ADDR", "string", "", "part of the default group name (torchrun)")       \
    X(MASTER_PORT, "MASTER_PORT", "string", "", "part of the default group name (torchrun)")       \
    X(TORCHELASTIC_RUN_ID, "TORCHELASTIC_RUN_ID", "string", "", "part of the default group name")  \
    X(OMPI_RANK, "OMPI_COMM_WORLD_RANK", "int", "",                                                \
      "rank, if RANK and WORLD_SIZE are not set (Open MPI)")                                       \
    X(OMPI_SIZE, "OMPI_COMM_WORLD_SIZE", "int", "", "number of ranks (Open MPI)")                  \
    X(OMPI_LOCAL_RANK, "OMPI_COMM_WORLD_LOCAL_RANK", "int", "", "GPU of this rank (Open MPI)")     \
    X(OMPI_LOCAL_SIZE, "OMPI_COMM_WORLD_LOCAL_SIZE", "int", "", "ranks on this host (Open MPI)")   \
    X(PMIX_NAMESPACE, "PMIX_NAMESPACE", "string", "", "part of the default group name (Open MPI)") \
    X(PMI_RANK, "PMI_RANK", "int", "", "rank, if none of the above is set (MPICH, Intel MPI)")     \
    X(PMI_SIZE, "PMI_SIZE", "int", "", "number of ranks (MPICH, Intel MPI)")                       \
    X(MPI_LOCALRANKID, "MPI_LOCALRANKID", "int", "", "GPU of this rank (MPICH, Intel MPI)")        \
    X(MPI_LOCALNRANKS, "MPI_LOCALNRANKS", "int", "", "ranks on this host (MPICH, Intel MPI)")      \
    X(SLURM_PROCID, "SLURM_PROCID", "int", "", "rank, if none of the above is set (srun)")         \
    X(SLURM_TASKS, "SLURM_STEP_NUM_TASKS", "int", "", "number of ranks (srun)")                    \
    X(SLURM_LOCALID, "SLURM_LOCALID", "int", "", "GPU of this rank (srun)")                        \
    X(SLURM_NODES, "SLURM_STEP_NUM_NODES", "int", "", "number of hosts (srun); must be 1")         \
    X(SLURM_JOB_ID, "SLURM_JOB_ID", "string", "", "part of the default group name (srun, MPICH)")  \
    X(SLURM_STEP_ID, "SLURM_STEP_ID", "string", "", "part of the default group name (srun, MPICH)")

typedef enum oh_env {
#define OH_ENV_ENUM(id, name, type, default_text, meaning) OH_ENV_##id,
    OH_ENV_TABLE(OH_ENV_ENUM)
#undef OH_ENV_ENUM
    OH_ENV_COUNT
} oh_env;

typedef struct oh_env_row {
    const char *name, *type, *default_text, *meaning;
} oh_env_row;

const oh_env_row *oh_env_describe(oh_env id);

/* The variable's text, or NULL if it is unset or empty. */
const char *oh_env_text(oh_env id);

/* Who started this process as one of several, and the variables in which it says so. */
typedef struct oh_launcher {
    const char *name;
    oh_env rank, size;
    oh_env local_rank, local_size; /* size on this host; each may be unset */
    oh_env hosts;                  /* OH_ENV_COUNT where local_size says it */
    oh_env job[4];                 /* what tells its jobs apart, up to OH_ENV_COUNT */
} oh_launcher;

/* The first launcher, in the order of launcher.c, of which both rank and size are set; NULL:
 * none. */
const oh_launcher *oh_launcher_find(void);

/* The local rank that a launcher gives; `fallback` without one. */
onehop_result oh_launcher_local_rank(int64_t fallback, int64_t *local_rank_out);

/* The variable as an integer in low..high; `fallback` if unset. Anything else is refused, naming
 * the variable, its value and what is accepted. */
onehop_result oh_env_integer(oh_env id, int64_t low, int64_t high, int64_t fallback,
                             int64_t *value_out);

/* The variable as the index of one of `words` (NULL-terminated list); `fallback` if unset. */
onehop_result oh_env_word(oh_env id, const char *const *words, int fallback, int *index_out);

/* Refuses any of our variables whose value is not understood, also those that only some device, or
 * a later call, would read. To be called where a communicator is made. */
onehop_result oh_env_check(void);

/* Why multicast must not be used, as text: ONEHOP_MULTICAST is not 1, or a switch of NCCL or
 * PyTorch forbids it to the whole process. NULL: it may. */
const char *oh_multicast_refusal(void);

/* Opens a shared library whose name the user gives; NULL, and why. A path must be that of a regular
 * file: a pipe would make the loader wait for a writer. */
void *oh_library_open(const char *name, char *why_out, size_t size);

/* Copies a config struct of any earlier or later version: its first member, struct_size, is the
 * caller's size, `known` is ours. Fields the caller's struct lacks become zero; fields that ours
 * lacks must be zero. struct_size of the copy is `known`. Refuses, with STRUCT_SIZE, sizes that no
 * struct of ours can have: under two words, not whole words, over 64 KiB. */
onehop_result oh_config_copy(void *to, size_t known, const void *from, const char *type_name);

/* 64-bit FNV-1a; start with OH_HASH_START. */
#define OH_HASH_START 0xcbf29ce484222325ull
uint64_t oh_hash(uint64_t hash, const void *bytes, size_t size);

/* Random bytes from the kernel. */
onehop_result oh_random(void *bytes, size_t size);

typedef struct oh_id128 {
    uint64_t word[2];
} oh_id128;

static inline bool oh_id128_equal(oh_id128 a, oh_id128 b) {
    return a.word[0] == b.word[0] && a.word[1] == b.word[1];
}

/* Random, made once per process; a forked child gets its own. A pid would not do: ranks in
 * different pid namespaces may share one. */
onehop_result oh_process_id(oh_id128 *id_out);

/* The number of this process among its ancestors, never 0. Every object keeps that of the process
 * that made it; see process.c. */
uint64_t oh_process(void);

extern uint64_t *oh_process_word; /* read through oh_process_is only */

/* Is this the process that made an object? One load; no system call. */
static inline bool oh_process_is(uint64_t process) {
    return __atomic_load_n(oh_process_word, __ATOMIC_RELAXED) == process;
}

/* STATE: the `what` is a forked child's copy. */
onehop_result oh_process_refuse(const char *what);

static inline onehop_result oh_process_check(uint64_t process, const char *what) {
    return oh_process_is(process) ? ONEHOP_OK : oh_process_refuse(what);
}

/* Runs in every forked child, before it has a second thread. */
void oh_process_add_reset(void (*reset)(void));

/* After the definition of a static mutex: a forked child finds it free. */
#define OH_RESET_IN_CHILD(mutex)                                                                   \
    static void mutex##_in_child(void) {                                                           \
        pthread_mutex_init(&mutex, NULL);                                                          \
    }                                                                                              \
    __attribute__((constructor)) static void mutex##_at_start(void) {                              \
        oh_process_add_reset(mutex##_in_child);                                                    \
    }

/* "; RLIMIT_MEMLOCK is N bytes" for the sentence about memory that could not be locked or pinned,
 * or "" if the limit cannot be why: there is none. */
#define OH_MEMLOCK_BYTES 96
const char *oh_memlock_hint(char text[OH_MEMLOCK_BYTES]);

/* A random number that the processes of this user share and no other user can read. False where the
 * kernel keeps none for us. */
bool oh_user_secret(oh_id128 *secret_out);

#define OH_LENGTH(array) (sizeof(array) / sizeof *(array))

static inline size_t oh_round_up(size_t value, size_t unit) {
    return (value + unit - 1) / unit * unit;
}
static inline size_t oh_round_down(size_t value, size_t unit) {
    return value / unit * unit;
}

#endif
