/* Property: faults that other libraries shipped do not happen here, on GPUs. Numbers are those of
 * docs/cases.md.
 *   C01  one captured call of each algorithm replayed 1000 times with new input, eager calls
 *        between
 *   C02  input overwritten and output reused right after the call, eager and replayed, one rank
 *        slowed
 *   C03  64 calls of 8 MiB queued, each with a payload of its own
 *   C04  one input 10,000 times under load: one output
 *   C05, C33  values that hurt, types switched from call to call; NaN comes out canonical
 *   C08  each rank in turn comes late to the first call
 *   C25  20 graphs captured at different times, replayed in any order, on either of two streams
 *   C32  overlap is refused and launches nothing; in place works */
/* labels: timeout=180 */
#include "gpu_batch.h"

static int gpus_found;
static gpu_data *three[3]; /* one per type */
static const onehop_dtype dtypes[] = {ONEHOP_FLOAT32, ONEHOP_FLOAT16, ONEHOP_BFLOAT16};
static const onehop_algorithm algorithms[] = {ONEHOP_ALGORITHM_AUTO, ONEHOP_2SHOT_PUSH,
                                              ONEHOP_1SHOT_PULL, ONEHOP_2SHOT_PULL};

#define ROOM ((size_t)128 << 10)

static void with(const char *what, gpu_layout layout, int world, int gpus, gpu_fn fn) {
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    const gpu_setup setup = {.layout = layout, .world = world, .gpus = gpus, .config = &config};
    const double start = seconds_now();
    config.pull_bytes = 4096;
    gpu_run(&setup, fn, NULL);
    printf("%s: world size %d on %d GPU%s, %.1f s\n", what, world, gpus, gpus > 1 ? "s" : "",
           seconds_now() - start);
}

/* ---- C01, C02: new input before each call, output taken away after it ------------------------ */

#define VARIANTS    8
#define RELAY_COUNT 3001
#define RELAY_BYTES (RELAY_COUNT * 2)
#define RELAY_ROOM  6144 /* bytes of one variant or result */
#define RELAY_BATCH 50

typedef struct relay {
    gpu_rank *rank;
    unsigned char *variants, *in, *out, *results; /* on the GPU */
    unsigned char *found;                         /* RELAY_BATCH results */
    unsigned char sums[VARIANTS][RELAY_ROOM];
    size_t done;
    onehop_algorithm algorithm;
} relay;

static void relay_open(relay *y, gpu_rank *rank) {
    unsigned char mine[RELAY_ROOM] = {0};
    y->rank = rank;
    y->done = 0;
    y->variants = gpu_alloc(rank, VARIANTS * RELAY_ROOM);
    y->in = gpu_alloc(rank, RELAY_ROOM);
    y->out = gpu_alloc(rank, RELAY_ROOM);
    y->results = gpu_alloc(rank, RELAY_BATCH * RELAY_ROOM);
    y->found = gpu_alloc_pinned(rank, RELAY_BATCH * RELAY_ROOM);
    for (unsigned v = 0; v < VARIANTS; v++) {
        input_fill(mine, INPUT_MIXED, 70 + v, rank->rank, 0, RELAY_COUNT, ONEHOP_BFLOAT16);
        reference_of_inputs(y->sums[v], INPUT_MIXED, 70 + v, rank->world, 0, RELAY_COUNT,
                            ONEHOP_BFLOAT16);
        gpu_write(rank, y->variants + v * RELAY_ROOM, mine, RELAY_ROOM);
    }
    /* Each kind of work once: what the driver has to load for it is there before anything spins. */
    gpu_write(rank, y->in, y->variants, RELAY_BYTES);
    gpu_fill(rank, y->in, 0, RELAY_BYTES);
    gpu_fill(rank, y->out, 0, RELAY_BYTES);
    gpu_spin_later(rank, 1, rank->stream);
    CHECK_OK(onehop_synchronize(rank->context, rank->stream));
    gpu_barrier(rank);
}

