/* The table of models: which must hold, which must break, and whether they do.
 *
 *   explore [--long] [--only TEXT] [--limit STATES] [--trace] [--unreduced]
 *
 * One row per model and variant. A row that holds is complete unless its result says "undecided"
 * (--limit was reached): every reachable state was visited. For a row that must break, the same
 * calls are also run with the library's own rules and must hold, so that what breaks is the rule it
 * names. Exit status 1: some row is not as expected. --long adds rows that take 8 minutes and 1 GB
 * in all; --unreduced takes no short cut through reads (machine.c), to check that the short cut
 * loses nothing. */
#include "models.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef enum expectation {
    GOOD,
    BAD
} expectation;

typedef struct row {
    const char *group, *variant;
    expectation expected;
    bool is_long;
    model model;
} row;

/* One chunk: n units on b blocks of t threads. Many: chunks of c units. */
#define GRID(b, t, n)        {PUSH_1SHOT, b, t, n, 0}
#define CHUNKED(b, t, n, c)  {PUSH_1SHOT, b, t, n, c}
#define TWO_SHOT(b, t, n, c) {PUSH_2SHOT, b, t, n, c}
#define ONE(chunks)          {HOST_1SHOT, 0, 0, chunks, 0}
#define TWO(chunks)          {HOST_2SHOT, 0, 0, chunks, 0}
#define PART(chunks)         {HOST_GATHER, 0, 0, chunks, 0}
#define INPUT(n)             {WRITE, 1, 1, n, 0}
#define PULL1(b, t, n)       {DIRECT_1SHOT, b, t, n, 0}
#define PULL2(b, t, n)       {DIRECT_2SHOT, b, t, n, 0}
#define GATHER(chunks)       {GATHER_PUSH, 1, 1, chunks, 0}
#define DYING(w, ranks)      .world = w, .gives_up = ranks, .no_signatures = true
#define CALLS(...)           .calls = {__VA_ARGS__}

#define WIDE_NARROW_WIDE CALLS(GRID(2, 1, 2), GRID(1, 1, 1), GRID(2, 1, 2))
#define FIVE_GRIDS       CALLS(GRID(1, 1, 1), GRID(2, 1, 2), GRID(1, 1, 2), GRID(2, 1, 1), GRID(1, 1, 1))
#define FIVE_SMALL       CALLS(GRID(1, 1, 1), GRID(1, 1, 1), GRID(1, 1, 1), GRID(1, 1, 1), GRID(1, 1, 1))
#define THREE_SMALL      CALLS(GRID(1, 1, 1), GRID(1, 1, 1), GRID(1, 1, 1))
#define FOUR_CHUNKS      CALLS(CHUNKED(1, 1, 4, 1), GRID(1, 1, 2), CHUNKED(1, 1, 3, 1))
#define TWO_PULL1        CALLS(INPUT(1), PULL1(1, 1, 1), INPUT(1), PULL1(1, 1, 1), INPUT(1))
#define TWO_PULL2        CALLS(INPUT(2), PULL2(1, 1, 2), INPUT(2), PULL2(1, 1, 2), INPUT(2))
#define WIDE_PULL1       CALLS(INPUT(2), PULL1(1, 2, 2), INPUT(2))
#define ONE_PULL1        CALLS(INPUT(1), PULL1(1, 1, 1), INPUT(1))
#define LONGER_PULL2     CALLS(INPUT(4), PULL2(1, 1, 4), INPUT(4))
#define WIDER_PULL2      CALLS(INPUT(3), PULL2(1, 1, 3), INPUT(3))
#define WIDER_TWO_PULL2  CALLS(INPUT(3), PULL2(1, 1, 3), INPUT(3), PULL2(1, 1, 3), INPUT(3))
#define TWO_THREADS      CALLS(CHUNKED(2, 1, 6, 2), CHUNKED(1, 1, 3, 1))
#define THREE_2SHOT      CALLS(TWO_SHOT(1, 1, 2, 0), TWO_SHOT(1, 1, 2, 0), TWO_SHOT(1, 1, 2, 0))
#define THREE_GATHERS    CALLS(GATHER(1), GATHER(1), GATHER(1))
#define CHUNKS_2SHOT     CALLS(TWO_SHOT(1, 1, 8, 2), TWO_SHOT(1, 1, 4, 0), TWO_SHOT(1, 1, 5, 2))

