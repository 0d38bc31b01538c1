/* The ranks of a communicator as one thread sees them: those that it drives, and how it talks to
 * the rest. A rank in a process or a thread of its own drives itself and talks through a group. One
 * thread that drives all ranks talks to nobody. What all ranks do together is written once over
 * this, as steps that a rank does alone with exchanges between them.
 *
 * What ranks tell each other lies in tables with a place for each rank. Every rank here fills its
 * own place; the exchange brings the places of the others, so it does nothing if all are here. */
#ifndef OH_MEMBERS_H
#define OH_MEMBERS_H

#include "rendezvous/rendezvous.h"

typedef struct oh_members {
    onehop_group *group;             /* NULL: all ranks are here */
    onehop_context *const *contexts; /* of the ranks here, in order; NULL: nobody takes steps */
    int first, count;                /* ranks here */
    int world;
} oh_members;

/* One rank; `context` is where its pointer stands. */
oh_members oh_members_one(onehop_context *const *context);
/* All `n` ranks. */
oh_members oh_members_all(onehop_context *const *contexts, int n);

/* What one rank does alone. */
typedef onehop_result (*oh_step)(onehop_context *context, void *state);

/* Takes a step on each rank here, up to the first that fails. */
onehop_result oh_members_run(const oh_members *m, oh_step step, void *state);
/* Collective: OK if all ranks bring OK, else one failure for all. */
onehop_result oh_members_agree(const oh_members *m, onehop_result mine);
/* Both: a step that succeeds on all ranks or fails on all. */
onehop_result oh_members_each(const oh_members *m, oh_step step, void *state);

/* Collective: table[rank] of `bytes` each. */
onehop_result oh_members_share(const oh_members *m, void *table, size_t bytes);

#define OH_MEMBERS_FDS 16 /* of each rank in one exchange, at most */

/* Collective: fds[rank * each + i], -1 for none. What ranks elsewhere gave arrives as new
 * descriptors; what was given to them is closed here. All that stand in the table afterwards, also
 * after a failure, are to be closed with oh_members_close_fds. */
onehop_result oh_members_pass_fds(const oh_members *m, int *fds, int each);
void oh_members_no_fds(const oh_members *m, int *fds, int each);
void oh_members_close_fds(const oh_members *m, int *fds, int each);

bool oh_members_share_process(const oh_members *m, int rank, int other);
/* Can descriptors be passed to all? */
bool oh_members_can_pass_fds(const oh_members *m);

#endif
