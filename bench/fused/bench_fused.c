/* Fused calls against the same work done apart, on two GPUs, a process each, in graphs of many
 * calls; where there is one GPU its two halves are the ranks, which tells of launches and of
 * nothing else.
 *
 *   norm     onehop_all_reduce_norm            against onehop_all_reduce, then one kernel that adds
 *                                              the residual and
 *            norms; hidden 4096 and 7168, bfloat16
 *   qknorm   onehop_tp_qknorm, (6144, 1024)/2  against sums of squares, onehop_all_reduce of them,
 *                                              and a kernel that
 *            applies them
 *   prefetch onehop_all_reduce of 8 KiB that prefetches the weights of the matrix product after it,
 *   against one that does
 *            not; 4096 columns, so many rows; 256 MiB of weights in turn, so none is in the L2 by
 *            itself
 *   ahead    the same with a matrix product that itself loads weights before the all-reduce has
 *            ended
 *
 * The separate kernels (separate_kernels.cu) depend programmatically on the kernel before and load
 * ahead what it does not write. A time is that of a graph of CALLS calls, by CALLS: the median of
 * ROUNDS, the larger of the ranks. Both ways alternate, so the machine is the same. Before it is
 * timed, one call of each shape is compared with norm_reference.h.
 *
 * bench_fused [--early-trigger] (not on one GPU: what begins early could keep the other rank
 * out) */
#include "gpu_ranks.h"
#include "norm_reference.h"

#include <math.h>

#define CALLS     100
#define ROUNDS    21
#define MAX_ROWS  4096
#define MAX_BYTES ((size_t)MAX_ROWS * 7168 * 2)
#define CHECKED   ((size_t)64 * 7168) /* elements */
#define Q_WIDTH   3072
#define K_WIDTH   512
#define COLUMNS   4096
#define WEIGHTS   ((size_t)256 << 20) /* bytes */

typedef struct figures {
    double us[2][2]; /* [rank][fused, separate] */
    norm_data data;
    unsigned char x[2][2 * CHECKED], residual[2 * CHECKED], weight[2 * 7168], r[2 * CHECKED],
        y[2 * CHECKED];
    uint8_t quantised[CHECKED];
    float scales[64];
} figures;

static figures *shared;

/* As the kernels have it. */
typedef struct separate_args {
    unsigned long long x, residual, weight, y, q, k, q_weight, k_weight, sums;
    unsigned rows, units, q_units, k_units, stride_units, loads_ahead;
    float eps, inverse_q, inverse_k;
} separate_args;

typedef enum separate {
    ADD_NORM,
    QK_SQUARES,
    QK_APPLY,
    MATVEC,
    SEPARATES
} separate;

typedef struct bench {
    gpu_rank *rank;
    oh_function functions[SEPARATES];
    unsigned char *x, *sum, *residual, *weight, *y, *sums, *weights;
    size_t rows, hidden; /* of tp_qknorm: tokens, 0 */
    size_t turn;         /* matrix products so far */
    bool loads_ahead;
} bench;

static void load(bench *b) {
    static const char *const names[SEPARATES] = {"separate_add_norm", "separate_qk_squares",
                                                 "separate_qk_apply", "separate_matvec"};
    oh_cu_library library = NULL;
    size_t bytes;
    if (oh_cu.cuLibraryLoadData(&library, gpu_image("separate_kernels", &bytes), NULL, NULL, 0,
                                NULL, NULL, 0))
        FAIL("separate_kernels.fatbin cannot be loaded");
    oh_cu_context popped;
    CHECK(!oh_cu.cuCtxPushCurrent_v2(b->rank->primary));
    for (int i = 0; i < SEPARATES; i++) {
        oh_cu_kernel kernel = NULL;
        oh_cu_function function = NULL;
        if (oh_cu.cuLibraryGetKernel(&kernel, library, names[i]) ||
            oh_cu.cuKernelGetFunction(&function, kernel) || oh_cu.cuFuncLoad(function))
            FAIL("%s cannot be loaded", names[i]);
        b->functions[i].handle = function;
        b->functions[i].pdl = true;
    }
    CHECK(!oh_cu.cuCtxPopCurrent_v2(&popped));
}

