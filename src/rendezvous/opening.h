/* Inside of opening a mesh; see mesh.h for the protocol. Files:
 *   mesh_listen.c  addresses, listening, finding out who holds an address that is taken
 *   mesh_guests.c  accepted connections that have not said who they are
 *   mesh_links.c   the connection to each peer: connecting, greeting, notices
 *   mesh_met.c     groups of this process that were open before
 *   mesh_open.c    the loop, the decision
 *   mesh_fail.c    the way out: all who can be reached hear the cause
 *
 * Anybody on the machine can connect to an abstract socket. So nothing a connection does, or fails
 * to do, before it has proved to be a rank can harm the group: other users are dropped at once
 * (mesh.h says why they cannot take an address), garbage when it is seen, silence costs one of
 * OH_GUESTS places, of which the oldest is given up when all are taken. A rank dropped that way by
 * bad luck sees the end before an answer and connects again. */
#ifndef OH_OPENING_H
#define OH_OPENING_H

#include "rendezvous/group.h"
#include "rendezvous/mesh.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#define OH_GUESTS      64
#define OH_SETTLE_MS   100 /* a rank holds its address so long at least, or 1/4 of its timeout */
#define OH_SLOT_MS     100 /* an address of a name that may be used again lives so long */
#define OH_HELLO_MAGIC 0x6f6c6c6548486e6full

/* The first thing both sides send. The size, and the place of the members up to `name`, are fixed
 * for all versions, so that different versions can tell each other apart. */
typedef struct oh_hello {
    uint64_t magic;
    uint32_t major, minor;
    int32_t rank, world_size;
    oh_id128 name, process, boot;
    uint64_t netns;
    oh_id128 job;    /* zero: not known */
    uint8_t leaving; /* only to tell of a failure; the notice follows. From any rank to any */
    uint8_t reserved[31];
} oh_hello;

_Static_assert(sizeof(oh_hello) == 128, "a hello has a fixed size");

typedef enum oh_link_state {
    OH_LINK_ABSENT,   /* no connection; lower ranks are tried at retry_ns */
    OH_LINK_GREETING, /* connected, our hello sent, theirs awaited */
    OH_LINK_MEMBER,   /* known; notices may come */
} oh_link_state;

typedef struct oh_link {
    oh_link_state state;
    int fd;
    int pidfd; /* also of who once listened there, while the link is absent */
    uint64_t retry_ns;
    unsigned backoff_us;
    bool ready; /* rank 0: READY has come */
    bool told;  /* of the failure; before that, in state READY: rank 0 knows that it is gone */
    oh_id128 process;
    size_t fill; /* bytes of the inbox */
    union {
        oh_hello hello;
        oh_notice notice;
    } inbox;
} oh_link;

typedef struct oh_guest {
    int fd; /* -1: free place */
    uint64_t order;
    size_t fill;
    oh_hello hello;
} oh_guest;

typedef enum oh_opening_state {
    OH_GATHERING, /* peers are being found */
    OH_READY,     /* READY sent; only rank 0 is read, it decides */
    OH_COMMITTED,
    OH_FAILED,
} oh_opening_state;

typedef struct oh_opening {
    const oh_mesh_plan *plan;
    oh_opening_state state;
    uint64_t deadline_ns;
    uint64_t settled_ns; /* until then the address is held, see mesh.h */
    oh_hello hello;      /* ours */
    int listeners[2];    /* of this slot and of the one before; -1: none */
    uint64_t slot;       /* of listeners[0] */
    uint64_t guests_seen;
    onehop_result result; /* of state FAILED */
    int origin, culprit;
    char text[488];
    uint32_t asked;    /* rank 0: ranks that were not ready when the time was over */
    uint32_t here;     /* those that have answered */
    uint32_t answered; /* ranks whose question was */
    bool said_ready;
    bool verdict;      /* the failure is rank 0's word */
    long foreign_user; /* another user who holds or reaches our addresses; -1: none */
    unsigned foreign_calls;
    oh_link links[ONEHOP_MAX_RANKS];
    oh_guest guests[OH_GUESTS];
} oh_opening;

