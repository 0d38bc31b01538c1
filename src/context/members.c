/* See members.h. */
#include "context/members.h"

#include "context/context.h"

#include <string.h>
#include <unistd.h>

oh_members oh_members_one(onehop_context *const *context) {
    const onehop_context *ctx = *context;
    onehop_group *group = ctx->world > 1 ? ctx->group : NULL;
    return (oh_members){group, context, ctx->rank, 1, ctx->world};
}

oh_members oh_members_all(onehop_context *const *contexts, int n) {
    return (oh_members){NULL, contexts, 0, n, n};
}

onehop_result oh_members_run(const oh_members *m, oh_step step, void *state) {
    onehop_result result = ONEHOP_OK;
    for (int i = 0; i < m->count && !result; i++) result = step(m->contexts[i], state);
    return result;
}

onehop_result oh_members_agree(const oh_members *m, onehop_result mine) {
    return m->group ? oh_rendezvous_agree(m->group, mine) : mine;
}

onehop_result oh_members_each(const oh_members *m, oh_step step, void *state) {
    return oh_members_agree(m, oh_members_run(m, step, state));
}

onehop_result oh_members_share(const oh_members *m, void *table, size_t bytes) {
    const char *own = (char *)table + (size_t)m->first * bytes;
    return m->group ? oh_rendezvous_allgather(m->group, own, table, bytes) : ONEHOP_OK;
}

static void close_fds(int *fds, int count) {
    for (int i = 0; i < count; i++) {
        if (fds[i] >= 0) close(fds[i]);
        fds[i] = -1;
    }
}

onehop_result oh_members_pass_fds(const oh_members *m, int *fds, int each) {
    int own[OH_MEMBERS_FDS] = {0};
    if (!m->group) return ONEHOP_OK;
    for (int i = 0; i < each; i++) {
        own[i] = fds[m->first * each + i];
        fds[m->first * each + i] = -1;
    }
    onehop_result result = oh_rendezvous_pass_fds(m->group, own, each, fds);
    close_fds(own, each);
    return result;
}

void oh_members_no_fds(const oh_members *m, int *fds, int each) {
    for (int i = 0; i < m->world * each; i++) fds[i] = -1;
}

void oh_members_close_fds(const oh_members *m, int *fds, int each) {
    close_fds(fds, m->world * each);
}

bool oh_members_share_process(const oh_members *m, int rank, int other) {
    return !m->group || oh_rendezvous_same_process(m->group, rank) ==
                            oh_rendezvous_same_process(m->group, other);
}

bool oh_members_can_pass_fds(const oh_members *m) {
    return !m->group || oh_rendezvous_can_pass_fds(m->group);
}