static void relay_close(relay *y) {
    gpu_barrier(y->rank);
    gpu_free(y->rank, y->variants);
    gpu_free(y->rank, y->in);
    gpu_free(y->rank, y->out);
    gpu_free(y->rank, y->results);
    gpu_free_pinned(y->rank, y->found);
}

static unsigned variant_of(size_t call) {
    return (unsigned)((call * 3 + call / VARIANTS) % VARIANTS);
}

static void relay_call(relay *y) {
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    call.algorithm = y->algorithm;
    CHECK_OK(onehop_all_reduce(y->rank->context, y->in, y->out, RELAY_COUNT, ONEHOP_BFLOAT16,
                               ONEHOP_SUM, &call, y->rank->stream));
}

/* One step: input in, a call or a replay, output away; `spoil`: then both buffers become something
 * else. */
static void relay_step(relay *y, const gpu_graph *graph, bool spoil) {
    const onehop_stream stream = y->rank->stream;
    gpu_copy_later(y->rank, y->in, y->variants + variant_of(y->done) * RELAY_ROOM, RELAY_BYTES,
                   stream);
    if (graph)
        gpu_graph_launch(y->rank, graph, stream);
    else
        relay_call(y);
    if (spoil) gpu_fill_later(y->rank, y->in, 0xEE, RELAY_BYTES, stream);
    gpu_copy_later(y->rank, y->results + y->done % RELAY_BATCH * RELAY_ROOM, y->out, RELAY_BYTES,
                   stream);
    if (spoil) gpu_fill_later(y->rank, y->out, 0xDD, RELAY_BYTES, stream);
    y->done++;
}

/* After RELAY_BATCH steps. */
static void relay_check(relay *y, const char *what) {
    char text[120];
    CHECK_OK(onehop_synchronize(y->rank->context, y->rank->stream));
    gpu_barrier(y->rank);
    gpu_read(y->rank, y->found, y->results, RELAY_BATCH * RELAY_ROOM);
    for (size_t i = 0; i < RELAY_BATCH; i++) {
        const size_t call = y->done - RELAY_BATCH + i;
        snprintf(text, sizeof text, "%s, rank %d of %d, call %zu", what, y->rank->rank,
                 y->rank->world, call);
        expect_equal(y->sums[variant_of(call)], y->found + i * RELAY_ROOM, RELAY_COUNT,
                     ONEHOP_BFLOAT16, text);
    }
    gpu_barrier(y->rank);
}

static void relay_capture(relay *y, gpu_graph *graph) {
    gpu_capture_begin(&y->rank, 1);
    relay_call(y);
    gpu_capture_end(&y->rank, 1, graph);
}

static void replays_with_new_input(gpu_rank *ranks, int here, void *argument) {
    relay *y = calloc(1, sizeof *y);
    (void)here, (void)argument;
    CHECK(y != NULL);
    relay_open(y, &ranks[0]);
    for (size_t a = 0; a < 4; a++) {
        gpu_graph graph;
        const size_t end = y->done + 1250;
        y->algorithm = algorithms[a];
        relay_capture(y, &graph);
        while (y->done < end) {
            relay_step(y, y->done % 5 == 3 ? NULL : &graph, false);
            if (y->done % RELAY_BATCH == 0) relay_check(y, "C01");
        }
        gpu_graph_free(y->rank, &graph);
    }
    relay_close(y);
    free(y);
}

static void buffers_reused_at_once(gpu_rank *ranks, int here, void *argument) {
    relay *y = calloc(1, sizeof *y);
    uint64_t random = 2;
    (void)here, (void)argument;
    CHECK(y != NULL);
    relay_open(y, &ranks[0]);
    for (size_t a = 0; a < 4; a++) {
        gpu_graph graph;
        const size_t end = y->done + 600;
        y->algorithm = algorithms[a];
        relay_capture(y, &graph);
        while (y->done < end) {
            const int slow = (int)(random_next(&random) % (uint64_t)ranks[0].world);
            const unsigned us = (unsigned)(random_next(&random) % 200);
            if (slow == ranks[0].rank) gpu_spin_later(y->rank, us, y->rank->stream);
            relay_step(y, y->done % 2 ? &graph : NULL, true);
            if (y->done % RELAY_BATCH == 0) relay_check(y, "C02");
        }
        gpu_graph_free(y->rank, &graph);
    }
    relay_close(y);
    free(y);
}

