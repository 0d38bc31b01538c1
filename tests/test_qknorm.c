/* Property: onehop_tp_qknorm on the host device is within one rounding of float64, and gives the
 * same bits for every grid and slot, and on all ranks where they have equal rows. Calls that differ
 * between ranks fail on all, and bad arguments are refused.
 *
 * 2 to 8 and 16 ranks, types, widths that divide nothing, q and k in one buffer, 1 to 8192 tokens,
 * one piece and chunks; NaN, infinities, zeros. */
/* ThreadSanitizer sees the bodies in test_fused_lanes, in less time. */
/* labels: quick timeout=120 tsan-off */
#include "harness.h"
#include "norm_reference.h"
#include "rank_contexts.h"

#define MAX 400000 /* elements of a rank */

typedef struct data {
    onehop_dtype dtype;
    size_t tokens, q_width, k_width;
    float eps;
    bool plus_one;
    unsigned char *in[ONEHOP_MAX_RANKS], *out[ONEHOP_MAX_RANKS]; /* [tokens, q_width + k_width] */
    unsigned char weight[ONEHOP_MAX_RANKS][4 * 8192];
    double *q_squares, *k_squares; /* [tokens], of all ranks */
} data;

static data *shared;
static size_t compared;

typedef struct own {
    onehop_context *context;
    int rank, world;
    guarded memory;
    uint64_t random;
} own;

/* Rows of q and k side by side, with gaps, or apart. */
static onehop_qknorm lay(own *o, bool spread) {
    const data *d = shared;
    const size_t size = reference_element_bytes(d->dtype);
    const size_t gap = spread ? random_next(&o->random) % 5 : 0;
    const size_t stride = d->q_width + d->k_width + 2 * gap;
    const size_t off = spread ? random_next(&o->random) % (16 / size) * size : 0;
    unsigned char *at = guarded_place(&o->memory, d->tokens * stride * size, off);
    onehop_qknorm n = ONEHOP_CONFIG_INIT(onehop_qknorm);
    n.q = at;
    n.k = at + (d->q_width + gap) * size;
    n.q_stride = n.k_stride = stride;
    n.q_weight = d->weight[o->rank];
    n.k_weight = d->weight[o->rank] + d->q_width * size;
    n.tokens = d->tokens;
    n.q_width = d->q_width;
    n.k_width = d->k_width;
    n.dtype = d->dtype;
    n.flags = d->plus_one ? ONEHOP_NORM_WEIGHT_PLUS_ONE : 0;
    n.eps = d->eps;
    return n;
}

static void move_rows(const own *o, const onehop_qknorm *n, unsigned char *rows, bool in) {
    const data *d = shared;
    const size_t size = reference_element_bytes(d->dtype), width = d->q_width + d->k_width;
    (void)o;
    for (size_t t = 0; t < d->tokens; t++) {
        unsigned char *q = (unsigned char *)n->q + t * n->q_stride * size,
                      *k = (unsigned char *)n->k + t * n->k_stride * size,
                      *row = rows + t * width * size;
        memcpy(in ? q : row, in ? row : q, d->q_width * size);
        memcpy(in ? k : row + d->q_width * size, in ? row + d->q_width * size : k,
               d->k_width * size);
    }
}

static void call_once(own *o, uint32_t blocks, bool spread, unsigned char *out) {
    const data *d = shared;
    const size_t size = reference_element_bytes(d->dtype), width = d->q_width + d->k_width;
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    onehop_qknorm n = lay(o, spread);
    unsigned char *at = n.q, *gaps;
    move_rows(o, &n, d->in[o->rank], true);
    call.blocks = blocks;
    gaps = malloc(o->memory.bytes);
    memcpy(gaps, at, o->memory.bytes);
    CHECK_OK(onehop_tp_qknorm(o->context, &n, &call, NULL));
    move_rows(o, &n, out, false);
    guarded_check(&o->memory, "q and k");
    /* Nothing but the rows has changed. */
    move_rows(o, &n, d->in[o->rank], true);
    CHECK_BYTES(gaps, at, o->memory.bytes);
    free(gaps);
    (void)width, (void)size;
}

