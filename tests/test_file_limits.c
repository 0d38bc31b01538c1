/* labels: quick timeout=60 */
/* Property: memory that cannot be had is told of when it is asked for, on all ranks, with the limit
 * by name, and ends nobody by SIGXFSZ or SIGBUS: RLIMIT_FSIZE on one rank, a kernel that has no
 * page left. What is given is reserved to its last page, also while signals come. */
#include "fault_kit.h"

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>

#define MEGABYTE ((size_t)1 << 20)

static const onehop_device host = {ONEHOP_DEVICE_HOST, 0};

static void limit_files(rlim_t bytes) {
    const struct rlimit limit = {bytes, RLIM_INFINITY};
    CHECK(!setrlimit(RLIMIT_FSIZE, &limit));
}

/* fallocate fails with `error` from now on, as it does without memory. */
static void refuse_pages(int error) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_fallocate, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog program = {sizeof code / sizeof *code, code};
    CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) _exit(HARNESS_SKIP);
}

/* ---- all ranks hear of one rank's limit ------------------------------------------------------ */

static void create_limited(int rank, int world, void *argument) {
    const bool pages = argument != NULL;
    onehop_config config = kit_config(KIT_PATIENCE_MS);
    onehop_group_config g = ONEHOP_CONFIG_INIT(onehop_group_config);
    onehop_symmetric *symmetric;
    g.rank = rank;
    g.world_size = world;
    g.name = own_name(pages ? "no pages" : "short files");
    g.timeout_ms = 20000;
    CHECK_OK(onehop_group_open(&g, &config.group));
    config.push_bytes = MEGABYTE;
    if (rank == 1 && pages)
        refuse_pages(ENOSPC);
    else if (rank == 1)
        limit_files(MEGABYTE);
    onehop_context *context;
    const char *limit = pages ? "memory" : "RLIMIT_FSIZE";
    CHECK_RESULT(ONEHOP_ERR_MEMORY, onehop_create(&config, &context));
    CHECK_CONTAINS(limit, onehop_last_error());
    if (rank != 1) CHECK_CONTAINS("rank 1: ", onehop_last_error());
    CHECK_RESULT(ONEHOP_ERR_MEMORY,
                 onehop_symmetric_alloc(config.group, host, 2 * MEGABYTE, &symmetric));
    CHECK_CONTAINS(limit, onehop_last_error());
    CHECK_OK(onehop_group_barrier(config.group));
    onehop_group_close(config.group);
}

/* ---- one process ----------------------------------------------------------------------------- */

static void limits_of_one(int rank, int world, void *argument) {
    void *memory;
    (void)rank, (void)world, (void)argument;
    limit_files(MEGABYTE);
    CHECK_RESULT(ONEHOP_ERR_MEMORY, onehop_mem_alloc(host, MEGABYTE + 1, &memory));
    CHECK_CONTAINS("1048576 (RLIMIT_FSIZE", onehop_last_error());
    CHECK_OK(onehop_mem_alloc(host, MEGABYTE, &memory));
    onehop_mem_free(memory);
    limit_files(RLIM_INFINITY);
    /* Nobody is ended to make room for what cannot be had. */
    CHECK_RESULT(ONEHOP_ERR_MEMORY, onehop_mem_alloc(host, (size_t)1 << 46, &memory));
    CHECK_CONTAINS("MemAvailable", onehop_last_error());
    refuse_pages(EOPNOTSUPP); /* a sandbox without the call: memory without a reservation */
    CHECK_OK(onehop_mem_alloc(host, MEGABYTE, &memory));
    memset(memory, 1, MEGABYTE);
    onehop_mem_free(memory);
}

/* Of the one file in memory that this process has. */
static void check_reserved(size_t bytes) {
    struct stat status;
    int found = 0;
    for (int fd = 3; fd < 64; fd++) {
        char link[64], path[64] = "";
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        if (readlink(link, path, sizeof path - 1) < 0 || !strstr(path, "memfd:onehop")) continue;
        CHECK(!fstat(fd, &status));
        CHECK_INT(bytes, status.st_size);
        CHECK_INT(bytes, status.st_blocks * 512);
        found++;
    }
    CHECK_INT(1, found);
}

static void no_handling(int number) {
    (void)number;
}

/* A signal undoes a piece that is being reserved; a profiler sends thousands a second. */
static void reserved_under_signals(int rank, int world, void *argument) {
    const size_t bytes = 32 * MEGABYTE + 4096;
    const struct itimerval often = {{0, 500}, {0, 500}}, never = {{0, 0}, {0, 0}};
    struct sigaction action;
    void *memory;
    (void)rank, (void)world, (void)argument;
    memset(&action, 0, sizeof action);
    action.sa_handler = no_handling;
    CHECK(!sigaction(SIGPROF, &action, NULL) && !setitimer(ITIMER_PROF, &often, NULL));
    CHECK_OK(onehop_mem_alloc(host, bytes, &memory));
    CHECK(!setitimer(ITIMER_PROF, &never, NULL));
    check_reserved(bytes);
    for (size_t i = 0; i < bytes; i += 4096) CHECK(((char *)memory)[i] == 0);
    onehop_mem_free(memory);
}

int main(void) {
    watchdog(50);
    run_ranks(2, create_limited, NULL);
    run_ranks(1, limits_of_one, NULL);
    run_ranks(1, reserved_under_signals, NULL);
    static int pages;
    run_ranks(2, create_limited, &pages);
    return 0;
}