static void launch(bench *b, separate which, const separate_args *args, uint32_t blocks,
                   uint32_t threads) {
    oh_device *device = b->rank->context->device;
    const oh_launch l = {&b->functions[which], args, sizeof *args, blocks, threads,
                         b->rank->stream};
    CHECK_OK(device->ops->launch(device, &l));
}

/* ---- the work -------------------------------------------------------------------------------- */

static void fused_norm(bench *b) {
    onehop_norm n = ONEHOP_CONFIG_INIT(onehop_norm);
    n.x = b->x;
    n.residual_in = n.residual_out = b->residual;
    n.weight = b->weight;
    n.normed = b->y;
    n.rows = b->rows;
    n.hidden = b->hidden;
    n.dtype = ONEHOP_BFLOAT16;
    n.eps = 1e-6f;
    CHECK_OK(onehop_all_reduce_norm(b->rank->context, &n, NULL, b->rank->stream));
}

static void separate_norm(bench *b) {
    separate_args a;
    const uint32_t units = (uint32_t)b->hidden / 8;
    memset(&a, 0, sizeof a);
    a.x = (uintptr_t)b->sum;
    a.residual = (uintptr_t)b->residual;
    a.weight = (uintptr_t)b->weight;
    a.y = (uintptr_t)b->y;
    a.rows = (uint32_t)b->rows;
    a.units = units;
    a.eps = 1e-6f;
    CHECK_OK(onehop_all_reduce(b->rank->context, b->x, b->sum, b->rows * b->hidden, ONEHOP_BFLOAT16,
                               ONEHOP_SUM, NULL, b->rank->stream));
    launch(b, ADD_NORM, &a, (uint32_t)b->rows, (units + 31) / 32 * 32);
}

static void fused_qknorm(bench *b) {
    onehop_qknorm n = ONEHOP_CONFIG_INIT(onehop_qknorm);
    n.q = b->x;
    n.k = b->x + 2 * Q_WIDTH;
    n.q_weight = b->weight;
    n.k_weight = b->weight + 2 * Q_WIDTH;
    n.tokens = b->rows;
    n.q_width = Q_WIDTH;
    n.k_width = K_WIDTH;
    n.q_stride = n.k_stride = Q_WIDTH + K_WIDTH;
    n.dtype = ONEHOP_BFLOAT16;
    n.eps = 1e-6f;
    CHECK_OK(onehop_tp_qknorm(b->rank->context, &n, NULL, b->rank->stream));
}

static void separate_qknorm(bench *b) {
    separate_args a;
    const uint32_t threads = (Q_WIDTH + K_WIDTH) / 8;
    memset(&a, 0, sizeof a);
    a.q = (uintptr_t)b->x;
    a.k = (uintptr_t)b->x + 2 * Q_WIDTH;
    a.q_weight = (uintptr_t)b->weight;
    a.k_weight = (uintptr_t)b->weight + 2 * Q_WIDTH;
    a.sums = (uintptr_t)b->sums;
    a.q_units = Q_WIDTH / 8;
    a.k_units = K_WIDTH / 8;
    a.stride_units = a.q_units + a.k_units;
    a.eps = 1e-6f;
    a.inverse_q = 0.5f / Q_WIDTH;
    a.inverse_k = 0.5f / K_WIDTH;
    launch(b, QK_SQUARES, &a, (uint32_t)b->rows, threads);
    CHECK_OK(onehop_all_reduce(b->rank->context, b->sums, b->sums, 2 * b->rows, ONEHOP_FLOAT32,
                               ONEHOP_SUM, NULL, b->rank->stream));
    launch(b, QK_APPLY, &a, (uint32_t)b->rows, threads);
}

static void product(bench *b, bool prefetches) {
    const size_t bytes = b->rows * COLUMNS * 2;
    unsigned char *weight = b->weights + b->turn++ % (WEIGHTS / bytes) * bytes;
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    separate_args a;
    memset(&a, 0, sizeof a);
    a.x = (uintptr_t)b->sum;
    a.weight = (uintptr_t)weight;
    a.y = (uintptr_t)b->y;
    a.units = COLUMNS / 8;
    a.loads_ahead = b->loads_ahead;
    if (prefetches) {
        call.prefetch = weight;
        call.prefetch_bytes = bytes;
    }
    CHECK_OK(onehop_all_reduce(b->rank->context, b->x, b->sum, COLUMNS, ONEHOP_BFLOAT16, ONEHOP_SUM,
                               &call, b->rank->stream));
    launch(b, MATVEC, &a, (uint32_t)b->rows, 128);
}

