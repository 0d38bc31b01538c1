/* Property: a group set up through the caller's all-gather is the ordinary mesh where sockets
 * reach, goes on through the callback where they do not, and fails on all ranks alike when ranks
 * differ. */
/* labels: quick */
#include "harness.h"

#include "rendezvous/rendezvous.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/stat.h>

/* The all-gather: a table in shared memory between two barriers. */
#define ROW ((size_t)1 << 20)

typedef struct table {
    pthread_barrier_t barrier;
    int calls;  /* by rank 0 */
    int spoil;  /* byte of rank 1's first message to change; -1: none */
    int status; /* returned by the second call of rank 1 */
    unsigned char rows[ONEHOP_MAX_RANKS][ROW];
} table;

typedef struct seat {
    table *shared;
    int rank, world_size, calls;
    int pair; /* socket to the other of two ranks */
} seat;

static table *new_table(int world_size) {
    table *shared = shared_memory(sizeof *shared);
    pthread_barrierattr_t attributes;
    pthread_barrierattr_init(&attributes);
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&shared->barrier, &attributes, (unsigned)world_size);
    shared->spoil = -1;
    return shared;
}

static int through_table(void *user, const void *send, void *recv, size_t bytes) {
    seat *own = user;
    table *shared = own->shared;
    CHECK(bytes > 0 && bytes <= ROW);
    if (own->rank == 0) shared->calls++;
    memcpy(shared->rows[own->rank], send, bytes);
    if (own->rank == 1 && own->calls == 0 && shared->spoil >= 0)
        shared->rows[1][shared->spoil] ^= 1;
    own->calls++;
    pthread_barrier_wait(&shared->barrier);
    for (int i = 0; i < own->world_size; i++)
        memcpy((char *)recv + (size_t)i * bytes, shared->rows[i], bytes);
    pthread_barrier_wait(&shared->barrier);
    return own->rank == 1 && own->calls == 2 ? shared->status : 0;
}

/* For two ranks: over a socket pair made before the fork. */
static int over_pair(void *user, int fd, int *fds_out) {
    seat *own = user;
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof fd)];
    } control = {.bytes = {0}};
    char byte = fd >= 0;
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        message.msg_control = &control;
        message.msg_controllen = sizeof control;
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        *header = (struct cmsghdr){CMSG_LEN(sizeof fd), SOL_SOCKET, SCM_RIGHTS};
        memcpy(CMSG_DATA(header), &fd, sizeof fd);
    }
    CHECK_INT(1, sendmsg(own->pair, &message, 0));
    message.msg_control = &control;
    message.msg_controllen = sizeof control;
    CHECK_INT(1, recvmsg(own->pair, &message, 0));
    fds_out[own->rank] = fd >= 0 ? dup(fd) : -1;
    fds_out[!own->rank] = -1;
    if (byte) memcpy(&fds_out[!own->rank], CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
    return 0;
}

static onehop_result try_open(seat *own, bool pass, onehop_group **group_out) {
    onehop_group_config config = ONEHOP_CONFIG_INIT(onehop_group_config);
    config.rank = own->rank;
    config.world_size = own->world_size;
    config.allgather = through_table;
    config.pass_fd = pass ? over_pair : NULL;
    config.user = own;
    config.timeout_ms = 20000;
    return onehop_group_open(&config, group_out);
}

static void gather_ranks(onehop_group *group, size_t count) {
    int rank = onehop_group_rank(group), world_size = onehop_group_size(group);
    int *mine = malloc(count * sizeof *mine),
        *all = malloc(count * (size_t)world_size * sizeof *all);
    CHECK(mine && all);
    for (size_t i = 0; i < count; i++) mine[i] = rank * 1000 + (int)i;
    CHECK_OK(onehop_group_allgather(group, mine, all, count * sizeof *mine));
    for (size_t i = 0; i < count * (size_t)world_size; i++)
        CHECK_INT((int)(i / count) * 1000 + (int)(i % count), all[i]);
    free(mine);
    free(all);
}

