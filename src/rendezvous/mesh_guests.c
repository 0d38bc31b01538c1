/* Connections that were accepted and have not yet said who they are; see opening.h. */
#include "rendezvous/opening.h"

#include "base/descriptor.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#define OH_ACCEPTS 1024 /* connections taken in one turn */

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
        oh_mesh_note_foreigner(opening, user);
        close(fd);
        return;
    }
    oh_guest *guest = make_room(opening);
    guest->fd = fd;
    guest->fill = 0;
    guest->order = ++opening->guests_seen;
    oh_guest_serve(opening, guest); /* a rank's hello is there already */
}

static void accept_from(oh_opening *opening, int listener) {
    /* Bounded, so that a flood of connections cannot keep us from the deadline. */
    for (int i = 0; i < OH_ACCEPTS && opening->state != OH_READY; i++) {
        int fd = oh_fd_high(accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC));
        if (fd >= 0) {
            welcome(opening, fd);
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            return;
        } else if (errno != EINTR && errno != ECONNABORTED) {
            oh_opening_fail_here(opening, oh_mesh_system_error(errno, opening->plan->world_size,
                                                               "accept a connection"));
            return;
        }
    }
}

void oh_guests_accept(oh_opening *opening) {
    for (int i = 0; i < 2; i++)
        if (opening->listeners[i] >= 0) accept_from(opening, opening->listeners[i]);
}

/* Another process with our rank. It learns from our hello that the rank is taken. */
static void meet_twin(oh_opening *opening, oh_guest *guest) {
    long user = -1, pid = 0;
    oh_mesh_same_user(guest->fd, &user, &pid);
    oh_mesh_write(guest->fd, &opening->hello, sizeof opening->hello);
    oh_opening_fail_for_twin(opening, pid);
}

/* Of a rank that is already there this is its next attempt, come before the end of the last one was
 * seen; it will try again. Of a rank that was told of a failure it is another process, which is to
 * be told too. A lower rank, to which we connect ourselves, comes only to tell of a failure. */
static bool expected(const oh_opening *opening, const oh_hello *hello) {
    if (hello->rank < 0 || hello->rank >= ONEHOP_MAX_RANKS) return false;
    const oh_link *link = &opening->links[hello->rank];
    if (hello->rank > opening->plan->rank) return link->state == OH_LINK_ABSENT || link->told;
    return hello->rank < opening->plan->rank && hello->leaving && link->state != OH_LINK_MEMBER;
}

void oh_guest_serve(oh_opening *opening, oh_guest *guest) {
    const oh_hello *hello = &guest->hello;
    oh_read got = oh_mesh_read(guest->fd, &guest->hello, sizeof guest->hello, &guest->fill);
    if (got == OH_READ_PARTIAL) return;
    if (got == OH_READ_FAILED)
        oh_opening_fail_here(opening, oh_error_errno(ONEHOP_ERR_SYSTEM, errno,
                                                     "cannot receive from a rank that connects"));
    int own = opening->plan->rank, rank = hello->rank;
    bool valid = got == OH_READ_COMPLETE && oh_mesh_valid_hello(opening, hello);
    if (valid && rank == own) meet_twin(opening, guest);
    if (!valid || !expected(opening, hello)) {
        dismiss(guest);
        return;
    }
    int fd = guest->fd;
    guest->fd = -1;
    /* One that has gone after its hello: what it said, or that it said nothing, shows when it is
     * read. */
    if (oh_mesh_write(fd, &opening->hello, sizeof opening->hello) || oh_mesh_is_end(errno)) {
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

void oh_guests_close_listener(oh_opening *opening, int which) {
    const int fd = opening->listeners[which];
    if (fd < 0) return;
    /* Shut down first: a copy in a forked child must not let peers connect to nobody. */
    shutdown(fd, SHUT_RDWR);
    close(fd);
    opening->listeners[which] = -1;
}

void oh_guests_close(oh_opening *opening) {
    for (int i = 0; i < OH_GUESTS; i++)
        if (opening->guests[i].fd >= 0) dismiss(&opening->guests[i]);
    for (int i = 0; i < 2; i++) oh_guests_close_listener(opening, i);
    if (opening->foreign_calls > 1)
        oh_log(ONEHOP_LOG_WARN, "rank %d of group \"%s\": user %ld, or others, %u times in all",
               opening->plan->rank, opening->plan->label, opening->foreign_user,
               opening->foreign_calls);
    opening->foreign_calls = 0;
}