/* ---- C03 ------------------------------------------------------------------------------------- */

#define QUEUED     64
#define QUEUED_LEN ((size_t)8 << 20)

static uint32_t bits_of(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}

static void expect_words(const gpu_rank *r, const unsigned char *from, uint32_t word, int call) {
    const uint32_t *words = r->pinned;
    for (size_t at = 0; at < QUEUED_LEN; at += GPU_PINNED_BYTES) {
        gpu_read(r, r->pinned, from + at, GPU_PINNED_BYTES);
        for (size_t i = 0; i < GPU_PINNED_BYTES / 4; i++)
            if (words[i] != word)
                FAIL("C03, rank %d of %d, call %d, element %zu: expected 0x%x, found 0x%x", r->rank,
                     r->world, call, at / 4 + i, word, words[i]);
    }
}

static void many_queued(gpu_rank *ranks, int here, void *argument) {
    gpu_rank *r = &ranks[0];
    unsigned char *in = gpu_alloc(r, QUEUED * QUEUED_LEN), *out = gpu_alloc(r, QUEUED * QUEUED_LEN);
    (void)here, (void)argument;
    for (int i = 0; i < QUEUED; i++)
        gpu_fill_words_later(r, in + (size_t)i * QUEUED_LEN, bits_of((float)(i * 16 + r->rank + 1)),
                             QUEUED_LEN / 4, r->stream);
    gpu_fill(r, out, 0xA5, QUEUED * QUEUED_LEN);
    gpu_barrier(r);
    for (int i = 0; i < QUEUED; i++)
        CHECK_OK(onehop_all_reduce(r->context, in + (size_t)i * QUEUED_LEN,
                                   out + (size_t)i * QUEUED_LEN, QUEUED_LEN / 4, ONEHOP_FLOAT32,
                                   ONEHOP_SUM, NULL, r->stream));
    CHECK_OK(onehop_synchronize(r->context, r->stream));
    gpu_barrier(r);
    for (int i = 0; i < QUEUED; i++) {
        const int sum = i * 16 * r->world + r->world * (r->world + 1) / 2;
        expect_words(r, out + (size_t)i * QUEUED_LEN, bits_of((float)sum), i);
    }
    gpu_barrier(r);
    gpu_free(r, in);
    gpu_free(r, out);
}

/* ---- C04 ------------------------------------------------------------------------------------- */

#define LOAD_BYTES ((size_t)64 << 20)

/* Copies on the second stream keep memory busy while the calls run. */
static void copy_beside(gpu_bench *bench, void *argument) {
    unsigned char *memory = *(unsigned char **)argument;
    for (int i = 0; i < 20; i++)
        gpu_copy_later(bench->rank, memory, memory + LOAD_BYTES, LOAD_BYTES, bench->rank->second);
}

static void same_again(gpu_rank *ranks, int here, void *argument) {
    unsigned char *memory = gpu_alloc(&ranks[0], 2 * LOAD_BYTES);
    const gpu_how how = {.what = "C04", .beside = copy_beside, .argument = &memory};
    gpu_call calls[100] = {{0}};
    gpu_bench bench;
    (void)here, (void)argument;
    for (int i = 0; i < 100; i++) calls[i].count = 999;
    gpu_data_fill(three[0], ranks, 1, INPUT_REAL, 4, ONEHOP_FLOAT32, 1024);
    gpu_bench_open(&bench, &ranks[0], three[0], (size_t)1 << 20);
    gpu_bench_load(&bench);
    for (int i = 0; i < 100; i++) gpu_batch(&bench, 1, calls, 100, &how);
    gpu_bench_close(&bench);
    gpu_free(&ranks[0], memory);
}

/* ---- C05, C33 -------------------------------------------------------------------------------- */

