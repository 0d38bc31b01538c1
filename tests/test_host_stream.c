/* Property: streams of the host device run their work in order, also after another stream's; what
 * is captured runs at each replay and not before; misuse is refused. */
/* labels: quick */
#include "device/device.h"

#include "harness.h"

static oh_device *host;

static onehop_stream new_stream(void) {
    onehop_stream stream = NULL;
    CHECK(onehop_host_stream_create(&stream) == ONEHOP_OK && stream != NULL);
    return stream;
}

/* ---- kernels --------------------------------------------------------------------------------- */

/* value = value * 31 + step: the outcome tells the order. Plain memory, so that a race shows. */
typedef struct step_args {
    uint64_t *value;
    uint64_t step;
} step_args;

static void run_step(const void *args, oh_grid grid) {
    const step_args *step = args;
    *step->value = *step->value * 31 + step->step + grid.block;
}

/* Waits until *gate is nonzero. */
static void run_gate(const void *args, oh_grid grid) {
    int *gate;
    memcpy(&gate, args, sizeof gate);
    (void)grid;
    while (!__atomic_load_n(gate, __ATOMIC_ACQUIRE)) oh_sleep_us(50);
}

static void open_gate(int *gate) {
    __atomic_store_n(gate, 1, __ATOMIC_RELEASE);
}

/* All bytes of the arguments, summed into what their first eight point to. */
static void run_sum(const void *args, oh_grid grid) {
    uint64_t *sum;
    (void)grid;
    memcpy(&sum, args, sizeof sum);
    for (size_t i = sizeof sum; i < 1024; i++) *sum += ((const unsigned char *)args)[i];
}

static void run_mask(const void *args, oh_grid grid) {
    sigset_t **set_out = (sigset_t **)(uintptr_t)args;
    (void)grid;
    pthread_sigmask(SIG_BLOCK, NULL, *set_out);
}

static onehop_result launch(onehop_stream stream, oh_host_kernel body, const void *args,
                            size_t bytes, uint32_t blocks) {
    oh_kernel kernel = {"test", body, 1};
    oh_function function;
    CHECK_OK(host->ops->load(host, &kernel, 1, &function));
    oh_launch l = {&function, args, bytes, blocks, 1, stream};
    return host->ops->launch(host, &l);
}

static void step(onehop_stream stream, uint64_t *value, uint64_t number) {
    step_args args = {value, number};
    CHECK_OK(launch(stream, run_step, &args, sizeof args, 1));
}

static void gate(onehop_stream stream, int *opened) {
    CHECK_OK(launch(stream, run_gate, &opened, sizeof opened, 1));
}

static uint64_t expected_steps(uint64_t value, uint64_t from, uint64_t to) {
    for (uint64_t i = from; i < to; i++) value = value * 31 + i;
    return value;
}

static bool idle(onehop_stream stream) {
    bool is_idle = false;
    CHECK_OK(host->ops->stream_idle(host, stream, &is_idle));
    return is_idle;
}

/* ---- tests ----------------------------------------------------------------------------------- */

/* More items than the ring holds, behind a gate that a helper opens once the caller must be
 * waiting. */
static void *open_later(void *opened) {
    oh_sleep_us(20000);
    open_gate(opened);
    return NULL;
}

static void test_order(void) {
    onehop_stream stream = new_stream();
    uint64_t value = 0;
    int opened = 0;
    pthread_t helper;
    gate(stream, &opened);
    CHECK(!idle(stream));
    CHECK(pthread_create(&helper, NULL, open_later, &opened) == 0);
    for (uint64_t i = 0; i < 3000; i++) step(stream, &value, i);
    CHECK_OK(onehop_host_stream_synchronize(stream));
    CHECK(idle(stream) && value == expected_steps(0, 0, 3000));
    pthread_join(helper, NULL);
    for (uint64_t i = 0; i < 50; i++) { /* the worker falls asleep in between */
        step(stream, &value, i);
        if (i % 10 == 0) oh_sleep_us(2000);
        CHECK_OK(onehop_host_stream_synchronize(stream));
    }
    value = 0;
    for (uint64_t i = 0; i < 500; i++) step(stream, &value, i);
    onehop_host_stream_destroy(stream); /* waits for the queue */
    CHECK(value == expected_steps(0, 0, 500));
}

