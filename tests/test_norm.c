/* Property: onehop_all_reduce_norm on the host device gives the bits of norm_reference.h on all
 * ranks, by every algorithm; calls that differ between ranks fail on all, and bad arguments are
 * refused.
 *
 * 2 to 8 and 16 ranks, types, odd hidden sizes, row strides and alignments that differ from rank to
 * rank, in place, quantised, one piece and chunks; NaN, infinities, zeros; capture and replay. */
/* ThreadSanitizer sees the bodies in test_fused_lanes, in less time. */
/* labels: quick timeout=120 tsan-off */
#include "harness.h"
#include "norm_reference.h"
#include "rank_contexts.h"

#define MAX      32768 /* elements of a message */
#define ROOM     (4 * MAX)
#define MAX_ROWS 200

static const onehop_algorithm algorithms[] = {ONEHOP_ALGORITHM_AUTO, ONEHOP_1SHOT_PUSH,
                                              ONEHOP_2SHOT_PUSH};
#define ALGORITHMS (int)(sizeof algorithms / sizeof *algorithms)

static struct {
    unsigned char x[ONEHOP_MAX_RANKS][4 * MAX], residual[4 * MAX], weight[4 * MAX];
    unsigned char r[4 * MAX], y[4 * MAX];
    uint8_t quantised[MAX];
    float scales[MAX_ROWS];
    norm_data data;
    size_t compared;
} shared;

/* Buffers of one rank. */
typedef struct own {
    onehop_context *context;
    int rank, world;
    guarded x, residual_in, normed, residual_out, quantised, scales;
    uint64_t random;
} own;

typedef enum place {
    APART,
    RESIDUAL_IN_PLACE,
    RESIDUAL_IN_X,
    NORMED_IN_X,
    NORMED_IN_RESIDUAL,
    PLACES
} place;

/* Rows of a matrix with a stride. */
typedef struct laid {
    unsigned char *at;
    size_t stride, bytes; /* elements; of all rows */
} laid;

static laid lay(own *o, guarded *g, const void *rows, size_t size, bool spread) {
    const norm_data *d = &shared.data;
    laid l;
    l.stride = d->hidden + (spread ? random_next(&o->random) % 9 : 0);
    l.bytes = ((d->rows - 1) * l.stride + d->hidden) * size;
    l.at = guarded_place(g, l.bytes, spread ? random_next(&o->random) % (16 / size) * size : 0);
    for (size_t row = 0; rows && row < d->rows; row++)
        memcpy(l.at + row * l.stride * size, (const char *)rows + row * d->hidden * size,
               d->hidden * size);
    return l;
}

static void compare(const own *o, const laid *l, const void *rows, size_t size, const char *name,
                    const char *what) {
    const norm_data *d = &shared.data;
    char where[200];
    for (size_t row = 0; row < d->rows; row++) {
        const unsigned char *found = l->at + row * l->stride * size,
                            *expected = (const unsigned char *)rows + row * d->hidden * size;
        if (!memcmp(found, expected, d->hidden * size)) continue;
        snprintf(where, sizeof where, "rank %d of %d, %s, %s, row %zu", o->rank, o->world, what,
                 name, row);
        if (size == 1 || size == 4) {
            check_bytes(where, (int)row, expected, found, d->hidden * size);
        } else {
            expect_equal(expected, found, d->hidden, d->dtype, where);
        }
    }
}

