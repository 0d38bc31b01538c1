/* Property: 1shot_pull and 2shot_pull over registrations of captured inputs give the bits of
 * 1shot_push, through the public API, on communicators over the program's own memory. Replays over
 * registrations that are empty or recycled, or with peers that are late or missing at either
 * barrier, end in the error that says so.
 *
 * Ranks are threads, whose inputs and outputs all can reach. Registrations, direct and staged, are
 * filled by hand; graphs are replayed over changed inputs and changed registrations. */
/* labels: quick */
#include "fault_kit.h"
#include "reference.h"

#include "communicator/comm.h"
#include "kernels/guard.h"

#define MAX_RANKS 16
#define ROOM      ((size_t)1 << 19) /* bytes of an input, of an output */

typedef struct group {
    int world;
    uint32_t timeout_ms;
    onehop_layout_config plan;
    onehop_layout layout;
    pthread_barrier_t barrier;
    void *buffers[MAX_RANKS], *local[MAX_RANKS], *host[MAX_RANKS];
    onehop_comm *comms[MAX_RANKS];
    void *in[MAX_RANKS], *out[MAX_RANKS], *expected[MAX_RANKS];
} group;

static void *memory(size_t bytes) {
    void *p = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    CHECK(p != NULL);
    memset(p, 0xA5, bytes);
    return p;
}

static void group_open(group *g, int world, uint32_t timeout_ms) {
    const onehop_device host = {ONEHOP_DEVICE_HOST, 0};
    memset(g, 0, sizeof *g);
    g->world = world;
    g->plan = (onehop_layout_config)ONEHOP_CONFIG_INIT(onehop_layout_config);
    g->plan.device_kind = ONEHOP_DEVICE_HOST;
    g->plan.world_size = world;
    g->plan.push_bytes = 4096;
    g->plan.pull_bytes = 8192;
    g->plan.max_registrations = 4;
    CHECK_OK(onehop_layout_get(&g->plan, &g->layout));
    pthread_barrier_init(&g->barrier, NULL, (unsigned)world);
    for (int r = 0; r < world; r++) {
        g->buffers[r] = memory(g->layout.symmetric_bytes);
        g->local[r] = memory(g->layout.local_bytes);
        g->host[r] = memory(g->layout.host_bytes);
        g->in[r] = memory(ROOM);
        g->out[r] = memory(ROOM);
        g->expected[r] = memory(ROOM);
        CHECK_OK(onehop_storage_arm(&g->plan, host, g->buffers[r], g->local[r], g->host[r]));
    }
    for (int r = 0; r < world; r++) {
        onehop_comm_config c = ONEHOP_CONFIG_INIT(onehop_comm_config);
        c.device = host;
        c.rank = r;
        c.world_size = world;
        c.layout = &g->plan;
        c.local = g->local[r];
        c.host = g->host[r];
        c.timeout_ms = timeout_ms ? timeout_ms : KIT_PATIENCE_MS;
        for (int p = 0; p < world; p++) c.symmetric[p] = g->buffers[p];
        CHECK_OK(onehop_comm_create(&c, &g->comms[r]));
    }
}

static void group_close(group *g) {
    for (int r = 0; r < g->world; r++) onehop_comm_destroy(g->comms[r]);
    for (int r = 0; r < g->world; r++) {
        void *all[] = {g->buffers[r], g->local[r], g->host[r], g->in[r], g->out[r], g->expected[r]};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    }
    pthread_barrier_destroy(&g->barrier);
}

static void meet(group *g) {
    pthread_barrier_wait(&g->barrier);
}

static onehop_call call_over(onehop_algorithm algorithm, uint32_t registration) {
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    call.algorithm = algorithm;
    call.source = ONEHOP_SOURCE_GRAPH;
    call.registration = registration;
    return call;
}

static void fill(group *g, int rank, uint32_t registration, bool direct, bool in_place,
                 onehop_algorithm algorithm) {
    CHECK_OK(onehop_comm_registration_fill(
        g->comms[rank], registration,
        direct ? (const void *const *)(in_place ? g->out : g->in) : NULL,
        direct && (algorithm == ONEHOP_2SHOT_PULL || rank % 2) ? g->out : NULL));
}

