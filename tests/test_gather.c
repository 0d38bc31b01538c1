/* Property: reduce-scatter and all-gather through contexts, as threads and as processes, give the
 * bits of the scalar reference and of our own all-reduce; ranks that disagree all get the same
 * error, and wrong arguments are refused.
 *
 * All types, numbers of ranks, algorithms, odd counts, places that are aligned to an element only,
 * in place and out of place, buffers so small that messages go in many chunks, all-reduces in
 * between, eager and in graphs. */
/* ThreadSanitizer sees the bodies in test_parts_lanes, in less time. */
/* labels: quick timeout=120 tsan-off */
#include "harness.h"
#include "reference.h"
#include "rank_contexts.h"

#define MAX (1 << 20) /* bytes of all parts */

/* ---- one rank -------------------------------------------------------------------------------- */
typedef struct own {
    onehop_context *context;
    int rank, world;
    guarded all, part, sum;
    unsigned char *expected;
    size_t calls;
} own;

static own own_make(onehop_context *context, int rank, int world) {
    own o = {context,           rank,        world, guarded_make(MAX), guarded_make(MAX),
             guarded_make(MAX), malloc(MAX), 0};
    return o;
}

static void own_free(own *o) {
    guarded_free(&o->all);
    guarded_free(&o->part);
    guarded_free(&o->sum);
    free(o->expected);
}

static onehop_call named(onehop_algorithm algorithm, uint32_t blocks) {
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    call.algorithm = algorithm;
    call.blocks = blocks;
    return call;
}

static const char *name_call(const own *o, const char *what, onehop_algorithm a, size_t count,
                             bool in_place) {
    static _Thread_local char text[128];
    snprintf(text, sizeof text, "%s, rank %d of %d, %s, %zu, %s", what, o->rank, o->world,
             onehop_algorithm_name(a), count, in_place ? "in place" : "out of place");
    return text;
}

/* The shard of a sum, and what the shard of our own all-reduce has. */
static void scatter(own *o, onehop_dtype dtype, onehop_algorithm a, size_t count, bool in_place) {
    const size_t size = reference_element_bytes(dtype), bytes = count * size,
                 all = bytes * (size_t)o->world;
    const size_t off =
        (o->calls * 7 + (size_t)o->rank * 3) % (16 / size) * size * (o->calls % 3 != 0);
    const uint64_t seed = 7 + o->calls++;
    const char *what = name_call(o, "scatter", a, count, in_place);
    const onehop_call call = named(a, 0);
    unsigned char *in = guarded_place(&o->all, all, off), *sum = guarded_place(&o->sum, all, 0);
    unsigned char *out = guarded_place(&o->part, bytes, off);
    input_fill(in, INPUT_MIXED, seed, o->rank, 0, count * (size_t)o->world, dtype);
    if (o->calls % 8 == 0)
        CHECK_OK(onehop_all_reduce(o->context, in, sum, count * (size_t)o->world, dtype, ONEHOP_SUM,
                                   NULL, NULL));
    if (in_place) out = in + bytes * (size_t)o->rank;
    CHECK_OK(onehop_reduce_scatter(o->context, in, out, count, dtype, ONEHOP_SUM, &call, NULL));
    reference_of_inputs(o->expected, INPUT_MIXED, seed, o->world, count * (size_t)o->rank, count,
                        dtype);
    expect_equal(o->expected, out, count, dtype, what);
    if (o->calls % 8 == 0) CHECK_BYTES(out, sum + bytes * (size_t)o->rank, bytes);
    if (!in_place) guarded_check(&o->part, what);
    /* The input stays, but for the own shard in place. */
    input_fill(o->expected, INPUT_MIXED, seed, o->rank, 0, count * (size_t)o->world, dtype);
    if (in_place) memcpy(o->expected + bytes * (size_t)o->rank, out, bytes);
    CHECK_BYTES(o->expected, in, all);
    guarded_check(&o->all, what);
}