/* One call with the data of `shared`, its strides, places and outputs at random. */
static void call_once(own *o, onehop_algorithm algorithm, place p, const char *what) {
    const norm_data *d = &shared.data;
    const size_t size = reference_element_bytes(d->dtype);
    const bool spread = random_next(&o->random) % 2;
    const bool quantised = random_next(&o->random) % 2,
               normed = !quantised || random_next(&o->random) % 2;
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    onehop_norm n = ONEHOP_CONFIG_INIT(onehop_norm);
    laid x = lay(o, &o->x, d->x[o->rank], size, spread);
    laid residual_in = lay(o, &o->residual_in, d->residual, size, spread);
    laid y = lay(o, &o->normed, NULL, size, spread),
         r = lay(o, &o->residual_out, NULL, size, spread);
    laid q = lay(o, &o->quantised, NULL, 1, spread);
    float *scales = guarded_place(&o->scales, d->rows * sizeof(float), 0);
    if (!d->residual && (p == RESIDUAL_IN_PLACE || p == NORMED_IN_RESIDUAL)) p = APART;
    if (p == RESIDUAL_IN_PLACE) r = residual_in;
    if (p == RESIDUAL_IN_X) r = x;
    if (p == NORMED_IN_X) y = x;
    if (p == NORMED_IN_RESIDUAL) y = residual_in;
    n.x = x.at;
    n.x_stride = x.stride;
    n.residual_in = d->residual ? residual_in.at : NULL;
    n.residual_in_stride = residual_in.stride;
    n.weight = shared.weight;
    n.normed = normed ? y.at : NULL;
    n.normed_stride = y.stride;
    n.residual_out = r.at;
    n.residual_out_stride = r.stride;
    n.quantised = quantised ? q.at : NULL;
    n.quantised_stride = q.stride;
    n.row_scales = quantised && !d->scale ? scales : NULL;
    n.rows = d->rows;
    n.hidden = d->hidden;
    n.dtype = d->dtype;
    n.flags = d->plus_one ? ONEHOP_NORM_WEIGHT_PLUS_ONE : 0;
    n.eps = d->eps;
    n.scale = d->scale;
    call.algorithm = algorithm;
    CHECK_OK(onehop_all_reduce_norm(o->context, &n, &call, NULL));
    compare(o, &r, shared.r, size, "residual_out", what);
    if (normed) compare(o, &y, shared.y, size, "normed", what);
    if (quantised) compare(o, &q, shared.quantised, 1, "quantised", what);
    if (n.row_scales) CHECK_BYTES(shared.scales, scales, d->rows * sizeof(float));
    guarded_check(&o->x, "x");
    guarded_check(&o->residual_in, "residual_in");
    guarded_check(&o->normed, "normed");
    guarded_check(&o->residual_out, "residual_out");
    guarded_check(&o->quantised, "quantised");
    guarded_check(&o->scales, "row_scales");
    if (o->rank == 0) shared.compared++;
}

/* Makes the data; rank 0 also what must come out. */
static void make(own *o, input_kind kind, uint64_t seed, onehop_dtype dtype, size_t rows,
                 size_t hidden, const char *what) {
    norm_data *d = &shared.data;
    ranks_barrier(o->context);
    if (o->rank == 0) {
        memset(d, 0, sizeof *d);
        d->dtype = dtype;
        d->rows = rows;
        d->hidden = hidden;
        d->world = o->world;
        for (int r = 0; r < o->world; r++) d->x[r] = shared.x[r];
        d->residual = seed % 4 ? shared.residual : NULL;
        d->weight = shared.weight;
        d->eps = seed % 2 ? 1e-5f : 1e-6f;
        d->plus_one = seed % 3 == 0;
        d->scale = seed % 5 < 2 ? 0.5f : 0;
        d->r = shared.r;
        d->y = shared.y;
        d->quantised = shared.quantised;
        d->scales = shared.scales;
        input_fill(shared.residual, kind, seed, 20, 0, rows * hidden, dtype);
        input_fill(shared.weight, kind == INPUT_MIXED ? INPUT_REAL : kind, seed, 21, 0, hidden,
                   dtype);
        if (seed % 7 == 3) memset(shared.residual, 0, 4 * rows * hidden);
    }
    input_fill(shared.x[o->rank], kind, seed, o->rank, 0, rows * hidden, dtype);
    if (seed % 7 == 3) memset(shared.x[o->rank], 0, 4 * rows * hidden);
    ranks_barrier(o->context);
    if (o->rank == 0) norm_reference(d, what);
    ranks_barrier(o->context);
}

static const size_t hiddens[] = {1, 5, 8, 31, 96, 129, 520, 1000, 2880, 4096, 5120, 7168, 8191};

