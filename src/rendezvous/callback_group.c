/* A group set up through the caller's all-gather.
 *
 * The first round tells every rank of every other: version, place, host, network namespace, user.
 * All see the same bytes and so reach the same verdict. Ranks that can reach each other's abstract
 * sockets then build the ordinary mesh under a random name of rank 0's and need the callback no
 * more, except for one last round that makes a failure of the mesh a failure of all. Ranks that
 * cannot go on through the callback: no deadline but its own, no sight of a lost peer, and
 * descriptors only with the caller's second function. */
#include "rendezvous/group.h"

#include "base/descriptor.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define OH_INTRO_MAGIC 0x31706f48656e4f21ull

/* What ranks send in the first round. Size and the place of the first five members are fixed for
 * all versions, so that versions can tell each other apart. */
typedef struct oh_intro {
    uint64_t magic;
    uint32_t major, minor;
    int32_t world_size, rank;
    uint32_t user;     /* effective user id */
    uint32_t has_pass; /* pass_fd is given */
    uint64_t netns;
    oh_id128 boot, process;
    oh_id128 name; /* random; rank 0's names the mesh */
    oh_opinion opinion;
    uint8_t reserved[168];
} oh_intro;

_Static_assert(sizeof(oh_intro) == 768, "the first round has a fixed size");

static onehop_result call(onehop_group *group, const void *send, void *recv, size_t bytes) {
    int status = group->user_allgather(group->user, send, recv, bytes);
    if (status)
        return oh_error(ONEHOP_ERR_SYSTEM, "the caller's all-gather of %zu bytes returned %d",
                        bytes, status);
    return ONEHOP_OK;
}

static void introduce(const onehop_group *group, onehop_result mine, oh_intro *intro_out) {
    memset(intro_out, 0, sizeof *intro_out);
    intro_out->magic = OH_INTRO_MAGIC;
    intro_out->major = ONEHOP_VERSION_MAJOR;
    intro_out->minor = ONEHOP_VERSION_MINOR;
    intro_out->world_size = group->world_size;
    intro_out->rank = group->rank;
    intro_out->user = (uint32_t)geteuid();
    intro_out->has_pass = group->user_pass_fd != NULL;
    intro_out->netns = oh_identity_netns();
    intro_out->boot = oh_identity_boot();
    onehop_result result = mine;
    if (!result) result = oh_process_id(&intro_out->process);
    if (!result) result = oh_random(&intro_out->name, sizeof intro_out->name);
    oh_opinion_make(&intro_out->opinion, result);
}

static onehop_result compare(const oh_intro *intros, int i) {
    const oh_intro *first = &intros[0], *other = &intros[i];
    if (other->magic != OH_INTRO_MAGIC || other->rank != i)
        return oh_error(
            ONEHOP_ERR_DISAGREEMENT,
            "entry %d of the caller's all-gather is not from rank %d of onehop: it must "
            "hold the ranks' bytes in rank order",
            i, i);
    if (other->major != first->major || other->minor != first->minor ||
        other->world_size != first->world_size)
        return oh_error(
            ONEHOP_ERR_DISAGREEMENT,
            "rank 0 was set up with onehop %u.%u and world size %d, rank %d with onehop "
            "%u.%u and world size %d",
            first->major, first->minor, first->world_size, i, other->major, other->minor,
            other->world_size);
    if (!oh_id128_equal(first->boot, other->boot))
        return oh_error(ONEHOP_ERR_SEVERAL_HOSTS,
                        "rank 0 and rank %d are on different hosts, and onehop serves the ranks of "
                        "one host",
                        i);
    return ONEHOP_OK;
}

static onehop_result judge(onehop_group *group, const oh_intro *intros) {
    for (int i = 0; i < group->world_size; i++) {
        onehop_result result = compare(intros, i);
        if (result) return result;
        group->opinions[i] = intros[i].opinion;
    }
    return oh_opinion_judge(group->opinions, group->world_size, group->rank);
}

/* Do the ranks share a namespace of socket names, and a user? */
static bool sockets_reach(const onehop_group *group, const oh_intro *intros) {
    bool reach = intros[0].netns != 0;
    for (int i = 1; i < group->world_size; i++)
        reach = reach && intros[i].netns == intros[0].netns && intros[i].user == intros[0].user;
    return reach;
}

