/* Public symmetric memory: one allocation per rank, mapped by all. */
#include "context/members.h"
#include "device/device.h"

#include <stdlib.h>
#include <string.h>

struct onehop_symmetric {
    uint64_t process; /* that made it */
    oh_device *device;
    int rank, world;
    oh_mem buffers[ONEHOP_MAX_RANKS];
};

typedef struct offer {
    uint64_t bytes;
    uint32_t kinds; /* handle kinds that work there */
    oh_mem_handle handle;
} offer;

static onehop_result introduce(onehop_symmetric *s, onehop_device device, size_t bytes,
                               offer *mine) {
    oh_device_info info;
    if (bytes == 0) return oh_error(ONEHOP_ERR_ARGUMENT, "onehop_symmetric_alloc: bytes is 0");
    onehop_result result = oh_device_open(device, s->rank, &s->device);
    if (!result) result = s->device->ops->info(s->device, &info);
    if (result) return result;
    mine->bytes = bytes;
    mine->kinds = info.handle_kinds;
    return ONEHOP_OK;
}

static onehop_result allocate(onehop_symmetric *s, bool can_pass_fds, offer *all, int *fd_out) {
    uint32_t kinds = can_pass_fds ? OH_HANDLE_FD | OH_HANDLE_FABRIC : OH_HANDLE_FABRIC;
    for (int r = 0; r < s->world; r++) {
        kinds &= all[r].kinds;
        if (all[r].bytes != all[0].bytes)
            return oh_error(ONEHOP_ERR_DISAGREEMENT,
                            "onehop_symmetric_alloc: rank %d asks for %llu bytes, rank 0 for %llu",
                            r, (unsigned long long)all[r].bytes, (unsigned long long)all[0].bytes);
    }
    if (!kinds)
        return oh_error(ONEHOP_ERR_UNSUPPORTED,
                        "no way to share memory that works on all ranks was found");
    const uint32_t kind = kinds & OH_HANDLE_FD ? OH_HANDLE_FD : OH_HANDLE_FABRIC;
    oh_mem *own = &s->buffers[s->rank];
    onehop_result result = s->device->ops->mem_create(s->device, all[0].bytes, kind, own);
    if (!result) result = s->device->ops->mem_export(s->device, own, &all[s->rank].handle, fd_out);
    return result;
}

static onehop_result map_peers(onehop_symmetric *s, const offer *all, const int *fds) {
    for (int r = 0; r < s->world; r++) {
        if (r == s->rank) continue;
        onehop_result result =
            s->device->ops->mem_import(s->device, &all[r].handle, fds[r], &s->buffers[r]);
        if (result) return result;
        if (s->buffers[r].bytes < s->buffers[s->rank].bytes)
            return oh_error(ONEHOP_ERR_DISAGREEMENT,
                            "onehop_symmetric_alloc: rank %d offers %zu bytes, expected %zu", r,
                            s->buffers[r].bytes, s->buffers[s->rank].bytes);
    }
    return ONEHOP_OK;
}

static onehop_result build(onehop_symmetric *s, onehop_group *group, onehop_device device,
                           size_t bytes) {
    const oh_members m = {group, NULL, s->rank, 1, s->world};
    offer all[ONEHOP_MAX_RANKS];
    int fds[ONEHOP_MAX_RANKS];
    memset(all, 0, sizeof all);
    oh_members_no_fds(&m, fds, 1);
    onehop_result result = oh_members_agree(&m, introduce(s, device, bytes, &all[s->rank]));
    if (!result) result = oh_members_share(&m, all, sizeof all[0]);
    if (result) return result;
    result = allocate(s, oh_members_can_pass_fds(&m), all, &fds[s->rank]);
    result = oh_members_agree(&m, result);
    if (!result) result = oh_members_share(&m, all, sizeof all[0]);
    if (!result && all[0].handle.kind == OH_HANDLE_FD) result = oh_members_pass_fds(&m, fds, 1);
    if (!result) result = oh_members_agree(&m, map_peers(s, all, fds));
    oh_members_close_fds(&m, fds, 1);
    return result;
}

onehop_result onehop_symmetric_alloc(onehop_group *group, onehop_device device, size_t bytes,
                                     onehop_symmetric **symmetric_out) {
    OH_NO_CANCEL;
    if (!group || !symmetric_out)
        return oh_error(ONEHOP_ERR_NULL, "onehop_symmetric_alloc: %s is NULL",
                        group ? "symmetric_out" : "group");
    onehop_symmetric *s = calloc(1, sizeof *s);
    if (!s)
        return oh_rendezvous_agree(
            group, oh_error(ONEHOP_ERR_MEMORY, "onehop_symmetric_alloc: no memory"));
    s->process = oh_process();
    s->rank = onehop_group_rank(group);
    s->world = onehop_group_size(group);
    onehop_result result = build(s, group, device, bytes);
    if (result) {
        onehop_symmetric_free(s);
        return result;
    }
    *symmetric_out = s;
    return ONEHOP_OK;
}

void *onehop_symmetric_ptr(const onehop_symmetric *symmetric, int rank) {
    if (!symmetric || rank < 0 || rank >= symmetric->world) return NULL;
    if (!oh_process_is(symmetric->process)) return NULL;
    return symmetric->buffers[rank].ptr;
}

void onehop_symmetric_free(onehop_symmetric *symmetric) {
    OH_NO_CANCEL;
    if (!symmetric) return;
    if (symmetric->device) {
        for (int r = 0; r < symmetric->world; r++)
            symmetric->device->ops->mem_release(symmetric->device, &symmetric->buffers[r]);
        symmetric->device->ops->close(symmetric->device);
    }
    free(symmetric);
}
