/* Property: at every bound of every rule of a table, for each type, mode and place, a call is
 * counted under the algorithm that onehop_would_use names, and its bytes are right, also those
 * between outputs. */
/* labels: quick */
#include "tuning_kit.h"

#include "reference.h"

/* ---- every bound ----------------------------------------------------------------------------- */

/* Every algorithm and source, both modes, windows, gaps that the default table serves, a bound
 * within a unit. */
static const char bounds_table[] = HOST "2-16 any 64 1shot_push - 3 1\n"
                                        "2-16 eager 100-1K 2shot_push - 3 1\n"
                                        "2-16 graph 1K 1shot_pull graph 3 1\n"
                                        "2-3 any 2K host_1shot - 1 1\n"
                                        "2-16 eager 2050 1shot_pull workspace 4 1\n"
                                        "2-16 graph 4K 2shot_pull graph 5 1\n"
                                        "4-16 any 6K 2shot_push - max 1\n"
                                        "2-16 any 8K-12K 2shot_pull workspace 2 1\n"
                                        "3-8 any 16K host_2shot - 1 1\n"
                                        "2-16 any 20000 1shot_push - 7 1\n";

enum {
    EDGE_CALLS = 360,
    EDGE_MAX = 70000, /* bytes of a call */
    EDGE_GUARD = 64
};

typedef struct edge_call {
    onehop_dtype dtype;
    size_t count, at; /* of the output in the arena */
    bool in_place;
} edge_call;

typedef struct edge_data {
    unsigned char *in[ONEHOP_BFLOAT16 + 1][ONEHOP_MAX_RANKS], *sum[ONEHOP_BFLOAT16 + 1];
    size_t compared;
} edge_data;

/* An element below, at and above each bound of each rule that the group has: of each type, in place
 * and out of place on few ranks, a third of that on many. */
static size_t list_edges(const onehop_context *ctx, edge_call *calls, size_t *room_out) {
    const oh_dispatch *d = &ctx->comm->dispatch;
    const size_t step = onehop_world_size(ctx) > 3 ? 3 : 1;
    size_t n = 0, used = EDGE_GUARD;
    for (size_t i = 0; i < 2 * d->rule_count; i++) {
        const uint64_t bound = i % 2 ? d->rules[i / 2].above : d->rules[i / 2].up_to;
        if (d->rules[i / 2].operation != OH_PLAIN) continue;
        for (size_t k = 0; bound && bound < EDGE_MAX - 4 && k < 18; k++) {
            edge_call *c = &calls[n];
            if ((i / 2 + k + k / 3) % step) continue;
            CHECK(++n <= EDGE_CALLS);
            c->dtype = (onehop_dtype)(1 + k % 3);
            c->count = bound / onehop_dtype_bytes(c->dtype) + k / 3 % 3 - 1;
            c->in_place = k >= 9;
            c->at = used;
            used += oh_round_up(c->count * onehop_dtype_bytes(c->dtype), 64) + EDGE_GUARD;
        }
    }
    *room_out = used;
    return n;
}

/* One call: counted under the algorithm that would_use names, and under no other. */
static void edge_run(onehop_context *ctx, const edge_call *c, const void *in, void *out,
                     onehop_mode mode, onehop_stream stream) {
    const size_t bytes = c->count * onehop_dtype_bytes(c->dtype);
    onehop_choice choice;
    onehop_stats before, after;
    CHECK_OK(would_use(ctx, bytes, c->dtype, ONEHOP_SUM, mode, c->in_place, &choice));
    CHECK_OK(onehop_get_stats(ctx, &before));
    CHECK_OK(onehop_all_reduce(ctx, in, out, c->count, c->dtype, ONEHOP_SUM, NULL, stream));
    CHECK_OK(onehop_get_stats(ctx, &after));
    CHECK_INT(before.bytes + bytes, after.bytes);
    CHECK_INT(before.registrations_used + (choice.source == ONEHOP_SOURCE_GRAPH),
              after.registrations_used);
    for (int a = 0; a < 16; a++)
        if (after.calls_by[a] != before.calls_by[a] + (a == (int)choice.algorithm))
            FAIL("%zu bytes of %s%s, mode %d, %d ranks: %s was promised, %s counted", bytes,
                 onehop_dtype_name(c->dtype), c->in_place ? " in place" : "", (int)mode,
                 onehop_world_size(ctx), onehop_algorithm_name(choice.algorithm),
                 onehop_algorithm_name((onehop_algorithm)a));
}

