/* Property: the command's own waits end: at a barrier to which a rank does not come, and in the
 * measurement of the floor on a machine whose cores are taken. */
/* labels: serial asan-off tsan-off */
#include "harness.h"

#include "cli/shared/board.c"
#include "cli/perf/perf_floor.c"

#include <sys/resource.h>

enum {
    HOGS = 4, /* on each core */
};

static perf_board *board;

static void barrier_rank(int rank, int world_size, void *unused) {
    (void)unused;
    CHECK_OK(board_barrier(board, (uint32_t)world_size, 20000, NULL, NULL));
    if (rank == 1) return;
    const double begun = seconds_now();
    CHECK_RESULT(ONEHOP_ERR_TIMEOUT, board_barrier(board, (uint32_t)world_size, 300, NULL, NULL));
    CHECK_CONTAINS("not all ranks", onehop_last_error());
    CHECK(seconds_now() - begun > 0.25 && seconds_now() - begun < 5);
}

static void hog(int rank, int world_size, void *argument) {
    const cpu_set_t *allowed = argument;
    (void)world_size;
    for (int cpu = 0, left = rank / HOGS; cpu < CPU_SETSIZE; cpu++) {
        cpu_set_t one;
        if (!CPU_ISSET(cpu, allowed) || left--) continue;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
        for (;;) __asm__ volatile("");
    }
    exit(0);
}

/* On two cores, of which others have nearly all. */
static void floor_of_a_busy_machine(void) {
    cpu_set_t allowed;
    pid_t hogs[2 * HOGS];
    perf_floor found = {0};
    const uint64_t bytes = 1024;
    CHECK(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
    for (int cpu = 0, left = 2; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &allowed) && left-- <= 0) CPU_CLR(cpu, &allowed);
    CHECK(sched_setaffinity(0, sizeof allowed, &allowed) == 0);
    for (int i = 0; i < 2 * HOGS; i++) hogs[i] = start_rank(hog, i, 2 * HOGS, &allowed);
    CHECK(setpriority(PRIO_PROCESS, 0, 19) == 0);
    const double begun = seconds_now();
    perf_measure_floor(&bytes, 1, &found);
    const double took = seconds_now() - begun;
    for (int i = 0; i < 2 * HOGS; i++) {
        kill(hogs[i], SIGKILL);
        wait_rank(hogs[i]);
    }
    printf("floor on a busy machine: %s, after %.1f s\n", found.known ? "found" : "not found",
           took);
    if (took > 30) FAIL("the floor took %.1f s", took);
}

int main(void) {
    watchdog(90);
    board = board_create();
    run_ranks(2, barrier_rank, NULL);
    board_destroy(board);
    floor_of_a_busy_machine();
    return 0;
}
