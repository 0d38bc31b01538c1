/* Connections that were accepted and have not yet said who they are; see opening.h. */
#include "rendezvous/opening.h"

#include "base/descriptor.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

void oh_guests_init(oh_opening *opening) {
    for (int i = 0; i < OH_GUESTS; i++) opening->guests[i].fd = -1;
}

static void dismiss(oh_guest *guest) {
    close(guest->fd);
    guest->fd = -1;
}

/* A free place, or that of the guest who has been silent for longest. */
static oh_guest *make_room(oh_opening *opening) {
    oh_guest *oldest = &opening->guests[0];
    for (int i = 0; i < OH_GUESTS; i++) {
        oh_guest *guest = &opening->guests[i];
        if (guest->fd < 0) return guest;
        if (guest->order < oldest->order) oldest = guest;
    }
    dismiss(oldest);
    return oldest;
}

static void welcome(oh_opening *opening, int fd) {
    long user = -1, pid = 0;
    if (!oh_mesh_same_user(fd, &user, &pid)) {
        oh_log(ONEHOP_LOG_WARN, "rank %d: dropped a connection of user %ld", opening->plan->rank,
               user);
        close(fd);
        return;
    }
    oh_guest *guest = make_room(opening);
    guest->fd = fd;
    guest->fill = 0;
    guest->order = ++opening->guests_seen;
    oh_guest_serve(opening, guest); /* a rank's hello is there already */
}

void oh_guests_accept(oh_opening *opening) {
    /* Bounded, so that a flood of connections cannot keep us from the deadline. */
    for (int i = 0; i < OH_GUESTS && opening->state != OH_READY; i++) {
        int fd = oh_fd_high(accept4(opening->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC));
        if (fd >= 0) {
            welcome(opening, fd);
        } else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
            oh_opening_fail_here(opening, oh_mesh_system_error(errno, opening->plan->world_size,
                                                               "accept a connection"));
            return;
        } else if (errno != EINTR && errno != ECONNABORTED) {
            return;
        }
    }
}

/* Another process with our rank: it learns from our hello that the rank is taken. */
static void refuse_duplicate(oh_opening *opening, oh_guest *guest) {
    long user = -1, pid = 0;
    oh_mesh_same_user(guest->fd, &user, &pid);
    if (opening->duplicate != pid) /* once, not at each of its attempts */
        oh_log(ONEHOP_LOG_WARN,
               "rank %d of group \"%s\": process %ld claims the same rank and is refused",
               opening->plan->rank, opening->plan->label, pid);
    opening->duplicate = pid;
    oh_mesh_write(guest->fd, &opening->hello, sizeof opening->hello);
}

/* Of a rank that is already there this is its next attempt, come before the end of the last one was
 * seen; it will try again. A lower rank, to which we connect ourselves, comes only to tell of a
 * failure. */
static bool expected(const oh_opening *opening, const oh_hello *hello) {
    if (hello->rank < 0 || hello->rank >= ONEHOP_MAX_RANKS) return false;
    oh_link_state state = opening->links[hello->rank].state;
    if (hello->rank > opening->plan->rank) return state == OH_LINK_ABSENT;
    return hello->rank < opening->plan->rank && hello->leaving && state != OH_LINK_MEMBER;
}

void oh_guest_serve(oh_opening *opening, oh_guest *guest) {
    const oh_hello *hello = &guest->hello;
    oh_read got = oh_mesh_read(guest->fd, &guest->hello, sizeof guest->hello, &guest->fill);
    if (got == OH_READ_PARTIAL) return;
    int own = opening->plan->rank, rank = hello->rank;
    bool valid = got == OH_READ_COMPLETE && oh_mesh_valid_hello(opening, hello);
    if (valid && rank == own) refuse_duplicate(opening, guest);
    if (!valid || !expected(opening, hello)) {
        dismiss(guest);
        return;
    }
    int fd = guest->fd;
    guest->fd = -1;
    /* One that has gone after its hello: what it said, or that it said nothing, shows when it is
     * read. */
    if (oh_mesh_write(fd, &opening->hello, sizeof opening->hello) || errno == EPIPE ||
        errno == ECONNRESET) {
        oh_link_join(opening, rank, fd, hello);
        return;
    }
    oh_opening_fail_here(opening,
                         oh_error_errno(ONEHOP_ERR_SYSTEM, errno, "cannot send to rank %d", rank));
    close(fd);
}

void oh_guests_serve(oh_opening *opening) {
    for (int i = 0; i < OH_GUESTS; i++)
        if (opening->guests[i].fd >= 0) oh_guest_serve(opening, &opening->guests[i]);
}

void oh_guests_close(oh_opening *opening) {
    for (int i = 0; i < OH_GUESTS; i++)
        if (opening->guests[i].fd >= 0) dismiss(&opening->guests[i]);
    if (opening->listener < 0) return;
    /* Shut down first: a copy in a forked child must not let peers connect to nobody. */
    shutdown(opening->listener, SHUT_RDWR);
    close(opening->listener);
    opening->listener = -1;
}
