/* Property: registrations live as long as their graphs. They are recycled, need not be neighbours,
 * and a graph that outlives one fails with REGISTRATION on all ranks. Captures that were dropped,
 * that differ between ranks, or that hold what is refused, leave nothing behind. A capture that is
 * staged says so in one line. */
/* labels: quick */
#include "registration_kit.h"

/* ---- registrations and graphs ---------------------------------------------------------------- */

/* More captures than there are registrations, each graph gone before the next; then graphs that
 * stay, until there is no registration left. */
static void recycling(onehop_context *context, int rank, int world, void *argument) {
    memory *m = memory_make();
    onehop_stream streams[2];
    onehop_host_graph *graphs[2];
    const uint32_t registrations = context->comm->stats.registrations_total;
    const bool processes = *(const ranks_layout *)argument == RANKS_AS_PROCESSES;
    uint32_t last_tag = 0;
    for (int i = 0; i < 2; i++) CHECK_OK(onehop_host_stream_create(&streams[i]));
    ranks_barrier(context);
    const int fds = count_fds();
    ranks_barrier(context);
    for (int round = 0; round < 5; round++) { /* two graphs in one capture */
        CHECK_OK(onehop_capture_begin(context));
        for (int i = 0; i < 2; i++) graphs[i] = record(context, m, streams[i]);
        CHECK_OK(onehop_capture_end(context));
        CHECK_INT(2 * CALLS, registrations_used(context));
        check_row_counts(context, !processes, 2 * ((size_t)round + 1));
        CHECK(row_at(context, 0)->tag != last_tag);
        last_tag = row_at(context, 0)->tag;
        for (int i = 0; i < 2; i++) replay(context, m, graphs[i], streams[i], round);
        onehop_host_graph_destroy(graphs[0]);
        if (round == 0) { /* one graph of the two holds all */
            CHECK_OK(onehop_capture_begin(context));
            CHECK_OK(onehop_capture_end(context));
            CHECK_INT(2 * CALLS, registrations_used(context));
            replay(context, m, graphs[1], streams[1], 10);
        }
        onehop_host_graph_destroy(graphs[1]);
        ranks_barrier(context);
    }
    CHECK(5 * 2 * CALLS > registrations);
    CHECK_OK(onehop_capture_begin(context));
    CHECK_OK(onehop_host_stream_capture_begin(streams[0]));
    for (uint32_t i = 0; i < registrations; i++) run_call(context, m, 0, streams[0]);
    CHECK_RESULT(ONEHOP_ERR_TOO_LARGE,
                 ranks_all_reduce(context, slot_of(m, SHARED, 0), slot_of(m, SHARED, 1), COUNT,
                                  ONEHOP_FLOAT32, ONEHOP_2SHOT_PULL, streams[0]));
    CHECK_OK(onehop_host_stream_capture_end(streams[0], &graphs[0]));
    CHECK_OK(onehop_capture_end(context));
    CHECK_INT(registrations, registrations_used(context));
    onehop_host_graph_destroy(graphs[0]);

    /* A capture that finds the table full takes over what a graph has meanwhile let go. */
    CHECK_OK(onehop_capture_begin(context));
    CHECK_OK(onehop_capture_end(context));
    CHECK_OK(onehop_capture_begin(context));
    CHECK_OK(onehop_host_stream_capture_begin(streams[0]));
    for (uint32_t i = 0; i < registrations; i++) run_call(context, m, 0, streams[0]);
    CHECK_OK(onehop_host_stream_capture_end(streams[0], &graphs[0]));
    CHECK_OK(onehop_capture_end(context));
    CHECK_OK(onehop_capture_begin(context));
    onehop_host_graph_destroy(graphs[0]);
    graphs[0] = record(context, m, streams[0]);
    CHECK_OK(onehop_capture_end(context));
    replay(context, m, graphs[0], streams[0], 20);
    ranks_barrier(context);
    if (processes) CHECK_INT(fds, count_fds());
    ranks_barrier(context);
    onehop_host_graph_destroy(graphs[0]);
    for (int i = 0; i < 2; i++) onehop_host_stream_destroy(streams[i]);
    memory_free(m);
    (void)rank;
    (void)world;
}

