/* labels: quick timeout=60 */
/* Property: started with descriptors 0 to 2 closed, the library leaves those numbers alone, for
 * what anybody prints would land there: symmetric buffers, sockets, pidfds, memory of the caller's
 * that is passed on, files that are read, the cache of kernels. Ranks are processes and threads. */
#include "fault_kit.h"

#include "base/descriptor.h"
#include "jit/jit_cache.h"
#include "device/device.h"
#include "rendezvous/rendezvous.h"

#include <errno.h>
#include <fcntl.h>

#define COUNT 4096

static FILE *original_stderr;

/* FAIL prints to a copy far up. */
static void close_stdio(void) {
    original_stderr = fdopen(fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 100), "w");
    CHECK(original_stderr);
    setvbuf(original_stderr, NULL, _IONBF, 0);
    stderr = original_stderr;
    for (int fd = 0; fd <= 2; fd++) close(fd);
}

static void check_free(const char *what) {
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) != -1) FAIL("%s: descriptor %d is in use", what, fd);
}

static void all_reduce(onehop_context *context, int rank) {
    static _Thread_local float x[COUNT], y[COUNT];
    for (int i = 0; i < COUNT; i++) x[i] = (float)(1 + rank + i);
    CHECK_OK(onehop_all_reduce(context, x, y, COUNT, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, NULL));
    for (int i = 0; i < COUNT; i++) CHECK(y[i] == (float)(3 + 2 * i));
}

/* Memory that goes to the peers by descriptor. */
static void capture(onehop_context *context) {
    const onehop_device host = {ONEHOP_DEVICE_HOST, 0};
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    onehop_stream stream;
    onehop_host_graph *graph;
    onehop_stats stats;
    float *memory;
    call.algorithm = ONEHOP_2SHOT_PULL;
    call.source = ONEHOP_SOURCE_GRAPH;
    CHECK_OK(onehop_mem_alloc(host, 2 * COUNT * sizeof(float), (void **)&memory));
    check_free("onehop_mem_alloc");
    CHECK_OK(onehop_host_stream_create(&stream));
    CHECK_OK(onehop_capture_begin(context));
    CHECK_OK(onehop_host_stream_capture_begin(stream));
    CHECK_OK(onehop_all_reduce(context, memory, memory + COUNT, COUNT, ONEHOP_FLOAT32, ONEHOP_SUM,
                               &call, stream));
    CHECK_OK(onehop_host_stream_capture_end(stream, &graph));
    CHECK_OK(onehop_capture_end(context));
    check_free("onehop_capture_end");
    CHECK_OK(onehop_get_stats(context, &stats));
    CHECK_INT(1, stats.registrations_direct);
    CHECK_OK(onehop_host_graph_launch(graph, stream));
    CHECK_OK(onehop_synchronize(context, stream));
    onehop_host_graph_destroy(graph);
    onehop_host_stream_destroy(stream);
    onehop_mem_free(memory);
}

/* What arrives stays open here, unlike in the calls of the context. */
static void pass_descriptors(onehop_group *group) {
    int own[4], got[8];
    for (int i = 0; i < 4; i++) own[i] = oh_fd_copy(100);
    CHECK_OK(oh_rendezvous_pass_fds(group, own, 4, got));
    check_free("descriptors of a peer");
    for (int i = 0; i < 8; i++)
        if (got[i] >= 0) close(got[i]);
    for (int i = 0; i < 4; i++) close(own[i]);
}

static void use(onehop_group *group, int rank) {
    onehop_config config = kit_config(KIT_PATIENCE_MS);
    const onehop_device host = {ONEHOP_DEVICE_HOST, 0};
    onehop_symmetric *symmetric;
    onehop_context *context;
    check_free("the group");
    pass_descriptors(group);
    config.group = group;
    CHECK_OK(onehop_create(&config, &context));
    check_free("onehop_create");
    CHECK_OK(onehop_symmetric_alloc(group, host, 4096, &symmetric));
    check_free("onehop_symmetric_alloc");
    all_reduce(context, rank);
    capture(context);
    onehop_symmetric_free(symmetric);
    onehop_destroy(context);
    onehop_group_close(group);
}

static void process_body(int rank, int world, void *argument) {
    onehop_group_config config = ONEHOP_CONFIG_INIT(onehop_group_config);
    onehop_group *group;
    (void)argument;
    close_stdio();
    config.rank = rank;
    config.world_size = world;
    config.name = own_name("closed stdio");
    config.timeout_ms = 20000;
    CHECK_OK(onehop_group_open(&config, &group));
    use(group, rank);
    fclose(original_stderr);
    _exit(0);
}

static void thread_body(int rank, int world, void *argument) {
    onehop_group **groups = argument;
    (void)world;
    use(groups[rank], rank);
}

static void threads_in_a_process(int rank, int world, void *argument) {
    onehop_group *groups[2];
    (void)rank, (void)argument;
    close_stdio();
    CHECK_OK(onehop_group_open_local(world, groups));
    run_threads(world, thread_body, groups);
    _exit(0);
}

/* Each helper, with all three numbers free. */
static void helpers(int rank, int world, void *argument) {
    (void)rank, (void)world, (void)argument;
    close_stdio();
    const int fd = oh_fd_high(open("/dev/null", O_RDONLY));
    CHECK(fd > 2 && fcntl(fd, F_GETFD) == FD_CLOEXEC);
    CHECK_INT(fd, oh_fd_high(fd));
    const int copy = oh_fd_copy(fd);
    CHECK(copy > 2 && copy != fd && fcntl(copy, F_GETFD) == FD_CLOEXEC);
    FILE *file = oh_fd_read_file("/proc/self/maps");
    CHECK(file && fileno(file) > 2);
    check_free("helpers");
    errno = 0;
    CHECK(!oh_fd_read_file("/nowhere") && errno == ENOENT);
    errno = EBADMSG;
    CHECK(oh_fd_high(-1) == -1 && errno == EBADMSG);
    fclose(file);
    close(copy);
    close(fd);
    _exit(0);
}

/* The log prints nothing, for there is nowhere to print. */
static void cache(int rank, int world, void *argument) {
    char directory[] = "/tmp/onehop-closed-stdio-XXXXXX", command[96];
    unsigned char content[100] = {1};
    const oh_jit_image image = {content, sizeof content};
    const oh_digest key = {{7}};
    oh_jit_image found;
    (void)rank, (void)world, (void)argument;
    CHECK(mkdtemp(directory));
    setenv("ONEHOP_CACHE_DIR", directory, 1);
    snprintf(command, sizeof command, "rm -rf %s", directory);
    close_stdio();
    oh_jit_cache_write(&key, &image);
    const bool read = oh_jit_cache_read(&key, &found);
    check_free("the cache");
    CHECK(system(command) == 0);
    CHECK(read);
    free(found.bytes);
    _exit(0);
}

int main(void) {
    watchdog(50);
    run_ranks(1, helpers, NULL);
    run_ranks(2, process_body, NULL);
    CHECK_INT(0, wait_rank(start_rank(threads_in_a_process, 0, 2, NULL)));
    run_ranks(1, cache, NULL);
    return 0;
}
