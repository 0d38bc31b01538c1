/* Property: one thread can drive the contexts of all ranks on host streams. Captures and replays
 * are right, on several streams too; captures that differ and replays that overlap are refused;
 * onehop_would_use and the counters say what runs. A group of one rank does the same. */
/* labels: quick */
#include "fault_kit.h"

#define MAX 4

typedef struct team {
    int world_size;
    onehop_context *contexts[MAX];
    onehop_stream streams[2][MAX];
    kit_buffers *buffers[MAX];
} team;

static void team_open(team *t, int world_size, uint32_t timeout_ms) {
    onehop_config config = kit_config(timeout_ms);
    t->world_size = world_size;
    CHECK_OK(onehop_create_all(&config, world_size, NULL, t->contexts));
    for (int r = 0; r < world_size; r++) {
        for (int i = 0; i < 2; i++) CHECK_OK(onehop_host_stream_create(&t->streams[i][r]));
        t->buffers[r] = kit_buffers_make();
        CHECK_INT(r, onehop_rank(t->contexts[r]));
        CHECK_INT(world_size, onehop_world_size(t->contexts[r]));
        CHECK_INT(ONEHOP_DEVICE_HOST, onehop_get_device(t->contexts[r]).kind);
    }
}

static void team_close(team *t) {
    for (int r = 0; r < t->world_size; r++) {
        onehop_destroy(t->contexts[r]);
        for (int i = 0; i < 2; i++) onehop_host_stream_destroy(t->streams[i][r]);
        free(t->buffers[r]);
    }
}

static void team_call(team *t, const kit_way *way, unsigned call, int stream) {
    for (int r = 0; r < t->world_size; r++) {
        kit_fill(t->buffers[r]->in, way->count, r, call);
        memset(t->buffers[r]->out, 0xEE, way->count * sizeof(float));
    }
    for (int r = 0; r < t->world_size; r++)
        CHECK_OK(kit_run(t->contexts[r], way, t->buffers[r]->in, t->buffers[r]->out,
                         t->streams[stream][r]));
}

static void team_wait(team *t, int stream) {
    for (int r = 0; r < t->world_size; r++)
        CHECK_OK(onehop_synchronize(t->contexts[r], t->streams[stream][r]));
}

static void team_check(const team *t, const kit_way *way, unsigned call) {
    for (int r = 0; r < t->world_size; r++)
        kit_check(t->buffers[r]->out, way->count, t->world_size, call);
}

static void eager(team *t) {
    for (unsigned i = 0; i < 9; i++) {
        team_call(t, &kit_ways[i % KIT_WAYS], i, 0);
        team_wait(t, 0);
        team_check(t, &kit_ways[i % KIT_WAYS], i);
    }
}

/* ---- capture --------------------------------------------------------------------------------- */

/* Captures a chain: sum of the input into out, sum of out in place. So a replay depends on
 * order. */
static void capture_chain(team *t, const kit_way *way, onehop_host_graph **graphs) {
    CHECK_OK(onehop_capture_begin_all(t->contexts, t->world_size));
    for (int r = 0; r < t->world_size; r++) {
        float *in = t->buffers[r]->in, *out = t->buffers[r]->out;
        CHECK_OK(onehop_host_stream_capture_begin(t->streams[0][r]));
        CHECK_OK(kit_run(t->contexts[r], way, in, out, t->streams[0][r]));
        CHECK_OK(kit_run(t->contexts[r], way, out, out, t->streams[0][r]));
        CHECK_OK(onehop_host_stream_capture_end(t->streams[0][r], &graphs[r]));
    }
    CHECK_OK(onehop_capture_end_all(t->contexts, t->world_size));
}

