/* Groups as the caller sees them: open, close, and the exchanges, which check arguments and hand
 * over to the kind of the group. */
#define ONEHOP_EXPERIMENTAL
#include "rendezvous/group.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- kinds alone and mesh -------------------------------------------------------------------- */

static onehop_result alone_allgather(onehop_group *group, const void *send, void *recv,
                                     size_t bytes) {
    (void)group;
    if (bytes) memmove(recv, send, bytes);
    return ONEHOP_OK;
}

static onehop_result alone_pass_fds(onehop_group *group, const int *fds, int count, int *fds_out,
                                    onehop_result *mine) {
    (void)group, (void)fds, (void)count, (void)fds_out, (void)mine;
    return ONEHOP_OK;
}

static int alone_lost_peer(onehop_group *group) {
    (void)group;
    return -1;
}

static void alone_close(onehop_group *group, bool owner) {
    (void)group, (void)owner;
}

static const oh_group_kind kind_alone = {alone_allgather, alone_pass_fds, alone_lost_peer,
                                         alone_close};

static onehop_result mesh_allgather(onehop_group *group, const void *send, void *recv,
                                    size_t bytes) {
    const oh_exchange exchange = {
        .send = send, .recv = recv, .bytes = bytes, .timeout_ms = group->timeout_ms};
    return oh_mesh_exchange(&group->mesh, &exchange);
}

static onehop_result mesh_pass_fds(onehop_group *group, const int *fds, int count, int *fds_out,
                                   onehop_result *mine) {
    const oh_exchange exchange = {.fds = fds,
                                  .count = count,
                                  .fds_out = fds_out,
                                  .mine_out = mine,
                                  .timeout_ms = group->timeout_ms};
    return oh_mesh_exchange(&group->mesh, &exchange);
}

static int mesh_lost_peer(onehop_group *group) {
    return oh_mesh_lost_peer(&group->mesh);
}

static void mesh_close(onehop_group *group, bool owner) {
    oh_mesh_close(&group->mesh, owner);
}

const oh_group_kind oh_group_mesh = {mesh_allgather, mesh_pass_fds, mesh_lost_peer, mesh_close};

/* ---- open and close -------------------------------------------------------------------------- */

static oh_mesh_plan mesh_plan_of(const oh_group_plan *plan) {
    return (oh_mesh_plan){.rank = plan->rank,
                          .world_size = plan->world_size,
                          .name = plan->name,
                          .job = plan->job,
                          .guesses = !(plan->job.word[0] | plan->job.word[1]),
                          .replayed = plan->secret,
                          .label = plan->label,
                          .timeout_ms = plan->timeout_ms};
}

/* Without a group: ranks that can be met by name hear why. */
static onehop_result refuse(const oh_group_plan *plan, onehop_result mine) {
    const oh_mesh_plan mesh_plan = mesh_plan_of(plan);
    return plan->allgather || plan->world_size == 1 ? mine : oh_mesh_refuse(&mesh_plan, mine);
}

static onehop_result open_by_name(onehop_group *group, const oh_group_plan *plan,
                                  onehop_result mine) {
    const oh_mesh_plan mesh_plan = mesh_plan_of(plan);
    if (mine) return oh_mesh_refuse(&mesh_plan, mine);
    onehop_result result = oh_mesh_open(&mesh_plan, &group->mesh);
    if (result) return result;
    group->kind = &oh_group_mesh;
    group->can_pass_fds = true;
    for (int i = 0; i < plan->world_size; i++)
        group->same_process[i] =
            oh_id128_equal(group->mesh.processes[i], group->mesh.processes[plan->rank]);
    return ONEHOP_OK;
}

/* A rank that knows its place and fails by itself (`mine`) tells the others. */
static onehop_result open_planned(onehop_group *group, const oh_group_plan *plan,
                                  onehop_result mine) {
    group->rank = plan->rank;
    group->world_size = plan->world_size;
    group->timeout_ms = plan->timeout_ms;
    group->process = oh_process();
    group->user_allgather = plan->allgather;
    group->user_pass_fd = plan->pass_fd;
    group->user = plan->user;
    if (plan->world_size == 1) {
        if (mine) return mine;
        group->kind = &kind_alone;
        group->can_pass_fds = group->same_process[0] = true;
        return ONEHOP_OK;
    }
    return plan->allgather ? oh_group_open_callback(group, mine) : open_by_name(group, plan, mine);
}

onehop_result onehop_group_open(const onehop_group_config *config, onehop_group **group_out) {
    OH_NO_CANCEL;
    oh_group_plan plan;
    int saved = errno;
    if (!group_out) return oh_error(ONEHOP_ERR_NULL, "onehop_group_open: group_out is NULL");
    onehop_result result = oh_group_plan_make(config, &plan);
    if (result) return result;
    onehop_result mine = oh_log_check();
    onehop_group *group = calloc(1, sizeof *group);
    if (!group) mine = oh_error(ONEHOP_ERR_MEMORY, "onehop_group_open: no memory for a group");
    result = group ? open_planned(group, &plan, mine) : refuse(&plan, mine);
    if (result) {
        free(group);
        return result;
    }
    *group_out = group;
    errno = saved;
    return ONEHOP_OK;
}

void onehop_group_close(onehop_group *group) {
    OH_NO_CANCEL;
    if (!group) return;
    int saved = errno;
    group->kind->close(group, oh_process_is(group->process));
    free(group);
    errno = saved;
}

int onehop_group_rank(const onehop_group *group) {
    return group ? group->rank : -1;
}