/* Runs of 0xFF, of zeros, and anything. */
static unsigned char byte_of(uint64_t seed, int rank, size_t i) {
    uint64_t random = seed * 1000003 + (uint64_t)rank * 8191 + i / 24;
    const uint64_t lot = random_next(&random);
    if (lot % 4 == 0) return 0xFF;
    return lot % 4 == 1 ? 0 : (unsigned char)(lot >> i % 24);
}

static void gather(own *o, onehop_algorithm a, size_t bytes, bool in_place) {
    const size_t off = (o->calls * 7 + (size_t)o->rank * 3) % 16 * (o->calls % 3 != 0);
    const uint64_t seed = 7 + o->calls++;
    const char *what = name_call(o, "gather", a, bytes, in_place);
    const onehop_call call = named(a, 0);
    unsigned char *out = guarded_place(&o->all, bytes * (size_t)o->world, off);
    unsigned char *in = guarded_place(&o->part, bytes, off);
    if (in_place) in = out + bytes * (size_t)o->rank;
    for (size_t i = 0; i < bytes; i++) in[i] = byte_of(seed, o->rank, i);
    CHECK_OK(onehop_all_gather(o->context, in, out, bytes, &call, NULL));
    for (int r = 0; r < o->world; r++)
        for (size_t i = 0; i < bytes; i++) o->expected[(size_t)r * bytes + i] = byte_of(seed, r, i);
    if (memcmp(o->expected, out, bytes * (size_t)o->world)) fprintf(stderr, "%s\n", what);
    CHECK_BYTES(o->expected, out, bytes * (size_t)o->world);
    guarded_check(&o->all, what);
}

/* ---- everything against the reference -------------------------------------------------------- */
static const onehop_algorithm scatters[] = {ONEHOP_ALGORITHM_AUTO, ONEHOP_SCATTER_PUSH};
static const onehop_algorithm gathers[] = {ONEHOP_ALGORITHM_AUTO, ONEHOP_GATHER_PUSH,
                                           ONEHOP_GATHER_LL};

static void against_reference(onehop_context *context, int rank, int world, void *argument) {
    static const size_t counts[] = {1, 7, 8, 9, 64, 255, 1003};
    own o = own_make(context, rank, world);
    (void)argument;
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        for (int d = ONEHOP_FLOAT32; d <= ONEHOP_BFLOAT16; d++)
            for (int a = 0; a < 2; a++)
                scatter(&o, (onehop_dtype)d, scatters[a], counts[c],
                        (c + (size_t)d + (size_t)a) % 2);
        for (int a = 0; a < 3; a++) gather(&o, gathers[a], counts[c], (c + (size_t)a) % 2);
        for (int a = 0; a < 3; a++) gather(&o, gathers[a], counts[c] * 4, (c + (size_t)a) % 2 == 0);
    }
    for (int a = 0; a < 2; a++) {
        scatter(&o, ONEHOP_BFLOAT16, scatters[a], 12289, a);
        scatter(&o, ONEHOP_FLOAT32, scatters[a], 8192, !a);
        gather(&o, gathers[a], 40963, a);
        gather(&o, gathers[a], 32768, !a);
    }
    own_free(&o);
}

/* ---- graphs ---------------------------------------------------------------------------------- */
enum {
    GRAPH_COUNT = 600,
    REPLAYS = 4
};

