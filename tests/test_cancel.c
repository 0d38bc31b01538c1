/* labels: quick tsan-off timeout=60 */
/* Property: a thread that is cancelled (pthread_cancel) inside a call ends after the call, so
 * descriptors, locks and the group's state are whole: creating is cancelled at many moments and
 * leaves what it had made to the caller. ThreadSanitizer does not know deferred cancellation. */
#include "fault_kit.h"

static void *waiting_stream;

typedef struct made {
    onehop_group *group;
    onehop_context *context;
    bool finished;
} made;

/* Creates as rank 1; rank 0 is another thread. */
static void *create_one(void *argument) {
    made *m = argument;
    onehop_config config = kit_config(KIT_PATIENCE_MS);
    config.group = m->group;
    CHECK_OK(onehop_create(&config, &m->context));
    m->finished = true;
    pthread_testcancel();
    return NULL;
}

static void pause_us(long us) {
    const struct timespec time = {0, us * 1000};
    nanosleep(&time, NULL);
}

static void cancel_creating(long after_us) {
    onehop_group *groups[2];
    made ranks[2] = {{NULL, NULL, false}, {NULL, NULL, false}};
    pthread_t threads[2];
    CHECK_OK(onehop_group_open_local(2, groups));
    for (int r = 0; r < 2; r++) {
        ranks[r].group = groups[r];
        CHECK(!pthread_create(&threads[r], NULL, create_one, &ranks[r]));
    }
    pause_us(after_us);
    pthread_cancel(threads[1]);
    for (int r = 0; r < 2; r++) pthread_join(threads[r], NULL);
    CHECK(ranks[0].finished);
    /* Cancelled before its call began, it would be no test; the peer then had failed above. */
    CHECK(ranks[1].finished);
    for (int r = 0; r < 2; r++) onehop_destroy(ranks[r].context);
    for (int r = 0; r < 2; r++) onehop_group_close(groups[r]);
}

static void *create_by_name(void *argument) {
    onehop_group_config config = ONEHOP_CONFIG_INIT(onehop_group_config);
    onehop_group *group;
    config.rank = 0;
    config.world_size = 2;
    config.name = own_name("cancel");
    config.timeout_ms = 200; /* the other rank never comes */
    CHECK_RESULT(ONEHOP_ERR_MISSING_PEER, onehop_group_open(&config, &group));
    *(bool *)argument = true;
    return NULL;
}

static void *synchronize(void *argument) {
    CHECK_OK(onehop_host_stream_synchronize(waiting_stream));
    *(bool *)argument = true;
    return NULL;
}

/* Waits while a call of its rank waits for the other. */
static void cancel_waiting(void) {
    static float x[2][16];
    onehop_config config = kit_config(KIT_PATIENCE_MS);
    onehop_stream streams[2];
    onehop_context *contexts[2];
    pthread_t thread;
    bool done = false;
    CHECK_OK(onehop_create_all(&config, 2, NULL, contexts));
    for (int r = 0; r < 2; r++) CHECK_OK(onehop_host_stream_create(&streams[r]));
    CHECK_OK(onehop_all_reduce(contexts[0], x[0], x[0], 16, ONEHOP_FLOAT32, ONEHOP_SUM, NULL,
                               streams[0]));
    waiting_stream = streams[0];
    CHECK(!pthread_create(&thread, NULL, synchronize, &done));
    pause_us(50000);
    pthread_cancel(thread);
    pause_us(50000);
    CHECK_OK(onehop_all_reduce(contexts[1], x[1], x[1], 16, ONEHOP_FLOAT32, ONEHOP_SUM, NULL,
                               streams[1]));
    pthread_join(thread, NULL);
    CHECK(done);
    for (int r = 0; r < 2; r++) CHECK_OK(onehop_synchronize(contexts[r], streams[r]));
    for (int r = 0; r < 2; r++) onehop_destroy(contexts[r]);
    for (int r = 0; r < 2; r++) onehop_host_stream_destroy(streams[r]);
}

int main(void) {
    pthread_t thread;
    bool done = false;
    watchdog(50);
    const int before = count_fds();
    for (long us = 1500; us < 6000; us += 300) cancel_creating(us);
    CHECK(!pthread_create(&thread, NULL, create_by_name, &done));
    pause_us(50000);
    pthread_cancel(thread);
    pthread_join(thread, NULL);
    CHECK(done);
    cancel_waiting();
    CHECK_INT(before, count_fds());
    return 0;
}
