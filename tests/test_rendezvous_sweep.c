/* Property: wherever a rank is killed while a group opens and is used for set-up, and whichever of
 * its socket calls fails, all other ranks end at once and name that rank. The victim fails in its
 * n-th call, for every n with the argument "all" (and a largest world size, 3 without), for some
 * without. */
/* The ranks are processes of which many are killed; sanitizers slow that down too much. */
/* labels: waits asan-off tsan-off timeout=300 */
#include "harness.h"

#include "rendezvous/rendezvous.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#define MAX      4
#define INIT_MS  1000
#define PATIENCE 2.0 /* 1 s is wanted; the machine may be busy */

/* ---- faults: the socket calls of the victim go through here ---------------------------------- */

typedef enum fault {
    KILLED,
    EINTR_ONCE,
    EAGAIN_ONCE,
    ENOBUFS_ONCE,
    EIO_ONCE,
    EMFILE_ON
} fault;
static const char *const fault_names[] = {"killed",       "EINTR once", "EAGAIN once",
                                          "ENOBUFS once", "EIO once",   "EMFILE from there on"};
typedef struct trial {
    int world_size, victim, place; /* the place-th call fails */
    fault fault;
    bool silent_exit; /* ranks that fail leave without closing anything */
    int calls;        /* that the victim has made */
    bool said;        /* the victim has sent something */
    bool passed;      /* it has made all its calls: there is no such place */
    char call[32];
    double at;
    struct {
        onehop_result result;
        double ended;
        char text[512];
    } ranks[MAX];
} trial;

static trial *now;
static bool am_victim;

static bool strikes(const char *call, bool makes_descriptor) {
    static const int errors[] = {0, EINTR, EAGAIN, ENOBUFS, EIO, EMFILE};
    if (!am_victim) return false;
    /* Only the sends of the opening, and all: a notice that is dropped leaves it half open. */
    if (now->fault == ENOBUFS_ONCE && strcmp(call, "send")) return false;
    const int n = ++now->calls;
    if (now->fault == EMFILE_ON ? n < now->place || !makes_descriptor : n != now->place)
        return false;
    if (!now->at) {
        now->at = seconds_now();
        snprintf(now->call, sizeof now->call, "%s", call);
    }
    if (now->fault == KILLED) kill(getpid(), SIGKILL);
    errno = errors[now->fault];
    return true;
}

static long said(long result) {
    if (am_victim && result > 0) now->said = true;
    return result;
}

int socket(int domain, int type, int protocol) {
    return strikes("socket", true) ? -1 : (int)syscall(SYS_socket, domain, type, protocol);
}
int connect(int fd, const struct sockaddr *to, socklen_t size) {
    return strikes("connect", false) ? -1 : (int)syscall(SYS_connect, fd, to, size);
}
int bind(int fd, const struct sockaddr *to, socklen_t size) {
    return strikes("bind", false) ? -1 : (int)syscall(SYS_bind, fd, to, size);
}
int listen(int fd, int backlog) {
    return strikes("listen", false) ? -1 : (int)syscall(SYS_listen, fd, backlog);
}
int accept4(int fd, struct sockaddr *from, socklen_t *size, int flags) {
    return strikes("accept4", true) ? -1 : (int)syscall(SYS_accept4, fd, from, size, flags);
}
ssize_t send(int fd, const void *bytes, size_t size, int flags) {
    return strikes("send", false) ? -1 : said(syscall(SYS_sendto, fd, bytes, size, flags, NULL, 0));
}
ssize_t recv(int fd, void *bytes, size_t size, int flags) {
    return strikes("recv", false) ? -1 : syscall(SYS_recvfrom, fd, bytes, size, flags, NULL, NULL);
}
ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    return strikes("sendmsg", false) ? -1 : said(syscall(SYS_sendmsg, fd, message, flags));
}
ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
    return strikes("recvmsg", false) ? -1 : syscall(SYS_recvmsg, fd, message, flags);
}
int getsockopt(int fd, int level, int name, void *restrict value, socklen_t *restrict size) {
    return strikes("getsockopt", false)
               ? -1
               : (int)syscall(SYS_getsockopt, fd, level, name, value, size);
}

/* ---- one rank's life ------------------------------------------------------------------------- */