/* ---- results --------------------------------------------------------------------------------- */
static void one_result(group *g, int rank, onehop_algorithm algorithm, bool direct, bool in_place,
                       size_t count, onehop_dtype dtype, uint64_t seed) {
    const size_t bytes = count * reference_element_bytes(dtype);
    onehop_call push = ONEHOP_CONFIG_INIT(onehop_call);
    uint32_t registration;
    char what[120];
    void *in = in_place ? g->out[rank] : g->in[rank], *out = g->out[rank];
    snprintf(what, sizeof what, "%s, %s, %s, rank %d of %d, %zu elements",
             onehop_algorithm_name(algorithm), direct ? "direct" : "staged",
             in_place ? "in place" : "out of place", rank, g->world, count);
    CHECK_OK(onehop_comm_registration_take(g->comms[rank], &registration));
    fill(g, rank, registration, direct, in_place, algorithm);
    memset(out, 0xA5, bytes + 16);
    input_fill(in, INPUT_MIXED, seed, rank, 0, count, dtype);
    push.algorithm = ONEHOP_1SHOT_PUSH;
    CHECK_OK(onehop_comm_all_reduce(g->comms[rank], in, g->expected[rank], count, dtype, ONEHOP_SUM,
                                    &push, NULL));
    onehop_call call = call_over(algorithm, registration);
    CHECK_OK(
        onehop_comm_all_reduce(g->comms[rank], in, out, count, dtype, ONEHOP_SUM, &call, NULL));
    if (!in_place) memset(in, 0x5A, bytes); /* nobody reads it any more */
    expect_equal(g->expected[rank], out, count, dtype, what);
    for (size_t i = bytes; i < bytes + 16; i++)
        if (((unsigned char *)out)[i] != 0xA5) FAIL("%s: byte %zu overwritten", what, i);
    CHECK_OK(onehop_comm_registration_release(g->comms[rank], registration));
}

static void results(int rank, int world, void *argument) {
    group *g = argument;
    static const size_t more[] = {0, 33, 127, 128, 129, 500, 1023, 1024, 1025, 9001, 65537};
    const size_t small = HARNESS_SANITIZED ? 20 : 40;
    uint64_t seed = 1;
    for (int d = ONEHOP_FLOAT32; d <= ONEHOP_BFLOAT16; d++)
        for (size_t i = 0; i < small + sizeof more / sizeof *more; i++) {
            const size_t count = i < small ? i : more[i - small];
            const bool staged = i % 4 == 2;
            const onehop_dtype t = (onehop_dtype)d;
            if (world > 4 && i % 5) continue;
            one_result(g, rank, ONEHOP_1SHOT_PULL, !staged, false, count, t, seed++);
            one_result(g, rank, ONEHOP_2SHOT_PULL, !staged, i % 2, count, t, seed++);
        }
}

