/* Property: on GPUs, kernels built at run time by onehop_prepare make the same bits as those that
 * they replace, by every algorithm, and expressions of the caller's make the bits of a reference.
 *
 * The first build takes seconds; a second process finds the kernels in the cache within 50 ms.
 * Damaged and foreign files of the cache are built anew. If one rank may not build, all ranks keep
 * the old kernels. Expressions: types, algorithms, eager and captured, in place, NaN; errors in
 * them; ranks that differ in a scalar. */
/* labels: timeout=240 */
#include "gpu_ranks.h"
#include "reference.h"

#include "jit/nvrtc.h"

#include <glob.h>
#include <sys/stat.h>

#define MAX       ((size_t)200003) /* elements */
#define ROW       1000
#define GPU_SCALE 0.37f

static const onehop_dtype dtypes[] = {ONEHOP_FLOAT32, ONEHOP_FLOAT16, ONEHOP_BFLOAT16};
static const size_t counts[] = {1, 8, 1031, 16384, MAX};

typedef struct buffers {
    gpu_rank *rank;
    unsigned char *in, *out;     /* on the GPU */
    unsigned char *want, *found; /* on the host */
    uint64_t seed;
    size_t compared;
} buffers;

static buffers buffers_make(gpu_rank *r) {
    buffers b = {
        r, gpu_alloc(r, MAX * 4), gpu_alloc(r, MAX * 4), malloc(MAX * 4), malloc(MAX * 4), 1, 0};
    CHECK(b.want && b.found);
    return b;
}

static void buffers_free(buffers *b) {
    gpu_barrier(b->rank);
    gpu_free(b->rank, b->in);
    gpu_free(b->rank, b->out);
    free(b->want);
    free(b->found);
}

/* ---- with an expression, or without ---------------------------------------------------------- */

typedef struct custom {
    onehop_expression *op;
    onehop_expression_values values;
    void *bias;
    bool negates; /* "-x", else "x * scale + bias[col]" */
} custom;

/* As the device computes: no multiplication is contracted with an addition. */
static void expected(buffers *b, const custom *c, size_t count, onehop_dtype dtype) {
    reference_of_inputs(b->want, INPUT_MIXED, b->seed, b->rank->world, 0, count, dtype);
    for (size_t i = 0; c && i < count; i++) {
        float sum = 0, bias, result;
        uint32_t bits;
        for (int r = 0; r < b->rank->world; r++) {
            float term;
            bits = reference_widen(input_element(INPUT_MIXED, b->seed, r, i, dtype), dtype);
            memcpy(&term, &bits, sizeof term);
            sum = r ? sum + term : term;
        }
        bits = reference_widen(input_element(INPUT_REAL, 77, 0, i % ROW, dtype), dtype);
        memcpy(&bias, &bits, sizeof bias);
        const float product = sum * GPU_SCALE;
        result = c->negates ? -sum : product + bias;
        memcpy(&bits, &result, sizeof bits);
        bits = reference_round(bits, dtype);
        if (dtype == ONEHOP_FLOAT32)
            memcpy(b->want + 4 * i, &bits, 4);
        else
            memcpy(b->want + 2 * i, &(uint16_t){(uint16_t)bits}, 2);
    }
}

static onehop_result make_call(buffers *b, const custom *c, onehop_algorithm algorithm,
                               const void *in, void *out, size_t count, onehop_dtype dtype) {
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    call.algorithm = algorithm;
    if (c)
        return onehop_all_reduce_expression(b->rank->context, in, out, count, c->op, &c->values,
                                            &call, b->rank->stream);
    return onehop_all_reduce(b->rank->context, in, out, count, dtype, ONEHOP_SUM, &call,
                             b->rank->stream);
}

