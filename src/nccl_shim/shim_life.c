/* How communicators begin and end, and what they say of errors. The real library goes first at the
 * beginning and last at the end. */
#include "nccl_shim/shim.h"

#include <limits.h>
#include <string.h>

/* ---- begin ----------------------------------------------------------------------------------- */

typedef int (*init_fn)(oh_nccl_comm *, int, oh_nccl_unique_id, int);
typedef int (*init_config_fn)(oh_nccl_comm *, int, oh_nccl_unique_id, int, const oh_nccl_config *);
typedef int (*init_scalable_fn)(oh_nccl_comm *, int, int, int, const oh_nccl_unique_id *,
                                const oh_nccl_config *);
typedef int (*init_all_fn)(oh_nccl_comm *, int, const int *);
typedef int (*split_fn)(oh_nccl_comm, int, int, oh_nccl_comm *, const oh_nccl_config *);
typedef int (*shrink_fn)(oh_nccl_comm, const int *, int, oh_nccl_comm *, const oh_nccl_config *,
                         int);

/* NCCL_COMM_BLOCKING wins; a field that is left open is INT_MIN, and then a child is as its
 * parent. */
static bool is_blocking(const oh_nccl_config *config, bool otherwise) {
    const oh_shim_settings *s = oh_shim_settings_get();
    if (s->blocking_known) return s->blocking;
    const bool has = config && config->size >= offsetof(oh_nccl_config, blocking) + sizeof(int);
    return has && config->blocking != INT_MIN ? config->blocking != 0 : otherwise;
}

/* A parent that is not known was made in a way that is passed through. */
static bool parent_blocking(oh_nccl_comm parent) {
    const oh_shim_state *state = oh_shim_find(parent);
    return state && state->blocking;
}

/* No colour of a split. */
#define SHRINK_COLOR (-2)

/* After the real function; in a group it has only been noted, and the end of the group makes it. */
static int made(int result, oh_nccl_comm *comm, bool blocking, oh_shim_roll *roll) {
    if (result || !comm) {
        oh_shim_roll_refuse(roll);
        return result ? oh_shim_answered(result) : result;
    }
    if (oh_shim_grouped()) {
        if (!oh_shim_group_made(comm, blocking, roll)) oh_shim_roll_refuse(roll);
        return result;
    }
    oh_shim_new one = {*comm, blocking, *roll};
    if (*comm)
        oh_shim_set_up(&one, 1);
    else
        oh_shim_roll_leave(roll); /* a split that leaves this rank out */
    return result;
}

/* `call`: the real one, with `result` for its answer; `roll_of(blocking)` comes before it. */
#define BEGIN(comm, blocking, roll_of, type, name, ...)                                            \
    do {                                                                                           \
        int result_;                                                                               \
        oh_shim_roll roll_ = {.fd = -1};                                                           \
        const bool inside_ = oh_shim_inside(__builtin_return_address(0));                          \
        const bool blocking_ = !inside_ && (blocking);                                             \
        if (!inside_ && (result_ = oh_shim_group_open())) return result_;                          \
        if (!inside_) roll_ = roll_of;                                                             \
        OH_REAL_CALL(result_, type, name, __VA_ARGS__);                                            \
        return inside_ ? result_ : made(result_, comm, blocking_, &roll_);                         \
    } while (0)

OH_EXPORT int ncclCommInitRank(oh_nccl_comm *comm, int ranks, oh_nccl_unique_id id, int rank);
OH_EXPORT int ncclCommInitRankConfig(oh_nccl_comm *comm, int ranks, oh_nccl_unique_id id, int rank,
                                     const oh_nccl_config *config);
OH_EXPORT int ncclCommInitRankScalable(oh_nccl_comm *comm, int ranks, int rank, int id_count,
                                       const oh_nccl_unique_id *ids, const oh_nccl_config *config);
OH_EXPORT int ncclCommInitAll(oh_nccl_comm *comms, int count, const int *devices);
OH_EXPORT int ncclCommSplit(oh_nccl_comm comm, int color, int key, oh_nccl_comm *child,
                            const oh_nccl_config *config);
OH_EXPORT int ncclCommShrink(oh_nccl_comm comm, const int *exclude, int count, oh_nccl_comm *child,
                             const oh_nccl_config *config, int flags);