/* ---- replays --------------------------------------------------------------------------------- */
/* One captured graph of two calls; inputs change between replays, and the registrations' modes. */
static void replays(int rank, int world, void *argument) {
    group *g = argument;
    onehop_comm *comm = g->comms[rank];
    onehop_stream stream;
    onehop_host_graph *graph;
    uint32_t registrations[2];
    const size_t count = 3001;
    void *in = g->in[rank], *out = g->out[rank], *third = g->expected[rank];
    unsigned char *want = memory(count * 4);
    CHECK_OK(onehop_host_stream_create(&stream));
    for (int i = 0; i < 2; i++) CHECK_OK(onehop_comm_registration_take(comm, &registrations[i]));
    const onehop_call one = call_over(ONEHOP_1SHOT_PULL, registrations[0]);
    const onehop_call two = call_over(ONEHOP_2SHOT_PULL, registrations[1]);
    CHECK_OK(onehop_host_stream_capture_begin(stream));
    CHECK_OK(
        onehop_comm_all_reduce(comm, in, out, count, ONEHOP_FLOAT32, ONEHOP_SUM, &one, stream));
    CHECK_OK(
        onehop_comm_all_reduce(comm, in, third, count, ONEHOP_FLOAT32, ONEHOP_SUM, &two, stream));
    CHECK_OK(onehop_host_stream_capture_end(stream, &graph));
    for (uint64_t replay = 0; replay < 12; replay++) {
        const bool first = replay % 3 != 1, second = replay % 4 != 2;
        CHECK_OK(onehop_comm_registration_fill(comm, registrations[0],
                                               first ? (const void *const *)g->in : NULL, NULL));
        CHECK_OK(onehop_comm_registration_fill(comm, registrations[1],
                                               second ? (const void *const *)g->in : NULL,
                                               second ? g->expected : NULL));
        input_fill(in, INPUT_REAL, replay, rank, 0, count, ONEHOP_FLOAT32);
        CHECK_OK(onehop_host_graph_launch(graph, stream));
        CHECK_OK(onehop_host_stream_synchronize(stream));
        reference_of_inputs(want, INPUT_REAL, replay, world, 0, count, ONEHOP_FLOAT32);
        expect_equal(want, out, count, ONEHOP_FLOAT32, "1shot_pull of a graph");
        expect_equal(want, third, count, ONEHOP_FLOAT32, "2shot_pull of a graph");
    }
    /* A graph that outlives its registration. */
    meet(g);
    CHECK_OK(onehop_comm_registration_release(comm, registrations[0]));
    CHECK_OK(onehop_comm_registration_take(comm, &registrations[0]));
    CHECK_OK(
        onehop_comm_registration_fill(comm, registrations[0], (const void *const *)g->in, NULL));
    CHECK_OK(onehop_host_graph_launch(graph, stream));
    (void)onehop_host_stream_synchronize(stream);
    CHECK_RESULT(ONEHOP_ERR_REGISTRATION, oh_comm_check(comm));
    onehop_host_graph_destroy(graph);
    onehop_host_stream_destroy(stream);
    free(want);
}

/* ---- registrations that do not fit ----------------------------------------------------------- */
typedef enum wrong_rule {
    ALL_EMPTY,
    ONE_EMPTY,
    NO_OUTPUTS,
    UNALIGNED,
    WRONG_RULES
} wrong_rule;

typedef struct wrong_job {
    group g;
    wrong_rule wrong;
} wrong_job;

static void wrong(int rank, int world, void *argument) {
    wrong_job *j = argument;
    group *g = &j->g;
    const int last = world - 1;
    uint32_t registration;
    char part[40];
    float *out = g->out[rank];
    CHECK_OK(onehop_comm_registration_take(g->comms[rank], &registration));
    if (j->wrong != ALL_EMPTY && !(j->wrong == ONE_EMPTY && rank == last))
        CHECK_OK(
            onehop_comm_registration_fill(g->comms[rank], registration, (const void *const *)g->in,
                                          j->wrong == NO_OUTPUTS && rank == last ? NULL : g->out));
    if (j->wrong == UNALIGNED && rank == last) out++;
    onehop_call call = call_over(ONEHOP_2SHOT_PULL, registration);
    CHECK_RESULT(ONEHOP_ERR_REGISTRATION,
                 onehop_comm_all_reduce(g->comms[rank], g->in[rank], out, 500, ONEHOP_FLOAT32,
                                        ONEHOP_SUM, &call, NULL));
    CHECK_CONTAINS("registration of captured inputs", onehop_last_error());
    const int culprit = g->comms[rank]->failure.peer;
    snprintf(part, sizeof part, "rank %d's registration", culprit);
    CHECK_CONTAINS(part, onehop_last_error());
    CHECK(culprit >= 0 && culprit < world);
    if (j->wrong != ALL_EMPTY) CHECK_INT(last, culprit);
    for (size_t i = 0; i < 2000; i++) CHECK_INT(0xA5, ((unsigned char *)g->out[rank])[i]);
}

/* ---- peers that are late or missing ---------------------------------------------------------- */
typedef struct missing_job {
    group g;
    onehop_algorithm algorithm;
    bool enters; /* the last rank, which has sent its signature; it does not exit */
    bool late;   /* or it comes in the end */
} missing_job;

