/* Property: sums are right, and nothing beside the outputs changes, for sizes and addresses at
 * every edge: one element below, at and above each limit of each algorithm; counts 1..2W, sizes of
 * 1..257 bytes and of 1..20W units; pointers off by 0..15 bytes, otherwise on each rank; in place,
 * out of place and touching. Buffers that overlap in part are refused. Guard bytes lie around every
 * output. */
/* labels: quick tsan-off timeout=240 */
#include "harness.h"
#include "rank_contexts.h"
#include "reference.h"

#include "context/context.h"

#define MAX_BYTES ((size_t)3 << 20)

static const onehop_algorithm algorithms[] = {
    ONEHOP_ALGORITHM_AUTO, ONEHOP_HOST_1SHOT, ONEHOP_HOST_2SHOT, ONEHOP_1SHOT_PUSH,
    ONEHOP_1SHOT_PULL,     ONEHOP_2SHOT_PULL, ONEHOP_2SHOT_PUSH};
#define ALGORITHMS (int)(sizeof algorithms / sizeof *algorithms)
static const onehop_dtype dtypes[] = {ONEHOP_FLOAT32, ONEHOP_FLOAT16, ONEHOP_BFLOAT16};

typedef struct own {
    onehop_context *context;
    int rank, world;
    guarded in, out;
    unsigned char *sum;
    uint64_t seed;
} own;

static own own_make(onehop_context *context, int rank, int world, size_t max) {
    own o = {context, rank, world, guarded_make(max), guarded_make(max), malloc(max), 0};
    if (!o.sum) FAIL("no memory");
    return o;
}

static void own_free(own *o) {
    guarded_free(&o->in);
    guarded_free(&o->out);
    free(o->sum);
}

/* Of a long message both ends and some place between: test_matrix looks at all of one. */
#define WINDOW ((size_t)8192)

static void compare_window(own *o, const void *out, size_t first, size_t count, onehop_dtype dtype,
                           const char *what) {
    reference_of_inputs(o->sum, INPUT_REAL, o->seed, o->world, first, count, dtype);
    expect_equal(o->sum, (const char *)out + first * reference_element_bytes(dtype), count, dtype,
                 what);
}

/* One call; what the library says it would do is what it does. */
static void compare(own *o, onehop_algorithm algorithm, onehop_dtype dtype, size_t count,
                    size_t in_off, size_t out_off, bool in_place) {
    const size_t bytes = count * reference_element_bytes(dtype);
    char what[160];
    snprintf(what, sizeof what, "rank %d of %d, %s, %s, count %zu, offsets %zu %zu%s", o->rank,
             o->world, algorithm ? onehop_algorithm_name(algorithm) : "auto",
             onehop_dtype_name(dtype), count, in_off, out_off, in_place ? ", in place" : "");
    void *out = guarded_place(&o->out, bytes, out_off),
         *in = in_place ? out : guarded_place(&o->in, bytes, in_off);
    onehop_choice choice;
    onehop_stats before, after;
    input_fill(in, INPUT_REAL, ++o->seed, o->rank, 0, count, dtype);
    CHECK_OK(onehop_get_stats(o->context, &before));
    CHECK_OK(ranks_all_reduce(o->context, in, out, count, dtype, algorithm, NULL));
    CHECK_OK(onehop_get_stats(o->context, &after));
    if (count <= 3 * WINDOW) {
        compare_window(o, out, 0, count, dtype, what);
    } else {
        compare_window(o, out, 0, WINDOW, dtype, what);
        compare_window(o, out, o->seed * 7919 % (count - WINDOW), WINDOW, dtype, what);
        compare_window(o, out, count - WINDOW, WINDOW, dtype, what);
    }
    guarded_check(&o->out, what);
    if (!in_place) guarded_check(&o->in, what);
    CHECK_OK(would_use(o->context, bytes, dtype, ONEHOP_SUM, ONEHOP_MODE_EAGER, in_place, &choice));
    CHECK_INT(ONEHOP_SOURCE_NONE, choice.source); /* pull algorithms are not chosen by themselves */
    if (algorithm) choice.algorithm = algorithm;
    if (algorithm == ONEHOP_2SHOT_PUSH && bytes <= 16 * ((size_t)o->world - 1))
        choice.algorithm = ONEHOP_1SHOT_PUSH; /* fewer units than ranks */
    CHECK_INT(before.calls_by[choice.algorithm] + 1, after.calls_by[choice.algorithm]);
}