/* x -> reduce-scatter -> all-gather in place -> all-reduce, captured and replayed. */
static void in_graphs(onehop_context *context, int rank, int world, void *argument) {
    const size_t all = GRAPH_COUNT * (size_t)world;
    float *in = malloc(all * 4), *sum = malloc(all * 4), *total = malloc(all * 4),
          *expected = malloc(all * 4);
    const onehop_call one = named(ONEHOP_SCATTER_PUSH, 3), two = named(ONEHOP_GATHER_PUSH, 3),
                      three = named(ONEHOP_GATHER_LL, 2);
    onehop_stream stream;
    onehop_host_graph *graph;
    (void)argument;
    CHECK_OK(onehop_host_stream_create(&stream));
    CHECK_OK(onehop_capture_begin(context));
    CHECK_OK(onehop_host_stream_capture_begin(stream));
    for (int i = 0; i < 3; i++) {
        float *mine = sum + GRAPH_COUNT * (size_t)rank;
        CHECK_OK(i ? onehop_reduce_scatter(context, in, mine, GRAPH_COUNT, ONEHOP_FLOAT32,
                                           ONEHOP_SUM, &one, stream)
                   : onehop_reduce_scatter(context, in, mine, GRAPH_COUNT, ONEHOP_FLOAT32,
                                           ONEHOP_SUM, NULL, stream));
        CHECK_OK(i ? onehop_all_gather(context, mine, sum, GRAPH_COUNT * 4, i == 1 ? &two : &three,
                                       stream)
                   : onehop_all_gather(context, mine, sum, GRAPH_COUNT * 4, NULL, stream));
        CHECK_OK(
            onehop_all_reduce(context, sum, total, all, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, stream));
    }
    CHECK_OK(onehop_host_stream_capture_end(stream, &graph));
    CHECK_OK(onehop_capture_end(context));
    for (int replay = 0; replay < REPLAYS; replay++) {
        input_fill(in, INPUT_INTEGERS, (uint64_t)replay + 1, rank, 0, all, ONEHOP_FLOAT32);
        memset(sum, 0xA5, all * 4);
        CHECK_OK(onehop_host_graph_launch(graph, stream));
        CHECK_OK(onehop_synchronize(context, stream));
        reference_of_inputs(expected, INPUT_INTEGERS, (uint64_t)replay + 1, world, 0, all,
                            ONEHOP_FLOAT32);
        expect_equal(expected, sum, all, ONEHOP_FLOAT32, "replayed");
        for (size_t i = 0; i < all; i++) expected[i] *= (float)world;
        expect_equal(expected, total, all, ONEHOP_FLOAT32, "replayed, reduced again");
    }
    onehop_host_graph_destroy(graph);
    onehop_host_stream_destroy(stream);
    free(in), free(sum), free(total), free(expected);
}

/* Captured calls that differ are found when the capture ends. */
static void captures_differ(onehop_context *context, int rank, int world, void *argument) {
    float in[8 * 4] = {0}, out[8 * 4] = {0};
    onehop_stream stream;
    onehop_host_graph *graph;
    (void)argument;
    (void)world;
    CHECK_OK(onehop_host_stream_create(&stream));
    CHECK_OK(onehop_capture_begin(context));
    CHECK_OK(onehop_host_stream_capture_begin(stream));
    CHECK_OK(onehop_all_gather(context, in, out, rank == 1 ? 12 : 16, NULL, stream));
    CHECK_OK(onehop_host_stream_capture_end(stream, &graph));
    CHECK_RESULT(ONEHOP_ERR_MISMATCH, onehop_capture_end(context));
    CHECK_CONTAINS("captured call 0 is 12 x bytes by host_gather", onehop_last_error());
    onehop_host_graph_destroy(graph);
    onehop_host_stream_destroy(stream);
}

/* ---- disagreement: kills the group, so contexts of its own ----------------------------------- */
typedef struct odd_call {
    onehop_group **groups;
    int way;
} odd_call;

static void disagree(int rank, int world, void *argument) {
    const odd_call *odd = argument;
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    onehop_context *context;
    float in[64] = {0}, out[64] = {0};
    onehop_failure failure;
    onehop_result result = ONEHOP_OK;
    const bool me = rank == world - 1;
    config.group = odd->groups[rank];
    config.device.kind = ONEHOP_DEVICE_HOST;
    config.timeout_ms = 20000;
    CHECK_OK(onehop_create(&config, &context));
    if (odd->way == 0) /* another operation of as many bytes */
        result =
            me ? onehop_reduce_scatter(context, in, out, 4, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, NULL)
               : onehop_all_gather(context, in, out, 16, NULL, NULL);
    if (odd->way == 1)
        result = onehop_reduce_scatter(context, in, out, me ? 5 : 4, ONEHOP_FLOAT32, ONEHOP_SUM,
                                       NULL, NULL);
    if (odd->way == 2) {
        const onehop_call call = named(ONEHOP_GATHER_LL, 2);
        result = onehop_all_gather(context, in, out, me ? 12 : 16, &call, NULL);
    }
    if (odd->way == 3)
        result =
            me ? onehop_all_reduce(context, in, out, 4, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, NULL)
               : onehop_reduce_scatter(context, in, out, 4, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, NULL);
    CHECK_RESULT(ONEHOP_ERR_MISMATCH, result);
    CHECK_RESULT(ONEHOP_ERR_MISMATCH, onehop_status(context, &failure));
    CHECK_INT(world - 1, failure.peer);
    CHECK_CONTAINS(", rank 0 ", failure.text);
    onehop_destroy(context);
}

