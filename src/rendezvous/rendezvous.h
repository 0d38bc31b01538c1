/* How ranks find each other and exchange small things: struct onehop_group.
 *
 * Three ways to open, one struct: a mesh of Unix sockets set up by name, the same mesh set up
 * through a caller's all-gather, and ranks of one process that share memory under a mutex. Once
 * open, all three offer the functions below; only the kind with a callback may lack the mesh (ranks
 * in other network namespaces or of other users), and then it sees no loss of a peer and passes
 * descriptors only if the caller's function does.
 *
 * A group belongs to the process that opened it: a forked child may only close its copy (STATE).
 *
 * After an exchange failed with anything but NULL or ARGUMENT the group is broken: ranks no longer
 * agree on what is in flight. Later exchanges return the same error at once; close it. The rank
 * that fails tells its peers why before it returns, and they fail with its words. */
#ifndef OH_RENDEZVOUS_H
#define OH_RENDEZVOUS_H

#include "base/base.h"

/* Collective all-gather; `recv` holds world_size * bytes, `bytes` is at most 16 MiB; 0 is a
 * barrier. `send` may lie in `recv` at its own place. Ends at the group's timeout with
 * MISSING_PEER, or with PEER_LOST if a peer's process ended or closed its group and data of it is
 * missing; data sent before that still arrives. DISAGREEMENT if ranks call with different sizes. A
 * callback cannot be interrupted: a group without a mesh has the timeout of its callback. */
onehop_result oh_rendezvous_allgather(onehop_group *group, const void *send, void *recv,
                                      size_t bytes);

/* Collective. Each rank gives `count` descriptors (-1: none; count equal on all ranks, at most 64)
 * and receives new close-on-exec descriptors in fds_out[rank * count + i]; -1 for own and for none
 * given. Succeeds on all ranks or fails on all; on failure no descriptor stays open and fds_out is
 * all -1. Within one process descriptors are dup'ed. UNSUPPORTED if !oh_rendezvous_can_pass_fds. */
onehop_result oh_rendezvous_pass_fds(onehop_group *group, const int *fds, int count, int *fds_out);

/* Collective: OK if every rank passes OK; else every rank gets the lowest failing rank's result and
 * sentence (its onehop_last_error), prefixed "rank N: " on the others. The idiom "succeeds on all
 * ranks or fails on all". */
onehop_result oh_rendezvous_agree(onehop_group *group, onehop_result mine);

/* True if `rank` is in this process (compares a random 128-bit id, never a pid). */
bool oh_rendezvous_same_process(const onehop_group *group, int rank);

/* Can descriptors be passed to all ranks? The same on all ranks. */
bool oh_rendezvous_can_pass_fds(const onehop_group *group);

/* If any rank is gone: the one that peers have named as the cause, else the lowest whose process
 * has ended without closing its group, else the lowest that has closed it (within one process: the
 * first); else -1. So a rank that leaves because it saw another die is not the one to blame. Never
 * blocks, costs one poll() of the mesh (nothing within one process), consumes nothing; any thread,
 * beside any call but close. */
int oh_rendezvous_lost_peer(onehop_group *group);

/* Tells the peers that this rank has seen the end of `culprit` outside of an exchange, so that they
 * blame that one if this one leaves too. Does nothing if the group does not see that end. Any
 * thread, beside any call but close. */
void oh_rendezvous_hint_lost(onehop_group *group, int culprit);

/* How long collective calls on the group wait; local, and not for use beside such a call. */
void oh_rendezvous_set_timeout_ms(onehop_group *group, uint32_t timeout_ms);

#endif