static onehop_result live(int rank, int world_size, onehop_group **group_out) {
    onehop_group_config g = ONEHOP_CONFIG_INIT(onehop_group_config);
    onehop_config c = ONEHOP_CONFIG_INIT(onehop_config);
    onehop_context *context;
    onehop_symmetric *symmetric;
    const onehop_device host = {ONEHOP_DEVICE_HOST, 0};
    float data[64] = {1};
    g.rank = rank, g.world_size = world_size, g.name = own_name("sweep"), g.timeout_ms = INIT_MS;
    onehop_result result = onehop_group_open(&g, group_out);
    if (result) return result;
    c.group = *group_out, c.device = host, c.push_bytes = 4096, c.pull_bytes = 65536;
    c.timeout_ms = 10000;
    result = onehop_symmetric_alloc(*group_out, host, 4096, &symmetric);
    if (result) return result;
    onehop_symmetric_free(symmetric);
    result = onehop_create(&c, &context);
    if (result) return result;
    result = onehop_all_reduce(context, data, data, 64, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, NULL);
    if (!result) result = onehop_prepare(context, NULL);
    if (!result) result = onehop_capture_begin(context);
    if (!result) result = onehop_capture_end(context);
    if (!result || !now->silent_exit) onehop_destroy(context);
    return result;
}

static void rank_main(int rank, int world_size, void *argument) {
    onehop_group *group = NULL;
    (void)argument;
    am_victim = rank == now->victim;
    onehop_result result = live(rank, world_size, &group);
    now->ranks[rank].result = result;
    now->ranks[rank].ended = seconds_now();
    snprintf(now->ranks[rank].text, sizeof now->ranks[rank].text, "%s", onehop_last_error());
    if (am_victim && !now->at) now->passed = true;
    if (!result || !now->silent_exit) onehop_group_close(group);
    fflush(NULL);
    _exit(0);
}

/* ---- judging --------------------------------------------------------------------------------- */

/* The rank that a sentence is about; calls say first whose sentence it is. */
static int named(const char *text, int self) {
    char own[32];
    snprintf(own, sizeof own, "rank %d: ", self);
    if (!strncmp(text, own, strlen(own))) text += strlen(own);
    const char *at = strstr(text, "rank ");
    return at ? atoi(at + 5) : -1;
}

static void complain(int rank, const char *what) {
    fprintf(stderr, "world size %d, rank %d %s in call %d (%s)%s: rank %d %s\n", now->world_size,
            now->victim, fault_names[now->fault], now->place, now->call,
            now->silent_exit ? ", silent exits" : "", rank, what);
    for (int i = 0; i < now->world_size; i++)
        fprintf(stderr, "  rank %d: %s after %.3f s: %s\n", i,
                onehop_result_name(now->ranks[i].result), now->ranks[i].ended - now->at,
                now->ranks[i].text);
    exit(1);
}

/* Answers that a kernel may give to that call and that mean "again". */
static bool passes(void) {
    const char *call = now->call;
    if (now->fault == KILLED || now->fault >= EIO_ONCE) return false;
    if (!strcmp(call, "socket") || !strcmp(call, "bind") || !strcmp(call, "listen")) return false;
    return now->fault != ENOBUFS_ONCE || !strncmp(call, "send", 4);
}

static void judge(void) {
    for (int i = 0; i < now->world_size; i++) {
        const onehop_result result = now->ranks[i].result;
        const double took = now->ranks[i].ended - now->at;
        if (i == now->victim && now->fault == KILLED) continue;
        if (!result) continue;
        if (passes()) complain(i, "failed for what passes");
        /* Of one that never said a word nobody can know. */
        const bool unknown = !now->said && result == ONEHOP_ERR_MISSING_PEER;
        if (took > PATIENCE && !unknown) complain(i, "waited");
        if (i != now->victim && named(now->ranks[i].text, i) != now->victim)
            complain(i, "named another");
        if (now->said && result == ONEHOP_ERR_MISSING_PEER) complain(i, "waited for the deadline");
    }
}

static bool try_place(int world_size, int victim, fault kind, int place) {
    pid_t pids[MAX];
    memset(now, 0, sizeof *now);
    now->world_size = world_size, now->victim = victim, now->fault = kind, now->place = place;
    now->silent_exit = place % 2;
    for (int r = 0; r < world_size; r++) pids[r] = start_rank(rank_main, r, world_size, NULL);
    for (int r = 0; r < world_size; r++) wait_rank(pids[r]);
    if (now->passed) return false;
    judge();
    return true;
}

int main(int argc, char **argv) {
    const bool all = argc > 1 && !strcmp(argv[1], "all");
    int trials = 0, max = argc > 2 ? atoi(argv[2]) : 3;
    watchdog(all ? 3600 : 200);
    setenv("ONEHOP_LOG", "error", 1);
    now = shared_memory(sizeof *now);
    for (int world_size = 2; world_size <= max; world_size++)
        for (int victim = 0; victim < world_size; victim++)
            for (fault kind = KILLED; kind <= EMFILE_ON; kind++) {
                const bool whole = all || kind == ENOBUFS_ONCE;
                const int step = whole ? 1 : kind == KILLED ? 7 : 41;
                for (int place = whole ? 1 : 4; try_place(world_size, victim, kind, place);
                     place += step)
                    trials++;
            }
    printf("%d trials\n", trials);
    return 0;
}