static void test_launch(void) {
    onehop_stream stream = new_stream();
    uint64_t value = 0, sum = 0;
    unsigned char args[1024];
    step_args three = {&value, 0};
    CHECK_OK(launch(NULL, run_step, &three, sizeof three, 3)); /* now, last block first */
    CHECK(value == (2 * 31 + 1) * 31);
    memset(args, 1, sizeof args);
    memcpy(args, &(uint64_t *){&sum}, sizeof(uint64_t *));
    CHECK_OK(launch(stream, run_sum, args, sizeof args, 1));
    memset(args, 0, sizeof args); /* the launch has copied them */
    CHECK_RESULT(ONEHOP_ERR_TOO_LARGE, launch(stream, run_sum, args, sizeof args + 1, 1));
    static char from[100000], to[100000];
    memset(from, 3, sizeof from);
    CHECK_OK(host->ops->copy_on_stream(host, to, from, sizeof from, stream));
    CHECK(onehop_host_stream_synchronize(stream) == ONEHOP_OK && memcmp(to, from, sizeof to) == 0);
    from[0] = 4;
    CHECK(host->ops->copy_on_stream(host, to, from, 1, NULL) == ONEHOP_OK && to[0] == 4);
    sigset_t mask, *where = &mask;
    CHECK_OK(launch(stream, run_mask, &where, sizeof where, 1));
    CHECK_OK(onehop_host_stream_synchronize(stream));
    CHECK(sum == 1016 && sigismember(&mask, SIGTERM) && sigismember(&mask, SIGALRM));
    onehop_host_stream_destroy(stream);
}

static onehop_host_graph *capture_steps(onehop_stream stream, uint64_t *value, uint64_t count) {
    onehop_host_graph *graph = NULL;
    oh_stream_info info;
    CHECK_OK(onehop_host_stream_capture_begin(stream));
    CHECK(host->ops->stream_info(host, stream, &info) == ONEHOP_OK && info.capturing);
    for (uint64_t i = 0; i < count; i++) step(stream, value, i);
    CHECK(onehop_host_stream_capture_end(stream, &graph) == ONEHOP_OK && graph != NULL);
    CHECK(host->ops->stream_info(host, stream, &info) == ONEHOP_OK && !info.capturing);
    return graph;
}

static void test_graph(void) {
    onehop_stream stream = new_stream(), other = new_stream();
    uint64_t value = 0, want = 0;
    onehop_host_graph *graph = capture_steps(stream, &value, 7);
    CHECK(onehop_host_stream_synchronize(stream) == ONEHOP_OK &&
          value == 0); /* recorded, not run */
    for (int i = 0; i < 1000; i++) {
        CHECK_OK(onehop_host_graph_launch(graph, stream));
        step(stream, &value, 100);
        want = expected_steps(want, 0, 7) * 31 + 100;
    }
    CHECK(onehop_host_stream_synchronize(stream) == ONEHOP_OK && value == want);
    CHECK_OK(onehop_host_graph_launch(graph, NULL)); /* in this thread */
    CHECK(value == (want = expected_steps(want, 0, 7)));

    int opened = 0; /* destroyed while queued, on another stream than its own */
    gate(other, &opened);
    CHECK_OK(onehop_host_graph_launch(graph, other));
    CHECK_OK(onehop_host_graph_launch(graph, other));
    onehop_host_graph_destroy(graph);
    CHECK(value == want);
    open_gate(&opened);
    onehop_host_stream_destroy(other);
    CHECK(value == expected_steps(expected_steps(want, 0, 7), 0, 7));

    onehop_host_graph_destroy(capture_steps(stream, &value, 0)); /* an empty one */
    CHECK_OK(onehop_host_stream_capture_begin(stream));
    step(stream, &value, 1);
    onehop_host_stream_destroy(stream); /* drops the capture */
}

static void test_stream_order(void) {
    onehop_stream first = new_stream(), second = new_stream();
    uint64_t value = 0;
    int opened = 0;
    CHECK_OK(host->ops->stream_order(host, NULL, first));
    CHECK_OK(host->ops->stream_order(host, first, first));
    CHECK_OK(host->ops->stream_order(host, NULL, NULL));
    gate(first, &opened);
    for (uint64_t i = 0; i < 200; i++) { /* back and forth: one chain over both streams */
        step(i & 1 ? second : first, &value, i);
        CHECK(host->ops->stream_order(host, i & 1 ? second : first, i & 1 ? first : second) == 0);
    }
    CHECK(!idle(second));
    open_gate(&opened);
    CHECK_OK(host->ops->stream_order(host, second, NULL)); /* this thread waits */
    CHECK(value == expected_steps(0, 0, 200));

    /* The earlier stream may be destroyed at once. */
    opened = 0;
    gate(first, &opened);
    step(first, &value, 5);
    CHECK_OK(host->ops->stream_order(host, first, second));
    step(second, &value, 6);
    open_gate(&opened);
    onehop_host_stream_destroy(first);
    CHECK_OK(onehop_host_stream_synchronize(second));
    CHECK(value == (expected_steps(0, 0, 200) * 31 + 5) * 31 + 6);
    onehop_host_stream_destroy(second);
}

