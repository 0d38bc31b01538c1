/* Ranks of one process: a round table under one mutex.
 *
 * A call is a round. Every rank lays down pointers to what it gives; the last to come opens the
 * round; all copy from each other's memory without the lock; nobody leaves before all have copied,
 * because the pointers are the callers'. Only the first wait, for ranks to come, can take long, and
 * it ends at the deadline or when a rank has closed its handle; then the table is broken for
 * all. */
#include "base/wait.h"
#include "rendezvous/group.h"

#include "base/descriptor.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct oh_seat {
    const void *send;
    const int *fds; /* NULL: an all-gather */
    size_t bytes;
    int count;
} oh_seat;

typedef struct oh_local {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    int world_size, handles;
    uint32_t present;        /* ranks that wait for the round to open, bit per rank */
    int copying;             /* ranks that have not finished the open round */
    uint64_t opened, closed; /* rounds */
    atomic_int first_left;   /* rank that closed first, -1; read without the mutex */
    onehop_result broken;
    char broken_text[512];
    oh_seat seats[ONEHOP_MAX_RANKS];
} oh_local;

static void break_table(oh_local *local, onehop_result result) {
    local->broken = result;
    snprintf(local->broken_text, sizeof local->broken_text, "%s", onehop_last_error());
    pthread_cond_broadcast(&local->changed);
}

static void break_for_missing(oh_local *local, uint32_t timeout_ms) {
    char missing[96];
    oh_list_ranks(~local->present & ((1u << local->world_size) - 1), missing, sizeof missing);
    break_table(local, oh_error(ONEHOP_ERR_MISSING_PEER,
                                "%s of a local group did not join the exchange within %u ms",
                                missing, timeout_ms));
}

/* With the mutex held, after sitting down: waits until round `mine` is open or the table broken. */
static void wait_for_opening(oh_local *local, int rank, uint64_t mine, uint32_t timeout_ms) {
    uint64_t looked = oh_clock_ns(), deadline = looked + (uint64_t)timeout_ms * 1000000u;
    char what[64];
    snprintf(what, sizeof what, "rank %d of a local group, in an exchange", rank);
    while (local->opened < mine && !local->broken) {
        const int left =
            atomic_load_explicit(&local->first_left, memory_order_relaxed); /* mutex orders */
        const uint64_t now = oh_clock_ns();
        deadline += oh_wait_pause_ns(&looked, now);
        if (left >= 0)
            break_table(local,
                        oh_error(ONEHOP_ERR_PEER_LOST, "rank %d of a local group closed it", left));
        else if (now >= deadline)
            break_for_missing(local, timeout_ms);
        else
            oh_wait_rest_on(&local->changed, &local->mutex, deadline);
        if (oh_wait_interrupted_with(&local->mutex) && local->opened < mine && !local->broken)
            break_table(local, oh_wait_ended(what));
    }
}

/* Sits down and returns when the round is open. */
static onehop_result sit_down(onehop_group *group, const oh_seat *seat) {
    oh_local *local = group->local;
    pthread_mutex_lock(&local->mutex);
    uint64_t mine = local->opened + 1;
    if (!local->broken) {
        local->seats[group->rank] = *seat;
        local->present |= 1u << group->rank;
    }
    if (local->present == (1u << local->world_size) - 1) {
        local->present = 0;
        local->copying = local->world_size;
        local->opened = mine;
        pthread_cond_broadcast(&local->changed);
    } else {
        wait_for_opening(local, group->rank, mine, group->timeout_ms);
    }
    onehop_result result = local->opened < mine ? local->broken : ONEHOP_OK;
    if (result) oh_error(result, "%s", local->broken_text);
    pthread_mutex_unlock(&local->mutex);
    return result;
}

/* Returns when all ranks have copied. No deadline: copying waits for nothing. */
static void stand_up(oh_local *local) {
    pthread_mutex_lock(&local->mutex);
    uint64_t mine = local->opened;
    if (--local->copying == 0) {
        local->closed = mine;
        pthread_cond_broadcast(&local->changed);
    }
    while (local->closed < mine) pthread_cond_wait(&local->changed, &local->mutex);
    pthread_mutex_unlock(&local->mutex);
}

/* All ranks see the same seats and hence come to the same result. */
static onehop_result compare_seats(const oh_local *local) {
    const oh_seat *first = &local->seats[0];
    for (int i = 1; i < local->world_size; i++) {
        const oh_seat *seat = &local->seats[i];
        if (seat->bytes != first->bytes || seat->count != first->count || !seat->fds != !first->fds)
            return oh_error(ONEHOP_ERR_DISAGREEMENT,
                            "rank 0 exchanges %zu bytes and %d descriptors, rank %d %zu and %d",
                            first->bytes, first->count, i, seat->bytes, seat->count);
    }
    return ONEHOP_OK;
}

