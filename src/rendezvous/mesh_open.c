/* Opening a mesh: the loop, the decision, the way out. The protocol is in mesh.h. */
#include "rendezvous/opening.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define OH_VERDICT_MS 1000 /* how long past its own end a rank waits for rank 0's word */

/* The first cause is kept, except that rank 0's verdict replaces an own one. */
void oh_opening_fail(oh_opening *opening, int origin, onehop_result result, const char *text) {
    if (opening->state == OH_FAILED && !opening->verdict) return;
    opening->state = OH_FAILED;
    opening->result = result;
    opening->origin = origin;
    snprintf(opening->text, sizeof opening->text, "%.491s", text);
}

static onehop_result begin(oh_opening *opening, const oh_mesh_plan *plan) {
    opening->plan = plan;
    opening->deadline_ns = oh_clock_ns() + (uint64_t)plan->timeout_ms * 1000000u;
    opening->listeners[0] = opening->listeners[1] = -1;
    const uint64_t settle_ms =
        plan->timeout_ms / 4 < OH_SETTLE_MS ? plan->timeout_ms / 4 : OH_SETTLE_MS;
    opening->settled_ns = oh_clock_ns() + (plan->guesses ? settle_ms * 1000000u : 0);
    opening->foreign_user = -1;
    oh_guests_init(opening);
    for (int i = 0; i < ONEHOP_MAX_RANKS; i++) opening->links[i].fd = opening->links[i].pidfd = -1;
    opening->hello = (oh_hello){.magic = OH_HELLO_MAGIC,
                                .major = ONEHOP_VERSION_MAJOR,
                                .minor = ONEHOP_VERSION_MINOR,
                                .rank = plan->rank,
                                .world_size = plan->world_size,
                                .name = plan->name,
                                .job = plan->job,
                                .boot = oh_identity_boot(),
                                .netns = oh_identity_netns()};
    onehop_result result = oh_process_id(&opening->hello.process);
    return result ? result : oh_mesh_listen(opening);
}

/* ---- one turn of the loop -------------------------------------------------------------------- */

/* A rank that has said READY may have been taken at its word: it leaves the decision to rank 0,
 * which has a deadline of its own, and gives up only if rank 0 is silent long after. */
static uint64_t end_ns(const oh_opening *opening) {
    bool waits = opening->state == OH_READY && opening->plan->rank > 0;
    return opening->deadline_ns + (waits ? OH_VERDICT_MS * 1000000ull : 0);
}

static bool all_known(const oh_opening *opening) {
    for (int i = 0; i < opening->plan->world_size; i++)
        if (i != opening->plan->rank && opening->links[i].state != OH_LINK_MEMBER) return false;
    return true;
}

/* What the clock asks for; returns when it asks next. Lower ranks are connected to when their time
 * has come. */
static uint64_t do_due(oh_opening *opening) {
    uint64_t next = end_ns(opening), moves = oh_mesh_move(opening);
    if (moves < next) next = moves;
    const bool settles = opening->state == OH_GATHERING && opening->settled_ns > oh_clock_ns();
    if (settles && (all_known(opening) || opening->has_twin) && opening->settled_ns < next)
        next = opening->settled_ns;
    for (int i = 0; i < opening->plan->rank && opening->state == OH_GATHERING; i++) {
        oh_link *link = &opening->links[i];
        if (link->state == OH_LINK_ABSENT && link->retry_ns <= oh_clock_ns())
            oh_link_connect(opening, i);
        if (link->state == OH_LINK_ABSENT && link->retry_ns < next) next = link->retry_ns;
    }
    return next;
}

/* A rank that is ready hears only rank 0: a peer may already have had its COMMIT, and what it sends
 * or that it leaves again concerns the open group. */
static bool heard(const oh_opening *opening, int rank) {
    return opening->state == OH_GATHERING || opening->plan->rank == 0 || rank == 0;
}

/* polls: sockets of ranks, pidfds of ranks, listener, guests. */
enum {
    AT_PIDFDS = ONEHOP_MAX_RANKS,
    AT_LISTENER = 2 * ONEHOP_MAX_RANKS,
    AT_GUESTS = AT_LISTENER + 2,
    POLLS = AT_GUESTS + OH_GUESTS
};

