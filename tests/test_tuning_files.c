/* Property: the file that ONEHOP_TUNING names decides what really runs, and all ranks must have the
 * same rules. The debug log says once which rule it was. Sizes that the caller gives are in force.
 * Where the hand-over to NCCL cannot work, without a GPU, it is refused with the reason. */
/* labels: quick */
#include "tuning_kit.h"

#include "device/nccl/nccl.h"

static char told[8][400];
static int lines_told;

static void keep_told(void *user, onehop_log_level level, const char *line) {
    (void)user;
    if (level != ONEHOP_LOG_DEBUG || !strstr(line, " bytes of ")) return;
    CHECK(lines_told < 8);
    snprintf(told[lines_told++], sizeof told[0], "%s", line);
}

/* The debug log says the rule once for each kind of call; at other levels nothing. */
static void tells_once(int rank, int world_size, void *argument) {
    const bool debug = *(const bool *)argument;
    setenv("ONEHOP_LOG", debug ? "debug" : "info", 1);
    onehop_set_log(keep_told, NULL);
    onehop_context *ctx = kit_open(rank, world_size, debug ? "told" : "not told", KIT_PATIENCE_MS);
    const kit_way ways[] = {{"auto", 256, ONEHOP_ALGORITHM_AUTO},
                            {"named", 8, ONEHOP_2SHOT_PUSH},
                            {"auto", 257, ONEHOP_ALGORITHM_AUTO}};
    kit_buffers *m = kit_buffers_make();
    for (int i = 0; i < 9; i++) CHECK_OK(kit_call(ctx, &ways[i % 3], m, 5));
    onehop_destroy(ctx);
    onehop_set_log(NULL, NULL);
    unsetenv("ONEHOP_LOG");
    free(m);
    CHECK_INT(debug ? 3 : 0, lines_told);
    if (!debug) return;
    CHECK_CONTAINS("all_reduce of 1024 bytes of float32, eager: host_1shot, grid 1x1, 1 chunk, by "
                   "host.table:10 (3 any 64K host_1shot - 1 1)",
                   told[0]);
    CHECK_CONTAINS(
        "of 32 bytes of float32, eager: 1shot_push instead of 2shot_push, which cannot serve "
        "it, grid 3x1, 1 chunk, by no rule",
        told[1]);
    CHECK_CONTAINS("of 1028 bytes", told[2]);
}

static void tells_rules(void) {
    for (int debug = 0; debug < 2; debug++) {
        bool on = debug;
        run_ranks(3, tells_once, &on);
    }
}

static const char host_table[] = HOST "3 any 1K 1shot_push - 5 1\n"
                                      "3 eager 1K-2K 2shot_pull workspace 4 1\n"
                                      "3 graph 4K 1shot_pull graph 4 1\n"
                                      "3 any 8K host_2shot - 1 1\n";

static void expect_run(onehop_context *ctx, size_t count, onehop_algorithm want, uint32_t blocks) {
    const size_t bytes = count * sizeof(float);
    onehop_choice choice;
    onehop_stats before, after;
    CHECK_OK(would_use(ctx, bytes, ONEHOP_FLOAT32, ONEHOP_SUM, ONEHOP_MODE_EAGER, 0, &choice));
    CHECK_INT(want, choice.algorithm);
    CHECK_INT(blocks, choice.blocks);
    kit_way way = {"by table", count, ONEHOP_ALGORITHM_AUTO};
    kit_buffers *m = kit_buffers_make();
    CHECK_OK(onehop_get_stats(ctx, &before));
    CHECK_OK(kit_call(ctx, &way, m, 5));
    kit_check(m->out, count, W, 5);
    CHECK_OK(onehop_get_stats(ctx, &after));
    CHECK_INT(before.calls_by[want] + 1, after.calls_by[want]);
    free(m);
}