static void pass_one(onehop_group *group) {
    int rank = onehop_group_rank(group), world_size = onehop_group_size(group);
    int given[2] = {memfd_create("test", 0), -1}, got[2 * ONEHOP_MAX_RANKS];
    CHECK_INT(0, ftruncate(given[0], 10 + rank));
    CHECK_OK(oh_rendezvous_pass_fds(group, given, 2, got));
    for (int i = 0; i < world_size; i++) {
        struct stat info;
        CHECK_INT(-1, got[2 * i + 1]);
        CHECK_INT(i != rank, got[2 * i] >= 0);
        if (i == rank) continue;
        CHECK_INT(0, fstat(got[2 * i], &info));
        CHECK_INT(10 + i, info.st_size);
        CHECK_INT(FD_CLOEXEC, fcntl(got[2 * i], F_GETFD));
        close(got[2 * i]);
    }
    close(given[0]);
}

/* ---- where sockets reach --------------------------------------------------------------------- */

static void becomes_a_mesh(int rank, int world_size, void *shared) {
    seat own = {shared, rank, world_size, 0, -1};
    onehop_group *group = NULL;
    int before = count_fds();
    CHECK_OK(try_open(&own, false, &group));
    int calls = own.calls;
    gather_ranks(group, 100);
    pass_one(group);
    for (int i = 0; i < world_size; i++) CHECK_INT(i == rank, oh_rendezvous_same_process(group, i));
    CHECK_OK(oh_rendezvous_agree(group, ONEHOP_OK));
    CHECK_INT(calls, own.calls); /* the callback is needed no more */
    if (rank == 1) {
        onehop_group_close(group);
        return;
    }
    while (oh_rendezvous_lost_peer(group) < 0) sleep_ms(1);
    onehop_group_close(group);
    CHECK_INT(before, count_fds());
}

static void in_threads(int rank, int world_size, void *shared) {
    seat own = {shared, rank, world_size, 0, -1};
    onehop_group *group = NULL;
    CHECK_OK(try_open(&own, false, &group));
    for (int i = 0; i < world_size; i++) CHECK(oh_rendezvous_same_process(group, i));
    gather_ranks(group, 100);
    CHECK_OK(onehop_group_barrier(group));
    onehop_group_close(group);
}

static void alone(void) {
    seat own = {NULL, 0, 1, 0, -1};
    onehop_group *group = NULL;
    int before = count_fds();
    CHECK_OK(try_open(&own, false, &group));
    gather_ranks(group, 3);
    CHECK_INT(0, own.calls);
    CHECK_INT(before, count_fds());
    onehop_group_close(group);
}

/* ---- where they do not ----------------------------------------------------------------------- */

/* Byte of the first round that holds the network namespace of rank 1: spoiling it is a way to be in
 * another namespace that needs no privilege. See oh_intro. */
enum {
    AT_MINOR = 12,
    AT_RANK = 20,
    AT_NETNS = 32,
    AT_BOOT = 40
};

static void stays_with_callback(int rank, int world_size, void *argument) {
    seat own = ((seat *)argument)[rank];
    onehop_group *group = NULL;
    bool pass = own.pair >= 0;
    int before = count_fds();
    CHECK_OK(try_open(&own, pass, &group));
    CHECK_INT(before, count_fds());
    for (int i = 0; i < world_size; i++) CHECK_INT(i == rank, oh_rendezvous_same_process(group, i));
    gather_ranks(group, 1000);
    CHECK_INT(pass, oh_rendezvous_can_pass_fds(group));
    int fd = 0, got[ONEHOP_MAX_RANKS];
    if (pass)
        pass_one(group);
    else
        CHECK_RESULT(ONEHOP_ERR_UNSUPPORTED, oh_rendezvous_pass_fds(group, &fd, 1, got));
    CHECK_INT(before, count_fds());
    CHECK_INT(-1, oh_rendezvous_lost_peer(group));
    onehop_result mine = rank == 1 ? oh_error(ONEHOP_ERR_DRIVER, "bad luck") : ONEHOP_OK;
    CHECK_RESULT(ONEHOP_ERR_DRIVER, oh_rendezvous_agree(group, mine));
    char bytes[3 * ONEHOP_MAX_RANKS];
    CHECK_RESULT(ONEHOP_ERR_DISAGREEMENT, onehop_group_allgather(group, "ab", bytes, rank ? 2 : 1));
    CHECK_RESULT(ONEHOP_ERR_DISAGREEMENT, onehop_group_barrier(group));
    onehop_group_close(group);
}

