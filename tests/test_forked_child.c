/* Property: whatever a forked child does with its copies of its parent's objects ends in STATE or
 * frees the copy alone. The parent's group, its peers and its results never notice. Objects that
 * the child makes itself work. */
/* asan-off: a thread that the child does not have may hold the locks of its allocator.
 * tsan-off: it starts no threads after a fork. */
/* labels: asan-off quick tsan-off timeout=60 */
#include "fault_kit.h"

#define COUNT 1000

/* Every kind of object there is, of one rank. */
typedef struct objects {
    onehop_context *context, *alone;
    onehop_group *group;
    onehop_symmetric *symmetric;
    onehop_comm *comm;
    onehop_stream stream;
    onehop_host_graph *graph;
    void *memory, *storage[3];
} objects;

static void all_reduce(int rank, onehop_context *context) {
    float x[COUNT], y[COUNT];
    for (int i = 0; i < COUNT; i++) x[i] = (float)(1 + rank + i);
    CHECK_OK(onehop_all_reduce(context, x, y, COUNT, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, NULL));
    for (int i = 0; i < COUNT; i++) CHECK(y[i] == (float)(3 + 2 * i));
}

/* A communicator of one rank over memory of this process. */
static void make_comm(objects *o) {
    onehop_layout_config layout = ONEHOP_CONFIG_INIT(onehop_layout_config);
    onehop_comm_config config = ONEHOP_CONFIG_INIT(onehop_comm_config);
    onehop_layout sizes;
    layout.device_kind = config.device.kind = ONEHOP_DEVICE_HOST;
    layout.world_size = config.world_size = 1;
    layout.push_bytes = layout.pull_bytes = 4096;
    CHECK_OK(onehop_layout_get(&layout, &sizes));
    const size_t bytes[] = {sizes.symmetric_bytes, sizes.local_bytes, sizes.host_bytes};
    for (int i = 0; i < 3; i++)
        CHECK(!posix_memalign(&o->storage[i], 4096, (bytes[i] + 4095) / 4096 * 4096));
    CHECK_OK(
        onehop_storage_arm(&layout, config.device, o->storage[0], o->storage[1], o->storage[2]));
    config.layout = &layout;
    config.symmetric[0] = o->storage[0];
    config.local = o->storage[1];
    config.host = o->storage[2];
    CHECK_OK(onehop_comm_create(&config, &o->comm));
}

static void make_graph(objects *o) {
    static float x[4], y[4];
    CHECK_OK(onehop_host_stream_create(&o->stream));
    CHECK_OK(onehop_host_stream_capture_begin(o->stream));
    CHECK_OK(onehop_comm_all_reduce(o->comm, x, y, 4, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, o->stream));
    CHECK_OK(onehop_host_stream_capture_end(o->stream, &o->graph));
    CHECK_OK(onehop_host_graph_launch(o->graph, o->stream));
    CHECK_OK(onehop_host_stream_synchronize(o->stream));
}

static void make(int rank, int world, const char *name, objects *o) {
    const onehop_device host = {ONEHOP_DEVICE_HOST, 0};
    onehop_config config = kit_config(5000);
    onehop_group_config g = ONEHOP_CONFIG_INIT(onehop_group_config);
    memset(o, 0, sizeof *o);
    g.rank = rank;
    g.world_size = world;
    g.name = own_name(name);
    g.timeout_ms = 20000;
    CHECK_OK(onehop_group_open(&g, &o->group));
    config.group = o->group;
    CHECK_OK(onehop_create(&config, &o->context));
    CHECK_OK(onehop_symmetric_alloc(o->group, host, 4096, &o->symmetric));
    config.group = NULL;
    CHECK_OK(onehop_create_all(&config, 1, NULL, &o->alone));
    CHECK_OK(onehop_mem_alloc(host, 4096, &o->memory));
    make_comm(o);
    make_graph(o);
}

static void destroy(objects *o) {
    onehop_host_graph_destroy(o->graph);
    onehop_host_stream_destroy(o->stream);
    onehop_comm_destroy(o->comm);
    onehop_mem_free(o->memory);
    onehop_destroy(o->alone);
    onehop_destroy(o->context);
    onehop_symmetric_free(o->symmetric);
    onehop_group_close(o->group);
    for (int i = 0; i < 3; i++) free(o->storage[i]);
    memset(o, 0, sizeof *o);
}

/* ---- what the child finds -------------------------------------------------------------------- */

