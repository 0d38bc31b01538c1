/* Property: on GPUs, calls of every algorithm are right whatever their order, counters and grids.
 * Numbers are those of docs/cases.md.
 *   C06  one communicator on two streams: eager calls are ordered; replays that overlap end in an
 *        error or in right sums, never in a hang (one algorithm)
 *   C15  counters at 2^31 - 5 and 2^32 - 5, three grids
 *   C29  many chunks, the last one short, one rank held back, the next call at once
 *   C30  any grid after any grid
 *   C31  a kernel with programmatic dependent launch fills the GPU after each call, two ranks on a
 *        GPU */
/* labels: timeout=180 */
#include "gpu_batch.h"

static int gpus_found;
static gpu_data *data;

#define ROOM ((size_t)192 << 10)
#define SLOT 16384

static onehop_config config_here;

static onehop_algorithm turn(size_t i) {
    static const onehop_algorithm turns[] = {ONEHOP_ALGORITHM_AUTO, ONEHOP_2SHOT_PUSH,
                                             ONEHOP_1SHOT_PULL, ONEHOP_2SHOT_PULL};
    return turns[i % 4];
}

static void with(const char *what, gpu_layout layout, int world, int gpus, uint32_t max_blocks,
                 gpu_fn fn) {
    const gpu_setup setup = {
        .layout = layout, .world = world, .gpus = gpus, .config = &config_here};
    const double start = seconds_now();
    memset(&config_here, 0, sizeof config_here);
    config_here.push_bytes = SLOT;
    config_here.pull_bytes = 4096;
    config_here.max_blocks = max_blocks;
    gpu_run(&setup, fn, NULL);
    printf("%s: world size %d on %d GPU%s, %.1f s\n", what, world, gpus, gpus > 1 ? "s" : "",
           seconds_now() - start);
}

/* ---- C06 ------------------------------------------------------------------------------------- */

static void two_streams(gpu_rank *ranks, int here, void *argument) {
    const gpu_how how = {.what = "C06, two streams"};
    gpu_call calls[300] = {{0}};
    uint64_t random = 6;
    (void)argument;
    for (size_t i = 0; i < 300; i++) {
        calls[i].count = 1 + random_next(&random) % 9000;
        calls[i].first = i * 8;
        calls[i].second = random_next(&random) % 2;
        calls[i].algorithm = turn(i);
        calls[i].slow_rank = (int)(random_next(&random) % (uint64_t)ranks[0].world);
        calls[i].slow_us = i % 4 == 0 ? (unsigned)(random_next(&random) % 60) : 0;
    }
    gpu_batch_once(ranks, here, data, INPUT_MIXED, 6, ONEHOP_BFLOAT16, calls, 300, &how);
}

/* Two graphs of one communicator on two streams at once: not allowed. */
#define NODES 20

typedef struct overlap {
    size_t counts[2];
    int right, errors; /* atomic */
} overlap;

static void capture_calls(gpu_rank *r, gpu_graph *graph, const unsigned char *in,
                          unsigned char *out, size_t count) {
    gpu_capture_begin(&r, 1);
    for (int i = 0; i < NODES; i++)
        CHECK_OK(onehop_all_reduce(r->context, in, out + (size_t)i * 16384, count, ONEHOP_FLOAT32,
                                   ONEHOP_SUM, NULL, r->stream));
    gpu_capture_end(&r, 1, graph);
}

static bool all_right(const gpu_rank *r, const unsigned char *out, size_t count, float expected) {
    const float *found = r->pinned;
    for (int i = 0; i < NODES; i++) {
        gpu_read(r, r->pinned, out + (size_t)i * 16384, count * 4);
        for (size_t k = 0; k < count; k++)
            if (found[k] != expected) return false;
    }
    return true;
}

