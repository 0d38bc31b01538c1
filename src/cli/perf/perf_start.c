/* See perf_start.h. */
#include "cli/perf/perf_start.h"

#include "cli/perf/perf_setup.h"
#include "cli/shared/ranks.h"

#include <stdlib.h>

typedef struct start {
    const perf_plan *plan;
    perf_board *board;
    perf_body body;
    void *user;
    onehop_group *groups[ONEHOP_MAX_RANKS]; /* of thread ranks */
} start;

static int start_worker(void *user, int first) {
    start *from = user;
    perf_worker *worker = calloc(1, sizeof *worker);
    if (!worker) return cli_fail(cli_command, CLI_UNSUPPORTED, "out of memory");
    worker->plan = from->plan;
    worker->board = from->board;
    worker->body = from->body;
    worker->user = from->user;
    worker->rank[0].group = from->groups[first];
    worker->rank[0].rank = first;
    int ranks = from->plan->layout == LAYOUT_SINGLE ? from->plan->world_size : 1;
    sched_getaffinity(0, sizeof worker->allowed, &worker->allowed);
    perf_pin(worker, true);
    int code = perf_work(worker, first, ranks);
    perf_pin(worker, false);
    free(worker);
    return code;
}

static int run_in_threads(start *from) {
    int world_size = from->plan->world_size;
    onehop_result result = onehop_group_open_local(world_size, from->groups);
    if (result != ONEHOP_OK)
        return cli_fail(cli_command, cli_exit_for(result), "%s", onehop_last_error());
    int code = ranks_run_threads(from->board, world_size, start_worker, from);
    for (int rank = 0; rank < world_size; rank++) onehop_group_close(from->groups[rank]);
    return code;
}

static int run(start *from) {
    switch (from->plan->layout) {
    case LAYOUT_PROCESS:
        return ranks_run_processes(from->board, from->plan->world_size, start_worker, from);
    case LAYOUT_THREAD:
        return run_in_threads(from);
    default:
        return ranks_report(from->board, start_worker(from, 0));
    }
}

int perf_start(const perf_plan *plan, perf_body body, void *user) {
    start from = {.plan = plan, .body = body, .user = user};
    /* Like beside like: no side uses NVLink multicast. Ranks inherit it. */
    if (plan->peers || plan->hand_over) setenv("NCCL_NVLS_ENABLE", "0", 1);
    if (plan->env_rank >= 0) return start_worker(&from, plan->env_rank);
    /* With the driver's default of 8 queues a process, ranks that share a GPU block each other.
     * (And under MPS no more than a few processes would get as many.) */
    if (plan->ranks_per_device > 1 && plan->layout != LAYOUT_PROCESS)
        setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    from.board = board_create();
    if (!from.board) return cli_fail(cli_command, CLI_UNSUPPORTED, "no shared memory");
    int code = run(&from);
    board_destroy(from.board);
    return code;
}
