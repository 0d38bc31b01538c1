/* The connection to each peer while the mesh is being opened. */
#include "rendezvous/opening.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define OH_FIRST_RETRY_US 500
#define OH_LAST_RETRY_US  20000 /* a rank that is waited for costs 50 connects a second */

/* Back to the start: the peer is not there yet, or what was there is no rank of this group. */
static void retry_later(oh_link *link) {
    if (link->fd >= 0) close(link->fd);
    link->fd = -1;
    link->fill = 0;
    link->state = OH_LINK_ABSENT;
    link->backoff_us = link->backoff_us ? 2 * link->backoff_us : OH_FIRST_RETRY_US;
    if (link->backoff_us > OH_LAST_RETRY_US) link->backoff_us = OH_LAST_RETRY_US;
    link->retry_ns = oh_clock_ns() + link->backoff_us * 1000ull;
}

/* A system call of this rank failed; the peer may be well. */
static void fail_for_call(oh_opening *opening, int error, const char *what, int rank) {
    oh_opening_fail_here(opening,
                         oh_error_errno(ONEHOP_ERR_SYSTEM, error, "cannot %s rank %d", what, rank));
}

void oh_link_connect(oh_opening *opening, int rank) {
    oh_link *link = &opening->links[rank];
    long user = -1, pid = 0;
    link->fd = oh_mesh_socket();
    if (link->fd < 0) {
        oh_opening_fail_here(
            opening, oh_mesh_system_error(errno, opening->plan->world_size, "make a socket"));
        return;
    }
    if (!oh_mesh_reach(opening->plan, rank, link->fd)) {
        if (oh_mesh_is_absence(errno))
            retry_later(link);
        else
            fail_for_call(opening, errno, "connect to", rank);
    } else if (!oh_mesh_same_user(link->fd, &user, &pid)) {
        oh_mesh_note_foreigner(opening, user);
        retry_later(link);
    } else if (!oh_mesh_write(link->fd, &opening->hello, sizeof opening->hello)) {
        if (oh_mesh_is_end(errno))
            retry_later(link);
        else
            fail_for_call(opening, errno, "send to", rank);
    } else {
        link->state = OH_LINK_GREETING;
        if (link->pidfd >= 0) close(link->pidfd);
        link->pidfd = oh_pidfd_of_peer(link->fd);
    }
}

/* The process that listened for a lower rank has ended before it answered. If it had a reason it
 * has knocked here with it. Unless another has taken its place by now, nobody will answer: the
 * others may never have met it, so this is ours to say. */
static void listener_ended(oh_opening *opening, int rank) {
    oh_link *link = &opening->links[rank];
    oh_guests_accept(opening);
    oh_guests_serve(opening);
    if (link->state == OH_LINK_MEMBER) {
        oh_link_serve(opening, rank, true);
        return;
    }
    if (link->state == OH_LINK_GREETING) retry_later(link);
    if (link->pidfd >= 0) close(link->pidfd);
    link->pidfd = -1;
    oh_link_connect(opening, rank);
    if (link->state == OH_LINK_ABSENT) oh_opening_fail_for_end(opening, rank);
}

/* Both sides find the same difference and word it alike. */
static void fail_for_difference(oh_opening *opening, const oh_hello *other) {
    const oh_hello *low = &opening->hello, *high = other;
    char text[sizeof opening->text];
    if (low->rank > high->rank) low = other, high = &opening->hello;
    snprintf(
        text, sizeof text,
        "rank %d was set up with onehop %u.%u and world size %d, rank %d with onehop %u.%u and "
        "world size %d",
        low->rank, low->major, low->minor, low->world_size, high->rank, high->major, high->minor,
        high->world_size);
    oh_opening_fail(opening, opening->plan->rank, ONEHOP_ERR_DISAGREEMENT, text);
}

static bool other_job(const oh_hello *own, const oh_hello *other) {
    const oh_id128 none = {{0, 0}};
    return !oh_id128_equal(own->job, none) && !oh_id128_equal(other->job, none) &&
           !oh_id128_equal(own->job, other->job);
}

static void fail_for_other_job(oh_opening *opening, int rank) {
    char text[sizeof opening->text];
    const int own = opening->plan->rank;
    snprintf(text, sizeof text,
             "ranks %d and %d of group \"%s\" belong to different jobs of their launcher: two jobs "
             "use this name",
             own < rank ? own : rank, own < rank ? rank : own, opening->plan->label);
    oh_opening_fail(opening, own, ONEHOP_ERR_DISAGREEMENT, text);
}

/* The peer's hello has come and ours has gone out. */
void oh_link_join(oh_opening *opening, int rank, int fd, const oh_hello *hello) {
    const oh_hello *own = &opening->hello;
    oh_link *link = &opening->links[rank];
    if (link->fd >= 0 && link->fd != fd) close(link->fd);
    if (link->pidfd >= 0) close(link->pidfd); /* of who listened; now it is known who answers */
    link->pidfd = -1;
    link->fd = fd;
    link->fill = 0;
    link->told = false;
    link->state = OH_LINK_MEMBER; /* also of one that disagrees: it is told like the others */
    link->process = hello->process;
    if (hello->major != own->major || hello->minor != own->minor ||
        hello->world_size != own->world_size)
        fail_for_difference(opening, hello);
    else if (other_job(own, hello))
        fail_for_other_job(opening, rank);
    else if (!oh_id128_equal(hello->process, own->process))
        link->pidfd = oh_pidfd_of_peer(fd);
}

