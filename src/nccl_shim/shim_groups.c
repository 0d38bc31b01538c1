/* Groups. NCCL fuses what lies between ncclGroupStart and the outermost ncclGroupEnd, and its calls
 * may wait for each other there; so a group goes to one of the two libraries as a whole. What
 * onehop could take is kept back: if it is the only call when the group ends, onehop takes it;
 * whatever comes beside it opens a group of the real library, to which all of them go, in order.
 * PyTorch puts single collectives into a group.
 *
 * A group whose content differs from rank to rank (one rank's holds a single all-reduce, another's
 * the same and a send) would go both ways: programs that do this set ONEHOP_NCCL_GROUPS=0 on all
 * ranks, and what lies in groups is NCCL's. */
#include "nccl_shim/shim.h"

#include <stdlib.h>
#include <string.h>

typedef struct made_later {
    oh_nccl_comm *comm;
    bool blocking;
    oh_shim_roll roll;
} made_later;

typedef struct group {
    unsigned depth;
    bool open; /* the real library's */
    bool kept; /* one call is kept back */
    oh_shim_call call;
    int made_count, made_room;
    made_later *made; /* of this thread, kept for its next group */
} group;

static __thread group current;

bool oh_shim_grouped(void) {
    return current.depth > 0;
}

int oh_shim_group_open(void) {
    group *g = &current;
    int result = OH_NCCL_SUCCESS;
    if (!g->depth) return result;
    if (!g->open) OH_REAL_CALL(result, oh_nccl_void_fn, ncclGroupStart);
    if (result) return oh_shim_answered(result);
    g->open = true;
    if (!g->kept) return result;
    g->kept = false;
    oh_shim_count_forwarded(OH_SHIM_GROUP);
    return oh_shim_forward(&g->call);
}

int oh_shim_group_add(const oh_shim_call *call, oh_shim_reason reason) {
    group *g = &current;
    const bool ours = reason == OH_SHIM_TAKEN;
    if (ours && !g->open && !g->kept && oh_shim_settings_get()->groups) {
        g->call = *call;
        g->kept = true;
        return OH_NCCL_SUCCESS;
    }
    const int result = oh_shim_group_open();
    if (result) return result;
    oh_shim_count_forwarded(ours ? OH_SHIM_GROUP : reason);
    return oh_shim_forward(call);
}

bool oh_shim_group_made(oh_nccl_comm *comm, bool blocking, const oh_shim_roll *roll) {
    group *g = &current;
    if (g->made_count == g->made_room) {
        const int room = g->made_room ? 2 * g->made_room : 16;
        made_later *more = realloc(g->made, (size_t)room * sizeof *more);
        if (!more) return false;
        g->made = more;
        g->made_room = room;
    }
    g->made[g->made_count++] = (made_later){comm, blocking, *roll};
    return true;
}

static void set_up_made(group *g, int result) {
    oh_shim_new *made = g->made_count ? calloc((size_t)g->made_count, sizeof *made) : NULL;
    int count = 0;
    for (int i = 0; i < g->made_count; i++) {
        made_later *m = &g->made[i];
        if (made && !result && *m->comm)
            made[count++] = (oh_shim_new){*m->comm, m->blocking, m->roll};
        else
            oh_shim_roll_refuse(&m->roll);
    }
    g->made_count = 0;
    if (count) oh_shim_set_up(made, count);
    free(made);
}

OH_EXPORT int ncclGroupStart(void);
OH_EXPORT int ncclGroupEnd(void);

int ncclGroupStart(void) {
    int result = OH_NCCL_SUCCESS;
    if (oh_shim_inside(__builtin_return_address(0)))
        OH_REAL_CALL(result, oh_nccl_void_fn, ncclGroupStart);
    else
        current.depth++;
    return result;
}
OH_PNCCL(ncclGroupStart);

int ncclGroupEnd(void) {
    group *g = &current;
    int result = OH_NCCL_SUCCESS;
    if (oh_shim_inside(__builtin_return_address(0)) || !g->depth) {
        OH_REAL_CALL(result, oh_nccl_void_fn, ncclGroupEnd);
        return oh_shim_answered(result);
    }
    if (--g->depth) return result;
    const bool open = g->open, kept = g->kept;
    g->open = g->kept = false;
    if (open) OH_REAL_CALL(result, oh_nccl_void_fn, ncclGroupEnd);
    if (g->made_count) set_up_made(g, result);
    if (!kept) return open ? oh_shim_answered(result) : result;
    return oh_shim_run(&g->call);
}
OH_PNCCL(ncclGroupEnd);

/* Ends the group as ncclGroupEnd does, and launches nothing: what is kept back is not onehop's. */
typedef int (*simulate_fn)(void *);
OH_EXPORT int ncclGroupSimulateEnd(void *info);
int ncclGroupSimulateEnd(void *info) {
    group *g = &current;
    int result = OH_NCCL_SUCCESS;
    const bool inside = oh_shim_inside(__builtin_return_address(0));
    if (!inside && g->depth > 1) {
        g->depth--;
        return result;
    }
    if (!inside) {
        result = oh_shim_group_open();
        g->depth = 0;
        g->open = g->kept = false;
        set_up_made(g, OH_NCCL_USAGE);
    }
    int ended;
    OH_REAL_CALL(ended, simulate_fn, ncclGroupSimulateEnd, info);
    return result ? result : ended;
}
OH_PNCCL(ncclGroupSimulateEnd);