/* Every hidden size in one type, which moves with the number of ranks. */
static void rank_main(onehop_context *context, int rank, int world, void *argument) {
    static const onehop_dtype dtypes[] = {ONEHOP_BFLOAT16, ONEHOP_FLOAT16, ONEHOP_FLOAT32};
    static const input_kind kinds[] = {INPUT_REAL, INPUT_MIXED, INPUT_SPECIAL};
    const size_t max_hidden = *(const size_t *)argument;
    own o = {context,
             rank,
             world,
             guarded_make(ROOM),
             guarded_make(ROOM),
             guarded_make(ROOM),
             guarded_make(ROOM),
             guarded_make(ROOM),
             guarded_make(ROOM),
             (uint64_t)rank + 1};
    uint64_t choice = (uint64_t)world;
    char what[120];
    for (size_t h = 0; h < sizeof hiddens / sizeof *hiddens; h++) {
        const onehop_dtype dtype = dtypes[(h + (size_t)world) % 3];
        const size_t max = MAX * 4 / 5 / hiddens[h] - 1, hidden = hiddens[h];
        const size_t rows = h % 4 == 3 ? 1 : 1 + random_next(&choice) % (max < 64 ? max : 64);
        const input_kind kind = kinds[random_next(&choice) % 3];
        if (hidden > max_hidden) continue;
        snprintf(what, sizeof what, "%zu x %zu %s", rows, hidden, onehop_dtype_name(dtype));
        make(&o, kind, random_next(&choice), dtype, rows, hidden, what);
        for (int a = 0; a < ALGORITHMS; a++)
            for (int p = 0; p < 2; p++)
                call_once(&o, algorithms[a], (place)(random_next(&choice) % PLACES), what);
    }
    guarded_free(&o.x);
    guarded_free(&o.residual_in);
    guarded_free(&o.normed);
    guarded_free(&o.residual_out);
    guarded_free(&o.quantised);
    guarded_free(&o.scales);
}

/* The longest rows. */
static void longest(onehop_context *context, int rank, int world, void *argument) {
    own o = {context,
             rank,
             world,
             guarded_make(ROOM),
             guarded_make(ROOM),
             guarded_make(ROOM),
             guarded_make(ROOM),
             guarded_make(ROOM),
             guarded_make(ROOM),
             (uint64_t)rank + 1};
    (void)argument;
    for (int f32 = 0; f32 < 2; f32++) {
        make(&o, INPUT_REAL, 5, f32 ? ONEHOP_FLOAT32 : ONEHOP_BFLOAT16, 1, f32 ? 8192 : 16384,
             "longest");
        for (int a = 0; a < ALGORITHMS; a++) call_once(&o, algorithms[a], APART, "longest");
    }
    guarded_free(&o.x);
    guarded_free(&o.residual_in);
    guarded_free(&o.normed);
    guarded_free(&o.residual_out);
    guarded_free(&o.quantised);
    guarded_free(&o.scales);
}

/* ---- bad calls ------------------------------------------------------------------------------- */

static onehop_norm plain(uint16_t *memory, size_t rows, size_t hidden) {
    onehop_norm n = ONEHOP_CONFIG_INIT(onehop_norm);
    n.x = memory;
    n.weight = memory + 2000;
    n.normed = memory + 4000;
    n.residual_out = memory + 6000;
    n.rows = rows;
    n.hidden = hidden;
    n.dtype = ONEHOP_BFLOAT16;
    n.eps = 1e-5f;
    return n;
}

#define CHECK_BAD(code, part, change)                                                              \
    do {                                                                                           \
        onehop_norm n = plain(memory, 4, 100);                                                     \
        change;                                                                                    \
        CHECK_RESULT(code, onehop_all_reduce_norm(context, &n, NULL, NULL));                       \
        CHECK_CONTAINS(part, onehop_last_error());                                                 \
    } while (0)