static void disagreements(void) {
    for (int way = 0; way < 4; way++) {
        onehop_group *groups[ONEHOP_MAX_RANKS];
        odd_call odd = {groups, way};
        CHECK_OK(onehop_group_open_local(3, groups));
        run_threads(3, disagree, &odd);
        for (int r = 0; r < 3; r++) onehop_group_close(groups[r]);
    }
}

/* ---- arguments ------------------------------------------------------------------------------- */
#define REFUSED(result, part, call)                                                                \
    do {                                                                                           \
        CHECK_RESULT(result, call);                                                                \
        CHECK_CONTAINS(part, onehop_last_error());                                                 \
    } while (0)

#define SCATTER(in, out, count)                                                                    \
    onehop_reduce_scatter(context, in, out, count, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, NULL)

static void wrong_arguments(onehop_context *context, int rank, int world, void *argument) {
    float all[32] = {0}, part[8] = {0};
    onehop_call call = named(ONEHOP_1SHOT_PUSH, 0);
    const size_t huge = (size_t)1 << 40;
    onehop_choice choice;
    onehop_stats stats;
    (void)argument;
    REFUSED(ONEHOP_ERR_NULL, "context is NULL", onehop_all_gather(NULL, part, all, 4, NULL, NULL));
    REFUSED(ONEHOP_ERR_NULL, "context is NULL",
            onehop_reduce_scatter(NULL, all, part, 4, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, NULL));
    REFUSED(ONEHOP_ERR_NULL, "all_gather: in is NULL",
            onehop_all_gather(context, NULL, all, 4, NULL, NULL));
    REFUSED(ONEHOP_ERR_NULL, "reduce_scatter: out is NULL", SCATTER(all, NULL, 1));
    REFUSED(ONEHOP_ERR_DTYPE, "reduce_scatter: data type 9",
            onehop_reduce_scatter(context, all, part, 1, (onehop_dtype)9, ONEHOP_SUM, NULL, NULL));
    REFUSED(ONEHOP_ERR_OP, "reduce_scatter: reduction 9",
            onehop_reduce_scatter(context, all, part, 1, ONEHOP_FLOAT32, (onehop_op)9, NULL, NULL));
    REFUSED(ONEHOP_ERR_ALIGNMENT, "reduce_scatter: out at", SCATTER(all, (char *)part + 2, 1));
    REFUSED(ONEHOP_ERR_OVERLAP, "reduce_scatter: out [", SCATTER(all, all + 1, 2));
    REFUSED(ONEHOP_ERR_OVERLAP, "in place it is part",
            SCATTER(all, all + 2 * ((rank + 1) % world), 2));
    REFUSED(ONEHOP_ERR_OVERLAP, "all_gather: in [",
            onehop_all_gather(context, (char *)all + 3 * ((rank + 1) % world), all, 3, NULL, NULL));
    REFUSED(ONEHOP_ERR_TOO_LARGE, "all_gather: 2 parts",
            onehop_all_gather(context, part, all, huge, NULL, NULL));
    REFUSED(ONEHOP_ERR_ALGORITHM, "1shot_push (1) does not serve all_gather",
            onehop_all_gather(context, part, all, 4, &call, NULL));
    call.algorithm = ONEHOP_GATHER_LL;
    REFUSED(ONEHOP_ERR_ALGORITHM, "gather_ll (10) does not serve all_reduce",
            onehop_all_reduce(context, part, all, 4, ONEHOP_FLOAT32, ONEHOP_SUM, &call, NULL));
    REFUSED(ONEHOP_ERR_ALGORITHM, "gather_ll takes up to 8192 bytes a rank here, found 8193",
            onehop_all_gather(context, part, (char *)huge, 8193, &call, NULL));
    call.source = ONEHOP_SOURCE_WORKSPACE;
    REFUSED(ONEHOP_ERR_ALGORITHM, "gather_ll has none",
            onehop_all_gather(context, part, all, 4, &call, NULL));
    REFUSED(ONEHOP_ERR_ARGUMENT, "collective 3",
            would_use_for(context, (onehop_collective)3, 4, ONEHOP_FLOAT32, ONEHOP_MODE_EAGER,
                          &choice));
    CHECK_OK(onehop_all_gather(context, NULL, NULL, 0, NULL, NULL)); /* nothing */
    CHECK_OK(SCATTER(NULL, NULL, 0));

    CHECK_OK(would_use_for(context, ONEHOP_ALL_GATHER, 5, 0, ONEHOP_MODE_GRAPH, &choice));
    CHECK_INT(ONEHOP_HOST_GATHER, choice.algorithm);
    CHECK_INT(1, choice.chunks);
    CHECK_OK(would_use_for(context, ONEHOP_REDUCE_SCATTER, (size_t)1 << 30, ONEHOP_FLOAT16,
                           ONEHOP_MODE_EAGER, &choice));
    CHECK_INT(ONEHOP_HOST_SCATTER, choice.algorithm);
    CHECK_OK(SCATTER(all, part, 4));
    CHECK_OK(onehop_all_gather(context, part, all, 5, NULL, NULL));
    CHECK_OK(onehop_get_stats(context, &stats));
    CHECK_INT(2, stats.calls);
    CHECK_INT(21, stats.bytes);
    CHECK_INT(1, stats.calls_by[ONEHOP_HOST_SCATTER]);
    CHECK_INT(1, stats.calls_by[ONEHOP_HOST_GATHER]);
}