/* clang-format off */
static const row rows[] = {
    /* ---- 1shot_push: sequence numbers, parities, signatures ---------------------------------- */
    {"1shot_push", "one small grid, five calls, W=2", GOOD, false, {.world = 2, FIVE_SMALL}},
    {"1shot_push", "grids of 1 and 2 blocks, five calls, W=2", GOOD, false, {.world = 2, FIVE_GRIDS}},
    {"1shot_push", "wide, narrow, wide, W=2", GOOD, false, {.world = 2, WIDE_NARROW_WIDE}},
    {"1shot_push", "units of two words, W=2", GOOD, false, {.world = 2, .unit_words = 2, THREE_SMALL}},
    {"1shot_push", "blocks of two threads, W=2", GOOD, false, {.world = 2, CALLS(GRID(1, 2, 2), GRID(1, 1, 1), GRID(1, 2, 2))}},
    {"1shot_push", "sequence numbers wrap, W=2", GOOD, false, {.world = 2, .last_sequence = 13, FIVE_SMALL}},
    {"1shot_push", "two calls, W=3", GOOD, false, {.world = 3, .no_guard = true, CALLS(GRID(1, 1, 1), GRID(1, 1, 1))}},
    {"1shot_push", "three calls, no guard, W=3", GOOD, true, {.world = 3, .no_guard = true, THREE_SMALL}},
    {"1shot_push", "three calls, W=3", GOOD, true, {.world = 3, THREE_SMALL}},
    {"1shot_push", "five calls, no signatures, W=3", GOOD, false, {.world = 3, .no_signatures = true, FIVE_SMALL}},
    {"1shot_push", "wide, narrow, wide, no signatures, W=3", GOOD, true, {.world = 3, .no_signatures = true, WIDE_NARROW_WIDE}},
    {"1shot_push", "five calls, W=3", GOOD, true, {.world = 3, .no_guard = true, FIVE_SMALL}},
    {"1shot_push", "grids of 1 and 2 blocks, W=3", GOOD, true, {.world = 3, .no_guard = true, CALLS(GRID(2, 1, 2), GRID(1, 1, 1))}},
    {"1shot_push", "grids of 2 and 3 blocks, W=2", GOOD, true, {.world = 2, CALLS(GRID(3, 1, 3), GRID(2, 1, 2), GRID(1, 1, 1), GRID(3, 1, 3))}},
    {"1shot_push", "no signatures: data is credit enough, W=2", GOOD, false, {.world = 2, .no_signatures = true, FIVE_GRIDS}},
    {"1shot_push", "one phase", BAD, false, {.world = 2, .no_guard = true, .one_parity = true, THREE_SMALL}},
    {"1shot_push", "one sequence word, bumped by one block", BAD, false, {.world = 2, .no_guard = true, .sequences = SEQUENCE_BUMPED_BY_ONE, WIDE_NARROW_WIDE}},
    {"1shot_push", "blocks write only their own sequence word", BAD, false, {.world = 2, .no_guard = true, .sequences = SEQUENCES_OWN_ONLY, WIDE_NARROW_WIDE}},
    {"1shot_push", "no block_sync before the sequence number words", BAD, false, {.world = 2, .no_guard = true, .no_meeting = true, CALLS(GRID(1, 2, 2), GRID(1, 2, 2), GRID(1, 2, 2))}},
    {"1shot_push", "a grid starts before the last has ended", BAD, false, {.world = 2, .no_guard = true, .overlap = true, WIDE_NARROW_WIDE}},
    {"1shot_push", "calls do not order stores", BAD, false, {.world = 2, .no_guard = true, .no_boundary = true, THREE_SMALL}},
    {"1shot_push", "calls do not order stores, stores in order", GOOD, false, {.world = 2, .no_guard = true, .no_boundary = true, .in_order = true, THREE_SMALL}},
    {"1shot_push", "sequence numbers wrap to an odd one", BAD, false, {.world = 2, .no_guard = true, .wraps_to_odd = true, .last_sequence = 13, FIVE_SMALL}},
    /* ---- chunks ------------------------------------------------------------------------------ */
    {"1shot_push chunks", "1, 2 and 4 chunks, W=2", GOOD, false, {.world = 2, FOUR_CHUNKS}},
    {"1shot_push chunks", "two threads, three chunks, W=2", GOOD, false, {.world = 2, TWO_THREADS}},
    {"1shot_push chunks", "whole chunks pushed first, W=2", GOOD, false, {.world = 2, .whole_chunks = true, CALLS(CHUNKED(1, 1, 6, 2), GRID(1, 1, 4), CHUNKED(1, 1, 4, 2))}},
    {"1shot_push chunks", "three chunks, then one, no signatures, W=3", GOOD, false, {.world = 3, .no_signatures = true, CALLS(CHUNKED(1, 1, 3, 1), GRID(1, 1, 1))}},
    {"1shot_push chunks", "three chunks, W=3", GOOD, true, {.world = 3, CALLS(CHUNKED(1, 1, 3, 1))}},
    {"1shot_push chunks", "three chunks, two calls, W=3", GOOD, true, {.world = 3, .no_guard = true, CALLS(CHUNKED(1, 1, 3, 1), CHUNKED(1, 1, 3, 1))}},
    {"1shot_push chunks", "one sub-slot", BAD, false, {.world = 2, .no_guard = true, .sub_slots = 1, FOUR_CHUNKS}},
    {"1shot_push chunks", "a phase per chunk", BAD, false, {.world = 2, .no_guard = true, .parity_per_chunk = true, CALLS(CHUNKED(1, 1, 2, 1), CHUNKED(1, 1, 2, 1), GRID(1, 1, 1))}},
    {"1shot_push chunks", "a phase per chunk, the last one shorter", BAD, false, {.world = 2, .no_guard = true, .parity_per_chunk = true, CALLS(CHUNKED(2, 1, 3, 2), GRID(2, 1, 2))}},
    {"1shot_push chunks", "no fence between re-arming and push", BAD, false, {.world = 2, .no_guard = true, .no_fence = true, FOUR_CHUNKS}},
    {"1shot_push chunks", "no fence, stores in order", GOOD, false, {.world = 2, .no_guard = true, .no_fence = true, .in_order = true, FOUR_CHUNKS}},
    {"1shot_push chunks", "two chunks need no fence", GOOD, false, {.world = 2, .no_fence = true, CALLS(CHUNKED(1, 1, 2, 1), CHUNKED(1, 1, 4, 2), CHUNKED(1, 1, 2, 1))}},
    {"1shot_push chunks", "a unit changes its thread from chunk to chunk", BAD, false, {.world = 2, .no_guard = true, .units_wander = true, CALLS(CHUNKED(2, 1, 6, 2))}},
    /* ---- 2shot_push -------------------------------------------------------------------------- */
    {"2shot_push", "three calls, W=2", GOOD, false, {.world = 2, THREE_2SHOT}},
    {"2shot_push", "with 1shot_push in between, W=2", GOOD, false, {.world = 2, CALLS(TWO_SHOT(1, 1, 3, 0), GRID(1, 1, 1), TWO_SHOT(2, 1, 4, 0), GRID(1, 1, 1))}},
    {"2shot_push", "two calls, no signatures, W=3", GOOD, false, {.world = 3, .no_signatures = true, CALLS(TWO_SHOT(1, 1, 3, 0), TWO_SHOT(1, 1, 3, 0))}},
    {"2shot_push", "four chunks, one, three with a short shard, W=2", GOOD, false, {.world = 2, CHUNKS_2SHOT}},
    {"2shot_push", "two threads, three chunks, W=2", GOOD, false, {.world = 2, .no_signatures = true, CALLS(TWO_SHOT(2, 1, 12, 4))}},
    {"2shot_push", "three chunks, no signatures, W=3", GOOD, true, {.world = 3, .no_signatures = true, CALLS(TWO_SHOT(1, 1, 9, 3))}},
    {"2shot_push", "one phase", BAD, false, {.world = 2, .no_guard = true, .one_parity = true, THREE_2SHOT}},
    {"2shot_push", "calls do not order stores", BAD, false, {.world = 2, .no_guard = true, .no_boundary = true, THREE_2SHOT}},
    {"2shot_push", "one sub-slot for data", BAD, false, {.world = 2, .no_guard = true, .sub_slots = 1, CHUNKS_2SHOT}},
    {"2shot_push", "one sub-slot for data, stores in order", BAD, false, {.world = 2, .no_guard = true, .in_order = true, .sub_slots = 1, CHUNKS_2SHOT}},
    {"2shot_push", "one sub-slot for sums, loads in order", GOOD, false, {.world = 2, .one_result = true, CHUNKS_2SHOT}},
    {"2shot_push", "a phase per chunk", BAD, false, {.world = 2, .no_guard = true, .parity_per_chunk = true, CALLS(TWO_SHOT(1, 1, 4, 2), TWO_SHOT(1, 1, 4, 2), TWO_SHOT(1, 1, 2, 0))}},
    {"2shot_push", "no fence between chunks", BAD, false, {.world = 2, .no_guard = true, .no_fence = true, CHUNKS_2SHOT}},
    {"2shot_push", "no fence, stores in order", GOOD, false, {.world = 2, .no_guard = true, .no_fence = true, .in_order = true, CHUNKS_2SHOT}},
    {"2shot_push", "a chunk scattered ahead", BAD, false, {.world = 2, .no_guard = true, .scatters_ahead = true, CHUNKS_2SHOT}},
    {"2shot_push", "a unit changes its thread from chunk to chunk", BAD, false, {.world = 2, .no_guard = true, .units_wander = true, CALLS(TWO_SHOT(2, 1, 12, 4))}},
    {"2shot_push", "one lane, chunks, W=2", GOOD, false, {.world = 2, .lane = true, CHUNKS_2SHOT}},
    {"2shot_push", "one lane, two calls, W=3", GOOD, false, {.world = 3, .lane = true, CALLS(TWO_SHOT(1, 1, 3, 0), TWO_SHOT(1, 1, 3, 0))}},
    /* ---- pull by addresses: the input is written again right after a call, the output read --- */
    {"direct pull", "1shot, two calls, W=2", GOOD, false, {.world = 2, TWO_PULL1}},
    {"direct pull", "1shot, two blocks, then one, W=2", GOOD, false, {.world = 2, .no_signatures = true, CALLS(INPUT(2), PULL1(2, 1, 2), INPUT(2), PULL1(1, 1, 2), INPUT(2))}},
    {"direct pull", "1shot, two threads, W=2", GOOD, false, {.world = 2, WIDE_PULL1}},
    {"direct pull", "1shot, W=3", GOOD, false, {.world = 3, .no_signatures = true, TWO_PULL1}},
    {"direct pull", "2shot, two calls, W=2", GOOD, false, {.world = 2, TWO_PULL2}},
    {"direct pull", "2shot, then 1shot, W=2", GOOD, false, {.world = 2, CALLS(INPUT(2), PULL2(1, 1, 2), INPUT(2), PULL1(1, 1, 2), INPUT(2))}},
    {"direct pull", "2shot, W=3", GOOD, false, {.world = 3, .no_signatures = true, CALLS(INPUT(3), PULL2(1, 1, 3), INPUT(3))}},
    {"direct pull", "1shot without enter", BAD, false, {.world = 2, .no_enter = true, TWO_PULL1}},
    {"direct pull", "2shot without enter", BAD, false, {.world = 2, .no_enter = true, TWO_PULL2}},
    {"direct pull", "1shot without exit", BAD, false, {.world = 2, .no_exit = true, TWO_PULL1}},
    {"direct pull", "2shot without exit", BAD, false, {.world = 2, .no_exit = true, TWO_PULL2}},
    {"direct pull", "exit before the loads", BAD, false, {.world = 2, .exits_early = true, TWO_PULL1}},
    {"direct pull", "exit without the block's barrier", BAD, false, {.world = 2, .exits_unmet = true, WIDE_PULL1}},
    {"direct pull", "2shot, exit relaxed", BAD, false, {.world = 2, .exits_relaxed = true, TWO_PULL2}},
    {"direct pull", "2shot, exit relaxed, stores in order", GOOD, false, {.world = 2, .exits_relaxed = true, .in_order = true, TWO_PULL2}},
    {"direct pull", "enter and exit in one word", BAD, false, {.world = 2, .one_signal = true, TWO_PULL1}},
    /* ---- a rank gives up, and its program writes to its input again. Nobody says OK with wrong data  */
    {"giving up", "1shot, two calls, both may, W=2", GOOD, false, {DYING(2, 3), TWO_PULL1}},
    {"giving up", "1shot, all may, W=3", GOOD, false, {DYING(3, 7), ONE_PULL1}},
    {"giving up", "1shot, one may, W=3", GOOD, false, {DYING(3, 2), ONE_PULL1}},
    {"giving up", "1shot, two calls, one may, W=3", GOOD, true, {DYING(3, 2), TWO_PULL1}},
    {"giving up", "1shot, two calls, all may, W=3", GOOD, true, {DYING(3, 7), TWO_PULL1}},
    {"giving up", "1shot, two calls, losses, all may, W=3", GOOD, true, {DYING(3, 7), .losses = true, TWO_PULL1}},
    {"giving up", "2shot, two calls, both may, W=2", GOOD, false, {DYING(2, 3), TWO_PULL2}},
    {"giving up", "2shot, one may, W=3", GOOD, false, {DYING(3, 2), WIDER_PULL2}},
    {"giving up", "2shot, all may, W=3", GOOD, true, {DYING(3, 7), WIDER_PULL2}},
    {"giving up", "2shot, two calls, one may, W=3", GOOD, true, {DYING(3, 2), WIDER_TWO_PULL2}},
    {"giving up", "2shot, two calls, all may, W=3", GOOD, true, {DYING(3, 7), WIDER_TWO_PULL2}},
    {"giving up", "2shot, two calls, losses, one may, W=3", GOOD, true, {DYING(3, 2), .losses = true, WIDER_TWO_PULL2}},
    {"giving up", "2shot, two calls, losses, all may, W=3", GOOD, true, {DYING(3, 7), .losses = true, WIDER_TWO_PULL2}},
    {"giving up", "2shot, then 1shot, losses, both may, W=2", GOOD, false, {DYING(2, 3), .losses = true, CALLS(INPUT(2), PULL2(1, 1, 2), INPUT(2), PULL1(1, 1, 2), INPUT(2))}},
    {"giving up", "2shot, a look for each unit that is stored, W=3", GOOD, true, {DYING(3, 2), .looks_per_unit = true, WIDER_PULL2}},
    {"giving up", "2shot, no look before a unit, one unit, W=3", GOOD, true, {DYING(3, 2), .unlooked = true, WIDER_PULL2}},
    {"giving up", "2shot, two units each, both may, W=2", GOOD, false, {DYING(2, 3), LONGER_PULL2}},
    {"giving up", "1shot, no look", BAD, false, {DYING(2, 2), .looks = LOOKS_NEVER, TWO_PULL1}},
    {"giving up", "1shot, looks before the loads", BAD, false, {DYING(2, 2), .looks = LOOKS_BEFORE_LOADS, TWO_PULL1}},
    {"giving up", "1shot, told after the program has written", BAD, false, {DYING(2, 2), .tells_late = true, TWO_PULL1}},
    {"giving up", "1shot, what the program writes may overtake", BAD, false, {DYING(2, 2), .reuses_early = true, TWO_PULL1}},
    {"giving up", "the same, stores in order", GOOD, false, {DYING(2, 2), .reuses_early = true, .in_order = true, TWO_PULL1}},
    {"giving up", "1shot, exit told by a rank that fails", GOOD, false, {DYING(2, 3), .dead_exits = true, TWO_PULL1}},
    {"giving up", "1shot, looks before it hears the exits", GOOD, false, {DYING(3, 2), .looks = LOOKS_BEFORE_EXITS, ONE_PULL1}},
    {"giving up", "1shot, told to the next rank alone", BAD, false, {DYING(3, 2), .tells_one = true, ONE_PULL1}},
    {"giving up", "1shot, a verdict found is not passed on", BAD, false, {DYING(3, 2), .adopts_silently = true, ONE_PULL1}},
    {"giving up", "1shot, losses, this call taken for a later one", BAD, false, {DYING(2, 3), .losses = true, .spares_equal = true, TWO_PULL1}},
    {"giving up", "2shot, no look at the end", BAD, false, {DYING(2, 2), .looks = LOOKS_NEVER, TWO_PULL2}},
    {"giving up", "2shot, no look before a unit", BAD, false, {DYING(2, 3), .unlooked = true, LONGER_PULL2}},
    {"giving up", "2shot, looks before the loads", BAD, false, {DYING(2, 2), .looks = LOOKS_BEFORE_LOADS, TWO_PULL2}},
    {"giving up", "2shot, told after the program has written", BAD, false, {DYING(2, 2), .tells_late = true, TWO_PULL2}},
    {"giving up", "2shot, what the program writes may overtake", BAD, false, {DYING(2, 2), .reuses_early = true, TWO_PULL2}},
    {"giving up", "2shot, exit told by a rank that fails", BAD, false, {DYING(2, 2), .dead_exits = true, TWO_PULL2}},
    {"giving up", "2shot, looks before it hears the exits, W=2", GOOD, false, {DYING(2, 3), .looks = LOOKS_BEFORE_EXITS, TWO_PULL2}},
    {"giving up", "2shot, looks before it hears the exits, W=3", BAD, false, {DYING(3, 2), .looks = LOOKS_BEFORE_EXITS, WIDER_PULL2}},
    {"giving up", "2shot, a verdict found is not passed on", BAD, false, {DYING(3, 2), .adopts_silently = true, WIDER_PULL2}},
    /* The dead mark. Without it the last look of a direct pull still finds that a rank gave up; the
     * other algorithms have no such look. */
    {"giving up", "1shot, the next call runs", GOOD, false, {DYING(2, 3), .dead_goes_on = true, TWO_PULL1}},
    {"giving up", "2shot, the next call runs", GOOD, false, {DYING(2, 3), .dead_goes_on = true, TWO_PULL2}},
    {"giving up", "1shot_push, five calls, W=2", GOOD, false, {DYING(2, 3), FIVE_SMALL}},
    {"giving up", "1shot_push, three calls, W=3", GOOD, false, {DYING(3, 2), THREE_SMALL}},
    {"giving up", "2shot_push, three calls, W=2", GOOD, false, {DYING(2, 3), THREE_2SHOT}},
    {"giving up", "host_1shot, 3, 1 and 2 chunks, W=2", GOOD, false, {.world = 2, .gives_up = 3, .lane = true, CALLS(ONE(3), ONE(1), ONE(2))}},
    {"giving up", "host_2shot, 3, 1 and 2 chunks, W=2", GOOD, false, {.world = 2, .gives_up = 3, .lane = true, CALLS(TWO(3), TWO(1), TWO(2))}},
    {"giving up", "1shot_push, the next call runs", BAD, false, {DYING(2, 3), .dead_goes_on = true, FIVE_SMALL}},
    {"giving up", "2shot_push, the next call runs", BAD, false, {DYING(2, 3), .dead_goes_on = true, THREE_2SHOT}},
    {"giving up", "host_1shot, the next call runs", BAD, false, {.world = 2, .gives_up = 3, .lane = true, .dead_goes_on = true, CALLS(ONE(3), ONE(1), ONE(2))}},
    {"giving up", "host_2shot, the next call runs", BAD, false, {.world = 2, .gives_up = 3, .lane = true, .dead_goes_on = true, CALLS(TWO(3), TWO(1), TWO(2))}},
    /* ---- ranks make different captured calls: nothing of a peer's is read or stored ---------- */
    {"crossed calls", "1shot, the second of two, W=2", GOOD, false, {DYING(2, 3), .crossed = 4, TWO_PULL1}},
    {"crossed calls", "1shot, W=3", GOOD, false, {DYING(3, 7), .crossed = 2, ONE_PULL1}},
    {"crossed calls", "2shot, the second of two, W=2", GOOD, false, {DYING(2, 3), .crossed = 4, TWO_PULL2}},
    {"crossed calls", "2shot, W=3", GOOD, false, {DYING(3, 7), .crossed = 2, WIDER_PULL2}},
    {"crossed calls", "1shot, no identity", BAD, false, {DYING(2, 3), .crossed = 4, .no_identity = true, TWO_PULL1}},
    {"crossed calls", "1shot, a greater identity will do", BAD, false, {DYING(2, 3), .crossed = 4, .identity_at_least = true, TWO_PULL1}},
    {"crossed calls", "2shot, no identity", BAD, false, {DYING(2, 3), .crossed = 4, .no_identity = true, TWO_PULL2}},

    /* ---- gather_push ------------------------------------------------------------------------- */
    {"gather_push", "one chunk, three calls, W=2", GOOD, false, {.world = 2, THREE_GATHERS}},
    {"gather_push", "six chunks, one, two, W=2", GOOD, false, {.world = 2, CALLS(GATHER(6), GATHER(1), GATHER(2))}},
    {"gather_push", "and 1shot_push, W=2", GOOD, false, {.world = 2, CALLS(GATHER(2), GRID(1, 1, 1), GATHER(2))}},
    {"gather_push", "three sub-slots", BAD, false, {.world = 2, .host_sub_slots = 3, CALLS(GATHER(6))}},
    {"gather_push", "one phase", BAD, false, {.world = 2, .one_parity = true, THREE_GATHERS}},
    {"gather_push", "flags relaxed", BAD, false, {.world = 2, .flags_relaxed = true, THREE_GATHERS}},
    /* ---- the same bodies on the host device: one lane, fences in place of kernels ------------ */
    {"1shot_push lane", "five grids, W=2", GOOD, false, {.world = 2, .lane = true, FIVE_GRIDS}},
    {"1shot_push lane", "three calls, W=3", GOOD, false, {.world = 3, .lane = true, THREE_SMALL}},
    {"1shot_push lane", "chunks, W=2", GOOD, false, {.world = 2, .lane = true, FOUR_CHUNKS}},
    {"1shot_push lane", "no fences around a block", BAD, false, {.world = 2, .lane = true, .no_boundary = true, FIVE_GRIDS}},
    /* ---- host_1shot -------------------------------------------------------------------------- */
    {"host_1shot", "one chunk, five calls, W=3", GOOD, false, {.world = 3, .lane = true, CALLS(ONE(1), ONE(1), ONE(1), ONE(1), ONE(1))}},
    {"host_1shot", "1, 6 and 5 chunks, W=2", GOOD, false, {.world = 2, .lane = true, CALLS(ONE(6), ONE(1), ONE(5), ONE(1))}},
    {"host_1shot", "6 and 3 chunks, W=3", GOOD, false, {.world = 3, .lane = true, CALLS(ONE(6), ONE(3), ONE(1))}},
    {"host_1shot", "sequence numbers wrap, W=2", GOOD, false, {.world = 2, .lane = true, .last_sequence = 13, CALLS(ONE(3), ONE(1), ONE(1), ONE(4), ONE(1))}},
    {"host_1shot", "progress of the same sequence number, a turn ago", GOOD, false, {.world = 2, .lane = true, .old_progress = true, CALLS(ONE(3), ONE(1), ONE(4))}},
    {"host_1shot", "the same, signature before progress", BAD, false, {.world = 2, .lane = true, .old_progress = true, .signature_first = true, CALLS(ONE(3))}},
    {"host_1shot", "mailboxes one way", BAD, false, {.world = 2, .lane = true, .mail_one_way = true, CALLS(ONE(6))}},
    {"host_1shot", "mailboxes one way, one chunk", GOOD, false, {.world = 3, .lane = true, .mail_one_way = true, CALLS(ONE(1), ONE(1), ONE(1))}},
    {"host_1shot", "1 sub-slot", BAD, false, {.world = 2, .lane = true, .host_sub_slots = 1, CALLS(ONE(6))}},
    {"host_1shot", "1 sub-slot, reads before it publishes", GOOD, false, {.world = 3, .lane = true, .host_sub_slots = 1, .publishes_late = true, CALLS(ONE(6), ONE(5))}},
    {"host_1shot", "1 sub-slot, mailboxes one way, reads before it publishes", BAD, false, {.world = 2, .lane = true, .host_sub_slots = 1, .mail_one_way = true, .publishes_late = true, CALLS(ONE(6))}},
    {"host_1shot", "one half", BAD, false, {.world = 2, .lane = true, .one_parity = true, CALLS(ONE(1), ONE(1), ONE(1))}},
    {"host_1shot", "publishes without release", BAD, false, {.world = 2, .lane = true, .publishes_relaxed = true, CALLS(ONE(3))}},
    {"host_1shot", "one chunk, publishes without release", BAD, false, {.world = 2, .lane = true, .publishes_relaxed = true, CALLS(ONE(1))}},
    /* ---- host_2shot -------------------------------------------------------------------------- */
    {"host_2shot", "4 and 3 chunks, W=2", GOOD, false, {.world = 2, .lane = true, CALLS(TWO(4), TWO(1), TWO(3))}},
    {"host_2shot", "4 chunks, W=3", GOOD, false, {.world = 3, .lane = true, CALLS(TWO(4))}},
    {"host_2shot", "1, 2, 3 chunks, W=3", GOOD, true, {.world = 3, .lane = true, CALLS(TWO(1), TWO(2), TWO(3))}},
    {"host_2shot", "mailboxes one way", BAD, false, {.world = 2, .lane = true, .mail_one_way = true, CALLS(TWO(4))}},
    {"host_2shot", "one result area", BAD, false, {.world = 2, .lane = true, .results = 1, CALLS(TWO(4))}},
    {"host_2shot", "one half", BAD, false, {.world = 2, .lane = true, .one_parity = true, CALLS(TWO(1), TWO(1), TWO(1))}},
    {"host_2shot", "publishes without release", BAD, false, {.world = 2, .lane = true, .publishes_relaxed = true, CALLS(TWO(2))}},
    {"host_2shot", "progress of the same sequence number, a turn ago", GOOD, false, {.world = 2, .lane = true, .old_progress = true, CALLS(TWO(3), TWO(2))}},
    {"host_2shot", "the same, signature before progress", BAD, false, {.world = 2, .lane = true, .old_progress = true, .signature_first = true, CALLS(TWO(3))}},
    /* ---- host_gather ------------------------------------------------------------------------- */
    {"host_gather", "1, 6 and 2 chunks, W=2", GOOD, false, {.world = 2, .lane = true, CALLS(PART(1), PART(6), PART(2))}},
    {"host_gather", "6 chunks and 1, W=3", GOOD, true, {.world = 3, .lane = true, CALLS(PART(6), PART(1))}},
    {"host_gather", "3 sub-slots", BAD, false, {.world = 2, .lane = true, .host_sub_slots = 3, CALLS(PART(6))}},
    {"host_gather", "one half", BAD, false, {.world = 2, .lane = true, .one_parity = true, CALLS(PART(1), PART(1), PART(1))}},
    /* ---- all of the host device after each other --------------------------------------------- */
    {"mixed lane", "host_gather, host_1shot, host_2shot, W=2", GOOD, false, {.world = 2, .lane = true, CALLS(PART(2), ONE(3), TWO(2), PART(1), ONE(1), TWO(3))}},
    {"mixed lane", "the same over the wrap, W=3", GOOD, false, {.world = 3, .lane = true, .last_sequence = 13, CALLS(PART(1), ONE(1), TWO(1), PART(1), ONE(3))}},
    {"mixed lane", "push, host_1shot, host_2shot, W=2", GOOD, false, {.world = 2, .lane = true, CALLS(TWO(2), ONE(5), GRID(2, 1, 2), ONE(1), TWO(1), CHUNKED(1, 1, 3, 1))}},
    {"mixed lane", "host_1shot, push, host_2shot, W=3", GOOD, false, {.world = 3, .lane = true, CALLS(ONE(1), GRID(1, 1, 1), TWO(1))}},
};
/* clang-format on */

