/* The way out of an opening that fails: all who can be reached hear the cause.
 *
 * A rank knows some of its peers when it fails. It asks rank 0 first, whose word counts; then it
 * tells its members, whoever knocks at its listener, and, by a connection made for that, whoever
 * listens. Each that hears does the same, so that the cause reaches also those whom the first one
 * cannot see. Ranks that have not come are waited for, a while: without that they would wait for us
 * until their deadline. Where a rank has a twin, all who hear of it hold their addresses until they
 * are settled (mesh.h), so that the ranks of both jobs hear it. What remains are ranks that come
 * later than that, and the death of a rank that nobody has seen yet: those who wait can only
 * wait. */
#include "rendezvous/opening.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define OH_VERDICT_MS 500 /* how long a rank waits for rank 0's word on a failure */
#define OH_LINGER_MS  400 /* how long it waits to tell those who have not come */
#define OH_KNOCK_MS   10  /* how often it looks whether they have */

/* The first cause is kept; rank 0's verdict replaces it, see take_notice. */
void oh_opening_fail(oh_opening *opening, int origin, onehop_result result, const char *text) {
    if (opening->state == OH_FAILED) return;
    opening->state = OH_FAILED;
    opening->result = result;
    opening->origin = origin;
    opening->culprit = -1;
    snprintf(opening->text, sizeof opening->text, "%.487s", text);
}

void oh_opening_fail_here(oh_opening *opening, onehop_result result) {
    char text[sizeof opening->text];
    snprintf(text, sizeof text, "%.487s", onehop_last_error());
    oh_opening_fail(opening, opening->plan->rank, result, text);
}

void oh_opening_fail_for_end(oh_opening *opening, int culprit) {
    char text[sizeof opening->text];
    if (opening->state == OH_FAILED) return;
    snprintf(text, sizeof text, "rank %d ended or left while the group was being opened", culprit);
    oh_opening_fail(opening, opening->plan->rank, ONEHOP_ERR_PEER_FAILED, text);
    opening->culprit = culprit;
}

void oh_opening_fail_for_twin(oh_opening *opening, long twin) {
    if (opening->state == OH_FAILED) return;
    oh_opening_fail_here(opening, oh_mesh_duplicate(opening, twin));
}

/* A failure to one who does not know us: a connection for these two messages, which stay readable
 * after its end. */
static bool deliver(const oh_mesh_plan *plan, int rank, const oh_notice *notice) {
    long user = -1, pid = 0;
    oh_hello hello;
    int fd = oh_mesh_socket();
    if (fd < 0) return false;
    oh_mesh_greet(plan, &hello);
    hello.leaving = 1;
    bool done = oh_mesh_reach(plan, rank, fd) && oh_mesh_same_user(fd, &user, &pid) &&
                oh_mesh_write(fd, &hello, sizeof hello) &&
                oh_mesh_write(fd, notice, sizeof *notice);
    close(fd);
    return done;
}

onehop_result oh_mesh_refuse(const oh_mesh_plan *plan, onehop_result result) {
    oh_notice notice = {.magic = OH_NOTICE_MAGIC,
                        .kind = OH_NOTICE_FAIL,
                        .result = result,
                        .origin = plan->rank,
                        .culprit = -1};
    uint64_t end = oh_clock_ns() + OH_LINGER_MS * 1000000ull;
    uint32_t told = 1u << plan->rank, all = (1u << plan->world_size) - 1;
    snprintf(notice.text, sizeof notice.text, "%.487s", onehop_last_error());
    for (;;) {
        for (int i = 0; i < plan->world_size; i++)
            if (!(told >> i & 1) && deliver(plan, i, &notice)) told |= 1u << i;
        if (told == all || oh_clock_ns() >= end) break;
        oh_sleep_us(OH_KNOCK_MS * 1000);
    }
    return oh_error(result, "%s", notice.text);
}

/* ---- an opening that has begun --------------------------------------------------------------- */

