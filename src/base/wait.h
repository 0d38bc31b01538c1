/* How threads of the host wait.
 *
 * A wait is a loop: look, then rest. What all waits have in common is here: how long a rest may be,
 * what of the time counts toward the deadline, and when the thread's wait hook is called.
 *
 * Pauses. A stopped process (SIGSTOP, a debugger, a suspended machine) does not look, and neither
 * do the peers that were stopped with it. Of the time between two looks only OH_MAX_LOOK_NS counts,
 * so that such a pause does not make a peer late. A busy machine makes looks rare too: there a
 * deadline comes late, but each look brings it nearer. */
#ifndef OH_WAIT_H
#define OH_WAIT_H

#include "base/base.h"

#include <pthread.h>

/* Longest rest between two looks. It is what makes a wait hear its hook in time. */
#define OH_LOOK_MS 50

/* Longer than any rest and than the usual turn of other processes on a busy core. */
#define OH_MAX_LOOK_NS 100000000ull

/* How much of the time since the last look does not count. *looked_ns becomes `now_ns`. */
uint64_t oh_wait_pause_ns(uint64_t *looked_ns, uint64_t now_ns);

/* A rest for poll(): what is left, rounded up so that the last one does not end early; OH_LOOK_MS
 * at most. */
int oh_wait_poll_ms(uint64_t left_ns);

/* A rest of a wait that polls memory and has waited so long: 1/128 of that, so that a late peer
 * costs hardly more than its lateness, from 20 us to 1 ms. */
unsigned oh_wait_rest_us(uint64_t waited_ns);

/* A rest on a condition, with its mutex held: until it is signalled, OH_LOOK_MS at most and not
 * beyond `end_ns`. The condition must be one of oh_wait_condition_init, whose clock is
 * oh_clock_ns. */
void oh_wait_condition_init(pthread_cond_t *condition);
void oh_wait_rest_on(pthread_cond_t *condition, pthread_mutex_t *held, uint64_t end_ns);

/* Calls the thread's hook (onehop_set_wait_hook) if it was not called of late. True: the wait must
 * end. To be asked without a lock, for the hook is the caller's code. Keeps errno. */
bool oh_wait_interrupted(void);

/* The same with a mutex held, which is let go while the hook runs. */
bool oh_wait_interrupted_with(pthread_mutex_t *held);

/* Does this thread have a hook? */
bool oh_wait_has_hook(void);

/* The error of a wait that its hook has ended; `what` was being waited for. */
onehop_result oh_wait_ended(const char *what);

#endif
