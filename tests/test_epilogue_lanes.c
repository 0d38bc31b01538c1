/* Property: what OH_EPILOGUE does to a sum, each body does to each element of it once, with the
 * element's own index: fast path and slow, one piece and chunks, shards, registrations of captured
 * inputs, any alignment. Here it turns the sign of every other element, at random, which commutes
 * with rounding. */
/* labels: timeout=240 */
#include <stdint.h>

static inline int is_turned(uint64_t i) {
    return (int)(i * 0x9e3779b97f4a7c15ull >> 40 & 1);
}

#define OH_EPILOGUE(a, x, i)     (is_turned(i) ? -(x) : (x))
#define LANES_EXPECT(sums, call) turn(sums, (call)->count, (call)->dtype)
static void turn(void *sums, uint64_t count, int dtype);

#define LANES_ALL_BODIES
#define LANES_FEW_BODIES
#include "lanes.h"

/* A NaN stays the one that it is. */
static void turn(void *sums, uint64_t count, int dtype) {
    for (uint64_t i = 0; i < count; i++) {
        if (!is_turned(i)) continue;
        if (dtype == ONEHOP_FLOAT32) {
            uint32_t *bits = (uint32_t *)sums + i;
            if ((*bits & 0x7fffffffu) <= 0x7f800000u) *bits ^= 0x80000000u;
        } else {
            uint16_t *bits = (uint16_t *)sums + i;
            if ((*bits & 0x7fffu) <= 0x7f80u) *bits ^= 0x8000u;
        }
    }
}

static void calls_of(int world, lanes_algorithm algorithm, onehop_dtype dtype, bool registrations,
                     size_t count) {
    static const uint32_t grids[] = {2, 3, 5, 12};
    lanes_call *calls = calloc(count, sizeof *calls);
    lanes_group g;
    uint64_t random = (uint64_t)(world * 16 + (int)algorithm);
    for (size_t i = 0; i < count; i++) {
        /* Unit by unit, ranks wait for each other at every one. */
        const size_t max = i % 2 || !lanes_push_whole_chunk ? 300
                           : dtype == ONEHOP_FLOAT32        ? 5000
                                                            : 10000;
        calls[i] = (lanes_call){algorithm,
                                dtype,
                                (size_t)world * 8 + random_next(&random) % max,
                                grids[random_next(&random) % 4],
                                i % 3 == 0,
                                i % 4 ? INPUT_REAL : INPUT_MIXED,
                                -1,
                                -1,
                                0};
    }
    lanes_open(&g, world, 2, 60000);
    lanes_preset(&g, 0xfffffff9u);
    g.registrations = registrations;
    lanes_run(&g, "turned signs", calls, count);
    lanes_close(&g);
    free(calls);
}

int main(void) {
    const size_t count = HARNESS_SANITIZED ? 6 : 10;
    watchdog(230);
    for (int world = 2; world <= 5; world += world == 3 ? 2 : 1) { /* 5: any number */
        for (lanes_push_whole_chunk = 0; lanes_push_whole_chunk < 2; lanes_push_whole_chunk++)
            for (int f32 = 0; f32 < 2; f32++)
                calls_of(world, LANES_PUSH, f32 ? ONEHOP_FLOAT32 : ONEHOP_BFLOAT16, false, count);
        calls_of(world, LANES_PUSH_2SHOT, ONEHOP_BFLOAT16, false, count);
        for (int registrations = 0; registrations < 2; registrations++) {
            calls_of(world, LANES_PULL_1SHOT, ONEHOP_BFLOAT16, registrations, count);
            calls_of(world, LANES_PULL_2SHOT, ONEHOP_BFLOAT16, registrations, count);
        }
    }
    return 0;
}
