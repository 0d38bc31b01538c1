/* Fused norms against the same work done apart, on two GPUs, a process each, in graphs of many calls.
 *
 *   norm     onehop_all_reduce_norm            against onehop_all_reduce, then one kernel that adds the residual and
 *            norms; hidden 4096 and 7168, bfloat16
 *   qknorm   onehop_tp_qknorm, (6144, 1024)/2  against sums of squares, onehop_all_reduce of them, and a kernel that
 *            applies them
 *
 * The separate kernels (separate_kernels.cu) depend programmatically on the kernel before and load ahead what it does
 * not write. A time is that of a graph of CALLS calls, by CALLS: the median of ROUNDS, the larger of the ranks. Both ways
 * alternate, so the machine is the same. Before it is timed, one call of each shape is compared with norm_reference.h.
 *
 * bench_norm [--early-trigger] */
#include "gpu_ranks.h"
#include "norm_reference.h"

#define CALLS      100
#define ROUNDS     21
#define MOST_ROWS  4096
#define MOST_BYTES ((size_t)MOST_ROWS * 7168 * 2)
#define CHECKED    ((size_t)64 * 7168) /* elements */
#define Q_WIDTH    3072
#define K_WIDTH    512

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
    unsigned rows, units, q_units, k_units, stride_units;
    float eps, inverse_q, inverse_k;
} separate_args;

typedef enum separate {
    ADD_NORM,
    QK_SQUARES,
    QK_APPLY,
    SEPARATES
} separate;

typedef struct bench {
    gpu_rank *rank;
    oh_function functions[SEPARATES];
    unsigned char *x, *sum, *residual, *weight, *y, *sums;
    size_t rows, hidden; /* of tp_qknorm: tokens, 0 */
} bench;

static void load(bench *b) {
    static const char *const names[SEPARATES] = {"separate_add_norm", "separate_qk_squares",
                                                 "separate_qk_apply"};
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

/* ---- the work ------------------------------------------------------------------------------------ */

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
                               ONEHOP_SUM, b->rank->stream));
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
                               ONEHOP_SUM, b->rank->stream));
    launch(b, QK_APPLY, &a, (uint32_t)b->rows, threads);
}

/* ---- timing -------------------------------------------------------------------------------------- */

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
        norm_reference(d, "bench_norm");
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
    gpu_rank *r = &ranks[0];
    bench b = {r,
               {{0}},
               gpu_alloc(r, MOST_BYTES),
               gpu_alloc(r, MOST_BYTES),
               gpu_alloc(r, MOST_BYTES),
               gpu_alloc(r, 2 * 7168),
               gpu_alloc(r, MOST_BYTES),
               gpu_alloc(r, 8 * MOST_ROWS),
               0,
               0};
    (void)here, (void)argument;
    load(&b);
    /* 1.0 and 0.0078 everywhere else: nothing is timed on zeros. */
    gpu_fill(r, b.x, 0x3c, MOST_BYTES);
    gpu_fill(r, b.residual, 0x3c, MOST_BYTES);
    gpu_fill(r, b.weight, 0x3f, 2 * 7168);
    if (r->rank == 0)
        printf("%-7s %6s %6s %9s %9s %7s\n", "what", "hidden", "rows", "fused us", "apart us",
               "ratio");
    for (size_t h = 0; h < 2; h++)
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
            b.hidden = hiddens[h];
            b.rows = rows[i];
            if (b.rows <= 64) check_norm(&b);
            compare(&b, "norm", norm);
        }
    b.hidden = 0;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        b.rows = rows[i];
        compare(&b, "qknorm", qknorm);
    }
    gpu_barrier(r);
    unsigned char *memory[] = {b.x, b.sum, b.residual, b.weight, b.y, b.sums};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) gpu_free(r, memory[i]);
}

int main(int argc, char **argv) {
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    const gpu_setup setup = {.layout = GPU_PROCESSES, .world = 2, .gpus = 2, .config = &config};
    gpu_main(300, 2);
    if (argc > 1 && !strcmp(argv[1], "--early-trigger")) config.flags = ONEHOP_FLAG_EARLY_TRIGGER;
    shared = shared_memory(sizeof *shared);
    gpu_run(&setup, all, NULL);
    return 0;
}
