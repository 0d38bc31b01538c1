/* NCCL beside us, in the same processes, on the same streams and in graphs of the same shape.
 * Opened at run time; the few declarations below are its published interface, version 2.
 *
 * Twice if wanted: on our buffers, and as PEER_NCCL_SYMM on buffers of a symmetric window, for
 * which it has kernels of its own. Both share one communicator: those kernels serve a call only if
 * its buffers lie in such windows. */
#include "cli/perf.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

typedef struct nccl_unique_id {
    char bytes[128];
} nccl_unique_id;

enum {
    NCCL_SUM = 0,
    NCCL_FLOAT16 = 6,
    NCCL_FLOAT32 = 7,
    NCCL_BFLOAT16 = 9,
    NCCL_WIN_COLL_SYMMETRIC = 1,
    NCCL_WIN_ALIGNMENT = 4096,
};

/* X(exported name, parameters); all return 0 for success. */
#define NCCL_FUNCTIONS(X)                                                                          \
    X(ncclGetVersion, (int *))                                                                     \
    X(ncclGetUniqueId, (nccl_unique_id *))                                                         \
    X(ncclCommInitRank, (void **, int, nccl_unique_id, int))                                       \
    X(ncclAllReduce, (const void *, void *, size_t, int, int, void *, onehop_stream_t))            \
    X(ncclCommDestroy, (void *))

/* Of 2.27 and later. */
#define NCCL_WINDOW_FUNCTIONS(X)                                                                   \
    X(ncclMemAlloc, (void **, size_t))                                                             \
    X(ncclMemFree, (void *))                                                                       \
    X(ncclCommWindowRegister, (void *, void *, size_t, void **, int))                              \
    X(ncclCommWindowDeregister, (void *, void *))

static struct {
#define NCCL_MEMBER(name, parameters) int(*name) parameters;
    NCCL_FUNCTIONS(NCCL_MEMBER)
    NCCL_WINDOW_FUNCTIONS(NCCL_MEMBER)
#undef NCCL_MEMBER
    bool windows;
    const char *(*ncclGetErrorString)(int);
    bool opened;
    char problem[256];
    char version[32];
} nccl;

static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;