#define REFUSED(call)                                                                              \
    do {                                                                                           \
        CHECK_RESULT(ONEHOP_ERR_STATE, call);                                                      \
        CHECK_CONTAINS("forked", onehop_last_error());                                             \
    } while (0)

static void use_context(onehop_context *context, onehop_stream stream) {
    static float x[COUNT], y[2 * COUNT];
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    onehop_norm norm = ONEHOP_CONFIG_INIT(onehop_norm);
    onehop_stats stats;
    onehop_choice choice;
    onehop_failure failure;
    size_t count;
    norm.x = norm.weight = x;
    norm.normed = y;
    norm.rows = 1;
    norm.hidden = 4;
    norm.dtype = ONEHOP_FLOAT32;
    REFUSED(onehop_all_reduce(context, x, y, COUNT, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, stream));
    REFUSED(onehop_all_reduce(context, x, y, 4, ONEHOP_FLOAT32, ONEHOP_SUM, &call, stream));
    REFUSED(onehop_reduce_scatter(context, x, y, 4, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, stream));
    REFUSED(onehop_all_gather(context, x, y, 16, NULL, stream));
    REFUSED(onehop_all_reduce_norm(context, &norm, NULL, stream));
    REFUSED(would_use(context, 16, ONEHOP_FLOAT32, ONEHOP_SUM, ONEHOP_MODE_EAGER, 0, &choice));
    REFUSED(
        would_use_for(context, ONEHOP_ALL_GATHER, 16, ONEHOP_FLOAT32, ONEHOP_MODE_EAGER, &choice));
    REFUSED(onehop_capture_begin(context));
    REFUSED(onehop_capture_end(context));
    REFUSED(onehop_capture_begin_all(&context, 1));
    REFUSED(onehop_capture_end_all(&context, 1));
    REFUSED(onehop_capture_inputs(context, NULL, 0, &count));
    REFUSED(onehop_capture_end_mapped(context, NULL, NULL, 0));
    REFUSED(onehop_prepare(context, NULL));
    REFUSED(onehop_synchronize(context, stream));
    REFUSED(onehop_status(context, &failure));
    REFUSED(onehop_abort(context));
    REFUSED(onehop_set_timeout(context, 1));
    REFUSED(onehop_get_stats(context, &stats));
}

static void use_comm(onehop_comm *comm, onehop_stream stream) {
    static float x[4], y[4];
    uint32_t row;
    REFUSED(onehop_comm_all_reduce(comm, x, y, 4, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, stream));
    REFUSED(onehop_comm_reduce_scatter(comm, x, y, 4, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, stream));
    REFUSED(onehop_comm_all_gather(comm, x, y, 16, NULL, stream));
    REFUSED(onehop_comm_registration_take(comm, &row));
    REFUSED(onehop_comm_registration_fill(comm, 0, NULL, NULL));
    REFUSED(onehop_comm_registration_release(comm, 0));
}

static void use(const objects *o) {
    onehop_config config = kit_config(5000);
    onehop_symmetric *symmetric;
    onehop_host_graph *graph;
    onehop_context *context;
    uint64_t word = 0, words[2];
    const onehop_device host = {ONEHOP_DEVICE_HOST, 0};
    use_context(o->context, NULL);
    use_context(o->context, o->stream);
    use_comm(o->comm, NULL);
    REFUSED(onehop_synchronize(o->alone, NULL));
    REFUSED(onehop_all_gather(o->alone, &word, words, sizeof word, NULL, NULL));
    REFUSED(onehop_group_allgather(o->group, &word, words, sizeof word));
    REFUSED(onehop_group_barrier(o->group));
    REFUSED(onehop_symmetric_alloc(o->group, host, 4096, &symmetric));
    CHECK(!onehop_symmetric_ptr(o->symmetric, 0));
    config.group = o->group;
    REFUSED(onehop_create(&config, &context));
    REFUSED(onehop_host_stream_synchronize(o->stream));
    REFUSED(onehop_host_stream_capture_begin(o->stream));
    REFUSED(onehop_host_stream_capture_end(o->stream, &graph));
    REFUSED(onehop_host_graph_launch(o->graph, o->stream));
    REFUSED(onehop_host_graph_launch(o->graph, NULL));
}