static const char *verdict_name(verdict v) {
    static const char *const names[] = {"holds",     "undecided", "overwrites", "reads wrong",
                                        "deadlocks", "unarmed",   "false alarm"};
    return names[v];
}

static double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef struct options {
    bool is_long, trace, unreduced;
    uint64_t limit;
    const char *only;
} options;

/* The same group and calls with nothing done otherwise: what breaks must be the deviation. Rows in
 * a sequence that have this in common share one search. */
static bool control_holds(const model *m, uint64_t limit) {
    static machine built;
    static model last;
    static bool held;
    model usual;
    memset(&usual, 0, sizeof usual);
    usual.world = m->world;
    usual.lane = m->lane;
    usual.unit_words = m->unit_words;
    usual.whole_chunks = m->whole_chunks;
    usual.last_sequence = m->last_sequence;
    usual.gives_up = m->gives_up;
    usual.no_signatures = m->gives_up && m->no_signatures;
    usual.losses = m->losses;
    usual.crossed = m->crossed;
    memcpy(usual.calls, m->calls, sizeof usual.calls);
    if (memcmp(&usual, &last, sizeof last) == 0) return held;
    memcpy(&last, &usual, sizeof last);
    model_build(&usual, &built);
    held = machine_explore(&built, limit, false).verdict == HOLDS;
    return held;
}