/* ---- limits ---------------------------------------------------------------------------------- */
/* Every size at which some code changes its mind: slot, sub-slot, the host paths' pieces and
 * multiples of them, half of the pull buffer and its multiples, table rows, a shard of a line per
 * rank, shards of whole lines, shards of half a push slot and chunks of them. */
static size_t limits_of(const own *o, size_t *limits) {
    const oh_regions *p = &o->context->regions;
    size_t n = 0;
    const size_t box = OH_BOX_BYTES(p->pull_bytes, (size_t)o->world);
    const size_t turn = box / 2 < 65536 ? box / 2 : 65536;
    const size_t shards = (size_t)o->world * (box / 2 / 128 * 128);
    const size_t two_shot = shards < 131072 ? shards : 131072;
    const size_t all[] = {p->slot_bytes / 2,
                          p->slot_bytes,
                          2 * p->slot_bytes,
                          3 * (p->slot_bytes / 2),
                          65536,
                          box,
                          262144,
                          turn,
                          2 * turn,
                          3 * turn,
                          two_shot,
                          2 * two_shot,
                          3 * two_shot,
                          p->pull_bytes,
                          2 * p->pull_bytes,
                          3 * (p->pull_bytes / 2),
                          p->slot_bytes / 2 * (size_t)o->world,
                          3 * (p->slot_bytes / 4) * (size_t)o->world,
                          1024 * (size_t)o->world,
                          1024,
                          128 * (size_t)o->world,
                          16};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i] + 16 < MAX_BYTES) limits[n++] = all[i];
    return n;
}

static void at_limits(onehop_context *context, int rank, int world, void *argument) {
    own o = own_make(context, rank, world, MAX_BYTES);
    size_t limits[32];
    const size_t n = limits_of(&o, limits);
    (void)argument;
    for (size_t i = 0; i < n; i++)
        for (int a = 0; a < ALGORITHMS; a++)
            for (int d = 0; d < 3; d++)
                for (int more = -1; more <= 1; more++) {
                    const size_t count =
                        (size_t)((long)(limits[i] / reference_element_bytes(dtypes[d])) + more);
                    /* Large ones in one form, which changes from call to call. */
                    if (limits[i] > 70000 && (i + (size_t)a + (size_t)d) % 3) continue;
                    compare(&o, algorithms[a], dtypes[d], count, 0, 0, more % 2 == 0);
                    if (limits[i] <= 70000)
                        compare(&o, algorithms[a], dtypes[d], count, 0, 0, more % 2 != 0);
                }
    own_free(&o);
}

/* ---- small sizes, odd addresses -------------------------------------------------------------- */
static void small_sizes(onehop_context *context, int rank, int world, void *argument) {
    own o = own_make(context, rank, world, 4096);
    (void)argument;
    for (int a = 0; a < ALGORITHMS; a++) {
        for (size_t count = 1; count <= 2 * (size_t)world; count++)
            compare(&o, algorithms[a], dtypes[count % 3], count, 0, 0, count % 2);
        for (size_t bytes = 1; bytes <= 257; bytes++) {
            const onehop_dtype dtype = dtypes[(bytes + (size_t)a) % 3];
            const size_t size = reference_element_bytes(dtype), count = (bytes + size - 1) / size;
            compare(&o, algorithms[a], dtype, count, 0, 0, bytes % 2);
        }
    }
    own_free(&o);
}

/* 1..20W units of 16 bytes, the last one whole or short: shards of none, one and several units, and
 * where lines take their place. Every size on few ranks, a sample that moves on many. */
static void unit_sizes(onehop_context *context, int rank, int world, void *argument) {
    static const onehop_algorithm some[] = {ONEHOP_1SHOT_PULL, ONEHOP_2SHOT_PULL,
                                            ONEHOP_2SHOT_PUSH};
    own o = own_make(context, rank, world, 16384);
    const size_t step = world <= 5 && !HARNESS_SANITIZED ? 1 : 11;
    (void)argument;
    for (int a = 0; a < 3; a++)
        for (int d = 0; d < 3; d++)
            for (size_t units = 1 + (size_t)(a + 3 * d + world) % step; units <= 20 * (size_t)world;
                 units += step) {
                const size_t whole = units * 16 / reference_element_bytes(dtypes[d]);
                compare(&o, some[a], dtypes[d], whole - units % 3, 0, 0, units % 2);
            }
    /* About the size from which shards are whole lines. */
    for (size_t units = 64 * (size_t)world - 9; units <= 64 * (size_t)world + 9 && units <= 1000;
         units += 3)
        for (int a = 1; a < 3; a++)
            compare(&o, some[a], ONEHOP_BFLOAT16, units * 8 - 1, 0, 0, units % 2);
    own_free(&o);
}