/* Registrations need not be neighbours, nor have the same numbers on all ranks. */
static void gaps(onehop_context *context, int rank, int world, void *argument) {
    static const uint32_t registrations[2][CALLS] = {{0, 2, 5, 6, 7, 8}, {1, 3, 4, 6, 7, 8}};
    memory *m = memory_make();
    onehop_stream stream;
    uint32_t registration;
    (void)world;
    (void)argument;
    CHECK_OK(onehop_host_stream_create(&stream));
    for (int i = 0; i < 6; i++)
        CHECK_OK(onehop_comm_registration_take(context->comm, &registration));
    for (int i = 0; i < 3; i++)
        CHECK_OK(onehop_comm_registration_release(context->comm, registrations[rank][i]));
    fill_inputs(m, rank, 0);
    CHECK_OK(onehop_capture_begin(context));
    onehop_host_graph *graph = record(context, m, stream);
    CHECK_OK(onehop_capture_end(context));
    check_rows(context, registrations[rank], true, 0);
    ranks_barrier(context);
    replay(context, m, graph, stream, 1);
    ranks_barrier(context);
    onehop_host_graph_destroy(graph);
    onehop_host_stream_destroy(stream);
    memory_free(m);
}

/* A graph that outlives a registration of one rank, which is empty then or belongs to another call:
 * an error on all ranks, and no access by addresses that may be gone. */
static void stale(bool taken_again) {
    onehop_context *contexts[2];
    onehop_stream streams[2];
    onehop_host_graph *graphs[2];
    memory *m[2];
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    config.device.kind = ONEHOP_DEVICE_HOST;
    config.timeout_ms = 20000;
    CHECK_OK(onehop_create_all(&config, 2, NULL, contexts));
    CHECK_OK(onehop_capture_begin_all(contexts, 2));
    for (int r = 0; r < 2; r++) {
        m[r] = memory_make();
        fill_inputs(m[r], r, 0);
        CHECK_OK(onehop_host_stream_create(&streams[r]));
        graphs[r] = record(contexts[r], m[r], streams[r]);
    }
    CHECK_OK(onehop_capture_end_all(contexts, 2));
    const void *in[2] = {slot_of(m[0], SHARED, 0), slot_of(m[1], SHARED, 0)};
    void *out[2] = {slot_of(m[0], SHARED, 1), slot_of(m[1], SHARED, 1)};
    uint32_t registration = 99;
    CHECK_OK(onehop_comm_registration_release(contexts[1]->comm, 0));
    if (taken_again) {
        CHECK_OK(onehop_comm_registration_take(contexts[1]->comm, &registration));
        CHECK_INT(0, registration);
        CHECK_OK(onehop_comm_registration_fill(contexts[1]->comm, registration, in, out));
    }
    for (int r = 0; r < 2; r++) CHECK_OK(onehop_host_graph_launch(graphs[r], streams[r]));
    for (int r = 0; r < 2; r++)
        CHECK_RESULT(ONEHOP_ERR_REGISTRATION, onehop_synchronize(contexts[r], streams[r]));
    for (int r = 0; r < 2; r++) {
        onehop_host_graph_destroy(graphs[r]);
        onehop_destroy(contexts[r]);
        onehop_host_stream_destroy(streams[r]);
        memory_free(m[r]);
    }
}

/* Graphs that are gone before their capture is registered, on all ranks or on one, and a capture
 * that ends with its stream: registered as others are, and given back by the next begin. */
static void gone_early(onehop_context *context, int rank, int world, void *argument) {
    memory *m = memory_make();
    onehop_stream stream, dropped;
    onehop_host_graph *graph = NULL;
    (void)world, (void)argument;
    CHECK_OK(onehop_host_stream_create(&stream));
    ranks_barrier(context);
    const int fds = count_fds(), mappings = count_mappings();
    ranks_barrier(context);
    for (int what = 0; what < 9; what++) {
        const bool early = what % 3 == 0 || (what % 3 == 1 && rank == 1);
        CHECK_OK(onehop_capture_begin(context));
        CHECK_INT(0, registrations_used(context));
        if (what % 3 == 2) {
            CHECK_OK(onehop_host_stream_create(&dropped));
            CHECK_OK(onehop_host_stream_capture_begin(dropped));
            for (size_t i = 0; i < CALLS; i++) run_call(context, m, i, dropped);
            onehop_host_stream_destroy(dropped);
        } else {
            graph = record(context, m, stream);
            if (early) onehop_host_graph_destroy(graph);
        }
        CHECK_INT(CALLS, registrations_used(context));
        CHECK_OK(onehop_capture_end(context));
        if (what % 3 != 2 && !early) onehop_host_graph_destroy(graph);
        ranks_barrier(context);
    }
    CHECK_OK(onehop_capture_begin(context));
    CHECK_INT(0, registrations_used(context));
    ranks_barrier(context);
    CHECK(count_fds() == fds && count_mappings() == mappings);
    ranks_barrier(context);
    graph = record(context, m, stream);
    CHECK_OK(onehop_capture_end(context));
    replay(context, m, graph, stream, 3);
    ranks_barrier(context);
    onehop_host_graph_destroy(graph);
    onehop_host_stream_destroy(stream);
    memory_free(m);
}

