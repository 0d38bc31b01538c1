/* Property: whatever kind of memory a captured call uses, its replays give right sums. Memory that
 * peers can map is read directly; other memory is staged, on all ranks alike. The addresses in a
 * registration reach the peers' bytes, also where other memory is mapped at an old address, and
 * where the caller gives them. Ranks are processes, threads, all in one thread, and processes of
 * two threads. */
/* labels: quick */
#include "registration_kit.h"

static void kinds(onehop_context *context, int rank, int world, void *argument) {
    const ranks_layout layout = *(const ranks_layout *)argument;
    const bool one_process = layout == RANKS_AS_THREADS, counted = layout == RANKS_AS_PROCESSES;
    memory *m = memory_make();
    for (int r = 0; r < world && layout == RANKS_IN_PAIRS; r++)
        CHECK_INT(r / 2 == rank / 2, oh_rendezvous_same_process(context->group, r));
    onehop_stream stream;
    CHECK_OK(onehop_host_stream_create(&stream));
    fill_inputs(m, rank, 0);
    /* eager: no registrations */
    for (size_t i = 0; i < CALLS; i++) run_call(context, m, i, stream);
    CHECK_OK(onehop_synchronize(context, stream));
    check_outputs(m, rank, world, 0);
    CHECK_INT(0, registrations_used(context));
    fill_inputs(m, rank, 1);
    ranks_barrier(context);
    const int fds = count_fds(), mappings = count_mappings();

    CHECK_OK(onehop_capture_begin(context));
    onehop_host_graph *graph = record(context, m, stream);
    CHECK_OK(onehop_capture_end(context));
    CHECK_INT(CALLS, registrations_used(context));
    check_row_counts(context, one_process, 1);
    ranks_barrier(context);
    check_rows(context, first_rows, one_process, 1);
    ranks_barrier(context);
    check_row_outputs(context, m, one_process);
    if (counted) {
        CHECK_INT(fds, count_fds());
        CHECK(count_mappings() > mappings);
    }
    for (int round = 2; round < 5; round++) replay(context, m, graph, stream, round);
    onehop_host_graph_destroy(graph);

    /* What the graph held goes with the next capture, here an empty one. */
    CHECK_OK(onehop_capture_begin(context));
    CHECK_OK(onehop_capture_end(context));
    CHECK_INT(0, registrations_used(context));
    check_row_counts(context, one_process, 1);
    ranks_barrier(context);
    if (counted) CHECK(count_fds() == fds && count_mappings() == mappings);
    ranks_barrier(context);
    onehop_host_stream_destroy(stream);
    memory_free(m);
}

/* ---- an address that is used again ----------------------------------------------------------- */