static void bad_arguments(onehop_context *context, int rank, int world, void *argument) {
    static uint16_t memories[ONEHOP_MAX_RANKS][8192];
    uint16_t *memory = memories[rank];
    onehop_norm good = plain(memory, 4, 100);
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    (void)world, (void)argument;
    CHECK_RESULT(ONEHOP_ERR_NULL, onehop_all_reduce_norm(NULL, &good, NULL, NULL));
    CHECK_RESULT(ONEHOP_ERR_NULL, onehop_all_reduce_norm(context, NULL, NULL, NULL));
    CHECK_RESULT(ONEHOP_ERR_NULL, onehop_comm_all_reduce_norm(NULL, &good, NULL, NULL));
    CHECK_BAD(ONEHOP_ERR_STRUCT_SIZE, "struct_size", n.struct_size = 3);
    CHECK_BAD(ONEHOP_ERR_NULL, "x is NULL", n.x = NULL);
    CHECK_BAD(ONEHOP_ERR_NULL, "weight is NULL", n.weight = NULL);
    CHECK_BAD(ONEHOP_ERR_NULL, "normed and quantised", n.normed = NULL);
    CHECK_BAD(ONEHOP_ERR_NULL, "row_scales", n.row_scales = (float *)(void *)(memory + 7000));
    CHECK_BAD(ONEHOP_ERR_DTYPE, "data type 9", n.dtype = (onehop_dtype)9);
    CHECK_BAD(ONEHOP_ERR_ARGUMENT, "flags 0x6", n.flags = 6);
    CHECK_BAD(ONEHOP_ERR_ARGUMENT, "hidden is 0", n.hidden = 0);
    CHECK_BAD(ONEHOP_ERR_TOO_LARGE, "expected 1..16384", n.hidden = 16385);
    CHECK_BAD(ONEHOP_ERR_TOO_LARGE, "expected 1..8192",
              (n.hidden = 8193, n.dtype = ONEHOP_FLOAT32));
    CHECK_BAD(ONEHOP_ERR_TOO_LARGE, "2^31", n.rows = (size_t)1 << 31);
    CHECK_BAD(ONEHOP_ERR_ARGUMENT, "eps is -1", n.eps = -1);
    CHECK_BAD(ONEHOP_ERR_ARGUMENT, "eps is", (n.eps = 0, n.eps /= n.eps));
    CHECK_BAD(ONEHOP_ERR_ARGUMENT, "scale is 0", n.quantised = memory + 7000);
    CHECK_BAD(ONEHOP_ERR_ARGUMENT, "rows of x are 99 elements apart", n.x_stride = 99);
    CHECK_BAD(ONEHOP_ERR_ALIGNMENT, "normed at", n.normed = (char *)n.normed + 1);
    CHECK_BAD(ONEHOP_ERR_OVERLAP, "normed at", n.normed = memory + 8);
    CHECK_BAD(ONEHOP_ERR_OVERLAP, "weight at", n.normed = memory + 2000);
    CHECK_BAD(ONEHOP_ERR_OVERLAP, "residual_out at", n.residual_out = n.normed);
    /* Between the rows of x, but one element too near at either end. */
    CHECK_BAD(ONEHOP_ERR_OVERLAP, "x at",
              (n.x_stride = n.residual_out_stride = 200, n.residual_out = memory + 99));
    CHECK_BAD(ONEHOP_ERR_OVERLAP, "x at",
              (n.x_stride = n.residual_out_stride = 200, n.residual_out = memory + 101));
    call.algorithm = ONEHOP_2SHOT_PULL;
    CHECK_RESULT(ONEHOP_ERR_ALGORITHM, onehop_all_reduce_norm(context, &good, &call, NULL));
    CHECK_CONTAINS("2shot_pull", onehop_last_error());
    call.algorithm = ONEHOP_1SHOT_PUSH;
    call.blocks = 1000;
    CHECK_RESULT(ONEHOP_ERR_ALGORITHM, onehop_all_reduce_norm(context, &good, &call, NULL));
    call.blocks = 0;
    call.source = ONEHOP_SOURCE_GRAPH;
    CHECK_RESULT(ONEHOP_ERR_ALGORITHM, onehop_all_reduce_norm(context, &good, &call, NULL));
    /* No row: nothing, on all ranks. And what is good runs, between the rows of x too. */
    good.rows = 0;
    CHECK_OK(onehop_all_reduce_norm(context, &good, NULL, NULL));
    good.rows = 4;
    good.x_stride = good.residual_out_stride = 200;
    good.residual_out = memory + 100;
    CHECK_OK(onehop_all_reduce_norm(context, &good, NULL, NULL));
}

