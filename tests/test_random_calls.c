/* Properties: a long random sequence of calls is right, bit for bit, whatever follows whatever:
 * sizes, types, algorithms, grids, places, eager calls and replays of graphs, ranks held back now
 * and then. And the bytes of a row do not depend on how many rows are reduced with it, across every
 * switch of algorithm. */
/* labels: timeout=120 */
#include "harness.h"
#include "rank_contexts.h"
#include "reference.h"

#define ROOM  ((size_t)24 << 10) /* elements of a rank's input */
#define MAX   ((size_t)12 << 10)
#define TYPES 3

static const onehop_algorithm algorithms[] = {
    ONEHOP_ALGORITHM_AUTO, ONEHOP_HOST_1SHOT, ONEHOP_HOST_2SHOT, ONEHOP_1SHOT_PUSH,
    ONEHOP_2SHOT_PUSH,     ONEHOP_1SHOT_PULL, ONEHOP_2SHOT_PULL};
#define ALGORITHMS (sizeof algorithms / sizeof *algorithms)

typedef struct board {
    unsigned char *in[TYPES][ONEHOP_MAX_RANKS], *sum[TYPES];
    size_t end,
        made; /* calls of a run, fewer if rank 0 finds that they take too long; and were made */
} board;

static board *shared;

static uint64_t next(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

static void make_data(onehop_context *context, int rank, int world) {
    const void *in[ONEHOP_MAX_RANKS];
    for (int t = 0; t < TYPES; t++)
        input_fill(shared->in[t][rank], INPUT_MIXED, (uint64_t)(world * 10 + t), rank, 0, ROOM,
                   (onehop_dtype)(t + 1));
    ranks_barrier(context);
    for (int t = 0; t < TYPES && rank == 0; t++) {
        for (int r = 0; r < world; r++) in[r] = shared->in[t][r];
        reference_sum(shared->sum[t], in, world, ROOM, (onehop_dtype)(t + 1));
    }
    ranks_barrier(context);
}

/* ---- a random sequence ----------------------------------------------------------------------- */
#define GRAPHS 12
#define NODES  4

#define MAX_SECONDS 30

static const uint32_t grids[] = {0, 2, 3, 12, 16};

typedef struct random_call {
    int type;
    size_t count, first;
    bool in_place;
    onehop_algorithm algorithm;
    uint32_t blocks; /* 0: automatic */
} random_call;

/* Equal on all ranks; short ones are the most frequent. */
static random_call draw(uint64_t *state) {
    random_call c;
    const size_t max = (size_t)1 << next(state) % 11;
    c.type = (int)(next(state) % TYPES);
    c.count = next(state) % 300 == 0 ? 1 + next(state) % MAX : 1 + next(state) % max;
    c.first = next(state) % (ROOM - MAX);
    c.in_place = next(state) % 3 == 0;
    c.algorithm = algorithms[next(state) % 3 ? 0 : next(state) % ALGORITHMS];
    c.blocks = c.algorithm >= ONEHOP_1SHOT_PUSH && c.algorithm <= ONEHOP_2SHOT_PULL
                   ? grids[next(state) % 5]
                   : 0;
    return c;
}

static const unsigned char *input_of(const random_call *c, int rank) {
    return shared->in[c->type][rank] +
           c->first * reference_element_bytes((onehop_dtype)(c->type + 1));
}

typedef struct placed_call {
    random_call call;
    guarded out;
    unsigned char *at;
} placed_call;

static void place(placed_call *p, int rank) {
    const size_t size = reference_element_bytes((onehop_dtype)(p->call.type + 1)),
                 bytes = p->call.count * size;
    p->at = guarded_place(&p->out, bytes, p->call.first % 5 * size);
    if (p->call.in_place) memcpy(p->at, input_of(&p->call, rank), bytes);
}

static void make_call(const placed_call *p, onehop_context *context, int rank,
                      onehop_stream stream) {
    const random_call *c = &p->call;
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    call.algorithm = c->algorithm;
    call.blocks = c->blocks;
    CHECK_OK(onehop_all_reduce(context, c->in_place ? p->at : input_of(c, rank), p->at, c->count,
                               (onehop_dtype)(c->type + 1), ONEHOP_SUM, &call, stream));
}

static void compare(const placed_call *p, int rank, size_t number, const char *how) {
    const random_call *c = &p->call;
    const onehop_dtype dtype = (onehop_dtype)(c->type + 1);
    const size_t size = reference_element_bytes(dtype);
    const unsigned char *sum = shared->sum[c->type] + c->first * size;
    char what[120];
    snprintf(what, sizeof what, "rank %d, %s %zu: %zu of %s by %s", rank, how, number, c->count,
             onehop_dtype_name(dtype), c->algorithm ? onehop_algorithm_name(c->algorithm) : "auto");
    if (memcmp(sum, p->at, c->count * size)) expect_equal(sum, p->at, c->count, dtype, what);
    guarded_check(&p->out, what);
}

typedef struct captured {
    onehop_host_graph *graph;
    placed_call nodes[NODES];
} captured;

static void capture(captured *c, onehop_context *context, int rank, onehop_stream stream,
                    uint64_t *state) {
    CHECK_OK(onehop_capture_begin(context));
    CHECK_OK(onehop_host_stream_capture_begin(stream));
    for (int n = 0; n < NODES; n++) {
        c->nodes[n].call = draw(state);
        c->nodes[n].out = guarded_make(c->nodes[n].call.count * 4);
        place(&c->nodes[n], rank);
        make_call(&c->nodes[n], context, rank, stream);
    }
    CHECK_OK(onehop_host_stream_capture_end(stream, &c->graph));
    CHECK_OK(onehop_capture_end(context));
}

static void replay(captured *c, onehop_context *context, int rank, onehop_stream stream,
                   size_t number) {
    for (int n = 0; n < NODES; n++) place(&c->nodes[n], rank);
    CHECK_OK(onehop_host_graph_launch(c->graph, stream));
    CHECK_OK(onehop_synchronize(context, stream));
    for (int n = 0; n < NODES; n++) compare(&c->nodes[n], rank, number, "replay");
}

static void random_calls(onehop_context *context, int rank, int world, void *argument) {
    const size_t calls = *(const size_t *)argument;
    uint64_t state = (uint64_t)world * 77, own = (uint64_t)rank + 1;
    onehop_stream stream;
    captured graphs[GRAPHS];
    placed_call eager = {.out = guarded_make(MAX * 4)};
    size_t made = 0;
    make_data(context, rank, world);
    CHECK_OK(onehop_host_stream_create(&stream));
    for (int g = 0; g < GRAPHS; g++) capture(&graphs[g], context, rank, stream, &state);
    if (rank == 0) __atomic_store_n(&shared->end, calls, __ATOMIC_RELAXED);
    ranks_barrier(context);
    const double start = seconds_now();
    while (made < __atomic_load_n(&shared->end, __ATOMIC_RELAXED)) {
        /* Processors that others use as well. No rank is a thousand calls ahead of another. */
        if (rank == 0 && made % 1000 < NODES && seconds_now() - start > MAX_SECONDS &&
            made + 1000 < shared->end)
            __atomic_store_n(&shared->end, made + 1000, __ATOMIC_RELAXED);
        if (next(&own) % 4000 == 0) sleep_ms(1);
        if (next(&state) % 16 == 0) {
            replay(&graphs[next(&state) % GRAPHS], context, rank, stream, made);
            made += NODES;
            continue;
        }
        eager.call = draw(&state);
        place(&eager, rank);
        make_call(&eager, context, rank, NULL);
        compare(&eager, rank, made++, "call");
    }
    if (rank == 0) shared->made = made;
    for (int g = 0; g < GRAPHS; g++) {
        onehop_host_graph_destroy(graphs[g].graph);
        for (int n = 0; n < NODES; n++) guarded_free(&graphs[g].nodes[n].out);
    }
    onehop_host_stream_destroy(stream);
    guarded_free(&eager.out);
}

/* ---- rows ------------------------------------------------------------------------------------ */
#define COLUMNS ((size_t)127)

/* Prefixes of one matrix: each row of each must be what it is alone. */
static void rows(onehop_context *context, int rank, int world, void *argument) {
    const onehop_dtype dtype = ONEHOP_BFLOAT16;
    const size_t max = ROOM / COLUMNS;
    const uint16_t *in = (const uint16_t *)(const void *)shared->in[dtype - 1][rank];
    uint16_t *alone = malloc(ROOM * 2), *out = malloc(ROOM * 2);
    unsigned ways = 0;
    (void)argument;
    if (!alone || !out) FAIL("no memory");
    make_data(context, rank, world);
    for (size_t i = 0; i < max; i++)
        CHECK_OK(onehop_all_reduce(context, in + i * COLUMNS, alone + i * COLUMNS, COLUMNS, dtype,
                                   ONEHOP_SUM, NULL, NULL));
    for (size_t n = 1; n <= max; n = n < 8 ? n + 1 : n + n / 3) {
        char what[64];
        onehop_choice choice;
        CHECK_OK(
            would_use(context, n * COLUMNS * 2, dtype, ONEHOP_SUM, ONEHOP_MODE_EAGER, 0, &choice));
        ways |= 1u << choice.algorithm | (choice.chunks > 1 ? 1u << 16 : 0);
        memset(out, 0xA5, ROOM * 2);
        CHECK_OK(onehop_all_reduce(context, in, out, n * COLUMNS, dtype, ONEHOP_SUM, NULL, NULL));
        snprintf(what, sizeof what, "rank %d of %d, %zu rows against one at a time", rank, world,
                 n);
        expect_equal(alone, out, n * COLUMNS, dtype, what);
    }
    /* The sizes above cross the switches of the default table, or of the one shot's chunks. */
    CHECK((ways & (ways - 1)) != 0);
    free(alone);
    free(out);
}

int main(void) {
    static const struct {
        int world;
        size_t calls;
    } runs[] = {{2, 200000}, {3, 20000}, {8, 5000}};
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    watchdog(110);
    shared = shared_memory(sizeof *shared);
    for (int t = 0; t < TYPES; t++) {
        shared->sum[t] = shared_memory(ROOM * 4);
        for (int r = 0; r < ONEHOP_MAX_RANKS; r++) shared->in[t][r] = shared_memory(ROOM * 4);
    }
    config.push_bytes = 8192;
    config.pull_bytes = 16384;
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        const double start = seconds_now();
        size_t calls = runs[i].calls;
        ranks_run(i % 2 ? RANKS_AS_THREADS : RANKS_AS_PROCESSES, runs[i].world, &config,
                  random_calls, &calls);
        printf("world size %d: %zu calls%s, %.1f s\n", runs[i].world, shared->made,
               shared->made < calls ? " instead of more, on a machine that is busy" : "",
               seconds_now() - start);
    }
    config.pull_bytes = 8192;
    for (int world = 2; world <= ONEHOP_MAX_RANKS; world = world < 8 ? world + 1 : world * 2)
        ranks_run(RANKS_AS_THREADS, world, &config, rows, NULL);
    return 0;
}
