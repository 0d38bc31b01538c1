/* Property: on GPUs, captured pull calls that read the ranks' memory directly (source graph) give
 * right sums at every replay, over changed inputs, with neighbours in the graph that consume the
 * output and overwrite the input, whichever rank is held back. The same graphs are right when
 * staged. Capture, exchange and instantiation of 1000 calls over ordinary memory take under 50 ms.
 *
 * Inputs and outputs lie in symmetric memory, whose addresses every rank knows, so registrations
 * are filled without an exchange (onehop_capture_end_mapped). W=2..8 on one GPU (threads), a GPU
 * for each rank where there are two, early trigger too. */
/* labels: timeout=240 */
#include "gpu_ranks.h"
#include "reference.h"

#define CALLS   42
#define REPLAYS 3
#define MAX     ((size_t)200001) /* elements */

typedef struct job {
    bool mapped;
    size_t compared; /* atomic; shared by processes */
} job;

typedef struct pull {
    onehop_algorithm algorithm;
    bool in_place;
    size_t count;
    size_t in, out, echo; /* offsets in every rank's memory */
    uint32_t blocks, threads;
} pull;

static const size_t counts[] = {1, 7, 8, 9, 63, 64, 65, 511, 1024, 1031, 16384, 65539, 100000, MAX};

/* Every count once by 1shot_pull, by 2shot_pull, and by that in place. */
static size_t lay_out(pull *calls, onehop_dtype dtype) {
    static const uint32_t threads[] = {64, 512, 128, 32, 256};
    size_t at = 0;
    for (size_t i = 0; i < CALLS; i++) {
        const size_t bytes = counts[i / 3] * reference_element_bytes(dtype);
        const size_t room = oh_round_up(bytes + 64, 256);
        pull *p = &calls[i];
        p->algorithm = i % 3 ? ONEHOP_2SHOT_PULL : ONEHOP_1SHOT_PULL;
        p->in_place = i % 3 == 2;
        p->count = counts[i / 3];
        p->in = at;
        p->out = p->in_place ? at : at + room;
        p->echo = p->out + room;
        p->blocks = 2 + (uint32_t)i % 8;
        p->threads = threads[i % 5];
        at = p->echo + room;
    }
    return at;
}

static void make_calls(gpu_rank *r, char *own, const pull *calls, onehop_dtype dtype) {
    for (size_t i = 0; i < CALLS; i++) {
        const pull *p = &calls[i];
        const size_t bytes = p->count * reference_element_bytes(dtype);
        onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
        call.algorithm = p->algorithm;
        call.source = ONEHOP_SOURCE_GRAPH;
        call.blocks = p->blocks;
        call.threads = p->threads;
        if ((i + (size_t)r->rank) % 4 == 0) {
            call.prefetch = own + p->in;
            call.prefetch_bytes = bytes;
        }
        if (i % 5 == 0 && (int)i % r->world == r->rank) gpu_spin_later(r, 20, r->stream);
        CHECK_OK(onehop_all_reduce(r->context, own + p->in, own + p->out, p->count, dtype,
                                   ONEHOP_SUM, &call, r->stream));
        gpu_consume_later(r, own + p->echo, own + p->out, bytes, r->stream);
        if (!p->in_place) gpu_fill_later(r, own + p->in, 0x5A, bytes, r->stream);
    }
}

/* Rows with every rank's addresses. */
static void end_capture(gpu_rank *r, const onehop_symmetric *memory, const pull *calls, bool mapped,
                        gpu_graph *graph) {
    const void *in[CALLS * ONEHOP_MAX_RANKS];
    void *out[CALLS * ONEHOP_MAX_RANKS];
    size_t noted = 0;
    if (!mapped) {
        gpu_capture_end(&r, 1, graph);
        return;
    }
    CHECK_OK(onehop_capture_inputs(r->context, NULL, 0, &noted));
    CHECK_INT(CALLS, noted);
    for (size_t i = 0; i < CALLS; i++)
        for (int p = 0; p < r->world; p++) {
            char *there = onehop_symmetric_ptr(memory, p);
            in[i * (size_t)r->world + (size_t)p] = there + calls[i].in;
            out[i * (size_t)r->world + (size_t)p] = there + calls[i].out;
        }
    gpu_capture_end_mapped(r, in, out, CALLS, graph);
}

static void replay(gpu_rank *r, char *own, const pull *calls, onehop_dtype dtype,
                   const gpu_graph *graph, uint64_t seed, job *j) {
    const size_t size = reference_element_bytes(dtype);
    unsigned char *want = malloc(MAX * 4), *found = malloc(MAX * 4);
    char what[160];
    CHECK(want && found);
    for (size_t i = 0; i < CALLS; i++) {
        const pull *p = &calls[i];
        input_fill(want, INPUT_MIXED, seed + i, r->rank, 0, p->count, dtype);
        if (!p->in_place) gpu_fill(r, own + p->out, 0xA5, p->count * size + 64);
        gpu_write(r, own + p->in, want, p->count * size);
    }
    gpu_barrier(r);
    gpu_graph_launch(r, graph, r->stream);
    if (onehop_synchronize(r->context, r->stream))
        FAIL("rank %d of %d, %s: %s", r->rank, r->world, j->mapped ? "direct" : "staged",
             onehop_last_error());
    gpu_barrier(r);
    for (size_t i = 0; i < CALLS; i++) {
        const pull *p = &calls[i];
        const size_t bytes = p->count * size;
        reference_of_inputs(want, INPUT_MIXED, seed + i, r->world, 0, p->count, dtype);
        snprintf(what, sizeof what, "%s, %s, %s, rank %d of %d, call %zu: %zu elements, grid %ux%u",
                 onehop_algorithm_name(p->algorithm), j->mapped ? "direct" : "staged",
                 p->in_place ? "in place" : "out of place", r->rank, r->world, i, p->count,
                 p->blocks, p->threads);
        gpu_read(r, found, own + p->echo, bytes);
        expect_equal(want, found, p->count, dtype, what);
        gpu_read(r, found, own + p->out, bytes);
        expect_equal(want, found, p->count, dtype, what);
        if (p->in_place) continue;
        gpu_read(r, found, own + p->out + bytes, 64);
        for (size_t k = 0; k < 64; k++)
            if (found[k] != 0xA5) FAIL("%s: byte %zu after the output was overwritten", what, k);
    }
    __atomic_fetch_add(&j->compared, CALLS, __ATOMIC_RELAXED);
    free(want);
    free(found);
}

