/* Property: captured calls over the ranks' own memory end in an error on every rank that cannot
 * have the right sums, and store nothing where they should not, whatever goes wrong:
 *   crossed    rank r replays graph r % 2: MISMATCH on all, nothing is stored to any output
 *   giving up  rank 1's deadline of a millisecond, or its abort, ends its wait for rank 0, whose
 *              output lies in host memory and so takes much longer; then rank 1 writes to its
 *              input. Rank 0 must not say OK.
 *   forked     a child of rank 0 calls, aborts and destroys its copy of the context: STATE, and the
 *              ranks go on
 * Ranks are threads that share a GPU. With the argument "processes" they are processes that share
 * it, which needs the driver's MPS daemon (nvidia-cuda-mps-control). A second argument is the
 * largest world size, a third the smallest. */
/* labels: timeout=120 */
#include "gpu_ranks.h"

#define MAX  ((size_t)1 << 20) /* elements of a crossed call */
#define LONG ((size_t)128 << 20)

typedef struct crossed_job {
    onehop_algorithm algorithm;
    size_t counts[2];
} crossed_job;

static void capture(gpu_rank *r, const float *in, float *out, size_t count,
                    onehop_algorithm algorithm, gpu_graph *graph) {
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    call.algorithm = algorithm;
    call.source = ONEHOP_SOURCE_GRAPH;
    if (count == LONG) {
        call.blocks = r->context->regions.max_blocks;
        call.threads = 512;
    }
    gpu_capture_begin(&r, 1);
    CHECK_OK(onehop_all_reduce(r->context, in, out, count, ONEHOP_FLOAT32, ONEHOP_SUM, &call,
                               r->stream));
    gpu_capture_end(&r, 1, graph);
}

static void crossed(gpu_rank *r, int here, void *argument) {
    const crossed_job *j = argument;
    const int mine = r->rank % 2;
    float *in[2], *out[2], *found = malloc(MAX * 4);
    gpu_graph graphs[2];
    onehop_stats stats;
    (void)here;
    CHECK(found != NULL);
    for (int g = 0; g < 2; g++) {
        in[g] = gpu_alloc(r, MAX * 4);
        out[g] = gpu_alloc(r, MAX * 4);
        gpu_fill(r, in[g], 0x3F, MAX * 4);
        gpu_fill(r, out[g], 0x5A, MAX * 4);
        capture(r, in[g], out[g], j->counts[g], j->algorithm, &graphs[g]);
    }
    CHECK_OK(onehop_get_stats(r->context, &stats));
    CHECK_INT(2, stats.registrations_direct);
    gpu_barrier(r);
    gpu_graph_launch(r, &graphs[mine], r->stream);
    const onehop_result result = onehop_synchronize(r->context, r->stream);
    gpu_expect_failure(r, ONEHOP_ERR_MISMATCH, 1, result, "crossed replays");
    gpu_barrier(r);
    for (int g = 0; g < 2; g++) {
        gpu_read(r, found, out[g], MAX * 4);
        for (size_t i = 0; i < MAX * 4; i++)
            if (((unsigned char *)found)[i] != 0x5A)
                FAIL("rank %d: byte %zu of graph %d's output was stored", r->rank, i, g);
    }
    gpu_barrier(r);
    for (int g = 0; g < 2; g++) {
        gpu_graph_free(r, &graphs[g]);
        gpu_free(r, in[g]);
        gpu_free(r, out[g]);
    }
    free(found);
}

typedef struct counts {
    int gave_up, read_wrong; /* of all tries; atomic */
    bool by_abort;
} counts;

