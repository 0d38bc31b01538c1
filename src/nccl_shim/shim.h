/* The NCCL shim: a library with NCCL's name and functions that stands before the real one. A caller
 * gets the real communicator; what the shim knows of it lies in a table beside it. All-reduce,
 * reduce-scatter and all-gather are taken by onehop where all ranks agree, by facts that are equal
 * on all of them, that they should be; all else is handed on.
 *
 *   nccl_stubs.S         functions that are handed on as they are
 *   shim_stub.c          where stubs jump to
 *   shim_real.c          where the real library is; the table of its functions
 *   shim_state.c         what is known of each communicator
 *   shim_setup.c         the agreement of a communicator's ranks, shim_roll.c how they meet
 *   shim_collectives.c   the three collectives; shim_call.c whose a call is; shim_groups.c groups
 *   shim_life.c          how communicators begin and end, and errors
 *   shim_stats.c         counts, settings, last error
 *
 * NCCL's interface is declared here as far as the shim takes part in it; numbers are those of its
 * public header. */
#ifndef OH_SHIM_H
#define OH_SHIM_H

#include "base/base.h"

/* ---- NCCL ------------------------------------------------------------------------------------ */

typedef struct ncclComm *oh_nccl_comm;
typedef struct oh_nccl_unique_id {
    char bytes[128];
} oh_nccl_unique_id;

enum {
    OH_NCCL_SUCCESS = 0,
    OH_NCCL_CUDA = 1,
    OH_NCCL_SYSTEM = 2,
    OH_NCCL_INTERNAL = 3,
    OH_NCCL_ARGUMENT = 4,
    OH_NCCL_USAGE = 5,
    OH_NCCL_REMOTE = 6,
};
enum {
    OH_NCCL_INT8 = 0,
    OH_NCCL_FLOAT16 = 6,
    OH_NCCL_FLOAT32 = 7,
    OH_NCCL_BFLOAT16 = 9,
};
enum {
    OH_NCCL_OP_SUM = 0
};

/* The head of ncclConfig_t, which grows behind it. */
typedef struct oh_nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking; /* 0: no; anything else, OH_NCCL_UNDEFINED too: yes */
} oh_nccl_config;

/* Exported, though hidden is the default. */
#define OH_EXPORT __attribute__((visibility("default")))

/* The same function as pnccl*; after its definition. */
#define OH_PNCCL(name)                                                                             \
    extern __typeof__(name) p##name __attribute__((alias(#name), visibility("default")))

/* ---- the real library ------------------------------------------------------------------------ */

typedef enum oh_shim_function {
#define NCCL_FUNCTION(name, since, class) OH_SHIM_##name,
#include "nccl_shim/functions.def"
#undef NCCL_FUNCTION
    OH_SHIM_FUNCTIONS
} oh_shim_function;

/* Addresses in the real library; NULL until they are asked for. Read by nccl_stubs.S. */
extern void *oh_shim_targets[OH_SHIM_FUNCTIONS];

/* The real function, or one that answers an error: there is no library, or it lacks the
 * function. */
void *oh_shim_real(oh_shim_function index);
bool oh_shim_has(oh_shim_function index);
/* A function that answers `result`, for this thread's next call. */
void *oh_shim_answer(int result);

/* The same for stubs; `caller` is the address the call returns to. */
void *oh_shim_target(unsigned index, const void *caller);

/* Calls that the real library, or onehop, makes on its way are not the program's: they are handed
 * on at once. `caller` is __builtin_return_address(0) of the function that is exported. */
bool oh_shim_inside(const void *caller);
extern __thread int oh_shim_depth; /* > 0: this thread is inside */

typedef int (*oh_nccl_reduce_fn)(const void *, void *, size_t, int, int, oh_nccl_comm,
                                 onehop_stream); /* all_reduce, reduce_scatter */