static void look_up(void *library) {
    void *symbol = dlsym(library, "ncclGetErrorString");
    memcpy(&nccl.ncclGetErrorString, &symbol, sizeof symbol);
    bool found = symbol != NULL;
#define NCCL_FIND(name, parameters)                                                                \
    symbol = dlsym(library, #name);                                                                \
    memcpy(&nccl.name, &symbol, sizeof symbol);                                                    \
    found &= symbol != NULL;
    NCCL_FUNCTIONS(NCCL_FIND)
    nccl.opened = found;
    NCCL_WINDOW_FUNCTIONS(NCCL_FIND)
    nccl.windows = found;
#undef NCCL_FIND
    int version = 0;
    if (!nccl.opened || nccl.ncclGetVersion(&version) != 0)
        snprintf(nccl.problem, sizeof nccl.problem, "it lacks functions of NCCL 2");
    else
        snprintf(nccl.version, sizeof nccl.version, "%d.%d.%d", version / 10000,
                 version / 100 % 100, version % 100);
}

static onehop_result open_library(const char *path) {
    const char *name = path ? path : "libnccl.so.2";
    pthread_mutex_lock(&opening);
    if (!nccl.opened && !nccl.problem[0]) {
        void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
        if (library)
            look_up(library);
        else
            snprintf(nccl.problem, sizeof nccl.problem, "%s", dlerror());
    }
    pthread_mutex_unlock(&opening);
    if (nccl.opened) return ONEHOP_OK;
    return oh_error(ONEHOP_ERR_UNSUPPORTED,
                    "--compare: %s cannot be used (%s); name it with --nccl-lib", name,
                    nccl.problem);
}

static onehop_result nccl_error(int result, const char *what) {
    if (result == 0) return ONEHOP_OK;
    return oh_error(ONEHOP_ERR_DRIVER, "%s failed: %s", what, nccl.ncclGetErrorString(result));
}

const char *perf_nccl_version(void) {
    return nccl.version;
}

/* ---- symmetric windows ---- */

static onehop_result open_window(perf_worker *worker, size_t bytes, void **memory, void **handle) {
    void *communicator = worker->rank[0].foreign;
    bytes = oh_round_up(bytes, NCCL_WIN_ALIGNMENT);
    onehop_result result = nccl_error(nccl.ncclMemAlloc(memory, bytes), "ncclMemAlloc");
    if (result != ONEHOP_OK) return result;
    result = nccl_error(
        nccl.ncclCommWindowRegister(communicator, *memory, bytes, handle, NCCL_WIN_COLL_SYMMETRIC),
        "ncclCommWindowRegister");
    if (result != ONEHOP_OK || *handle) return result;
    /* Success without a window: it would be timed as plain NCCL. */
    return oh_error(ONEHOP_ERR_UNSUPPORTED,
                    "--compare nccl-symm: NCCL %s makes no symmetric window between these GPUs",
                    nccl.version);
}

static onehop_result open_windows(perf_worker *worker) {
    perf_rank *rank = &worker->rank[0];
    if (!nccl.windows)
        return oh_error(ONEHOP_ERR_UNSUPPORTED,
                        "--compare nccl-symm: NCCL %s has no symmetric windows, 2.27 or later has",
                        nccl.version);
    onehop_result result =
        open_window(worker, worker->area_bytes, &rank->window.in, &rank->window_handle[0]);
    if (result == ONEHOP_OK)
        result = open_window(worker, worker->area_bytes + PERF_GUARD, &rank->window.out,
                             &rank->window_handle[1]);
    perf_use_areas(worker, &perf_target_peer[PEER_NCCL_SYMM]);
    return result == ONEHOP_OK ? perf_fill_inputs(worker) : result;
}

static void close_windows(perf_rank *rank) {
    for (int i = 0; i < 2; i++)
        if (rank->window_handle[i])
            nccl.ncclCommWindowDeregister(rank->foreign, rank->window_handle[i]);
    if (rank->window.in) nccl.ncclMemFree(rank->window.in);
    if (rank->window.out) nccl.ncclMemFree(rank->window.out);
}

/* ---- the communicator ---- */

onehop_result perf_nccl_open(perf_worker *worker) {
    perf_rank *rank = &worker->rank[0];
    nccl_unique_id id;
    onehop_result result = open_library(worker->plan->nccl_path);
    if (result == ONEHOP_OK && rank->rank == 0) {
        result = nccl_error(nccl.ncclGetUniqueId(&id), "ncclGetUniqueId");
        memcpy(worker->board->unique_id, &id, sizeof id);
    }
    if (result == ONEHOP_OK) result = perf_barrier(worker);
    if (result == ONEHOP_OK) result = worker->backend->enter(&rank->processor);
    if (result != ONEHOP_OK) return result;
    memcpy(&id, worker->board->unique_id, sizeof id);
    result =
        nccl_error(nccl.ncclCommInitRank(&rank->foreign, worker->plan->world_size, id, rank->rank),
                   "ncclCommInitRank");
    if (result != ONEHOP_OK || !perf_has_peer(worker->plan, PEER_NCCL_SYMM)) return result;
    return open_windows(worker);
}

void perf_nccl_close(perf_worker *worker) {
    perf_rank *rank = &worker->rank[0];
    if (!rank->foreign) return;
    close_windows(rank);
    nccl.ncclCommDestroy(rank->foreign);
    rank->foreign = NULL;
}

static onehop_result nccl_call(perf_worker *worker, perf_rank *rank, const void *in, void *out,
                               size_t count) {
    onehop_dtype dtype = worker->plan->dtype;
    int theirs = dtype == ONEHOP_FLOAT32   ? NCCL_FLOAT32
                 : dtype == ONEHOP_FLOAT16 ? NCCL_FLOAT16
                                           : NCCL_BFLOAT16;
    return nccl_error(
        nccl.ncclAllReduce(in, out, count, theirs, NCCL_SUM, rank->foreign, rank->processor.stream),
        "ncclAllReduce");
}

static onehop_result nccl_wait(perf_worker *worker, perf_rank *rank) {
    return worker->backend->wait(&rank->processor);
}

const perf_target perf_target_peer[PEERS] = {
    [PEER_NCCL] = {.name = "nccl", .call = nccl_call, .wait = nccl_wait},
    [PEER_NCCL_SYMM] = {.name = "nccl-symm", .window = true, .call = nccl_call, .wait = nccl_wait},
};
