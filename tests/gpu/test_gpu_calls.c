/* Properties, on GPUs (numbers are those of docs/cases.md): a long random sequence of calls is right, bit for
 * bit (C14), and the bytes of a row do not depend on how many rows are reduced with it, across every switch of
 * algorithm and grid. Both compare every output with the scalar reference. */
/* labels: timeout=150 */
#include "gpu_batch.h"

#define ROOM ((size_t)3 << 20)
#define MOST ((size_t)48 << 10) /* elements of a random call */

static const onehop_algorithm algorithms[] = {ONEHOP_ALGORITHM_AUTO, ONEHOP_1SHOT_PUSH,
                                              ONEHOP_2SHOT_PUSH, ONEHOP_1SHOT_PULL,
                                              ONEHOP_2SHOT_PULL};

static gpu_data *data;

/* ---- C14 --------------------------------------------------------------------------------------- */
#define BATCH 1280

static void draw(gpu_call *calls, size_t n, int world, uint64_t *random) {
    for (size_t i = 0; i < n; i++) {
        gpu_call *c = &calls[i];
        const size_t most = (size_t)1 << random_next(random) % 13;
        memset(c, 0, sizeof *c);
        c->count = 1 + random_next(random) % (random_next(random) % 200 == 0 ? MOST : most);
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

/* ---- rows -------------------------------------------------------------------------------------- */
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
        CHECK_OK(onehop_would_use(ranks[0].context, rows * COLUMNS * 2, ONEHOP_BFLOAT16, ONEHOP_SUM,
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

static void in_one_process(void *argument) {
    (void)argument;
    sequence(GPU_THREADS, 2, 1, 20000);
    sequence(GPU_THREADS, 5, 1, 10000);
    for (int world = 2; world <= 8; world++) all_rows(GPU_THREADS, world, 1);
}

int main(void) {
    const int gpus = gpu_main(140, 1);
    data = gpu_data_make(ROOM, ONEHOP_MAX_RANKS);
    gpu_apart(in_one_process, NULL);
    if (gpus > 1) {
        sequence(GPU_PROCESSES, 2, 2, 200000);
        all_rows(GPU_PROCESSES, 2, 2);
    }
    return 0;
}
