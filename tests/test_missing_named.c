/* Property: of several peers that are missing when a rank's time is over, only those are named that
 * do not wait themselves; a rank that is asked waits on, until its own time is over. One rank is
 * played here and falls silent at a chosen point; whose time is over first is chosen by the
 * timeouts. */
/* All ranks are processes, of which ThreadSanitizer sees one at a time. */
/* labels: quick waits tsan-off timeout=60 */
#include "mesh_player.h"

#include "rendezvous/exchange.h"

#define SHORT_MS   400u
#define LONG_MS    20000u
#define SILENCE_MS 1500u
#define SLOTS      100 /* addresses that a played rank takes: for so many OH_SLOT_MS */

static onehop_result open_named(int rank, const char *name, uint32_t timeout_ms,
                                onehop_group **group_out) {
    onehop_group_config config = ONEHOP_CONFIG_INIT(onehop_group_config);
    config.rank = rank;
    config.world_size = 3;
    config.name = own_name(name);
    config.timeout_ms = timeout_ms;
    return onehop_group_open(&config, group_out);
}

static void exchange(onehop_group *group, onehop_result expected, const char *sentence) {
    char all[3];
    double start = seconds_now();
    CHECK_RESULT(expected, onehop_group_allgather(group, "x", all, 1));
    if (expected) CHECK_CONTAINS(sentence, onehop_last_error());
    CHECK(seconds_now() - start < 1e-3 * (SHORT_MS + SILENCE_MS) + 1);
}

/* ---- a rank that is played ------------------------------------------------------------------- */

static void get(int fd, void *bytes, size_t size) {
    CHECK_INT(size, recv(fd, bytes, size, MSG_WAITALL));
}

static void put(int fd, const void *bytes, size_t size) {
    CHECK_INT(size, send(fd, bytes, size, MSG_NOSIGNAL));
}

static void say(int fd, oh_notice_kind kind) {
    const oh_notice notice = {.magic = OH_NOTICE_MAGIC, .kind = kind, .culprit = -1};
    put(fd, &notice, sizeof notice);
}

static void hear(int fd, oh_notice_kind kind) {
    oh_notice notice;
    get(fd, &notice, sizeof notice);
    CHECK_INT(kind, notice.kind);
}

static int meet_lower(const oh_mesh_plan *plan, int rank) {
    oh_hello hello;
    const int fd = player_dial(plan, rank);
    player_hello(plan, &hello);
    put(fd, &hello, sizeof hello);
    get(fd, &hello, sizeof hello);
    CHECK_INT(rank, hello.rank);
    return fd;
}

/* At the addresses of all slots of the next seconds, so that it need not move. */
static void listen_long(const oh_mesh_plan *plan, struct pollfd *listeners) {
    const uint64_t first = oh_mesh_slot(plan);
    for (unsigned i = 0; i < SLOTS; i++) {
        struct sockaddr_un address;
        const socklen_t size = oh_mesh_address(plan, plan->rank, first + i, &address);
        const int fd = plan->replayed || !i ? socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0) : -1;
        listeners[i] = (struct pollfd){.fd = fd, .events = POLLIN};
        if (fd < 0) continue;
        CHECK_INT(0, bind(fd, (const struct sockaddr *)&address, size));
        CHECK_INT(0, listen(fd, 8));
    }
}

static int welcome(const oh_mesh_plan *plan, struct pollfd *listeners, int *rank_out) {
    oh_hello hello;
    int i = 0;
    CHECK(poll(listeners, SLOTS, 10000) > 0);
    while (!listeners[i].revents) i++;
    const int fd = accept(listeners[i].fd, NULL, NULL);
    CHECK(fd >= 0);
    get(fd, &hello, sizeof hello);
    *rank_out = hello.rank;
    player_hello(plan, &hello);
    put(fd, &hello, sizeof hello);
    return fd;
}

/* ---- in an exchange -------------------------------------------------------------------------- */

