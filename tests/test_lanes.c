/* Property: 1shot_push gives right sums under adverse scheduling (support/lanes.h), with two and
 * three lanes per rank and blocks spread over them: counters about to wrap, many chunks with one
 * lane held back, any grid after any grid, words that look like the sentinel, a call on which ranks
 * disagree. Also the program that tests/mutants builds from altered sources.
 *
 * test_lanes [deadline in ms [calls in percent]] */
/* labels: quick timeout=240 */
#include "lanes.h"

static unsigned deadline_ms = 60000, percent = 100;

static size_t scaled(size_t calls) {
    const size_t n = calls * percent / 100 / (HARNESS_SANITIZED ? 4 : 1);
    return n < 12 ? 12 : n;
}

static const uint32_t grids[] = {2, 3, 12, 16};

/* Counters at 2^31 - 5 and 2^32 - 5; each call has another count, so that an old signature would
 * differ. */
static void counters_wrap(int world, uint32_t first_sequence, uint32_t blocks) {
    lanes_group g;
    lanes_call calls[20];
    for (int i = 0; i < 20; i++)
        calls[i] = (lanes_call){LANES_PUSH, ONEHOP_BFLOAT16, (size_t)(60 + i * 53),
                                blocks,     i % 2,           INPUT_REAL,
                                i % world,  i % 2,           0};
    lanes_open(&g, world, 2, deadline_ms);
    lanes_preset(&g, first_sequence);
    lanes_run(&g, "counters about to wrap", calls, 20);
    lanes_close(&g);
}

/* Two to nine chunks, the last one short or whole, the next call at once, one lane held back. */
static void many_chunks(int world, int lanes) {
    lanes_group g;
    const size_t count = scaled(48);
    lanes_call *calls = calloc(count, sizeof *calls);
    uint64_t random = 29;
    for (size_t i = 0; i < count; i++) {
        const size_t chunks = 2 + random_next(&random) % 8;
        const size_t elements =
            chunks * 1024 - (random_next(&random) % 2 ? random_next(&random) % 1000 : 0);
        calls[i] = (lanes_call){LANES_PUSH,
                                ONEHOP_BFLOAT16,
                                elements < 2049 ? 2049 : elements,
                                3 + 9 * (i % 2),
                                i % 3 == 0,
                                INPUT_REAL,
                                (int)(random_next(&random) % (uint64_t)world),
                                (int)(random_next(&random) % (uint64_t)lanes),
                                0};
    }
    lanes_open(&g, world, lanes, deadline_ms);
    g.long_us = 500;
    lanes_run(&g, "many chunks, one lane held back", calls, count);
    lanes_close(&g);
    free(calls);
}

static void any_grid_after_any(int world, int lanes) {
    lanes_group g;
    const size_t count = scaled(120);
    lanes_call *calls = calloc(count, sizeof *calls);
    uint64_t random = 30;
    for (size_t i = 0; i < count; i++)
        calls[i] = (lanes_call){LANES_PUSH,
                                i % 2 ? ONEHOP_FLOAT32 : ONEHOP_BFLOAT16,
                                1 + random_next(&random) % 700,
                                grids[random_next(&random) % 4],
                                i % 3 == 0,
                                INPUT_MIXED,
                                (int)(random_next(&random) % (uint64_t)world),
                                (int)(random_next(&random) % (uint64_t)lanes),
                                0};
    lanes_open(&g, world, lanes, deadline_ms);
    lanes_run(&g, "any grid after any grid", calls, count);
    lanes_close(&g);
    free(calls);
}

static void sentinels_as_data(void) {
    static const onehop_dtype dtypes[] = {ONEHOP_FLOAT32, ONEHOP_FLOAT16, ONEHOP_BFLOAT16};
    lanes_group g;
    lanes_call calls[24];
    for (int i = 0; i < 24; i++)
        calls[i] = (lanes_call){
            LANES_PUSH, dtypes[i % 3], (size_t)(200 + i), 3, i % 2, INPUT_SPECIAL, -1, -1, 0};
    lanes_open(&g, 3, 2, deadline_ms);
    lanes_run(&g, "words that look like the sentinel", calls, 24);
    lanes_close(&g);
}

static void ranks_disagree(int world) {
    lanes_group g;
    lanes_call calls[3];
    for (int i = 0; i < 3; i++)
        calls[i] = (lanes_call){LANES_PUSH, ONEHOP_BFLOAT16, 300, 3, false, INPUT_REAL, -1, -1, 0};
    lanes_open(&g, world, 2, deadline_ms);
    g.expect_mismatch = true;
    lanes_run(&g, "ranks disagree", calls, 3);
    lanes_close(&g);
}

int main(int argc, char **argv) {
    static const uint32_t starts[] = {0x7ffffffbu, 0xfffffffbu};
    if (argc > 1) deadline_ms = (unsigned)atoi(argv[1]);
    if (argc > 2) percent = (unsigned)atoi(argv[2]);
    watchdog(230);
    /* What is short comes first: a mutant ends with the first thing found wrong. */
    sentinels_as_data();
    ranks_disagree(2);
    ranks_disagree(3);
    for (int form = 1; form >= 0; form--) {
        lanes_push_whole_chunk = (oh_u32)form;
        for (int i = 0; i < 2; i++)
            for (int b = 1; b <= 2; b++) {
                counters_wrap(2, starts[i], grids[b]);
                counters_wrap(4, starts[i], grids[b]);
            }
    }
    many_chunks(2, 2);
    lanes_push_whole_chunk = 1;
    any_grid_after_any(2, 2);
    any_grid_after_any(4, 2);
    any_grid_after_any(3, 3);
    many_chunks(2, 2);
    many_chunks(3, 2);
    if (percent == 100) any_grid_after_any(9, 2);
    return 0;
}
