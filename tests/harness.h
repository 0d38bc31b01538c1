/* What the tests share: checks that say where and what, a watchdog, ranks as processes or threads.
 *
 * A failed check prints file, line, what was expected and what was found, and ends the process with
 * status 1 at once, from whatever thread. Every main calls watchdog first: protocol bugs hang. */
#ifndef OH_TEST_HARNESS_H
#define OH_TEST_HARNESS_H

#include <onehop.h>

#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define HARNESS_MAX_RANKS 64
#define HARNESS_SKIP      77 /* exit status of a test that cannot run here */

/* ---- checks ---------------------------------------------------------------------------------- */

#define FAIL(...)                                                                                  \
    do {                                                                                           \
        fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);                                            \
        fprintf(stderr, __VA_ARGS__);                                                              \
        fputc('\n', stderr);                                                                       \
        _exit(1);                                                                                  \
    } while (0)

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) FAIL("expected %s", #condition);                                         \
    } while (0)

#define CHECK_INT(expected, found)                                                                 \
    do {                                                                                           \
        long long expected_ = (long long)(expected), found_ = (long long)(found);                  \
        if (expected_ != found_) FAIL("%s: expected %lld, found %lld", #found, expected_, found_); \
    } while (0)

#define CHECK_RESULT(expected, call)                                                               \
    do {                                                                                           \
        onehop_result expected_ = (expected), found_ = (call);                                     \
        if (expected_ != found_)                                                                   \
            FAIL("%s: expected %s, found %s (%s)", #call, onehop_result_name(expected_),           \
                 onehop_result_name(found_), onehop_last_error());                                 \
    } while (0)

#define CHECK_OK(call) CHECK_RESULT(ONEHOP_OK, call)

#define CHECK_TEXT(expected, found)                                                                \
    do {                                                                                           \
        const char *expected_ = (expected), *found_ = (found);                                     \
        if (strcmp(expected_, found_))                                                             \
            FAIL("%s: expected \"%s\", found \"%s\"", #found, expected_, found_);                  \
    } while (0)

/* `found` contains `part`. */
#define CHECK_CONTAINS(part, found)                                                                \
    do {                                                                                           \
        const char *part_ = (part), *found_ = (found);                                             \
        if (!strstr(found_, part_))                                                                \
            FAIL("%s: expected it to contain \"%s\", found \"%s\"", #found, part_, found_);        \
    } while (0)

#define CHECK_BYTES(expected, found, size) check_bytes(__FILE__, __LINE__, expected, found, size)

static inline void check_bytes(const char *file, int line, const void *expected, const void *found,
                               size_t size) {
    const unsigned char *want = (const unsigned char *)expected,
                        *have = (const unsigned char *)found;
    if (!size || !memcmp(want, have, size)) return;
    for (size_t i = 0; i < size; i++) {
        if (want[i] == have[i]) continue;
        fprintf(stderr, "%s:%d: byte %zu of %zu: expected 0x%02x, found 0x%02x\n", file, line, i,
                size, want[i], have[i]);
        _exit(1);
    }
}

/* ---- time ------------------------------------------------------------------------------------ */

static inline double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static inline void sleep_ms(unsigned ms) {
    struct timespec left = {(time_t)(ms / 1000), (long)(ms % 1000) * 1000000};
    while (nanosleep(&left, &left)) {
    }
}

static inline void watchdog_bark(int signal_number) {
    static const char text[] = "watchdog: the test hangs\n";
    (void)signal_number;
    if (write(STDERR_FILENO, text, sizeof text - 1)) {
    }
    _exit(1);
}

static pid_t harness_main_pid;

/* Ends this process with status 1 after `seconds`. Ranks started later inherit what is left. */
static inline void watchdog(unsigned seconds) {
    harness_main_pid = getpid();
    signal(SIGALRM, watchdog_bark);
    alarm(seconds);
}

/* Sanitizers slow everything down: scale what is not a property, such as repeat counts. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define HARNESS_SANITIZED 1
#else
#define HARNESS_SANITIZED 0
#endif

/* ---- ranks ----------------------------------------------------------------------------------- */

typedef void (*rank_fn)(int rank, int world_size, void *argument);

/* Forks a process that runs `fn` and exits 0. It dies with this process. */
static inline pid_t start_rank(rank_fn fn, int rank, int world_size, void *argument) {
    unsigned left = alarm(0);
    fflush(NULL);
    pid_t pid = fork();
    if (left) alarm(left);
    if (pid < 0) FAIL("fork failed");
    if (pid) return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    fn(rank, world_size, argument);
    exit(0);
}

/* Exit status of a rank's process; 128 + n if signal n ended it. */
static inline int wait_rank(pid_t pid) {
    int status = 0;
    if (waitpid(pid, &status, 0) != pid) FAIL("waitpid failed");
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

/* Runs `fn` in one process per rank and fails, ending the others, when one fails. */
static inline void run_ranks(int world_size, rank_fn fn, void *argument) {
    pid_t pids[HARNESS_MAX_RANKS];
    for (int i = 0; i < world_size; i++) pids[i] = start_rank(fn, i, world_size, argument);
    for (int left = world_size; left; left--) {
        int status = 0, rank = 0;
        pid_t pid = wait(&status);
        while (rank < world_size && pids[rank] != pid) rank++;
        if (pid < 0 || rank == world_size) FAIL("wait found an unknown process");
        pids[rank] = 0;
        if (WIFEXITED(status) && !WEXITSTATUS(status)) continue;
        for (int i = 0; i < world_size; i++)
            if (pids[i]) kill(pids[i], SIGKILL);
        FAIL("rank %d of %d: %s %d", rank, world_size, WIFSIGNALED(status) ? "signal" : "status",
             WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    }
}

typedef struct harness_thread {
    rank_fn fn;
    int rank, world_size;
    void *argument;
} harness_thread;

static inline void *harness_thread_main(void *argument) {
    harness_thread *thread = (harness_thread *)argument;
    thread->fn(thread->rank, thread->world_size, thread->argument);
    return NULL;
}

/* Runs `fn` in one thread per rank. */
static inline void run_threads(int world_size, rank_fn fn, void *argument) {
    pthread_t threads[HARNESS_MAX_RANKS];
    harness_thread starts[HARNESS_MAX_RANKS];
    for (int i = 0; i < world_size; i++) {
        starts[i].fn = fn;
        starts[i].rank = i;
        starts[i].world_size = world_size;
        starts[i].argument = argument;
        if (pthread_create(&threads[i], NULL, harness_thread_main, &starts[i]))
            FAIL("pthread_create failed");
    }
    for (int i = 0; i < world_size; i++) pthread_join(threads[i], NULL);
}

/* ---- odds and ends --------------------------------------------------------------------------- */

/* Zeroed memory that processes started later share with this one. */
static inline void *shared_memory(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) FAIL("mmap of %zu bytes failed", bytes);
    return memory;
}

/* Open descriptors of this process. */
static inline int count_fds(void) {
    int count = 0;
    DIR *directory = opendir("/proc/self/fd");
    if (!directory) FAIL("cannot list /proc/self/fd");
    while (readdir(directory)) count++;
    closedir(directory);
    return count - 3; /* ".", ".." and the directory itself */
}

/* A group name that is `name` in this run of the test only: the same test may run beside it. Owned
 * by the calling thread until its next call. */
static inline const char *own_name(const char *name) {
    static _Thread_local char text[128];
    snprintf(text, sizeof text, "test %ld %s", (long)harness_main_pid, name);
    return text;
}

/* Small repeatable random numbers (splitmix64). */
static inline uint64_t random_next(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

#endif