static void odd_addresses(onehop_context *context, int rank, int world, void *argument) {
    static const size_t counts[] = {1, 7, 8, 100, 1021, 5000};
    own o = own_make(context, rank, world, 65536);
    (void)argument;
    for (int a = 0; a < ALGORITHMS; a++)
        for (int d = 0; d < 3; d++)
            for (size_t off = 0; off < 16; off += reference_element_bytes(dtypes[d])) {
                const size_t size = reference_element_bytes(dtypes[d]);
                const size_t other = (off * 5 + (size_t)rank * 6) % 16 / size * size;
                const size_t count = counts[(off / size + (size_t)a) % 6];
                compare(&o, algorithms[a], dtypes[d], count, (off + (size_t)rank * size) % 16,
                        other, false);
                compare(&o, algorithms[a], dtypes[d], count, 0, (other + off) % 16, true);
            }
    own_free(&o);
}

/* However small the message, and with shards of nothing: whichever rank has not called, no other
 * one's call ends. */
static void nobody_is_silent(int world) {
    static const onehop_algorithm some[] = {ONEHOP_1SHOT_PULL, ONEHOP_2SHOT_PULL,
                                            ONEHOP_2SHOT_PUSH};
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    onehop_context *contexts[8];
    onehop_stream streams[8];
    static float in[8][64], out[8][64], sum[64];
    bool idle;
    config.device.kind = ONEHOP_DEVICE_HOST;
    config.timeout_ms = 60000;
    CHECK_OK(onehop_create_all(&config, world, NULL, contexts));
    for (int r = 0; r < world; r++) {
        CHECK_OK(onehop_host_stream_create(&streams[r]));
        input_fill(in[r], INPUT_REAL, 23, r, 0, 64, ONEHOP_FLOAT32);
    }
    reference_of_inputs(sum, INPUT_REAL, 23, world, 0, 64, ONEHOP_FLOAT32);
    for (int i = 0; i < 6 * world; i++) {
        const int late = i / 6;
        const size_t count = i % 2 ? 4 * (size_t)world - 1 : 1;
        memset(out, 0, sizeof out);
        for (int k = 1; k <= world; k++) {
            const int r = (late + k) % world; /* the late one last */
            for (int p = 0; r == late && p < world; p++) {
                if (p == 0) sleep_ms(3);
                oh_device *device = contexts[p]->device;
                CHECK_OK(device->ops->stream_idle(device, streams[p], &idle));
                if (p != late && idle)
                    FAIL("%s, %zu elements: rank %d of %d did not wait for rank %d",
                         onehop_algorithm_name(some[i / 2 % 3]), count, p, world, late);
            }
            CHECK_OK(ranks_all_reduce(contexts[r], in[r], out[r], count, ONEHOP_FLOAT32,
                                      some[i / 2 % 3], streams[r]));
        }
        for (int r = 0; r < world; r++) {
            CHECK_OK(onehop_synchronize(contexts[r], streams[r]));
            expect_equal(sum, out[r], count, ONEHOP_FLOAT32, "after a late rank");
        }
    }
    for (int r = 0; r < world; r++) {
        onehop_destroy(contexts[r]);
        onehop_host_stream_destroy(streams[r]);
    }
}

/* The one source there is, named or left open: the same call, so ranks may differ in that. */
static void named_source(onehop_context *context, int rank, int world, void *argument) {
    own o = own_make(context, rank, world, 4096);
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    onehop_stats stats;
    (void)argument;
    for (int i = 0; i < 8; i++) {
        void *in = guarded_place(&o.in, 4000, 0), *out = guarded_place(&o.out, 4000, 0);
        call.algorithm = i % 2 ? ONEHOP_1SHOT_PULL : ONEHOP_2SHOT_PULL;
        call.source = (i / 2 + rank) % 2 ? ONEHOP_SOURCE_WORKSPACE : ONEHOP_SOURCE_NONE;
        input_fill(in, INPUT_REAL, (uint64_t)i, rank, 0, 1000, ONEHOP_FLOAT32);
        CHECK_OK(
            onehop_all_reduce(context, in, out, 1000, ONEHOP_FLOAT32, ONEHOP_SUM, &call, NULL));
        reference_of_inputs(o.sum, INPUT_REAL, (uint64_t)i, world, 0, 1000, ONEHOP_FLOAT32);
        expect_equal(o.sum, out, 1000, ONEHOP_FLOAT32, "named source");
    }
    CHECK_OK(onehop_get_stats(context, &stats));
    CHECK_INT(4, stats.calls_by[ONEHOP_1SHOT_PULL]);
    CHECK_INT(4, stats.calls_by[ONEHOP_2SHOT_PULL]);
    own_free(&o);
}

