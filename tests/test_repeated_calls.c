/* Property: a call runs by the plan of its own question, whatever call came before it. A
 * communicator keeps the plan of its last call. Here neighbours differ from each other in one thing
 * alone: the bytes, the type, the collective, in place or not, captured or eager. */
/* labels: quick */
#include "harness.h"
#include "rank_contexts.h"

enum {
    W = 3,
    COUNT = 256, /* floats */
};

/* Each mode and each size has an algorithm of its own. */
static const char table[] = "onehop-tuning 1\ndevice host\n"
                            "3 eager 1K      1shot_push   -         5 1\n"
                            "3 eager any     2shot_push   -         5 1\n"
                            "3 graph 1K      1shot_pull   graph     5 1\n"
                            "3 graph any     2shot_pull   graph     5 1\n"
                            "3 any   any     host_scatter -         1 1\n"
                            "3 any   any     host_gather  -         1 1\n";

typedef struct kind {
    onehop_collective collective;
    onehop_mode mode;
    onehop_dtype dtype;
    size_t count; /* of one rank's part */
    bool in_place;
} kind;

static const kind kinds[] = {
    {ONEHOP_ALL_REDUCE, ONEHOP_MODE_EAGER, ONEHOP_FLOAT32, COUNT, false},
    {ONEHOP_REDUCE_SCATTER, ONEHOP_MODE_EAGER, ONEHOP_FLOAT32, COUNT, false},
    {ONEHOP_ALL_GATHER, ONEHOP_MODE_EAGER, ONEHOP_FLOAT32, COUNT, false},
    {ONEHOP_ALL_REDUCE, ONEHOP_MODE_GRAPH, ONEHOP_FLOAT32, COUNT, false},
    {ONEHOP_ALL_REDUCE, ONEHOP_MODE_GRAPH, ONEHOP_FLOAT32, COUNT, true},
    {ONEHOP_ALL_REDUCE, ONEHOP_MODE_EAGER, ONEHOP_FLOAT32, COUNT, true},
    {ONEHOP_ALL_REDUCE, ONEHOP_MODE_EAGER, ONEHOP_FLOAT32, COUNT + 1, false},
    {ONEHOP_ALL_REDUCE, ONEHOP_MODE_EAGER, ONEHOP_BFLOAT16, 2 * COUNT, false},
};

enum {
    KINDS = sizeof kinds / sizeof *kinds
};

typedef struct buffers {
    _Alignas(64) float in[W * (COUNT + 1)];
    _Alignas(64) float out[W * (COUNT + 1)];
} buffers;

static float small(int rank, size_t i) {
    return (float)((i * 7 + (size_t)rank * 5) % 11) + 1;
}

static uint16_t bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)(bits >> 16); /* exact: small integers */
}

static void fill(const kind *k, float *in, int rank) {
    const size_t n = k->collective == ONEHOP_REDUCE_SCATTER ? W * k->count : k->count;
    for (size_t i = 0; i < n; i++) {
        if (k->dtype == ONEHOP_BFLOAT16)
            ((uint16_t *)in)[i] = bfloat16(small(rank, i));
        else
            in[i] = small(rank, i);
    }
}

static float sum_at(size_t i) {
    float sum = 0;
    for (int r = 0; r < W; r++) sum += small(r, i);
    return sum;
}

static void check(const kind *k, const float *out, int rank) {
    const size_t n = k->collective == ONEHOP_ALL_GATHER ? W * k->count : k->count;
    const size_t first = k->collective == ONEHOP_REDUCE_SCATTER ? (size_t)rank * k->count : 0;
    for (size_t i = 0; i < n; i++) {
        if (k->dtype == ONEHOP_BFLOAT16)
            CHECK_INT(bfloat16(sum_at(i)), ((const uint16_t *)out)[i]);
        else if (k->collective == ONEHOP_ALL_GATHER)
            CHECK(out[i] == small((int)(i / k->count), i % k->count));
        else
            CHECK(out[i] == sum_at(first + i));
    }
}

static void call(onehop_context *ctx, const kind *k, const void *in, void *out,
                 onehop_stream stream) {
    if (k->collective == ONEHOP_REDUCE_SCATTER)
        CHECK_OK(onehop_reduce_scatter(ctx, in, out, k->count, k->dtype, ONEHOP_SUM, NULL, stream));
    else if (k->collective == ONEHOP_ALL_GATHER)
        CHECK_OK(onehop_all_gather(ctx, in, out, k->count * sizeof(float), NULL, stream));
    else
        CHECK_OK(onehop_all_reduce(ctx, in, out, k->count, k->dtype, ONEHOP_SUM, NULL, stream));
}

static onehop_algorithm promised(onehop_context *ctx, const kind *k) {
    onehop_query query = ONEHOP_CONFIG_INIT(onehop_query);
    onehop_choice choice;
    query.collective = k->collective;
    query.mode = k->mode;
    query.dtype = k->dtype;
    query.in_place = k->in_place;
    query.bytes = k->count * onehop_dtype_bytes(k->dtype);
    CHECK_OK(onehop_would_use(ctx, &query, &choice));
    return choice.algorithm;
}

static void run_kind(onehop_context *ctx, const kind *k, buffers *m, onehop_stream stream) {
    const onehop_algorithm want = promised(ctx, k);
    float *out = k->in_place ? m->in : m->out;
    onehop_stats before, after;
    onehop_host_graph *graph = NULL;
    CHECK_OK(onehop_get_stats(ctx, &before));
    fill(k, m->in, onehop_rank(ctx));
    if (k->mode == ONEHOP_MODE_GRAPH) {
        CHECK_OK(onehop_capture_begin(ctx));
        CHECK_OK(onehop_host_stream_capture_begin(stream));
    }
    call(ctx, k, m->in, out, stream);
    if (k->mode == ONEHOP_MODE_GRAPH) {
        CHECK_OK(onehop_host_stream_capture_end(stream, &graph));
        CHECK_OK(onehop_capture_end(ctx));
        CHECK_OK(onehop_host_graph_launch(graph, stream));
    }
    CHECK_OK(onehop_synchronize(ctx, stream));
    check(k, out, onehop_rank(ctx));
    CHECK_OK(onehop_get_stats(ctx, &after));
    CHECK_INT(before.calls_by[want] + 1, after.calls_by[want]);
    ranks_barrier(ctx); /* peers may read what this rank captured */
    if (graph) onehop_host_graph_destroy(graph);
}

/* Every kind after every kind, itself too. */
static void all_pairs(onehop_context *ctx, int rank, int world_size, void *argument) {
    buffers *m = aligned_alloc(64, sizeof *m);
    onehop_stream stream;
    CHECK_OK(onehop_host_stream_create(&stream));
    CHECK(m && rank >= 0 && world_size == W && !argument);
    for (int a = 0; a < KINDS; a++)
        for (int b = 0; b < KINDS; b++) {
            run_kind(ctx, &kinds[a], m, stream);
            run_kind(ctx, &kinds[b], m, stream);
        }
    onehop_host_stream_destroy(stream);
    free(m);
}

int main(void) {
    char path[] = "/tmp/onehop-repeated-XXXXXX";
    const int file = mkstemp(path);
    CHECK(file >= 0);
    CHECK(write(file, table, sizeof table - 1) == (ssize_t)(sizeof table - 1));
    close(file);
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    config.max_registrations = 4 * KINDS * KINDS;
    setenv("ONEHOP_TUNING", path, 1);
    ranks_run(RANKS_AS_THREADS, W, &config, all_pairs, NULL);
    unlink(path);
    return 0;
}