static void replay(team *t, const kit_way *way) {
    onehop_host_graph *graphs[MAX];
    onehop_stats before, after;
    CHECK_OK(onehop_get_stats(t->contexts[0], &before));
    capture_chain(t, way, graphs);
    CHECK_OK(onehop_get_stats(t->contexts[0], &after));
    CHECK_INT(before.calls + 2, after.calls); /* captured ones count, once */
    for (unsigned i = 0; i < (HARNESS_SANITIZED ? 20u : 100u); i++) {
        const int stream =
            (int)(i / 7 % 2); /* a replay may go to any stream, when the one before is done */
        for (int r = 0; r < t->world_size; r++) {
            kit_fill(t->buffers[r]->in, way->count, r, i);
            memset(t->buffers[r]->out, 0xEE, way->count * sizeof(float));
        }
        for (int r = 0; r < t->world_size; r++)
            CHECK_OK(onehop_host_graph_launch(graphs[r], t->streams[stream][r]));
        team_wait(t, stream);
        for (int r = 0; r < t->world_size; r++) /* every rank's out was the sum: W times that */
            for (size_t k = 0; k < way->count; k++) t->buffers[r]->out[k] /= (float)t->world_size;
        team_check(t, way, i);
        if (i % 10 == 3) { /* eager calls between */
            team_call(t, &kit_ways[(i / 10) % KIT_WAYS], i, stream);
            team_wait(t, stream);
            team_check(t, &kit_ways[(i / 10) % KIT_WAYS], i);
        }
    }
    CHECK_OK(onehop_get_stats(t->contexts[0], &after));
    for (int r = 0; r < t->world_size; r++) onehop_host_graph_destroy(graphs[r]);
}

typedef enum difference {
    COUNT,
    TYPE,
    ALGORITHM,
    GRID,
    IN_PLACE,
    ONE_MORE,
    DIFFERENCES
} difference;

/* Two calls; the second differs on the last rank. */
static void capture_two(team *t, int r, difference what, onehop_host_graph **graph) {
    const bool odd = r == t->world_size - 1;
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    float *in = t->buffers[r]->in, *out = t->buffers[r]->out;
    onehop_stream s = t->streams[0][r];
    if (what == ALGORITHM && odd) call.algorithm = ONEHOP_1SHOT_PUSH;
    if (what == GRID) {
        call.algorithm = ONEHOP_1SHOT_PUSH;
        call.blocks = odd ? 2 : 3;
    }
    CHECK_OK(onehop_host_stream_capture_begin(s));
    CHECK_OK(onehop_all_reduce(t->contexts[r], in, out, 64, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, s));
    CHECK_OK(onehop_all_reduce(
        t->contexts[r], in, what == IN_PLACE && odd ? in : out, what == COUNT && odd ? 65 : 64,
        what == TYPE && odd ? ONEHOP_FLOAT16 : ONEHOP_BFLOAT16, ONEHOP_SUM, &call, s));
    if (what == ONE_MORE && odd)
        CHECK_OK(
            onehop_all_reduce(t->contexts[r], in, out, 64, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, s));
    CHECK_OK(onehop_host_stream_capture_end(s, graph));
}

static void expect_words(difference what, int last) {
    static const char *const words[DIFFERENCES] = {"captured call 1 is 65 x bfloat16",
                                                   "captured call 1 is 64 x float16",
                                                   "captured call 1 is 64 x bfloat16 by 1shot_push",
                                                   "on 2x1 threads",
                                                   "in place on rank",
                                                   "captured 3 calls"};
    char rank[16];
    snprintf(rank, sizeof rank, "rank %d", last);
    CHECK_CONTAINS(words[what], onehop_last_error());
    CHECK_CONTAINS(rank, onehop_last_error());
    CHECK_CONTAINS("rank 0", onehop_last_error());
}

static void mismatched_captures(team *t) {
    for (int what = 0; what < DIFFERENCES; what++) {
        onehop_host_graph *graphs[MAX];
        CHECK_OK(onehop_capture_begin_all(t->contexts, t->world_size));
        for (int r = 0; r < t->world_size; r++) capture_two(t, r, (difference)what, &graphs[r]);
        CHECK_RESULT(ONEHOP_ERR_MISMATCH, onehop_capture_end_all(t->contexts, t->world_size));
        expect_words((difference)what, t->world_size - 1);
        for (int r = 0; r < t->world_size; r++)
            onehop_host_graph_destroy(graphs[r]); /* never run */
    }
    eager(t); /* nothing has run, so nothing is broken */
}