/* All ranks of a group in this thread. */
static void make_and_use_own(void) {
    onehop_config config = kit_config(5000);
    onehop_stream streams[2];
    onehop_context *contexts[2];
    float x[2][4], y[2][4];
    CHECK_OK(onehop_create_all(&config, 2, NULL, contexts));
    for (int r = 0; r < 2; r++) CHECK_OK(onehop_host_stream_create(&streams[r]));
    for (int r = 0; r < 2; r++) {
        for (int i = 0; i < 4; i++) x[r][i] = (float)(1 + r);
        CHECK_OK(onehop_all_reduce(contexts[r], x[r], y[r], 4, ONEHOP_FLOAT32, ONEHOP_SUM, NULL,
                                   streams[r]));
    }
    for (int r = 0; r < 2; r++) CHECK_OK(onehop_synchronize(contexts[r], streams[r]));
    for (int r = 0; r < 2; r++) CHECK(y[r][3] == 3.0f);
    for (int r = 0; r < 2; r++) onehop_destroy(contexts[r]);
    for (int r = 0; r < 2; r++) onehop_host_stream_destroy(streams[r]);
}

static objects owned; /* what a static owner of a C++ program would destroy as the program exits */

static void destroy_owned(void) {
    destroy(&owned);
}

static void use_and_destroy(int rank, int world, void *argument) {
    (void)rank, (void)world, (void)argument;
    use(&owned);
    make_and_use_own();
    const int before = count_fds();
    destroy(&owned);
    CHECK(count_fds() < before); /* its own copies */
    make_and_use_own();
}

static void leave_by_exit(int rank, int world, void *argument) {
    (void)rank, (void)world, (void)argument;
}

/* ---- the parent ------------------------------------------------------------------------------ */

static void rank_body(int rank, int world, void *argument) {
    (void)argument;
    make(rank, world, "forked child", &owned);
    atexit(destroy_owned);
    all_reduce(rank, owned.context);
    const rank_fn children[] = {use_and_destroy, leave_by_exit};
    for (size_t i = 0; i < sizeof children / sizeof *children; i++) {
        if (rank == 0)
            CHECK_INT(0, wait_rank(start_rank(children[i], 0, world, NULL)));
        else
            sleep_ms(100); /* for what the child might say */
        CHECK_OK(onehop_status(owned.context, NULL));
        all_reduce(rank, owned.context);
        CHECK_OK(onehop_group_barrier(owned.group));
        CHECK_OK(onehop_host_graph_launch(owned.graph, owned.stream));
        CHECK_OK(onehop_host_stream_synchronize(owned.stream));
    }
}

/* A child of a child has objects of two ancestors, and of none the number. */
static void test_generations(void) {
    onehop_stream first;
    CHECK_OK(onehop_host_stream_create(&first));
    fflush(NULL);
    pid_t child = fork();
    if (!child) {
        onehop_stream second;
        CHECK_OK(onehop_host_stream_create(&second));
        pid_t grandchild = fork();
        if (!grandchild) {
            REFUSED(onehop_host_stream_synchronize(first));
            REFUSED(onehop_host_stream_synchronize(second));
            make_and_use_own();
            REFUSED(onehop_host_stream_synchronize(second));
            onehop_host_stream_destroy(second);
            _exit(0);
        }
        CHECK_INT(0, wait_rank(grandchild));
        CHECK_OK(onehop_host_stream_synchronize(second));
        onehop_host_stream_destroy(second);
        _exit(0);
    }
    CHECK_INT(0, wait_rank(child));
    onehop_host_stream_destroy(first);
}

static volatile bool stop;

static void *make_much(void *argument) {
    const onehop_device host = {ONEHOP_DEVICE_HOST, 0};
    (void)argument;
    while (!stop) {
        void *memory;
        onehop_stream stream;
        CHECK_OK(onehop_mem_alloc(host, 4096, &memory));
        CHECK_OK(onehop_host_stream_create(&stream));
        onehop_host_stream_destroy(stream);
        onehop_mem_free(memory);
    }
    return NULL;
}

/* Locks that another thread holds while the process is forked. */
static void test_locks(void) {
    pthread_t thread;
    if (HARNESS_SANITIZED) return; /* their own locks are in the way */
    CHECK(!pthread_create(&thread, NULL, make_much, NULL));
    for (int i = 0; i < 40; i++) {
        fflush(NULL);
        pid_t child = fork();
        if (!child) {
            alarm(20);
            make_and_use_own();
            _exit(0);
        }
        CHECK_INT(0, wait_rank(child));
    }
    stop = true;
    pthread_join(thread, NULL);
}

int main(void) {
    watchdog(50);
    run_ranks(2, rank_body, NULL);
    test_generations();
    test_locks();
    return 0;
}