static void one_type(gpu_rank *r, onehop_dtype dtype, job *j) {
    const onehop_device device = {ONEHOP_DEVICE_CUDA, r->gpu};
    pull calls[CALLS];
    gpu_graph graph;
    onehop_symmetric *memory;
    const size_t bytes = lay_out(calls, dtype);
    CHECK_OK(onehop_symmetric_alloc(r->context->group, device, bytes, &memory));
    char *own = onehop_symmetric_ptr(memory, r->rank);
    gpu_capture_begin(&r, 1);
    make_calls(r, own, calls, dtype);
    end_capture(r, memory, calls, j->mapped, &graph);
    for (uint64_t k = 0; k < REPLAYS; k++)
        replay(r, own, calls, dtype, &graph, 1000 * k + (uint64_t)dtype, j);
    gpu_barrier(r);
    gpu_graph_free(r, &graph);
    onehop_symmetric_free(memory);
}

static void all_types(gpu_rank *ranks, int here, void *argument) {
    job *j = argument;
    CHECK_INT(1, here);
    for (int d = ONEHOP_FLOAT32; d <= ONEHOP_BFLOAT16; d++) one_type(ranks, (onehop_dtype)d, j);
}

static void run(job *j, gpu_layout layout, int world, int gpus, uint32_t flags) {
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    const gpu_setup setup = {.layout = layout, .world = world, .gpus = gpus, .config = &config};
    const size_t before = j->compared;
    const double start = seconds_now();
    config.push_bytes = 65536;
    config.pull_bytes = 65536;
    config.flags = flags;
    for (int mapped = 0; mapped < 2; mapped++) {
        j->mapped = mapped;
        gpu_run(&setup, all_types, j);
    }
    printf("  world size %d, %d GPU%s, %s%s: %zu outputs, %.1f s\n", world, gpus,
           gpus > 1 ? "s" : "", layout == GPU_THREADS ? "threads" : "processes",
           flags ? ", early trigger" : "", j->compared - before, seconds_now() - start);
}

/* The best of three. Each rank adds its number and one. */
static void many(gpu_rank *r, int here, void *argument) {
    enum {
        MANY = 1000,
        ELEMENTS = 256,
    };
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    float *in = gpu_alloc(r, MANY * ELEMENTS * sizeof *in), found[ELEMENTS];
    float *out = gpu_alloc(r, MANY * ELEMENTS * sizeof *out), want = 0;
    double best = 1e9;
    CHECK_INT(1, here);
    (void)argument;
    call.algorithm = ONEHOP_1SHOT_PULL;
    call.source = ONEHOP_SOURCE_GRAPH;
    for (size_t k = 0; k < ELEMENTS; k++) found[k] = (float)(r->rank + 1);
    for (int k = 0; k < r->world; k++) want += (float)(k + 1);
    gpu_write(r, in + (MANY - 1) * ELEMENTS, found, sizeof found);
    for (int turn = 0; turn < 3; turn++) {
        gpu_graph graph;
        gpu_fill(r, out, 0, MANY * ELEMENTS * sizeof *out);
        gpu_capture_begin(&r, 1);
        const double start = seconds_now();
        for (size_t i = 0; i < MANY; i++)
            CHECK_OK(onehop_all_reduce(r->context, in + i * ELEMENTS, out + i * ELEMENTS, ELEMENTS,
                                       ONEHOP_FLOAT32, ONEHOP_SUM, &call, r->stream));
        gpu_capture_end(&r, 1, &graph);
        if (seconds_now() - start < best) best = seconds_now() - start;
        gpu_graph_launch(r, &graph, r->stream);
        CHECK_OK(onehop_synchronize(r->context, r->stream));
        gpu_read(r, found, out + (MANY - 1) * ELEMENTS, sizeof found);
        for (size_t k = 0; k < ELEMENTS; k++) CHECK(found[k] == want);
        gpu_barrier(r);
        gpu_graph_free(r, &graph);
    }
    if (r->rank == 0)
        printf("%d calls captured, registered and made a graph in %.1f ms\n", MANY, best * 1e3);
    CHECK(best < 0.05);
    gpu_free(r, in);
    gpu_free(r, out);
}

static void on_one_gpu(void *argument) {
    for (int world = 2; world <= 8; world++) run(argument, GPU_THREADS, world, 1, 0);
}

int main(void) {
    gpu_main(230, 1);
    job *j = shared_memory(sizeof *j);
    gpu_apart(on_one_gpu, j);
    const int gpus = gpu_for_processes();
    for (uint32_t early = 0; gpus && early < 2; early++)
        run(j, GPU_PROCESSES, 2, gpus, early ? ONEHOP_FLAG_EARLY_TRIGGER : 0);
    const gpu_setup two = {.layout = GPU_PROCESSES, .world = 2, .gpus = gpus};
    if (gpus) gpu_run(&two, many, NULL);
    printf("%zu outputs compared with the reference, 0 wrong\n", j->compared);
    return 0;
}