/* ---- overlap --------------------------------------------------------------------------------- */
static void overlaps(onehop_context *context, int rank, int world, void *argument) {
    enum {
        COUNT = 64
    };
    static _Thread_local float memory[3 * COUNT];
    float sum[COUNT];
    (void)argument;
    for (int a = 0; a < ALGORITHMS; a++) {
        /* Refused, and no rank has said anything to another. */
        CHECK_RESULT(ONEHOP_ERR_OVERLAP, ranks_all_reduce(context, memory, memory + 1, COUNT,
                                                          ONEHOP_FLOAT32, algorithms[a], NULL));
        CHECK_RESULT(ONEHOP_ERR_OVERLAP,
                     ranks_all_reduce(context, memory + COUNT, memory + 1, COUNT, ONEHOP_FLOAT32,
                                      algorithms[a], NULL));
        CHECK_RESULT(ONEHOP_ERR_OVERLAP,
                     ranks_all_reduce(context, memory, memory + COUNT - 1, COUNT, ONEHOP_FLOAT32,
                                      algorithms[a], NULL));
        /* They touch: allowed, in either order. */
        for (int order = 0; order < 2; order++) {
            float *in = memory + (order ? COUNT : 0), *out = memory + (order ? 0 : COUNT);
            input_fill(in, INPUT_REAL, (uint64_t)(a * 2 + order), rank, 0, COUNT, ONEHOP_FLOAT32);
            reference_of_inputs(sum, INPUT_REAL, (uint64_t)(a * 2 + order), world, 0, COUNT,
                                ONEHOP_FLOAT32);
            CHECK_OK(
                ranks_all_reduce(context, in, out, COUNT, ONEHOP_FLOAT32, algorithms[a], NULL));
            expect_equal(sum, out, COUNT, ONEHOP_FLOAT32, "in and out touch");
        }
    }
}

int main(void) {
    watchdog(230);
    onehop_config tight = ONEHOP_CONFIG_INIT(onehop_config);
    tight.push_bytes = 8192;
    tight.pull_bytes = 12288;
    const int step = HARNESS_SANITIZED ? 3 : 1;
    for (int world = 2; world <= 8; world += world < 4 ? step : 2 * step)
        ranks_run(RANKS_AS_THREADS, world, NULL, small_sizes, NULL);
    ranks_run(RANKS_AS_PROCESSES, 3, &tight, at_limits, NULL);
    ranks_run(RANKS_AS_THREADS, 2, &tight, at_limits, NULL);
    if (!HARNESS_SANITIZED) {
        ranks_run(RANKS_AS_THREADS, 5, &tight, at_limits, NULL);
        ranks_run(RANKS_AS_THREADS, 3, NULL, at_limits, NULL);
    }
    for (int world = 2; world <= 9; world += world < 4 ? step : 5)
        ranks_run(RANKS_AS_THREADS, world, NULL, odd_addresses, NULL);
    ranks_run(RANKS_AS_PROCESSES, 2, NULL, odd_addresses, NULL);
    for (int world = 2; world <= 16; world += world < 5 ? step : 4)
        ranks_run(RANKS_AS_THREADS, world, NULL, unit_sizes, NULL);
    for (int world = 2; world <= 8; world += 3) nobody_is_silent(world);
    ranks_run(RANKS_AS_PROCESSES, 7, NULL, unit_sizes, NULL);
    if (!HARNESS_SANITIZED) ranks_run(RANKS_AS_PROCESSES, 16, NULL, unit_sizes, NULL);
    ranks_run(RANKS_AS_THREADS, 2, NULL, named_source, NULL);
    ranks_run(RANKS_AS_THREADS, 3, NULL, overlaps, NULL);
    return 0;
}