static void alone(void) {
    static uint16_t memory[8192];
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    onehop_norm n = plain(memory, 1, 8);
    onehop_context *context;
    config.world_size = 1;
    config.device.kind = ONEHOP_DEVICE_HOST;
    config.name = own_name("alone");
    CHECK_OK(onehop_create(&config, &context));
    CHECK_RESULT(ONEHOP_ERR_WORLD_SIZE, onehop_all_reduce_norm(context, &n, NULL, NULL));
    onehop_destroy(context);
}

/* The last rank's call differs in one thing. */
static void differ(onehop_algorithm algorithm, int thing) {
    static uint16_t memories[3][8192];
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    onehop_context *contexts[3];
    onehop_stream streams[3];
    config.device.kind = ONEHOP_DEVICE_HOST;
    config.timeout_ms = 60000;
    CHECK_OK(onehop_create_all(&config, 3, NULL, contexts));
    for (int r = 0; r < 3; r++) {
        onehop_norm n = plain(memories[r], 4, 100);
        onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
        call.algorithm = algorithm;
        if (r == 2 && thing == 0) n.hidden = 96;
        if (r == 2 && thing == 1) n.rows = 5;
        if (r == 2 && thing == 2) n.eps = 2e-5f;
        if (r == 2 && thing == 3) n.flags = ONEHOP_NORM_WEIGHT_PLUS_ONE;
        if (r == 2 && thing == 4) n.residual_in = memories[r] + 7000;
        if (r == 2 && thing == 5) n.dtype = ONEHOP_FLOAT16;
        CHECK_OK(onehop_host_stream_create(&streams[r]));
        if (r == 2 && thing == 6)
            CHECK_OK(onehop_all_reduce(contexts[r], n.x, n.normed, 400, n.dtype, ONEHOP_SUM, NULL,
                                       streams[r]));
        else
            CHECK_OK(onehop_all_reduce_norm(contexts[r], &n, &call, streams[r]));
    }
    for (int r = 0; r < 3; r++) {
        onehop_failure failure;
        CHECK_RESULT(ONEHOP_ERR_MISMATCH, onehop_synchronize(contexts[r], streams[r]));
        CHECK_RESULT(ONEHOP_ERR_MISMATCH, onehop_status(contexts[r], &failure));
        CHECK_INT(2, failure.peer);
        CHECK_CONTAINS("all_reduce_norm of", failure.text);
    }
    for (int r = 0; r < 3; r++) onehop_host_stream_destroy(streams[r]);
    for (int r = 0; r < 3; r++) onehop_destroy(contexts[r]);
}

/* Rank 1 does not come: rank 0 says so at the deadline, and in the next call at once. */
static void absent(onehop_algorithm algorithm) {
    static uint16_t memory[8192];
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    onehop_context *contexts[2];
    onehop_stream stream;
    onehop_failure failure;
    onehop_norm n = plain(memory, 4, 100);
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    call.algorithm = algorithm;
    config.device.kind = ONEHOP_DEVICE_HOST;
    config.timeout_ms = 200;
    CHECK_OK(onehop_create_all(&config, 2, NULL, contexts));
    CHECK_OK(onehop_host_stream_create(&stream));
    CHECK_OK(onehop_all_reduce_norm(contexts[0], &n, &call, stream));
    CHECK_RESULT(ONEHOP_ERR_TIMEOUT, onehop_synchronize(contexts[0], stream));
    CHECK_RESULT(ONEHOP_ERR_TIMEOUT, onehop_status(contexts[0], &failure));
    CHECK_INT(1, failure.peer);
    CHECK_RESULT(ONEHOP_ERR_TIMEOUT, onehop_all_reduce_norm(contexts[0], &n, &call, stream));
    onehop_host_stream_destroy(stream);
    for (int r = 0; r < 2; r++) onehop_destroy(contexts[r]);
}