/* Result of a step of reading. */
typedef enum oh_read {
    OH_READ_ENDED,
    OH_READ_PARTIAL,
    OH_READ_COMPLETE,
    OH_READ_FAILED, /* errno says why; the peer may be there */
} oh_read;

/* mesh_fail.c. The first cause is kept. */
void oh_opening_fail(oh_opening *opening, int origin, onehop_result result, const char *text);
void oh_opening_fail_here(oh_opening *opening, onehop_result result); /* with the last error */
void oh_opening_fail_for_end(oh_opening *opening, int culprit);
void oh_opening_fail_for_twin(oh_opening *opening, long twin); /* a process with our rank */
void oh_opening_spread(oh_opening *opening);

/* mesh_open.c */
void oh_mesh_greet(const oh_mesh_plan *plan, oh_hello *hello_out);

/* mesh_listen.c */
uint64_t oh_mesh_slot(const oh_mesh_plan *plan);
socklen_t oh_mesh_address(const oh_mesh_plan *plan, int rank, uint64_t slot,
                          struct sockaddr_un *address_out);
int oh_mesh_socket(void);
/* Connects `fd` to who listens for `rank`; false with errno. */
bool oh_mesh_reach(const oh_mesh_plan *plan, int rank, int fd);
bool oh_mesh_same_user(int fd, long *user_out, long *pid_out);
oh_read oh_mesh_read(int fd, void *buffer, size_t size, size_t *fill);
/* What an errno of a connection says: the peer is gone; nobody listens, or not yet (EAGAIN: a queue
 * that is full). Any other is a failure of this rank. */
bool oh_mesh_is_end(int error);
bool oh_mesh_is_absence(int error);
/* Whole, or false with errno: the peer is gone, or takes nothing for a second. */
bool oh_mesh_write(int fd, const void *bytes, size_t size);
bool oh_mesh_valid_hello(const oh_opening *opening, const oh_hello *hello);
onehop_result oh_mesh_listen(oh_opening *opening);
/* Moves along to the address of this slot; returns when it is to be called again. */
uint64_t oh_mesh_move(oh_opening *opening);
bool oh_mesh_holds_address(const oh_opening *opening); /* that of this slot */
onehop_result oh_mesh_duplicate(const oh_opening *opening, long other);
/* A line in the log, once; later ones are counted for the last line. */
void oh_mesh_note_foreigner(oh_opening *opening, long user);

/* mesh_met.c */
bool oh_mesh_met_before(const oh_opening *opening);
void oh_mesh_remember(const oh_opening *opening, const oh_mesh *mesh);

/* mesh_guests.c */
void oh_guests_init(oh_opening *opening);
void oh_guests_accept(oh_opening *opening);
void oh_guest_serve(oh_opening *opening, oh_guest *guest);
void oh_guests_serve(oh_opening *opening); /* all, whether something has come or not */
void oh_guests_close(oh_opening *opening);
void oh_guests_close_listener(oh_opening *opening, int which);

/* mesh_links.c */
void oh_link_connect(oh_opening *opening, int rank);
void oh_link_join(oh_opening *opening, int rank, int fd, const oh_hello *hello);
/* Reads one message at most. `peer_ended`: nothing more will come than is there now. ENDED means
 * that a member's connection is at its end. */
oh_read oh_link_serve(oh_opening *opening, int rank, bool peer_ended);
/* False, and the opening has failed, if the notice cannot be sent though the peer is there. */
bool oh_link_notify(oh_opening *opening, int rank, oh_notice_kind kind);
void oh_link_report(oh_opening *opening, int rank); /* a rank that is gone, to rank 0 */
/* For a rank that is ready: peers that are in the open group already may ask, see mesh_ask.c. */
void oh_links_answer(oh_opening *opening);

#endif
