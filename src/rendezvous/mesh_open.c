/* Opening a mesh: the loop and the decision. The protocol is in mesh.h. */
#include "rendezvous/opening.h"

#include "base/wait.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define OH_DECISION_MS 1000 /* how long past its own end a rank waits for rank 0's word */

void oh_mesh_greet(const oh_mesh_plan *plan, oh_hello *hello_out) {
    *hello_out = (oh_hello){.magic = OH_HELLO_MAGIC,
                            .major = ONEHOP_VERSION_MAJOR,
                            .minor = ONEHOP_VERSION_MINOR,
                            .rank = plan->rank,
                            .world_size = plan->world_size,
                            .name = plan->name,
                            .job = plan->job,
                            .boot = oh_identity_boot(),
                            .netns = oh_identity_netns()};
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
    oh_mesh_greet(plan, &opening->hello);
    onehop_result result = oh_process_id(&opening->hello.process);
    return result ? result : oh_mesh_listen(opening);
}

/* ---- one turn of the loop -------------------------------------------------------------------- */

/* A rank that has said READY may have been taken at its word: it leaves the decision to rank 0,
 * which has a deadline of its own, and gives up only if rank 0 is silent long after. */
static uint64_t end_ns(const oh_opening *opening) {
    bool waits = opening->state == OH_READY && opening->plan->rank > 0;
    return opening->deadline_ns + (waits ? OH_DECISION_MS * 1000000ull : 0);
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
    if (settles && all_known(opening) && opening->settled_ns < next) next = opening->settled_ns;
    for (int i = 0; i < opening->plan->rank && opening->state == OH_GATHERING; i++) {
        oh_link *link = &opening->links[i];
        if (link->state == OH_LINK_ABSENT && link->retry_ns <= oh_clock_ns())
            oh_link_connect(opening, i);
        if (link->state == OH_LINK_ABSENT && link->retry_ns < next) next = link->retry_ns;
    }
    return next;
}

/* A rank that is ready reads only what rank 0 sends: a peer may already have had its COMMIT, and
 * then its frames, or that it leaves again, concern the open group. That a peer has ended is for
 * rank 0 to judge; it is told, for it may not know the peer yet. */
static bool heard(const oh_opening *opening, int rank) {
    return opening->state == OH_GATHERING || opening->plan->rank == 0 || rank == 0;
}

/* polls: sockets of ranks, pidfds of ranks, listeners, guests. */
enum {
    AT_PIDFDS = ONEHOP_MAX_RANKS,
    AT_LISTENER = 2 * ONEHOP_MAX_RANKS,
    AT_GUESTS = AT_LISTENER + 2,
    POLLS = AT_GUESTS + OH_GUESTS
};

static void prepare_polls(const oh_opening *opening, struct pollfd *polls) {
    for (int i = 0; i < POLLS; i++) polls[i] = (struct pollfd){.fd = -1, .events = POLLIN};
    for (int i = 0; i < opening->plan->world_size; i++) {
        if (opening->links[i].told) continue;
        polls[i].fd = opening->links[i].fd;
        polls[AT_PIDFDS + i].fd = opening->links[i].pidfd;
        if (!heard(opening, i)) polls[i].events = POLLRDHUP;
    }
    for (int i = 0; i < 2; i++) polls[AT_LISTENER + i].fd = opening->listeners[i];
    for (int i = 0; i < OH_GUESTS; i++) polls[AT_GUESTS + i].fd = opening->guests[i].fd;
}