static void one(buffers *b, const custom *c, onehop_algorithm algorithm, size_t count,
                onehop_dtype dtype, bool captured) {
    const size_t size = reference_element_bytes(dtype);
    const size_t off = b->seed % 3 ? 0 : size * (1 + (size_t)b->rank->rank % 3);
    gpu_rank *r = b->rank;
    gpu_graph graph;
    char what[160];
    if (count + 8 > MAX) count -= 8;
    void *in = b->in + off, *out = b->seed % 2 ? in : b->out + off;
    snprintf(what, sizeof what, "%s, %s, %zu elements, rank %d of %d, %s%s%s",
             onehop_algorithm_name(algorithm), onehop_dtype_name(dtype), count, r->rank, r->world,
             c ? c->negates ? "-x" : "x * scale + bias" : "sum", captured ? ", captured" : "",
             in == out ? ", in place" : "");
    input_fill(b->found, INPUT_MIXED, b->seed, r->rank, 0, count, dtype);
    gpu_write(r, in, b->found, count * size);
    gpu_barrier(r);
    if (captured) {
        gpu_capture_begin(&r, 1);
        CHECK_OK(make_call(b, c, algorithm, in, out, count, dtype));
        gpu_capture_end(&r, 1, &graph);
        gpu_graph_launch(r, &graph, r->stream);
    } else {
        CHECK_OK(make_call(b, c, algorithm, in, out, count, dtype));
    }
    if (onehop_synchronize(r->context, r->stream)) FAIL("%s: %s", what, onehop_last_error());
    gpu_barrier(r);
    if (captured) gpu_graph_free(r, &graph);
    expected(b, c, count, dtype);
    gpu_read(r, b->found, out, count * size);
    expect_equal(b->want, b->found, count, dtype, what);
    b->compared++;
    b->seed++;
}

static void every_algorithm(buffers *b, const custom *c, onehop_dtype dtype) {
    for (int a = ONEHOP_1SHOT_PUSH; a <= ONEHOP_2SHOT_PULL; a++)
        for (size_t i = 0; i < OH_LENGTH(counts); i++)
            one(b, c, (onehop_algorithm)a, counts[i], dtype, i % 2);
}

/* ---- preparing ------------------------------------------------------------------------------- */

static double prepare(gpu_rank *r, uint32_t types) {
    onehop_prepare_config config = ONEHOP_CONFIG_INIT(onehop_prepare_config);
    config.dtypes = types;
    config.flags = ONEHOP_PREPARE_ALWAYS;
    gpu_barrier(r);
    const double start = seconds_now();
    CHECK_OK(onehop_prepare(r->context, &config));
    return seconds_now() - start;
}

static const void *handle_of(const gpu_rank *r, onehop_algorithm algorithm, onehop_dtype dtype) {
    const onehop_comm *comm = r->context->comm;
    return comm->functions[comm->dispatch.kernels[OH_PLAIN][algorithm][dtype]].handle;
}

/* The kernels are other ones, the bits the same. */
static void preparing(gpu_rank *ranks, int here, void *argument) {
    const double *limit = argument;
    gpu_rank *r = &ranks[0];
    buffers b = buffers_make(r);
    const void *before = handle_of(r, ONEHOP_1SHOT_PUSH, ONEHOP_BFLOAT16);
    CHECK(here == 1);
    CHECK_OK(onehop_prepare(r->context, NULL)); /* nothing to do where the image has exact code */
    every_algorithm(&b, NULL, ONEHOP_BFLOAT16);
    const double seconds = prepare(r, 1u << ONEHOP_BFLOAT16);
    CHECK(handle_of(r, ONEHOP_1SHOT_PUSH, ONEHOP_BFLOAT16) != before);
    if (r->rank == 0)
        printf("  %d ranks: kernels of one type in %.3f s, at most %.2f s\n", r->world, seconds,
               *limit);
    if (seconds > *limit) FAIL("prepare took %.3f s, expected at most %.2f s", seconds, *limit);
    every_algorithm(&b, NULL, ONEHOP_BFLOAT16);
    const double again = prepare(r, 1u << ONEHOP_BFLOAT16);
    if (again > 0.05) FAIL("prepare in the same process took %.3f s", again);
    buffers_free(&b);
}

static void preparing_all_types(gpu_rank *ranks, int here, void *argument) {
    gpu_rank *r = &ranks[0];
    buffers b = buffers_make(r);
    (void)here, (void)argument;
    const double seconds = prepare(r, 0);
    if (r->rank == 0) printf("  %d ranks: kernels of all types in %.3f s\n", r->world, seconds);
    for (int d = 0; d < 3; d++) every_algorithm(&b, NULL, dtypes[d]);
    buffers_free(&b);
}

/* ONEHOP_JIT is off. */
static void refused(gpu_rank *ranks, int here, void *argument) {
    onehop_prepare_config config = ONEHOP_CONFIG_INIT(onehop_prepare_config);
    gpu_rank *r = &ranks[0];
    buffers b = buffers_make(r);
    (void)here, (void)argument;
    config.flags = ONEHOP_PREPARE_ALWAYS;
    CHECK_RESULT(ONEHOP_ERR_UNSUPPORTED, onehop_prepare(r->context, &config));
    CHECK_CONTAINS("ONEHOP_JIT is off", onehop_last_error());
    every_algorithm(&b, NULL, ONEHOP_FLOAT16);
    buffers_free(&b);
}