/* The same through a group, each rank a thread. */
static void capture_in_threads(int rank, int world_size, void *argument) {
    onehop_group **groups = argument;
    team t;
    memset(&t, 0, sizeof t);
    t.world_size = world_size;
    t.contexts[rank] = kit_open_on(groups[rank], KIT_PATIENCE_MS);
    t.buffers[rank] = kit_buffers_make();
    kit_buffers *m = t.buffers[rank];
    onehop_host_graph *graph;
    CHECK_OK(onehop_host_stream_create(&t.streams[0][rank]));
    for (int what = 0; what < DIFFERENCES; what++) {
        CHECK_OK(onehop_capture_begin(t.contexts[rank]));
        capture_two(&t, rank, (difference)what, &graph);
        CHECK_RESULT(ONEHOP_ERR_MISMATCH, onehop_capture_end(t.contexts[rank]));
        expect_words((difference)what, world_size - 1);
        onehop_host_graph_destroy(graph);
    }
    CHECK_OK(onehop_capture_begin(t.contexts[rank]));
    CHECK_OK(
        kit_call(t.contexts[rank], &kit_ways[0], m, 1)); /* not captured: runs, takes no part */
    CHECK_OK(onehop_host_stream_capture_begin(t.streams[0][rank]));
    CHECK_OK(kit_run(t.contexts[rank], &kit_ways[1], m->in, m->out, t.streams[0][rank]));
    CHECK_OK(onehop_host_stream_capture_end(t.streams[0][rank], &graph));
    CHECK_OK(onehop_capture_end(t.contexts[rank]));
    for (unsigned i = 0; i < 20; i++) {
        kit_fill(m->in, kit_ways[1].count, rank, i);
        CHECK_OK(onehop_host_graph_launch(graph, t.streams[0][rank]));
        CHECK_OK(onehop_synchronize(t.contexts[rank], t.streams[0][rank]));
        kit_check(m->out, kit_ways[1].count, world_size, i);
    }
    onehop_host_graph_destroy(graph);
    onehop_destroy(t.contexts[rank]);
    onehop_host_stream_destroy(t.streams[0][rank]);
    free(m);
}

/* ---- streams --------------------------------------------------------------------------------- */

/* Each call sums the result of the one before in place, on alternating streams, nobody waiting
 * between. */
static void two_streams(team *t) {
    enum {
        CALLS = 24,
        COUNT_OF_CALL = 2000
    };
    for (int round = 0; round < (HARNESS_SANITIZED ? 3 : 20); round++) {
        uint64_t random = (uint64_t)round;
        float want = 1;
        for (int r = 0; r < t->world_size; r++)
            for (size_t i = 0; i < COUNT_OF_CALL; i++) t->buffers[r]->in[i] = 1;
        for (int call = 0; call < CALLS / 2; call++) {
            for (int r = 0; r < t->world_size; r++) {
                const int stream = (int)(random_next(&random) % 2); /* each rank its own choice */
                CHECK_OK(onehop_all_reduce(t->contexts[r], t->buffers[r]->in, t->buffers[r]->in,
                                           COUNT_OF_CALL, ONEHOP_FLOAT32, ONEHOP_SUM, NULL,
                                           t->streams[stream][r]));
            }
            want *= (float)t->world_size;
        }
        for (int i = 0; i < 2; i++) team_wait(t, i);
        for (int r = 0; r < t->world_size; r++)
            for (size_t i = 0; i < COUNT_OF_CALL; i++)
                if (t->buffers[r]->in[i] != want)
                    FAIL("round %d: expected %g, found %g", round, (double)want,
                         (double)t->buffers[r]->in[i]);
    }
    for (int r = 0; r < t->world_size; r++) CHECK_OK(onehop_status(t->contexts[r], NULL));
}

/* Two graphs of one communicator at once. Rank 0's first one waits for rank 1, so that its second
 * must find it running: an error on all ranks, soon, and no sums. */
