/* NCCL beside us, in the same processes, on the same streams and in graphs of the same shape.
 *
 * Twice if wanted: on our buffers, and as PEER_NCCL_SYMM on buffers of a symmetric window, for
 * which it has kernels of its own. Both share one communicator: those kernels serve a call only if
 * its buffers lie in such windows. */
#include "cli/perf/perf_nccl.h"
#include "cli/perf/perf_check.h"
#include "device/nccl/nccl_api.h"

#include <string.h>

enum {
    WIN_COLL_SYMMETRIC = 1,
    WIN_ALIGNMENT = 4096,
};

const char *perf_nccl_version(void) {
    return oh_nccl.version;
}

/* ---- symmetric windows ----------------------------------------------------------------------- */

static onehop_result open_window(perf_worker *worker, size_t bytes, void **memory, void **handle) {
    void *communicator = worker->rank[0].foreign;
    bytes = oh_round_up(bytes, WIN_ALIGNMENT);
    onehop_result result = oh_nccl_check(oh_nccl.ncclMemAlloc(memory, bytes), "ncclMemAlloc");
    if (result != ONEHOP_OK) return result;
    result = oh_nccl_check(
        oh_nccl.ncclCommWindowRegister(communicator, *memory, bytes, handle, WIN_COLL_SYMMETRIC),
        "ncclCommWindowRegister");
    if (result != ONEHOP_OK || *handle) return result;
    /* Success without a window: it would be timed as plain NCCL. */
    return oh_error(ONEHOP_ERR_UNSUPPORTED,
                    "--compare nccl-symm: NCCL %s makes no symmetric window between these GPUs",
                    oh_nccl.version);
}

static onehop_result open_windows(perf_worker *worker) {
    perf_rank *rank = &worker->rank[0];
    if (!oh_nccl.windows)
        return oh_error(ONEHOP_ERR_UNSUPPORTED,
                        "--compare nccl-symm: NCCL %s has no symmetric windows, 2.27 or later has",
                        oh_nccl.version);
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
            oh_nccl.ncclCommWindowDeregister(rank->foreign, rank->window_handle[i]);
    if (rank->window.in) oh_nccl.ncclMemFree(rank->window.in);
    if (rank->window.out) oh_nccl.ncclMemFree(rank->window.out);
}

/* ---- the communicator ------------------------------------------------------------------------ */

/* NCCL works on the device that is current: `enter` leaves it so for the calls of this thread. */
static onehop_result connect_rank(perf_worker *worker) {
    perf_rank *rank = &worker->rank[0];
    oh_nccl_id id;
    onehop_result result = worker->backend->enter(&rank->processor);
    if (result != ONEHOP_OK) return result;
    memcpy(&id, worker->board->unique_id, sizeof id);
    return oh_nccl_check(
        oh_nccl.ncclCommInitRank(&rank->foreign, worker->plan->world_size, id, rank->rank),
        "ncclCommInitRank");
}

onehop_result perf_nccl_open(perf_worker *worker) {
    oh_nccl_id id;
    onehop_result result = oh_nccl_open(worker->plan->nccl_path);
    if (result == ONEHOP_OK && worker->rank[0].rank == 0) {
        result = oh_nccl_check(oh_nccl.ncclGetUniqueId(&id), "ncclGetUniqueId");
        memcpy(worker->board->unique_id, &id, sizeof id);
    }
    if (result == ONEHOP_OK) result = perf_barrier(worker);
    if (result == ONEHOP_OK) result = connect_rank(worker);
    if (result != ONEHOP_OK || !perf_has_peer(worker->plan, PEER_NCCL_SYMM)) return result;
    return open_windows(worker);
}

void perf_nccl_close(perf_worker *worker) {
    perf_rank *rank = &worker->rank[0];
    if (!rank->foreign) return;
    close_windows(rank);
    oh_nccl.ncclCommDestroy(rank->foreign);
    rank->foreign = NULL;
}

static onehop_result nccl_call(perf_worker *worker, perf_rank *rank, const void *in, void *out,
                               size_t count) {
    const int type = oh_nccl_type(worker->plan->dtype);
    onehop_stream stream = rank->processor.stream;
    switch (worker->plan->collective) {
    case ONEHOP_REDUCE_SCATTER:
        return oh_nccl_check(
            oh_nccl.ncclReduceScatter(in, out, count, type, OH_NCCL_SUM, rank->foreign, stream),
            "ncclReduceScatter");
    case ONEHOP_ALL_GATHER:
        return oh_nccl_check(oh_nccl.ncclAllGather(in, out, count, type, rank->foreign, stream),
                             "ncclAllGather");
    default:
        return oh_nccl_check(
            oh_nccl.ncclAllReduce(in, out, count, type, OH_NCCL_SUM, rank->foreign, stream),
            "ncclAllReduce");
    }
}

static onehop_result nccl_wait(perf_worker *worker, perf_rank *rank) {
    return worker->backend->wait(&rank->processor);
}

const perf_target perf_target_peer[PEERS] = {
    [PEER_NCCL] = {.name = "nccl", .call = nccl_call, .wait = nccl_wait},
    [PEER_NCCL_SYMM] = {.name = "nccl-symm", .window = true, .call = nccl_call, .wait = nccl_wait},
};
