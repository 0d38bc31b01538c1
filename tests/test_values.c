/* Property: values that hurt come out right, through every algorithm of the host device, on threads
 * and processes: zeros of both signs, subnormals, NaN payloads that equal a sentinel, infinities
 * and their differences, largest finite, as inputs and as sums; every 16-bit pattern; types
 * switched from call to call. A caller with flush-to-zero or another rounding mode gets the mode
 * back. One input, ten thousand times, gives one output. */
/* labels: quick timeout=240 */
#include "harness.h"
#include "rank_contexts.h"
#include "reference.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define MAX 65536

static const onehop_algorithm algorithms[] = {
    ONEHOP_ALGORITHM_AUTO, ONEHOP_HOST_1SHOT, ONEHOP_HOST_2SHOT, ONEHOP_1SHOT_PUSH,
    ONEHOP_1SHOT_PULL,     ONEHOP_2SHOT_PULL, ONEHOP_2SHOT_PUSH};
#define ALGORITHMS (int)(sizeof algorithms / sizeof *algorithms)
static const onehop_dtype dtypes[] = {ONEHOP_FLOAT32, ONEHOP_FLOAT16, ONEHOP_BFLOAT16};

typedef struct buffers {
    unsigned char *in, *out, *sum;
} buffers;

static buffers buffers_make(void) {
    buffers b = {calloc(MAX, 4), calloc(MAX, 4), calloc(MAX, 4)};
    if (!b.in || !b.out || !b.sum) FAIL("no memory");
    return b;
}

static void buffers_free(buffers *b) {
    free(b->in);
    free(b->out);
    free(b->sum);
}

/* One call of special values, the type another each time. */
static void special_values(onehop_context *context, int rank, int world, void *argument) {
    buffers b = buffers_make();
    (void)argument;
    for (size_t call = 0; call < 9 * ALGORITHMS; call++) {
        const onehop_dtype dtype = dtypes[call % 3];
        const onehop_algorithm algorithm = algorithms[call / 3 % ALGORITHMS];
        const size_t count = call % 2 ? 777 + call : 9000 + call;
        input_fill(b.in, INPUT_SPECIAL, call, rank, 0, count, dtype);
        reference_of_inputs(b.sum, INPUT_SPECIAL, call, world, 0, count, dtype);
        CHECK_OK(ranks_all_reduce(context, b.in, b.out, count, dtype, algorithm, NULL));
        expect_equal(b.sum, b.out, count, dtype, onehop_algorithm_name(algorithm));
    }
    buffers_free(&b);
}

/* Rank 0 sends every pattern of a 16-bit type, the others 0, -0 or their own: sums are the
 * patterns, rounded or canonical. fp32: the same patterns in the upper and in the lower half. */
static void every_pattern(onehop_context *context, int rank, int world, void *argument) {
    buffers b = buffers_make();
    const void *all[ONEHOP_MAX_RANKS];
    unsigned char *inputs = malloc((size_t)world * MAX * 4);
    (void)argument;
    for (int call = 0; call < 12; call++) {
        const onehop_dtype dtype = dtypes[call % 3];
        for (int r = 0; r < world; r++) {
            all[r] = inputs + (size_t)r * MAX * 4;
            for (uint32_t i = 0; i < MAX; i++) {
                const uint32_t pattern = r == 0 || call >= 9 ? (i * (uint32_t)(2 * r + 1)) & 0xffffu
                                         : call % 2          ? 0x8000u
                                                             : 0;
                const uint32_t wide = call % 6 < 3 ? pattern << 16 | pattern : pattern << 16;
                if (dtype == ONEHOP_FLOAT32)
                    memcpy((char *)inputs + (size_t)r * MAX * 4 + 4 * i, &wide, 4);
                else
                    memcpy((char *)inputs + (size_t)r * MAX * 4 + 2 * i, &pattern, 2);
            }
        }
        reference_sum(b.sum, all, world, MAX, dtype);
        for (int a = 0; a < ALGORITHMS; a++) {
            CHECK_OK(ranks_all_reduce(context, all[rank], b.out, MAX, dtype, algorithms[a], NULL));
            expect_equal(b.sum, b.out, MAX, dtype, onehop_algorithm_name(algorithms[a]));
        }
    }
    free(inputs);
    buffers_free(&b);
}

/* The caller flushes subnormals and rounds up, on odd ranks only: bits are those of the default
 * mode. */
static void odd_float_mode(onehop_context *context, int rank, int world, void *argument) {
#if defined(__x86_64__)
    buffers b = buffers_make();
    const unsigned usual = _mm_getcsr() & ~0x3fu;
    (void)argument;
    for (size_t call = 0; call < 6 * ALGORITHMS; call++) {
        const onehop_dtype dtype = dtypes[call % 3];
        const onehop_algorithm algorithm = algorithms[call / 3 % ALGORITHMS];
        const size_t count = 500 + 700 * (call % 5);
        input_fill(b.in, INPUT_MIXED, call, rank, 0, count, dtype);
        reference_of_inputs(b.sum, INPUT_MIXED, call, world, 0, count, dtype);
        /* Flush to zero and denormals are zero; every other call rounding up too. */
        const unsigned odd = usual | 0x8040u | (call % 2 ? 0x4000u : 0);
        if (rank % 2) _mm_setcsr(odd);
        const onehop_result result =
            ranks_all_reduce(context, b.in, b.out, count, dtype, algorithm, NULL);
        const unsigned after = _mm_getcsr() & ~0x3fu;
        _mm_setcsr(usual);
        CHECK_OK(result);
        CHECK_INT(rank % 2 ? odd : usual, after);
        expect_equal(b.sum, b.out, count, dtype, "caller with flush-to-zero");
    }
    buffers_free(&b);
#else
    (void)context, (void)rank, (void)world, (void)argument;
#endif
}