static void overlapping_replays(const kit_way *first, const kit_way *second) {
    team t;
    onehop_host_graph *graphs[2][2];
    kit_buffers *more[2] = {kit_buffers_make(), kit_buffers_make()};
    onehop_failure failure;
    team_open(&t, 2, KIT_PATIENCE_MS);
    CHECK_OK(onehop_capture_begin_all(t.contexts, 2));
    for (int r = 0; r < 2; r++)
        for (int g = 0; g < 2; g++) {
            kit_buffers *m = g ? more[r] : t.buffers[r];
            memset(m->in, 0, sizeof m->in);
            CHECK_OK(onehop_host_stream_capture_begin(t.streams[g][r]));
            CHECK_OK(kit_run(t.contexts[r], g ? second : first, m->in, m->out, t.streams[g][r]));
            CHECK_OK(onehop_host_stream_capture_end(t.streams[g][r], &graphs[g][r]));
        }
    CHECK_OK(onehop_capture_end_all(t.contexts, 2));
    const double begun = seconds_now();
    for (int g = 0; g < 2; g++) CHECK_OK(onehop_host_graph_launch(graphs[g][0], t.streams[g][0]));
    while (!onehop_status(t.contexts[0], NULL)) {
        if (seconds_now() - begun > 10) FAIL("%s, %s: no error", first->name, second->name);
        sleep_ms(1);
    }
    for (int g = 0; g < 2; g++) CHECK_OK(onehop_host_graph_launch(graphs[g][1], t.streams[g][1]));
    for (int r = 0; r < 2; r++) {
        for (int g = 0; g < 2; g++) { /* rank 1's first may have all it needs */
            const onehop_result result = onehop_synchronize(t.contexts[r], t.streams[g][r]);
            CHECK(result == ONEHOP_ERR_CALLS_OVERLAP || (r == 1 && !result));
        }
        CHECK_RESULT(ONEHOP_ERR_CALLS_OVERLAP, onehop_status(t.contexts[r], &failure));
        CHECK_INT(-1, failure.peer);
    }
    CHECK(seconds_now() - begun < 10);
    for (int r = 0; r < 2; r++)
        for (int g = 0; g < 2; g++) onehop_host_graph_destroy(graphs[g][r]);
    team_close(&t);
    for (int r = 0; r < 2; r++) free(more[r]);
}

/* A thread per rank that goes between two streams and no stream. */
static void streams_and_none(int rank, int world_size, void *argument) {
    onehop_group **groups = argument;
    onehop_context *ctx = kit_open_on(groups[rank], KIT_PATIENCE_MS);
    kit_buffers *m = kit_buffers_make();
    onehop_stream streams[3] = {NULL, NULL, NULL};
    for (int i = 0; i < 2; i++) CHECK_OK(onehop_host_stream_create(&streams[i]));
    float want = 1;
    for (size_t i = 0; i < 500; i++) m->in[i] = 1;
    for (int call = 0; call < 18; call++) {
        CHECK_OK(onehop_all_reduce(ctx, m->in, m->in, 500, ONEHOP_FLOAT32, ONEHOP_SUM, NULL,
                                   streams[(call + rank) % 3]));
        want *= (float)world_size;
    }
    for (int i = 0; i < 2; i++) CHECK_OK(onehop_synchronize(ctx, streams[i]));
    for (size_t i = 0; i < 500; i++) CHECK(m->in[i] == want);
    CHECK_OK(onehop_group_barrier(groups[rank]));
    onehop_destroy(ctx);
    for (int i = 0; i < 2; i++) onehop_host_stream_destroy(streams[i]);
    free(m);
}

/* ---- what a call will use -------------------------------------------------------------------- */

static void check_choice(team *t, size_t count, onehop_dtype dtype, bool in_place) {
    onehop_choice choice;
    onehop_stats before, after;
    CHECK_OK(would_use(t->contexts[0], count * onehop_dtype_bytes(dtype), dtype, ONEHOP_SUM,
                       ONEHOP_MODE_EAGER, in_place, &choice));
    CHECK_OK(onehop_get_stats(t->contexts[0], &before));
    for (int r = 0; r < t->world_size; r++) {
        void *in = t->buffers[r]->in, *out = in_place ? in : t->buffers[r]->out;
        CHECK_OK(onehop_all_reduce(t->contexts[r], in, out, count, dtype, ONEHOP_SUM, NULL,
                                   t->streams[0][r]));
    }
    team_wait(t, 0);
    CHECK_OK(onehop_get_stats(t->contexts[0], &after));
    CHECK_INT(before.calls + 1, after.calls);
    CHECK_INT(before.bytes + count * onehop_dtype_bytes(dtype), after.bytes);
    for (int a = 0; a < 16; a++) {
        if (after.calls_by[a] == before.calls_by[a] + (a == (int)choice.algorithm)) continue;
        FAIL("%zu x %s, W=%d: %s was promised, %s counted", count, onehop_dtype_name(dtype),
             t->world_size, onehop_algorithm_name(choice.algorithm),
             onehop_algorithm_name((onehop_algorithm)a));
    }
    CHECK(choice.chunks >= 1 && choice.blocks >= 1 && choice.threads >= 1);
}

