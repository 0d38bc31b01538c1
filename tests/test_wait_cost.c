/* Property: waits sleep. A rank whose peer is late uses next to no processor time, and one of
 * real-time priority leaves its core to a peer of usual priority. */
/* labels: waits asan-off tsan-off */
#include "harness.h"

#include <sched.h>
#include <sys/resource.h>

enum {
    COUNT = 1000,
    LATE_MS = 2000,
    CALLS = 20,
};

static char name[64];

static double processor_seconds(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
           1e-6 * (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
}

/* 0.3 s in a wait of 5 s. */
static void check_cost(const char *what, double before) {
    const double used = processor_seconds() - before;
    printf("%-28s %.0f ms in %d\n", what, 1000 * used, LATE_MS);
    if (used > 0.06 * LATE_MS / 1000) FAIL("%s: %.3f s of processor time", what, used);
}

static onehop_context *create(int rank, int world_size) {
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    onehop_context *context;
    config.rank = rank, config.world_size = world_size, config.name = name;
    config.device.kind = ONEHOP_DEVICE_HOST;
    config.timeout_ms = config.init_timeout_ms = 30000;
    CHECK_OK(onehop_create(&config, &context));
    return context;
}

static void call(onehop_context *context, onehop_algorithm algorithm, onehop_stream stream) {
    static float data[COUNT];
    onehop_call way = ONEHOP_CONFIG_INIT(onehop_call);
    way.algorithm = algorithm;
    CHECK_OK(
        onehop_all_reduce(context, data, data, COUNT, ONEHOP_FLOAT32, ONEHOP_SUM, &way, stream));
}

/* Each kind of wait in a process of its own, since the time is a process's. */
typedef struct wait_kind {
    const char *what;
    onehop_algorithm algorithm;
    bool on_stream;
} wait_kind;

static void call_rank(int rank, int world_size, void *argument) {
    const wait_kind *kind = argument;
    onehop_stream stream = NULL;
    onehop_context *context = create(rank, world_size);
    if (kind->on_stream) CHECK_OK(onehop_host_stream_create(&stream));
    call(context, kind->algorithm, stream);
    CHECK_OK(onehop_synchronize(context, stream));
    if (rank == 1) sleep_ms(LATE_MS);
    const double before = processor_seconds();
    call(context, kind->algorithm, stream);
    CHECK_OK(onehop_synchronize(context, stream));
    if (rank == 0) check_cost(kind->what, before);
    onehop_destroy(context);
    onehop_host_stream_destroy(stream);
}

static void opening_rank(int rank, int world_size, void *unused) {
    (void)unused;
    if (rank == 1) sleep_ms(LATE_MS);
    const double before = processor_seconds();
    onehop_destroy(create(rank, world_size));
    if (rank == 0) check_cost("opening a group", before);
}

static void kind_of_wait(int number, int count, void *argument) {
    const wait_kind *kind = (const wait_kind *)argument + number;
    (void)count;
    snprintf(name, sizeof name, "wait cost %d", (int)getpid());
    run_ranks(2, kind->algorithm ? call_rank : opening_rank, (void *)kind);
}

static void stay_on(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    CHECK(sched_setaffinity(0, sizeof set, &set) == 0);
}

/* Rank 1 has the core only when rank 0 does not want it. */
static void priority_rank(int rank, int world_size, void *argument) {
    const struct sched_param low = {.sched_priority = 1};
    stay_on(*(int *)argument);
    onehop_context *context = create(rank, world_size);
    if (rank == 0 && sched_setscheduler(0, SCHED_FIFO, &low)) exit(HARNESS_SKIP);
    const double begun = seconds_now();
    for (int i = 0; i < CALLS; i++) call(context, ONEHOP_HOST_1SHOT, NULL);
    const double each = (seconds_now() - begun) / CALLS;
    if (rank == 0) printf("beside a real-time rank      %.2f ms a call\n", 1000 * each);
    if (each > 0.15) FAIL("%.3f s a call", each);
    onehop_destroy(context);
}

static void priorities(void) {
    const struct sched_param low = {.sched_priority = 1}, usual = {0};
    int cpu = sched_getcpu();
    if (cpu < 0 || sched_setscheduler(0, SCHED_FIFO, &low)) {
        printf("beside a real-time rank      skipped: SCHED_FIFO is not allowed here\n");
        return;
    }
    CHECK(sched_setscheduler(0, SCHED_OTHER, &usual) == 0);
    snprintf(name, sizeof name, "wait cost %d", (int)getpid());
    run_ranks(2, priority_rank, &cpu);
}

int main(void) {
    wait_kind kinds[] = {{"a call", ONEHOP_HOST_1SHOT, false},
                         {"a call of a GPU's kernel", ONEHOP_1SHOT_PUSH, false},
                         {"a host stream", ONEHOP_HOST_2SHOT, true},
                         {NULL, 0, false}};
    watchdog(60);
    run_ranks(sizeof kinds / sizeof *kinds, kind_of_wait, kinds);
    priorities();
    return 0;
}