static uint64_t *signature_of(const group *g, int rank, uint32_t sequence) {
    const oh_args *a = &g->comms[0]->args;
    oh_control *control =
        (oh_control *)(uintptr_t)(a->buffers[OH_SIGNATURE_HOME(rank, 0)] + a->regions.control);
    return (uint64_t *)&control->lines[sequence & 1][rank].signature;
}

/* What a rank does up to a barrier, without the call: its signature, rank 0's once that is there,
 * and enter of every block. */
static void pretend(const group *g, int rank, uint32_t sequence, bool enters) {
    const oh_args *a = &g->comms[0]->args;
    uint64_t signature = 0;
    while ((uint32_t)signature != sequence)
        signature = __atomic_load_n(signature_of(g, 0, sequence), __ATOMIC_RELAXED);
    __atomic_store_n(signature_of(g, rank, sequence), signature, __ATOMIC_RELAXED);
    for (int to = 0; to + 1 < g->world && enters; to++)
        for (uint32_t b = 0; b < a->regions.max_blocks; b++) {
            const uint64_t p = a->buffers[to] + a->regions.signals + b * OH_SIGNAL_BLOCK_BYTES +
                               8 * (uint64_t)rank;
            __atomic_store_n((uint64_t *)(uintptr_t)p,
                             (uint64_t)OH_REGISTRATION_IDENTITY(1) << 32 | sequence,
                             __ATOMIC_RELEASE);
        }
}

static void missing(int rank, int world, void *argument) {
    missing_job *j = argument;
    group *g = &j->g;
    uint32_t registration;
    const size_t count = 700;
    unsigned char *want = memory(count * 4);
    CHECK_OK(onehop_comm_registration_take(g->comms[rank], &registration));
    CHECK_OK(onehop_comm_registration_fill(g->comms[rank], registration, (const void *const *)g->in,
                                           g->out));
    input_fill(g->in[rank], INPUT_REAL, 5, rank, 0, count, ONEHOP_FLOAT32);
    const onehop_call call = call_over(j->algorithm, registration);
    meet(g);
    if (rank == world - 1 && !j->late) pretend(g, rank, 2, j->enters);
    if (rank == world - 1 && j->late) sleep_ms(150);
    if (rank < world - 1 || j->late) {
        const onehop_result result =
            onehop_comm_all_reduce(g->comms[rank], g->in[rank], g->out[rank], count, ONEHOP_FLOAT32,
                                   ONEHOP_SUM, &call, NULL);
        if (j->late) {
            CHECK_INT(ONEHOP_OK, result);
            reference_of_inputs(want, INPUT_REAL, 5, world, 0, count, ONEHOP_FLOAT32);
            expect_equal(want, g->out[rank], count, ONEHOP_FLOAT32, "a late peer");
        } else {
            CHECK_INT(ONEHOP_ERR_TIMEOUT, result);
            CHECK_INT(world - 1, g->comms[rank]->failure.peer);
            CHECK_INT(j->enters ? OH_SITE_PULL_EXIT : OH_SITE_PULL_ENTER,
                      g->comms[rank]->failure.site);
        }
    }
    free(want);
}

int main(void) {
    static const int worlds[] = {2, 3, 4, 5, 6, 7, 8, 12};
    group g;
    watchdog(110);
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++) {
        if (HARNESS_SANITIZED && worlds[i] > 5) continue;
        group_open(&g, worlds[i], 0);
        run_threads(worlds[i], results, &g);
        group_close(&g);
    }
    for (int world = 2; world <= 4; world++) {
        group_open(&g, world, 0);
        run_threads(world, replays, &g);
        group_close(&g);
        for (int w = 0; w < WRONG_RULES; w++) {
            wrong_job job = {.wrong = (wrong_rule)w};
            group_open(&job.g, world, 0);
            run_threads(world, wrong, &job);
            group_close(&job.g);
        }
        for (int k = 0; k < 6; k++) {
            missing_job job = {.algorithm = k % 2 ? ONEHOP_2SHOT_PULL : ONEHOP_1SHOT_PULL,
                               .enters = k / 2 == 1,
                               .late = k / 2 == 2};
            group_open(&job.g, world, k / 2 == 2 ? 0 : 300);
            run_threads(world, missing, &job);
            group_close(&job.g);
        }
    }
    return 0;
}
