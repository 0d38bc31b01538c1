/* What the shim knows of communicators, by their address: a table with open places, read without a
 * lock. A communicator is not used while it is destroyed, which is NCCL's rule too; but it may be
 * aborted beside a call, so a context is counted while it is used, and entries are never freed. */
#include "nccl_shim/shim.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define PLACES 4096
#define GONE   ((oh_nccl_comm)1)

/* How often the end of a call in another thread is looked for, and after how many looks it is
 * ended. */
#define WAIT_US     100
#define ABORT_WAITS 500
/* onehop_abort ends calls within 100 ms. */
#define ABORT_US 150000

typedef struct place {
    oh_nccl_comm comm;
    oh_shim_state *state;
} place;

static place table[PLACES];
static unsigned used; /* places that are not empty, gone ones too */
static oh_shim_state *spare;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
OH_RESET_IN_CHILD(lock)

static unsigned start_of(oh_nccl_comm comm) {
    return (unsigned)(((uintptr_t)comm >> 4) * 0x9e3779b97f4a7c15ull >> 52) % PLACES;
}

static place *place_of(oh_nccl_comm comm) {
    for (unsigned i = 0, at = start_of(comm); i < PLACES; i++, at = (at + 1) % PLACES) {
        /* Pairs with the release in oh_shim_add: the state is there. */
        const oh_nccl_comm found = __atomic_load_n(&table[at].comm, __ATOMIC_ACQUIRE);
        if (found == comm) return &table[at];
        if (!found) return NULL;
    }
    return NULL;
}

oh_shim_state *oh_shim_find(oh_nccl_comm comm) {
    const place *found = comm ? place_of(comm) : NULL;
    return found ? __atomic_load_n(&found->state, __ATOMIC_ACQUIRE) : NULL;
}

/* Under `lock`. */
static place *free_place(oh_nccl_comm comm) {
    unsigned at = start_of(comm);
    while (table[at].comm && table[at].comm != GONE) at = (at + 1) % PLACES;
    if (!table[at].comm) {
        if (used == PLACES * 3 / 4) return NULL;
        used++;
    }
    return &table[at];
}

oh_shim_state *oh_shim_add(oh_nccl_comm comm) {
    oh_shim_state *older = oh_shim_find(comm); /* it went in a way that the shim did not see */
    if (older) oh_shim_end(older, true);
    oh_shim_remove(comm);
    pthread_mutex_lock(&lock);
    oh_shim_state *state = spare;
    if (state)
        spare = state->next_free;
    else
        state = calloc(1, sizeof *state);
    place *free_one = state ? free_place(comm) : NULL;
    if (free_one) {
        /* `users` stays: a call on the entry's last communicator may still have to leave. */
        state->rank = state->ranks = 0;
        state->blocking = state->captured = false;
        memset(&state->key, 0, sizeof state->key);
        state->children = 0;
        memset(state->choices, 0, sizeof state->choices);
        __atomic_store_n(&state->comm, comm, __ATOMIC_SEQ_CST);
        __atomic_store_n(&free_one->state, state, __ATOMIC_RELAXED);
        __atomic_store_n(&free_one->comm, comm, __ATOMIC_RELEASE);
    } else if (state) {
        state->next_free = spare;
        spare = state;
    }
    pthread_mutex_unlock(&lock);
    return free_one ? state : NULL;
}

/* Under `lock`: places of gone ones before an empty one are empty, too; nobody looks beyond it. */
static void sweep(unsigned at) {
    if (table[(at + 1) % PLACES].comm) return;
    for (; table[at].comm == GONE; at = (at + PLACES - 1) % PLACES) {
        __atomic_store_n(&table[at].comm, NULL, __ATOMIC_RELEASE);
        used--;
    }
}

void oh_shim_remove(oh_nccl_comm comm) {
    if (!comm) return;
    pthread_mutex_lock(&lock);
    place *found = place_of(comm);
    if (found) {
        __atomic_store_n(&found->state->comm, NULL, __ATOMIC_SEQ_CST);
        found->state->next_free = spare;
        spare = found->state;
        __atomic_store_n(&found->comm, GONE, __ATOMIC_RELEASE);
        sweep((unsigned)(found - table));
    }
    pthread_mutex_unlock(&lock);
}

/* ---- use ------------------------------------------------------------------------------------- */

onehop_context *oh_shim_enter(oh_shim_state *state, oh_nccl_comm comm) {
    /* Sequentially consistent, as the exchange in oh_shim_end: either that sees this user, or this
     * sees that the context is gone. The same holds of an entry that is removed and used again. */
    __atomic_fetch_add(&state->users, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&state->comm, __ATOMIC_SEQ_CST) != comm) return NULL;
    return __atomic_load_n(&state->context, __ATOMIC_SEQ_CST);
}

void oh_shim_leave(oh_shim_state *state) {
    __atomic_fetch_sub(&state->users, 1, __ATOMIC_RELEASE);
}

/* Called within waits of the destroy: what runs is given up. */
static int give_up(void *unused) {
    (void)unused;
    return 1;
}

/* What is over once a call in another thread has left. One that runs there, on the host device, is
 * ended when it does not leave by itself. */
static void wait_for_users(const oh_shim_state *state, onehop_context *context, bool abort) {
    for (int waits = 0; __atomic_load_n(&state->users, __ATOMIC_ACQUIRE); waits++) {
        if (abort && waits == ABORT_WAITS) (void)onehop_abort(context);
        oh_sleep_us(WAIT_US);
    }
}

/* An abort is this rank's own affair: its peers may still end the call that it has ended, which
 * onehop_abort would keep them from. So what is not in flight is left as by a destroy, and what is,
 * is given up by a wait hook. Replays of graphs cannot be waited for: they are aborted, on all
 * ranks. */
void oh_shim_end(oh_shim_state *state, bool abort) {
    onehop_context *context = __atomic_exchange_n(&state->context, NULL, __ATOMIC_SEQ_CST);
    if (!context) return;
    wait_for_users(state, context, abort);
    if (abort && state->captured) {
        (void)onehop_abort(context);
        oh_sleep_us(ABORT_US);
    }
    oh_shim_depth++;
    if (abort) onehop_set_wait_hook(give_up, NULL);
    onehop_destroy(context);
    if (abort) onehop_set_wait_hook(NULL, NULL);
    oh_shim_depth--;
}
