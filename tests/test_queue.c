/* Property: calls that wait in a queue are right, on host streams, captured and replayed, many
 * before one synchronisation.
 *
 * A replay must not freeze the sequence number, nor the data: a captured call is launched a
 * thousand times with new input, with eager calls in between. Buffers are taken away right after a
 * call while some rank is slow. Twenty graphs captured at different times are replayed in any
 * order, on either of two streams. And 64 queued calls of 8 MiB, whose payload tells rank and
 * number, must not mix. */
/* labels: timeout=240 */
#include "harness.h"
#include "rank_contexts.h"
#include "reference.h"

static const onehop_algorithm algorithms[] = {
    ONEHOP_ALGORITHM_AUTO, ONEHOP_HOST_1SHOT, ONEHOP_HOST_2SHOT, ONEHOP_1SHOT_PUSH,
    ONEHOP_1SHOT_PULL,     ONEHOP_2SHOT_PULL, ONEHOP_2SHOT_PUSH};
#define ALGORITHMS (int)(sizeof algorithms / sizeof *algorithms)

/* ---- replay ---------------------------------------------------------------------------------- */
typedef struct captured {
    onehop_host_graph *graph;
    uint16_t *in, *out;
    size_t count;
} captured;

/* A call in a graph of its own, over memory that processes can share: pull calls read it as it
 * lies. */
static void capture(onehop_context *context, onehop_stream stream, captured *c,
                    onehop_algorithm algorithm, size_t count) {
    const onehop_device device = {ONEHOP_DEVICE_HOST, 0};
    c->count = count;
    CHECK_OK(onehop_mem_alloc(device, (2 * count + 8) * 2, (void **)&c->in));
    c->out = c->in + (count + 7) / 8 * 8;
    CHECK_OK(onehop_capture_begin(context));
    CHECK_OK(onehop_host_stream_capture_begin(stream));
    CHECK_OK(ranks_all_reduce(context, c->in, c->out, count, ONEHOP_BFLOAT16, algorithm, stream));
    CHECK_OK(onehop_host_stream_capture_end(stream, &c->graph));
    CHECK_OK(onehop_capture_end(context));
}

static void drop(captured *c) {
    onehop_host_graph_destroy(c->graph);
    onehop_mem_free(c->in);
}

/* All calls over source graph of the captures so far read the ranks' memory. */
static void expect_direct(const onehop_context *context, uint64_t calls) {
    onehop_stats stats;
    CHECK_OK(onehop_get_stats(context, &stats));
    CHECK_INT(calls, stats.registrations_direct);
    CHECK_INT(0, stats.registrations_staged);
}

/* Input and output become something else at once after each call, eager or replayed; nobody waits
 * for a peer, of which one is late. */
static void taken_away(onehop_context *context, int rank, int world, captured *c,
                       onehop_stream stream) {
    uint64_t random = 2;
    uint16_t *sum = calloc(20000, 2);
    CHECK(sum != NULL);
    for (unsigned i = 0; i < (HARNESS_SANITIZED ? 84u : 420u); i++) {
        captured *now = &c[i % ALGORITHMS];
        const int slow = (int)(random_next(&random) % (uint64_t)world);
        const useconds_t us = (useconds_t)(random_next(&random) % 300);
        if (now->count > 10000 && i % 5) continue;
        input_fill(now->in, INPUT_REAL, i, rank, 0, now->count, ONEHOP_BFLOAT16);
        memset(now->out, 0xA5, 2 * now->count);
        if (rank == slow) usleep(us);
        if (i / ALGORITHMS % 2) {
            CHECK_OK(ranks_all_reduce(context, now->in, now->out, now->count, ONEHOP_BFLOAT16,
                                      algorithms[i % ALGORITHMS], NULL));
        } else {
            CHECK_OK(onehop_host_graph_launch(now->graph, stream));
            CHECK_OK(onehop_host_stream_synchronize(stream));
        }
        memset(now->in, 0xEE, 2 * now->count);
        reference_of_inputs(sum, INPUT_REAL, i, world, 0, now->count, ONEHOP_BFLOAT16);
        expect_equal(sum, now->out, now->count, ONEHOP_BFLOAT16, "buffers taken away");
        memset(now->out, 0xDD, 2 * now->count);
    }
    free(sum);
}