static void prefetched_product(bench *b) {
    product(b, true);
}
static void plain_product(bench *b) {
    product(b, false);
}

/* ---- timing ---------------------------------------------------------------------------------- */

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double time_graph(bench *b, const gpu_graph *graph) {
    gpu_barrier(b->rank);
    const double start = seconds_now();
    gpu_graph_launch(b->rank, graph, b->rank->stream);
    while (!gpu_stream_idle(b->rank, b->rank->stream)) {
    }
    return (seconds_now() - start) * 1e6 / CALLS;
}

static void compare(bench *b, const char *what, void (*const ways[2])(bench *)) {
    gpu_rank *r = b->rank;
    gpu_graph graphs[2];
    double us[2][ROUNDS];
    for (int way = 0; way < 2; way++) {
        gpu_capture_begin(&r, 1);
        for (int i = 0; i < CALLS; i++) ways[way](b);
        gpu_capture_end(&r, 1, &graphs[way]);
    }
    for (int round = -3; round < ROUNDS; round++)
        for (int way = 0; way < 2; way++) {
            const double t = time_graph(b, &graphs[way]);
            if (round >= 0) us[way][round] = t;
        }
    CHECK_OK(onehop_synchronize(r->context, r->stream));
    for (int way = 0; way < 2; way++) {
        qsort(us[way], ROUNDS, sizeof(double), ascending);
        shared->us[r->rank][way] = us[way][ROUNDS / 2];
    }
    gpu_barrier(r);
    if (r->rank == 0) {
        const double fused =
            shared->us[0][0] > shared->us[1][0] ? shared->us[0][0] : shared->us[1][0];
        const double apart =
            shared->us[0][1] > shared->us[1][1] ? shared->us[0][1] : shared->us[1][1];
        printf("%-7s %6zu %6zu %9.2f %9.2f %7.2f\n", what, b->hidden, b->rows, fused, apart,
               apart / fused);
    }
    gpu_barrier(r);
    for (int way = 0; way < 2; way++) gpu_graph_free(r, &graphs[way]);
}

