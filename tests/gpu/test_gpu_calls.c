/* Properties, on GPUs (numbers are those of docs/cases.md): a long random sequence of calls is
 * right, bit for bit (C14), the bytes of a row do not depend on how many rows are reduced with it,
 * across every switch of algorithm and grid, and at every bound of the tuning table calls go the
 * way that would_use names (C09, C28). All compare every output with the scalar reference. */
/* labels: timeout=150 */
#include "gpu_batch.h"

#define ROOM ((size_t)3 << 20)
#define MAX  ((size_t)48 << 10) /* elements of a random call */

static const onehop_algorithm algorithms[] = {ONEHOP_ALGORITHM_AUTO, ONEHOP_1SHOT_PUSH,
                                              ONEHOP_2SHOT_PUSH, ONEHOP_1SHOT_PULL,
                                              ONEHOP_2SHOT_PULL};

static gpu_data *data;

/* ---- C14 ------------------------------------------------------------------------------------- */
#define BATCH 1280

static void draw(gpu_call *calls, size_t n, int world, uint64_t *random) {
    for (size_t i = 0; i < n; i++) {
        gpu_call *c = &calls[i];
        const size_t max = (size_t)1 << random_next(random) % 13;
        memset(c, 0, sizeof *c);
        c->count = 1 + random_next(random) % (random_next(random) % 200 == 0 ? MAX : max);
        c->first = random_next(random) % 4096 * 8;
        c->shift = random_next(random) % 5 == 0 ? (unsigned)(1 + random_next(random) % 15) : 0;
        c->in_place = random_next(random) % 3 == 0;
        c->algorithm = algorithms[random_next(random) % 3 ? 0 : random_next(random) % 5];
        c->slow_rank = (int)(random_next(random) % (uint64_t)world);
        c->slow_us = random_next(random) % 100 == 0 ? (unsigned)(random_next(random) % 100) : 0;
    }
}

/* One batch in eight is captured and replayed. */
static void random_calls(gpu_rank *ranks, int here, void *argument) {
    const size_t wanted = *(const size_t *)argument, elements = (size_t)128 << 10;
    gpu_bench bench;
    gpu_call *calls = calloc(BATCH, sizeof *calls);
    uint64_t random = 14;
    size_t made = 0;
    (void)here;
    CHECK(calls != NULL);
    gpu_bench_open(&bench, &ranks[0], data, (size_t)16 << 20);
    for (unsigned round = 0; made < wanted; round++) {
        const onehop_dtype dtype = (onehop_dtype)(1 + round / 20 % 3);
        const gpu_how how = {.what = "C14", .graph = round % 8 == 3};
        if (round % 20 == 0) {
            gpu_data_fill(data, ranks, 1, INPUT_MIXED, round, dtype, elements);
            gpu_bench_load(&bench);
        }
        draw(calls, BATCH, ranks[0].world, &random);
        made += gpu_batch(&bench, 1, calls, BATCH, &how);
    }
    gpu_bench_close(&bench);
    free(calls);
}

static void sequence(gpu_layout layout, int world, int gpus, size_t calls) {
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    const gpu_setup setup = {.layout = layout, .world = world, .gpus = gpus, .config = &config};
    const double start = seconds_now();
    config.push_bytes = 64 << 10;
    config.pull_bytes = 64 << 10;
    gpu_run(&setup, random_calls, &calls);
    printf("C14, %zu calls, %s, world size %d on %d GPU%s, %.1f s\n", calls,
           layout == GPU_PROCESSES ? "processes" : "threads", world, gpus, gpus > 1 ? "s" : "",
           seconds_now() - start);
}

/* ---- rows ------------------------------------------------------------------------------------ */
#define COLUMNS ((size_t)1023)
#define STEPS   64

static void rows(gpu_rank *ranks, int here, void *argument) {
    gpu_call calls[STEPS] = {{0}};
    size_t n = 0;
    unsigned *grids = argument;
    gpu_how how = {.what = "rows"};
    uint64_t last = 0;
    for (size_t rows = 1; rows * COLUMNS <= ROOM && n < STEPS; rows += 1 + rows / 5) {
        onehop_choice choice;
        calls[n++].count = rows * COLUMNS;
        CHECK_OK(would_use(ranks[0].context, rows * COLUMNS * 2, ONEHOP_BFLOAT16, ONEHOP_SUM,
                           ONEHOP_MODE_EAGER, 0, &choice));
        const uint64_t grid =
            (uint64_t)choice.algorithm << 32 | choice.blocks << 16 | choice.threads;
        if (grid != last && ranks[0].rank == 0) (*grids)++;
        last = grid;
    }
    for (int graph = 0; graph < 2; graph++) {
        how.graph = graph;
        gpu_batch_once(ranks, here, data, INPUT_MIXED, 77, ONEHOP_BFLOAT16, calls, n, &how);
    }
}

