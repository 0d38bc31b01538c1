/* Property: programs that are wrong or give up end in an error on all ranks, on GPUs. Numbers are
 * those of docs/cases.md.
 *   C13  ranks disagree on count, type, grid, or order of calls: the same error on all ranks,
 *        naming the same rank
 *   C26  a rank that never calls: timeout on all, naming it; abort from another thread ends all
 *        calls in 100 ms */
/* labels: timeout=180 */
#include "gpu_ranks.h"

static int gpus_found;

enum {
    COUNT = 2000,
    BYTES = 16384
};

typedef struct scene {
    const char *what;
    int kind;
    int odd_one;     /* the rank that does something else */
    int aborter;     /* whose context is aborted */
    double began;    /* when the abort was asked for */
    double worst_ms; /* until a rank returned; atomic by the lock */
} scene;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

typedef enum kind {
    OTHER_COUNT,
    OTHER_COUNT_LARGE,
    OTHER_TYPE,
    OTHER_BLOCKS,
    OTHER_THREADS,
    OTHER_ORDER,
    KINDS
} kind;
static const char *const kind_names[KINDS] = {"count",  "count and chunks", "type, same bytes",
                                              "blocks", "threads",          "order"};

/* ---- C13 ------------------------------------------------------------------------------------- */

static onehop_result one_call(gpu_rank *r, void *in, void *out, size_t count, onehop_dtype dtype,
                              uint32_t blocks, uint32_t threads) {
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    call.blocks = blocks;
    call.threads = threads;
    return onehop_all_reduce(r->context, in, out, count, dtype, ONEHOP_SUM, &call, r->stream);
}

/* The calls on which they differ. A later one may be refused, if the error is known by then. */
static onehop_result disagree(gpu_rank *r, const scene *s, void *in, void *out) {
    const bool odd = r->rank == s->odd_one;
    const onehop_dtype dtype = odd && s->kind == OTHER_TYPE ? ONEHOP_FLOAT16 : ONEHOP_BFLOAT16;
    size_t count = COUNT;
    if (odd && s->kind == OTHER_COUNT) count = COUNT + 1;
    if (odd && s->kind == OTHER_COUNT_LARGE) count = 4 * COUNT;
    if (s->kind == OTHER_ORDER) count = odd ? COUNT / 2 : COUNT;
    const uint32_t blocks = odd && s->kind == OTHER_BLOCKS ? 4 : 3,
                   threads = odd && s->kind == OTHER_THREADS ? 128 : 256;
    const onehop_result result = one_call(r, in, out, count, dtype, blocks, threads);
    if (result || s->kind != OTHER_ORDER) return result;
    return one_call(r, in, out, odd ? COUNT : COUNT / 2, dtype, blocks, threads);
}

static void mismatch(gpu_rank *ranks, int here, void *argument) {
    scene *s = argument;
    const int culprit = s->odd_one ? s->odd_one : 1; /* the lowest that differs from rank 0 */
    void *in[ONEHOP_MAX_RANKS], *out[ONEHOP_MAX_RANKS];
    for (int i = 0; i < here; i++) {
        in[i] = gpu_alloc(&ranks[i], BYTES);
        out[i] = gpu_alloc(&ranks[i], BYTES);
        gpu_fill(&ranks[i], in[i], 0, BYTES);
    }
    gpu_barrier(&ranks[0]);
    for (int n = 0; n < 3; n++)
        for (int i = 0; i < here; i++)
            CHECK_OK(one_call(&ranks[i], in[i], out[i], COUNT, ONEHOP_BFLOAT16, 3, 256));
    for (int i = 0; i < here; i++) {
        const onehop_result result = disagree(&ranks[i], s, in[i], out[i]);
        if (result && result != ONEHOP_ERR_MISMATCH) FAIL("C13: %s", onehop_last_error());
    }
    for (int i = 0; i < here; i++) {
        const onehop_result result = onehop_synchronize(ranks[i].context, ranks[i].stream);
        gpu_expect_failure(&ranks[i], ONEHOP_ERR_MISMATCH, culprit, result, s->what);
        CHECK_RESULT(ONEHOP_ERR_MISMATCH,
                     one_call(&ranks[i], in[i], out[i], COUNT, ONEHOP_BFLOAT16, 3, 256));
    }
    gpu_barrier(&ranks[0]);
    for (int i = 0; i < here; i++) {
        gpu_free(&ranks[i], in[i]);
        gpu_free(&ranks[i], out[i]);
    }
}

static void run(scene *s, gpu_layout layout, int world, int gpus, uint32_t timeout_ms, gpu_fn fn) {
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    const gpu_setup setup = {
        .layout = layout, .world = world, .gpus = gpus, .config = &config, .dies = true};
    config.push_bytes = 8192; /* COUNT in one piece, four times as much in chunks */
    config.pull_bytes = 4096;
    config.timeout_ms = timeout_ms;
    gpu_run(&setup, fn, s);
}

static void all_mismatches(gpu_layout layout, int world, int gpus) {
    char what[120];
    const double start = seconds_now();
    for (int k = 0; k < KINDS; k++)
        for (int odd = 0; odd < world; odd++) {
            scene s = {.what = what, .kind = k, .odd_one = odd};
            if (layout == GPU_PROCESSES && k % 2)
                continue; /* a process per rank takes its time to start */
            snprintf(what, sizeof what, "C13, rank %d of %d differs in %s", odd, world,
                     kind_names[k]);
            run(&s, layout, world, gpus, 3000, mismatch);
        }
    printf("C13, %s, world size %d on %d GPU%s: %.1f s\n",
           layout == GPU_THREADS  ? "threads"
           : layout == GPU_SINGLE ? "one thread for all"
                                  : "process per rank",
           world, gpus, gpus > 1 ? "s" : "", seconds_now() - start);
}

