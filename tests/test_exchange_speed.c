/* Property: the library adds little to the least that two processes must do. The median call of 4
 * KiB of bfloat16 takes at most 1.3 times as long as a bare exchange written here (copy into shared
 * memory, one flag, sum by vectors), measured in alternating blocks of one run. 32 MiB of float32
 * go at a fifth or more of the rate of one core's memcpy of as much, with the other core at rest.
 *
 * The best of five attempts counts. Figures are also given in units of the two cores' round trip.
 * Where the ranks did not have two cores to themselves, the test says so and is skipped. */
/* labels: serial asan-off tsan-off */
#include "harness.h"
#include "rank_contexts.h"
#include "reference.h"

#include <sched.h>
#include <sys/resource.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define COUNT       2048 /* bf16: 4 KiB */
#define BLOCK       250
#define BLOCKS      24
#define ATTEMPTS    5
#define LARGE       ((size_t)8 << 20) /* fp32: 32 MiB */
#define LARGE_TIMES 5

typedef struct line {
    uint32_t word;
    char rest[124];
} line;

typedef struct board {
    line flags[2]; /* sequence number of the last bare exchange a rank has published */
    line pings[2];
    uint16_t areas[2][2][COUNT]; /* [parity][rank] */
    /* Results of a rank in an attempt. */
    double call_ns[2], bare_ns[2], round_trip_ns[2], cores[2], large_cores[2], all_reduce_s[2],
        memcpy_s[2];
    int verdict[2];
} board;

static board *shared;

/* ---- the bare exchange ----------------------------------------------------------------------- */
/* At least: a peer may be one ahead. Yields only when something is wrong with the other core. */
static void await(const uint32_t *word, uint32_t value) {
    for (unsigned n = 1; (int32_t)(__atomic_load_n(word, __ATOMIC_ACQUIRE) - value) < 0; n++)
        if (n % 8192 == 0) sched_yield();
}

static void sum_plain(uint16_t *out, const uint16_t *a, const uint16_t *b) {
    for (size_t i = 0; i < COUNT; i++) {
        uint32_t x = (uint32_t)a[i] << 16, y = (uint32_t)b[i] << 16, bits;
        float f, g;
        memcpy(&f, &x, 4);
        memcpy(&g, &y, 4);
        f += g;
        memcpy(&bits, &f, 4);
        out[i] = (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
    }
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static __m256i rounded(__m256 f) {
    const __m256i bits = _mm256_castps_si256(f), one = _mm256_set1_epi32(1);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
}

__attribute__((target("avx2"))) static void sum_avx2(uint16_t *out, const uint16_t *a,
                                                     const uint16_t *b) {
    const __m256i high = _mm256_set1_epi32((int)0xffff0000u);
    for (size_t i = 0; i < COUNT; i += 16) {
        const __m256i x = _mm256_loadu_si256((const __m256i *)(a + i)),
                      y = _mm256_loadu_si256((const __m256i *)(b + i));
        const __m256 even = _mm256_add_ps(_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)),
                                          _mm256_castsi256_ps(_mm256_slli_epi32(y, 16)));
        const __m256 odd = _mm256_add_ps(_mm256_castsi256_ps(_mm256_and_si256(x, high)),
                                         _mm256_castsi256_ps(_mm256_and_si256(y, high)));
        const __m256i low = _mm256_srli_epi32(rounded(even), 16),
                      up = _mm256_and_si256(rounded(odd), high);
        _mm256_storeu_si256((__m256i *)(out + i), _mm256_or_si256(low, up));
    }
}
#endif

static void (*sum_best(void))(uint16_t *, const uint16_t *, const uint16_t *) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) return sum_avx2;
#endif
    return sum_plain;
}

static void (*sum_two)(uint16_t *, const uint16_t *, const uint16_t *);

/* An area is written again two exchanges later: the one between proves that the peer has read
 * it. */