/* The types take turns from call to call on one communicator. */
static void run_types(gpu_rank *r, const gpu_call *calls, size_t count, const char *what) {
    const gpu_how how = {.what = what};
    gpu_bench benches[3];
    for (int t = 0; t < 3; t++) {
        gpu_bench_open(&benches[t], r, three[t], (size_t)4 << 20);
        gpu_bench_load(&benches[t]);
    }
    gpu_batch(benches, 3, calls, count, &how);
    for (int t = 0; t < 3; t++) gpu_bench_close(&benches[t]);
}

static void special_values(gpu_rank *ranks, int here, void *argument) {
    gpu_call calls[60] = {{0}};
    (void)here, (void)argument;
    for (size_t i = 0; i < 60; i++) {
        calls[i].count = i % 2 ? 777 + i : 9000 + i;
        calls[i].shift = i % 3 == 2 ? (unsigned)i % 15 + 1 : 0;
        calls[i].first = i * 1600;
        calls[i].in_place = i % 5 == 4;
        calls[i].algorithm = algorithms[i / 2 % 4];
    }
    for (int t = 0; t < 3; t++)
        gpu_data_fill(three[t], ranks, 1, INPUT_SPECIAL, (uint64_t)t + 5, dtypes[t], ROOM);
    run_types(&ranks[0], calls, 60, "C05, special values");
}

/* Rank 0 sends every pattern of 16 bits, the others zero, -0 or patterns of their own; fp32: in
 * both halves. */
static void every_pattern(gpu_rank *ranks, int here, void *argument) {
    gpu_call calls[8] = {{0}};
    (void)here, (void)argument;
    for (size_t i = 0; i < 8; i++) {
        calls[i].count = 65536;
        calls[i].in_place = i % 2;
        calls[i].algorithm = algorithms[i / 2];
    }
    for (uint32_t way = 0; way < 3; way++) {
        gpu_barrier(&ranks[0]);
        for (int t = 0; t < 3; t++) {
            for (uint32_t i = 0; i < 65536; i++) {
                const uint32_t own = i * (uint32_t)(2 * ranks[0].rank + 1) & 0xffffu;
                const uint32_t pattern = ranks[0].rank == 0 || way == 2 ? own
                                         : way == 1                     ? 0x8000u
                                                                        : 0;
                const uint32_t wide = way ? pattern << 16 | pattern : pattern << 16;
                const uint16_t narrow = (uint16_t)pattern;
                memcpy(three[t]->in[ranks[0].rank] + (t ? 2 : 4) * i,
                       t ? (const void *)&narrow : &wide, t ? 2 : 4);
            }
            gpu_data_sum(three[t], ranks, 1, dtypes[t], 65536);
        }
        run_types(&ranks[0], calls, 8, "C05, every 16-bit pattern");
    }
}

/* Rank 0's word, the others', and the sum as known by hand for two ranks; repeated so that the
 * first thread's fast path and the odd end both see each. */
static const uint32_t known[][3] = {
    {0x7f800000u, 0xff800000u, 0x7fffffffu}, {0x80000000u, 0x80000000u, 0x80000000u},
    {0x80000000u, 0x00000000u, 0x00000000u}, {0xffffffffu, 0x3f800000u, 0x7fffffffu},
    {0x3f800000u, 0xffffffffu, 0x7fffffffu}, {0x7f800001u, 0x7fc00001u, 0x7fffffffu},
    {0x7f7fffffu, 0x7f7fffffu, 0x7f800000u}, {0x00000001u, 0x80000000u, 0x00000001u},
    {0xffff7fffu, 0xffffffffu, 0x7fffffffu}, {0x00400000u, 0x00400000u, 0x00800000u},
};

