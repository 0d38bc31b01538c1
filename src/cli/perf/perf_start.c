/* The device of a plan, and the start of its ranks. */
#include "cli/perf/perf.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const perf_device_words[] = {"auto", "cuda", "host", NULL};

int perf_find_device(perf_plan *plan, int64_t flag) {
    int kind = flag < 0 ? 0 : (int)flag;
    if (kind == 0 && oh_env_word(OH_ENV_DEVICE, perf_device_words, 0, &kind) != ONEHOP_OK)
        return cli_fail(cli_command, CLI_USAGE, "%s", onehop_last_error());
    cuda_census census = {0, false, "the driver could not be asked"};
    if (kind != ONEHOP_DEVICE_HOST) {
        /* Not in this process if it is going to fork. */
        if (plan->env_rank >= 0)
            cuda_take_census(&census);
        else
            ranks_ask_child(cuda_take_census, &census, sizeof census);
    }
    if (kind == ONEHOP_DEVICE_CUDA && census.count == 0)
        return cli_fail(cli_command, CLI_UNSUPPORTED, "%s: %s",
                        flag > 0 ? "--device cuda" : "ONEHOP_DEVICE=cuda", census.reason);
    plan->devices = census.count;
    plan->mps = census.mps;
    plan->device = census.count ? ONEHOP_DEVICE_CUDA : ONEHOP_DEVICE_HOST;
    return CLI_OK;
}

int perf_refuse_launcher(void) {
    const oh_launcher *by = oh_launcher_find();
    if (!by || strcmp(oh_env_text(by->size), "1") == 0) return CLI_OK;
    return cli_fail(cli_command, CLI_USAGE,
                    "starts its ranks itself, but was started as one of %s (%s, %s): run it once",
                    oh_env_text(by->size), by->name, oh_env_describe(by->size)->name);
}

void perf_fresh_name(perf_plan *plan) {
    uint64_t random[2] = {0, 0};
    oh_random(random, sizeof random);
    snprintf(plan->name, sizeof plan->name, "onehop-perf-%016llx%016llx",
             (unsigned long long)random[0], (unsigned long long)random[1]);
}

void perf_command_line(int argc, char **argv, char *line, size_t size) {
    size_t used = 0;
    line[0] = 0;
    for (int i = 0; i < argc && used < size - 1; i++)
        used += (size_t)snprintf(line + used, size - used, "%s%s", i ? " " : "", argv[i]);
}

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

void perf_pin(const perf_worker *worker, bool on) {
    int left = worker->rank[0].rank % CPU_COUNT(&worker->allowed), cpu = 0;
    cpu_set_t one;
    if (!worker->plan->pin) return;
    while (!CPU_ISSET(cpu, &worker->allowed) || left-- > 0) cpu++;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    pthread_setaffinity_np(pthread_self(), sizeof one, on ? &one : &worker->allowed);
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
