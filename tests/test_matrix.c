/* Property: every world size, data type, algorithm and count gives the bits of the scalar reference
 * on all ranks, as processes and as threads, in place and out of place.
 *
 * Two and three ranks take every count 0..1025 in both forms. The others take every count in one
 * form for the automatic choice and a sample that moves with the combination for the named
 * algorithms, so that each (world size, type, algorithm) and, over all world sizes, each count are
 * there. Every combination also takes 1 MiB + 3 elements. Each call reads another window of its
 * rank's input, so what an earlier call left behind is wrong. */
/* labels: timeout=300 */
#include "harness.h"
#include "reference.h"
#include "rank_contexts.h"

#define MAX    (((size_t)1 << 20) + 3)
#define COUNTS 1026
#define MARGIN 64
/* Elements of a rank's input: a window of MOST begins anywhere in the first SLACK. */
#define SLACK 2048

typedef struct board {
    size_t compared;
    unsigned char *in[ONEHOP_MAX_RANKS];
    unsigned char *sum;
} board;

static board *shared;

static const onehop_algorithm algorithms[] = {
    ONEHOP_ALGORITHM_AUTO, ONEHOP_HOST_1SHOT, ONEHOP_HOST_2SHOT, ONEHOP_1SHOT_PUSH,
    ONEHOP_1SHOT_PULL,     ONEHOP_2SHOT_PULL, ONEHOP_2SHOT_PUSH};
#define ALGORITHMS (int)(sizeof algorithms / sizeof *algorithms)

/* Buffers of one rank. */
typedef struct own {
    onehop_context *context;
    int rank, world;
    guarded out;
    size_t calls, compared;
} own;

static void compare_one(own *o, onehop_dtype dtype, onehop_algorithm algorithm, size_t count,
                        bool in_place) {
    const size_t size = reference_element_bytes(dtype);
    const size_t first = o->calls * 37 % SLACK, bytes = count * size;
    const size_t off = (o->calls * 7 + (size_t)o->rank * 3) % (16 / size) * size;
    const unsigned char *in = shared->in[o->rank] + first * size;
    unsigned char *out = guarded_place(&o->out, bytes, off);
    char what[128];
    o->calls++;
    if (in_place && bytes) memcpy(out, in, bytes);
    CHECK_OK(ranks_all_reduce(o->context, in_place ? out : in, out, count, dtype, algorithm, NULL));
    snprintf(what, sizeof what, "rank %d of %d, %s, count %zu, %s", o->rank, o->world,
             algorithm ? onehop_algorithm_name(algorithm) : "auto", count,
             in_place ? "in place" : "out of place");
    expect_equal(shared->sum + first * size, out, count, dtype, what);
    guarded_check(&o->out, what);
    o->compared++;
}

/* Each rank makes its input and a part of the sum. */
static void make_data(own *o, onehop_dtype dtype) {
    const size_t total = MAX + SLACK, size = reference_element_bytes(dtype);
    const size_t share = (total + (size_t)o->world - 1) / (size_t)o->world,
                 first = share * (size_t)o->rank;
    const size_t mine = first >= total ? 0 : total - first < share ? total - first : share;
    const void *in[ONEHOP_MAX_RANKS];
    ranks_barrier(o->context);
    input_fill(shared->in[o->rank], INPUT_MIXED, (uint64_t)dtype * 100 + (uint64_t)o->world,
               o->rank, 0, total, dtype);
    ranks_barrier(o->context);
    for (int r = 0; r < o->world; r++) in[r] = shared->in[r] + first * size;
    reference_sum(shared->sum + first * size, in, o->world, mine, dtype);
    ranks_barrier(o->context);
}

static void compare_all(own *o, onehop_dtype dtype, int a) {
    const bool whole = o->world <= 3;
    const size_t step = whole                                                     ? 1
                        : algorithms[a] == ONEHOP_ALGORITHM_AUTO && o->world <= 8 ? 3
                                                                                  : 16;
    const size_t start = ((size_t)o->world * 5 + (size_t)dtype * 3 + (size_t)a) % step;
    for (size_t count = start; count < COUNTS; count += step) {
        if (whole) compare_one(o, dtype, algorithms[a], count, true);
        compare_one(o, dtype, algorithms[a], count, !whole && count / step % 2);
    }
    compare_one(o, dtype, algorithms[a], COUNTS - 1, true);
    compare_one(o, dtype, algorithms[a], MAX, (o->world + (int)dtype + a) % 2);
}

static void rank_main(onehop_context *context, int rank, int world, void *argument) {
    own o = {context, rank, world, guarded_make(MAX * 4), 0, 0};
    (void)argument;
    for (int d = ONEHOP_FLOAT32; d <= ONEHOP_BFLOAT16; d++) {
        make_data(&o, (onehop_dtype)d);
        for (int a = 0; a < ALGORITHMS; a++) compare_all(&o, (onehop_dtype)d, a);
    }
    __atomic_fetch_add(&shared->compared, rank == 0 ? o.compared : 0, __ATOMIC_RELAXED);
    guarded_free(&o.out);
}

int main(void) {
    static const int worlds[] = {2, 3, 4, 5, 6, 7, 8, 12, 16};
    watchdog(290);
    shared = shared_memory(sizeof *shared);
    for (int r = 0; r < ONEHOP_MAX_RANKS; r++) shared->in[r] = shared_memory((MAX + SLACK) * 4);
    shared->sum = shared_memory((MAX + SLACK) * 4);
    for (int layout = RANKS_AS_THREADS; layout <= RANKS_AS_PROCESSES; layout++) {
        const double began = seconds_now();
        shared->compared = 0;
        for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++) {
            const double start = seconds_now();
            ranks_run((ranks_layout)layout, worlds[i], NULL, rank_main, NULL);
            fprintf(stderr, "  world size %d: %.1f s\n", worlds[i], seconds_now() - start);
        }
        printf("%s: %zu combinations of world size, type, algorithm, count and form, bit-equal on "
               "all ranks, %.1f s\n",
               layout == RANKS_AS_THREADS ? "threads" : "processes", shared->compared,
               seconds_now() - began);
    }
    return 0;
}