static void bare_exchange(int rank, uint32_t sequence, const uint16_t *in, uint16_t *out) {
    uint16_t(*areas)[COUNT] = shared->areas[sequence & 1];
    memcpy(areas[rank], in, sizeof areas[rank]);
    __atomic_store_n(&shared->flags[rank].word, sequence, __ATOMIC_RELEASE);
    await(&shared->flags[!rank].word, sequence);
    sum_two(out, rank ? areas[0] : in, rank ? in : areas[1]);
}

/* ---- measuring ------------------------------------------------------------------------------- */
static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, size_t count) {
    qsort(values, count, sizeof *values, compare_doubles);
    return values[count / 2];
}

static double ns_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1e9 * (double)now.tv_sec + (double)now.tv_nsec;
}

static double cpu_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return 1e9 * (double)now.tv_sec + (double)now.tv_nsec;
}

static double round_trip(int rank, uint32_t *ping) {
    static double samples[2000];
    for (int i = 0; i < 2000; i++) {
        const double began = ns_now();
        const uint32_t n = ++*ping;
        if (rank == 0) __atomic_store_n(&shared->pings[0].word, n, __ATOMIC_RELEASE);
        await(&shared->pings[!rank].word, n);
        if (rank == 1) __atomic_store_n(&shared->pings[1].word, n, __ATOMIC_RELEASE);
        samples[i] = ns_now() - began;
    }
    return median(samples, 2000);
}

static void small_attempt(onehop_context *context, int rank, uint32_t *ping, uint32_t *sequence) {
    static double calls[BLOCK * BLOCKS], bares[BLOCK * BLOCKS];
    static uint16_t in[COUNT], out[COUNT], sum[COUNT];
    size_t n = 0;
    input_fill(in, INPUT_REAL, 7, rank, 0, COUNT, ONEHOP_BFLOAT16);
    reference_of_inputs(sum, INPUT_REAL, 7, 2, 0, COUNT, ONEHOP_BFLOAT16);
    ranks_barrier(context);
    shared->round_trip_ns[rank] = round_trip(rank, ping);
    const double began = ns_now(), cpu_began = cpu_ns();
    for (int block = 0; block < BLOCKS; block++)
        for (int i = 0; i < BLOCK; i++, n++) {
            in[n % COUNT] ^= 1; /* never the same data twice, nor a cached sum */
            double at = ns_now();
            CHECK_OK(onehop_all_reduce(context, in, out, COUNT, ONEHOP_BFLOAT16, ONEHOP_SUM, NULL,
                                       NULL));
            calls[n] = ns_now() - at;
            if (i < BLOCK - 1) continue;
            for (int j = 0; j < BLOCK; j++) {
                in[j] ^= 1;
                at = ns_now();
                bare_exchange(rank, ++*sequence, in, out);
                bares[(size_t)block * BLOCK + (size_t)j] = ns_now() - at;
                in[j] ^= 1;
            }
        }
    shared->cores[rank] = (cpu_ns() - cpu_began) / (ns_now() - began);
    shared->call_ns[rank] = median(calls, n);
    shared->bare_ns[rank] = median(bares, n);
    input_fill(in, INPUT_REAL, 7, rank, 0, COUNT, ONEHOP_BFLOAT16);
    CHECK_OK(onehop_all_reduce(context, in, out, COUNT, ONEHOP_BFLOAT16, ONEHOP_SUM, NULL, NULL));
    expect_equal(sum, out, COUNT, ONEHOP_BFLOAT16, "the library's sum");
    bare_exchange(rank, ++*sequence, in, out);
    expect_equal(sum, out, COUNT, ONEHOP_BFLOAT16, "the bare exchange's sum");
}

/* Best of some times, both; pages touched before. A rank that copies copies alone. */
static void large_attempt(onehop_context *context, int rank, char *in, char *out) {
    double all_reduce = 1e9, copy = 1e9, wall = 0, cpu = 0;
    for (int i = 0; i <= LARGE_TIMES; i++) {
        ranks_barrier(context);
        double at = seconds_now(), cpu_at = cpu_ns();
        CHECK_OK(
            onehop_all_reduce(context, in, out, LARGE, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, NULL));
        double took = seconds_now() - at;
        wall += took;
        cpu += 1e-9 * (cpu_ns() - cpu_at);
        if (i && took < all_reduce) all_reduce = took;
        ranks_barrier(context);
        if (rank == 0) {
            at = seconds_now();
            memcpy(out, in, LARGE * 4);
            took = seconds_now() - at;
            __asm__ volatile("" : : "r"(out) : "memory");
            if (i && took < copy) copy = took;
        }
        ranks_barrier(context);
    }
    shared->all_reduce_s[rank] = all_reduce;
    shared->memcpy_s[rank] = copy;
    shared->large_cores[rank] = cpu / wall;
}

