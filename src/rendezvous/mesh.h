/* A full mesh of Unix sockets between the ranks of a group: one close-on-exec, non-blocking stream
 * socket per peer, in the abstract namespace, so nothing is on disk and nothing is left behind.
 *
 * Opening, per rank r (mesh_open.c drives it):
 *   1. bind and listen on the address of (group's name, r), a hash;
 *   2. connect to every lower rank, sending a hello; accept every higher rank; answer its hello;
 *   3. when all peers are known: close the listener, send READY to rank 0;
 *   4. rank 0, when all are ready, sends COMMIT to all; that is the moment the group exists.
 * So when an open returns success anywhere, nowhere a listener of that name is left, and the name
 * can be used again at once. And since one rank decides, success or failure is the same on all
 * ranks, also when deadlines expire at that moment; only the death of rank 0 between two COMMITs
 * can split it. A rank that fails before it is ready tells rank 0 (FAIL with a sentence) and waits
 * a second for its verdict, so that all report one cause. One that is ready sends nothing more: a
 * COMMIT may be on its way, and the next thing in the stream must then be a frame.
 *
 * Two jobs under one name. Who finds its address taken says to the holder that it is rank r too, and
 * both fail: the holder has not said READY, so rank 0 has not committed, and its FAIL ends the
 * opening on all ranks, of either job, that it has met. If the jobs are known by their launcher (job) a link between two of them
 * fails the same way. If not, nothing tells rank 1 of job A from that of job B, and A's rank 0 may
 * meet B's rank 1 before the other two come. So a rank then holds its address for OH_SETTLE_MS from
 * its start at least: a group of ranks of two jobs is seen if any rank that was left out comes
 * within that time of its twin; until then the holder does not fail, so that all are told. A group of the
 * same processes as the last one of that name and rank need not wait: of a mixed one none can say
 * so. Who comes later finds the address free. It is not held for longer, since the same processes
 * may open the same name again at once, and a forked child that keeps a copy of a dead rank's
 * listener would hold it against the job that is started anew.
 *
 * Other users. They can list all addresses in use, connect, and take those that are free. So the
 * group's name is a hash that holds a secret of this user (base/secret.c) or is random, and nobody
 * can know the address of a rank that does not listen yet. One that was seen could be taken when the
 * name is used the next time: addresses of names that are not random change every OH_SLOT_MS, and a
 * listener moves along. A rank that is stopped for longer loses its address; it notices before it is
 * ready. What is connected is asked for its user first, by the kernel.
 *
 * After that the sockets carry frames (exchange.c) and show the end of a peer (liveness.c). */
#ifndef OH_MESH_H
#define OH_MESH_H

#include "rendezvous/identity.h"

#include <sys/types.h>

typedef struct oh_mesh {
    int rank, world_size;
    uint64_t sequence;                    /* exchanges so far */
    int sockets[ONEHOP_MAX_RANKS];        /* -1 for own */
    int pidfds[ONEHOP_MAX_RANKS];         /* -1 where the kernel or a sandbox refuses them */
    oh_id128 processes[ONEHOP_MAX_RANKS]; /* oh_process_id of each rank */
} oh_mesh;

typedef struct oh_mesh_plan {
    int rank, world_size;
    oh_id128 name;
    oh_id128 job;  /* zero: not known */
    bool guesses;  /* jobs are told apart by `name` alone, which a program may have written */
    bool replayed; /* `name` is secret but may be used again: addresses change with time */
    const char *label;
    uint32_t timeout_ms;
} oh_mesh_plan;

onehop_result oh_mesh_open(const oh_mesh_plan *plan, oh_mesh *mesh_out);

/* `owner` false (a forked child): closes the descriptors but does not end the connections. */
void oh_mesh_close(oh_mesh *mesh, bool owner);

/* One collective exchange. With `fds`, `count` descriptors go along and arrive in
 * fds_out[rank * count + i], which the caller has filled with -1; `mine_out` then takes a failure
 * of this rank alone. On failure descriptors may be open in fds_out. */
typedef struct oh_exchange {
    const void *send;
    void *recv;
    size_t bytes;
    const int *fds; /* NULL: none go along */
    int count;
    int *fds_out;
    onehop_result *mine_out;
    uint32_t timeout_ms;
} oh_exchange;

onehop_result oh_mesh_exchange(oh_mesh *mesh, const oh_exchange *exchange);

/* See oh_rendezvous_lost_peer. */
int oh_mesh_lost_peer(const oh_mesh *mesh);

/* A descriptor that becomes readable when the process at the other end of `socket` ends, or -1. */
int oh_pidfd_of_peer(int socket);

#endif
