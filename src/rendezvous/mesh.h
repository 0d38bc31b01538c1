/* A full mesh of Unix sockets between the ranks of a group: one close-on-exec, non-blocking stream
 * socket per peer, in the abstract namespace, so nothing is on disk and nothing is left behind.
 *
 * Opening, per rank r (mesh_open.c drives it):
 *   1. bind and listen on the address of (group's name, r), a hash;
 *   2. connect to every lower rank, sending a hello; accept every higher rank; answer its hello;
 *   3. when all peers are known and no twin has come: close the listener, send READY to rank 0;
 *   4. rank 0, when all are ready, sends COMMIT to all; that is the moment the group exists.
 * So when an open returns success anywhere, nowhere a listener of that name is left, and the name
 * can be used again at once. And since one rank decides, success or failure is the same on all
 * ranks, also when deadlines expire at that moment; only the death of rank 0 between two COMMITs
 * can split it, and then the ranks that have opened hear of it in their first exchange.
 *
 * A failure travels as a notice FAIL with its sentence (mesh_fail.c). Who fails, or hears of a
 * failure, tells every rank that it can reach, once, before it closes anything. So one sentence
 * reaches all, and the end of a rank that leaves because of another is never taken for the cause.
 *
 * Two jobs under one name. Who finds its address taken says to the holder that it is rank r too:
 * they are twins. The holder has not said READY, so rank 0 has not committed, and no group comes of
 * it: both fail, and both tell all ranks that they can reach, of either job. If the jobs are known
 * by their launcher (job), a link between two of them is a failure of the same kind. If not,
 * nothing tells rank 1 of job A from that of job B, and A's rank 0 may meet B's rank 1 before the
 * other two come. So a rank then holds its address for OH_SETTLE_MS from its start at least, and
 * also if it has heard of a twin by then: a group of ranks of two jobs is seen if any rank that was
 * left out comes within that time of its twin, and is told by it. A group of the same processes as
 * the last one of that name and rank need not wait: of a mixed one none can say so. Who comes later
 * finds the address free. It is not held for longer, since the same processes may open the same
 * name again at once, and a forked child that keeps a copy of a dead rank's listener would hold it
 * against the job that is started anew.
 *
 * Other users. They can list all addresses in use, connect, and take those that are free. So the
 * group's name is a hash that holds a secret of this user (base/secret.c) or is random, and nobody
 * can know the address of a rank that does not listen yet. One that was seen could be taken when
 * the name is used the next time: addresses of names that are not random change every OH_SLOT_MS,
 * and a listener moves along. A rank that is stopped for longer loses its address; it notices
 * before it is ready. What is connected is asked for its user first, by the kernel.
 *
 * After that the sockets carry frames (exchange.c) and show the end of a peer (liveness.c). A
 * notice may stand between two frames: FAIL is the last word of a rank whose exchange failed, LOST
 * a hint that a rank is gone, LEFT takes leave. Who goes without a word was killed.
 *
 * A rank whose time is over may miss several peers: one that is the cause and others that wait for
 * it too. It asks them all (mesh_ask.c), and names those that do not answer. */
#ifndef OH_MESH_H
#define OH_MESH_H

#include "rendezvous/identity.h"

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#define OH_NOTICE_MAGIC 0x656369746f4e6e6full

typedef enum oh_notice_kind {
    OH_NOTICE_READY = 1,  /* to rank 0: all my peers are known, my listener is closed */
    OH_NOTICE_COMMIT = 2, /* from rank 0: the group exists */
    OH_NOTICE_FAIL = 3,   /* result and sentence; from rank 0, while opening, it is the verdict */
    OH_NOTICE_LOST = 4,   /* the culprit has ended or left; what follows from that is not decided */
    OH_NOTICE_LEFT = 5,   /* I close my group */
    OH_NOTICE_ASK = 6,    /* my time is over and I miss you: do you wait for somebody too? */
    OH_NOTICE_HERE = 7,   /* the answer: I do */
} oh_notice_kind;

typedef struct oh_notice {
    uint64_t magic;
    int32_t kind;
    int32_t result;
    int32_t origin;  /* rank that decided the failure */
    int32_t culprit; /* rank whose end is the cause, -1 if it is none's */
    char text[488];
} oh_notice;

_Static_assert(sizeof(oh_notice) == 512, "a notice has a fixed size");

typedef struct oh_mesh {
    int rank, world_size;
    uint64_t sequence;                    /* exchanges so far */
    pthread_mutex_t send_lock;            /* over `cut` and all sends: hints come from any thread */
    uint32_t cut;                         /* peers who have a part of a frame, bit per rank */
    atomic_bool spoken;                   /* FAIL or LOST was said: no LEFT must hide it */
    atomic_uint named;                    /* ranks whose end is the cause, as peers have said */
    atomic_uint left;                     /* ranks that took leave */
    atomic_uint answered;                 /* ranks whose question was, in this exchange */
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

/* For a rank that cannot even begin to open: tells the others its error text, so that they do not
 * wait for it. Takes half a second where others have not come. Returns `result`. */
onehop_result oh_mesh_refuse(const oh_mesh_plan *plan, onehop_result result);

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
int oh_mesh_lost_peer(oh_mesh *mesh);

/* Whose end explains that `peer` sends no more. Not sure: a better answer may show in a moment. */
int oh_mesh_culprit(oh_mesh *mesh, int peer, bool *sure_out);

/* Remembers whom a peer's word names, or that it took leave. */
void oh_mesh_note(oh_mesh *mesh, int rank, const oh_notice *word);

/* False: the socket is full, try again. Not between the parts of a frame. */
bool oh_mesh_send_notice(oh_mesh *mesh, int rank, const oh_notice *notice);

/* Tells all peers that `culprit` is gone, if it is, so that none takes this rank's end for the
 * cause. Any thread, beside any call but close. */
void oh_mesh_hint(oh_mesh *mesh, int culprit);

/* mesh_ask.c. How long the answers are waited for: the asked look every OH_LOOK_MS. */
#define OH_ANSWER_MS 150
void oh_mesh_ask(oh_mesh *mesh, uint32_t ranks);
/* Answers those of `ranks` that have asked. For a rank that waits, at every look. */
void oh_mesh_answer(oh_mesh *mesh, uint32_t ranks);
bool oh_mesh_is_asked(int fd);
/* Whom to name of those that are missing, or all if all have answered or none was asked. */
uint32_t oh_mesh_silent(uint32_t missing, uint32_t asked, uint32_t here);

/* The notice that ends what lies unread in a socket; consumes nothing. False if there is none. */
bool oh_mesh_last_words(int fd, oh_notice *notice_out);

/* Reports a peer's FAIL as this rank's error. */
onehop_result oh_mesh_adopt(const oh_notice *notice);

/* poll() of the entries whose descriptor is not -1. The kernel refuses longer lists than the limit
 * of open files, used or not. At most OH_MAX_POLLS. */
#define OH_MAX_POLLS 128
int oh_mesh_poll(struct pollfd *polls, int count, int timeout_ms);

/* "cannot do `what`: reason", with the need of descriptors and the limit if that is the reason. */
onehop_result oh_mesh_system_error(int errno_value, int world_size, const char *what);

/* A descriptor that becomes readable when the process at the other end of `socket` ends, or -1. */
int oh_pidfd_of_peer(int socket);

#endif
