/* A run: a process for each rank, with a fault planned in one. And all runs, by several workers,
 * who take them from one list. A worker that may has a network namespace of its own, in which all
 * sockets are the sweep's. */
#include "sweep.h"

#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

void *shared_memory(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        perror("sweep: mmap");
        exit(2);
    }
    return memory;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

uint32_t limit_of(const sweep_case *c) {
    return c->fault.action == DO_STOP ? options.stop_limit_ms : options.limit_ms;
}

/* ---- one run --------------------------------------------------------------------------------- */

static pid_t start_rank(const sweep_case *c, int rank, const char *name, life_report *report) {
    const pid_t parent = getpid(), pid = fork();
    if (pid < 0) {
        perror("sweep: fork");
        exit(2);
    }
    if (pid) return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(2);
    life_plan plan = {.rank = rank, .world = c->world, .name = name, .limit_ms = limit_of(c)};
    plan.fault.function = -1;
    if (rank == c->rank) plan.fault = c->fault;
    life_run(&plan, report);
    exit(0);
}

/* Takes what has ended; true if only ranks that have stopped for good are left. */
static bool collect(const sweep_case *c, pid_t *pids, rank_end *ends) {
    bool all_done = true;
    for (int r = 0; r < c->world; r++) {
        if (pids[r] && waitpid(pids[r], &ends[r].status, WNOHANG) == pids[r]) pids[r] = 0;
        if (pids[r] && (r != c->rank || c->fault.action != DO_STOP)) all_done = false;
    }
    return all_done;
}

/* A rank that is to stop may be on its way still. */
static bool has_stopped(pid_t pid) {
    siginfo_t info = {0};
    return !pid || (!waitid(P_PID, (id_t)pid, &info, WSTOPPED | WNOHANG | WNOWAIT) && info.si_pid);
}

void run_case(const sweep_case *c, life_report *reports, rank_end *ends) {
    static unsigned serial;
    const double end = now() + 0.002 * limit_of(c) + 8;
    pid_t pids[SWEEP_RANKS];
    char name[64];
    snprintf(name, sizeof name, "sweep %d %u", (int)getpid(), ++serial);
    memset(reports, 0, SWEEP_RANKS * sizeof *reports);
    memset(ends, 0, SWEEP_RANKS * sizeof *ends);
    for (int r = 0; r < c->world; r++) {
        reports[r].step = -1;
        pids[r] = start_rank(c, r, name, &reports[r]);
    }
    while (!(collect(c, pids, ends) && has_stopped(pids[c->rank])) && now() < end) usleep(1000);
    for (int r = 0; r < c->world; r++) {
        if (!pids[r]) continue;
        ends[r].hung = r != c->rank || c->fault.action != DO_STOP;
        kill(pids[r], SIGKILL);
        waitpid(pids[r], &ends[r].status, 0);
    }
}

/* ---- all runs -------------------------------------------------------------------------------- */

/* In a network namespace of one's own every socket is a rank's; the first line is a heading. */
static void look_at_sockets(bool own_namespace, sweep_verdict *v) {
    char line[256];
    FILE *file = own_namespace ? fopen("/proc/self/net/unix", "re") : NULL;
    for (int i = 0; file && fgets(line, sizeof line, file); i++) {
        if (i == 0) continue;
        if (!v->bad) snprintf(v->text, sizeof v->text, "a socket is left: %.200s", line);
        v->bad |= 1u << BAD_fds;
    }
    if (file) fclose(file);
}

static void do_case(const sweep_case *c, life_report *reports, bool own_namespace,
                    sweep_outcome *o) {
    rank_end ends[SWEEP_RANKS];
    sweep_verdict v;
    for (o->runs = 0; o->runs < 3 && (!o->runs || o->bad_runs);) {
        run_case(c, reports, ends);
        judge(c, limit_of(c), reports, ends, &v);
        look_at_sockets(own_namespace, &v);
        if (!o->bad_runs) o->verdict = v;
        o->runs++;
        o->bad_runs += v.bad != 0;
    }
    __atomic_store_n(&o->done, true, __ATOMIC_RELEASE);
}

static void work(const sweep_list *list, uint32_t *next) {
    life_report *reports = shared_memory(SWEEP_RANKS * sizeof *reports);
    const bool own_namespace = unshare(CLONE_NEWNET) == 0;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) {
        const uint32_t i = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
        if (i >= list->count) exit(0);
        do_case(&list->cases[i], reports, own_namespace, &list->outcomes[i]);
    }
}

/* Ctrl-C and the like: no more runs are begun, and the totals are those of the runs made. */
static uint32_t *next_of_signal, end_of_signal;

static void stop_early(int signal_number) {
    (void)signal_number;
    __atomic_store_n(next_of_signal, end_of_signal, __ATOMIC_RELAXED);
}

void run_all(sweep_list *list) {
    uint32_t *next = shared_memory(sizeof *next); /* that no worker has taken */
    const double begun = now();
    double told = begun;
    list->outcomes = shared_memory(list->count * sizeof *list->outcomes);
    fflush(stdout);
    next_of_signal = next;
    end_of_signal = list->count;
    signal(SIGINT, stop_early);
    signal(SIGTERM, stop_early);
    for (int j = 0; j < options.jobs; j++)
        if (fork() == 0) work(list, next);
    for (int left = options.jobs; left;) {
        while (left && waitpid(-1, NULL, WNOHANG) > 0) left--;
        usleep(20000);
        if (now() - told < 60) continue;
        told = now();
        printf("%.0f s: %u of %u\n", told - begun, __atomic_load_n(next, __ATOMIC_RELAXED),
               list->count);
        fflush(stdout);
    }
    printf("%u runs in %.0f s\n", list->count, now() - begun);
}