/* inf - inf, largest + largest, +0 + -0, and NaN payloads of which only one rank has any: known by
 * hand. */
static void known_sums(onehop_context *context, int rank, int world, void *argument) {
    static const uint32_t rows[][3] = {
        /* rank 0, other ranks (rank 1 only for the first three), sum */
        {0x7f800000u, 0xff800000u, 0x7fffffffu}, {0x80000000u, 0x80000000u, 0x80000000u},
        {0x80000000u, 0x00000000u, 0x00000000u}, {0xffffffffu, 0x3f800000u, 0x7fffffffu},
        {0x3f800000u, 0xffffffffu, 0x7fffffffu}, {0x7f800001u, 0x7fc00001u, 0x7fffffffu},
        {0x7f7fffffu, 0x7f7fffffu, 0x7f800000u}, {0x00000001u, 0x80000000u, 0x00000001u},
    };
    enum {
        ROWS = sizeof rows / sizeof *rows
    };
    (void)argument;
    for (int a = 0; a < ALGORITHMS; a++) {
        uint32_t in[ROWS], out[ROWS];
        for (int i = 0; i < ROWS; i++) in[i] = rows[i][rank == 0 ? 0 : 1];
        CHECK_OK(ranks_all_reduce(context, in, out, ROWS, ONEHOP_FLOAT32, algorithms[a], NULL));
        for (int i = 0; i < ROWS; i++)
            if (out[i] != rows[i][2])
                FAIL("rank %d of %d, row %d: expected 0x%x, found 0x%x", rank, world, i, rows[i][2],
                     out[i]);
    }
}

static uint64_t hash_of(const unsigned char *bytes, size_t size) {
    uint64_t hash = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < size; i += 4) {
        uint32_t word;
        memcpy(&word, bytes + i, 4);
        hash = (hash ^ word) * 0x100000001b3ull;
    }
    return hash;
}

static int stop_load;
static void *load_main(void *argument) {
    volatile double x = 1;
    while (!__atomic_load_n(&stop_load, __ATOMIC_RELAXED)) x = x * 1.0000001;
    return argument;
}

/* The other ranks' hashes come in at the end. */
static void same_again(onehop_context *context, int rank, int world, void *argument) {
    const size_t count = 999;
    const int calls = HARNESS_SANITIZED ? 1000 : 10000;
    buffers b = buffers_make();
    uint64_t first = 0, *hashes = argument;
    input_fill(b.in, INPUT_REAL, 4, rank, 0, count, ONEHOP_FLOAT32);
    reference_of_inputs(b.sum, INPUT_REAL, 4, world, 0, count, ONEHOP_FLOAT32);
    for (int call = 0; call < calls; call++) {
        memset(b.out, call & 0xff, count * 4);
        CHECK_OK(
            onehop_all_reduce(context, b.in, b.out, count, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, NULL));
        const uint64_t hash = hash_of(b.out, count * 4);
        if (call == 0) first = hash;
        if (hash != first) FAIL("rank %d: call %d gave other bits than call 0", rank, call);
    }
    expect_equal(b.sum, b.out, count, ONEHOP_FLOAT32, "the same again");
    hashes[rank] = first;
    ranks_barrier(context);
    for (int r = 0; r < world; r++) CHECK(hashes[r] == first);
    buffers_free(&b);
}

int main(void) {
    static uint64_t hashes[ONEHOP_MAX_RANKS];
    pthread_t load;
    watchdog(230);
    for (int layout = RANKS_AS_THREADS; layout <= RANKS_AS_PROCESSES; layout++) {
        ranks_run((ranks_layout)layout, 2, NULL, special_values, NULL);
        ranks_run((ranks_layout)layout, 5, NULL, special_values, NULL);
        ranks_run((ranks_layout)layout, 3, NULL, every_pattern, NULL);
        ranks_run((ranks_layout)layout, 2, NULL, known_sums, NULL);
        ranks_run((ranks_layout)layout, 4, NULL, odd_float_mode, NULL);
        ranks_run((ranks_layout)layout, 9, NULL, special_values, NULL);
    }
    if (pthread_create(&load, NULL, load_main, NULL)) FAIL("pthread_create failed");
    ranks_run(RANKS_AS_THREADS, 4, NULL, same_again, hashes);
    __atomic_store_n(&stop_load, 1, __ATOMIC_RELAXED);
    pthread_join(load, NULL);
    return 0;
}
