/* Property: on GPUs, onehop_all_reduce_norm, one-shot and two-shot, gives the bits of
 * norm_reference.h (and so those of the host) on all ranks: aligned and not, quantised, in chunks,
 * eager and in graphs. onehop_tp_qknorm is within one rounding of float64 and gives the same bits
 * for every grid and, where ranks have equal rows, on all ranks. */
/* labels: timeout=180 */
#include "gpu_ranks.h"
#include "norm_reference.h"

#define MAX  ((size_t)1 << 19) /* elements of a matrix, gaps included */
#define ROWS 4096

typedef struct data {
    norm_data norm;
    unsigned char x[ONEHOP_MAX_RANKS][4 * MAX], residual[4 * MAX], weight[4 * 16384];
    unsigned char r[4 * MAX], y[4 * MAX];
    uint8_t quantised[MAX];
    float scales[ROWS];
    unsigned char out[ONEHOP_MAX_RANKS][4 * MAX]; /* of tp_qknorm */
    size_t compared;                              /* atomic */
} data;

static data *shared; /* by processes too */

/* One rank's memory on its GPU. */
typedef struct bench {
    gpu_rank *rank;
    unsigned char *x, *residual, *weight, *y, *r, *quantised, *scales;
    unsigned char *host;
    uint64_t random;
} bench;

static bench open_bench(gpu_rank *r) {
    bench b = {r,
               gpu_alloc(r, 4 * MAX),
               gpu_alloc(r, 4 * MAX),
               gpu_alloc(r, 4 * 16384),
               gpu_alloc(r, 4 * MAX),
               gpu_alloc(r, 4 * MAX),
               gpu_alloc(r, MAX),
               gpu_alloc(r, 4 * ROWS),
               malloc(4 * MAX),
               (uint64_t)r->rank + 1};
    CHECK(b.host != NULL);
    return b;
}

static void close_bench(bench *b) {
    unsigned char *all[] = {b->x, b->residual, b->weight, b->y, b->r, b->quantised, b->scales};
    gpu_barrier(b->rank);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) gpu_free(b->rank, all[i]);
    free(b->host);
}

/* Rows with gaps of 0xA5 between them. */
static void put(bench *b, unsigned char *to, const void *rows, size_t count, size_t width,
                size_t stride) {
    memset(b->host, 0xA5, count * stride);
    for (size_t i = 0; rows && i < count; i++)
        memcpy(b->host + i * stride, (const char *)rows + i * width, width);
    gpu_write(b->rank, to, b->host, count * stride);
}

static void expect(bench *b, const unsigned char *from, const void *rows, size_t count,
                   size_t width, size_t stride, const char *what) {
    gpu_read(b->rank, b->host, from, count * stride);
    for (size_t i = 0; i < count; i++) {
        const unsigned char *row = b->host + i * stride,
                            *want = (const unsigned char *)rows + i * width;
        for (size_t k = 0; k < stride; k++)
            if (row[k] != (k < width ? want[k] : 0xA5))
                FAIL("rank %d of %d, %s: row %zu, byte %zu of %zu: expected 0x%02x, found 0x%02x",
                     b->rank->rank, b->rank->world, what, i, k, width, k < width ? want[k] : 0xA5u,
                     row[k]);
    }
}

/* ---- norm ------------------------------------------------------------------------------------ */