static void prepare_polls(const oh_opening *opening, struct pollfd *polls) {
    for (int i = 0; i < POLLS; i++) polls[i] = (struct pollfd){.fd = -1, .events = POLLIN};
    for (int i = 0; i < opening->plan->world_size; i++) {
        if (!heard(opening, i)) continue;
        polls[i].fd = opening->links[i].fd;
        polls[AT_PIDFDS + i].fd = opening->links[i].pidfd;
    }
    for (int i = 0; i < 2; i++) polls[AT_LISTENER + i].fd = opening->listeners[i];
    for (int i = 0; i < OH_GUESTS; i++) polls[AT_GUESTS + i].fd = opening->guests[i].fd;
}

/* Peers before newcomers: a rank that comes again has ended its last attempt first. */
static void serve(oh_opening *opening, const struct pollfd *polls) {
    for (int i = 0; i < opening->plan->world_size && opening->state < OH_COMMITTED; i++) {
        if (polls[i].revents) oh_link_serve(opening, i, false);
        if (polls[AT_PIDFDS + i].revents && opening->state < OH_COMMITTED)
            oh_link_serve(opening, i, true);
    }
    for (int i = 0; i < OH_GUESTS && opening->state == OH_GATHERING; i++)
        if (polls[AT_GUESTS + i].revents) oh_guest_serve(opening, &opening->guests[i]);
    if ((polls[AT_LISTENER].revents || polls[AT_LISTENER + 1].revents) &&
        opening->state == OH_GATHERING)
        oh_guests_accept(opening);
}

static void wait_and_serve(oh_opening *opening, uint64_t until_ns) {
    struct pollfd polls[POLLS];
    uint64_t now = oh_clock_ns();
    uint64_t wait_ms = until_ns > now ? (until_ns - now + 999999u) / 1000000u : 0;
    prepare_polls(opening, polls);
    int events = poll(polls, POLLS, wait_ms > 60000 ? 60000 : (int)wait_ms);
    if (events > 0) {
        serve(opening, polls);
    } else if (events < 0 && errno != EINTR) {
        onehop_result result = oh_error_errno(ONEHOP_ERR_SYSTEM, errno, "poll failed");
        oh_opening_fail(opening, opening->plan->rank, result, onehop_last_error());
    }
}

/* ---- the decision ---------------------------------------------------------------------------- */

static void commit_if_all_ready(oh_opening *opening) {
    int world_size = opening->plan->world_size;
    for (int i = 1; i < world_size; i++)
        if (!opening->links[i].ready) return;
    for (int i = 1; i < world_size; i++) oh_link_notify(opening, i, OH_NOTICE_COMMIT);
    opening->state = OH_COMMITTED;
}

/* Peers may be of the twin's job, so no group must come of it. Whoever else comes before that time
 * is told as well. */
static void fail_for_twin(oh_opening *opening) {
    const onehop_result result = oh_mesh_duplicate(opening, opening->twin);
    oh_opening_fail(opening, opening->plan->rank, result, onehop_last_error());
}

static void get_ready(oh_opening *opening) {
    /* Whoever knocks for our rank at this moment still gets its answer. */
    oh_guests_accept(opening);
    if (opening->has_twin || opening->state != OH_GATHERING) return;
    oh_guests_close(opening);
    opening->state = OH_READY;
    opening->said_ready = true;
    oh_link_notify(opening, 0, OH_NOTICE_READY);
}

static void advance(oh_opening *opening) {
    const bool gathers = opening->state == OH_GATHERING;
    const bool settled = oh_clock_ns() >= opening->settled_ns;
    if (gathers && !opening->has_twin && all_known(opening) && oh_mesh_holds_address(opening) &&
        (settled || oh_mesh_met_before(opening)))
        get_ready(opening);
    if (gathers && opening->has_twin && settled) fail_for_twin(opening);
    if (opening->state == OH_READY && opening->plan->rank == 0) commit_if_all_ready(opening);
}

static void fail_for_missing(oh_opening *opening) {
    const oh_mesh_plan *plan = opening->plan;
    char names[96], more[96] = "", text[sizeof opening->text];
    uint32_t absent = 0, unready = 0;
    for (int i = 0; i < plan->world_size; i++) {
        if (i == plan->rank) continue;
        if (opening->links[i].state != OH_LINK_MEMBER) absent |= 1u << i;
        if (!opening->links[i].ready && (plan->rank == 0 || i == 0)) unready |= 1u << i;
    }
    oh_list_ranks(absent ? absent : unready, names, sizeof names);
    if (opening->foreign_user >= 0)
        snprintf(more, sizeof more, "; user %ld reached for their sockets", opening->foreign_user);
    snprintf(
        text, sizeof text,
        "%s of group \"%s\" (world size %d) did not %s within %u ms; rank %d waited as user %ld in "
        "network namespace %llu, and names cross neither users nor namespaces%s",
        names, plan->label, plan->world_size, absent ? "arrive" : "get ready", plan->timeout_ms,
        plan->rank, (long)geteuid(), (unsigned long long)opening->hello.netns, more);
    oh_opening_fail(opening, plan->rank, ONEHOP_ERR_MISSING_PEER, text);
}