typedef int (*oh_nccl_gather_fn)(const void *, void *, size_t, int, oh_nccl_comm, onehop_stream);
typedef int (*oh_nccl_comm_fn)(oh_nccl_comm);
typedef int (*oh_nccl_comm_int_fn)(oh_nccl_comm, int *);
typedef int (*oh_nccl_void_fn)(void);

#define OH_REAL(type, name) ((type)oh_shim_real(OH_SHIM_##name))

/* A call of the real library by the shim: those that it makes of its own names are told apart. */
#define OH_REAL_CALL(result, type, name, ...)                                                      \
    do {                                                                                           \
        const type real_ = OH_REAL(type, name);                                                    \
        oh_shim_depth++;                                                                           \
        (result) = real_(__VA_ARGS__);                                                             \
        oh_shim_depth--;                                                                           \
    } while (0)

/* ---- settings, counts, errors ---------------------------------------------------------------- */

typedef struct oh_shim_settings {
    bool on, groups, stats, host;
    bool blocking_known, blocking; /* NCCL_COMM_BLOCKING decides for all communicators */
    uint64_t max_bytes;
    const char *fault; /* a setting that is not understood; then `on` is false */
} oh_shim_settings;

const oh_shim_settings *oh_shim_settings_get(void);

/* Why a call is handed on: X(name, text). */
#define OH_SHIM_REASONS(X)                                                                         \
    X(OTHER, "other functions")                                                                    \
    X(COMM, "communicator not taken")                                                              \
    X(TYPE, "type")                                                                                \
    X(OP, "reduction")                                                                             \
    X(SIZE, "longer than ONEHOP_NCCL_MAX_BYTES")                                                   \
    X(RULE, "rule of the tuning table")                                                            \
    X(GROUP, "group")

typedef enum oh_shim_reason {
#define OH_SHIM_REASON(name, text) OH_SHIM_##name,
    OH_SHIM_REASONS(OH_SHIM_REASON)
#undef OH_SHIM_REASON
    OH_SHIM_REASON_COUNT,
    OH_SHIM_TAKEN = -1
} oh_shim_reason;

void oh_shim_count_taken(onehop_collective collective);
void oh_shim_count_forwarded(oh_shim_reason reason);
void oh_shim_count_comm(bool taken);

/* Keeps onehop's last sentence for ncclGetLastError and returns NCCL's number for the result. */
int oh_shim_fail(onehop_result result);
/* The sentence, if onehop's error was the last one; else NULL. Valid until this thread's next
 * call. */
const char *oh_shim_last_error(void);
/* Returns `result`; an error of the real library takes the place of ours. */
int oh_shim_answered(int result);

/* ---- communicators --------------------------------------------------------------------------- */

typedef struct oh_shim_choice {
    uint64_t key; /* bytes, type and collective; 0: empty */
    bool ours;
} oh_shim_choice;

#define OH_SHIM_CHOICES 64

typedef struct oh_shim_state {
    oh_nccl_comm comm;
    onehop_context *context; /* NULL: not taken */
    int rank, ranks;
    int users;    /* threads that use the context */
    oh_id128 key; /* what its children are known by; zeros: none */
    uint64_t children;
    bool blocking;
    bool captured; /* a call was captured into a graph, whose replays nobody counts */
    oh_shim_choice choices[OH_SHIM_CHOICES];
    struct oh_shim_state *next_free;
} oh_shim_state;

/* NULL: not known. No lock. */
oh_shim_state *oh_shim_find(oh_nccl_comm comm);
/* A new entry, in the place of an older one of that address; NULL: no room. */
oh_shim_state *oh_shim_add(oh_nccl_comm comm);
/* The entry goes; its context must be gone. */
void oh_shim_remove(oh_nccl_comm comm);

/* The context for a call on `comm`; NULL if there is none, or if the entry is another
 * communicator's by now. Each pairs with a leave. */