static void make_norm(bench *b, onehop_dtype dtype, size_t rows, size_t hidden, uint64_t seed) {
    const int rank = b->rank->rank, world = b->rank->world;
    const input_kind kind = seed % 3 == 0   ? INPUT_SPECIAL
                            : seed % 3 == 1 ? INPUT_REAL
                                            : INPUT_MIXED;
    char what[100];
    gpu_barrier(b->rank);
    input_fill(shared->x[rank], kind, seed, rank, 0, rows * hidden, dtype);
    gpu_barrier(b->rank);
    if (rank == 0) {
        norm_data *d = &shared->norm;
        memset(d, 0, sizeof *d);
        d->dtype = dtype;
        d->rows = rows;
        d->hidden = hidden;
        d->world = world;
        for (int r = 0; r < world; r++) d->x[r] = shared->x[r];
        d->residual = seed % 5 ? shared->residual : NULL;
        d->weight = shared->weight;
        d->eps = 1e-6f;
        d->plus_one = seed % 2;
        d->scale = seed % 4 < 2 ? 0.25f : 0;
        d->r = shared->r;
        d->y = shared->y;
        d->quantised = shared->quantised;
        d->scales = shared->scales;
        input_fill(shared->residual, kind, seed, 20, 0, rows * hidden, dtype);
        input_fill(shared->weight, INPUT_REAL, seed, 21, 0, hidden, dtype);
        snprintf(what, sizeof what, "%zu x %zu %s", rows, hidden, onehop_dtype_name(dtype));
        norm_reference(d, what);
    }
    gpu_barrier(b->rank);
}

static void call_norm(bench *b, onehop_algorithm algorithm, size_t gap, bool graph) {
    const norm_data *d = &shared->norm;
    const size_t size = reference_element_bytes(d->dtype), width = d->hidden * size,
                 stride = width + gap * size;
    gpu_rank *r = b->rank;
    onehop_norm n = ONEHOP_CONFIG_INIT(onehop_norm);
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    char what[200];
    snprintf(what, sizeof what, "%s %zu x %zu %s, gap %zu, %s", onehop_algorithm_name(algorithm),
             d->rows, d->hidden, onehop_dtype_name(d->dtype), gap, graph ? "graph" : "eager");
    put(b, b->x, d->x[r->rank], d->rows, width, stride);
    put(b, b->residual, d->residual, d->rows, width, stride);
    put(b, b->y, NULL, d->rows, width, stride);
    put(b, b->quantised, NULL, d->rows, d->hidden, d->hidden + gap);
    gpu_write(r, b->weight, d->weight, width);
    n.x = b->x;
    n.residual_in = d->residual ? b->residual : NULL;
    n.residual_out = b->residual;
    n.weight = b->weight;
    n.normed = b->y;
    n.quantised = b->quantised;
    n.row_scales = d->scale ? NULL : (float *)(void *)b->scales;
    n.scale = d->scale;
    n.rows = d->rows;
    n.hidden = d->hidden;
    n.x_stride = n.residual_in_stride = n.residual_out_stride = n.normed_stride =
        n.quantised_stride = d->hidden + gap;
    n.dtype = d->dtype;
    n.flags = d->plus_one ? ONEHOP_NORM_WEIGHT_PLUS_ONE : 0;
    n.eps = d->eps;
    call.algorithm = algorithm;
    if (graph) {
        gpu_graph captured;
        gpu_capture_begin(&r, 1);
        CHECK_OK(onehop_all_reduce_norm(r->context, &n, &call, r->stream));
        gpu_capture_end(&r, 1, &captured);
        gpu_graph_launch(r, &captured, r->stream);
        CHECK_OK(onehop_synchronize(r->context, r->stream));
        gpu_barrier(r);
        gpu_graph_free(r, &captured);
    } else {
        CHECK_OK(onehop_all_reduce_norm(r->context, &n, &call, r->stream));
        CHECK_OK(onehop_synchronize(r->context, r->stream));
    }
    expect(b, b->residual, d->r, d->rows, width, stride, what);
    expect(b, b->y, d->y, d->rows, width, stride, what);
    expect(b, b->quantised, d->quantised, d->rows, d->hidden, d->hidden + gap, what);
    if (n.row_scales) expect(b, b->scales, d->scales, 1, 4 * d->rows, 4 * d->rows, what);
    __atomic_fetch_add(&shared->compared, 1, __ATOMIC_RELAXED);
}