/* Rank 0 may have another cause, of which all are to hear. */
static void ask_rank_0(oh_opening *opening) {
    oh_link *link = &opening->links[0];
    uint64_t deadline = oh_clock_ns() + OH_VERDICT_MS * 1000000ull;
    if (opening->plan->rank == 0 || opening->verdict || opening->said_ready) return;
    if (opening->culprit == 0 || link->state != OH_LINK_MEMBER) return;
    oh_link_notify(opening, 0, OH_NOTICE_FAIL);
    link->told = true;
    while (!opening->verdict) {
        struct pollfd wait[2] = {{.fd = link->fd, .events = POLLIN},
                                 {.fd = link->pidfd, .events = POLLIN}};
        uint64_t now = oh_clock_ns();
        if (now >= deadline) return;
        int events = oh_mesh_poll(wait, 2, (int)((deadline - now + 999999u) / 1000000u));
        if (events < 0 && errno != EINTR) return;
        if (events <= 0) continue;
        oh_read got = oh_link_serve(opening, 0, wait[1].revents != 0);
        if (got != OH_READ_COMPLETE && (got != OH_READ_PARTIAL || wait[1].revents)) return;
    }
}

static void fill_notice(const oh_opening *opening, oh_notice *notice_out) {
    memset(notice_out, 0, sizeof *notice_out);
    notice_out->magic = OH_NOTICE_MAGIC;
    notice_out->kind = OH_NOTICE_FAIL;
    notice_out->result = opening->result;
    notice_out->origin = opening->origin;
    notice_out->culprit = opening->culprit;
    memcpy(notice_out->text, opening->text, sizeof notice_out->text);
}

/* Tells those who are there; true if nobody is left. */
static bool tell(oh_opening *opening) {
    oh_notice notice;
    bool all = true;
    fill_notice(opening, &notice);
    for (int i = 0; i < ONEHOP_MAX_RANKS; i++) {
        oh_link *link = &opening->links[i];
        bool expected = i < opening->plan->world_size;
        if (i == opening->plan->rank || i == opening->culprit || link->told) continue;
        if (!expected && link->state == OH_LINK_ABSENT) continue;
        if (link->state == OH_LINK_ABSENT)
            link->told = deliver(opening->plan, i, &notice);
        else /* one that is being greeted reads this after our hello */
            link->told =
                oh_mesh_write(link->fd, &notice, sizeof notice) || link->state == OH_LINK_MEMBER;
        all = all && link->told;
    }
    return all;
}

static void hear_newcomers(oh_opening *opening) {
    struct pollfd polls[2 + OH_GUESTS];
    oh_mesh_move(opening);
    for (int i = 0; i < 2; i++)
        polls[i] = (struct pollfd){.fd = opening->listeners[i], .events = POLLIN};
    for (int i = 0; i < OH_GUESTS; i++)
        polls[2 + i] = (struct pollfd){.fd = opening->guests[i].fd, .events = POLLIN};
    if (oh_mesh_poll(polls, 2 + OH_GUESTS, OH_KNOCK_MS) < 0) oh_sleep_us(OH_KNOCK_MS * 1000);
    oh_guests_serve(opening);
    oh_guests_accept(opening);
}

void oh_opening_spread(oh_opening *opening) {
    ask_rank_0(opening);
    /* After a deadline nobody is waited for any longer. */
    uint64_t linger_ms = opening->result == ONEHOP_ERR_MISSING_PEER ? 0 : OH_LINGER_MS;
    uint64_t end = oh_clock_ns() + linger_ms * 1000000ull;
    uint64_t hold = opening->result == ONEHOP_ERR_DUPLICATE_RANK ? opening->settled_ns : 0;
    oh_guests_accept(opening);
    for (;;) {
        bool all = tell(opening);
        uint64_t now = oh_clock_ns();
        if (now >= hold && (all || now >= end)) break;
        hear_newcomers(opening);
    }
    oh_guests_close(opening);
}