int ncclCommInitRank(oh_nccl_comm *comm, int ranks, oh_nccl_unique_id id, int rank) {
    BEGIN(comm, is_blocking(NULL, true), oh_shim_roll_init(&id, rank, blocking_), init_fn,
          ncclCommInitRank, comm, ranks, id, rank);
}
OH_PNCCL(ncclCommInitRank);

int ncclCommInitRankConfig(oh_nccl_comm *comm, int ranks, oh_nccl_unique_id id, int rank,
                           const oh_nccl_config *config) {
    BEGIN(comm, is_blocking(config, true), oh_shim_roll_init(&id, rank, blocking_), init_config_fn,
          ncclCommInitRankConfig, comm, ranks, id, rank, config);
}
OH_PNCCL(ncclCommInitRankConfig);

int ncclCommInitRankScalable(oh_nccl_comm *comm, int ranks, int rank, int id_count,
                             const oh_nccl_unique_id *ids, const oh_nccl_config *config) {
    BEGIN(comm, is_blocking(config, true), oh_shim_roll_init(ids, rank, blocking_ && id_count > 0),
          init_scalable_fn, ncclCommInitRankScalable, comm, ranks, rank, id_count, ids, config);
}
OH_PNCCL(ncclCommInitRankScalable);

/* One thread drives all ranks: one of them cannot wait for another. */
int ncclCommInitAll(oh_nccl_comm *comms, int count, const int *devices) {
    int result;
    const bool inside = oh_shim_inside(__builtin_return_address(0));
    if (!inside && (result = oh_shim_group_open())) return result;
    OH_REAL_CALL(result, init_all_fn, ncclCommInitAll, comms, count, devices);
    for (int i = 0; i < count && !result && !inside && comms; i++)
        oh_shim_set_aside(comms[i], is_blocking(NULL, true), "made by ncclCommInitAll");
    return inside ? result : oh_shim_answered(result);
}
OH_PNCCL(ncclCommInitAll);

int ncclCommSplit(oh_nccl_comm comm, int color, int key, oh_nccl_comm *child,
                  const oh_nccl_config *config) {
    BEGIN(child, is_blocking(config, true) && parent_blocking(comm),
          oh_shim_roll_child(comm, color, blocking_), split_fn, ncclCommSplit, comm, color, key,
          child, config);
}
OH_PNCCL(ncclCommSplit);

int ncclCommShrink(oh_nccl_comm comm, const int *exclude, int count, oh_nccl_comm *child,
                   const oh_nccl_config *config, int flags) {
    /* NCCL_SHRINK_ABORT: what is in flight on the parent is given up. */
    oh_shim_state *parent = flags & 1 ? oh_shim_find(comm) : NULL;
    if (parent && !oh_shim_inside(__builtin_return_address(0))) oh_shim_end(parent, true);
    BEGIN(child, is_blocking(config, true) && parent_blocking(comm),
          oh_shim_roll_child(comm, SHRINK_COLOR, blocking_), shrink_fn, ncclCommShrink, comm,
          exclude, count, child, config, flags);
}
OH_PNCCL(ncclCommShrink);

/* ---- end ------------------------------------------------------------------------------------- */

typedef int (*comm_flags_fn)(oh_nccl_comm, int);

/* The communicator's context ends; with `forget` all that is known of it. */
static int end_ours(oh_nccl_comm comm, bool abort, bool forget) {
    const int result = oh_shim_group_open();
    oh_shim_state *state = oh_shim_find(comm);
    if (state) oh_shim_end(state, abort);
    if (forget) oh_shim_remove(comm);
    return result;
}

#define END(abort, forget, type, name, ...)                                                        \
    do {                                                                                           \
        int result_ = OH_NCCL_SUCCESS;                                                             \
        const bool inside_ = oh_shim_inside(__builtin_return_address(0));                          \
        if (!inside_) result_ = end_ours(comm, abort, forget);                                     \
        if (result_) return result_;                                                               \
        OH_REAL_CALL(result_, type, name, __VA_ARGS__);                                            \
        return inside_ ? result_ : oh_shim_answered(result_);                                      \
    } while (0)