/* What a stream holds when a capture names it is waited for by every replay. */
static void test_order_in_capture(void) {
    onehop_stream first = new_stream(), second = new_stream();
    onehop_host_graph *graph = NULL, *unused = NULL;
    uint64_t value = 0;
    int opened = 0;
    gate(first, &opened);
    step(first, &value, 1);
    CHECK_OK(onehop_host_stream_capture_begin(second));
    CHECK_OK(onehop_host_stream_capture_begin(first)); /* both: only queued work counts */
    step(first, &value, 1000);
    CHECK_OK(host->ops->stream_order(host, first, second));
    step(second, &value, 2);
    CHECK_OK(onehop_host_stream_capture_end(second, &graph));
    CHECK_OK(onehop_host_stream_capture_end(first, &unused));
    CHECK_OK(onehop_host_graph_launch(graph, second));
    CHECK_OK(onehop_host_graph_launch(graph, second));
    oh_sleep_us(2000);
    CHECK(!idle(second));
    open_gate(&opened);
    onehop_host_stream_destroy(first);
    CHECK_OK(onehop_host_stream_synchronize(second));
    CHECK(value == (1 * 31 + 2) * 31 + 2);
    onehop_host_graph_destroy(graph);
    onehop_host_graph_destroy(unused);
    onehop_host_stream_destroy(second);
}

static void count_gone(void *argument) {
    __atomic_add_fetch((int *)argument, 1, __ATOMIC_RELEASE);
}

static int count_of(const int *gone) {
    return __atomic_load_n(gone, __ATOMIC_ACQUIRE);
}

/* Who is tied to a graph hears of its end, once: after the handle and the last queued launch. */
static void test_graph_retain(void) {
    onehop_stream stream = new_stream(), other = new_stream();
    onehop_host_graph *graphs[2] = {NULL, NULL};
    oh_stream_info info;
    uint64_t value = 0, captures[2];
    int gone[3] = {0, 0, 0}, opened = 0;
    for (int i = 0; i < 2; i++) {
        CHECK_OK(onehop_host_stream_capture_begin(stream));
        CHECK_OK(host->ops->stream_info(host, stream, &info));
        captures[i] = info.capture;
        step(stream, &value, 1);
        CHECK_OK(host->ops->graph_retain(host, stream, count_gone, &gone[i]));
        if (i == 1) CHECK_OK(host->ops->graph_retain(host, stream, count_gone, &gone[0]));
        CHECK_OK(onehop_host_stream_capture_end(stream, &graphs[i]));
        CHECK_OK(host->ops->stream_info(host, stream, &info));
        CHECK(!info.capturing && info.capture == 0);
    }
    CHECK(captures[0] != 0 && captures[1] != 0 && captures[0] != captures[1]);
    gate(other, &opened);
    CHECK_OK(onehop_host_graph_launch(graphs[1], other));
    onehop_host_graph_destroy(graphs[0]);
    onehop_host_graph_destroy(graphs[1]);
    CHECK(count_of(&gone[0]) == 1 && count_of(&gone[1]) == 0);
    open_gate(&opened);
    onehop_host_stream_destroy(other);
    CHECK(count_of(&gone[0]) == 2 && count_of(&gone[1]) == 1);
    /* Without a graph to tie it to, at once. */
    CHECK_RESULT(ONEHOP_ERR_STREAM, host->ops->graph_retain(host, stream, count_gone, &gone[2]));
    CHECK_RESULT(ONEHOP_ERR_STREAM, host->ops->graph_retain(host, NULL, count_gone, &gone[2]));
    CHECK(count_of(&gone[2]) == 2);
    CHECK_OK(onehop_host_stream_capture_begin(stream)); /* a capture that is dropped */
    CHECK_OK(host->ops->graph_retain(host, stream, count_gone, &gone[2]));
    onehop_host_stream_destroy(stream);
    CHECK(count_of(&gone[2]) == 3);
}

