/* Property: a pause of the whole job counts toward no deadline. All ranks are stopped for longer
 * than the deadline, in the middle of each kind of wait, and go on. A rank that stays away still
 * runs into it. */
/* labels: waits */
#include "harness.h"

#include "base/wait.h"

enum {
    COUNT = 1000,
    DEADLINE_MS = 2500,
    PAUSE_MS = 3500,
    LATE_MS = 1200, /* without the pause in time */
};

static char name[64];

static unsigned *waits; /* of the scenario: rank 0 is about to wait */

/* Rank 0 waits from here on, rank 1 comes LATE_MS of its own time later. */
static void meet(int rank) {
    if (rank == 0) __atomic_store_n(waits, 1, __ATOMIC_RELEASE);
    for (int ms = 0; rank && ms < LATE_MS; ms += 10) {
        const struct timespec some = {0, 10000000};
        nanosleep(&some, NULL); /* short ones: a stop must not eat all of the time */
    }
}

static onehop_result open_group(int rank, onehop_group **group) {
    onehop_group_config config = ONEHOP_CONFIG_INIT(onehop_group_config);
    config.rank = rank, config.world_size = 2, config.name = name;
    config.timeout_ms = DEADLINE_MS;
    return onehop_group_open(&config, group);
}

static void opening_rank(int rank, int world_size, void *unused) {
    onehop_group *group;
    (void)world_size, (void)unused;
    meet(rank);
    CHECK_OK(open_group(rank, &group));
    onehop_group_close(group);
}

static void exchange_rank(int rank, int world_size, void *unused) {
    onehop_group *group;
    (void)world_size, (void)unused;
    CHECK_OK(open_group(rank, &group));
    meet(rank);
    CHECK_OK(onehop_group_barrier(group));
    onehop_group_close(group);
}

static void call_rank(int rank, int world_size, void *argument) {
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    onehop_context *context;
    float data[COUNT];
    for (int i = 0; i < COUNT; i++) data[i] = 1;
    config.rank = rank, config.world_size = world_size, config.name = name;
    config.device.kind = ONEHOP_DEVICE_HOST;
    config.timeout_ms = DEADLINE_MS;
    call.algorithm = *(onehop_algorithm *)argument;
    CHECK_OK(onehop_create(&config, &context));
    meet(rank);
    CHECK_OK(
        onehop_all_reduce(context, data, data, COUNT, ONEHOP_FLOAT32, ONEHOP_SUM, &call, NULL));
    CHECK(data[0] == 2 && data[COUNT - 1] == 2);
    onehop_destroy(context);
}

static void *local_rank(void *argument) {
    onehop_group *group = argument;
    meet(onehop_group_rank(group));
    CHECK_OK(onehop_group_barrier(group));
    return NULL;
}

static void local_process(int rank, int world_size, void *unused) {
    onehop_group *groups[2];
    pthread_t threads[2];
    (void)rank, (void)world_size, (void)unused;
    char text[16];
    snprintf(text, sizeof text, "%d", DEADLINE_MS);
    setenv("ONEHOP_INIT_TIMEOUT_MS", text, 1);
    CHECK_OK(onehop_group_open_local(2, groups));
    for (int i = 0; i < 2; i++) CHECK(!pthread_create(&threads[i], NULL, local_rank, groups[i]));
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < 2; i++) onehop_group_close(groups[i]);
}

typedef struct scenario {
    rank_fn fn;
    int processes;
    onehop_algorithm algorithm;
} scenario;

/* Stops all ranks once rank 0 waits. */
static void run_scenario(int number, int count, void *argument) {
    scenario *s = (scenario *)argument + number;
    pid_t pids[2];
    (void)count;
    alarm(50);
    snprintf(name, sizeof name, "paused %d", (int)getpid());
    waits += number;
    for (int i = 0; i < s->processes; i++) pids[i] = start_rank(s->fn, i, 2, &s->algorithm);
    while (!__atomic_load_n(waits, __ATOMIC_ACQUIRE)) sleep_ms(5);
    sleep_ms(300);
    for (int i = 0; i < s->processes; i++) kill(pids[i], SIGSTOP);
    sleep_ms(PAUSE_MS);
    for (int i = s->processes; i--;) kill(pids[i], SIGCONT);
    for (int i = 0; i < s->processes; i++) CHECK_INT(0, wait_rank(pids[i]));
}

/* The rule itself: many late looks on a busy machine do bring a deadline nearer. */
static void busy_machine(void) {
    uint64_t looked = 1000, counted = 0;
    for (int i = 1; i <= 100; i++) {
        const uint64_t now = 1000 + i * 200000000ull;
        counted += 200000000ull - oh_wait_pause_ns(&looked, now);
    }
    CHECK(counted == 100 * OH_MAX_LOOK_NS);
}

int main(void) {
    scenario all[] = {{opening_rank, 2, 0},
                      {exchange_rank, 2, 0},
                      {local_process, 1, 0},
                      {call_rank, 2, ONEHOP_HOST_1SHOT},
                      {call_rank, 2, ONEHOP_1SHOT_PUSH},
                      {call_rank, 2, ONEHOP_1SHOT_PULL}};
    watchdog(60);
    waits = shared_memory(sizeof all / sizeof *all * sizeof *waits);
    busy_machine();
    run_ranks(sizeof all / sizeof *all, run_scenario, all);
    return 0;
}