static void in_one_thread(gpu_rank *ranks, int here, void *argument) {
    onehop_prepare_config config = ONEHOP_CONFIG_INIT(onehop_prepare_config);
    onehop_expression_config op = ONEHOP_CONFIG_INIT(onehop_expression_config);
    onehop_context *contexts[ONEHOP_MAX_RANKS];
    onehop_expression *ops[ONEHOP_MAX_RANKS];
    float *in[ONEHOP_MAX_RANKS], sum = 0;
    (void)argument;
    config.dtypes = 1u << ONEHOP_FLOAT32;
    config.flags = ONEHOP_PREPARE_ALWAYS;
    op.expression = "x + (float)i";
    op.dtype = ONEHOP_FLOAT32;
    for (int r = 0; r < here; r++) {
        const float two[2] = {(float)(r + 1), (float)(2 * r)};
        contexts[r] = ranks[r].context;
        in[r] = gpu_alloc(&ranks[r], sizeof two);
        gpu_write(&ranks[r], in[r], two, sizeof two);
        sum += (float)(2 * r);
    }
    CHECK_OK(onehop_prepare_all(contexts, here, &config));
    CHECK_OK(onehop_expression_create_all(contexts, here, &op, ops));
    for (int r = 0; r < here; r++)
        CHECK_OK(onehop_all_reduce_expression(contexts[r], in[r], in[r], 2, ops[r], NULL, NULL,
                                              ranks[r].stream));
    for (int r = 0; r < here; r++) {
        float found[2];
        CHECK_OK(onehop_synchronize(contexts[r], ranks[r].stream));
        gpu_read(&ranks[r], found, in[r], sizeof found);
        CHECK(found[1] == sum + 1.0f);
    }
    for (int r = 0; r < here; r++) {
        onehop_expression_destroy(ops[r]);
        gpu_free(&ranks[r], in[r]);
    }
}

/* ---- the cache ------------------------------------------------------------------------------- */

static char root[] = "/tmp/onehop-gpu-jit-XXXXXX";

/* Each file of the cache in its way. Returns how many there are. */
static int damage(void) {
    char pattern[80];
    glob_t found;
    snprintf(pattern, sizeof pattern, "%s/*", root);
    CHECK_INT(0, glob(pattern, 0, NULL, &found));
    for (size_t i = 0; i < found.gl_pathc; i++) {
        const char *path = found.gl_pathv[i];
        struct stat s;
        CHECK_INT(0, stat(path, &s));
        if (i % 4 == 0) CHECK_INT(0, truncate(path, s.st_size / 2));
        if (i % 4 == 1) {
            FILE *f = fopen(path, "r+b");
            CHECK(f != NULL);
            fseek(f, s.st_size / 2, SEEK_SET);
            fputs("no code", f);
            fclose(f);
        }
        if (i % 4 == 2) CHECK_INT(0, chmod(path, 0666));
        if (i % 4 == 3) {
            CHECK_INT(0, unlink(path));
            CHECK_INT(0, symlink("/dev/null", path));
        }
    }
    const int count = (int)found.gl_pathc;
    globfree(&found);
    return count;
}

/* ---- expressions ----------------------------------------------------------------------------- */

static custom custom_make(buffers *b, onehop_dtype dtype, bool negates) {
    custom c = {NULL, ONEHOP_CONFIG_INIT(onehop_expression_values), NULL, negates};
    onehop_expression_config op = ONEHOP_CONFIG_INIT(onehop_expression_config);
    op.expression = negates ? "-x" : "x * scale\n + bias[col]";
    op.dtype = dtype;
    op.row_length = ROW;
    if (!negates) {
        op.scalars[3] = "scale";
        op.arrays[1] = "bias";
        op.array_dtypes[1] = dtype;
        c.values.scalars[3] = GPU_SCALE;
        c.values.arrays[1] = c.bias = gpu_alloc(b->rank, ROW * 4);
        input_fill(b->found, INPUT_REAL, 77, 0, 0, ROW, dtype);
        gpu_write(b->rank, c.bias, b->found, ROW * reference_element_bytes(dtype));
    }
    CHECK_OK(onehop_expression_create(b->rank->context, &op, &c.op));
    return c;
}

