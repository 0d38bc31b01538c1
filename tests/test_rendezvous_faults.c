/* Property: an open succeeds on all ranks or fails on all with one cause, whatever is wrong with a
 * rank or its environment; a peer that dies or leaves is seen within 100 ms and named by all;
 * nobody outside the group can harm it. */
/* All ranks are processes, of which ThreadSanitizer sees one at a time. */
/* labels: quick waits tsan-off timeout=180 */
#include "mesh_player.h"

#include <errno.h>
#include <sys/resource.h>

static onehop_result try_open(int rank, int world_size, const char *name, uint32_t timeout_ms,
                              onehop_group **group_out) {
    onehop_group_config config = ONEHOP_CONFIG_INIT(onehop_group_config);
    config.rank = rank;
    config.world_size = world_size;
    config.name = name ? own_name(name) : NULL;
    config.timeout_ms = timeout_ms;
    return onehop_group_open(&config, group_out);
}

static void fails(onehop_result expected, const char *part, int rank, int world_size,
                  const char *name, uint32_t timeout_ms) {
    onehop_group *group = (onehop_group *)1;
    int before = count_fds();
    CHECK_RESULT(expected, try_open(rank, world_size, name, timeout_ms, &group));
    CHECK_CONTAINS(part, onehop_last_error());
    CHECK(group == (onehop_group *)1);
    CHECK_INT(before, count_fds());
}

/* ---- arguments and environment --------------------------------------------------------------- */

static void arguments(void) {
    onehop_group *group;
    onehop_group_config config = ONEHOP_CONFIG_INIT(onehop_group_config);
    CHECK_RESULT(ONEHOP_ERR_NULL, onehop_group_open(NULL, &group));
    CHECK_RESULT(ONEHOP_ERR_NULL, onehop_group_open(&config, NULL));
    CHECK_RESULT(ONEHOP_ERR_NULL, onehop_group_open_local(2, NULL));
    CHECK_RESULT(ONEHOP_ERR_WORLD_SIZE, onehop_group_open_local(17, &group));
    CHECK_RESULT(ONEHOP_ERR_NULL, onehop_group_barrier(NULL));
    fails(ONEHOP_ERR_RANK, "rank is 2: expected 0 to 1", 2, 2, "x", 100);
    fails(ONEHOP_ERR_RANK, "rank is -1", -1, 2, "x", 100);
    fails(ONEHOP_ERR_WORLD_SIZE, "17", 0, 17, "x", 100);
    fails(ONEHOP_ERR_WORLD_SIZE, "-3", 0, -3, "x", 100);
    fails(ONEHOP_ERR_ENVIRONMENT, "RANK is not set", 0, 0, "x", 100);
    fails(ONEHOP_ERR_ENVIRONMENT, "no name", 0, 2, NULL, 100);
    setenv("ONEHOP_INIT_TIMEOUT_MS", "soon", 1);
    fails(ONEHOP_ERR_ENVIRONMENT, "soon", 0, 2, "x", 0);
    unsetenv("ONEHOP_INIT_TIMEOUT_MS");
    setenv("RANK", "0", 1);
    setenv("WORLD_SIZE", "16", 1);
    setenv("LOCAL_WORLD_SIZE", "8", 1);
    fails(ONEHOP_ERR_SEVERAL_HOSTS, "LOCAL_WORLD_SIZE is 8", 0, 0, "x", 100);
    setenv("WORLD_SIZE", "64", 1);
    fails(ONEHOP_ERR_SEVERAL_HOSTS, "WORLD_SIZE is 64", 0, 0, "x", 100);
    setenv("LOCAL_WORLD_SIZE", "64", 1);
    fails(ONEHOP_ERR_WORLD_SIZE, "64", 0, 0, "x", 100);
    setenv("WORLD_SIZE", "0x2", 1);
    fails(ONEHOP_ERR_ENVIRONMENT, "0x2", 0, 0, "x", 100);
    unsetenv("RANK");
    unsetenv("WORLD_SIZE");
    unsetenv("LOCAL_WORLD_SIZE");
    onehop_group_close(NULL);
}

/* ---- failures of an open --------------------------------------------------------------------- */

static void missing_peer(int rank, int world_size, void *argument) {
    (void)world_size, (void)argument;
    char who[200];
    snprintf(who, sizeof who, "ranks 2, 4 of group \"%s\" (world size 5) did not arrive",
             own_name("missing"));
    double start = seconds_now();
    fails(ONEHOP_ERR_MISSING_PEER, who, rank == 2 ? 3 : rank, 5, "missing", 400);
    CHECK_CONTAINS("network namespace", onehop_last_error());
    double took = seconds_now() - start;
    CHECK(took > 0.3 && took < 2);
}