static onehop_result build_mesh(onehop_group *group, const oh_intro *intros) {
    oh_opinion own, *all = group->opinions;
    const oh_mesh_plan plan = {.rank = group->rank,
                               .world_size = group->world_size,
                               .name = intros[0].name,
                               .label = "(set up through a callback)",
                               .timeout_ms = group->timeout_ms};
    onehop_result mine = oh_mesh_open(&plan, &group->mesh);
    oh_opinion_make(&own, mine);
    onehop_result result = call(group, &own, all, sizeof own);
    if (!result) result = oh_opinion_judge(all, group->world_size, group->rank);
    if (result) {
        if (!mine) oh_mesh_close(&group->mesh, true);
        return result;
    }
    group->kind = &oh_group_mesh;
    group->can_pass_fds = true;
    return ONEHOP_OK;
}

static onehop_result open_introduced(onehop_group *group, const oh_intro *all) {
    onehop_result result = judge(group, all);
    if (result) return result;
    bool all_pass = true;
    for (int i = 0; i < group->world_size; i++) {
        group->same_process[i] = oh_id128_equal(all[i].process, all[group->rank].process);
        all_pass = all_pass && all[i].has_pass;
    }
    if (sockets_reach(group, all)) return build_mesh(group, all);
    oh_log(ONEHOP_LOG_INFO,
           "rank %d: ranks are in several network namespaces or of several users: "
           "the group goes through the callback, a lost peer shows by the deadline",
           group->rank);
    group->kind = &oh_group_callback;
    group->can_pass_fds = all_pass;
    return ONEHOP_OK;
}

onehop_result oh_group_open_callback(onehop_group *group, onehop_result mine) {
    oh_intro own, *all = malloc(ONEHOP_MAX_RANKS * sizeof *all); /* 12 KiB */
    if (!all) return oh_error(ONEHOP_ERR_MEMORY, "no memory to open a group");
    introduce(group, mine, &own);
    onehop_result result = call(group, &own, all, sizeof own);
    if (!result) result = open_introduced(group, all);
    free(all);
    return result;
}

/* ---- exchanges without a mesh ---------------------------------------------------------------- */

static onehop_result callback_allgather(onehop_group *group, const void *send, void *recv,
                                        size_t bytes) {
    /* The caller's function may rely on equal sizes, so sizes go first. */
    uint64_t size = bytes, sizes[ONEHOP_MAX_RANKS];
    onehop_result result = call(group, &size, sizes, sizeof size);
    for (int i = 1; !result && i < group->world_size; i++)
        if (sizes[i] != sizes[0])
            result = oh_error(ONEHOP_ERR_DISAGREEMENT, "rank 0 exchanges %llu bytes, rank %d %llu",
                              (unsigned long long)sizes[0], i, (unsigned long long)sizes[i]);
    if (result || !bytes) return result;
    return call(group, send, recv, bytes);
}

static onehop_result callback_pass_fds(onehop_group *group, const int *fds, int count, int *fds_out,
                                       onehop_result *mine) {
    int64_t counts[ONEHOP_MAX_RANKS], own = count;
    onehop_result result = callback_allgather(group, &own, counts, sizeof own);
    for (int i = 0; !result && i < group->world_size; i++)
        if (counts[i] != counts[0])
            result =
                oh_error(ONEHOP_ERR_DISAGREEMENT, "rank 0 passes %lld descriptors, rank %d %lld",
                         (long long)counts[0], i, (long long)counts[i]);
    for (int k = 0; !result && k < count; k++) {
        int got[ONEHOP_MAX_RANKS];
        for (int i = 0; i < group->world_size; i++) got[i] = -1;
        int status = group->user_pass_fd(group->user, fds[k], got);
        if (status) *mine = oh_error(ONEHOP_ERR_SYSTEM, "the caller's pass_fd returned %d", status);
        for (int i = 0; i < group->world_size; i++) {
            if (got[i] < 0 || status) continue;
            if (i == group->rank)
                close(got[i]);
            else if ((got[i] = oh_fd_high(got[i])) < 0 || fcntl(got[i], F_SETFD, FD_CLOEXEC) < 0)
                *mine = oh_error_errno(ONEHOP_ERR_SYSTEM, errno,
                                       "the caller's pass_fd gave %d for rank %d", got[i], i);
            else
                fds_out[i * count + k] = got[i];
        }
    }
    return result;
}

static int callback_lost_peer(onehop_group *group) {
    (void)group;
    return -1;
}

static void callback_close(onehop_group *group, bool owner) {
    (void)group, (void)owner;
}

const oh_group_kind oh_group_callback = {callback_allgather, callback_pass_fds, callback_lost_peer,
                                         callback_close};