/* Captured on both ranks by one thread, replayed with other data; and a capture in which the ranks
 * differ. */
static void captured(void) {
    static float x[2][300], r[2][300], y[2][300], weight[100];
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    onehop_context *contexts[2];
    onehop_stream streams[2];
    onehop_host_graph *graphs[2];
    config.device.kind = ONEHOP_DEVICE_HOST;
    for (int i = 0; i < 100; i++) weight[i] = 1;
    CHECK_OK(onehop_create_all(&config, 2, NULL, contexts));
    for (int k = 0; k < 2; k++) CHECK_OK(onehop_host_stream_create(&streams[k]));
    for (int round = 0; round < 2; round++) {
        CHECK_OK(onehop_capture_begin_all(contexts, 2));
        for (int k = 0; k < 2; k++) {
            onehop_norm n = ONEHOP_CONFIG_INIT(onehop_norm);
            n.x = x[k];
            n.weight = weight;
            n.normed = y[k];
            n.residual_out = r[k];
            n.rows = 3;
            n.hidden = 100;
            n.dtype = ONEHOP_FLOAT32;
            n.eps = round && k ? 2.0f : 0.0f;
            CHECK_OK(onehop_host_stream_capture_begin(streams[k]));
            CHECK_OK(onehop_all_reduce_norm(contexts[k], &n, NULL, streams[k]));
            CHECK_OK(onehop_host_stream_capture_end(streams[k], &graphs[k]));
        }
        CHECK_RESULT(round ? ONEHOP_ERR_MISMATCH : ONEHOP_OK, onehop_capture_end_all(contexts, 2));
        for (int replay = 1; replay < 4 && !round; replay++) {
            for (int i = 0; i < 300; i++) x[0][i] = x[1][i] = (float)replay;
            for (int k = 0; k < 2; k++) CHECK_OK(onehop_host_graph_launch(graphs[k], streams[k]));
            for (int k = 0; k < 2; k++) CHECK_OK(onehop_synchronize(contexts[k], streams[k]));
            for (int i = 0; i < 600; i++)
                if (r[i / 300][i % 300] != (float)(2 * replay) || y[i / 300][i % 300] != 1.0f)
                    FAIL("replay %d: rank %d, element %d: %g, %g", replay, i / 300, i % 300,
                         (double)r[i / 300][i % 300], (double)y[i / 300][i % 300]);
        }
        for (int k = 0; k < 2; k++) onehop_host_graph_destroy(graphs[k]);
    }
    for (int k = 0; k < 2; k++) onehop_host_stream_destroy(streams[k]);
    for (int k = 0; k < 2; k++) onehop_destroy(contexts[k]);
}

int main(void) {
    static const int worlds[] = {2, 3, 4, 5, 6, 7, 8, 16};
    onehop_config small = ONEHOP_CONFIG_INIT(onehop_config);
    size_t all = SIZE_MAX, few = 2880;
    watchdog(110);
    /* Slots and areas of a few rows: many chunks. */
    small.push_bytes = 24576;
    small.pull_bytes = 49152;
    alone();
    captured();
    for (int a = 0; a < ALGORITHMS; a++) absent(algorithms[a]);
    ranks_run(RANKS_AS_THREADS, 2, NULL, bad_arguments, NULL);
    for (int thing = 0; thing < 7; thing++) differ(algorithms[thing % ALGORITHMS], thing);
    ranks_run(RANKS_AS_THREADS, 2, NULL, longest, NULL);
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++) {
        const double start = seconds_now();
        ranks_run(RANKS_AS_THREADS, worlds[i], NULL, rank_main, &all);
        if (worlds[i] % 3 != 1) ranks_run(RANKS_AS_THREADS, worlds[i], &small, rank_main, &few);
        fprintf(stderr, "  world size %d: %.1f s\n", worlds[i], seconds_now() - start);
    }
    printf("%zu calls, bit-equal on all ranks\n", shared.compared);
    return 0;
}