static void replays(onehop_context *context, int rank, int world, void *argument) {
    static const size_t counts[] = {777, 1500, 20000, 1000, 1100, 1200, 1300};
    const int times = HARNESS_SANITIZED ? 120 : 1000;
    onehop_stream stream;
    captured c[ALGORITHMS];
    uint16_t *sum = calloc(20000, 2), *eager = calloc(2 * 600, 2);
    (void)argument;
    if (!sum || !eager) FAIL("no memory");
    CHECK_OK(onehop_host_stream_create(&stream));
    for (int a = 0; a < ALGORITHMS; a++) capture(context, stream, &c[a], algorithms[a], counts[a]);
    expect_direct(context, 2);
    for (int i = 0; i < times; i++) {
        /* The large one now and then. */
        captured *now = &c[i % 30 == 2 ? 2 : i % ALGORITHMS == 2 ? 1 : i % ALGORITHMS];
        char what[80];
        snprintf(what, sizeof what, "replay %d, rank %d", i, rank);
        input_fill(now->in, INPUT_REAL, (uint64_t)i, rank, 0, now->count, ONEHOP_BFLOAT16);
        memset(now->out, 0xA5, 2 * now->count);
        CHECK_OK(onehop_host_graph_launch(now->graph, stream));
        if (i % 3 == 0) { /* behind the replay, in its stream; every other one alone */
            input_fill(eager, INPUT_REAL, (uint64_t)i + 5000, rank, 0, 600, ONEHOP_BFLOAT16);
            if (i % 2) CHECK_OK(onehop_synchronize(context, stream));
            CHECK_OK(ranks_all_reduce(context, eager, eager + 600, 600, ONEHOP_BFLOAT16,
                                      algorithms[i / 3 % ALGORITHMS], stream));
        }
        CHECK_OK(onehop_synchronize(context, stream));
        reference_of_inputs(sum, INPUT_REAL, (uint64_t)i, world, 0, now->count, ONEHOP_BFLOAT16);
        expect_equal(sum, now->out, now->count, ONEHOP_BFLOAT16, what);
        if (i % 3) continue;
        reference_of_inputs(sum, INPUT_REAL, (uint64_t)i + 5000, world, 0, 600, ONEHOP_BFLOAT16);
        expect_equal(sum, eager + 600, 600, ONEHOP_BFLOAT16, "eager call after a replay");
    }
    taken_away(context, rank, world, c, stream);
    ranks_barrier(context);
    for (int a = 0; a < ALGORITHMS; a++) drop(&c[a]);
    onehop_host_stream_destroy(stream);
    free(sum);
    free(eager);
}

/* ---- many graphs ----------------------------------------------------------------------------- */
#define GRAPHS 20

static void replay_one(onehop_context *context, int rank, int world, const captured *c,
                       uint64_t seed, onehop_stream stream) {
    uint16_t sum[2048];
    input_fill(c->in, INPUT_REAL, seed, rank, 0, c->count, ONEHOP_BFLOAT16);
    memset(c->out, 0xA5, 2 * c->count);
    CHECK_OK(onehop_host_graph_launch(c->graph, stream));
    CHECK_OK(onehop_synchronize(context, stream));
    reference_of_inputs(sum, INPUT_REAL, seed, world, 0, c->count, ONEHOP_BFLOAT16);
    expect_equal(sum, c->out, c->count, ONEHOP_BFLOAT16, "one of many graphs");
}

/* Each captured after replays of those before; then in any order, each rank on a stream of its own
 * choice. */
static void shuffled(onehop_context *context, int rank, int world, void *argument) {
    captured c[GRAPHS];
    onehop_stream streams[2];
    uint64_t random = 25, own = (uint64_t)rank;
    (void)argument;
    for (int i = 0; i < 2; i++) CHECK_OK(onehop_host_stream_create(&streams[i]));
    for (int g = 0; g < GRAPHS; g++) {
        capture(context, streams[g % 2], &c[g], algorithms[(g + 4) % ALGORITHMS],
                1000 + 50 * (size_t)g);
        for (int i = 0; i < 3; i++)
            replay_one(context, rank, world, &c[random_next(&random) % (uint64_t)(g + 1)],
                       (uint64_t)(3 * g + i), streams[random_next(&own) % 2]);
    }
    expect_direct(context, 6); /* by 1shot_pull and 2shot_pull */
    for (uint64_t i = 0; i < (HARNESS_SANITIZED ? 60 : 300); i++)
        replay_one(context, rank, world, &c[random_next(&random) % GRAPHS], 100 + i,
                   streams[random_next(&own) % 2]);
    ranks_barrier(context);
    for (int g = 0; g < GRAPHS; g++) drop(&c[g]);
    for (int i = 0; i < 2; i++) onehop_host_stream_destroy(streams[i]);
}

