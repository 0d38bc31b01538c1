/* Property: 1shot_pull, 2shot_pull and 2shot_push give right sums under adverse scheduling
 * (support/lanes.h), with two and three lanes per rank: counters about to wrap and past 2^31 with
 * signals never written, many chunks with one lane held back, any grid after any grid, all
 * algorithms in turn on one communicator, a call on which ranks disagree; with registrations of
 * captured inputs, by whose addresses some calls go; and over multicast, emulated. Also the program
 * that tests/mutants builds from altered sources.
 *
 * test_pull_lanes [deadline in ms [calls in percent]] */
/* labels: quick timeout=240 */
#define LANES_HOST_PATHS
#define LANES_ALL_BODIES
#include "lanes.h"

static unsigned deadline_ms = 60000, percent = 100;
static bool registrations; /* of the groups to come */

static size_t scaled(size_t calls) {
    const size_t n = calls * percent / 100 / (HARNESS_SANITIZED ? 4 : 1);
    return n < 12 ? 12 : n;
}

static const uint32_t grids[] = {2, 3, 5, 12, 16};
#ifdef LANES_FEW_BODIES
static const onehop_dtype dtypes[] = {ONEHOP_BFLOAT16, ONEHOP_BFLOAT16, ONEHOP_BFLOAT16};
#else
static const onehop_dtype dtypes[] = {ONEHOP_FLOAT32, ONEHOP_BFLOAT16, ONEHOP_FLOAT16};
#endif
enum {
    PUSH = 1 << LANES_PUSH,
    HOST = 1 << LANES_HOST_1SHOT | 1 << LANES_HOST_2SHOT,
    ONE = 1 << LANES_PULL_1SHOT,
    TWO = 1 << LANES_PULL_2SHOT,
    PUSH_TWO = 1 << LANES_PUSH_2SHOT,
    CAST_ONE = 1 << LANES_MULTICAST_1SHOT,
    CAST_TWO = 1 << LANES_MULTICAST_2SHOT,
    CASTS = CAST_ONE | CAST_TWO,
    ALL = PUSH | HOST | ONE | TWO | PUSH_TWO
};

/* Calls of any of `algorithms`, of at most `most` elements, one lane of one rank held back. */
static void mixed(const char *what, int world, int lanes, unsigned algorithms, size_t max,
                  uint32_t first_sequence, size_t count) {
    lanes_group g;
    lanes_call *calls = calloc(count, sizeof *calls);
    uint64_t random = algorithms * 64u + (unsigned)(world * 4 + lanes);
    for (size_t i = 0; i < count; i++) {
        lanes_algorithm a;
        do a = (lanes_algorithm)(random_next(&random) % (algorithms & CASTS ? 8 : 6));
        while (!(algorithms >> a & 1u));
        /* 1shot_push has not all types for all numbers of ranks here. */
        calls[i] = (lanes_call){a,
                                dtypes[random_next(&random) % (a == LANES_PUSH ? 2 : 3)],
                                (a == LANES_PUSH_2SHOT ? (size_t)world * 8 : 1) +
                                    random_next(&random) % max,
                                grids[random_next(&random) % 5],
                                i % 3 == 0,
                                i % 4 ? INPUT_REAL : INPUT_MIXED,
                                (int)(random_next(&random) % (uint64_t)world),
                                (int)(random_next(&random) % (uint64_t)lanes),
                                0};
    }
    lanes_open(&g, world, lanes, deadline_ms);
    g.registrations = registrations;
    if (first_sequence) lanes_preset(&g, first_sequence);
    lanes_run(&g, what, calls, count);
    lanes_close(&g);
    free(calls);
}

/* Many chunks (of 2shot_push: 2 KiB a rank, one to eight of them), the last one short, the next
 * call at once. */