static void known_sums(gpu_rank *ranks, int here, void *argument) {
    enum {
        ROWS = sizeof known / sizeof *known,
        REPEATS = 7
    };
    uint32_t words[ROWS * REPEATS];
    gpu_rank *r = &ranks[0];
    unsigned char *in = gpu_alloc(r, sizeof words), *out = gpu_alloc(r, sizeof words);
    (void)here, (void)argument;
    for (size_t i = 0; i < ROWS * REPEATS; i++) words[i] = known[i % ROWS][r->rank == 0 ? 0 : 1];
    gpu_write(r, in, words, sizeof words);
    for (size_t count = ROWS * REPEATS - 5; count <= ROWS * REPEATS; count++) {
        gpu_fill(r, out, 0xA5, sizeof words);
        gpu_barrier(r);
        CHECK_OK(onehop_all_reduce(r->context, in, out, count, ONEHOP_FLOAT32, ONEHOP_SUM, NULL,
                                   r->stream));
        CHECK_OK(onehop_synchronize(r->context, r->stream));
        gpu_barrier(r);
        gpu_read(r, words, out, sizeof words);
        for (size_t i = 0; i < count; i++)
            if (words[i] != known[i % ROWS][2])
                FAIL("C33, rank %d, 0x%x + 0x%x: expected 0x%x, found 0x%x", r->rank,
                     known[i % ROWS][0], known[i % ROWS][1], known[i % ROWS][2], words[i]);
        for (size_t i = count; i < ROWS * REPEATS; i++) CHECK(words[i] == 0xA5A5A5A5u);
    }
    gpu_barrier(r);
    gpu_free(r, in);
    gpu_free(r, out);
}

/* ---- C08 ------------------------------------------------------------------------------------- */

static int late_rank;

static void come_late(gpu_bench *bench, void *argument) {
    (void)argument;
    if (bench->rank->rank == late_rank) sleep_ms(1500);
}

static void first_call_late(gpu_rank *ranks, int here, void *argument) {
    const gpu_how how = {.what = "C08", .beside = come_late};
    gpu_call calls[4] = {{0}};
    (void)argument;
    for (size_t i = 0; i < 4; i++) calls[i].count = 5000 + 1000 * i;
    gpu_batch_once(ranks, here, three[0], INPUT_MIXED, 8, ONEHOP_FLOAT32, calls, 4, &how);
}

/* ---- C25 ------------------------------------------------------------------------------------- */

#define GRAPHS 20

static void replay_on(relay *y, const gpu_graph *graph, onehop_stream stream) {
    char text[120];
    gpu_copy_later(y->rank, y->in, y->variants + variant_of(y->done) * RELAY_ROOM, RELAY_BYTES,
                   stream);
    gpu_graph_launch(y->rank, graph, stream);
    CHECK_OK(onehop_synchronize(y->rank->context, stream));
    gpu_read(y->rank, y->found, y->out, RELAY_BYTES);
    snprintf(text, sizeof text, "C25, rank %d of %d, %s", y->rank->rank, y->rank->world,
             y->algorithm ? onehop_algorithm_name(y->algorithm) : "auto");
    expect_equal(y->sums[variant_of(y->done)], y->found, RELAY_COUNT, ONEHOP_BFLOAT16, text);
    y->done++;
}

/* Each rank chooses its streams for itself. */
static void graphs_in_any_order(gpu_rank *ranks, int here, void *argument) {
    relay *y = calloc(GRAPHS, sizeof *y);
    gpu_graph graphs[GRAPHS];
    gpu_rank *r = &ranks[0];
    uint64_t random = 25, own = (uint64_t)r->rank;
    (void)here, (void)argument;
    CHECK(y != NULL);
    for (size_t g = 0; g < GRAPHS; g++) {
        relay_open(&y[g], r);
        y[g].algorithm = algorithms[g % 4];
    }
    for (size_t i = 0; i < 400; i++) {
        const size_t captured = i / 5 < GRAPHS ? i / 5 + 1 : GRAPHS;
        if (i % 5 == 0 && i / 5 < GRAPHS) relay_capture(&y[i / 5], &graphs[i / 5]);
        const size_t g = random_next(&random) % captured;
        replay_on(&y[g], &graphs[g], random_next(&own) % 2 ? r->second : r->stream);
    }
    gpu_barrier(r);
    for (size_t g = 0; g < GRAPHS; g++) gpu_graph_free(r, &graphs[g]);
    for (size_t g = 0; g < GRAPHS; g++) relay_close(&y[g]);
    free(y);
}