static void overlapping_replays(gpu_rank *ranks, int here, void *argument) {
    overlap *o = argument;
    gpu_rank *r = &ranks[0];
    const size_t bytes = NODES * 16384;
    unsigned char *in[2], *out[2];
    gpu_graph graphs[2];
    (void)here;
    for (int g = 0; g < 2; g++) {
        const float value = (float)(1 + r->rank + 100 * g);
        uint32_t word;
        memcpy(&word, &value, 4);
        in[g] = gpu_alloc(r, 16384);
        out[g] = gpu_alloc(r, bytes);
        gpu_fill_words_later(r, in[g], word, 4096, r->stream);
        gpu_fill(r, out[g], 0xA5, bytes);
        capture_calls(r, &graphs[g], in[g], out[g], o->counts[g]);
    }
    gpu_barrier(r);
    const double start = seconds_now();
    for (int g = 0; g < 2; g++) gpu_graph_launch(r, &graphs[g], g ? r->second : r->stream);
    const onehop_result first = onehop_synchronize(r->context, r->stream);
    const onehop_result second = onehop_synchronize(r->context, r->second);
    const double took = seconds_now() - start;
    if (took > 3) FAIL("C06, overlapping replays: rank %d returned after %.1f s", r->rank, took);
    gpu_barrier(r);
    const float ranks_sum = (float)(r->world * (r->world + 1) / 2);
    if (!first && !second) {
        __atomic_fetch_add(&o->right, 1, __ATOMIC_RELAXED);
        for (int g = 0; g < 2; g++)
            if (!all_right(r, out[g], o->counts[g], ranks_sum + (float)(100 * g * r->world)))
                FAIL("C06, overlapping replays: rank %d: wrong sums and no error", r->rank);
    } else {
        const onehop_result result = second ? second : first;
        __atomic_fetch_add(&o->errors, 1, __ATOMIC_RELAXED);
        if (result != ONEHOP_ERR_CALLS_OVERLAP && result != ONEHOP_ERR_MISMATCH &&
            result != ONEHOP_ERR_TIMEOUT)
            FAIL("C06, overlapping replays: rank %d: %s", r->rank, onehop_last_error());
        CHECK_RESULT(result, onehop_all_reduce(r->context, in[0], out[0], 4, ONEHOP_FLOAT32,
                                               ONEHOP_SUM, NULL, r->stream));
    }
    gpu_barrier(r);
    for (int g = 0; g < 2; g++) {
        gpu_graph_free(r, &graphs[g]);
        gpu_free(r, in[g]);
        gpu_free(r, out[g]);
    }
}

static void replays_overlap(int gpus) {
    for (int trial = 0; trial < 6; trial++) {
        onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
        const gpu_setup setup = {
            .layout = GPU_THREADS, .world = 2, .gpus = gpus, .config = &config, .dies = true};
        overlap o = {{1000, trial % 2 ? 3000 : 1000}, 0, 0};
        config.push_bytes = SLOT;
        config.pull_bytes = 4096;
        config.max_blocks = 16;
        config.timeout_ms = 1000;
        const double start = seconds_now();
        gpu_run(&setup, overlapping_replays, &o);
        printf("C06, overlapping replays of %s, 2 ranks on %d GPU%s: %d ranks with an error, %d "
               "with right sums, %.1f s\n",
               trial % 2 ? "different calls" : "equal calls", gpus, gpus > 1 ? "s" : "", o.errors,
               o.right, seconds_now() - start);
    }
}

/* ---- C15 ------------------------------------------------------------------------------------- */

/* As if so many calls had been made; no call is in flight. */
static void preset_sequences(gpu_rank *r, uint32_t first_sequence) {
    const oh_args *a = &r->context->comm->args;
    uint64_t words[1024];
    for (uint32_t b = 0; b < a->regions.max_blocks; b++) words[b] = first_sequence - 1u;
    gpu_write(r, (void *)(uintptr_t)(a->local + OH_LOCAL_SEQUENCES), words,
              a->regions.max_blocks * 8u);
}