static void choices(team *t) {
    static const size_t limits[] = {64, 2048, 4096, 8192, 16384, 32768, 65536, 131072};
    for (int r = 0; r < t->world_size; r++) memset(t->buffers[r]->in, 0, sizeof t->buffers[r]->in);
    for (int d = ONEHOP_FLOAT32; d <= ONEHOP_BFLOAT16; d++)
        for (size_t i = 0; i < sizeof limits / sizeof *limits; i++)
            for (int step = -1; step <= 1; step++)
                check_choice(t, limits[i] / onehop_dtype_bytes((onehop_dtype)d) + (size_t)step,
                             (onehop_dtype)d, step == 0);
    onehop_choice small, large;
    CHECK_OK(
        would_use(t->contexts[0], 2048, ONEHOP_FLOAT32, ONEHOP_SUM, ONEHOP_MODE_GRAPH, 0, &small));
    CHECK_OK(
        would_use(t->contexts[0], 65540, ONEHOP_FLOAT32, ONEHOP_SUM, ONEHOP_MODE_GRAPH, 0, &large));
    CHECK_INT(ONEHOP_HOST_1SHOT, small.algorithm);
    CHECK_INT(1, small.chunks);
    CHECK_INT(t->world_size == 2 ? ONEHOP_HOST_1SHOT : ONEHOP_HOST_2SHOT, large.algorithm);
    /* Of half a box, 16 KiB, or as many shards of that as there are ranks: 32 KiB and less. */
    CHECK_INT(t->world_size == 2 ? 5 : 3, large.chunks);
}

/* ---- a group of one rank --------------------------------------------------------------------- */

static void alone(void) {
    static const uint32_t odd_bits[8] = {0xFFFFFFFF, 0x80000000, 0x7FC12345, 0x00000001,
                                         0xFF800001, 0,          0x7F800000, 0x00400000};
    onehop_config config = kit_config(0);
    onehop_context *ctx;
    onehop_stats stats;
    onehop_choice choice;
    onehop_stream stream;
    onehop_host_graph *graph;
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    uint32_t out[8];
    const int fds = count_fds();
    config.world_size = 1;
    CHECK_OK(onehop_create(&config, &ctx));
    CHECK_INT(fds, count_fds());
    CHECK_OK(onehop_host_stream_create(&stream));
    CHECK_OK(onehop_all_reduce(ctx, odd_bits, out, 8, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, NULL));
    CHECK_BYTES(odd_bits, out, sizeof out);
    memset(out, 0, sizeof out);
    CHECK_OK(onehop_all_reduce(ctx, odd_bits, out, 16, ONEHOP_BFLOAT16, ONEHOP_SUM, NULL, stream));
    CHECK_OK(onehop_synchronize(ctx, stream));
    CHECK_BYTES(odd_bits, out, sizeof out);
    CHECK_OK(onehop_all_reduce(ctx, out, out, 16, ONEHOP_FLOAT16, ONEHOP_SUM, NULL,
                               stream)); /* in place: nothing to do */
    CHECK_OK(onehop_capture_begin(ctx));
    CHECK_OK(onehop_host_stream_capture_begin(stream));
    memset(out, 0, sizeof out);
    CHECK_OK(onehop_all_reduce(ctx, odd_bits, out, 8, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, stream));
    CHECK_OK(onehop_host_stream_capture_end(stream, &graph));
    CHECK_OK(onehop_capture_end(ctx));
    CHECK_INT(0, out[0]);
    CHECK_OK(onehop_host_graph_launch(graph, stream));
    CHECK_OK(onehop_synchronize(ctx, stream));
    CHECK_BYTES(odd_bits, out, sizeof out);
    onehop_host_graph_destroy(graph);
    CHECK_OK(would_use(ctx, 32, ONEHOP_FLOAT32, ONEHOP_SUM, ONEHOP_MODE_EAGER, 0, &choice));
    CHECK_INT(ONEHOP_LOCAL_COPY, choice.algorithm);
    CHECK_OK(onehop_get_stats(ctx, &stats));
    CHECK_INT(4, stats.calls);
    CHECK_INT(4, stats.calls_by[ONEHOP_LOCAL_COPY]);
    CHECK_INT(128, stats.bytes);
    CHECK_INT(0, stats.symmetric_bytes + stats.local_bytes + stats.host_bytes);
    call.algorithm = ONEHOP_1SHOT_PUSH;
    CHECK_RESULT(ONEHOP_ERR_ALGORITHM,
                 onehop_all_reduce(ctx, odd_bits, out, 8, ONEHOP_FLOAT32, ONEHOP_SUM, &call, NULL));
    CHECK_CONTAINS("one rank copies", onehop_last_error());
    CHECK_RESULT(ONEHOP_ERR_NULL,
                 onehop_all_reduce(ctx, NULL, out, 8, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, NULL));
    CHECK_OK(onehop_status(ctx, NULL));
    CHECK_OK(onehop_set_timeout(ctx, 5));
    CHECK_OK(onehop_synchronize(ctx, NULL));
    onehop_destroy(ctx);
    config.world_size = 0;
    CHECK_OK(onehop_create_all(&config, 1, NULL, &ctx));
    CHECK_OK(onehop_all_reduce(ctx, odd_bits, out, 8, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, NULL));
    CHECK_OK(onehop_capture_begin_all(&ctx, 1));
    CHECK_OK(onehop_capture_end_all(&ctx, 1));
    onehop_destroy(ctx);
    onehop_host_stream_destroy(stream);
}

