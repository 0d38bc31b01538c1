/* Forked ranks and thread ranks.
 *
 * The parent of forked ranks does nothing but wait for signals, SIGCHLD among them, so that a death
 * is seen at once and no signal can slip between a check and a sleep. Children ask the kernel to be
 * killed with their parent, ignore Ctrl-C (the parent gets it too and ends them), and are ended by
 * number. */
#include "cli/shared/ranks.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    GRACE_NS = 100 * 1000 * 1000,
    ANSWER_MS = 60 * 1000,
};

typedef struct rank_family {
    perf_board *board;
    int count;
    int alive;
    pid_t pid[ONEHOP_MAX_RANKS]; /* 0 once the child was waited for */
    int code;                    /* exit code of the run so far */
    int killed;                  /* rank + 1 of a child that a signal ended, or 0 */
    int killed_by;
    pid_t killed_pid;
    uint64_t failed_at;
} rank_family;

static void watched_signals(sigset_t *set) {
    static const int ends[] = {SIGINT, SIGTERM, SIGHUP};
    sigemptyset(set);
    sigaddset(set, SIGCHLD);
    for (size_t i = 0; i < OH_LENGTH(ends); i++) {
        struct sigaction action;
        sigaction(ends[i], NULL, &action);
        if (action.sa_handler != SIG_IGN) sigaddset(set, ends[i]); /* nohup stays in force */
    }
}

static void be_child(pid_t parent, const sigset_t *mask) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(CLI_LOST_PEER); /* it died before the line above */
    signal(SIGINT, SIG_IGN);
    sigprocmask(SIG_SETMASK, mask, NULL);
}

static int close_output(perf_board *board, int rank, int code) {
    char text[256];
    const char *reason = cli_close_output();
    if (!reason || code != CLI_OK) return code;
    snprintf(text, sizeof text, "standard output could not be written: %s", reason);
    board_fail(board, rank, CLI_UNSUPPORTED, text);
    return CLI_UNSUPPORTED;
}

static int fork_ranks(rank_family *family, rank_body body, void *user, const sigset_t *mask) {
    pid_t parent = getpid();
    fflush(NULL);
    for (int rank = 0; rank < family->count; rank++) {
        pid_t pid = fork();
        if (pid < 0) return cli_fail(cli_command, -1, "fork: %s", strerror(errno));
        if (pid == 0) {
            be_child(parent, mask);
            int code = body(user, rank);
            _exit(close_output(family->board, rank, code));
        }
        family->pid[rank] = pid;
        family->alive++;
    }
    return 0;
}

static void kill_all(rank_family *family) {
    for (int rank = 0; rank < family->count; rank++)
        if (family->pid[rank]) kill(family->pid[rank], SIGKILL);
    for (int rank = 0; rank < family->count; rank++)
        while (family->pid[rank] && waitpid(family->pid[rank], NULL, 0) < 0 && errno == EINTR) {
        }
    family->alive = 0;
}

/* Takes note of a child's end. */
static void bury(rank_family *family, int rank, int status) {
    pid_t pid = family->pid[rank];
    family->pid[rank] = 0;
    family->alive--;
    int code = WIFEXITED(status) ? WEXITSTATUS(status) : CLI_LOST_PEER;
    if (WIFSIGNALED(status) && !family->killed) {
        family->killed = rank + 1;
        family->killed_by = WTERMSIG(status);
        family->killed_pid = pid;
        board_fail(family->board, rank, CLI_LOST_PEER, "its process ended");
    }
    if (code > CLI_WRONG_DATA) {
        if (!family->board->row[rank].code) /* it could not tell why itself */
            board_fail(family->board, rank, code, "ended early");
        if (!family->failed_at) family->failed_at = oh_clock_ns();
    }
    if (code > family->code) family->code = code;
}

static void bury_dead(rank_family *family) {
    for (int rank = 0; rank < family->count; rank++) {
        int status;
        if (family->pid[rank] && waitpid(family->pid[rank], &status, WNOHANG) == family->pid[rank])
            bury(family, rank, status);
    }
}