/* A sample of the elements. */
static void check_near(const own *o) {
    const data *d = shared;
    const size_t width = d->q_width + d->k_width, size = reference_element_bytes(d->dtype);
    const size_t step = 1 + d->tokens * width / 20000;
    char what[160];
    for (size_t i = (size_t)o->rank % step; i < d->tokens * width; i += step) {
        const size_t t = i / width, c = i % width;
        const bool is_q = c < d->q_width;
        const double squares = is_q ? d->q_squares[t] : d->k_squares[t];
        const double mean =
            squares > 0x1.fffffp127
                ? squares
                : squares / (double)((is_q ? d->q_width : d->k_width) * (size_t)o->world);
        const double w = norm_value(d->weight[o->rank], c, d->dtype) + (d->plus_one ? 1 : 0);
        uint32_t bits = 0;
        memcpy(&bits, d->out[o->rank] + i * size, size);
        snprintf(what, sizeof what, "rank %d of %d, %zu x (%zu, %zu) %s, token %zu, column %zu",
                 o->rank, o->world, d->tokens, d->q_width, d->k_width, onehop_dtype_name(d->dtype),
                 t, c);
        norm_expect_near(bits, norm_value(d->in[o->rank], i, d->dtype), mean, (double)d->eps, w,
                         d->dtype, what);
    }
}

static void sum_squares(const own *o) {
    const data *d = shared;
    const size_t width = d->q_width + d->k_width;
    for (size_t t = (size_t)o->rank; t < d->tokens; t += (size_t)o->world) {
        d->q_squares[t] = d->k_squares[t] = 0;
        for (int r = 0; r < o->world; r++)
            for (size_t c = 0; c < width; c++) {
                const double x = norm_value(d->in[r], t * width + c, d->dtype);
                *(c < d->q_width ? &d->q_squares[t] : &d->k_squares[t]) += x * x;
            }
    }
}

/* `kind` -1: zeros. `equal`: all ranks have the same rows. */
static void one_shape(own *o, onehop_dtype dtype, size_t tokens, size_t q_width, size_t k_width,
                      int kind, bool equal) {
    static const uint32_t grids[] = {2, 3, 5};
    data *d = shared;
    const size_t size = reference_element_bytes(dtype), width = q_width + k_width,
                 bytes = tokens * width * size;
    unsigned char *again = malloc(bytes);
    ranks_barrier(o->context);
    if (tokens * (width + 8) > MAX) FAIL("%zu x %zu is too large for the test", tokens, width);
    if (o->rank == 0) {
        d->dtype = dtype;
        d->tokens = tokens;
        d->q_width = q_width;
        d->k_width = k_width;
        d->eps = tokens % 2 ? 1e-5f : 1e-6f;
        d->plus_one = tokens % 3 == 0;
    }
    memset(d->in[o->rank], 0, bytes);
    if (kind >= 0)
        input_fill(d->in[o->rank], (input_kind)kind, tokens, equal ? 0 : o->rank, 0, tokens * width,
                   dtype);
    input_fill(d->weight[o->rank], INPUT_REAL, tokens + 1, equal ? 0 : o->rank, 0, width, dtype);
    ranks_barrier(o->context);
    sum_squares(o);
    call_once(o, 0, false, d->out[o->rank]);
    ranks_barrier(o->context);
    check_near(o);
    if (equal && o->rank) CHECK_BYTES(d->out[0], d->out[o->rank], bytes);
    for (size_t g = 0; g < sizeof grids / sizeof *grids && tokens < 2000; g++) {
        call_once(o, grids[g], true, again);
        CHECK_BYTES(d->out[o->rank], again, bytes);
    }
    if (o->rank == 0) compared += 4;
    ranks_barrier(o->context);
    free(again);
}

static void shapes(onehop_context *context, int rank, int world, void *argument) {
    static const onehop_dtype dtypes[] = {ONEHOP_BFLOAT16, ONEHOP_FLOAT16, ONEHOP_FLOAT32};
    own o = {context, rank, world, guarded_make(4 * MAX), (uint64_t)rank + 1};
    const onehop_dtype moved = dtypes[world % 3];
    (void)argument;
    one_shape(&o, ONEHOP_BFLOAT16, 1, 6144 / (size_t)world, 1024 / (size_t)world, INPUT_REAL,
              false);
    one_shape(&o, moved, 3, 33, 7, INPUT_MIXED, false);
    one_shape(&o, dtypes[(world + 1) % 3], 64, 96, 16, INPUT_REAL, true);
    one_shape(&o, dtypes[(world + 2) % 3], 7, 1, 1, INPUT_SPECIAL, false);
    one_shape(&o, moved, 5, 40, 24, -1, true);
    one_shape(&o, ONEHOP_FLOAT16, 257, 129, 8, INPUT_SPECIAL, world % 2);
    if (world == 2 || world == 5) {
        one_shape(&o, ONEHOP_BFLOAT16, 8192, 24, 9, INPUT_REAL, false);
        one_shape(&o, ONEHOP_FLOAT32, 2, 8000, 180, INPUT_REAL, false);
    }
    guarded_free(&o.memory);
}