static void expect_sequences(gpu_rank *r, uint32_t first_sequence, uint32_t calls) {
    const oh_args *a = &r->context->comm->args;
    uint64_t words[1024];
    uint32_t sequence = first_sequence - 1u;
    for (uint32_t i = 0; i < calls; i++) sequence = OH_SEQUENCE_NEXT(sequence);
    gpu_read(r, words, (void *)(uintptr_t)(a->local + OH_LOCAL_SEQUENCES),
             a->regions.max_blocks * 8u);
    for (uint32_t b = 0; b < a->regions.max_blocks; b++)
        if (words[b] != sequence)
            FAIL("C15, rank %d: sequence word %u holds 0x%llx, expected 0x%x", r->rank, b,
                 (unsigned long long)words[b], sequence);
}

static uint32_t preset_first, preset_blocks;

static void counters_wrap(gpu_rank *ranks, int here, void *argument) {
    const gpu_how eager = {.what = "C15"}, graph = {.what = "C15", .graph = true};
    gpu_call calls[20] = {{0}};
    (void)argument;
    for (size_t i = 0; i < 20; i++) {
        calls[i].count = 60 + i * 453;
        calls[i].first = i * 16;
        calls[i].blocks = preset_blocks;
        calls[i].threads = i % 2 ? 64 : 256;
        calls[i].in_place = i % 3 == 0;
        calls[i].algorithm = turn(i + i / 4);
    }
    for (int mode = 0; mode < 2; mode++) {
        for (int i = 0; i < here; i++) preset_sequences(&ranks[i], preset_first);
        gpu_batch_once(ranks, here, data, INPUT_MIXED, 15, ONEHOP_BFLOAT16, calls, 20,
                       mode ? &graph : &eager);
        for (int i = 0; i < here; i++) expect_sequences(&ranks[i], preset_first, 20);
        gpu_expect_idle(ranks, here);
    }
}

static void all_counters(gpu_layout layout, int world, int gpus, uint32_t widest) {
    static const uint32_t starts[] = {0x7ffffffbu, 0xfffffffbu};
    const uint32_t grids[] = {3, 12, widest};
    for (int s = 0; s < 2; s++)
        for (int g = 0; g < 3; g++) {
            char what[80];
            preset_first = starts[s];
            preset_blocks = grids[g];
            snprintf(what, sizeof what, "C15, counters at 0x%x, grid %u", starts[s], grids[g]);
            with(what, layout, world, gpus, widest, counters_wrap);
        }
}

/* ---- C29, C30, C31 --------------------------------------------------------------------------- */

static void many_chunks(gpu_rank *ranks, int here, void *argument) {
    const gpu_how eager = {.what = "C29"}, graph = {.what = "C29", .graph = true};
    const size_t chunk = SLOT / 2 / 2; /* elements of 2 bytes */
    gpu_call calls[120] = {{0}};
    uint64_t random = 29;
    (void)argument;
    for (size_t i = 0; i < 120; i++) {
        const size_t chunks = 3 + random_next(&random) % 14;
        calls[i].count =
            chunks * chunk - (random_next(&random) % 2 ? random_next(&random) % (chunk - 1) : 0);
        calls[i].first = random_next(&random) % 1000 * 8;
        calls[i].shift = i % 5 == 0 ? (unsigned)(1 + random_next(&random) % 15) : 0;
        calls[i].in_place = i % 3 == 0;
        calls[i].blocks = i % 4 == 1 ? (uint32_t)(2 + random_next(&random) % 11) : 0;
        calls[i].algorithm = turn(i + i / 4);
        calls[i].slow_rank = (int)(random_next(&random) % (uint64_t)ranks[0].world);
        calls[i].slow_us = i % 2 ? (unsigned)(random_next(&random) % 100) : 0;
    }
    for (int round = 0; round < 4; round++)
        gpu_batch_once(ranks, here, data, INPUT_MIXED, 29 + (uint64_t)round, ONEHOP_BFLOAT16, calls,
                       120, round % 2 ? &graph : &eager);
}

