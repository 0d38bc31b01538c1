/* What a rank does in the sweep: everything of the public API that needs peers, on the host device,
 * each result checked. At the first failure it gives back what it has and is done. */
#include "sweep.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    SMALL = 200,   /* floats */
    LARGE = 30000, /* chunks */
    HIDDEN = 64,
    ROWS = 3
};

typedef struct life {
    const life_plan *plan;
    life_report *report;
    double began; /* the step */
    onehop_context *context;
    void *shared_in, *shared_out;
    onehop_stream stream;
    onehop_host_graph *graph;
    bool recording; /* the stream */
    onehop_group *group;
    onehop_symmetric *symmetric;
    onehop_layout layout;
    char *local, *host;
    onehop_comm *comm;
} life;

static float in[LARGE * SWEEP_RANKS], out[LARGE * SWEEP_RANKS];
static float heap_in[SMALL], heap_out[SMALL]; /* of the graph's staged call */

const char *life_step_name(int step) {
    static const char *const names[] = {
#define LIFE_NAME(name) #name,
        LIFE_STEPS(LIFE_NAME)
#undef LIFE_NAME
    };
    return step >= 0 && step < LIFE_STEPS_COUNT ? names[step] : "start";
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- steps ----------------------------------------------------------------------------------- */

static void begin(life *l, life_step step) {
    __atomic_store_n(&l->report->step, (int)step, __ATOMIC_RELAXED);
    l->report->sends_before = l->report->counts[IN_send];
    l->began = now();
}

/* True if the step failed. */
static bool end(life *l, onehop_result result) {
    life_report *r = l->report;
    const float took = (float)(now() - l->began);
    onehop_failure failure;
    if (took > r->longest) {
        r->longest = took;
        r->longest_step = r->step;
    }
    if (!result) return false;
    r->result = result;
    snprintf(r->text, sizeof r->text, "%s", onehop_last_error());
    /* The context's failure, or one of the second group? */
    const bool of_context = l->context && onehop_status(l->context, &failure) == result &&
                            strstr(r->text, failure.text);
    r->peer = of_context ? failure.peer : -1;
    return true;
}

/* Leaves the function with true if the step failed. */
#define STEP(name, call)                                                                           \
    do {                                                                                           \
        begin(l, AT_##name);                                                                       \
        if (end(l, call)) return true;                                                             \
    } while (0)

static float value(int rank, size_t i) {
    return (float)((rank + 1) * (1 + (int)(i % 97)));
}

static void fill(float *to, const life *l, size_t count) {
    for (size_t i = 0; i < count; i++) to[i] = value(l->plan->rank, i);
}

static void check(life *l, const float *found, size_t first, size_t count) {
    const float ranks = (float)(l->plan->world * (l->plan->world + 1) / 2);
    for (size_t i = 0; i < count; i++)
        if (found[i] != ranks * value(0, first + i)) l->report->wrong = true;
}

static onehop_result reduce(life *l, onehop_algorithm algorithm, size_t count) {
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    call.algorithm = algorithm;
    fill(in, l, count);
    memset(out, 0xee, sizeof out);
    onehop_result result =
        onehop_all_reduce(l->context, in, out, count, ONEHOP_FLOAT32, ONEHOP_SUM, &call, NULL);
    if (!result) check(l, out, 0, count);
    return result;
}

static onehop_result scatter(life *l) {
    const size_t part = LARGE / (size_t)l->plan->world;
    fill(in, l, part * (size_t)l->plan->world);
    onehop_result result =
        onehop_reduce_scatter(l->context, in, out, part, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, NULL);
    if (!result) check(l, out, part * (size_t)l->plan->rank, part);
    return result;
}

static onehop_result gather(life *l) {
    fill(in, l, LARGE);
    onehop_result result = onehop_all_gather(l->context, in, out, LARGE * sizeof *in, NULL, NULL);
    for (int r = 0; r < l->plan->world && !result; r++)
        for (size_t i = 0; i < LARGE; i++)
            if (out[(size_t)r * LARGE + i] != value(r, i)) l->report->wrong = true;
    return result;
}

/* The sum is checked; what the norm makes of it has tests of its own. */
static onehop_result norm(life *l) {
    static float weight[HIDDEN], normed[ROWS * HIDDEN];
    const onehop_norm n = {.struct_size = sizeof n,
                           .x = in,
                           .weight = weight,
                           .normed = normed,
                           .residual_out = out,
                           .rows = ROWS,
                           .hidden = HIDDEN,
                           .dtype = ONEHOP_FLOAT32,
                           .eps = 1e-6f};
    fill(in, l, ROWS * HIDDEN);
    onehop_result result = onehop_all_reduce_norm(l->context, &n, NULL, NULL);
    if (!result) check(l, out, 0, ROWS * HIDDEN);
    return result;
}

static onehop_result qknorm(life *l) {
    static float weight[HIDDEN];
    const onehop_qknorm n = {.struct_size = sizeof n,
                             .q = in,
                             .k = in + ROWS * HIDDEN,
                             .q_weight = weight,
                             .k_weight = weight,
                             .tokens = ROWS,
                             .q_width = HIDDEN,
                             .k_width = HIDDEN,
                             .dtype = ONEHOP_FLOAT32,
                             .eps = 1e-6f};
    fill(in, l, 2 * ROWS * HIDDEN);
    return onehop_tp_qknorm(l->context, &n, NULL, NULL);
}

static const onehop_device host_device = {ONEHOP_DEVICE_HOST, 0};

static onehop_result create(life *l) {
    const onehop_config c = {.struct_size = sizeof c,
                             .rank = l->plan->rank,
                             .world_size = l->plan->world,
                             .name = l->plan->name,
                             .device = host_device,
                             .push_bytes = 4096,
                             .pull_bytes = 65536,
                             .max_registrations = 16,
                             .timeout_ms = l->plan->limit_ms,
                             .init_timeout_ms = l->plan->limit_ms};
    return onehop_create(&c, &l->context);
}

static bool calls(life *l) {
    STEP(create, create(l));
    STEP(all_reduce_small, reduce(l, ONEHOP_ALGORITHM_AUTO, SMALL));
    STEP(all_reduce_large, reduce(l, ONEHOP_ALGORITHM_AUTO, LARGE));
    STEP(push_1shot, reduce(l, ONEHOP_1SHOT_PUSH, LARGE));
    STEP(push_2shot, reduce(l, ONEHOP_2SHOT_PUSH, LARGE));
    STEP(pull_1shot, reduce(l, ONEHOP_1SHOT_PULL, LARGE));
    STEP(pull_2shot, reduce(l, ONEHOP_2SHOT_PULL, LARGE));
    STEP(reduce_scatter, scatter(l));
    STEP(all_gather, gather(l));
    STEP(norm, norm(l));
    STEP(qknorm, qknorm(l));
    return false;
}

/* ---- a graph over registered memory ---------------------------------------------------------- */

static onehop_result record(life *l) {
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    call.algorithm = ONEHOP_2SHOT_PULL;
    onehop_result result = onehop_host_stream_capture_begin(l->stream);
    if (result) return result;
    l->recording = true;
    result = onehop_all_reduce(l->context, l->shared_in, l->shared_out, SMALL, ONEHOP_FLOAT32,
                               ONEHOP_SUM, &call, l->stream);
    if (!result)
        result = onehop_all_reduce(l->context, heap_in, heap_out, SMALL, ONEHOP_FLOAT32, ONEHOP_SUM,
                                   &call, l->stream);
    if (result) return result;
    l->recording = false;
    return onehop_host_stream_capture_end(l->stream, &l->graph);
}

static bool graph(life *l) {
    const size_t bytes = SMALL * sizeof(float);
    STEP(prepare, onehop_prepare(l->context, NULL));
    STEP(mem_alloc, onehop_mem_alloc(host_device, bytes, &l->shared_in));
    STEP(mem_alloc, onehop_mem_alloc(host_device, bytes, &l->shared_out));
    STEP(stream_create, onehop_host_stream_create(&l->stream));
    STEP(capture_begin, onehop_capture_begin(l->context));
    STEP(capture, record(l));
    STEP(capture_end, onehop_capture_end(l->context));
    fill(l->shared_in, l, SMALL);
    fill(heap_in, l, SMALL);
    for (int i = 0; i < 2; i++) {
        memset(l->shared_out, 0xee, bytes);
        memset(heap_out, 0xee, bytes);
        /* The peers may be a replay behind, and write to this rank's output. */
        STEP(launch, reduce(l, ONEHOP_ALGORITHM_AUTO, SMALL));
        STEP(launch, onehop_host_graph_launch(l->graph, l->stream));
        STEP(synchronize, onehop_synchronize(l->context, l->stream));
        check(l, l->shared_out, 0, SMALL);
        check(l, heap_out, 0, SMALL);
    }
    return false;
}

/* ---- a communicator over memory of one's own ------------------------------------------------- */

static onehop_result open_group(life *l) {
    char name[128];
    const onehop_group_config g = {.struct_size = sizeof g,
                                   .rank = l->plan->rank,
                                   .world_size = l->plan->world,
                                   .name = name,
                                   .timeout_ms = l->plan->limit_ms};
    snprintf(name, sizeof name, "%s, second", l->plan->name);
    return onehop_group_open(&g, &l->group);
}

static onehop_result comm_create(life *l, const onehop_layout_config *layout) {
    onehop_comm_config c = {.struct_size = sizeof c,
                            .device = host_device,
                            .rank = l->plan->rank,
                            .world_size = l->plan->world,
                            .layout = layout,
                            .local = l->local,
                            .host = l->host,
                            .timeout_ms = l->plan->limit_ms};
    for (int r = 0; r < l->plan->world; r++) c.symmetric[r] = onehop_symmetric_ptr(l->symmetric, r);
    return onehop_comm_create(&c, &l->comm);
}

static onehop_result comm_reduce(life *l) {
    fill(in, l, LARGE);
    onehop_result result =
        onehop_comm_all_reduce(l->comm, in, out, LARGE, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, NULL);
    if (!result) check(l, out, 0, LARGE);
    return result;
}

static bool own_storage(life *l) {
    const onehop_layout_config layout = {.struct_size = sizeof layout,
                                         .device_kind = ONEHOP_DEVICE_HOST,
                                         .world_size = l->plan->world,
                                         .push_bytes = 4096,
                                         .pull_bytes = 65536,
                                         .max_registrations = 16};
    if (onehop_layout_get(&layout, &l->layout)) abort();
    l->local = aligned_alloc(256, l->layout.local_bytes);
    l->host = aligned_alloc(256, (l->layout.host_bytes + 255) / 256 * 256);
    STEP(group_open, open_group(l));
    STEP(symmetric_alloc,
         onehop_symmetric_alloc(l->group, host_device, l->layout.symmetric_bytes, &l->symmetric));
    STEP(storage_arm,
         onehop_storage_arm(&layout, host_device, onehop_symmetric_ptr(l->symmetric, l->plan->rank),
                            l->local, l->host));
    STEP(barrier, onehop_group_barrier(l->group));
    STEP(comm_create, comm_create(l, &layout));
    STEP(comm_all_reduce, comm_reduce(l));
    STEP(status, onehop_status(l->context, NULL)); /* now, for peers leave after the barrier */
    STEP(last_barrier, onehop_group_barrier(l->group));
    return false;
}

/* ---- the end --------------------------------------------------------------------------------- */

/* In this order graphs end before the memory that they use. */
static void give_back(life *l) {
    if (!l->report->result) begin(l, AT_destroy);
    l->began = now();
    onehop_comm_destroy(l->comm);
    onehop_symmetric_free(l->symmetric);
    onehop_group_close(l->group);
    free(l->local);
    free(l->host);
    if (l->recording) onehop_host_stream_capture_end(l->stream, &l->graph);
    onehop_host_stream_destroy(l->stream);
    onehop_host_graph_destroy(l->graph);
    onehop_destroy(l->context);
    onehop_mem_free(l->shared_in);
    onehop_mem_free(l->shared_out);
    end(l, ONEHOP_OK);
}

static int count_entries(const char *path) {
    int count = 0;
    DIR *directory = opendir(path);
    while (directory && readdir(directory)) count++;
    if (directory) closedir(directory);
    return count;
}

static bool was_open[256];

static void note_fds(void) {
    for (int fd = 0; fd < 256; fd++) was_open[fd] = fcntl(fd, F_GETFD) >= 0;
}

static void name_new_fd(char *text, size_t size) {
    char path[64];
    for (int fd = 0; fd < 256; fd++) {
        if (was_open[fd] || fcntl(fd, F_GETFD) < 0) continue;
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        const ssize_t length = readlink(path, text, size - 1);
        text[length < 0 ? 0 : length] = 0;
        return;
    }
}

/* Mappings of ours are files in memory. */
static void look_at_maps(life_report *r) {
    char line[400];
    FILE *maps = fopen("/proc/self/maps", "re");
    while (maps && fgets(line, sizeof line, maps)) {
        if (!strstr(line, "memfd:")) continue;
        r->maps_left = true;
        line[strcspn(line, "\n")] = 0;
        snprintf(r->left, sizeof r->left, "%.150s", line);
    }
    if (maps) fclose(maps);
}

/* A thread that was joined may be listed for a moment more. */
static int count_threads(void) {
    int threads = count_entries("/proc/self/task") - 2;
    for (int i = 0; i < 50 && threads > 1; i++) {
        usleep(2000);
        threads = count_entries("/proc/self/task") - 2;
    }
    return threads;
}

/* Of the thread that makes the calls. */
static float seconds_late(void) {
    unsigned long long ran = 0, waited = 0;
    FILE *file = fopen("/proc/self/schedstat", "re");
    if (file && fscanf(file, "%llu %llu", &ran, &waited) != 2) waited = 0;
    if (file) fclose(file);
    return 1e-9f * (float)waited;
}

static void no_log(void *user, onehop_log_level level, const char *line) {
    (void)user, (void)level, (void)line;
}

void life_run(const life_plan *plan, life_report *report) {
    life l = {.plan = plan, .report = report};
    if (!getenv("SWEEP_LOG")) onehop_set_log(no_log, NULL);
    const int fds = count_entries("/proc/self/fd");
    note_fds();
    inject_begin(&plan->fault, report->counts);
    bool failed = calls(&l) || graph(&l) || own_storage(&l);
    (void)failed; /* the report says it */
    give_back(&l);
    report->heap_left = inject_end();
    report->late = seconds_late();
    report->threads_left = count_threads() - 1;
    look_at_maps(report);
    report->fds_left = count_entries("/proc/self/fd") - fds;
    if (report->fds_left) name_new_fd(report->left, sizeof report->left);
    __atomic_store_n(&report->ended, true, __ATOMIC_RELEASE);
}
