/* Property: on GPUs, all-reduce gives the bits of the scalar reference on all ranks, and after each
 * batch every word of both parities of all push slots is armed.
 *
 * Every world size that one and two GPUs serve, types, counts, alignments that differ from rank to
 * rank, in place and out of place, eager and in graphs, one piece and chunks, two communicators at
 * once.
 *
 * test_gpu_matrix --rank R --world W --name NAME   one rank of a small version on GPU R, for a run
 * under compute-sanitizer, a process each. With fewer GPUs all are on the first, which serves one
 * process after the other, without MPS: a tool may let only one kernel of a process run at a time,
 * so threads of one process could wait for ever for each other. */
/* labels: timeout=180 */
#include "gpu_batch.h"

#define MAX        (((size_t)1 << 20) + 3)
#define SLACK      2048 /* a window of MOST begins anywhere in the first SLACK elements */
#define SMALL      ((size_t)96 << 10)
#define SMALL_SLOT 16384
#define COUNTS     1026
#define ARENA      ((size_t)16 << 20)

typedef struct job {
    const char *what;
    gpu_data *data;
    bool brief;
    size_t compared; /* atomic: outputs */
} job;

static const onehop_dtype dtypes[] = {ONEHOP_FLOAT32, ONEHOP_FLOAT16, ONEHOP_BFLOAT16};

/* A third of the calls is aligned on all ranks. */
static gpu_call call_of(size_t number, size_t count, bool in_place) {
    gpu_call c = {0};
    c.count = count;
    c.shift = number % 3 ? (unsigned)(number * 5 % 15) + 1 : 0;
    c.first = number * 37 % SLACK;
    if (!c.shift) c.first &= ~(size_t)7;
    c.in_place = in_place;
    return c;
}

/* Every count that is special for the world size or below 130, others in steps; eager calls in both
 * forms. */
static size_t choose_calls(gpu_call *calls, int world, onehop_dtype dtype, bool graph, bool brief) {
    const size_t dense = world > 8 ? 16 * (size_t)world : 129, step = brief        ? 41
                                                                      : world == 2 ? 1
                                                                                   : 3;
    const size_t start = ((size_t)world * 5 + (size_t)dtype) % step;
    size_t n = 0;
    for (size_t count = 0; count < COUNTS; count++) {
        const bool special =
            count <= (brief ? 20 : dense) || (count >= 511 && count <= 513) || count >= 1023;
        if (!special && count % step != start) continue;
        if (!graph || count % 2) calls[n] = call_of(n, count, true), n++;
        if (!graph || count % 2 == 0) calls[n] = call_of(n, count, false), n++;
    }
    return n;
}

/* Around one slot, around chunks, and longer. */
static size_t choose_chunked(gpu_call *calls, onehop_dtype dtype) {
    const size_t slot = SMALL_SLOT / reference_element_bytes(dtype);
    const size_t counts[] = {slot - 1,        slot,         slot + 1,     slot + slot / 2 - 1,
                             slot + slot / 2, 2 * slot + 1, 3 * slot - 7, 5 * slot / 2 + 3,
                             4 * slot,        9 * slot + 11};
    size_t n = 0;
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        for (int in_place = 0; in_place < 2; in_place++)
            calls[n] = call_of(n + 2, counts[i], in_place), n++;
    return n;
}

static size_t choose_large(gpu_call *calls) {
    for (size_t n = 0; n < 3; n++) calls[n] = call_of(n, MAX, n == 1);
    return 3;
}

static void compare_calls(gpu_rank *ranks, int here, gpu_bench *benches, job *j, const char *what,
                          const gpu_call *calls, size_t count, bool graph) {
    const gpu_how how = {.what = what, .graph = graph};
    const size_t compared = gpu_batch(benches, here, calls, count, &how);
    __atomic_fetch_add(&j->compared, compared, __ATOMIC_RELAXED);
    gpu_expect_idle(ranks, here);
}

static void open_benches(gpu_bench *benches, gpu_rank *ranks, int here, const gpu_data *data) {
    for (int i = 0; i < here; i++) gpu_bench_open(&benches[i], &ranks[i], data, ARENA);
}

static void close_benches(gpu_bench *benches, int here) {
    for (int i = 0; i < here; i++) gpu_bench_close(&benches[i]);
}

/* Programs started apart share no data: each makes all of it. */
static void fill_alone(gpu_data *data, int world, uint64_t seed, onehop_dtype dtype,
                       size_t elements) {
    const void *in[ONEHOP_MAX_RANKS];
    for (int r = 0; r < world; r++) {
        input_fill(data->in[r], INPUT_MIXED, seed, r, 0, elements, dtype);
        in[r] = data->in[r];
    }
    reference_sum(data->sum, in, world, elements, dtype);
    data->dtype = dtype;
    data->elements = elements;
}

