/* Property: reduce-scatter and all-gather give right bits under adverse scheduling
 * (support/lanes.h), with one to three lanes per rank: each body alone and all in turn, with
 * all-reduces among them, many chunks with one lane held back, any grid after any grid, counters
 * about to wrap and past 2^31 with flags never written, calls on which ranks disagree. Also the
 * program that tests/mutants builds from altered sources.
 *
 * test_parts_lanes [deadline in ms [calls in percent]] */
/* labels: quick timeout=240 */
#define LANES_HOST_PATHS
#define LANES_PARTS
#include "lanes.h"

static unsigned deadline_ms = 60000, percent = 100;

static size_t scaled(size_t calls) {
    const size_t n = calls * percent / 100 / (HARNESS_SANITIZED ? 4 : 1);
    return n < 12 ? 12 : n;
}

static const uint32_t grids[] = {2, 3, 5, 12, 16};
enum {
    SCATTER = 1 << LANES_SCATTER,
    FLAGS = 1 << LANES_GATHER_LL,
    PUSH = 1 << LANES_GATHER_PUSH,
    HOST = 1 << LANES_HOST_SCATTER | 1 << LANES_HOST_GATHER,
    REDUCE = 1 << LANES_PUSH | 1 << LANES_HOST_1SHOT | 1 << LANES_HOST_2SHOT,
    ALL = SCATTER | FLAGS | PUSH | HOST | REDUCE
};

/* A call of an algorithm, of at most `most` bytes a part. Gathers take every count of bytes. */
static lanes_call call_of(lanes_algorithm a, uint64_t *random, size_t max, size_t index, int world,
                          int lanes) {
    const bool gather = a != LANES_PUSH && lanes_is_gather(a);
    const onehop_dtype dtype = gather                    ? 0
                               : random_next(random) % 2 ? ONEHOP_BFLOAT16
                                                         : ONEHOP_FLOAT32;
    const size_t size = gather ? 1 : reference_element_bytes(dtype);
    const size_t limit =
        a == LANES_GATHER_LL && max > LANES_LL_BYTES / 2 ? LANES_LL_BYTES / 2 : max;
    size_t count = 1 + random_next(random) % (limit / size);
    /* Aligned parts go another way. */
    if (random_next(random) % 2) count = oh_round_up(count, 16 / size);
    if (count * size > limit) count = limit / size;
    return (lanes_call){a,
                        dtype,
                        count,
                        grids[random_next(random) % 5],
                        random_next(random) % 2,
                        index % 4 ? INPUT_REAL : INPUT_MIXED,
                        (int)(random_next(random) % (uint64_t)world),
                        (int)(random_next(random) % (uint64_t)lanes),
                        0};
}

static void mixed(const char *what, int world, int lanes, unsigned algorithms, size_t max,
                  uint32_t first_sequence, size_t count) {
    lanes_group g;
    lanes_call *calls = calloc(count, sizeof *calls);
    uint64_t random = algorithms * 64u + (unsigned)(world * 4 + lanes);
    for (size_t i = 0; i < count; i++) {
        lanes_algorithm a;
        do a = (lanes_algorithm)(random_next(&random) % (LANES_HOST_GATHER + 1));
        while (!(algorithms >> a & 1u));
        calls[i] = call_of(a, &random, max, i, world, lanes);
    }
    lanes_open(&g, world, lanes, deadline_ms);
    g.long_us = 400;
    if (first_sequence) lanes_preset(&g, first_sequence);
    lanes_run(&g, what, calls, count);
    lanes_close(&g);
    free(calls);
}

static void ranks_disagree(int world, lanes_algorithm algorithm, size_t count) {
    lanes_group g;
    lanes_call calls[3];
    const onehop_dtype dtype = lanes_is_gather(algorithm) ? 0 : ONEHOP_BFLOAT16;
    for (int i = 0; i < 3; i++)
        calls[i] = (lanes_call){algorithm, dtype, count, 3, false, INPUT_REAL, -1, -1, 0};
    lanes_open(&g, world, 2, deadline_ms);
    g.expect_mismatch = true;
    lanes_run(&g, "ranks disagree", calls, 3);
    lanes_close(&g);
}

/* Each body alone, so that what is wrong with one is not hidden by the others' slowness. */
static void each(int world, int lanes, size_t calls) {
    mixed("gather_ll", world, lanes, FLAGS, 1024, 0, calls);
    mixed("gather_push", world, lanes, PUSH, 9000, 0, calls);
    mixed("scatter_push", world, lanes, SCATTER, 9000, 0, calls);
    mixed("host_scatter and host_gather", world, 1, HOST, 9000, 0, calls);
}

int main(int argc, char **argv) {
    if (argc > 1) deadline_ms = (unsigned)atoi(argv[1]);
    if (argc > 2) percent = (unsigned)atoi(argv[2]);
    watchdog(230);
    /* What is short comes first: a mutant ends with the first thing found wrong. */
    for (int world = 2; world <= 3; world++) {
        mixed("flags never written", world, 2, PUSH | FLAGS, 3000, 0x80000005u, 12);
        mixed("counters about to wrap", world, 2, ALL, 3000, 0x7ffffffbu, 20);
        mixed("counters about to wrap", world, 2, ALL, 3000, 0xfffffffbu, 20);
    }
    ranks_disagree(2, LANES_GATHER_LL, 100);
    ranks_disagree(3, LANES_GATHER_PUSH, 9000);
    ranks_disagree(3, LANES_SCATTER, 4000);
    ranks_disagree(3, LANES_HOST_SCATTER, 9000);
    ranks_disagree(2, LANES_HOST_GATHER, 100);
    for (int form = 1; form >= 0; form--) {
        lanes_push_whole_chunk = (oh_u32)form;
        mixed("scatter_push, many chunks", 2, 2, SCATTER, 15000, 0, scaled(30));
        mixed("scatter_push, many chunks", 4, 2, SCATTER, 9000, 0, scaled(16));
    }
    lanes_push_whole_chunk = 1;
    for (int world = 2; world <= 4; world++) each(world, 2, scaled(30));
    mixed("gather_push, many chunks", 2, 3, PUSH, 20000, 0, scaled(40));
    mixed("host_gather, many chunks", 2, 1, 1 << LANES_HOST_GATHER, 20000, 0, scaled(200));
    mixed("host_gather, many chunks", 3, 1, 1 << LANES_HOST_GATHER, 20000, 0, scaled(200));
    mixed("all in turn", 2, 2, ALL, 6000, 0, scaled(60));
    mixed("all in turn", 3, 3, ALL, 6000, 0, scaled(40));
    mixed("all in turn", 7, 2, ALL, 3000, 0, scaled(16));
    return 0;
}
