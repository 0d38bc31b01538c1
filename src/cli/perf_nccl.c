/* NCCL beside us, in the same processes, on the same streams and in graphs of the same shape.
 * Opened at run time; the few declarations below are its published interface, version 2. */
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
    NCCL_BFLOAT16 = 9
};

/* X(exported name, parameters); all return 0 for success. */
#define NCCL_FUNCTIONS(X)                                                                          \
    X(ncclGetVersion, (int *))                                                                     \
    X(ncclGetUniqueId, (nccl_unique_id *))                                                         \
    X(ncclCommInitRank, (void **, int, nccl_unique_id, int))                                       \
    X(ncclAllReduce, (const void *, void *, size_t, int, int, void *, onehop_stream_t))            \
    X(ncclCommDestroy, (void *))

static struct {
#define NCCL_MEMBER(name, parameters) int(*name) parameters;
    NCCL_FUNCTIONS(NCCL_MEMBER)
#undef NCCL_MEMBER
    const char *(*ncclGetErrorString)(int);
    bool opened;
    char problem[256];
    char version[32];
} nccl;

static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;

static void look_up(void *library) {
    void *symbol = dlsym(library, "ncclGetErrorString");
    memcpy(&nccl.ncclGetErrorString, &symbol, sizeof symbol);
    nccl.opened = symbol != NULL;
#define NCCL_FIND(name, parameters)                                                                \
    symbol = dlsym(library, #name);                                                                \
    memcpy(&nccl.name, &symbol, sizeof symbol);                                                    \
    nccl.opened &= symbol != NULL;
    NCCL_FUNCTIONS(NCCL_FIND)
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
                    "--compare nccl: %s cannot be used (%s); name it with --nccl-lib", name,
                    nccl.problem);
}

static onehop_result nccl_error(int result, const char *what) {
    if (result == 0) return ONEHOP_OK;
    return oh_error(ONEHOP_ERR_DRIVER, "%s failed: %s", what, nccl.ncclGetErrorString(result));
}

const char *perf_nccl_version(void) {
    return nccl.version;
}

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
    return nccl_error(
        nccl.ncclCommInitRank(&rank->foreign, worker->plan->world_size, id, rank->rank),
        "ncclCommInitRank");
}

void perf_nccl_close(perf_worker *worker) {
    if (worker->rank[0].foreign) nccl.ncclCommDestroy(worker->rank[0].foreign);
    worker->rank[0].foreign = NULL;
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

const perf_target perf_target_nccl = {
    .registers = false,
    .call = nccl_call,
    .wait = nccl_wait,
};