static void load(gpu_bench *benches, gpu_rank *ranks, int here, job *j, onehop_dtype dtype,
                 size_t elements) {
    const uint64_t seed = (uint64_t)dtype * 100 + (uint64_t)ranks[0].world;
    if (j->brief)
        fill_alone(j->data, ranks[0].world, seed, dtype, elements);
    else
        gpu_data_fill(j->data, ranks, here, INPUT_MIXED, seed, dtype, elements);
    for (int i = 0; i < here; i++) gpu_bench_load(&benches[i]);
}

/* Every fourth of the calls through a named algorithm; the fourth moves with the algorithm. */
static void compare_named(gpu_rank *ranks, int here, gpu_bench *benches, job *j,
                          const gpu_call *calls, size_t count, bool graph) {
    static const onehop_algorithm named[] = {ONEHOP_1SHOT_PULL, ONEHOP_2SHOT_PULL,
                                             ONEHOP_2SHOT_PUSH};
    gpu_call *some = calloc(count + 1, sizeof *some);
    CHECK(some != NULL);
    for (size_t a = 0; a < 3; a++) {
        size_t n = 0;
        for (size_t i = a; i < count; i += 4) {
            some[n] = calls[i];
            some[n++].algorithm = named[a];
        }
        compare_calls(ranks, here, benches, j, onehop_algorithm_name(named[a]), some, n, graph);
        /* And after one another. */
        for (size_t i = 0; i < n; i++)
            some[i].algorithm = (i + a) % 4 == 3 ? ONEHOP_1SHOT_PUSH : named[(i + a) % 4];
        compare_calls(ranks, here, benches, j, "algorithms in turn", some, n, graph);
    }
    free(some);
}

static void small_messages(gpu_rank *ranks, int here, void *argument) {
    job *j = argument;
    gpu_bench benches[ONEHOP_MAX_RANKS];
    gpu_call *calls = calloc(2 * COUNTS, sizeof *calls);
    CHECK(calls != NULL);
    open_benches(benches, ranks, here, j->data);
    for (int d = 0; d < (j->brief ? 2 : 3); d++) {
        load(benches, ranks, here, j, dtypes[d], j->brief ? 16384 : SMALL);
        for (int graph = 0; graph < 2; graph++) {
            size_t n = choose_calls(calls, ranks[0].world, dtypes[d], graph, j->brief);
            compare_calls(ranks, here, benches, j, "small messages", calls, n, graph);
            compare_named(ranks, here, benches, j, calls, n, graph);
            n = j->brief ? 0 : choose_chunked(calls, dtypes[d]);
            if (n) compare_calls(ranks, here, benches, j, "chunks", calls, n, graph);
            if (n) compare_named(ranks, here, benches, j, calls, n, graph);
        }
    }
    close_benches(benches, here);
    free(calls);
}

static void large_messages(gpu_rank *ranks, int here, void *argument) {
    job *j = argument;
    gpu_bench benches[ONEHOP_MAX_RANKS];
    gpu_call calls[3];
    const size_t n = choose_large(calls);
    open_benches(benches, ranks, here, j->data);
    for (int d = 0; d < 3; d++) {
        load(benches, ranks, here, j, dtypes[d], MAX + SLACK);
        for (int graph = 0; graph < 2; graph++)
            compare_calls(ranks, here, benches, j, "1 MiB + 3 elements", calls, n, graph);
        for (size_t i = 0; i < n; i++)
            calls[i].algorithm = i % 2 ? ONEHOP_1SHOT_PULL : ONEHOP_2SHOT_PULL;
        compare_calls(ranks, here, benches, j, "1 MiB + 3 elements, pulled", calls, n, d % 2);
        for (size_t i = 0; i < n; i++) calls[i].algorithm = ONEHOP_2SHOT_PUSH;
        compare_calls(ranks, here, benches, j, "1 MiB + 3 elements, 2shot_push", calls, n, d != 1);
        for (size_t i = 0; i < n; i++) calls[i].algorithm = ONEHOP_ALGORITHM_AUTO;
    }
    close_benches(benches, here);
}