static void any_grid(gpu_rank *ranks, int here, void *argument) {
    const gpu_how eager = {.what = "C30"}, graph = {.what = "C30", .graph = true};
    static const uint32_t threads[] = {32, 64, 160, 256, 512};
    const uint32_t widest = ranks[0].context->regions.max_blocks;
    const uint32_t grids[] = {2, 3, 12, widest / 2, widest};
    gpu_call calls[250] = {{0}};
    uint64_t random = 30;
    (void)argument;
    for (size_t i = 0; i < 250; i++) {
        calls[i].count = 1 + random_next(&random) % 3000;
        calls[i].first = random_next(&random) % 1000 * 8;
        calls[i].shift = i % 7 == 0 ? (unsigned)(1 + random_next(&random) % 15) : 0;
        calls[i].in_place = random_next(&random) % 2;
        calls[i].blocks = grids[random_next(&random) % 5];
        calls[i].threads = threads[random_next(&random) % 5];
        calls[i].algorithm = turn(random_next(&random));
    }
    for (int round = 0; round < 6; round++) {
        gpu_batch_once(ranks, here, data, INPUT_MIXED, 300 + (uint64_t)round, ONEHOP_FLOAT16, calls,
                       250, round % 2 ? &graph : &eager);
        gpu_expect_idle(ranks, here);
    }
}

static void full_gpu_behind(gpu_rank *ranks, int here, void *argument) {
    gpu_how how = {.what = "C31", .echo = true};
    gpu_call calls[100] = {{0}};
    uint64_t random = 31;
    (void)argument;
    for (size_t i = 0; i < 100; i++) {
        calls[i].count = 1 + random_next(&random) % (i % 10 == 0 ? 60000 : 6000);
        calls[i].first = random_next(&random) % 1000 * 8;
        calls[i].in_place = i % 4 == 0;
        calls[i].algorithm = turn(i + i / 4);
        calls[i].slow_rank = (int)(random_next(&random) % (uint64_t)ranks[0].world);
        calls[i].slow_us = i % 5 == 0 ? 30 : 0;
    }
    for (int round = 0; round < 10; round++) {
        how.graph = round % 2;
        gpu_batch_once(ranks, here, data, INPUT_MIXED, 310 + (uint64_t)round, ONEHOP_BFLOAT16,
                       calls, 100, &how);
    }
}

/* ---- all of it ------------------------------------------------------------------------------- */

static void in_one_process(void *argument) {
    (void)argument;
    with("C06, two streams, threads", GPU_THREADS, 2, 1, 0, two_streams);
    with("C06, two streams, threads", GPU_THREADS, 4, 1, 0, two_streams);
    all_counters(GPU_THREADS, 2, 1, 60);
    with("C29, threads", GPU_THREADS, 2, 1, 0, many_chunks);
    with("C29, threads", GPU_THREADS, 5, 1, 0, many_chunks);
    with("C30, threads", GPU_THREADS, 2, 1, 0, any_grid);
    with("C30, threads", GPU_THREADS, 7, 1, 0, any_grid);
    with("C31, threads", GPU_THREADS, 2, 1, 0, full_gpu_behind);
    if (gpus_found > 1) {
        all_counters(GPU_THREADS, 2, 2, 100);
        with("C15, one thread for all", GPU_SINGLE, 2, 2, 100, counters_wrap);
        with("C06, two streams, threads", GPU_THREADS, 2, 2, 0, two_streams);
        with("C29, threads", GPU_THREADS, 9, 2, 0, many_chunks);
        with("C30, threads", GPU_THREADS, 2, 2, 0, any_grid);
        with("C30, threads", GPU_THREADS, 9, 2, 0, any_grid);
        with("C31, threads", GPU_THREADS, 4, 2, 0, full_gpu_behind);
    }
    replays_overlap(1);
    if (gpus_found > 1) replays_overlap(2);
}

int main(void) {
    gpus_found = gpu_main(100, 1);
    data = gpu_data_make(ROOM, ONEHOP_MAX_RANKS);
    gpu_apart(in_one_process, NULL);
    const int gpus = gpu_for_processes();
    if (gpus) {
        with("C06, two streams, process per rank", GPU_PROCESSES, 2, gpus, 0, two_streams);
        with("C29, process per rank", GPU_PROCESSES, 2, gpus, 0, many_chunks);
        with("C30, process per rank", GPU_PROCESSES, 2, gpus, 0, any_grid);
    }
    return 0;
}