/* ---- the way out ----------------------------------------------------------------------------- */

/* A notice to peers that may have committed would stand in the way of their first frame. None has
 * if rank 0 says so, or if this rank's READY is lacking. */
static bool may_tell(const oh_opening *opening) {
    return opening->plan->rank == 0 || opening->verdict || !opening->said_ready;
}

/* Tells rank 0, and asks it: it may have another cause, of which all are to hear. */
static void await_verdict(oh_opening *opening) {
    uint64_t deadline = oh_clock_ns() + OH_VERDICT_MS * 1000000ull;
    struct pollfd wait = {.fd = opening->links[0].fd, .events = POLLIN};
    oh_link_notify(opening, 0, OH_NOTICE_FAIL);
    while (opening->state == OH_FAILED && !opening->verdict) {
        uint64_t now = oh_clock_ns();
        if (now >= deadline) return;
        int events = poll(&wait, 1, (int)((deadline - now + 999999u) / 1000000u));
        if (events > 0 && oh_link_serve(opening, 0, false) == OH_READ_ENDED) return;
    }
}

/* Everybody connected learns the cause; what was sent stays readable after the close. */
static onehop_result fail_all(oh_opening *opening) {
    int rank = opening->plan->rank;
    /* A rank beyond our world size may be linked too: it disagrees about the size. */
    for (int i = rank == 0 ? 0 : 1; may_tell(opening) && i < ONEHOP_MAX_RANKS; i++)
        oh_link_notify(opening, i, OH_NOTICE_FAIL);
    for (int i = 0; i < ONEHOP_MAX_RANKS; i++) {
        if (opening->links[i].fd >= 0) close(opening->links[i].fd);
        if (opening->links[i].pidfd >= 0) close(opening->links[i].pidfd);
    }
    if (opening->origin == rank) return oh_error(opening->result, "%s", opening->text);
    return oh_error(opening->result, "rank %d: %s", opening->origin, opening->text);
}

static void hand_over(const oh_opening *opening, oh_mesh *mesh_out) {
    memset(mesh_out, 0, sizeof *mesh_out);
    mesh_out->rank = opening->plan->rank;
    mesh_out->world_size = opening->plan->world_size;
    for (int i = 0; i < ONEHOP_MAX_RANKS; i++) {
        mesh_out->sockets[i] = opening->links[i].fd;
        mesh_out->pidfds[i] = opening->links[i].pidfd;
        mesh_out->processes[i] = opening->links[i].process;
    }
    mesh_out->processes[mesh_out->rank] = opening->hello.process;
    oh_mesh_remember(opening, mesh_out);
    oh_log(ONEHOP_LOG_INFO, "rank %d: group \"%s\" of %d ranks is open", mesh_out->rank,
           opening->plan->label, mesh_out->world_size);
}

static onehop_result run(oh_opening *opening, oh_mesh *mesh_out) {
    while (opening->state == OH_GATHERING || opening->state == OH_READY) {
        /* Looked at before the sockets: what came before the deadline counts. */
        uint64_t now = oh_clock_ns();
        wait_and_serve(opening, do_due(opening));
        advance(opening);
        if (now >= end_ns(opening) &&
            (opening->state == OH_GATHERING || opening->state == OH_READY))
            fail_for_missing(opening);
    }
    oh_guests_close(opening);
    if (opening->state == OH_FAILED && may_tell(opening) && opening->plan->rank > 0 &&
        !opening->verdict && opening->links[0].state == OH_LINK_MEMBER)
        await_verdict(opening);
    if (opening->state == OH_FAILED) return fail_all(opening);
    hand_over(opening, mesh_out);
    return ONEHOP_OK;
}

onehop_result oh_mesh_open(const oh_mesh_plan *plan, oh_mesh *mesh_out) {
    oh_opening *opening =
        calloc(1, sizeof *opening); /* 20 KiB, too much for some threads' stacks */
    if (!opening) return oh_error(ONEHOP_ERR_MEMORY, "no memory to open a group");
    onehop_result result = begin(opening, plan);
    if (!result) result = run(opening, mesh_out);
    free(opening);
    return result;
}