/* Calls of two communicators, in flight together, made in opposite order on odd ranks. */
static void two_at_once(gpu_rank *ranks, int here, void *argument) {
    job *j = argument;
    gpu_rank both[2] = {ranks[0], ranks[0]};
    gpu_bench benches[2];
    onehop_config config = ranks[0].context->config;
    gpu_call *calls = calloc(2 * COUNTS, sizeof *calls);
    CHECK(here == 1 && calls != NULL);
    config.group = ranks[0].context->group;
    CHECK_OK(onehop_create(&config, &both[1].context));
    both[1].stream = gpu_stream_make(&ranks[0]);
    open_benches(benches, both, 2, j->data);
    for (int d = 0; d < 3; d++) {
        load(benches, both, 1, j, dtypes[d], SMALL);
        gpu_bench_load(&benches[1]);
        for (int graph = 0; graph < 2; graph++) {
            gpu_how how = {.what = "two communicators at once", .graph = graph, .reverse = !graph};
            size_t n = choose_calls(calls, ranks[0].world, dtypes[d], true, false);
            size_t compared = gpu_batch(benches, 2, calls, n, &how);
            n = choose_chunked(calls, dtypes[d]);
            compared += gpu_batch(benches, 2, calls, n, &how);
            __atomic_fetch_add(&j->compared, compared, __ATOMIC_RELAXED);
            gpu_expect_idle(&both[0], 1);
            gpu_expect_idle(&both[1], 1);
        }
    }
    close_benches(benches, 2);
    gpu_barrier(&ranks[0]);
    onehop_destroy(both[1].context);
    gpu_stream_free(&ranks[0], both[1].stream);
    free(calls);
}

static onehop_config small_config(uint32_t max_blocks) {
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    config.push_bytes = SMALL_SLOT;
    config.pull_bytes = 4096;
    config.max_blocks = max_blocks;
    return config;
}

static void run(job *j, const char *what, gpu_layout layout, int world, int gpus) {
    const onehop_config small = small_config(0);
    const gpu_setup few = {.layout = layout, .world = world, .gpus = gpus, .config = &small};
    const gpu_setup usual = {.layout = layout, .world = world, .gpus = gpus};
    const size_t before = j->compared;
    const double start = seconds_now();
    gpu_run(&few, small_messages, j);
    gpu_run(&usual, large_messages, j);
    printf("  %s, world size %d, %d GPU%s: %zu outputs, %.1f s\n", what, world, gpus,
           gpus > 1 ? "s" : "", j->compared - before, seconds_now() - start);
}

static void run_two(job *j, int world, int gpus) {
    const onehop_config small = small_config(24);
    const gpu_setup setup = {.layout = GPU_THREADS, .world = world, .gpus = gpus, .config = &small};
    const size_t before = j->compared;
    const double start = seconds_now();
    gpu_run(&setup, two_at_once, j);
    printf("  two communicators, threads, world size %d, %d GPU%s: %zu outputs, %.1f s\n", world,
           gpus, gpus > 1 ? "s" : "", j->compared - before, seconds_now() - start);
}

static int gpus_found;

/* All that happens in one process. */
static void in_one_process(void *argument) {
    static const int worlds[] = {2, 3, 4, 5, 6, 7, 8, 12, 16};
    job *j = argument;
    const int gpus = gpus_found > 1 ? 2 : 1;
    for (size_t i = 0; i < 7; i++) run(j, "threads", GPU_THREADS, worlds[i], 1);
    for (size_t i = 0; gpus == 2 && i < 9; i++) run(j, "threads", GPU_THREADS, worlds[i], 2);
    run(j, "one thread for all", GPU_SINGLE, 2, gpus);
    run(j, "one thread for all", GPU_SINGLE, 4, gpus);
    run_two(j, 2, 1);
    if (gpus == 2) run_two(j, 2, 2);
    if (gpus == 2) run_two(j, 4, 2);
}

/* For sanitizers, under which all is slow. */
static int one_small_rank(int rank, int world, const char *name) {
    onehop_config config = small_config(24);
    const int found = oh_cuda_device_count(), gpus = found < world ? 1 : world;
    gpu_setup setup = {.world = world, .gpus = gpus, .config = &config, .name = name};
    job j = {.data = gpu_data_make(16384, world), .brief = true};
    watchdog(900);
    if (!found) {
        const char *reason = oh_cuda_absent_reason();
        printf("SKIPPED: %s\n", reason ? reason : "the driver shows no GPU");
        return HARNESS_SKIP;
    }
    if (gpus < world) config.flags = ONEHOP_FLAG_SHARE_GPU;
    config.timeout_ms = 120000;
    gpu_run_here(&setup, rank, NULL, small_messages, &j);
    printf("rank %d: %zu outputs compared, 0 wrong\n", rank, j.compared);
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 7 && !strcmp(argv[1], "--rank"))
        return one_small_rank(atoi(argv[2]), atoi(argv[4]), argv[6]);
    gpus_found = gpu_main(100, 1);
    job *j = shared_memory(sizeof *j);
    j->data = gpu_data_make(MAX + SLACK, ONEHOP_MAX_RANKS);
    const double start = seconds_now();
    gpu_apart(in_one_process, j);
    const int gpus = gpu_for_processes();
    if (gpus) run(j, "process per rank", GPU_PROCESSES, 2, gpus);
    if (gpus_found == 1) printf("one GPU: nothing over two\n");
    printf("%zu outputs compared with the reference, 0 wrong, all slots armed, %.1f s\n",
           j->compared, seconds_now() - start);
    return 0;
}