/* One thread drives all ranks and forgets one: the deadline, and the destroy does not hang. */
static void forgotten_rank(void) {
    team t;
    team_open(&t, 3, 300);
    eager(&t);
    for (int r = 0; r < 2; r++)
        CHECK_OK(kit_run(t.contexts[r], &kit_ways[0], t.buffers[r]->in, t.buffers[r]->out,
                         t.streams[0][r]));
    onehop_failure failure;
    for (int r = 0; r < 2; r++) {
        CHECK_RESULT(ONEHOP_ERR_TIMEOUT, onehop_synchronize(t.contexts[r], t.streams[0][r]));
        CHECK_RESULT(ONEHOP_ERR_TIMEOUT, onehop_status(t.contexts[r], &failure));
        CHECK_INT(2, failure.peer);
    }
    CHECK_RESULT(ONEHOP_ERR_TIMEOUT, onehop_status(t.contexts[2], &failure));
    CHECK_INT(2, failure.peer);
    team_close(&t);
    /* Destroyed while its calls wait: it ends at the deadline. */
    team_open(&t, 2, 300);
    CHECK_OK(
        kit_run(t.contexts[0], &kit_ways[0], t.buffers[0]->in, t.buffers[0]->out, t.streams[0][0]));
    const double begun = seconds_now();
    team_close(&t);
    CHECK(seconds_now() - begun < 1 + kit_slack());
}

int main(void) {
    static const int world_sizes[] = {2, 4};
    team t;
    onehop_group *groups[3];
    watchdog(110);
    alone();
    for (int i = 0; i < 2; i++) {
        team_open(&t, world_sizes[i], KIT_PATIENCE_MS);
        eager(&t);
        two_streams(&t);
        for (int way = 0; way < KIT_WAYS; way++) replay(&t, &kit_ways[way]);
        mismatched_captures(&t);
        choices(&t);
        team_close(&t);
    }
    forgotten_rank();
    for (int way = 0; way < KIT_WAYS; way++) {
        overlapping_replays(&kit_ways[way], &kit_ways[way]);
        overlapping_replays(&kit_ways[way], &kit_ways[(way + 1) % KIT_WAYS]);
    }
    CHECK_OK(onehop_group_open_local(3, groups));
    run_threads(3, capture_in_threads, groups);
    run_threads(3, streams_and_none, groups);
    for (int r = 0; r < 3; r++) onehop_group_close(groups[r]);
    return 0;
}