/* Returns the signal that asks the run to end, or 0 when all children are gone. */
static int watch(rank_family *family, const sigset_t *set) {
    for (;;) {
        bury_dead(family);
        if (!family->alive) return 0;
        struct timespec tick = {1, 0};
        if (family->failed_at) {
            uint64_t waited = oh_clock_ns() - family->failed_at;
            if (waited >= GRACE_NS) return 0;
            tick = (struct timespec){0, (long)(GRACE_NS - waited)};
        }
        int got = sigtimedwait(set, NULL, &tick);
        if (got > 0 && got != SIGCHLD) return got;
    }
}

static void die_by(int signal_number, const sigset_t *mask) {
    cli_flush();
    if (signal_number != SIGPIPE)
        cli_fail(cli_command, 0, "ended by signal %d (%s)", signal_number,
                 strsignal(signal_number));
    signal(signal_number, SIG_DFL);
    raise(signal_number);
    sigprocmask(SIG_SETMASK, mask, NULL);
}

int ranks_report(const perf_board *board, int code) {
    uint32_t failed = __atomic_load_n(&board->failed, __ATOMIC_ACQUIRE);
    if (!failed) return code;
    const board_row *row = &board->row[failed - 1];
    return cli_fail(cli_command, row->code, "rank %u: %s", failed - 1, row->text);
}

int ranks_run_processes(perf_board *board, int count, rank_body body, void *user) {
    rank_family family = {.board = board, .count = count};
    sigset_t set, mask;
    watched_signals(&set);
    sigprocmask(SIG_BLOCK, &set, &mask);
    int ended_by = 0;
    if (fork_ranks(&family, body, user, &mask) == 0)
        ended_by = watch(&family, &set);
    else
        family.code = CLI_UNSUPPORTED;
    kill_all(&family);
    if (family.killed_by == SIGPIPE) ended_by = SIGPIPE; /* who read the table left: no lost rank */
    if (ended_by) die_by(ended_by, &mask);
    sigprocmask(SIG_SETMASK, &mask, NULL);
    if (family.killed)
        return cli_fail(cli_command, CLI_LOST_PEER, "rank %d (pid %d) was ended by signal %d (%s)",
                        family.killed - 1, (int)family.killed_pid, family.killed_by,
                        strsignal(family.killed_by));
    return ranks_report(board, family.code);
}

typedef struct rank_thread {
    rank_body body;
    void *user;
    int rank, code;
    pthread_t thread;
} rank_thread;

static void *run_thread(void *argument) {
    rank_thread *self = argument;
    self->code = self->body(self->user, self->rank);
    return NULL;
}

int ranks_run_threads(perf_board *board, int count, rank_body body, void *user) {
    rank_thread threads[ONEHOP_MAX_RANKS];
    int started = 0, code = CLI_OK;
    for (; started < count; started++) {
        threads[started] = (rank_thread){.body = body, .user = user, .rank = started};
        if (pthread_create(&threads[started].thread, NULL, run_thread, &threads[started]) != 0) {
            board_fail(board, started, CLI_UNSUPPORTED, "pthread_create failed");
            break;
        }
    }
    for (int i = 0; i < started; i++) {
        pthread_join(threads[i].thread, NULL);
        if (threads[i].code > code) code = threads[i].code;
    }
    return ranks_report(board, code);
}

bool ranks_ask_child(void (*body)(void *out), void *out, size_t bytes) {
    int ends[2];
    if (pipe(ends) != 0) return false;
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        body(out);
        _exit(write(ends[1], out, bytes) == (ssize_t)bytes ? 0 : 1);
    }
    close(ends[1]);
    /* A driver may hang. */
    struct pollfd answer = {.fd = ends[0], .events = POLLIN};
    bool told =
        pid > 0 && poll(&answer, 1, ANSWER_MS) > 0 && read(ends[0], out, bytes) == (ssize_t)bytes;
    if (pid > 0 && !told) kill(pid, SIGKILL);
    close(ends[0]);
    while (pid > 0 && waitpid(pid, NULL, 0) < 0 && errno == EINTR) {
    }
    return told;
}