static void chunk_after_chunk(int world, int lanes, lanes_algorithm algorithm) {
    lanes_group g;
    const size_t count = scaled(48);
    lanes_call *calls = calloc(count, sizeof *calls);
    uint64_t random = 31;
    for (size_t i = 0; i < count; i++) {
        const size_t elements = 4200 + random_next(&random) % 12000;
        calls[i] = (lanes_call){algorithm,
                                ONEHOP_BFLOAT16,
                                elements,
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

static void ranks_disagree(int world, lanes_algorithm algorithm, size_t elements) {
    lanes_group g;
    lanes_call calls[3];
    for (int i = 0; i < 3; i++)
        calls[i] =
            (lanes_call){algorithm, ONEHOP_BFLOAT16, elements, 3, false, INPUT_REAL, -1, -1, 0};
    lanes_open(&g, world, 2, deadline_ms);
    g.expect_mismatch = true;
    lanes_run(&g, "ranks disagree", calls, 3);
    lanes_close(&g);
}

/* The last call's registration is a stale one on one rank. */
static void registration_of_another_call(int world, lanes_algorithm algorithm) {
    lanes_group g;
    lanes_call calls[3];
    for (int i = 0; i < 3; i++)
        calls[i] = (lanes_call){algorithm, ONEHOP_BFLOAT16, 900, 3, false, INPUT_REAL, -1, -1, 0};
    lanes_open(&g, world, 2, deadline_ms);
    g.registrations = g.expect_registration = true;
    lanes_run(&g, "a stale registration", calls, 3);
    lanes_close(&g);
}

int main(int argc, char **argv) {
    if (argc > 1) deadline_ms = (unsigned)atoi(argv[1]);
    if (argc > 2) percent = (unsigned)atoi(argv[2]);
    watchdog(230);
    /* What is short comes first: a mutant ends with the first thing found wrong. */
    for (int world = 2; world <= 3; world++) {
        /* Nobody has signalled when calls count past 2^31; then through both wraps. */
        mixed("signals never written", world, 2, ONE | TWO, 3000, 0x80000005u, 12);
        mixed("counters about to wrap", world, 2, ONE | TWO | PUSH_TWO, 3000, 0x7ffffffbu, 20);
        mixed("counters about to wrap", world, 2, ONE | TWO | PUSH_TWO, 3000, 0xfffffffbu, 20);
        mixed("multicast, counters about to wrap", world, 2, CASTS, 9000, 0xfffffffbu, 12);
    }
    mixed("bodies for any number of ranks", 5, 2, ONE | TWO | PUSH_TWO, 6000, 0, scaled(60));
    registrations = true;
    for (int world = 2; world <= 4; world++) {
        mixed("1shot_pull with registrations", world, 2, ONE, 700, 0, scaled(60));
        mixed("2shot_pull with registrations", world, 2, TWO, 700, 0, scaled(60));
        mixed("all with registrations", world, 3, ALL, 6000, 0, scaled(40));
    }
    mixed("all with registrations", 7, 2, ALL, 3000, 0xfffffffbu, scaled(24));
    mixed("any number of ranks, with registrations", 5, 2, ONE | TWO, 3000, 0x80000005u,
          scaled(40));
    registrations = false;
    registration_of_another_call(2, LANES_PULL_1SHOT);
    registration_of_another_call(3, LANES_PULL_2SHOT);
    for (int world = 2; world <= 4; world++) {
        mixed("1shot_pull, any grid after any grid", world, 2, ONE, 1500, 0, scaled(120));
        mixed("2shot_pull, any grid after any grid", world, 2, TWO, 1500, 0, scaled(120));
        chunk_after_chunk(world, 2, LANES_PULL_1SHOT);
        chunk_after_chunk(world, 2, LANES_PULL_2SHOT);
        mixed("2shot_push, any grid after any grid", world, 2, PUSH_TWO, 1500, 0, scaled(120));
        chunk_after_chunk(world, 2, LANES_PUSH_2SHOT);
        mixed("all algorithms in turn", world, 2, ALL, 6000, 0, scaled(160));
    }
    mixed("all algorithms in turn", 3, 3, ALL, 6000, 0, scaled(120));
    mixed("two shots and 1shot_pull", 7, 2, ONE | TWO | PUSH_TWO, 6000, 0, scaled(60));
    if (percent == 100)
        mixed("bodies for any number", 9, 2, ONE | TWO | PUSH_TWO, 3000, 0, scaled(60));
    for (int world = 2; world <= 3; world++) {
        mixed("1shot over multicast", world, 2, CAST_ONE, 1500, 0, scaled(60));
        mixed("2shot over multicast", world, 2, CAST_TWO, 1500, 0, scaled(60));
        chunk_after_chunk(world, 2, LANES_MULTICAST_1SHOT);
        chunk_after_chunk(world, 2, LANES_MULTICAST_2SHOT);
    }
    mixed("all and multicast in turn", 5, 2, ALL | CASTS, 6000, 0, scaled(40));
    ranks_disagree(3, LANES_MULTICAST_1SHOT, 9000);
    ranks_disagree(3, LANES_MULTICAST_2SHOT, 9000);
    ranks_disagree(2, LANES_PULL_1SHOT, 300);
    ranks_disagree(3, LANES_PULL_1SHOT, 9000);
    ranks_disagree(3, LANES_PULL_2SHOT, 9000);
    ranks_disagree(3, LANES_PUSH_2SHOT, 9000);
    return 0;
}