/* A captured call: counted as what would_use says of graphs, and right when replayed. */
static void expect_captured(onehop_context *ctx, size_t count, bool in_place,
                            onehop_algorithm want) {
    const size_t bytes = count * sizeof(float);
    onehop_choice choice;
    onehop_stats before, after;
    onehop_stream stream;
    onehop_host_graph *graph;
    kit_buffers *m = kit_buffers_make();
    float *out = in_place ? m->in : m->out;
    CHECK_OK(
        would_use(ctx, bytes, ONEHOP_FLOAT32, ONEHOP_SUM, ONEHOP_MODE_GRAPH, in_place, &choice));
    CHECK_INT(want, choice.algorithm);
    CHECK_OK(onehop_host_stream_create(&stream));
    CHECK_OK(onehop_get_stats(ctx, &before));
    CHECK_OK(onehop_capture_begin(ctx));
    CHECK_OK(onehop_host_stream_capture_begin(stream));
    CHECK_OK(onehop_all_reduce(ctx, m->in, out, count, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, stream));
    CHECK_OK(onehop_host_stream_capture_end(stream, &graph));
    CHECK_OK(onehop_capture_end(ctx));
    CHECK_OK(onehop_get_stats(ctx, &after));
    CHECK_INT(before.calls_by[want] + 1, after.calls_by[want]);
    kit_fill(m->in, count, onehop_rank(ctx), 7);
    CHECK_OK(onehop_host_graph_launch(graph, stream));
    CHECK_OK(onehop_synchronize(ctx, stream));
    kit_check(out, count, W, 7);
    onehop_host_graph_destroy(graph);
    onehop_host_stream_destroy(stream);
    free(m);
}

static void by_file(int rank, int world_size, void *argument) {
    const tables *t = argument;
    setenv("ONEHOP_TUNING", t->path[rank], 1);
    onehop_context *ctx = kit_open(rank, world_size, "by file", KIT_PATIENCE_MS);
    onehop_choice choice;
    CHECK_OK(would_use(ctx, 1028, ONEHOP_FLOAT32, ONEHOP_SUM, ONEHOP_MODE_EAGER, 0, &choice));
    CHECK_TEXT(t->path[rank], choice.table);
    CHECK_INT(rank == 1 ? 5 : 4, choice.line); /* rank 1's file has a comment more */
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    const onehop_query query = {
        .struct_size = sizeof query, .bytes = 32, .dtype = ONEHOP_FLOAT32, .call = &call};
    call.algorithm = ONEHOP_2SHOT_PUSH;
    CHECK_OK(onehop_would_use(ctx, &query, &choice)); /* less than a unit for each of three */
    CHECK_INT(ONEHOP_1SHOT_PUSH, choice.algorithm);
    CHECK_INT(ONEHOP_2SHOT_PUSH, choice.instead_of);
    CHECK_INT(5, choice.blocks);
    call.algorithm = ONEHOP_NCCL;
    CHECK_RESULT(ONEHOP_ERR_ALGORITHM, onehop_would_use(ctx, &query, &choice));
    CHECK_RESULT(ONEHOP_ERR_NULL, onehop_would_use(ctx, NULL, &choice));
    expect_run(ctx, 256, ONEHOP_1SHOT_PUSH, 5);
    expect_run(ctx, 257, ONEHOP_2SHOT_PULL, 4);
    expect_run(ctx, 513, ONEHOP_HOST_2SHOT, 1);
    expect_run(ctx, 2049, ONEHOP_HOST_1SHOT, 1); /* beyond the file: as without it */
    expect_run(ctx, 70000, ONEHOP_HOST_2SHOT, 1);
    expect_captured(ctx, 256, true, ONEHOP_1SHOT_PUSH);
    expect_captured(ctx, 512, false, ONEHOP_1SHOT_PULL);
    expect_captured(ctx, 512, true, ONEHOP_HOST_2SHOT);
    expect_captured(ctx, 70000, false, ONEHOP_HOST_2SHOT);
    onehop_destroy(ctx);
}

typedef struct refusal {
    tables t;
    onehop_result result;
    const char *words[2];
} refusal;

static void not_by_file(int rank, int world_size, void *argument) {
    const refusal *s = argument;
    onehop_config config = kit_config(KIT_PATIENCE_MS);
    onehop_context *ctx = NULL;
    const kit_name own = kit_own_name(s->words[0]);
    config.rank = rank;
    config.world_size = world_size;
    config.name = own.text;
    setenv("ONEHOP_TUNING", s->t.path[rank], 1);
    CHECK_RESULT(s->result, onehop_create(&config, &ctx));
    CHECK(ctx == NULL);
    for (int i = 0; i < 2; i++) CHECK_CONTAINS(s->words[i], onehop_last_error());
}