/* Returns whether it came out as expected. */
static bool run_row(const row *r, const options *o) {
    static machine built;
    const double start = seconds_now();
    model_build(&r->model, &built);
    built.branches_on_all = o->unreduced;
    const outcome found = machine_explore(&built, o->limit, o->trace);
    const bool holds = found.verdict == HOLDS || found.verdict == UNDECIDED;
    const bool control = r->expected == GOOD || control_holds(&r->model, o->limit);
    const bool as_expected = (r->expected == GOOD ? holds : !holds) && control;
    printf("%-18s %-50s %10llu %6.1f  %-11s %-8s %s\n", r->group, r->variant,
           (unsigned long long)found.states, seconds_now() - start, verdict_name(found.verdict),
           r->expected == GOOD ? "holds" : "breaks",
           as_expected ? "ok"
           : control   ? "NOT AS EXPECTED"
                       : "BREAKS WITHOUT THE CHANGE TOO");
    if (!as_expected && found.detail[0]) printf("    %s\n", found.detail);
    fflush(stdout);
    return as_expected;
}

static bool read_options(int argc, char **argv, options *out) {
    *out = (options){.limit = 100000000, .only = ""};
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--long"))
            out->is_long = true;
        else if (!strcmp(argv[i], "--trace"))
            out->trace = true;
        else if (!strcmp(argv[i], "--unreduced"))
            out->unreduced = true;
        else if (!strcmp(argv[i], "--only") && i + 1 < argc)
            out->only = argv[++i];
        else if (!strcmp(argv[i], "--limit") && i + 1 < argc)
            out->limit = strtoull(argv[++i], NULL, 10);
        else
            return false;
    }
    return true;
}

int main(int argc, char **argv) {
    options o;
    int wrong = 0, count = 0;
    if (!read_options(argc, argv, &o)) {
        fprintf(stderr,
                "usage: %s [--long] [--only TEXT] [--limit STATES] [--trace] [--unreduced]\n",
                argv[0]);
        return 2;
    }
    printf("%-18s %-50s %10s %6s  %-11s %s\n", "model", "variant", "states", "s", "result",
           "expected");
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const row *r = &rows[i];
        if ((r->is_long && !o.is_long) ||
            (!strstr(r->group, o.only) && !strstr(r->variant, o.only)))
            continue;
        wrong += !run_row(r, &o);
        count++;
    }
    printf("%d rows, %d not as expected\n", count, wrong);
    return wrong || !count;
}