static onehop_result local_allgather(onehop_group *group, const void *send, void *recv,
                                     size_t bytes) {
    oh_local *local = group->local;
    const oh_seat seat = {.send = send, .bytes = bytes};
    onehop_result result = sit_down(group, &seat);
    if (result) return result;
    result = compare_seats(local);
    for (int i = 0; !result && bytes && i < group->world_size; i++) {
        char *to = (char *)recv + (size_t)i * bytes;
        /* Not onto itself: the other ranks are reading it. */
        if (to != local->seats[i].send) memmove(to, local->seats[i].send, bytes);
    }
    stand_up(local);
    return result;
}

static onehop_result duplicate(const oh_local *local, int rank, int *fds_out) {
    for (int i = 0; i < local->world_size; i++) {
        const oh_seat *seat = &local->seats[i];
        for (int k = 0; i != rank && k < seat->count; k++) {
            if (seat->fds[k] < 0) continue;
            int fd = oh_fd_copy(seat->fds[k]);
            if (fd < 0)
                return oh_error_errno(ONEHOP_ERR_SYSTEM, errno,
                                      "cannot duplicate a descriptor of rank %d", i);
            fds_out[i * seat->count + k] = fd;
        }
    }
    return ONEHOP_OK;
}

static onehop_result local_pass_fds(onehop_group *group, const int *fds, int count, int *fds_out,
                                    onehop_result *mine) {
    const oh_seat seat = {.fds = fds, .count = count};
    onehop_result result = sit_down(group, &seat);
    if (result) return result;
    result = compare_seats(group->local);
    onehop_result duplicated = result ? ONEHOP_OK : duplicate(group->local, group->rank, fds_out);
    if (duplicated) *mine = duplicated;
    stand_up(group->local);
    return result;
}

static int local_lost_peer(onehop_group *group) {
    /* Relaxed: the answer is a hint, nothing is read on the strength of it. */
    return atomic_load_explicit(&group->local->first_left, memory_order_relaxed);
}

static void local_release(oh_local *local) {
    pthread_cond_destroy(&local->changed);
    pthread_mutex_destroy(&local->mutex);
    free(local);
}

static void local_close(onehop_group *group, bool owner) {
    oh_local *local = group->local;
    if (!owner) { /* a forked child: the mutex may be held by a thread that is not here */
        if (--local->handles == 0) free(local);
        return;
    }
    pthread_mutex_lock(&local->mutex);
    if (atomic_load_explicit(&local->first_left, memory_order_relaxed) < 0)
        atomic_store_explicit(&local->first_left, group->rank, memory_order_relaxed);
    bool last = --local->handles == 0;
    pthread_cond_broadcast(&local->changed);
    pthread_mutex_unlock(&local->mutex);
    if (last) local_release(local);
}

const oh_group_kind oh_group_local = {local_allgather, local_pass_fds, local_lost_peer,
                                      local_close};

static onehop_result local_create(int world_size, oh_local **local_out) {
    oh_local *local = calloc(1, sizeof *local);
    if (!local) return oh_error(ONEHOP_ERR_MEMORY, "no memory for a local group");
    pthread_mutex_init(&local->mutex, NULL);
    oh_wait_condition_init(&local->changed);
    atomic_init(&local->first_left, -1);
    local->world_size = world_size;
    *local_out = local;
    return ONEHOP_OK;
}

static onehop_group *local_handle(oh_local *local, int rank, uint32_t timeout_ms) {
    onehop_group *group = calloc(1, sizeof *group);
    if (!group) return NULL;
    group->kind = &oh_group_local;
    group->rank = rank;
    group->world_size = local->world_size;
    group->timeout_ms = timeout_ms;
    group->process = oh_process();
    group->can_pass_fds = true;
    for (int i = 0; i < local->world_size; i++) group->same_process[i] = true;
    group->local = local;
    local->handles++;
    return group;
}

onehop_result onehop_group_open_local(int world_size, onehop_group **groups_out) {
    OH_NO_CANCEL;
    onehop_group *groups[ONEHOP_MAX_RANKS] = {NULL};
    uint32_t timeout_ms = 0;
    oh_local *local = NULL;
    onehop_result result = oh_log_check();
    if (result) return result;
    if (!groups_out)
        return oh_error(ONEHOP_ERR_NULL, "onehop_group_open_local: groups_out is NULL");
    if (world_size < 1 || world_size > ONEHOP_MAX_RANKS)
        return oh_error(ONEHOP_ERR_WORLD_SIZE, "world size is %d: expected 1 to %d", world_size,
                        ONEHOP_MAX_RANKS);
    result = oh_group_timeout(0, &timeout_ms);
    if (!result) result = local_create(world_size, &local);
    if (result) return result;
    for (int i = 0; i < world_size; i++) {
        groups[i] = local_handle(local, i, timeout_ms);
        if (groups[i]) continue;
        while (i--) free(groups[i]);
        local_release(local);
        return oh_error(ONEHOP_ERR_MEMORY, "no memory for a local group");
    }
    memcpy(groups_out, groups, (size_t)world_size * sizeof *groups);
    return ONEHOP_OK;
}