/* Rank 2 stays away, so that nothing is decided when rank 1 comes a second time. */
static void duplicate_rank(int rank, int world_size, void *argument) {
    (void)argument;
    static const int places[] = {0, 1, 1};
    double start = seconds_now();
    if (rank == 2) sleep_ms(300);
    fails(ONEHOP_ERR_DUPLICATE_RANK, "both claim rank 1 of group", places[rank], world_size,
          "twice", 10000);
    CHECK(seconds_now() - start < 1.5);
}

static void all_are_rank_0(int rank, int world_size, void *argument) {
    (void)rank;
    fails(ONEHOP_ERR_DUPLICATE_RANK, "both claim rank 0 of group", 0, world_size, "zeros", 1000);
    __atomic_fetch_add((int *)argument, 1, __ATOMIC_RELAXED);
}

/* A holder that is stopped does not answer. Where addresses change it loses its own meanwhile, and
 * learns when it goes on that it had a twin; which may have become a rank of its own job by
 * then. */
static void silent_holder(int rank, int world_size, void *argument) {
    (void)world_size;
    pid_t *holder = argument;
    if (rank == 0) {
        *holder = getpid();
        fails(ONEHOP_ERR_DUPLICATE_RANK, "both claim rank 0", 0, 2, "silent", 10000);
        return;
    }
    sleep_ms(300);
    kill(*holder, SIGSTOP);
    pid_t child = fork();
    if (!child) {
        sleep_ms(700);
        kill(*holder, SIGCONT);
        _exit(0);
    }
    onehop_group *group;
    const onehop_result result = try_open(0, 2, "silent", 2000, &group);
    CHECK(result == ONEHOP_ERR_DUPLICATE_RANK || result == ONEHOP_ERR_MISSING_PEER);
    CHECK_INT(0, wait_rank(child));
}

/* Rank 1 meets rank 0 or rank 2 first; each pair names both. */
static void world_sizes_differ(int rank, int world_size, void *argument) {
    (void)argument;
    if (rank == 1) sleep_ms(200);
    double start = seconds_now();
    fails(ONEHOP_ERR_DISAGREEMENT, "rank 1", rank, rank == 1 ? 2 : world_size, "sizes", 10000);
    CHECK_CONTAINS("with onehop 0.1 and world size 2", onehop_last_error());
    CHECK_CONTAINS("with onehop 0.1 and world size 3", onehop_last_error());
    CHECK(seconds_now() - start < 2);
}

static void opens_for_ever(int rank, int world_size, void *argument) {
    onehop_group *group;
    try_open(rank, world_size, argument, 100000, &group);
    FAIL("rank %d was to be killed", rank);
}

static void hears_of_death(int rank, int world_size, void *argument) {
    fails(ONEHOP_ERR_PEER_FAILED, "rank 1 ended or left", rank, world_size, argument, 10000);
}

/* Rank 1 cannot begin (its environment is wrong); rank 2 comes when the others know. */
static void cannot_begin(int rank, int world_size, void *argument) {
    (void)argument;
    if (rank == 1) setenv("ONEHOP_LOG", "garbage", 1);
    if (rank == 1) sleep_ms(100);
    if (rank == 2) sleep_ms(300);
    double start = seconds_now();
    onehop_group *group;
    CHECK(try_open(rank, world_size, "cannot begin", 10000, &group) == ONEHOP_ERR_ENVIRONMENT);
    CHECK_CONTAINS("garbage", onehop_last_error());
    if (rank != 1) CHECK_CONTAINS("rank 1: ", onehop_last_error());
    CHECK(seconds_now() - start < 2);
}

/* Rank 2 has met rank 1 alone when it dies. Rank 1 is ready then, and leaves the decision to rank
 * 0, which does not know rank 2 at all: it must hear of the death from rank 1. */
static void met_by_one(int rank, int world_size, void *argument) {
    oh_group_plan plan;
    oh_mesh_plan mesh_plan;
    oh_hello hello;
    (void)argument;
    if (rank < 2) {
        double start = seconds_now();
        fails(ONEHOP_ERR_PEER_FAILED, "rank 2 ended or left", rank, world_size, "met", 10000);
        CHECK(seconds_now() - start < 4);
        return;
    }
    player_plan("met", 2, world_size, &plan, &mesh_plan);
    int fd = player_dial(&mesh_plan, 1);
    player_hello(&mesh_plan, &hello);
    CHECK_INT(sizeof hello, send(fd, &hello, sizeof hello, 0));
    CHECK_INT(sizeof hello, recv(fd, &hello, sizeof hello, MSG_WAITALL));
    sleep_ms(300); /* rank 1 gets ready */
    close(fd);
}

