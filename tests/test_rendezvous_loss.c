/* Property: a peer that dies or leaves is seen within 100 ms and the same one is named by all, also
 * if a forked child keeps its sockets open and if the kernel refuses pidfds; what it sent before
 * still arrives; exchanges that cannot succeed end in an error, in time, and break the group. */
/* labels: quick waits */
#include "harness.h"

#include "rendezvous/rendezvous.h"

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/syscall.h>

static onehop_group *open_named(int rank, int world_size, const char *name) {
    onehop_group_config config = ONEHOP_CONFIG_INIT(onehop_group_config);
    onehop_group *group = NULL;
    config.rank = rank;
    config.world_size = world_size;
    config.name = own_name(name);
    config.timeout_ms = 20000;
    CHECK_OK(onehop_group_open(&config, &group));
    return group;
}

/* ---- peers that go --------------------------------------------------------------------------- */

typedef struct death {
    double killed_at; /* when rank 2 died or left */
    bool keep_socket; /* a forked child of rank 2 keeps its sockets open */
    bool leave;       /* it closes its group instead */
    bool no_pidfd;
    bool late; /* somebody needed more than 100 ms */
} death;

static void refuse_pidfds(void) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 434 /* pidfd_open */, 3, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_getsockopt, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 77 /* SO_PEERPIDFD */, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    CHECK_INT(0, prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    CHECK_INT(0, prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
}

static void go(onehop_group *group, death *how) {
    if (how->keep_socket && !fork()) {
        alarm(30);
        prctl(PR_SET_PDEATHSIG, 0);
        sleep_ms(1500);
        _exit(0);
    }
    sleep_ms(100);
    how->killed_at = seconds_now();
    if (!how->leave) kill(getpid(), SIGKILL);
    onehop_group_close(group);
    sleep_ms(1000);
}

static void survive(int rank, int world_size, void *argument) {
    death *how = argument;
    char all[ONEHOP_MAX_RANKS];
    if (how->no_pidfd) refuse_pidfds();
    onehop_group *group = open_named(rank, world_size, "death");
    CHECK_OK(onehop_group_barrier(group));
    if (rank == 2) {
        go(group, how);
        return;
    }
    if (rank == 0) { /* waits inside an exchange */
        CHECK_RESULT(ONEHOP_ERR_PEER_LOST, onehop_group_allgather(group, "", all, 1));
    } else { /* polls */
        while (oh_rendezvous_lost_peer(group) < 0) sleep_ms(1);
        CHECK_INT(2, oh_rendezvous_lost_peer(group));
    }
    double after = seconds_now() - how->killed_at;
    if (after > 0.1) how->late = true;
    if (after > 3) FAIL("rank %d saw the loss after %.0f ms", rank, 1e3 * after);
    if (rank) CHECK_RESULT(ONEHOP_ERR_PEER_LOST, onehop_group_allgather(group, "", all, 1));
    CHECK_CONTAINS("rank 2 has ended or closed", onehop_last_error());
    CHECK_RESULT(ONEHOP_ERR_PEER_LOST, onehop_group_barrier(group)); /* stays broken */
    sleep_ms(300); /* nobody blames a survivor that left earlier */
    onehop_group_close(group);
}

/* On a busy machine a rank may just not have been given the processor: then again. */
static bool lose(death *how, death kind) {
    pid_t pids[3];
    *how = kind;
    for (int r = 0; r < 3; r++) pids[r] = start_rank(survive, r, 3, how);
    for (int r = 0; r < 3; r++)
        CHECK_INT(r == 2 && !how->leave ? 128 + SIGKILL : 0, wait_rank(pids[r]));
    return !how->late;
}

static void losses(void) {
    static const death kinds[] = {
        {.leave = false},
        {.leave = true},
        {.leave = false, .keep_socket = true},
        {.leave = true, .keep_socket = true},
        {.leave = false, .no_pidfd = true},
        {.leave = true, .no_pidfd = true},
    };
    death *how = shared_memory(sizeof *how);
    for (int i = 0; i < 6; i++) {
        int tries = 1;
        while (!lose(how, kinds[i]))
            if (++tries > 4) FAIL("kind %d: a loss is never seen within 100 ms", i);
    }
}

/* What a rank sent before it left still arrives. */
static void last_words(int rank, int world_size, void *argument) {
    onehop_group *group = open_named(rank, world_size, "last words");
    char all[2];
    (void)argument;
    CHECK_OK(onehop_group_barrier(group));
    if (rank == 1) {
        sleep_ms(200); /* rank 0's byte is here by then: this returns at once */
        CHECK_OK(onehop_group_allgather(group, "1", all, 1));
        onehop_group_close(group);
        return;
    }
    CHECK_OK(onehop_group_allgather(group, "0", all, 1));
    while (oh_rendezvous_lost_peer(group) < 0) sleep_ms(1);
    CHECK_BYTES("01", all, 2);
    CHECK_RESULT(ONEHOP_ERR_PEER_LOST, onehop_group_barrier(group));
    onehop_group_close(group);
}

/* ---- exchanges that fail --------------------------------------------------------------------- */

static void exchange_failures(onehop_group *group) {
    int rank = onehop_group_rank(group);
    char all[4 * ONEHOP_MAX_RANKS];
    CHECK_OK(onehop_group_barrier(group));
    CHECK_RESULT(ONEHOP_ERR_DISAGREEMENT,
                 onehop_group_allgather(group, "abc", all, rank == 1 ? 3 : 2));
    CHECK_RESULT(ONEHOP_ERR_DISAGREEMENT, onehop_group_barrier(group));
    sleep_ms(200);
    onehop_group_close(group);
}

static void exchange_in_time(onehop_group *group) {
    oh_rendezvous_set_timeout_ms(group, 300);
    CHECK_OK(onehop_group_barrier(group));
    if (onehop_group_rank(group) == 1) {
        sleep_ms(1000);
    } else {
        double start = seconds_now();
        CHECK_RESULT(ONEHOP_ERR_MISSING_PEER, onehop_group_barrier(group));
        CHECK_CONTAINS("rank 1 ", onehop_last_error());
        CHECK(seconds_now() - start < 1);
        sleep_ms(1000);
    }
    onehop_group_close(group);
}

static void failures_by_name(int rank, int world_size, void *argument) {
    (void)argument;
    exchange_failures(open_named(rank, world_size, "failures"));
    exchange_in_time(open_named(rank, world_size, "in time"));
}

static void local_failures(int rank, int world_size, void *groups) {
    onehop_group **all = groups;
    char byte[ONEHOP_MAX_RANKS];
    exchange_failures(all[rank]);
    exchange_in_time(all[world_size + rank]);
    onehop_group *group = all[2 * world_size + rank];
    CHECK_OK(onehop_group_barrier(group));
    if (rank == 1) {
        sleep_ms(100);
        onehop_group_close(group);
        return;
    }
    CHECK_RESULT(ONEHOP_ERR_PEER_LOST, onehop_group_allgather(group, "", byte, 1));
    CHECK_INT(1, oh_rendezvous_lost_peer(group));
    CHECK_CONTAINS("rank 1", onehop_last_error());
    sleep_ms(200);
    onehop_group_close(group);
}

int main(void) {
    onehop_group *groups[9];
    watchdog(100);
    losses();
    run_ranks(2, last_words, NULL);
    run_ranks(3, failures_by_name, NULL);
    for (int i = 0; i < 3; i++) CHECK_OK(onehop_group_open_local(3, groups + 3 * i));
    run_threads(3, local_failures, groups);
    return 0;
}