/* Slots of 512 tokens: chunks. */
static void chunks(onehop_context *context, int rank, int world, void *argument) {
    own o = {context, rank, world, guarded_make(4 * MAX), (uint64_t)rank + 1};
    (void)argument;
    for (size_t t = 511; t < 514; t++)
        one_shape(&o, ONEHOP_BFLOAT16, t, 9, 24, INPUT_REAL, t == 512);
    one_shape(&o, ONEHOP_FLOAT32, 1777, 8, 8, INPUT_MIXED, false);
    one_shape(&o, ONEHOP_BFLOAT16, 8192, 8, 3, INPUT_REAL, false);
    guarded_free(&o.memory);
}

/* ---- bad calls ------------------------------------------------------------------------------- */

static onehop_qknorm plain(uint16_t *memory) {
    onehop_qknorm n = ONEHOP_CONFIG_INIT(onehop_qknorm);
    n.q = memory;
    n.k = memory + 1000;
    n.q_weight = memory + 2000;
    n.k_weight = memory + 3000;
    n.tokens = 4;
    n.q_width = 100;
    n.k_width = 50;
    n.dtype = ONEHOP_BFLOAT16;
    n.eps = 1e-5f;
    return n;
}

#define CHECK_BAD(code, part, change)                                                              \
    do {                                                                                           \
        onehop_qknorm n = plain(memory);                                                           \
        change;                                                                                    \
        CHECK_RESULT(code, onehop_tp_qknorm(context, &n, NULL, NULL));                             \
        CHECK_CONTAINS(part, onehop_last_error());                                                 \
    } while (0)

static void bad_arguments(onehop_context *context, int rank, int world, void *argument) {
    static uint16_t memories[ONEHOP_MAX_RANKS][8192];
    uint16_t *memory = memories[rank];
    onehop_qknorm good = plain(memory);
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    uint32_t blocks = 0;
    (void)world, (void)argument;
    CHECK_RESULT(ONEHOP_ERR_NULL, onehop_tp_qknorm(NULL, &good, NULL, NULL));
    CHECK_RESULT(ONEHOP_ERR_NULL, onehop_tp_qknorm(context, NULL, NULL, NULL));
    CHECK_RESULT(ONEHOP_ERR_NULL, onehop_comm_tp_qknorm(NULL, &good, NULL, NULL));
    CHECK_RESULT(ONEHOP_ERR_NULL, onehop_tp_qknorm_max_blocks(context, &good, NULL));
    CHECK_BAD(ONEHOP_ERR_STRUCT_SIZE, "struct_size", n.struct_size = 3);
    CHECK_BAD(ONEHOP_ERR_NULL, "q is NULL", n.q = NULL);
    CHECK_BAD(ONEHOP_ERR_NULL, "k is NULL", n.k = NULL);
    CHECK_BAD(ONEHOP_ERR_NULL, "q_weight is NULL", n.q_weight = NULL);
    CHECK_BAD(ONEHOP_ERR_NULL, "k_weight is NULL", n.k_weight = NULL);
    CHECK_BAD(ONEHOP_ERR_DTYPE, "data type 9", n.dtype = (onehop_dtype)9);
    CHECK_BAD(ONEHOP_ERR_ARGUMENT, "flags 0x2", n.flags = 2);
    CHECK_BAD(ONEHOP_ERR_ARGUMENT, "q_width is 0", n.q_width = 0);
    CHECK_BAD(ONEHOP_ERR_ARGUMENT, "k_width is 0", n.k_width = 0);
    CHECK_BAD(ONEHOP_ERR_TOO_LARGE, "32768 bytes together", n.q_width = 16384);
    CHECK_BAD(ONEHOP_ERR_TOO_LARGE, "32768 bytes together", n.k_width = SIZE_MAX / 2);
    CHECK_BAD(ONEHOP_ERR_TOO_LARGE, "2^31", n.tokens = (size_t)1 << 31);
    CHECK_BAD(ONEHOP_ERR_ARGUMENT, "eps is -1", n.eps = -1);
    CHECK_BAD(ONEHOP_ERR_ARGUMENT, "rows of k are 49", n.k_stride = 49);
    CHECK_BAD(ONEHOP_ERR_ALIGNMENT, "k at", n.k = (char *)n.k + 1);
    CHECK_BAD(ONEHOP_ERR_OVERLAP, "q at", n.k = memory + 399);
    CHECK_BAD(ONEHOP_ERR_OVERLAP, "k at", n.k_weight = memory + 1199);
    CHECK_BAD(ONEHOP_ERR_OVERLAP, "q at", (n.q_stride = n.k_stride = 150, n.k = memory + 99));
    call.algorithm = ONEHOP_2SHOT_PUSH;
    CHECK_RESULT(ONEHOP_ERR_ALGORITHM, onehop_tp_qknorm(context, &good, &call, NULL));
    call.algorithm = ONEHOP_ALGORITHM_AUTO;
    call.threads = 32;
    CHECK_RESULT(ONEHOP_ERR_ALGORITHM, onehop_tp_qknorm(context, &good, &call, NULL));
    CHECK_OK(onehop_tp_qknorm_max_blocks(context, &good, &blocks));
    CHECK(blocks >= 2);
    good.tokens = 0;
    CHECK_OK(onehop_tp_qknorm(context, &good, NULL, NULL));
    good.tokens = 4;
    good.q_stride = good.k_stride = 150;
    good.k = memory + 100;
    CHECK_OK(onehop_tp_qknorm(context, &good, NULL, NULL));
}

