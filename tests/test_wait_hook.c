/* Property: a thread's wait hook is called about every 50 ms by whatever waits, and can end the
 * wait: the opening of a group, an exchange, a running call, host streams, onehop_destroy. The
 * error says what was waited for. */
/* labels: waits */
#include "harness.h"

enum {
    COUNT = 1000
};

/* ---- hooks ----------------------------------------------------------------------------------- */

typedef struct hook_state {
    int calls, end_at; /* ends the wait at that call; 0: never */
} hook_state;

static int hook(void *user) {
    hook_state *state = user;
    return ++state->calls >= state->end_at && state->end_at;
}

/* Ends this thread's next wait after some 100 ms. */
static hook_state *end_soon(void) {
    static _Thread_local hook_state state;
    state = (hook_state){0, 3};
    onehop_set_wait_hook(hook, &state);
    return &state;
}

/* What began at `begun` was ended by the hook, in time. */
#define CHECK_ENDED(begun)                                                                         \
    do {                                                                                           \
        onehop_set_wait_hook(NULL, NULL);                                                          \
        const double took_ = seconds_now() - (begun);                                              \
        if (took_ > (HARNESS_SANITIZED ? 5 : 1.5)) FAIL("it took %.3f s", took_);                  \
    } while (0)

static char name[64];

static onehop_result open_group(int rank, int world_size, onehop_group **group) {
    onehop_group_config config = ONEHOP_CONFIG_INIT(onehop_group_config);
    config.rank = rank, config.world_size = world_size, config.name = name;
    config.timeout_ms = 20000;
    return onehop_group_open(&config, group);
}

/* ---- groups ---------------------------------------------------------------------------------- */

/* Rank 2 does not come. Rank `*argument` does not want to wait; the others hear. */
static void opening_rank(int rank, int world_size, void *argument) {
    onehop_group *group = NULL;
    const double begun = seconds_now();
    if (rank == 2) return;
    if (rank == *(int *)argument) end_soon();
    CHECK_RESULT(ONEHOP_ERR_INTERRUPTED, open_group(rank, world_size, &group));
    CHECK_ENDED(begun);
    CHECK_CONTAINS("wait hook", onehop_last_error());
}

static void opening(void) {
    for (int who = 0; who < 2; who++) {
        snprintf(name, sizeof name, "wait hook %d opening %d", (int)getpid(), who);
        run_ranks(3, opening_rank, &who);
    }
}

static void exchange_rank(int rank, int world_size, void *unused) {
    onehop_group *group;
    (void)unused;
    CHECK_OK(open_group(rank, world_size, &group));
    if (rank == 1) sleep_ms(700);
    if (rank == 1) CHECK_OK(onehop_group_barrier(group)); /* rank 0 had sent its part */
    const double begun = seconds_now();
    if (rank == 0) end_soon();
    CHECK_RESULT(rank ? ONEHOP_ERR_PEER_FAILED : ONEHOP_ERR_INTERRUPTED,
                 onehop_group_barrier(group));
    CHECK_ENDED(begun);
    if (rank == 1) CHECK_CONTAINS("rank 0", onehop_last_error());
    if (rank == 0) sleep_ms(1500); /* it is told by more than the end of the process */
    onehop_group_close(group);
}

static void local_rank(int rank, int world_size, void *argument) {
    onehop_group **groups = argument;
    const double begun = seconds_now();
    if (rank == 2) return;
    if (rank == 0) end_soon();
    CHECK_RESULT(ONEHOP_ERR_INTERRUPTED, onehop_group_barrier(groups[rank]));
    CHECK_ENDED(begun);
    CHECK_CONTAINS("rank 0 of a local group", onehop_last_error());
    (void)world_size;
}

static void exchanges(void) {
    onehop_group *groups[3];
    snprintf(name, sizeof name, "wait hook %d exchange", (int)getpid());
    run_ranks(2, exchange_rank, NULL);
    CHECK_OK(onehop_group_open_local(3, groups));
    run_threads(3, local_rank, groups);
    for (int i = 0; i < 3; i++) onehop_group_close(groups[i]);
}

/* ---- calls ----------------------------------------------------------------------------------- */

static onehop_context *create(int rank, int world_size) {
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    onehop_context *context;
    config.rank = rank, config.world_size = world_size, config.name = name;
    config.device.kind = ONEHOP_DEVICE_HOST;
    config.timeout_ms = 20000;
    CHECK_OK(onehop_create(&config, &context));
    return context;
}