static void edges_of_mode(onehop_context *ctx, edge_data *data, onehop_mode mode) {
    const int rank = onehop_rank(ctx);
    edge_call calls[EDGE_CALLS];
    size_t room;
    onehop_stream stream = NULL;
    onehop_host_graph *graph = NULL;
    const size_t n = list_edges(ctx, calls, &room);
    unsigned char *arena = aligned_alloc(64, room), *want = aligned_alloc(64, room);
    CHECK(n > 0 && arena && want);
    memset(arena, 0xA5, room);
    memset(want, 0xA5, room);
    if (mode == ONEHOP_MODE_GRAPH) {
        CHECK_OK(onehop_host_stream_create(&stream));
        CHECK_OK(onehop_capture_begin(ctx));
        CHECK_OK(onehop_host_stream_capture_begin(stream));
    }
    for (size_t i = 0; i < n; i++) {
        const edge_call *c = &calls[i];
        const size_t bytes = c->count * onehop_dtype_bytes(c->dtype);
        const unsigned char *in = data->in[c->dtype][rank];
        memcpy(want + c->at, data->sum[c->dtype], bytes);
        if (c->in_place) memcpy(arena + c->at, in, bytes);
        edge_run(ctx, c, c->in_place ? arena + c->at : in, arena + c->at, mode, stream);
    }
    if (mode == ONEHOP_MODE_GRAPH) {
        CHECK_OK(onehop_host_stream_capture_end(stream, &graph));
        CHECK_OK(onehop_capture_end(ctx));
        CHECK_OK(onehop_host_graph_launch(graph, stream));
        CHECK_OK(onehop_synchronize(ctx, stream));
        onehop_host_graph_destroy(graph);
        onehop_host_stream_destroy(stream);
    }
    CHECK_BYTES(want, arena, room); /* outputs and what lies between */
    if (rank == 0) data->compared += n;
    ranks_barrier(ctx); /* peers may read what this rank captured */
    free(arena);
    free(want);
}

static void at_bounds(onehop_context *ctx, int rank, int world, void *argument) {
    edge_data *data = argument;
    const void *in[ONEHOP_MAX_RANKS];
    for (int t = ONEHOP_FLOAT32; t <= ONEHOP_BFLOAT16; t++)
        input_fill(data->in[t][rank], INPUT_REAL, (uint64_t)t, rank, 0,
                   EDGE_MAX / onehop_dtype_bytes((onehop_dtype)t), (onehop_dtype)t);
    ranks_barrier(ctx);
    for (int t = ONEHOP_FLOAT32; t <= ONEHOP_BFLOAT16 && rank == 0; t++) {
        for (int r = 0; r < world; r++) in[r] = data->in[t][r];
        reference_sum(data->sum[t], in, world, EDGE_MAX / onehop_dtype_bytes((onehop_dtype)t),
                      (onehop_dtype)t);
    }
    ranks_barrier(ctx);
    edges_of_mode(ctx, data, ONEHOP_MODE_EAGER);
    edges_of_mode(ctx, data, ONEHOP_MODE_GRAPH);
}

static void bounds(void) {
    static const int worlds[] = {2, 3, 5, 8};
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    edge_data data;
    tables t;
    memset(&data, 0, sizeof data);
    for (int d = ONEHOP_FLOAT32; d <= ONEHOP_BFLOAT16; d++) {
        data.sum[d] = aligned_alloc(64, EDGE_MAX / 64 * 64 + 64);
        for (int r = 0; r < ONEHOP_MAX_RANKS; r++)
            data.in[d][r] = aligned_alloc(64, EDGE_MAX / 64 * 64 + 64);
    }
    config.push_bytes = 8192;
    config.pull_bytes = 16384;
    config.max_registrations = EDGE_CALLS;
    make_tables(&t, bounds_table, NULL);
    setenv("ONEHOP_TUNING", t.path[0], 1);
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++)
        ranks_run(RANKS_AS_THREADS, worlds[i], &config, at_bounds, &data);
    unsetenv("ONEHOP_TUNING");
    remove_tables(&t);
    CHECK(data.compared > 1000);
    for (int d = ONEHOP_FLOAT32; d <= ONEHOP_BFLOAT16; d++) {
        for (int r = 0; r < ONEHOP_MAX_RANKS; r++) free(data.in[d][r]);
        free(data.sum[d]);
    }
}

int main(void) {
    watchdog(110);
    unsetenv("ONEHOP_TUNING");
    bounds();
    return 0;
}
