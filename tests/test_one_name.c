/* Property: two jobs of one user that start together under one name never share a group, although
 * nothing tells them apart: the opening fails on all ranks that had a twin.
 *
 * What is promised holds if twins come within OH_SETTLE_MS of each other; on a machine so busy that
 * they do not, a round says nothing and is not counted. */
/* All ranks are processes, of which ThreadSanitizer sees one at a time. */
/* labels: quick waits tsan-off */
#include "harness.h"

#include "rendezvous/opening.h"

#define ROUNDS    20
#define SPREAD_US 3000

typedef struct round_ {
    int number, go; /* atomic */
    double from[4], to[4];
    int partner[4]; /* job that the peer belongs to; -1: none */
    onehop_result result[4];
} round_;

/* Processes 0 to 3 are ranks 0, 1 of job 0 and 0, 1 of job 1. */
static void be_one(int place, int world_size, void *argument) {
    (void)world_size;
    round_ *now = argument;
    onehop_group_config config = ONEHOP_CONFIG_INIT(onehop_group_config);
    onehop_group *group;
    char name[160];
    int job = place / 2, jobs[2];
    uint64_t state = (uint64_t)now->number * 4 + (uint64_t)place;
    snprintf(name, sizeof name, "%s %d", own_name("one name"), now->number);
    config.rank = place % 2;
    config.world_size = 2;
    config.name = name;
    config.timeout_ms = 300;
    while (!__atomic_load_n(&now->go, __ATOMIC_ACQUIRE)) usleep(100);
    usleep((unsigned)(random_next(&state) % SPREAD_US));
    now->from[place] = seconds_now();
    now->result[place] = onehop_group_open(&config, &group);
    now->to[place] = seconds_now();
    if (now->result[place]) return;
    CHECK_OK(onehop_group_allgather(group, &job, jobs, sizeof job));
    now->partner[place] = jobs[!(place % 2)];
    onehop_group_close(group);
}

static bool together(const round_ *now) {
    double first = now->from[0], last = now->from[0];
    for (int i = 1; i < 4; i++) {
        if (now->from[i] < first) first = now->from[i];
        if (now->from[i] > last) last = now->from[i];
    }
    return last - first < 0.8e-3 * OH_SETTLE_MS;
}

static int play(round_ *now, int number) {
    pid_t pids[4];
    memset(now, 0, sizeof *now);
    now->number = number;
    for (int i = 0; i < 4; i++) now->partner[i] = -1;
    for (int i = 0; i < 4; i++) pids[i] = start_rank(be_one, i, 4, now);
    __atomic_store_n(&now->go, 1, __ATOMIC_RELEASE);
    for (int i = 0; i < 4; i++) CHECK_INT(0, wait_rank(pids[i]));
    if (!together(now)) return 0;
    int twins = 0;
    for (int i = 0; i < 4; i++) {
        if (now->partner[i] == !(i / 2)) FAIL("round %d: ranks of two jobs share a group", number);
        twins += now->result[i] == ONEHOP_ERR_DUPLICATE_RANK;
    }
    if (twins < 4) FAIL("round %d: %d of 4 ranks were told of a second job", number, twins);
    return 1;
}

int main(void) {
    round_ *now = shared_memory(sizeof *now);
    int told = 0;
    watchdog(100);
    for (int i = 0; i < ROUNDS; i++) told += play(now, i);
    printf("%d of %d rounds\n", told, ROUNDS);
    return told ? 0 : HARNESS_SKIP;
}