OH_EXPORT int ncclCommFinalize(oh_nccl_comm comm);
OH_EXPORT int ncclCommDestroy(oh_nccl_comm comm);
OH_EXPORT int ncclCommAbort(oh_nccl_comm comm);
OH_EXPORT int ncclCommRevoke(oh_nccl_comm comm, int flags);
OH_EXPORT int ncclCommSuspend(oh_nccl_comm comm, int flags);

int ncclCommFinalize(oh_nccl_comm comm) {
    END(false, false, oh_nccl_comm_fn, ncclCommFinalize, comm);
}
OH_PNCCL(ncclCommFinalize);

int ncclCommDestroy(oh_nccl_comm comm) {
    END(false, true, oh_nccl_comm_fn, ncclCommDestroy, comm);
}
OH_PNCCL(ncclCommDestroy);

int ncclCommAbort(oh_nccl_comm comm) {
    END(true, true, oh_nccl_comm_fn, ncclCommAbort, comm);
}
OH_PNCCL(ncclCommAbort);

int ncclCommRevoke(oh_nccl_comm comm, int flags) {
    END(true, false, comm_flags_fn, ncclCommRevoke, comm, flags);
}
OH_PNCCL(ncclCommRevoke);

/* Its memory is given up; what comes after ncclCommResume is NCCL's. */
int ncclCommSuspend(oh_nccl_comm comm, int flags) {
    END(false, false, comm_flags_fn, ncclCommSuspend, comm, flags);
}
OH_PNCCL(ncclCommSuspend);

/* ---- errors ---------------------------------------------------------------------------------- */

typedef const char *(*last_error_fn)(oh_nccl_comm);
typedef const char *(*error_string_fn)(int);

/* onehop_failure.site of what was found between calls (docs/design.md). */
enum {
    SITE_OUTSIDE = 6
};

/* A rank of NCCL that destroys or aborts its communicator before the others do is no error to
 * these: that a peer has left counts when a call meets it. */
static onehop_result look(oh_nccl_comm comm) {
    oh_shim_state *state = oh_shim_find(comm);
    onehop_failure failure;
    if (!state) return ONEHOP_OK;
    onehop_context *context = oh_shim_enter(state, comm);
    onehop_result result = context ? onehop_status(context, &failure) : ONEHOP_OK;
    if ((result == ONEHOP_ERR_PEER_LOST || result == ONEHOP_ERR_ABORTED) &&
        failure.site == SITE_OUTSIDE)
        result = ONEHOP_OK;
    oh_shim_leave(state);
    return result;
}

OH_EXPORT int ncclCommGetAsyncError(oh_nccl_comm comm, int *error_out);
OH_EXPORT const char *ncclGetLastError(oh_nccl_comm comm);
OH_EXPORT const char *ncclGetErrorString(int result);

int ncclCommGetAsyncError(oh_nccl_comm comm, int *error_out) {
    int result;
    OH_REAL_CALL(result, oh_nccl_comm_int_fn, ncclCommGetAsyncError, comm, error_out);
    if (result || !error_out || *error_out || oh_shim_inside(__builtin_return_address(0)))
        return result;
    *error_out = oh_shim_fail(look(comm));
    return result;
}
OH_PNCCL(ncclCommGetAsyncError);

const char *ncclGetLastError(oh_nccl_comm comm) {
    const char *ours = oh_shim_last_error();
    if (ours) return ours;
    return oh_shim_has(OH_SHIM_ncclGetLastError) ? OH_REAL(last_error_fn, ncclGetLastError)(comm)
                                                 : "";
}
OH_PNCCL(ncclGetLastError);

const char *ncclGetErrorString(int result) {
    static const char *const texts[] = {"no error",
                                        "unhandled cuda error",
                                        "unhandled system error",
                                        "internal error",
                                        "invalid argument",
                                        "invalid usage",
                                        "remote process exited or there was a network error",
                                        "operation in progress"};
    if (oh_shim_has(OH_SHIM_ncclGetErrorString))
        return OH_REAL(error_string_fn, ncclGetErrorString)(result);
    return result >= 0 && (size_t)result < OH_LENGTH(texts) ? texts[result] : "unknown result code";
}
OH_PNCCL(ncclGetErrorString);