/* Rank 0's word replaces a cause that was found here. */
static void take_failure(oh_opening *opening, int rank, const oh_notice *notice) {
    char text[sizeof notice->text];
    memcpy(text, notice->text, sizeof text);
    text[sizeof text - 1] = 0;
    if (opening->state == OH_FAILED && (rank > 0 || opening->verdict)) return;
    opening->state = OH_GATHERING;
    oh_opening_fail(opening, notice->origin, (onehop_result)notice->result, text);
    opening->verdict = rank == 0;
    opening->culprit = notice->culprit;
}

static void take_notice(oh_opening *opening, int rank, const oh_notice *notice) {
    char text[sizeof notice->text];
    if (notice->magic == OH_NOTICE_MAGIC && notice->kind == OH_NOTICE_READY) {
        opening->links[rank].ready = true;
    } else if (notice->magic == OH_NOTICE_MAGIC && notice->kind == OH_NOTICE_COMMIT && rank == 0) {
        opening->state = OH_COMMITTED;
    } else if (notice->magic == OH_NOTICE_MAGIC && notice->kind == OH_NOTICE_FAIL &&
               notice->result < 0) {
        take_failure(opening, rank, notice);
    } else if (notice->magic == OH_NOTICE_MAGIC && notice->kind == OH_NOTICE_LOST) {
        oh_opening_fail_for_end(opening, notice->culprit);
    } else if (notice->magic == OH_NOTICE_MAGIC && notice->kind == OH_NOTICE_ASK) {
        oh_link_notify(opening, rank, OH_NOTICE_HERE);
    } else if (notice->magic == OH_NOTICE_MAGIC && notice->kind == OH_NOTICE_HERE) {
        opening->here |= 1u << rank;
    } else {
        snprintf(text, sizeof text, "rank %d sent something that is not onehop", rank);
        oh_opening_fail(opening, opening->plan->rank, ONEHOP_ERR_INTERNAL, text);
    }
}

static void serve_greeting(oh_opening *opening, int rank, oh_link *link) {
    oh_hello *hello = &link->inbox.hello;
    oh_read got = oh_mesh_read(link->fd, hello, sizeof *hello, &link->fill);
    if (got == OH_READ_PARTIAL) return;
    /* An end before the answer is the end of an earlier group of this name: try again. */
    if (got == OH_READ_FAILED)
        fail_for_call(opening, errno, "receive from", rank);
    else if (got != OH_READ_COMPLETE || !oh_mesh_valid_hello(opening, hello) || hello->rank != rank)
        retry_later(link);
    else
        oh_link_join(opening, rank, link->fd, hello);
}

oh_read oh_link_serve(oh_opening *opening, int rank, bool peer_ended) {
    oh_link *link = &opening->links[rank];
    if (link->state != OH_LINK_MEMBER) {
        if (link->state == OH_LINK_GREETING) serve_greeting(opening, rank, link);
        if (peer_ended && link->state != OH_LINK_MEMBER) listener_ended(opening, rank);
        return OH_READ_PARTIAL;
    }
    oh_notice *notice = &link->inbox.notice;
    oh_read got = oh_mesh_read(link->fd, notice, sizeof *notice, &link->fill);
    if (got == OH_READ_COMPLETE) {
        link->fill = 0;
        take_notice(opening, rank, notice);
    } else if (got == OH_READ_FAILED) {
        fail_for_call(opening, errno, "receive from", rank);
    } else if (got == OH_READ_ENDED || peer_ended) {
        oh_opening_fail_for_end(opening, rank);
    }
    return got;
}

static bool send_notice(oh_opening *opening, int rank, const oh_notice *notice) {
    if (opening->links[rank].state != OH_LINK_MEMBER) return true;
    if (oh_mesh_write(opening->links[rank].fd, notice, sizeof *notice)) return true;
    if (oh_mesh_is_end(errno)) return true; /* shows when it is read from */
    fail_for_call(opening, errno, "send to", rank);
    return false;
}

bool oh_link_notify(oh_opening *opening, int rank, oh_notice_kind kind) {
    oh_notice notice = {.magic = OH_NOTICE_MAGIC, .kind = kind, .culprit = -1};
    if (kind == OH_NOTICE_FAIL) {
        notice.result = opening->result;
        notice.origin = opening->origin;
        notice.culprit = opening->culprit;
        memcpy(notice.text, opening->text, sizeof notice.text);
    }
    return send_notice(opening, rank, &notice);
}

void oh_link_report(oh_opening *opening, int rank) {
    oh_notice hint = {.magic = OH_NOTICE_MAGIC, .kind = OH_NOTICE_LOST, .culprit = rank}, last;
    /* A rank that left with a word has told it to rank 0 as well, unless they had not met. */
    if (oh_mesh_last_words(opening->links[rank].fd, &last) && last.kind == OH_NOTICE_FAIL)
        hint = last;
    opening->links[rank].told = true;
    send_notice(opening, 0, &hint);
}

void oh_links_answer(oh_opening *opening) {
    for (int i = 1; i < opening->plan->world_size; i++) {
        if (opening->answered >> i & 1 || !oh_mesh_is_asked(opening->links[i].fd)) continue;
        opening->answered |= 1u << i;
        oh_link_notify(opening, i, OH_NOTICE_HERE);
    }
}