static void test_misuse(void) {
    onehop_stream stream = new_stream(), dead = new_stream();
    onehop_stream strangers[3] = {(onehop_stream)(uintptr_t)0x10, (onehop_stream)&stream, dead};
    onehop_host_graph *graph = NULL, *recorded = NULL;
    oh_stream_info info;
    uint64_t value = 0;
    bool is_idle;
    onehop_host_stream_destroy(dead);
    for (size_t i = 0; i < OH_LENGTH(strangers); i++) {
        onehop_stream bad = strangers[i];
        step_args args = {&value, 0};
        CHECK_RESULT(ONEHOP_ERR_STREAM, launch(bad, run_step, &args, sizeof args, 1));
        CHECK_RESULT(ONEHOP_ERR_STREAM, host->ops->stream_info(host, bad, &info));
        CHECK_RESULT(ONEHOP_ERR_STREAM, host->ops->stream_idle(host, bad, &is_idle));
        CHECK_RESULT(ONEHOP_ERR_STREAM, host->ops->stream_order(host, bad, stream));
        CHECK_RESULT(ONEHOP_ERR_STREAM, host->ops->stream_order(host, stream, bad));
        CHECK_RESULT(ONEHOP_ERR_STREAM, onehop_host_stream_synchronize(bad));
        CHECK_RESULT(ONEHOP_ERR_STREAM, onehop_host_stream_capture_begin(bad));
        CHECK_RESULT(ONEHOP_ERR_STREAM, onehop_host_stream_capture_end(bad, &graph));
        onehop_host_stream_destroy(bad);
    }
    CHECK_RESULT(ONEHOP_ERR_NULL, onehop_host_stream_create(NULL));
    CHECK_RESULT(ONEHOP_ERR_NULL, onehop_host_stream_synchronize(NULL));
    CHECK_RESULT(ONEHOP_ERR_NULL, onehop_host_stream_capture_begin(NULL));
    CHECK_RESULT(ONEHOP_ERR_NULL, onehop_host_stream_capture_end(NULL, &graph));
    CHECK_RESULT(ONEHOP_ERR_NULL, onehop_host_graph_launch(NULL, stream));

    CHECK_RESULT(ONEHOP_ERR_STATE, onehop_host_stream_capture_end(stream, &graph));
    CHECK_OK(onehop_host_stream_capture_begin(stream));
    CHECK_RESULT(ONEHOP_ERR_STATE, onehop_host_stream_capture_begin(stream));
    CHECK_RESULT(ONEHOP_ERR_STATE, onehop_host_stream_synchronize(stream));
    CHECK_RESULT(ONEHOP_ERR_NULL, onehop_host_stream_capture_end(stream, NULL));
    CHECK(onehop_host_stream_capture_end(stream, &recorded) == ONEHOP_OK && graph == NULL);
    CHECK_RESULT(ONEHOP_ERR_STREAM, onehop_host_graph_launch(recorded, dead));
    CHECK_OK(onehop_host_stream_capture_begin(stream));
    CHECK_RESULT(ONEHOP_ERR_STATE, onehop_host_graph_launch(recorded, stream));
    CHECK_OK(onehop_host_stream_capture_end(stream, &graph));
    onehop_host_graph_destroy(graph);
    onehop_host_graph_destroy(recorded);
    onehop_host_graph_destroy(NULL);
    onehop_host_stream_destroy(NULL);
    onehop_host_stream_destroy(stream);
    CHECK(value == 0);
}

/* Many streams at once; their numbers are never used again. */
static void test_many(void) {
    enum {
        STREAMS = 32,
        ROUNDS = 4
    };
    onehop_stream streams[STREAMS];
    uint64_t values[STREAMS], last_id = 0;
    for (int round = 0; round < ROUNDS; round++) {
        for (int s = 0; s < STREAMS; s++) {
            oh_stream_info info;
            streams[s] = new_stream();
            values[s] = 0;
            CHECK_OK(host->ops->stream_info(host, streams[s], &info));
            CHECK(info.id > last_id && !info.capturing);
            last_id = info.id;
        }
        for (uint64_t i = 0; i < 100; i++)
            for (int s = 0; s < STREAMS; s++) step(streams[s], &values[s], i);
        for (int s = 0; s < STREAMS; s++) {
            if (s & 1) CHECK_OK(onehop_host_stream_synchronize(streams[s]));
            onehop_host_stream_destroy(streams[s]);
            CHECK(values[s] == expected_steps(0, 0, 100));
        }
    }
}

int main(void) {
    watchdog(60);
    CHECK(setenv("ONEHOP_LOG", "off", 1) == 0); /* misuse is logged */
    CHECK_OK(oh_host_device_open(&host));
    test_order();
    test_launch();
    test_graph();
    test_stream_order();
    test_order_in_capture();
    test_graph_retain();
    test_misuse();
    test_many();
    return 0;
}