onehop_context *oh_shim_enter(oh_shim_state *state, oh_nccl_comm comm);
void oh_shim_leave(oh_shim_state *state);
/* Ends the context; with `abort` calls in flight are given up. */
void oh_shim_end(oh_shim_state *state, bool abort);

/* ---- set-up ---------------------------------------------------------------------------------- */

/* What each rank of a communicator tells all. All versions begin alike, up to `version`. */
typedef struct oh_shim_record {
    uint64_t magic;
    uint32_t size, version;
    oh_id128 boot, process, name;
    uint64_t netns, userns;
    unsigned char gpu[16];
    uint32_t user, on, groups, several, host, failed;
    uint64_t max_bytes;
    uint32_t rank, unused;
    uint64_t reserved[15];
} oh_shim_record;

_Static_assert(sizeof(oh_shim_record) == 256, "all versions exchange as many bytes");

/* This rank's place in the file by which shims find each other (shim_roll.c). */
typedef struct oh_shim_roll {
    int fd;       /* -1: it takes no part */
    oh_id128 key; /* zeros: made in a way that ranks have nothing in common for */
    size_t place;
} oh_shim_roll;

/* Before the real init; a rank whose communicator is not blocking takes no part. */
oh_shim_roll oh_shim_roll_init(const oh_nccl_unique_id *id, int rank, bool blocking);
oh_shim_roll oh_shim_roll_child(oh_nccl_comm parent, int color, bool blocking);
/* After it: whether all ranks take part, equal on all. */
bool oh_shim_roll_complete(const oh_shim_roll *roll, int ranks);
/* Then each tells its record, of all its communicators first, and hears all. False: a rank has
 * died. */
void oh_shim_roll_tell(const oh_shim_roll *roll, const oh_shim_record *own);
bool oh_shim_roll_hear(const oh_shim_roll *roll, int ranks, oh_shim_record *all);
void oh_shim_roll_leave(oh_shim_roll *roll);
/* Leaves, and tells the others that this rank cannot. */
void oh_shim_roll_refuse(oh_shim_roll *roll);

/* A communicator that has just been made. */
typedef struct oh_shim_new {
    oh_nccl_comm comm;
    bool blocking;
    oh_shim_roll roll;
} oh_shim_new;

/* Collective over the ranks of each of the communicators, which all were made by this thread in one
 * group, or alone: decides who is taken, and makes the contexts. */
void oh_shim_set_up(oh_shim_new *made, int count);
/* A communicator that stays NCCL's. */
oh_shim_state *oh_shim_set_aside(oh_nccl_comm comm, bool blocking, const char *why);

/* An id of the GPU that no two GPUs share; zeros on the host device. */
void oh_shim_gpu_id(int device, unsigned char id_out[16]);
/* Whether work given to the stream is captured into a graph. */
bool oh_shim_capturing(onehop_stream stream);

/* ---- calls and groups ------------------------------------------------------------------------ */

typedef struct oh_shim_call {
    onehop_collective collective;
    const void *in;
    void *out;
    size_t count;
    int dtype, op;
    oh_nccl_comm comm;
    onehop_stream stream;
} oh_shim_call;

/* TAKEN, or why not: by facts that are equal on all ranks. */
oh_shim_reason oh_shim_judge(const oh_shim_call *call);
int oh_shim_run(const oh_shim_call *call);
int oh_shim_forward(const oh_shim_call *call);

/* Whether this thread is in a group. */
bool oh_shim_grouped(void);
/* In a group: keeps the call back, or hands it on with all that was kept. */
int oh_shim_group_add(const oh_shim_call *call, oh_shim_reason reason);
/* In a group: what is kept back goes to the real library, whose group is opened. Else nothing. */
int oh_shim_group_open(void);
/* In a group: the set-up of a communicator that is made when the group ends. False: no room. */
bool oh_shim_group_made(oh_nccl_comm *comm, bool blocking, const oh_shim_roll *roll);

#endif