static void all_rows(gpu_layout layout, int world, int gpus) {
    const gpu_setup setup = {.layout = layout, .world = world, .gpus = gpus};
    const double start = seconds_now();
    unsigned *grids = shared_memory(sizeof *grids);
    gpu_run(&setup, rows, grids);
    if (*grids < 3) FAIL("the sizes cross %u ways and grids, expected several", *grids);
    printf("rows: world size %d on %d GPU%s, %u ways and grids, %.1f s\n", world, gpus,
           gpus > 1 ? "s" : "", *grids, seconds_now() - start);
}

/* ---- bounds ---------------------------------------------------------------------------------- */
#define EDGES      120
#define EDGE_BYTES ((size_t)1 << 20)

/* An element below, at and above each bound up to EDGE_BYTES, in place and out of place. */
static size_t list_edges(const onehop_context *context, onehop_dtype dtype, gpu_call *calls) {
    const oh_dispatch *d = &context->comm->dispatch;
    const size_t size = reference_element_bytes(dtype);
    size_t n = 0;
    for (size_t i = 0; i < 2 * d->rule_count; i++) {
        const uint64_t bound = i % 2 ? d->rules[i / 2].above : d->rules[i / 2].up_to;
        bool known = d->rules[i / 2].operation != OH_PLAIN || bound < 4 || bound > EDGE_BYTES ||
                     n + 6 > EDGES;
        for (size_t k = 0; k < n; k += 6) known |= calls[k].count == bound / size - 1;
        for (size_t k = 0; k < 6 && !known; k++) {
            calls[n].count = bound / size + k % 3 - 1;
            calls[n++].in_place = k > 2;
        }
    }
    return n;
}

static void bounds(gpu_rank *ranks, int here, void *argument) {
    onehop_context *context = ranks[0].context;
    gpu_bench bench;
    (void)argument;
    CHECK_INT(1, here);
    gpu_bench_open(&bench, &ranks[0], data, (size_t)16 << 20);
    for (int round = 0; round < 6; round++) {
        const onehop_dtype dtype = (onehop_dtype)(1 + round / 2);
        const gpu_how how = {.what = "bounds", .graph = round % 2};
        gpu_call calls[EDGES] = {{0}};
        uint64_t promised[16] = {0};
        onehop_stats before, after;
        const size_t n = list_edges(context, dtype, calls);
        for (size_t i = 0; i < n; i++) {
            onehop_choice choice;
            CHECK_OK(would_use(context, calls[i].count * reference_element_bytes(dtype), dtype,
                               ONEHOP_SUM, how.graph ? ONEHOP_MODE_GRAPH : ONEHOP_MODE_EAGER,
                               calls[i].in_place, &choice));
            promised[choice.algorithm]++;
        }
        if (!how.graph) {
            gpu_data_fill(data, ranks, 1, INPUT_MIXED, 28, dtype, EDGE_BYTES / 2 + 8);
            gpu_bench_load(&bench);
        }
        CHECK_OK(onehop_get_stats(context, &before));
        gpu_batch(&bench, 1, calls, n, &how);
        CHECK_OK(onehop_get_stats(context, &after));
        CHECK(n > 0);
        for (int a = 0; a < 16; a++)
            if (after.calls_by[a] - before.calls_by[a] != promised[a])
                FAIL("bounds, world size %d, %s: %llu calls by %s, %llu promised", ranks[0].world,
                     onehop_dtype_name(dtype),
                     (unsigned long long)(after.calls_by[a] - before.calls_by[a]),
                     onehop_algorithm_name((onehop_algorithm)a), (unsigned long long)promised[a]);
    }
    gpu_bench_close(&bench);
}

static void all_bounds(gpu_layout layout, int world, int gpus) {
    const gpu_setup setup = {.layout = layout, .world = world, .gpus = gpus};
    const double start = seconds_now();
    gpu_run(&setup, bounds, NULL);
    printf("C28, bounds: world size %d on %d GPU%s, %.1f s\n", world, gpus, gpus > 1 ? "s" : "",
           seconds_now() - start);
}

static void in_one_process(void *argument) {
    (void)argument;
    for (int world = 2; world <= 8; world += 3) all_bounds(GPU_THREADS, world, 1);
    sequence(GPU_THREADS, 2, 1, 20000);
    sequence(GPU_THREADS, 5, 1, 10000);
    for (int world = 2; world <= 8; world++) all_rows(GPU_THREADS, world, 1);
}

int main(void) {
    gpu_main(140, 1);
    data = gpu_data_make(ROOM, ONEHOP_MAX_RANKS);
    gpu_apart(in_one_process, NULL);
    const int gpus = gpu_for_processes();
    if (gpus) {
        sequence(GPU_PROCESSES, 2, gpus, 200000);
        all_rows(GPU_PROCESSES, 2, gpus);
        all_bounds(GPU_PROCESSES, 2, gpus);
    }
    return 0;
}