/* Peers before newcomers: a rank that comes again has ended its last attempt first. */
static void serve(oh_opening *opening, const struct pollfd *polls) {
    for (int i = 0; i < opening->plan->world_size && opening->state < OH_COMMITTED; i++) {
        short here = polls[i].revents, ended = polls[AT_PIDFDS + i].revents;
        if (!heard(opening, i) && (here || ended))
            oh_link_report(opening, i);
        else if (here)
            oh_link_serve(opening, i, false);
        if (ended && heard(opening, i) && opening->state < OH_COMMITTED)
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
    prepare_polls(opening, polls);
    int events = oh_mesh_poll(polls, POLLS, oh_wait_poll_ms(until_ns > now ? until_ns - now : 0));
    if (events > 0)
        serve(opening, polls);
    else if (events == 0 && opening->state == OH_READY && opening->plan->rank > 0)
        oh_links_answer(opening);
    else if (events < 0 && errno != EINTR)
        oh_opening_fail_here(opening,
                             oh_mesh_system_error(errno, opening->plan->world_size, "poll"));
}

/* ---- the decision ---------------------------------------------------------------------------- */

static void commit_if_all_ready(oh_opening *opening) {
    int world_size = opening->plan->world_size;
    for (int i = 1; i < world_size; i++)
        if (!opening->links[i].ready) return;
    /* One that has ended since is lost to the open group. One that cannot be told ends it. */
    for (int i = 1; i < world_size; i++)
        if (!oh_link_notify(opening, i, OH_NOTICE_COMMIT)) return;
    opening->state = OH_COMMITTED;
}

/* No twin has come in time, or none can, see mesh.h. */
static bool settled(const oh_opening *opening) {
    return oh_mesh_holds_address(opening) &&
           (oh_clock_ns() >= opening->settled_ns || oh_mesh_met_before(opening));
}

static void get_ready(oh_opening *opening) {
    /* Whoever knocks for our rank at this moment still gets its answer. */
    oh_guests_accept(opening);
    if (opening->state != OH_GATHERING) return;
    oh_guests_close(opening);
    opening->state = OH_READY;
    opening->said_ready = true;
    oh_link_notify(opening, 0, OH_NOTICE_READY);
}

static void advance(oh_opening *opening) {
    if (opening->state == OH_GATHERING && all_known(opening) && settled(opening))
        get_ready(opening);
    if (opening->state == OH_READY && opening->plan->rank == 0) commit_if_all_ready(opening);
}

static uint32_t absent_ranks(const oh_opening *opening) {
    uint32_t ranks = 0;
    for (int i = 0; i < opening->plan->world_size; i++)
        if (i != opening->plan->rank && opening->links[i].state != OH_LINK_MEMBER) ranks |= 1u << i;
    return ranks;
}

static uint32_t unready_ranks(const oh_opening *opening) {
    uint32_t ranks = 0;
    for (int i = 1; i < opening->plan->world_size && opening->plan->rank == 0; i++)
        if (!opening->links[i].ready) ranks |= 1u << i;
    return opening->plan->rank ? 1u : ranks;
}

/* Who is not ready may wait for another. Who is absent waits for nobody: each connects by
 * itself. */
static bool ask_unready(oh_opening *opening) {
    const uint32_t ranks = unready_ranks(opening);
    if (opening->asked || absent_ranks(opening) || !(ranks & (ranks - 1))) return false;
    opening->asked = ranks;
    for (int i = 1; i < opening->plan->world_size; i++)
        if (ranks >> i & 1) oh_link_notify(opening, i, OH_NOTICE_ASK);
    opening->deadline_ns = oh_clock_ns() + OH_ANSWER_MS * 1000000ull;
    return true;
}

static void fail_for_missing(oh_opening *opening) {
    const oh_mesh_plan *plan = opening->plan;
    char names[96], more[96] = "", text[sizeof opening->text];
    const uint32_t absent = absent_ranks(opening);
    const uint32_t unready = oh_mesh_silent(unready_ranks(opening), opening->asked, opening->here);
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

/* ---- the end --------------------------------------------------------------------------------- */

static onehop_result report(const oh_opening *opening) {
    oh_notice notice = {.result = opening->result, .origin = opening->origin};
    if (opening->origin == opening->plan->rank)
        return oh_error(opening->result, "%s", opening->text);
    memcpy(notice.text, opening->text, sizeof notice.text);
    return oh_mesh_adopt(&notice);
}

static onehop_result fail_all(oh_opening *opening) {
    oh_opening_spread(opening);
    for (int i = 0; i < ONEHOP_MAX_RANKS; i++) { /* ranks of another world size are there too */
        if (opening->links[i].fd >= 0) close(opening->links[i].fd);
        if (opening->links[i].pidfd >= 0) close(opening->links[i].pidfd);
    }
    return report(opening);
}

static void hand_over(const oh_opening *opening, oh_mesh *mesh_out) {
    memset(mesh_out, 0, sizeof *mesh_out);
    pthread_mutex_init(&mesh_out->send_lock, NULL);
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

static void hear_hook(oh_opening *opening) {
    if (!oh_wait_interrupted() || opening->state >= OH_COMMITTED) return;
    onehop_result result = oh_wait_ended("opening a group");
    oh_opening_fail(opening, opening->plan->rank, result, onehop_last_error());
}

static onehop_result run(oh_opening *opening, oh_mesh *mesh_out) {
    uint64_t looked = oh_clock_ns();
    while (opening->state == OH_GATHERING || opening->state == OH_READY) {
        /* Looked at before the sockets: what came before the deadline counts. */
        uint64_t now = oh_clock_ns();
        const uint64_t pause_ns = oh_wait_pause_ns(&looked, now);
        opening->deadline_ns += pause_ns;
        opening->settled_ns += pause_ns;
        wait_and_serve(opening, do_due(opening));
        advance(opening);
        hear_hook(opening);
        if (now >= end_ns(opening) &&
            (opening->state == OH_GATHERING || opening->state == OH_READY) && !ask_unready(opening))
            fail_for_missing(opening);
    }
    if (opening->state == OH_FAILED) return fail_all(opening);
    oh_guests_close(opening);
    hand_over(opening, mesh_out);
    return ONEHOP_OK;
}

onehop_result oh_mesh_open(const oh_mesh_plan *plan, oh_mesh *mesh_out) {
    oh_opening *opening =
        calloc(1, sizeof *opening); /* 20 KiB, too much for some threads' stacks */
    if (!opening)
        return oh_mesh_refuse(plan, oh_error(ONEHOP_ERR_MEMORY, "no memory to open a group"));
    onehop_result result = begin(opening, plan);
    result = result ? oh_mesh_refuse(plan, result) : run(opening, mesh_out);
    free(opening);
    return result;
}