static void giving_up(gpu_rank *r, int here, void *argument) {
    float *in = gpu_alloc(r, LONG * 4),
          *out = r->rank ? gpu_alloc(r, LONG * 4) : gpu_alloc_pinned(r, LONG * 4);
    const float ones = 1, late = 777;
    uint32_t word;
    gpu_graph graph;
    onehop_stats stats;
    counts *c = argument;
    (void)here;
    memcpy(&word, &ones, 4);
    gpu_fill_words_later(r, in, word, LONG, r->stream);
    CHECK_OK(onehop_synchronize(r->context, r->stream));
    capture(r, in, out, LONG, ONEHOP_1SHOT_PULL, &graph);
    CHECK_OK(onehop_get_stats(r->context, &stats));
    CHECK_INT(1, stats.registrations_direct);
    if (r->rank && !c->by_abort) CHECK_OK(onehop_set_timeout(r->context, 1));
    gpu_barrier(r);
    if (r->rank) usleep(300);
    gpu_graph_launch(r, &graph, r->stream);
    if (r->rank) { /* in order of the stream: as soon as the call has ended */
        memcpy(&word, &late, 4);
        gpu_fill_words_later(r, in, word, LONG, r->stream);
        if (c->by_abort) {
            usleep(2000); /* it has read all by now */
            CHECK_OK(onehop_abort(r->context));
        }
    }
    const onehop_result result = onehop_synchronize(r->context, r->stream);
    if (r->rank && result) {
        __atomic_add_fetch(&c->gave_up, 1, __ATOMIC_RELAXED);
        CHECK_INT(c->by_abort ? ONEHOP_ERR_ABORTED : ONEHOP_ERR_TIMEOUT, result);
    }
    gpu_barrier(r);
    size_t wrong = 0;
    for (size_t i = 0; !r->rank && i < LONG; i++) wrong += out[i] != 2;
    if (!r->rank) printf("rank 0: %s, %zu wrong\n", onehop_result_name(result), wrong);
    if (wrong && !result) FAIL("rank 0 says OK, and %zu of %zu elements are wrong", wrong, LONG);
    if (wrong) __atomic_add_fetch(&c->read_wrong, 1, __ATOMIC_RELAXED);
    gpu_barrier(r);
    gpu_graph_free(r, &graph);
    gpu_free(r, in);
    if (r->rank)
        gpu_free(r, out);
    else
        gpu_free_pinned(r, out);
}

static void in_child(onehop_context *context, float *x) {
    CHECK_RESULT(ONEHOP_ERR_STATE,
                 onehop_all_reduce(context, x, x, 1000, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, NULL));
    CHECK_RESULT(ONEHOP_ERR_STATE, onehop_status(context, NULL));
    CHECK_RESULT(ONEHOP_ERR_STATE, onehop_abort(context));
    onehop_destroy(context);
    _exit(0);
}

static void forked(gpu_rank *r, int here, void *argument) {
    float *x = gpu_alloc(r, 4000), found[1000];
    const float one = 1;
    uint32_t word;
    (void)here, (void)argument;
    memcpy(&word, &one, 4);
    for (int k = 0; k < 3; k++) {
        gpu_fill_words_later(r, x, word, 1000, r->stream);
        CHECK_OK(
            onehop_all_reduce(r->context, x, x, 1000, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, r->stream));
        CHECK_OK(onehop_synchronize(r->context, r->stream));
        gpu_read(r, found, x, 4000);
        for (int i = 0; i < 1000; i++) CHECK(found[i] == (float)r->world);
        gpu_barrier(r);
        if (k || r->rank) continue;
        const pid_t child = fork();
        if (!child) in_child(r->context, x);
        CHECK_INT(0, wait_rank(child));
    }
    gpu_barrier(r);
    gpu_free(r, x);
}

int main(int argc, char **argv) {
    const bool processes = argc > 1 && !strcmp(argv[1], "processes");
    const int max = argc > 2 ? atoi(argv[2]) : 8, min = argc > 3 ? atoi(argv[3]) : 2;
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    counts *c = shared_memory(sizeof *c);
    gpu_setup setup = {
        .layout = processes ? GPU_PROCESSES : GPU_THREADS, .gpus = 1, .config = &config};
    if (processes) config.flags = ONEHOP_FLAG_SHARE_GPU;
    (void)gpu_main(110, 1);
    for (setup.world = min; setup.world <= max; setup.world *= 2) {
        setup.dies = false;
        gpu_run(&setup, forked, NULL);
        setup.dies = true;
        for (int k = 0; k < 4; k++) {
            crossed_job job = {k % 2 ? ONEHOP_2SHOT_PULL : ONEHOP_1SHOT_PULL,
                               {MAX, k / 2 ? MAX / 3 + 5 : MAX}};
            gpu_run(&setup, crossed, &job);
        }
        printf("world size %d: crossed replays touch nothing, a forked child disturbs nobody\n",
               setup.world);
    }
    setup.world = 2;
    for (int k = 0; k < 6; k++) {
        c->by_abort = k % 2;
        gpu_run(&setup, giving_up, c);
    }
    printf("rank 1 gave up in %d of 6 calls; in %d of them rank 0 had read what came after, and "
           "said so\n",
           c->gave_up, c->read_wrong);
    CHECK(c->gave_up > 0);
    return 0;
}