static void expressions(gpu_rank *ranks, int here, void *argument) {
    gpu_rank *r = &ranks[0];
    buffers b = buffers_make(r);
    onehop_expression_config bad = ONEHOP_CONFIG_INIT(onehop_expression_config);
    onehop_expression *none = NULL;
    (void)here, (void)argument;
    for (int d = 0; d < 3; d++)
        for (int negates = 0; negates < 2; negates++) {
            custom c = custom_make(&b, dtypes[d], negates);
            every_algorithm(&b, &c, dtypes[d]);
            one(&b, &c, ONEHOP_ALGORITHM_AUTO, 4096, dtypes[d], false);
            gpu_barrier(r);
            onehop_expression_destroy(c.op);
            if (c.bias) gpu_free(r, c.bias);
            every_algorithm(&b, NULL, dtypes[d]);
        }
    bad.expression = "x *\n factor";
    bad.dtype = ONEHOP_BFLOAT16;
    CHECK_RESULT(ONEHOP_ERR_ARGUMENT, onehop_expression_create(r->context, &bad, &none));
    CHECK_CONTAINS("expression(2)", onehop_last_error());
    CHECK_CONTAINS("factor", onehop_last_error());
    if (r->rank == 0) printf("  %d ranks: %zu outputs with expressions\n", r->world, b.compared);
    buffers_free(&b);
}

static void scalars_differ(gpu_rank *ranks, int here, void *argument) {
    gpu_rank *r = &ranks[0];
    buffers b = buffers_make(r);
    custom c = custom_make(&b, ONEHOP_BFLOAT16, false);
    (void)here, (void)argument;
    gpu_barrier(r);
    c.values.scalars[3] = (float)(1 + r->rank);
    CHECK_OK(make_call(&b, &c, ONEHOP_1SHOT_PUSH, b.in, b.out, 1000, ONEHOP_BFLOAT16));
    gpu_expect_failure(r, ONEHOP_ERR_MISMATCH, 1, onehop_synchronize(r->context, r->stream),
                       "scalars differ");
    onehop_expression_destroy(c.op);
    gpu_free(r, c.bias);
    buffers_free(&b);
}

/* ---- all of it ------------------------------------------------------------------------------- */

static int gpus;

static void run(gpu_layout layout, int world, gpu_fn fn, void *argument, bool dies) {
    const gpu_setup setup = {
        .layout = layout, .world = world, .gpus = gpus > 1 ? 2 : 1, .dies = dies};
    gpu_run(&setup, fn, argument);
}

static void first_time(void *argument) {
    double limit = 5.0; /* 2.1 to 3.2 s were seen, by machine */
    (void)argument;
    run(GPU_THREADS, 2, preparing, &limit, false);
}

static void second_time(void *argument) {
    double limit = 0.05;
    (void)argument;
    run(GPU_THREADS, 2, preparing, &limit, false);
}

static void mended(void *argument) {
    double limit = 5.0; /* 2.1 to 3.2 s were seen, by machine */
    (void)argument;
    run(GPU_THREADS, 2, preparing, &limit, false);
}

static void the_rest(void *argument) {
    (void)argument;
    run(GPU_THREADS, 2, preparing_all_types, NULL, false);
    run(GPU_THREADS, 5, preparing_all_types, NULL, false);
    run(GPU_SINGLE, 2, in_one_thread, NULL, false);
    run(GPU_THREADS, 2, expressions, NULL, false);
    run(GPU_THREADS, 3, expressions, NULL, false);
    run(GPU_THREADS, 2, scalars_differ, NULL, true);
    setenv("ONEHOP_JIT", "off", 1);
    run(GPU_THREADS, 2, refused, NULL, false);
    unsetenv("ONEHOP_JIT");
}

int main(void) {
    uint32_t version;
    char command[80];
    gpus = gpu_main(220, 1);
    if (oh_nvrtc_open(&version)) {
        printf("SKIPPED: %s\n", onehop_last_error());
        return HARNESS_SKIP;
    }
    CHECK(mkdtemp(root) != NULL);
    setenv("ONEHOP_CACHE_DIR", root, 1);
    gpu_apart(first_time, NULL);
    gpu_apart(second_time, NULL);
    CHECK(damage() >= 4); /* each way of damage once at least */
    gpu_apart(mended, NULL);
    gpu_apart(second_time, NULL);
    if (gpu_for_processes()) run(GPU_PROCESSES, 2, preparing, &(double){0.05}, false);
    setenv("ONEHOP_CACHE_DIR", "/dev/null", 1); /* without a cache */
    gpu_apart(first_time, NULL);
    setenv("ONEHOP_CACHE_DIR", root, 1);
    gpu_apart(the_rest, NULL);
    snprintf(command, sizeof command, "rm -rf %s", root);
    return system(command) != 0;
}