/* The last rank's call differs in one thing. */
static void differ(int thing) {
    static uint16_t memories[3][8192];
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    onehop_context *contexts[3];
    onehop_stream streams[3];
    config.device.kind = ONEHOP_DEVICE_HOST;
    config.timeout_ms = 60000;
    CHECK_OK(onehop_create_all(&config, 3, NULL, contexts));
    for (int r = 0; r < 3; r++) {
        onehop_qknorm n = plain(memories[r]);
        if (r == 2 && thing == 0) n.tokens = 5;
        if (r == 2 && thing == 1) n.q_width = 99;
        if (r == 2 && thing == 2) n.k_width = 49;
        if (r == 2 && thing == 3) n.eps = 2e-5f;
        if (r == 2 && thing == 4) n.flags = ONEHOP_NORM_WEIGHT_PLUS_ONE;
        CHECK_OK(onehop_host_stream_create(&streams[r]));
        CHECK_OK(onehop_tp_qknorm(contexts[r], &n, NULL, streams[r]));
    }
    for (int r = 0; r < 3; r++) {
        onehop_failure failure;
        CHECK_RESULT(ONEHOP_ERR_MISMATCH, onehop_synchronize(contexts[r], streams[r]));
        CHECK_RESULT(ONEHOP_ERR_MISMATCH, onehop_status(contexts[r], &failure));
        CHECK_INT(2, failure.peer);
        CHECK_CONTAINS("tp_qknorm of", failure.text);
    }
    for (int r = 0; r < 3; r++) onehop_host_stream_destroy(streams[r]);
    for (int r = 0; r < 3; r++) onehop_destroy(contexts[r]);
}

/* Rank 1 does not come: rank 0 says so at the deadline, and in the next call at once. */
static void absent(void) {
    static uint16_t memory[8192];
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    onehop_context *contexts[2];
    onehop_stream stream;
    onehop_failure failure;
    onehop_qknorm n = plain(memory);
    config.device.kind = ONEHOP_DEVICE_HOST;
    config.timeout_ms = 200;
    CHECK_OK(onehop_create_all(&config, 2, NULL, contexts));
    CHECK_OK(onehop_host_stream_create(&stream));
    CHECK_OK(onehop_tp_qknorm(contexts[0], &n, NULL, stream));
    CHECK_RESULT(ONEHOP_ERR_TIMEOUT, onehop_synchronize(contexts[0], stream));
    CHECK_RESULT(ONEHOP_ERR_TIMEOUT, onehop_status(contexts[0], &failure));
    CHECK_INT(1, failure.peer);
    CHECK_RESULT(ONEHOP_ERR_TIMEOUT, onehop_tp_qknorm(contexts[0], &n, NULL, stream));
    onehop_host_stream_destroy(stream);
    for (int r = 0; r < 2; r++) onehop_destroy(contexts[r]);
}

int main(void) {
    static const int worlds[] = {2, 3, 4, 5, 6, 7, 8, 16};
    onehop_config small = ONEHOP_CONFIG_INIT(onehop_config);
    watchdog(110);
    small.push_bytes = small.pull_bytes = 4096;
    shared = calloc(1, sizeof *shared);
    for (int r = 0; r < ONEHOP_MAX_RANKS; r++) {
        shared->in[r] = malloc(4 * MAX);
        shared->out[r] = malloc(4 * MAX);
    }
    shared->q_squares = malloc(8192 * sizeof(double));
    shared->k_squares = malloc(8192 * sizeof(double));
    ranks_run(RANKS_AS_THREADS, 2, NULL, bad_arguments, NULL);
    absent();
    for (int thing = 0; thing < 5; thing++) differ(thing);
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++) {
        const double start = seconds_now();
        ranks_run(RANKS_AS_THREADS, worlds[i], NULL, shapes, NULL);
        if (worlds[i] < 4) ranks_run(RANKS_AS_THREADS, worlds[i], &small, chunks, NULL);
        fprintf(stderr, "  world size %d: %.1f s\n", worlds[i], seconds_now() - start);
    }
    for (int r = 0; r < ONEHOP_MAX_RANKS; r++) {
        free(shared->in[r]);
        free(shared->out[r]);
    }
    free(shared->q_squares);
    free(shared->k_squares);
    free(shared);
    printf("%zu calls\n", compared);
    return 0;
}