int onehop_group_size(const onehop_group *group) {
    return group ? group->world_size : 0;
}

/* ---- exchanges ------------------------------------------------------------------------------- */

static onehop_result check_usable(const onehop_group *group) {
    if (!group) return oh_error(ONEHOP_ERR_NULL, "exchange: group is NULL");
    if (!oh_process_is(group->process)) return oh_process_refuse("group");
    return group->broken ? oh_error(group->broken, "%s", group->broken_text) : ONEHOP_OK;
}

static onehop_result remember_failure(onehop_group *group, onehop_result result) {
    if (result) {
        group->broken = result;
        snprintf(group->broken_text, sizeof group->broken_text, "%s", onehop_last_error());
    }
    return result;
}

onehop_result oh_rendezvous_allgather(onehop_group *group, const void *send, void *recv,
                                      size_t bytes) {
    OH_NO_CANCEL;
    int saved = errno;
    onehop_result result = check_usable(group);
    if (result) return result;
    if (bytes > OH_MAX_BLOB)
        return oh_error(ONEHOP_ERR_ARGUMENT, "all-gather of %zu bytes: at most %zu", bytes,
                        OH_MAX_BLOB);
    if (bytes && (!send || !recv))
        return oh_error(ONEHOP_ERR_NULL, "all-gather: send or recv is NULL");
    result = remember_failure(group, group->kind->allgather(group, send, recv, bytes));
    if (!result) errno = saved;
    return result;
}

static void close_all(int *fds, int count) {
    for (int i = 0; i < count; i++) {
        if (fds[i] >= 0) close(fds[i]);
        fds[i] = -1;
    }
}

/* A bad descriptor must not leave the peers waiting: this rank then gives none and fails with
 * all. */
static onehop_result check_fds(const int *fds, int count) {
    for (int i = 0; i < count; i++) {
        if (fds[i] == -1 || (fds[i] >= 0 && fcntl(fds[i], F_GETFD) >= 0)) continue;
        if (fds[i] >= 0 && errno != EBADF)
            return oh_error_errno(ONEHOP_ERR_SYSTEM, errno, "cannot look at descriptor %d", fds[i]);
        return oh_error(ONEHOP_ERR_ARGUMENT, "%d, number %d of %d, is no open descriptor", fds[i],
                        i, count);
    }
    return ONEHOP_OK;
}

onehop_result oh_rendezvous_pass_fds(onehop_group *group, const int *fds, int count, int *fds_out) {
    int saved = errno;
    int none[OH_MAX_FDS];
    onehop_result result = check_usable(group);
    if (result) return result;
    if (count < 1 || count > OH_MAX_FDS)
        return oh_error(ONEHOP_ERR_ARGUMENT, "%d descriptors: expected 1 to %d", count, OH_MAX_FDS);
    if (!fds || !fds_out)
        return oh_error(ONEHOP_ERR_NULL, "passing descriptors: %s is NULL",
                        fds ? "fds_out" : "fds");
    if (!group->can_pass_fds)
        return oh_error(ONEHOP_ERR_UNSUPPORTED,
                        "the ranks of this group share no network namespace "
                        "or user and no pass_fd function was given");
    for (int i = 0; i < OH_MAX_FDS; i++) none[i] = -1;
    for (int i = 0; i < group->world_size * count; i++) fds_out[i] = -1;
    onehop_result mine = check_fds(fds, count);
    result = remember_failure(
        group, group->kind->pass_fds(group, mine ? none : fds, count, fds_out, &mine));
    if (!result) result = oh_rendezvous_agree(group, mine);
    if (result)
        close_all(fds_out, group->world_size * count);
    else
        errno = saved;
    return result;
}

int oh_rendezvous_lost_peer(onehop_group *group) {
    OH_NO_CANCEL;
    int saved = errno;
    int lost = group->kind->lost_peer(group);
    errno = saved;
    return lost;
}

void oh_rendezvous_hint_lost(onehop_group *group, int culprit) {
    int saved = errno;
    if (group->kind == &oh_group_mesh && oh_process_is(group->process))
        oh_mesh_hint(&group->mesh, culprit);
    errno = saved;
}

bool oh_rendezvous_same_process(const onehop_group *group, int rank) {
    return rank >= 0 && rank < group->world_size && group->same_process[rank];
}

bool oh_rendezvous_can_pass_fds(const onehop_group *group) {
    return group->can_pass_fds;
}

void oh_rendezvous_set_timeout_ms(onehop_group *group, uint32_t timeout_ms) {
    group->timeout_ms = timeout_ms;
}

onehop_result onehop_group_allgather(onehop_group *group, const void *send, void *recv,
                                     size_t bytes) {
    return oh_rendezvous_allgather(group, send, recv, bytes);
}

onehop_result onehop_group_barrier(onehop_group *group) {
    return oh_rendezvous_allgather(group, NULL, NULL, 0);
}

onehop_result onehop_group_shrink(onehop_group *group, const int *lost, int count,
                                  onehop_group **group_out) {
    (void)lost, (void)count;
    if (!group || !group_out)
        return oh_error(ONEHOP_ERR_NULL, "onehop_group_shrink: %s is NULL",
                        group ? "group_out" : "group");
    if (!oh_process_is(group->process)) return oh_process_refuse("group");
    return oh_error(
        ONEHOP_ERR_UNSUPPORTED,
        "this version cannot shrink a group: close it and open a new one, under another "
        "name, with the ranks that are left");
}