/* Few descriptors suffice; too few are an error that says how many, on all ranks. */
static void few_descriptors(int rank, int world_size, void *argument) {
    const rlim_t max = *(const int *)argument;
    const bool enough = max > 3;
    const struct rlimit limit = {3 + max, 3 + max};
    onehop_group *group;
    for (int fd = 3; fd < 100; fd++) close(fd);
    if (enough || rank == 1) CHECK_INT(0, setrlimit(RLIMIT_NOFILE, &limit));
    double start = seconds_now();
    onehop_result result = try_open(rank, world_size, enough ? "few" : "too few", 10000, &group);
    CHECK_INT(enough ? ONEHOP_OK : ONEHOP_ERR_SYSTEM, result);
    if (enough) CHECK_OK(onehop_group_barrier(group));
    if (enough) onehop_group_close(group);
    if (!enough)
        CHECK_CONTAINS("needs 7 descriptors beside the open ones, the limit", onehop_last_error());
    CHECK(seconds_now() - start < 2);
}

static void death_while_opening(void) {
    pid_t zero = start_rank(hears_of_death, 0, 4, "mid-open");
    pid_t one = start_rank(opens_for_ever, 1, 4, "mid-open");
    pid_t two = start_rank(hears_of_death, 2, 4, "mid-open");
    sleep_ms(300);
    kill(one, SIGKILL);
    double start = seconds_now();
    CHECK_INT(0, wait_rank(zero));
    CHECK_INT(0, wait_rank(two));
    CHECK(seconds_now() - start < 1);
    CHECK_INT(128 + SIGKILL, wait_rank(one));
}

/* Ranks arrive around the moment the others give up: all must see the same end. */
typedef struct edge {
    char name[32];
    unsigned delay_us;
    int opened;
} edge;

static void at_the_edge(int rank, int world_size, void *argument) {
    edge *now = argument;
    onehop_group *group;
    if (rank == world_size - 1) usleep(now->delay_us);
    onehop_result result = try_open(rank, world_size, now->name, 60, &group);
    if (result) {
        CHECK_INT(ONEHOP_ERR_MISSING_PEER, result);
        return;
    }
    __atomic_fetch_add(&now->opened, 1, __ATOMIC_RELAXED);
    CHECK_OK(onehop_group_barrier(group));
    onehop_group_close(group);
}

/* Follows the edge: earlier after a failure, later after a success, in steps that get smaller. */
static void one_end_for_all(void) {
    edge *now = shared_memory(sizeof *now);
    int delay_us = 58000, step_us = 1024;
    for (int i = 0; i < 40; i++) {
        snprintf(now->name, sizeof now->name, "edge %d", i);
        now->delay_us = (unsigned)delay_us;
        now->opened = 0;
        run_ranks(4, at_the_edge, now);
        if (now->opened % 4) FAIL("%d of 4 ranks opened the group", now->opened);
        delay_us += now->opened ? step_us : -step_us;
        if (step_us > 64) step_us -= step_us / 8;
    }
}

/* ---- strangers ------------------------------------------------------------------------------- */

static void other_version(int rank, int world_size, void *argument) {
    oh_group_plan plan;
    oh_mesh_plan mesh_plan;
    oh_hello hello;
    oh_notice notice;
    (void)argument;
    if (rank == 0) {
        fails(ONEHOP_ERR_DISAGREEMENT,
              "rank 0 was set up with onehop 0.1 and world size 2, rank 1 with "
              "onehop 0.2 and world size 2",
              0, world_size, "versions", 10000);
        return;
    }
    player_plan("versions", 1, world_size, &plan, &mesh_plan);
    int fd = player_dial(&mesh_plan, 0);
    player_hello(&mesh_plan, &hello);
    hello.minor++;
    CHECK_INT(sizeof hello, send(fd, &hello, sizeof hello, 0));
    CHECK_INT(sizeof hello, recv(fd, &hello, sizeof hello, MSG_WAITALL));
    CHECK_INT(sizeof notice, recv(fd, &notice, sizeof notice, MSG_WAITALL));
    CHECK_INT(ONEHOP_ERR_DISAGREEMENT, notice.result);
    close(fd);
}

/* Rank 2 is played here: it lets the others get ready and is not ready itself until after rank 1's
 * deadline. Rank 1 has given its word and must not take it back: rank 0 decides, for all. */