static onehop_result reduce(onehop_context *context, float *data, onehop_stream stream) {
    return onehop_all_reduce(context, data, data, COUNT, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, stream);
}

/* Rank 1 comes too late: rank 0 has ended its call, for which it had sent its part. */
static void call_rank(int rank, int world_size, void *unused) {
    float data[COUNT] = {0};
    onehop_context *context = create(rank, world_size);
    (void)unused;
    if (rank == 1) sleep_ms(700);
    if (rank == 1) CHECK_OK(reduce(context, data, NULL));
    const double begun = seconds_now();
    if (rank == 0) end_soon();
    CHECK_RESULT(ONEHOP_ERR_ABORTED, reduce(context, data, NULL));
    CHECK_ENDED(begun);
    sleep_ms(300);
    onehop_destroy(context);
}

/* Rank 1 comes late, and a hook that lets all waits go on has been called in time. */
static void patient_rank(int rank, int world_size, void *unused) {
    hook_state state = {0, 0};
    float data[COUNT];
    onehop_context *context = create(rank, world_size);
    (void)unused;
    for (int i = 0; i < COUNT; i++) data[i] = 1;
    CHECK_OK(reduce(context, data, NULL));
    if (rank == 1) sleep_ms(600);
    onehop_set_wait_hook(hook, &state);
    CHECK_OK(reduce(context, data, NULL));
    onehop_set_wait_hook(NULL, NULL);
    if (rank == 0 && (state.calls < 4 || state.calls > 20))
        FAIL("in 600 ms the hook was called %d times", state.calls);
    CHECK(data[0] == 4 && data[COUNT - 1] == 4);
    onehop_destroy(context);
}

/* What is on a stream goes on, whoever does not want to wait for it. */
static void stream_rank(int rank, int world_size, void *unused) {
    float data[COUNT];
    onehop_stream stream;
    onehop_context *context = create(rank, world_size);
    (void)unused;
    for (int i = 0; i < COUNT; i++) data[i] = 1;
    CHECK_OK(onehop_host_stream_create(&stream));
    if (rank == 1) sleep_ms(1500);
    CHECK_OK(reduce(context, data, stream));
    const double begun = seconds_now();
    if (rank == 0) {
        end_soon();
        CHECK_RESULT(ONEHOP_ERR_INTERRUPTED, onehop_host_stream_synchronize(stream));
        end_soon();
        CHECK_RESULT(ONEHOP_ERR_INTERRUPTED, onehop_synchronize(context, stream));
        CHECK_ENDED(begun);
    }
    CHECK_OK(onehop_synchronize(context, stream));
    CHECK(data[0] == 2 && data[COUNT - 1] == 2);
    onehop_destroy(context);
    onehop_host_stream_destroy(stream);
}

/* The queue holds so many calls; who ends its wait for room has queued nothing, who destroys ends
 * all. */
static void full_rank(int rank, int world_size, void *unused) {
    float data[COUNT] = {0};
    onehop_stream stream;
    onehop_context *context = create(rank, world_size);
    (void)unused;
    CHECK_OK(onehop_host_stream_create(&stream));
    if (rank == 0) {
        onehop_result result = ONEHOP_OK;
        int queued = 0;
        end_soon();
        while (!(result = reduce(context, data, stream))) queued++;
        CHECK_RESULT(ONEHOP_ERR_INTERRUPTED, result);
        CHECK(queued > 500);
        CHECK_OK(onehop_status(context, NULL));
        const double begun = seconds_now();
        end_soon();
        onehop_destroy(context);
        CHECK_ENDED(begun);
    } else {
        sleep_ms(1500);
        CHECK_RESULT(ONEHOP_ERR_ABORTED, onehop_status(context, NULL));
        onehop_destroy(context);
    }
    onehop_host_stream_destroy(stream);
}

int main(void) {
    static const rank_fn bodies[] = {call_rank, patient_rank, stream_rank, full_rank};
    watchdog(60);
    opening();
    exchanges();
    for (size_t i = 0; i < sizeof bodies / sizeof *bodies; i++) {
        snprintf(name, sizeof name, "wait hook %d call %zu", (int)getpid(), i);
        run_threads(2, bodies[i], NULL);
    }
    return 0;
}