/* Refused while a stream is captured: no registration is taken, nothing is recorded. 1shot_pull in
 * place cannot read the captured memory, and goes over the workspace unless that is asked for by
 * name. */
static void refusals(onehop_context *context, int rank, int world, void *argument) {
    memory *m = memory_make();
    float *in = slot_of(m, SHARED, 0), *out = slot_of(m, SHARED, 1);
    onehop_stream stream;
    onehop_host_graph *graph;
    onehop_stats before, after;
    onehop_call named = ONEHOP_CONFIG_INIT(onehop_call);
    (void)argument;
    named.algorithm = ONEHOP_1SHOT_PULL;
    named.source = ONEHOP_SOURCE_GRAPH;
    CHECK_OK(onehop_host_stream_create(&stream));
    CHECK_OK(onehop_capture_begin(context));
    CHECK_OK(onehop_host_stream_capture_begin(stream));
    CHECK_OK(onehop_get_stats(context, &before));
    for (int a = ONEHOP_1SHOT_PULL; a <= ONEHOP_2SHOT_PULL; a++) {
        CHECK_RESULT(ONEHOP_ERR_OVERLAP,
                     ranks_all_reduce(context, in, in + 4, COUNT, ONEHOP_FLOAT32,
                                      (onehop_algorithm)a, stream));
        CHECK_RESULT(ONEHOP_ERR_OVERLAP,
                     ranks_all_reduce(context, in + COUNT - 4, in, COUNT, ONEHOP_FLOAT32,
                                      (onehop_algorithm)a, stream));
    }
    CHECK_RESULT(ONEHOP_ERR_ALGORITHM, onehop_all_reduce(context, in, in, COUNT, ONEHOP_FLOAT32,
                                                         ONEHOP_SUM, &named, stream));
    CHECK_CONTAINS("out of place only", onehop_last_error());
    CHECK_OK(onehop_get_stats(context, &after));
    CHECK(before.calls == after.calls && after.registrations_used == 0);
    CHECK_OK(ranks_all_reduce(context, in, in, COUNT, ONEHOP_FLOAT32, ONEHOP_1SHOT_PULL, stream));
    CHECK_INT(0, registrations_used(context));
    CHECK_OK(ranks_all_reduce(context, in, out, COUNT, ONEHOP_FLOAT32, ONEHOP_2SHOT_PULL, stream));
    CHECK_OK(onehop_host_stream_capture_end(stream, &graph));
    CHECK_OK(onehop_capture_end(context));
    for (int round = 0; round < 3; round++) { /* the sum, and W times that */
        for (size_t k = 0; k < COUNT; k++) in[k] = value_of(rank, 0, k, round);
        CHECK_OK(onehop_host_graph_launch(graph, stream));
        CHECK_OK(onehop_synchronize(context, stream));
        for (size_t k = 0; k < COUNT; k++) {
            float sum = 0;
            for (int r = 0; r < world; r++) sum += value_of(r, 0, k, round);
            CHECK(in[k] == sum && out[k] == (float)world * sum);
        }
    }
    ranks_barrier(context);
    onehop_host_graph_destroy(graph);
    onehop_host_stream_destroy(stream);
    memory_free(m);
}

/* A line for each rank's capture in which calls are staged, none for others. */
static void count_line(void *user, onehop_log_level level, const char *line) {
    *(int *)user += level == ONEHOP_LOG_INFO && strstr(line, "go over the workspace") != NULL;
}