/* ---- a long queue ---------------------------------------------------------------------------- */
#define CALLS 66
#define COUNT ((size_t)2 << 20) /* fp32: 8 MiB */
#define STRIDE                                                                                     \
    ((size_t)48                                                                                    \
     << 10) /* elements by which the output of a call lies behind that of the one before */
#define PATTERN 1024

/* Element j of call i on rank r: small integers, so that sums are exact; call and rank are told
 * apart by every run of elements. Inputs of all calls are windows of one array. */
static float payload(int rank, size_t j) {
    const uint64_t x = (j * 2654435761u) >> 7;
    return (float)((x + (uint64_t)rank * 977) % 8191);
}

static float payload_sum(int world, size_t j) {
    float sum = 0;
    for (int r = 0; r < world; r++) sum += payload(r, j);
    return sum;
}

/* Outputs overlap: of each call the first STRIDE elements stay, of the last one all. Whatever a
 * call mixes in from another one shows there, or in the calls that follow in place. */
static void long_queue(onehop_context *context, int rank, int world, void *argument) {
    const size_t in_count = COUNT + CALLS * PATTERN, out_count = COUNT + CALLS * STRIDE;
    onehop_stream stream;
    float *in = malloc(in_count * 4), *out = malloc(out_count * 4);
    (void)argument;
    if (!in || !out) FAIL("no memory");
    for (size_t j = 0; j < in_count; j++) in[j] = payload(rank, j);
    memset(out, 0xA5, out_count * 4);
    CHECK_OK(onehop_host_stream_create(&stream));
    for (size_t i = 0; i < CALLS; i++)
        CHECK_OK(onehop_all_reduce(context, in + i * PATTERN, out + i * STRIDE, COUNT,
                                   ONEHOP_FLOAT32, ONEHOP_SUM, NULL, stream));
    CHECK_OK(onehop_synchronize(context, stream));
    for (size_t i = 0; i < CALLS; i++) {
        const size_t stays = i + 1 < CALLS ? STRIDE : COUNT;
        for (size_t j = 0; j < stays; j++) {
            const float want = payload_sum(world, i * PATTERN + j), have = out[i * STRIDE + j];
            if (want != have)
                FAIL("rank %d of %d, queued call %zu, element %zu: expected %g, found %g", rank,
                     world, i, j, (double)want, (double)have);
        }
    }
    /* In place, each on the result of the one before: powers of W, exact; what is stale is off by a
     * power. */
    for (size_t j = 0; j < COUNT; j++) in[j] = payload(rank, j) * 0x1p-60f;
    for (int i = 0; i < 8; i++)
        CHECK_OK(
            onehop_all_reduce(context, in, in, COUNT, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, stream));
    CHECK_OK(onehop_synchronize(context, stream));
    float factor = 0x1p-60f;
    for (int i = 0; i < 7; i++) factor *= (float)world;
    for (size_t j = 0; j < COUNT; j++)
        if (in[j] != payload_sum(world, j) * factor)
            FAIL("rank %d of %d, in place, element %zu: expected %g, found %g", rank, world, j,
                 (double)(payload_sum(world, j) * factor), (double)in[j]);
    onehop_host_stream_destroy(stream);
    free(in);
    free(out);
}

int main(void) {
    watchdog(230);
    ranks_run(RANKS_AS_THREADS, 2, NULL, replays, NULL);
    ranks_run(RANKS_AS_THREADS, 4, NULL, replays, NULL);
    ranks_run(RANKS_AS_PROCESSES, 3, NULL, replays, NULL);
    ranks_run(RANKS_AS_PROCESSES, 2, NULL, shuffled, NULL);
    ranks_run(RANKS_AS_THREADS, 3, NULL, shuffled, NULL);
    for (int world = 2; world <= (HARNESS_SANITIZED ? 2 : 8); world *= 2)
        ranks_run(world == 4 ? RANKS_AS_PROCESSES : RANKS_AS_THREADS, world, NULL, long_queue,
                  NULL);
    return 0;
}
