/* Property: host_1shot and host_2shot, and 1shot_push among them, give right sums under adverse
 * scheduling (support/lanes.h): copies and sums interrupted in the middle, stores to peers delayed,
 * messages of one chunk and of many following each other at once, counters about to wrap, a call on
 * which ranks disagree. Also the program that tests/mutants builds from altered sources.
 *
 * test_host_paths [deadline in ms [calls in percent]] */
/* labels: quick timeout=240 */
#define LANES_HOST_PATHS
#include "lanes.h"

static unsigned deadline_ms = 60000, percent = 100;

static size_t scaled(size_t calls) {
    const size_t n = calls * percent / 100 / (HARNESS_SANITIZED ? 4 : 1);
    return n < 12 ? 12 : n;
}

/* Any of `algorithms` bits after any other, of one chunk or of many. */
static void mixed(const char *what, int world, unsigned algorithms, uint32_t first_sequence,
                  size_t count) {
    static const onehop_dtype dtypes[] = {ONEHOP_FLOAT32, ONEHOP_BFLOAT16};
    lanes_group g;
    lanes_call *calls = calloc(count, sizeof *calls);
    uint64_t random = algorithms * 16u + (unsigned)world;
    for (size_t i = 0; i < count; i++) {
        lanes_algorithm a;
        do a = (lanes_algorithm)(random_next(&random) % 3);
        while (!(algorithms >> a & 1u));
        const size_t max = a == LANES_PUSH || random_next(&random) % 2 ? 1500 : 6000;
        calls[i] = (lanes_call){a,
                                dtypes[i % 2],
                                1 + random_next(&random) % max,
                                3,
                                i % 3 == 0,
                                i % 4 ? INPUT_REAL : INPUT_MIXED,
                                (int)(random_next(&random) % (uint64_t)world),
                                0,
                                0};
    }
    lanes_open(&g, world, 1, deadline_ms);
    if (first_sequence) lanes_preset(&g, first_sequence);
    lanes_run(&g, what, calls, count);
    lanes_close(&g);
    free(calls);
}

/* Only calls of one chunk, whose flag is the signature alone; over and over through the wrap. */
static void counters_wrap(int world) {
    lanes_group g;
    lanes_call calls[8];
    for (size_t round = 0; round < scaled(48) / 4; round++) {
        for (int i = 0; i < 8; i++)
            calls[i] = (lanes_call){LANES_HOST_1SHOT,
                                    ONEHOP_BFLOAT16,
                                    200 + (size_t)i,
                                    1,
                                    i % 2,
                                    INPUT_REAL,
                                    (int)round % world,
                                    0,
                                    0};
        lanes_open(&g, world, 1, deadline_ms);
        lanes_preset(&g, 0xfffffffcu);
        lanes_run(&g, "one chunk, counters about to wrap", calls, 8);
        lanes_close(&g);
    }
}

static void ranks_disagree(int world, lanes_algorithm algorithm, size_t elements) {
    lanes_group g;
    lanes_call calls[3];
    for (int i = 0; i < 3; i++)
        calls[i] =
            (lanes_call){algorithm, ONEHOP_BFLOAT16, elements, 1, false, INPUT_REAL, -1, -1, 0};
    lanes_open(&g, world, 1, deadline_ms);
    g.expect_mismatch = true;
    lanes_run(&g, "ranks disagree", calls, 3);
    lanes_close(&g);
}

/* Progress words of many steps, left by the same sequence numbers a turn of the count ago. */
static void old_progress(lanes_algorithm algorithm) {
    lanes_group g;
    lanes_call calls[2];
    for (int i = 0; i < 2; i++)
        calls[i] = (lanes_call){algorithm, ONEHOP_BFLOAT16, 9000, 1, false, INPUT_REAL, 0, 0, 0};
    for (size_t round = 0; round < scaled(60); round++) {
        lanes_open(&g, 2, 1, deadline_ms);
        lanes_preset(&g, 6);
        g.holds = 1; /* rank 0 alone falls behind, between any two stores */
        g.long_us = 2000;
        for (int r = 0; r < 2; r++) {
            oh_control *control = (void *)((char *)g.ranks[r].buffer + g.regions.control);
            for (oh_u32 parity = 0; parity < 2; parity++)
                control->lines[parity][r].progress = (oh_u64)40 << 32 | (6 + parity);
        }
        lanes_run(&g, "progress of a turn of the sequence numbers ago", calls, 2);
        lanes_close(&g);
    }
}

int main(int argc, char **argv) {
    enum {
        PUSH = 1,
        ONE = 2,
        TWO = 4
    };
    if (argc > 1) deadline_ms = (unsigned)atoi(argv[1]);
    if (argc > 2) percent = (unsigned)atoi(argv[2]);
    watchdog(230);
    /* What is short comes first: a mutant ends with the first thing found wrong. */
    ranks_disagree(2, LANES_HOST_1SHOT, 100);
    ranks_disagree(3, LANES_HOST_1SHOT, 9000);
    ranks_disagree(3, LANES_HOST_2SHOT, 9000);
    old_progress(LANES_HOST_1SHOT);
    old_progress(LANES_HOST_2SHOT);
    for (int world = 2; world <= 4; world++) {
        mixed("host_1shot", world, ONE, 0, scaled(120));
        mixed("host_2shot", world, TWO, 0, scaled(120));
        mixed("all three", world, PUSH | ONE | TWO, 0, scaled(120));
    }
    for (int world = 2; world <= 4; world++) {
        mixed("counters about to wrap", world, ONE | TWO, 0x7ffffffbu, 20);
        mixed("counters about to wrap", world, ONE | TWO, 0xfffffffbu, 20);
        counters_wrap(world);
    }
    return 0;
}