static void one_line(void) {
    enum {
        W = 3
    };
    onehop_context *contexts[W];
    onehop_stream streams[W];
    onehop_host_graph *graphs[W];
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    int lines = 0;
    config.device.kind = ONEHOP_DEVICE_HOST;
    CHECK(setenv("ONEHOP_LOG", "info", 1) == 0);
    onehop_set_log(count_line, &lines);
    CHECK_OK(onehop_create_all(&config, W, NULL, contexts));
    memory *m = memory_make();
    for (int r = 0; r < W; r++) CHECK_OK(onehop_host_stream_create(&streams[r]));
    for (int staged = 0; staged < 2; staged++) {
        CHECK_OK(onehop_capture_begin_all(contexts, W));
        for (int r = 0; r < W; r++) {
            CHECK_OK(onehop_host_stream_capture_begin(streams[r]));
            for (size_t i = 0; i < 4; i++)
                CHECK_OK(ranks_all_reduce(contexts[r], slot_of(m, SHARED, 2),
                                          slot_of(m, staged && i ? CROOKED : SHARED, (size_t)r + 4),
                                          COUNT, ONEHOP_FLOAT32, ONEHOP_2SHOT_PULL, streams[r]));
            CHECK_OK(onehop_host_stream_capture_end(streams[r], &graphs[r]));
        }
        CHECK_OK(onehop_capture_end_all(contexts, W));
        CHECK_INT(staged ? W : 0, lines);
        for (int r = 0; r < W; r++) onehop_host_graph_destroy(graphs[r]);
    }
    for (int r = 0; r < W; r++) {
        onehop_destroy(contexts[r]);
        onehop_host_stream_destroy(streams[r]);
    }
    onehop_set_log(NULL, NULL);
    CHECK(setenv("ONEHOP_LOG", "error", 1) == 0);
    memory_free(m);
}

/* Captures that differ are refused on all ranks; their registrations stay empty, and go with the
 * graph. */
static void unequal(onehop_context *context, int rank, int world, void *argument) {
    memory *m = memory_make();
    onehop_stream stream;
    onehop_host_graph *graph;
    (void)world;
    (void)argument;
    CHECK_OK(onehop_host_stream_create(&stream));
    for (int what = 0; what < 2; what++) {
        CHECK_OK(onehop_capture_begin(context));
        CHECK_OK(onehop_host_stream_capture_begin(stream));
        for (int i = 0; i < 2 + (what == 0 && rank == 1); i++) run_call(context, m, 0, stream);
        if (what == 1) /* the same call, on rank 1 in place */
            CHECK_OK(ranks_all_reduce(context, slot_of(m, SHARED, 0),
                                      slot_of(m, SHARED, rank == 1 ? 0 : 1), COUNT, ONEHOP_FLOAT32,
                                      ONEHOP_2SHOT_PULL, stream));
        CHECK_OK(onehop_host_stream_capture_end(stream, &graph));
        CHECK_RESULT(ONEHOP_ERR_MISMATCH, onehop_capture_end(context));
        CHECK(registrations_used(context) >= 2);
        for (uint32_t i = 0; i < 3; i++) CHECK_INT(0, row_at(context, i)->tag);
        onehop_host_graph_destroy(graph);
    }
    CHECK_OK(onehop_capture_begin(context));
    CHECK_INT(0, registrations_used(context));
    graph = record(context, m, stream);
    CHECK_OK(onehop_capture_end(context));
    replay(context, m, graph, stream, 0);
    ranks_barrier(context);
    onehop_host_graph_destroy(graph);
    onehop_host_stream_destroy(stream);
    memory_free(m);
}

int main(void) {
    ranks_layout layouts[] = {RANKS_AS_THREADS, RANKS_AS_PROCESSES};
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    config.max_registrations = 32;
    watchdog(100);
    CHECK(setenv("ONEHOP_LOG", "error", 1) == 0);
    one_line();
    stale(false);
    stale(true);
    for (int i = 0; i < 2; i++) {
        ranks_run(layouts[i], 2, &config, recycling, &layouts[i]);
        ranks_run(layouts[i], 3, NULL, unequal, NULL);
        ranks_run(layouts[i], 2, NULL, refusals, NULL);
    }
    ranks_run(RANKS_AS_PROCESSES, 2, NULL, gone_early, NULL);
    ranks_run(RANKS_AS_THREADS, 2, NULL, gaps, NULL);
    return 0;
}