static void alone(void) {
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    onehop_context *context;
    float in[3] = {1, 2, 3}, out[3] = {0};
    unsigned char bytes[3] = {0xFF, 0, 7}, moved[3] = {0};
    config.world_size = 1;
    config.device.kind = ONEHOP_DEVICE_HOST;
    config.name = own_name("alone");
    CHECK_OK(onehop_create(&config, &context));
    CHECK_OK(SCATTER(in, out, 3));
    CHECK_BYTES(in, out, sizeof in);
    CHECK_OK(SCATTER(in, in, 3));
    CHECK_OK(onehop_all_gather(context, bytes, moved, 3, NULL, NULL));
    CHECK_BYTES(bytes, moved, 3);
    onehop_destroy(context);
}

int main(void) {
    static const int worlds[] = {2, 3, 4, 5, 6, 7, 8, 16};
    onehop_config small = ONEHOP_CONFIG_INIT(onehop_config);
    watchdog(110);
    small.push_bytes = small.pull_bytes = 4096;
    alone();
    ranks_run(RANKS_AS_THREADS, 2, NULL, wrong_arguments, NULL);
    disagreements();
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++) {
        const double start = seconds_now();
        ranks_run(RANKS_AS_THREADS, worlds[i], i % 2 ? &small : NULL, against_reference, NULL);
        printf("world size %d: %.1f s\n", worlds[i], seconds_now() - start);
    }
    ranks_run(RANKS_AS_THREADS, 2, &small, against_reference, NULL);
    ranks_run(RANKS_AS_PROCESSES, 3, &small, against_reference, NULL);
    ranks_run(RANKS_AS_PROCESSES, 4, NULL, against_reference, NULL);
    ranks_run(RANKS_AS_THREADS, 2, NULL, in_graphs, NULL);
    ranks_run(RANKS_AS_THREADS, 3, &small, in_graphs, NULL);
    ranks_run(RANKS_AS_THREADS, 2, NULL, captures_differ, NULL);
    return 0;
}