static void late_word(int rank, int world_size, void *argument) {
    oh_group_plan plan;
    oh_mesh_plan mesh_plan;
    oh_hello hello;
    oh_notice notice = {.magic = OH_NOTICE_MAGIC, .kind = OH_NOTICE_READY};
    onehop_group *group;
    int fds[2];
    (void)argument;
    if (rank < 2) {
        char all[3];
        CHECK_OK(try_open(rank, world_size, "late word", rank ? 300 : 10000, &group));
        if (rank) CHECK_INT(300, group->timeout_ms);
        CHECK_RESULT(ONEHOP_ERR_PEER_LOST, onehop_group_allgather(group, "x", all, 1));
        onehop_group_close(group);
        return;
    }
    player_plan("late word", 2, world_size, &plan, &mesh_plan);
    for (int i = 0; i < 2; i++) {
        fds[i] = player_dial(&mesh_plan, i);
        player_hello(&mesh_plan, &hello);
        CHECK_INT(sizeof hello, send(fds[i], &hello, sizeof hello, 0));
        CHECK_INT(sizeof hello, recv(fds[i], &hello, sizeof hello, MSG_WAITALL));
        CHECK_INT(i, hello.rank);
    }
    sleep_ms(800);
    CHECK_INT(sizeof notice, send(fds[0], &notice, sizeof notice, 0));
    CHECK_INT(sizeof notice, recv(fds[0], &notice, sizeof notice, MSG_WAITALL));
    CHECK_INT(OH_NOTICE_COMMIT, notice.kind);
    sleep_ms(100);
    CHECK_INT(40 + 1,
              recv(fds[1], &notice, sizeof notice, MSG_DONTWAIT)); /* a frame, nothing else */
}

/* Silent, talking rubbish, half a hello, hellos with impossible ranks, another user. */
static void be_hostile(int rank, int world_size, void *argument) {
    oh_group_plan plan;
    oh_mesh_plan mesh_plan;
    oh_hello hello;
    int fds[200];
    (void)argument;
    player_plan("guarded", 1, 2, &plan, &mesh_plan);
    if (rank == world_size - 1 && geteuid() == 0) CHECK_INT(0, setresuid(-1, 65534, -1));
    for (int i = 0; i < 200; i++) {
        fds[i] = player_dial(&mesh_plan, 0);
        player_hello(&mesh_plan, &hello);
        if (i % 5 == 1) memset(&hello, i, sizeof hello);
        if (i % 5 == 2) hello.rank = i % 2 ? -1 : 1000000;
        if (i % 5 == 3) hello.name.word[1]++;
        size_t size = i % 5 == 0 ? 0 : i % 5 == 4 ? 64 : sizeof hello;
        if (size && send(fds[i], &hello, size, MSG_NOSIGNAL) < 0)
            CHECK(errno == EPIPE || errno == ECONNRESET);
    }
    sleep_ms(60000);
}

static void be_guarded(int rank, int world_size, void *argument) {
    onehop_group *group;
    (void)argument;
    if (rank == 1) sleep_ms(1000);
    double start = seconds_now();
    onehop_set_log(NULL, NULL);
    CHECK_OK(try_open(rank, world_size, "guarded", 20000, &group));
    CHECK(rank == 0 || seconds_now() - start < 1);
    CHECK_OK(onehop_group_barrier(group));
    onehop_group_close(group);
}

static void hostile_connections(void) {
    setenv("ONEHOP_LOG", "error", 1); /* a line per dropped connection otherwise */
    pid_t zero = start_rank(be_guarded, 0, 2, NULL);
    pid_t bad[3];
    for (int i = 0; i < 3; i++) bad[i] = start_rank(be_hostile, i, 3, NULL);
    CHECK_INT(0, wait_rank(start_rank(be_guarded, 1, 2, NULL)));
    CHECK_INT(0, wait_rank(zero));
    for (int i = 0; i < 3; i++) {
        kill(bad[i], SIGKILL);
        CHECK_INT(128 + SIGKILL, wait_rank(bad[i])); /* it had not failed before */
    }
    unsetenv("ONEHOP_LOG");
}

int main(void) {
    int *refused = shared_memory(sizeof *refused);
    watchdog(100);
    arguments();
    run_ranks(3, missing_peer, NULL);
    run_ranks(3, duplicate_rank, NULL);
    run_ranks(4, all_are_rank_0, refused);
    CHECK_INT(4, *refused);
    run_ranks(2, silent_holder, shared_memory(sizeof(pid_t)));
    run_ranks(3, world_sizes_differ, NULL);
    run_ranks(2, other_version, NULL);
    run_ranks(3, late_word, NULL);
    run_ranks(3, cannot_begin, NULL);
    run_ranks(3, met_by_one, NULL);
    for (int max = 2; max <= 7; max += 5) run_ranks(3, few_descriptors, &max);
    death_while_opening();
    one_end_for_all();
    hostile_connections();
    return 0;
}