static void files(void) {
    tables t;
    make_tables(&t, host_table,
                HOST "# in other words\n3 any 1K 1shot_push - 5 1\n"
                     "3 eager 1024-2048 2shot_pull workspace 4 1\n"
                     "3 graph 0-4K 1shot_pull graph 4 1\n"
                     "3 any 8K host_2shot - 1 1\n");
    run_ranks(W, by_file, &t);
    remove_tables(&t);

    static const struct {
        const char *other;
        onehop_result result;
        const char *words[2];
    } cases[] = {
        {HOST "3 any 1K 1shot_push - 6 1\n",
         ONEHOP_ERR_DISAGREEMENT,
         {"ONEHOP_TUNING) is", "on rank 1"}},
        {HOST "3 any 1K ring - 6 1\n", ONEHOP_ERR_ENVIRONMENT, {"rank1.table:3:", "\"ring\""}},
        {NULL, ONEHOP_ERR_ENVIRONMENT, {"ONEHOP_TUNING: the tuning table", "No such file"}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        refusal s = {.result = cases[i].result, .words = {cases[i].words[0], cases[i].words[1]}};
        make_tables(&s.t, host_table, cases[i].other);
        if (!cases[i].other) unlink(s.t.path[1]);
        run_ranks(W, not_by_file, &s);
        remove_tables(&s.t);
    }
}

/* ---- sizes on the host ----------------------------------------------------------------------- */

static void sizes(void) {
    static const struct {
        size_t max_bytes, push_bytes, pull_bytes; /* given */
        size_t push, pull;                        /* in force */
    } cases[] = {
        {0, 4096, 65536, 4096, 65536},
        {1 << 20, 8192, 0, 8192, 1 << 20},
        {100000, 0, 4096, 102400, 4096},
        {0, 0, 0, 1 << 20, 1 << 20},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
        onehop_context *contexts[2];
        onehop_stats stats;
        config.device.kind = ONEHOP_DEVICE_HOST;
        config.max_bytes = cases[i].max_bytes;
        config.push_bytes = cases[i].push_bytes;
        config.pull_bytes = cases[i].pull_bytes;
        config.flags = ONEHOP_FLAG_UNCAP; /* of no effect here */
        CHECK_OK(onehop_create_all(&config, 2, NULL, contexts));
        CHECK_OK(onehop_get_stats(contexts[1], &stats));
        CHECK_INT(cases[i].push, stats.push_bytes);
        CHECK_INT(cases[i].pull, stats.pull_bytes);
        CHECK(stats.symmetric_bytes >= 4 * cases[i].push + 2 * cases[i].pull);
        for (int r = 0; r < 2; r++) onehop_destroy(contexts[r]);
    }
}

/* ---- NCCL ------------------------------------------------------------------------------------ */

/* Rank 1 alone switches it on: all hear of it. */
static void nccl_on_the_host(int rank, int world_size, void *argument) {
    onehop_config config = kit_config(KIT_PATIENCE_MS);
    onehop_context *ctx = NULL;
    const kit_name own = kit_own_name("nccl");
    (void)argument;
    config.rank = rank;
    config.world_size = world_size;
    config.name = own.text;
    if (rank == 1) setenv("ONEHOP_NCCL", "1", 1);
    CHECK_RESULT(ONEHOP_ERR_UNSUPPORTED, onehop_create(&config, &ctx));
    CHECK_CONTAINS("NCCL needs GPUs", onehop_last_error());
}

static void nccl(void) {
    onehop_config config = kit_config(KIT_PATIENCE_MS);
    onehop_context *contexts[2];
    run_ranks(W, nccl_on_the_host, NULL);
    config.flags = ONEHOP_FLAG_NCCL;
    CHECK_RESULT(ONEHOP_ERR_UNSUPPORTED, onehop_create_all(&config, 2, NULL, contexts));
    CHECK_CONTAINS("a thread or a process for each rank", onehop_last_error());
    config.world_size = 1;
    CHECK_RESULT(ONEHOP_ERR_UNSUPPORTED, onehop_create(&config, contexts));
    setenv("ONEHOP_NCCL", "yes", 1);
    config.flags = 0;
    CHECK_RESULT(ONEHOP_ERR_ENVIRONMENT, onehop_create(&config, contexts));
    CHECK_CONTAINS("ONEHOP_NCCL", onehop_last_error());
    unsetenv("ONEHOP_NCCL");
    /* The library: none, one that is no NCCL. */
    setenv("ONEHOP_NCCL_LIB", "/nonexistent/libnccl.so", 1);
    CHECK_RESULT(ONEHOP_ERR_UNSUPPORTED, oh_nccl_open(NULL));
    CHECK_CONTAINS("/nonexistent/libnccl.so", onehop_last_error());
    CHECK_CONTAINS("ONEHOP_NCCL_LIB", onehop_last_error());
    CHECK_RESULT(ONEHOP_ERR_UNSUPPORTED, oh_nccl_open("libc.so.6"));
    CHECK_CONTAINS("libc.so.6 has no nccl", onehop_last_error());
}

int main(void) {
    watchdog(110);
    unsetenv("ONEHOP_TUNING");
    tells_rules();
    sizes();
    files();
    nccl();
    return 0;
}