/* ---- C32 ------------------------------------------------------------------------------------- */

static void overlap_refused(gpu_rank *ranks, int here, void *argument) {
    gpu_rank *r = &ranks[0];
    unsigned char *memory = gpu_alloc(r, 65536);
    const gpu_how how = {.what = "C32, in place after refusals"};
    gpu_call calls[3] = {{0}};
    onehop_stats before, after;
    CHECK_OK(onehop_get_stats(r->context, &before));
    for (size_t off = 4; off < 4096; off = off * 3 / 4 * 4) {
        CHECK_RESULT(ONEHOP_ERR_OVERLAP,
                     onehop_all_reduce(r->context, memory, memory + off, 1024, ONEHOP_FLOAT32,
                                       ONEHOP_SUM, NULL, r->stream));
        CHECK_RESULT(ONEHOP_ERR_OVERLAP,
                     onehop_all_reduce(r->context, memory + off, memory, 1024, ONEHOP_FLOAT32,
                                       ONEHOP_SUM, NULL, r->stream));
    }
    CHECK_OK(onehop_get_stats(r->context, &after));
    CHECK(before.calls == after.calls && gpu_stream_idle(r, r->stream));
    for (int i = 0; i < 3; i++)
        calls[i] = (gpu_call){.count = (size_t)(700 << i), .in_place = i != 1};
    gpu_batch_once(ranks, here, three[0], INPUT_MIXED, 32, ONEHOP_FLOAT32, calls, 3, &how);
    (void)argument;
    gpu_free(r, memory);
}

/* ---- all of it ------------------------------------------------------------------------------- */

static void in_one_process(void *argument) {
    (void)argument;
    with("C01, threads", GPU_THREADS, 4, 1, replays_with_new_input);
    with("C02, threads", GPU_THREADS, 4, 1, buffers_reused_at_once);
    with("C05, special values, threads", GPU_THREADS, 2, 1, special_values);
    with("C05, special values, threads", GPU_THREADS, 5, 1, special_values);
    with("C05, every pattern, threads", GPU_THREADS, 3, 1, every_pattern);
    with("C33, threads", GPU_THREADS, 2, 1, known_sums);
    with("C04, threads", GPU_THREADS, 2, 1, same_again);
    with("C32, threads", GPU_THREADS, 2, 1, overlap_refused);
    with("C25, threads", GPU_THREADS, 3, 1, graphs_in_any_order);
    for (late_rank = 0; late_rank < 3; late_rank++)
        with("C08, threads", GPU_THREADS, 3, 1, first_call_late);
    if (gpus_found > 1) {
        with("C05, special values, threads", GPU_THREADS, 9, 2, special_values);
        with("C03, threads", GPU_THREADS, 8, 2, many_queued);
        with("C03, threads", GPU_THREADS, 4, 2, many_queued);
    } else {
        with("C03, threads", GPU_THREADS, 4, 1, many_queued);
    }
}

int main(void) {
    gpus_found = gpu_main(100, 1);
    for (int t = 0; t < 3; t++) three[t] = gpu_data_make(ROOM, ONEHOP_MAX_RANKS);
    gpu_apart(in_one_process, NULL);
    const int gpus = gpu_for_processes();
    if (gpus) {
        with("C01, process per rank", GPU_PROCESSES, 2, gpus, replays_with_new_input);
        with("C02, process per rank", GPU_PROCESSES, 2, gpus, buffers_reused_at_once);
        with("C03, process per rank", GPU_PROCESSES, 2, gpus, many_queued);
        with("C04, process per rank", GPU_PROCESSES, 2, gpus, same_again);
        with("C05, special values, process per rank", GPU_PROCESSES, 2, gpus, special_values);
        with("C33, process per rank", GPU_PROCESSES, 2, gpus, known_sums);
        with("C25, process per rank", GPU_PROCESSES, 2, gpus, graphs_in_any_order);
        for (late_rank = 0; late_rank < 2; late_rank++)
            with("C08, process per rank", GPU_PROCESSES, 2, gpus, first_call_late);
    }
    return 0;
}