static double worse(const double *of_ranks) {
    return of_ranks[0] > of_ranks[1] ? of_ranks[0] : of_ranks[1];
}

static double less(double a, double b) {
    return a < b ? a : b;
}

/* A core for each rank, where there are two. */
static void pin(int rank) {
    cpu_set_t allowed, one;
    int seen = 0;
    if (sched_getaffinity(0, sizeof allowed, &allowed) || CPU_COUNT(&allowed) < 2) return;
    CPU_ZERO(&one);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &allowed) && seen++ == rank) CPU_SET(cpu, &one);
    sched_setaffinity(0, sizeof one, &one);
}

/* 0: both limits kept in some attempt; 1: not, though the cores were idle; 77: they were not. Alike
 * on both ranks. */
static void rank_main(onehop_context *context, int rank, int world, void *argument) {
    char *in = malloc(LARGE * 4), *out = malloc(LARGE * 4);
    uint32_t ping = 0, sequence = 0;
    bool small_ok = false, large_ok = false, idle = false;
    (void)world, (void)argument;
    if (!in || !out) FAIL("no memory");
    pin(rank);
    for (size_t i = 0; i < LARGE; i++) ((float *)in)[i] = (float)(i % 1000);
    memset(out, 1, LARGE * 4);
    for (int attempt = 1; attempt <= ATTEMPTS && !(small_ok && large_ok); attempt++) {
        small_attempt(context, rank, &ping, &sequence);
        large_attempt(context, rank, in, out);
        ranks_barrier(context);
        const double call = worse(shared->call_ns), bare = worse(shared->bare_ns),
                     trip = worse(shared->round_trip_ns);
        const double share = shared->memcpy_s[0] / worse(shared->all_reduce_s);
        const double cores = less(less(shared->cores[0], shared->cores[1]),
                                  less(shared->large_cores[0], shared->large_cores[1]));
        small_ok |= call <= 1.3 * bare;
        large_ok |= share >= 0.2;
        idle |= cores > 0.93;
        if (rank == 0)
            printf("attempt %d: 4 KiB bf16, p50: all_reduce %.0f ns, bare exchange %.0f ns, ratio "
                   "%.2f; %.2f and %.2f round "
                   "trips of %.0f ns; 32 MiB fp32: %.2f GB/s, %.2f of memcpy's %.2f GB/s; share of "
                   "a core %.2f\n",
                   attempt, call, bare, call / bare, call / trip, bare / trip, trip,
                   LARGE * 4e-9 / worse(shared->all_reduce_s), share,
                   LARGE * 4e-9 / shared->memcpy_s[0], cores);
        ranks_barrier(context);
    }
    shared->verdict[rank] = small_ok && large_ok ? 0 : idle ? 1 : HARNESS_SKIP;
    free(in);
    free(out);
}

int main(void) {
    watchdog(110);
    setvbuf(stdout, NULL, _IOLBF, 0);
    shared = shared_memory(sizeof *shared);
    sum_two = sum_best();
    if (sysconf(_SC_NPROCESSORS_ONLN) < 2) {
        printf("skipped: one core\n");
        return HARNESS_SKIP;
    }
    ranks_run(RANKS_AS_PROCESSES, 2, NULL, rank_main, NULL);
    if (shared->verdict[0] == 1)
        FAIL("over 1.3 times the bare exchange, or under a fifth of memcpy, in every attempt");
    if (shared->verdict[0]) printf("skipped: the ranks did not have two cores to themselves\n");
    return shared->verdict[0];
}