static void norms(gpu_rank *ranks, int here, void *argument) {
    static const struct {
        size_t rows, hidden;
    } shapes[] = {{1, 4096},  {1, 7168},  {8, 4096},  {3, 1},      {5, 100},   {7, 129},
                  {64, 7168}, {33, 2880}, {17, 8191}, {24, 16384}, {300, 1000}};
    static const onehop_dtype dtypes[] = {ONEHOP_BFLOAT16, ONEHOP_FLOAT16, ONEHOP_FLOAT32};
    bench b = open_bench(&ranks[0]);
    (void)argument;
    CHECK(here == 1);
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        const onehop_dtype dtype = shapes[s].hidden > 8192 ? ONEHOP_BFLOAT16 : dtypes[s % 3];
        make_norm(&b, s < 3 ? ONEHOP_BFLOAT16 : dtype, shapes[s].rows, shapes[s].hidden,
                  s + (size_t)ranks[0].world);
        for (int two = 0; two < 2; two++)
            for (int graph = 0; graph < 2; graph++) {
                const onehop_algorithm a = two ? ONEHOP_2SHOT_PUSH : ONEHOP_1SHOT_PUSH;
                call_norm(&b, a, 0, graph);
                call_norm(&b, a, graph ? 8 : 3, graph);
            }
    }
    close_bench(&b);
}

/* ---- tp_qknorm ------------------------------------------------------------------------------- */

static void call_qknorm(bench *b, onehop_dtype dtype, size_t tokens, size_t q_width, size_t k_width,
                        size_t gap, uint32_t blocks) {
    const size_t size = reference_element_bytes(dtype), width = (q_width + k_width) * size,
                 stride = width + gap * size;
    gpu_rank *r = b->rank;
    onehop_qknorm n = ONEHOP_CONFIG_INIT(onehop_qknorm);
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    put(b, b->x, shared->x[r->rank], tokens, width, stride);
    gpu_write(r, b->weight, shared->weight, width);
    n.q = b->x;
    n.k = b->x + q_width * size;
    n.q_weight = b->weight;
    n.k_weight = b->weight + q_width * size;
    n.tokens = tokens;
    n.q_width = q_width;
    n.k_width = k_width;
    n.q_stride = n.k_stride = q_width + k_width + gap;
    n.dtype = dtype;
    n.eps = 1e-5f;
    call.blocks = blocks;
    CHECK_OK(onehop_tp_qknorm(r->context, &n, &call, r->stream));
    CHECK_OK(onehop_synchronize(r->context, r->stream));
}

static void check_qknorm(const bench *b, onehop_dtype dtype, size_t tokens, size_t q_width,
                         size_t k_width) {
    const int rank = b->rank->rank, world = b->rank->world;
    const size_t width = q_width + k_width, size = reference_element_bytes(dtype);
    const size_t step = 1 + tokens / 40;
    char what[160];
    for (size_t t = (size_t)rank % step; t < tokens; t += step) {
        double squares[2] = {0, 0};
        for (int r = 0; r < world; r++)
            for (size_t c = 0; c < width; c++) {
                const double x = norm_value(shared->x[r], t * width + c, dtype);
                squares[c >= q_width] += x * x;
            }
        for (size_t c = 0; c < width; c++) {
            const bool k = c >= q_width;
            uint32_t bits = 0;
            memcpy(&bits, shared->out[rank] + (t * width + c) * size, size);
            snprintf(what, sizeof what,
                     "rank %d of %d, tp_qknorm %zu x (%zu, %zu) %s, token %zu, column %zu", rank,
                     world, tokens, q_width, k_width, onehop_dtype_name(dtype), t, c);
            norm_expect_near(bits, norm_value(shared->x[rank], t * width + c, dtype),
                             squares[k] > 0x1.fffffp127
                                 ? squares[k]
                                 : squares[k] / (double)((k ? k_width : q_width) * (size_t)world),
                             1e-5, norm_value(shared->weight, c, dtype), dtype, what);
        }
    }
}