/* Unmapped, and other files mapped there: peers see the new bytes, eager and captured. */
static void same_address(onehop_context *context, int rank, int world, void *argument) {
    char *at = mmap(NULL, 2 * STRIDE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    float *in = (float *)at, *out = (float *)(at + STRIDE);
    onehop_stream stream;
    onehop_stats stats;
    int fds[2 * STRIDE / PAGE], before = 0, mappings = 0;
    (void)argument;
    CHECK(at != MAP_FAILED);
    CHECK_OK(onehop_host_stream_create(&stream));
    for (int round = 0; round < 6; round++) {
        onehop_host_graph *graph;
        for (size_t i = 0; i < OH_LENGTH(fds); i++) map_page(at + i * PAGE, &fds[i]);
        for (size_t k = 0; k < COUNT; k++) in[k] = value_of(rank, 0, k, round);
        CHECK_OK(
            ranks_all_reduce(context, in, out, COUNT, ONEHOP_FLOAT32, ONEHOP_1SHOT_PULL, stream));
        CHECK_OK(onehop_synchronize(context, stream));
        for (int replays = 0; replays < 3; replays++) {
            if (replays == 1) {
                CHECK_OK(onehop_capture_begin(context));
                CHECK_OK(onehop_host_stream_capture_begin(stream));
                CHECK_OK(ranks_all_reduce(context, in, out, COUNT, ONEHOP_FLOAT32,
                                          round % 2 ? ONEHOP_1SHOT_PULL : ONEHOP_2SHOT_PULL,
                                          stream));
                CHECK_OK(onehop_host_stream_capture_end(stream, &graph));
                CHECK_OK(onehop_capture_end(context));
            }
            if (replays) {
                memset(out, 0xA5, COUNT * sizeof *out);
                CHECK_OK(onehop_host_graph_launch(graph, stream));
                CHECK_OK(onehop_synchronize(context, stream));
            }
            for (size_t k = 0; k < COUNT; k++) {
                float sum = 0;
                for (int r = 0; r < world; r++) sum += value_of(r, 0, k, round);
                if (out[k] != sum)
                    FAIL("rank %d, round %d, element %zu: old bytes", rank, round, k);
            }
        }
        CHECK_OK(onehop_get_stats(context, &stats));
        CHECK(stats.registrations_direct == (uint64_t)round + 1 && stats.registrations_staged == 0);
        onehop_host_graph_destroy(graph);
        ranks_barrier(context);
        if (round == 1) before = count_fds(), mappings = count_mappings();
        if (round == 5) CHECK(count_fds() == before && count_mappings() == mappings);
        ranks_barrier(context);
        CHECK(munmap(at, 2 * STRIDE) == 0);
        CHECK(mmap(at, 2 * STRIDE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
              at);
        for (size_t i = 0; i < OH_LENGTH(fds); i++) close(fds[i]);
    }
    onehop_host_stream_destroy(stream);
    CHECK(munmap(at, 2 * STRIDE) == 0);
}

/* ---- all ranks in one thread ----------------------------------------------------------------- */

static void in_one_thread(void) {
    onehop_context *contexts[MAX_RANKS];
    onehop_stream streams[MAX_RANKS];
    onehop_host_graph *graphs[MAX_RANKS];
    memory *m[MAX_RANKS];
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    config.device.kind = ONEHOP_DEVICE_HOST;
    config.timeout_ms = 60000;
    CHECK_OK(onehop_create_all(&config, MAX_RANKS, NULL, contexts));
    CHECK_OK(onehop_capture_begin_all(contexts, MAX_RANKS));
    for (int r = 0; r < MAX_RANKS; r++) {
        m[r] = memory_make();
        CHECK_OK(onehop_host_stream_create(&streams[r]));
        fill_inputs(m[r], r, 0);
        graphs[r] = record(contexts[r], m[r], streams[r]);
    }
    CHECK_RESULT(ONEHOP_ERR_STATE, onehop_capture_end(contexts[0]));
    CHECK_OK(onehop_capture_end_all(contexts, MAX_RANKS));
    for (int r = 0; r < MAX_RANKS; r++) check_rows(contexts[r], first_rows, true, 0);
    for (int round = 1; round < 3; round++) {
        for (int r = 0; r < MAX_RANKS; r++) fill_inputs(m[r], r, round);
        for (int r = 0; r < MAX_RANKS; r++)
            CHECK_OK(onehop_host_graph_launch(graphs[r], streams[r]));
        for (int r = 0; r < MAX_RANKS; r++) CHECK_OK(onehop_synchronize(contexts[r], streams[r]));
        for (int r = 0; r < MAX_RANKS; r++) check_outputs(m[r], r, MAX_RANKS, round);
    }
    for (int r = 0; r < MAX_RANKS; r++) {
        onehop_destroy(contexts[r]);
        onehop_host_graph_destroy(graphs[r]); /* outlives its context */
        onehop_host_stream_destroy(streams[r]);
        memory_free(m[r]);
    }
}

/* ---- addresses that the caller has ----------------------------------------------------------- */

static float *published[MAX_RANKS];

static void mapped_by_caller(onehop_context *context, int rank, int world, void *argument) {
    memory *m = memory_make();
    onehop_stream stream;
    onehop_captured_input inputs[4];
    const void *in[2 * MAX_RANKS];
    void *out[2 * MAX_RANKS];
    size_t count = 99;
    (void)argument;
    CHECK_OK(onehop_host_stream_create(&stream));
    fill_inputs(m, rank, 0);
    published[rank] = slot_of(m, SHARED, 0);
    CHECK_RESULT(ONEHOP_ERR_STATE, onehop_capture_inputs(context, NULL, 0, &count));
    CHECK_OK(onehop_capture_begin(context));
    CHECK_OK(onehop_host_stream_capture_begin(stream));
    run_call(context, m, 0, stream);
    CHECK_OK(ranks_all_reduce(context, slot_of(m, HEAP, 0), slot_of(m, HEAP, 1), COUNT,
                              /* takes no registration */
                              ONEHOP_FLOAT32, ONEHOP_1SHOT_PUSH, stream));
    run_call(context, m, 1, stream);
    onehop_host_graph *graph;
    CHECK_OK(onehop_host_stream_capture_end(stream, &graph));
    CHECK_RESULT(ONEHOP_ERR_NULL, onehop_capture_inputs(context, NULL, 1, &count));
    CHECK_OK(onehop_capture_inputs(context, NULL, 0, &count));
    CHECK_INT(2, count);
    CHECK_OK(onehop_capture_inputs(context, inputs, 1, &count));
    CHECK(count == 2 && inputs[0].in == slot_of(m, SHARED, 0) &&
          inputs[0].out == slot_of(m, SHARED, 1) && inputs[0].bytes == COUNT * sizeof(float));
    CHECK_OK(onehop_capture_inputs(context, inputs, 4, &count));
    CHECK(inputs[1].in == slot_of(m, FILES, 2));
    ranks_barrier(context);
    for (int i = 0; i < 2; i++)
        for (int r = 0; r < world; r++) {
            in[i * world + r] = published[r];
            out[i * world + r] = (char *)published[r] + STRIDE;
        }
    /* Wrong arguments of one rank: all refuse and go on capturing. */
    CHECK_RESULT(ONEHOP_ERR_ARGUMENT,
                 onehop_capture_end_mapped(context, in, out, rank == 1 ? 1 : 2));
    CHECK_RESULT(ONEHOP_ERR_NULL,
                 onehop_capture_end_mapped(context, in, rank == 0 ? NULL : out, 2));
    in[1] = rank == 1 ? (const char *)in[1] + 4 : in[1];
    CHECK_RESULT(ONEHOP_ERR_ALIGNMENT, onehop_capture_end_mapped(context, in, out, 2));
    in[1] = rank == 1 ? NULL : published[1];
    CHECK_RESULT(ONEHOP_ERR_NULL, onehop_capture_end_mapped(context, in, out, 2));
    in[1] = published[1];
    CHECK_OK(onehop_capture_end_mapped(context, in, out, 2));
    CHECK_RESULT(ONEHOP_ERR_STATE, onehop_capture_end_mapped(context, in, out, 2));
    for (uint32_t i = 0; i < 2; i++) {
        const oh_registration *registration = row_at(context, i);
        CHECK(registration->mode == OH_REGISTRATION_DIRECT &&
              registration->tag == context->comm->registration_tags[i]);
        for (int r = 0; r < world; r++)
            CHECK(registration->in[r] == (uintptr_t)published[r] &&
                  registration->out[r] == (uintptr_t)published[r] + STRIDE);
    }
    ranks_barrier(context);
    onehop_host_graph_destroy(graph);
    CHECK_OK(onehop_capture_begin(context));
    CHECK_INT(0, registrations_used(context));
    CHECK_OK(onehop_capture_end_mapped(context, NULL, NULL, 0)); /* nothing captured */
    onehop_host_stream_destroy(stream);
    ranks_barrier(context);
    memory_free(m);
}

int main(void) {
    ranks_layout layouts[] = {RANKS_AS_THREADS, RANKS_AS_PROCESSES}, pairs = RANKS_IN_PAIRS;
    watchdog(100);
    CHECK(setenv("ONEHOP_LOG", "error", 1) == 0);
    in_one_thread();
    for (int i = 0; i < 2; i++) {
        ranks_run(layouts[i], 2, NULL, kinds, &layouts[i]);
        ranks_run(layouts[i], 3, NULL, kinds, &layouts[i]);
    }
    ranks_run(pairs, 4, NULL, kinds, &pairs);
    ranks_run(RANKS_AS_PROCESSES, 3, NULL, same_address, NULL);
    ranks_run(RANKS_AS_THREADS, 3, NULL, mapped_by_caller, NULL);
    return 0;
}
