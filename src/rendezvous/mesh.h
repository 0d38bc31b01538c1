/* A full mesh of Unix sockets between the ranks of a group: one close-on-exec, non-blocking stream
 * socket per peer, in the abstract namespace, so nothing is on disk and nothing is left behind.
 *
 * Opening, per rank r (mesh_open.c drives it):
 *   1. bind and listen on the name (user, 128-bit hash of the group's name, r);
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
    const char *label;
    uint32_t timeout_ms;
} oh_mesh_plan;

onehop_result oh_mesh_open(const oh_mesh_plan *plan, oh_mesh *mesh_out);

/* Tells all peers that this rank will send nothing more; what was sent still arrives. */
void oh_mesh_leave(oh_mesh *mesh);

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