static void one_qknorm(bench *b, onehop_dtype dtype, size_t tokens, size_t q_width, size_t k_width,
                       bool equal, input_kind kind) {
    static const uint32_t grids[] = {2, 3, 13};
    const size_t width = (q_width + k_width) * reference_element_bytes(dtype);
    const int rank = b->rank->rank;
    CHECK(tokens * (q_width + k_width + 8) <= MAX);
    gpu_barrier(b->rank);
    input_fill(shared->x[rank], kind, tokens, equal ? 0 : rank, 0, tokens * (q_width + k_width),
               dtype);
    if (rank == 0) input_fill(shared->weight, INPUT_REAL, tokens, 21, 0, q_width + k_width, dtype);
    gpu_barrier(b->rank);
    call_qknorm(b, dtype, tokens, q_width, k_width, 0, 0);
    gpu_read(b->rank, shared->out[rank], b->x, tokens * width);
    gpu_barrier(b->rank);
    check_qknorm(b, dtype, tokens, q_width, k_width);
    if (equal) CHECK_BYTES(shared->out[0], shared->out[rank], tokens * width);
    for (size_t g = 0; g < sizeof grids / sizeof *grids; g++) {
        const size_t gap = g == 0 ? 3 : 8;
        call_qknorm(b, dtype, tokens, q_width, k_width, gap, grids[g]);
        expect(b, b->x, shared->out[rank], tokens, width,
               width + gap * reference_element_bytes(dtype), "another grid");
    }
    __atomic_fetch_add(&shared->compared, 4, __ATOMIC_RELAXED);
}

static void qknorms(gpu_rank *ranks, int here, void *argument) {
    const size_t world = (size_t)ranks[0].world;
    bench b = open_bench(&ranks[0]);
    (void)argument;
    CHECK(here == 1);
    one_qknorm(&b, ONEHOP_BFLOAT16, 1, 6144 / world, 1024 / world, false, INPUT_REAL);
    one_qknorm(&b, ONEHOP_BFLOAT16, 64, 6144 / world, 1024 / world, true, INPUT_REAL);
    /* Units of a lane: one, in batches of 1, 2 and 4 tokens by the grid; two. */
    one_qknorm(&b, ONEHOP_BFLOAT16, 20, 384, 128, true, INPUT_REAL);
    one_qknorm(&b, ONEHOP_FLOAT32, 20, 2304, 256, true, INPUT_REAL);
    one_qknorm(&b, ONEHOP_FLOAT16, 257, 129, 8, true, INPUT_SPECIAL);
    one_qknorm(&b, ONEHOP_FLOAT32, 7, 33, 7, false, INPUT_MIXED);
    one_qknorm(&b, ONEHOP_FLOAT32, 3, 1, 1, false, INPUT_REAL);
    one_qknorm(&b, ONEHOP_BFLOAT16, 8192, 24, 9, false, INPUT_REAL);
    close_bench(&b);
}

static void run(const char *what, gpu_layout layout, int world, int gpus) {
    /* Slots of which the longer shapes take several chunks. */
    onehop_config small = ONEHOP_CONFIG_INIT(onehop_config);
    const gpu_setup usual = {.layout = layout, .world = world, .gpus = gpus};
    const gpu_setup few = {.layout = layout, .world = world, .gpus = gpus, .config = &small};
    const double start = seconds_now();
    small.push_bytes = 131072;
    small.pull_bytes = 4096;
    gpu_run(&usual, norms, NULL);
    gpu_run(&few, norms, NULL);
    gpu_run(&usual, qknorms, NULL);
    small.push_bytes = 8192;
    gpu_run(&few, qknorms, NULL);
    printf("  %s, world size %d, %d GPU%s: %.1f s\n", what, world, gpus, gpus > 1 ? "s" : "",
           seconds_now() - start);
}

static void in_one_process(void *argument) {
    static const int worlds[] = {2, 3, 4, 8};
    const int gpus = *(const int *)argument > 1 ? 2 : 1;
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++)
        run("threads", GPU_THREADS, worlds[i], gpus);
}

int main(void) {
    int gpus = gpu_main(170, 1);
    shared = shared_memory(sizeof *shared);
    gpu_apart(in_one_process, &gpus);
    gpus = gpu_for_processes();
    if (gpus) run("process per rank", GPU_PROCESSES, 2, gpus);
    printf("%zu calls, bits as expected\n", shared->compared);
    return 0;
}