/* ---- C26 ------------------------------------------------------------------------------------- */

/* All ranks meet in good calls, then one does not make the next. Returns the result of waiting for
 * it. */
static void good_calls(gpu_rank *r, void *memory) {
    gpu_fill(r, memory, 0, 2 * BYTES);
    gpu_barrier(r);
    for (int i = 0; i < 5; i++)
        CHECK_OK(one_call(r, memory, (char *)memory + BYTES, COUNT, ONEHOP_BFLOAT16, 0, 0));
    CHECK_OK(onehop_synchronize(r->context, r->stream));
    gpu_barrier(r);
}

static void never_calls(gpu_rank *ranks, int here, void *argument) {
    scene *s = argument;
    gpu_rank *r = &ranks[0];
    void *memory = gpu_alloc(r, 2 * BYTES);
    onehop_result result;
    (void)here;
    good_calls(r, memory);
    const double start = seconds_now();
    if (r->rank != s->odd_one) {
        CHECK_OK(one_call(r, memory, (char *)memory + BYTES, COUNT, ONEHOP_BFLOAT16, 0, 0));
        result = onehop_synchronize(r->context, r->stream);
        const double took = seconds_now() - start;
        if (took < 0.8 || took > 1.6)
            FAIL("%s: rank %d gave up after %.2f s, deadline 1 s", s->what, r->rank, took);
        gpu_expect_failure(r, ONEHOP_ERR_TIMEOUT, s->odd_one, result, s->what);
    }
    gpu_barrier(r);
    if (r->rank == s->odd_one) {
        result = onehop_status(r->context, NULL);
        gpu_expect_failure(r, ONEHOP_ERR_TIMEOUT, s->odd_one, result, s->what);
        CHECK_RESULT(ONEHOP_ERR_TIMEOUT,
                     one_call(r, memory, (char *)memory + BYTES, COUNT, ONEHOP_BFLOAT16, 0, 0));
    }
    gpu_barrier(r);
    gpu_free(r, memory);
}

static void *abort_later(void *argument) {
    gpu_rank *r = ((void **)argument)[0];
    scene *s = ((void **)argument)[1];
    sleep_ms(300);
    pthread_mutex_lock(&lock);
    s->began = seconds_now();
    pthread_mutex_unlock(&lock);
    CHECK_OK(onehop_abort(r->context));
    return NULL;
}

static void aborted(gpu_rank *ranks, int here, void *argument) {
    scene *s = argument;
    gpu_rank *r = &ranks[0];
    void *memory = gpu_alloc(r, 2 * BYTES), *both[2] = {r, s};
    pthread_t thread;
    (void)here;
    good_calls(r, memory);
    if (r->rank == s->aborter && pthread_create(&thread, NULL, abort_later, both))
        FAIL("pthread_create failed");
    if (r->rank != s->odd_one) {
        CHECK_OK(one_call(r, memory, (char *)memory + BYTES, COUNT, ONEHOP_BFLOAT16, 0, 0));
        const onehop_result result = onehop_synchronize(r->context, r->stream);
        const double now = seconds_now();
        pthread_mutex_lock(&lock);
        if (!s->began)
            FAIL("%s: rank %d returned before the abort: %s", s->what, r->rank,
                 onehop_last_error());
        if (1e3 * (now - s->began) > s->worst_ms) s->worst_ms = 1e3 * (now - s->began);
        pthread_mutex_unlock(&lock);
        gpu_expect_failure(r, ONEHOP_ERR_ABORTED, -1, result, s->what);
    }
    if (r->rank == s->aborter) pthread_join(thread, NULL);
    gpu_barrier(r);
    if (r->rank == s->odd_one)
        gpu_expect_failure(r, ONEHOP_ERR_ABORTED, -1, onehop_status(r->context, NULL), s->what);
    gpu_barrier(r);
    gpu_free(r, memory);
}

static void all_endings(int world, int gpus) {
    char what[120];
    for (int odd = 0; odd < world; odd++) {
        scene s = {.what = what, .odd_one = odd};
        snprintf(what, sizeof what, "C26, rank %d of %d never calls, %d GPUs", odd, world, gpus);
        run(&s, GPU_THREADS, world, gpus, 1000, never_calls);
        printf("%s: all name it\n", what);
    }
    for (int by_waiting = 0; by_waiting < 2; by_waiting++) {
        scene s = {.what = what, .odd_one = world - 1, .aborter = by_waiting ? 0 : world - 1};
        snprintf(what, sizeof what, "C26, world size %d on %d GPUs, aborted on a rank that %s",
                 world, gpus, by_waiting ? "waits" : "has no call");
        run(&s, GPU_THREADS, world, gpus, 5000, aborted);
        printf("%s: all calls ended within %.1f ms\n", what, s.worst_ms);
        if (s.worst_ms > 100) FAIL("%s: %.1f ms, expected at most 100", what, s.worst_ms);
    }
}

static void in_one_process(void *argument) {
    (void)argument;
    all_mismatches(GPU_THREADS, 2, 1);
    all_mismatches(GPU_THREADS, 3, 1);
    all_endings(3, 1);
    if (gpus_found > 1) {
        all_mismatches(GPU_THREADS, 4, 2);
        all_mismatches(GPU_SINGLE, 2, 2);
        all_endings(2, 2);
        all_endings(5, 2);
    }
}

int main(void) {
    gpus_found = gpu_main(100, 1);
    gpu_apart(in_one_process, NULL);
    const int gpus = gpu_for_processes();
    if (gpus) all_mismatches(GPU_PROCESSES, 2, gpus);
    return 0;
}