/* Rank 2 sends its frame to rank 0 and not to rank 1: so rank 0 misses both in the next
 * exchange. */
static void silent_in_exchange(int rank, int world_size, void *argument) {
    static const oh_frame frame = {.magic = OH_FRAME_MAGIC, .sequence = 1, .bytes = 1};
    const char *culprit = "rank 2 did not complete the exchange within 400 ms";
    oh_group_plan plan;
    oh_mesh_plan mesh_plan;
    onehop_group *group;
    int fds[2];
    (void)argument;
    if (rank < 2) {
        CHECK_OK(open_named(rank, "exchange", rank ? LONG_MS : SHORT_MS, &group));
        exchange(group, ONEHOP_OK, NULL);
        if (rank == 0) exchange(group, ONEHOP_ERR_MISSING_PEER, culprit);
        onehop_group_close(group);
        return;
    }
    player_plan("exchange", 2, world_size, &plan, &mesh_plan);
    for (int i = 0; i < 2; i++) fds[i] = meet_lower(&mesh_plan, i);
    say(fds[0], OH_NOTICE_READY);
    hear(fds[0], OH_NOTICE_COMMIT);
    for (int i = 0; i < 2; i++) {
        put(fds[i], &frame, sizeof frame);
        put(fds[i], "x", 1);
        sleep_ms(SILENCE_MS);
    }
}

/* ---- while a group opens --------------------------------------------------------------------- */

/* Rank 0 tells rank 1 that the group is open, and not rank 2, which waits to hear it. */
static void silent_in_decision(int rank, int world_size, void *argument) {
    const char *culprit = "rank 0 did not complete the exchange within 400 ms";
    struct pollfd listeners[SLOTS];
    oh_group_plan plan;
    oh_mesh_plan mesh_plan;
    onehop_group *group;
    int fds[3];
    (void)argument;
    if (rank > 0) {
        CHECK_OK(open_named(rank, "decision", rank == 1 ? SHORT_MS : LONG_MS, &group));
        if (rank == 1) exchange(group, ONEHOP_ERR_MISSING_PEER, culprit);
        onehop_group_close(group);
        return;
    }
    player_plan("decision", 0, world_size, &plan, &mesh_plan);
    listen_long(&mesh_plan, listeners);
    for (int i = 0; i < 2; i++) {
        int who, fd = welcome(&mesh_plan, listeners, &who);
        CHECK(who == 1 || who == 2);
        fds[who] = fd;
    }
    for (int i = 1; i < 3; i++) hear(fds[i], OH_NOTICE_READY);
    for (int i = 1; i < 3; i++) {
        say(fds[i], OH_NOTICE_COMMIT);
        sleep_ms(SILENCE_MS);
    }
}

/* Rank 1 has met rank 0 and does not answer rank 2: so rank 0 misses the READY of both. */
static void silent_in_gathering(int rank, int world_size, void *argument) {
    struct pollfd listeners[SLOTS];
    oh_group_plan plan;
    oh_mesh_plan mesh_plan;
    onehop_group *group;
    (void)argument;
    if (rank != 1) {
        double start = seconds_now();
        CHECK_RESULT(ONEHOP_ERR_MISSING_PEER,
                     open_named(rank, "gathering", rank ? LONG_MS : SHORT_MS, &group));
        CHECK(!strncmp(onehop_last_error(), "rank 1 of group", 15));
        CHECK_CONTAINS("did not get ready within 400 ms", onehop_last_error());
        CHECK(seconds_now() - start < 1e-3 * SHORT_MS + 1);
        return;
    }
    player_plan("gathering", 1, world_size, &plan, &mesh_plan);
    listen_long(&mesh_plan, listeners);
    meet_lower(&mesh_plan, 0);
    sleep_ms(SILENCE_MS);
}

int main(void) {
    watchdog(50);
    run_ranks(3, silent_in_exchange, NULL);
    run_ranks(3, silent_in_decision, NULL);
    run_ranks(3, silent_in_gathering, NULL);
    return 0;
}