static float bf16_value(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The sum is twice the input, and the product that of equal numbers. */
static void check_product(bench *b) {
    uint16_t sum[COLUMNS], y[MAX_ROWS];
    const float expected = COLUMNS * bf16_value(0x3cbc) * bf16_value(0x3838);
    gpu_read(b->rank, sum, b->sum, sizeof sum);
    gpu_read(b->rank, y, b->y, 2 * b->rows);
    for (size_t i = 0; i < COLUMNS; i++)
        if (sum[i] != 0x3cbc) FAIL("sum %zu is 0x%x", i, sum[i]);
    for (size_t i = 0; i < b->rows; i++)
        if (fabsf(bf16_value(y[i]) - expected) > expected / 128)
            FAIL("product %zu is %g, expected %g", i, (double)bf16_value(y[i]), (double)expected);
}

static void products(bench *b, size_t max_rows) {
    static void (*const ways[2])(bench *) = {prefetched_product, plain_product};
    gpu_fill(b->rank, b->x, 0x3c, 2 * COLUMNS);
    for (int ahead = 0; ahead < 2; ahead++)
        for (b->rows = 256; b->rows <= max_rows; b->rows *= 2) {
            b->loads_ahead = ahead;
            compare(b, ahead ? "ahead" : "prefetch", ways);
            check_product(b);
        }
}

/* One fused call against the reference. */
static void check_norm(bench *b) {
    gpu_rank *r = b->rank;
    const size_t count = b->rows * b->hidden;
    norm_data *d = &shared->data;
    unsigned char *found = malloc(2 * count);
    CHECK(found != NULL);
    input_fill(shared->x[r->rank], INPUT_REAL, 1, r->rank, 0, count, ONEHOP_BFLOAT16);
    if (r->rank == 0) {
        input_fill(shared->residual, INPUT_REAL, 1, 20, 0, count, ONEHOP_BFLOAT16);
        input_fill(shared->weight, INPUT_REAL, 1, 21, 0, b->hidden, ONEHOP_BFLOAT16);
    }
    gpu_barrier(r);
    if (r->rank == 0) {
        *d = (norm_data){.dtype = ONEHOP_BFLOAT16,
                         .rows = b->rows,
                         .hidden = b->hidden,
                         .world = 2,
                         .x = {shared->x[0], shared->x[1]},
                         .residual = shared->residual,
                         .weight = shared->weight,
                         .eps = 1e-6f,
                         .r = shared->r,
                         .y = shared->y,
                         .quantised = shared->quantised,
                         .scales = shared->scales};
        norm_reference(d, "bench_fused");
    }
    gpu_write(r, b->x, shared->x[r->rank], 2 * count);
    gpu_write(r, b->residual, shared->residual, 2 * count);
    gpu_write(r, b->weight, shared->weight, 2 * b->hidden);
    gpu_barrier(r);
    fused_norm(b);
    CHECK_OK(onehop_synchronize(r->context, r->stream));
    gpu_read(r, found, b->y, 2 * count);
    CHECK_BYTES(shared->y, found, 2 * count);
    gpu_read(r, found, b->residual, 2 * count);
    CHECK_BYTES(shared->r, found, 2 * count);
    free(found);
}

static void all(gpu_rank *ranks, int here, void *argument) {
    static void (*const norm[2])(bench *) = {fused_norm, separate_norm};
    static void (*const qknorm[2])(bench *) = {fused_qknorm, separate_qknorm};
    static const size_t hiddens[] = {4096, 7168},
                        rows[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096};
    const size_t max_rows = *(const int *)argument > 1 ? MAX_ROWS : 16;
    gpu_rank *r = &ranks[0];
    bench b = {.rank = r,
               .x = gpu_alloc(r, MAX_BYTES),
               .sum = gpu_alloc(r, MAX_BYTES),
               .residual = gpu_alloc(r, MAX_BYTES),
               .weight = gpu_alloc(r, 2 * 7168),
               .y = gpu_alloc(r, MAX_BYTES),
               .sums = gpu_alloc(r, 8 * MAX_ROWS),
               .weights = gpu_alloc(r, WEIGHTS)};
    (void)here;
    load(&b);
    /* 1.0 and 0.0078 everywhere else: nothing is timed on zeros. */
    gpu_fill(r, b.x, 0x3c, MAX_BYTES);
    gpu_fill(r, b.residual, 0x3c, MAX_BYTES);
    gpu_fill(r, b.weight, 0x3f, 2 * 7168);
    gpu_fill(r, b.weights, 0x38, WEIGHTS);
    if (r->rank == 0)
        printf("%-7s %6s %6s %9s %9s %7s\n", "what", "hidden", "rows", "fused us", "apart us",
               "ratio");
    for (size_t h = 0; h < 2; h++)
        for (size_t i = 0; i < sizeof rows / sizeof *rows && rows[i] <= max_rows; i++) {
            b.hidden = hiddens[h];
            b.rows = rows[i];
            if (b.rows <= 64) check_norm(&b);
            compare(&b, "norm", norm);
        }
    b.hidden = 0;
    for (size_t i = 0; i < sizeof rows / sizeof *rows && rows[i] <= max_rows; i++) {
        b.rows = rows[i];
        compare(&b, "qknorm", qknorm);
    }
    b.hidden = COLUMNS;
    products(&b, MAX_ROWS);
    gpu_barrier(r);
    unsigned char *memory[] = {b.x, b.sum, b.residual, b.weight, b.y, b.sums, b.weights};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) gpu_free(r, memory[i]);
}

int main(int argc, char **argv) {
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    int gpus = gpu_main(300, 1) > 1 ? 2 : 1;
    const gpu_setup setup = {.layout = gpus > 1 ? GPU_PROCESSES : GPU_THREADS,
                             .world = 2,
                             .gpus = gpus,
                             .config = &config};
    if (argc > 1 && !strcmp(argv[1], "--early-trigger") && gpus > 1)
        config.flags = ONEHOP_FLAG_EARLY_TRIGGER;
    printf("2 ranks on %d GPU%s%s\n", gpus, gpus > 1 ? "s" : "",
           config.flags ? ", early trigger" : "");
    fflush(stdout);
    shared = shared_memory(sizeof *shared);
    gpu_run(&setup, all, &gpus);
    return 0;
}