static void other_namespace(bool pass) {
    seat seats[2];
    int pair[2] = {-1, -1};
    table *shared = new_table(2);
    shared->spoil = AT_NETNS;
    if (pass) CHECK_INT(0, socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
    for (int i = 0; i < 2; i++) seats[i] = (seat){shared, i, 2, 0, pair[i]};
    run_ranks(2, stays_with_callback, seats);
    if (pass) close(pair[0]), close(pair[1]);
}

/* The real thing, where it is allowed. */
static void unshared(int rank, int world_size, void *shared) {
    seat own = {shared, rank, world_size, 0, -1};
    onehop_group *group = NULL;
    bool moved = rank != 1 || unshare(CLONE_NEWNET) == 0;
    CHECK_OK(try_open(&own, false, &group));
    CHECK_INT(!moved, rank == 1 && oh_rendezvous_can_pass_fds(group));
    gather_ranks(group, 10);
    onehop_group_close(group);
}

/* ---- failures -------------------------------------------------------------------------------- */

typedef struct failure {
    table *shared;
    onehop_result result;
    const char *part;
} failure;

static void fails_alike(int rank, int world_size, void *argument) {
    failure *expected = argument;
    seat own = {expected->shared, rank, world_size, 0, -1};
    onehop_group *group = NULL;
    int before = count_fds();
    CHECK_RESULT(expected->result, try_open(&own, false, &group));
    CHECK_CONTAINS(expected->part, onehop_last_error());
    CHECK_INT(before, count_fds());
    CHECK(!group);
}

static void expect_failure(int spoil, onehop_result result, const char *part) {
    failure expected = {new_table(3), result, part};
    expected.shared->spoil = spoil;
    run_ranks(3, fails_alike, &expected);
}

static void callback_fails(int rank, int world_size, void *shared) {
    seat own = {shared, rank, world_size, 0, -1};
    onehop_group *group = NULL;
    /* Only rank 1 is told; the others have a group in which it is lost. */
    CHECK_RESULT(rank == 1 ? ONEHOP_ERR_SYSTEM : ONEHOP_OK, try_open(&own, false, &group));
    if (rank == 1) {
        CHECK_CONTAINS("returned 7", onehop_last_error());
        return;
    }
    CHECK_RESULT(ONEHOP_ERR_PEER_LOST, onehop_group_barrier(group));
    onehop_group_close(group);
}

int main(void) {
    static const int sizes[] = {2, 3, 16};
    watchdog(100);
    alone();
    for (int i = 0; i < 3; i++) {
        run_ranks(sizes[i], becomes_a_mesh, new_table(sizes[i]));
        run_threads(sizes[i], in_threads, new_table(sizes[i]));
    }
    other_namespace(false);
    other_namespace(true);
    if (geteuid() == 0) run_ranks(2, unshared, new_table(2));
    expect_failure(AT_BOOT, ONEHOP_ERR_SEVERAL_HOSTS, "rank 0 and rank 1 are on different hosts");
    expect_failure(AT_MINOR, ONEHOP_ERR_DISAGREEMENT, "rank 0 was set up with onehop 0.1");
    expect_failure(AT_RANK, ONEHOP_ERR_DISAGREEMENT, "rank order");
    table *shared = new_table(2);
    shared->status = 7;
    run_ranks(2, callback_fails, shared);
    return 0;
}
