/* The timed part.
 *
 * A sample is one replay of a graph of `calls` calls, or a batch of `calls` eager calls; on the
 * host an eager call of the calling thread is a sample by itself once it takes 5 us, and shorter
 * ones share two clock readings. Calls of a sample depend on each other by stream order: on a GPU
 * each kernel waits for the one before it to end, so the figure is a latency and not a throughput
 * of overlapping calls. (A sum fed back as the next input would prove the same and overflow.)
 *
 * Ranks leave a barrier some microseconds apart, therefore one call that is not timed follows each
 * barrier: an all-reduce aligns its ranks better than a barrier of the host.
 *
 * In place, sums grow by each call. Outputs are set back to the inputs, outside the timed part,
 * before the numbers leave the range of the type; a graph that is longer than that ends in
 * infinities. */
#include "cli/perf/perf_run.h"
#include "cli/perf/perf_check.h"

#include <math.h>
#include <stdlib.h>

enum {
    HOST_SIDE_US = 200 * 1000, /* timed part of one side of one size on the host */
    HOST_MIN_CALLS = 20,
    HOST_MIN_SAMPLE_US = 5, /* makes a clock reading, some 25 ns, small */
    HOST_MAX_BATCH = 32,
    HOST_STREAM_CALLS = 20, /* spreads the wake-up of a stream's worker */
    SMALL_CALLS = 100,
    LARGE_CALLS = 20,
    SMALL_BYTES = 1 << 20,
    SAMPLES = 20,
    MIN_SAMPLES = 3,
};

typedef struct perf_run {
    perf_worker *worker;
    const perf_target *target;
    perf_slices slices;
    size_t count;
    bool in_place;
    uint64_t calls, samples;
    uint64_t call;  /* number of the next call: says which slice */
    uint64_t since; /* calls since the outputs were set back */
    void *graph[ONEHOP_MAX_RANKS];
} perf_run;

static onehop_result enqueue(perf_run *run) {
    perf_worker *worker = run->worker;
    for (int i = 0; i < worker->ranks; i++) {
        perf_rank *rank = &worker->rank[i];
        void *out = perf_slice_out(rank, run->slices, run->call);
        const void *in = run->in_place ? out : perf_slice_in(rank, run->slices, run->call);
        const size_t part = run->slices.bytes / perf_parts(worker->plan) * (size_t)rank->rank;
        if (worker->plan->collective == ONEHOP_REDUCE_SCATTER) out = (char *)out + part;
        if (worker->plan->collective == ONEHOP_ALL_GATHER) in = (const char *)in + part;
        onehop_result result = run->target->call(worker, rank, in, out, run->count);
        if (result != ONEHOP_OK) return result;
    }
    run->call++;
    run->since++;
    return ONEHOP_OK;
}

static onehop_result wait_all(perf_run *run) {
    for (int i = 0; i < run->worker->ranks; i++) {
        onehop_result result = run->target->wait(run->worker, &run->worker->rank[i]);
        if (result != ONEHOP_OK) return result;
    }
    return ONEHOP_OK;
}

/* ---- graphs ---------------------------------------------------------------------------------- */

static onehop_result capture_bracket(perf_run *run, bool begin) {
    perf_worker *worker = run->worker;
    if (!run->target->registers) return ONEHOP_OK;
    if (worker->plan->layout != LAYOUT_SINGLE) {
        onehop_context *context = worker->rank[0].context;
        return begin ? onehop_capture_begin(context) : onehop_capture_end(context);
    }
    onehop_context *contexts[ONEHOP_MAX_RANKS];
    for (int i = 0; i < worker->ranks; i++) contexts[i] = worker->rank[i].context;
    return begin ? onehop_capture_begin_all(contexts, worker->ranks)
                 : onehop_capture_end_all(contexts, worker->ranks);
}

/* A refused call leaves no stream in capture: other calls follow. */
static onehop_result capture_streams(perf_run *run, uint64_t calls) {
    perf_worker *worker = run->worker;
    onehop_result result = ONEHOP_OK;
    int begun = 0;
    for (; begun < worker->ranks && result == ONEHOP_OK; begun++)
        result = worker->backend->capture_begin(&worker->rank[begun].processor);
    if (result != ONEHOP_OK) begun--;
    worker->capturing = true;
    for (uint64_t call = 0; call < calls && result == ONEHOP_OK; call++) result = enqueue(run);
    worker->capturing = false;
    for (int i = 0; i < begun; i++) {
        onehop_result ended =
            worker->backend->capture_end(&worker->rank[i].processor, &run->graph[i]);
        if (result == ONEHOP_OK) result = ended;
    }
    return result;
}

static onehop_result capture(perf_run *run, uint64_t calls) {
    uint64_t since = run->since;
    run->call = 0;
    onehop_result result = capture_bracket(run, true);
    if (result != ONEHOP_OK) return result;
    result = capture_streams(run, calls);
    run->since = since; /* captured calls have not run */
    onehop_result ended = capture_bracket(run, false);
    return result == ONEHOP_OK ? ended : result;
}

static void destroy_graphs(perf_run *run) {
    for (int i = 0; i < run->worker->ranks; i++) {
        if (run->graph[i])
            run->worker->backend->graph_destroy(&run->worker->rank[i].processor, run->graph[i]);
        run->graph[i] = NULL;
    }
}

static onehop_result launch_graphs(perf_run *run) {
    for (int i = 0; i < run->worker->ranks; i++) {
        backend_rank *processor = &run->worker->rank[i].processor;
        onehop_result result = run->worker->backend->graph_launch(processor, run->graph[i]);
        if (result != ONEHOP_OK) return result;
    }
    run->since += run->calls;
    return ONEHOP_OK;
}

/* ---- data in place --------------------------------------------------------------------------- */

/* Calls in place that keep numbers of about 1 finite: each multiplies them by the number of
 * ranks. */
static uint64_t safe_calls(const perf_run *run) {
    const perf_plan *plan = run->worker->plan;
    double doublings = plan->dtype == ONEHOP_FLOAT16 ? 11 : 123;
    if (plan->world_size == 1) return UINT64_MAX;
    return (uint64_t)(doublings / log2(plan->world_size)) * run->slices.count;
}

static onehop_result set_back(perf_run *run) {
    perf_worker *worker = run->worker;
    for (int i = 0; i < worker->ranks; i++) {
        perf_rank *rank = &worker->rank[i];
        for (uint64_t slice = 0; slice < run->slices.count; slice++) {
            onehop_result result =
                worker->backend->copy(&rank->processor, perf_slice_out(rank, run->slices, slice),
                                      perf_slice_in(rank, run->slices, slice), run->slices.bytes);
            if (result != ONEHOP_OK) return result;
        }
    }
    run->since = 0;
    return ONEHOP_OK;
}

static onehop_result align(perf_run *run) {
    onehop_result result = wait_all(run);
    if (result == ONEHOP_OK) result = perf_barrier(run->worker);
    if (result == ONEHOP_OK) result = enqueue(run);
    if (result == ONEHOP_OK && !run->worker->backend->events) result = wait_all(run);
    return result;
}

/* Before a sample in place: sets the outputs back when they would overflow during it. */
static onehop_result keep_finite(perf_run *run) {
    if (!run->in_place || run->since == 0) return ONEHOP_OK;
    if (run->since + run->calls <= safe_calls(run)) return ONEHOP_OK;
    onehop_result result = set_back(run);
    /* On a GPU the copy is in stream order and takes each rank equally long. */
    if (result != ONEHOP_OK || run->worker->backend->events) return result;
    return align(run);
}

/* ---- samples --------------------------------------------------------------------------------- */

static onehop_result stamp(perf_run *run, uint64_t sample, bool end) {
    perf_worker *worker = run->worker;
    bool events = worker->backend->events && worker->plan->graph;
    for (int i = 0; i < worker->ranks; i++) {
        perf_rank *rank = &worker->rank[i];
        onehop_result result = ONEHOP_OK;
        if (events)
            result = worker->backend->event_record(&rank->processor, 2 * sample + end);
        else if (end && rank->processor.stream && !worker->inline_calls)
            result = run->target->wait(worker, rank);
        if (result != ONEHOP_OK) return result;
        *(end ? &rank->end_ns[sample] : &rank->begin_ns[sample]) = oh_clock_ns();
    }
    return ONEHOP_OK;
}

static onehop_result one_sample(perf_run *run, uint64_t sample) {
    onehop_result result = keep_finite(run);
    if (result == ONEHOP_OK) result = stamp(run, sample, false);
    if (result == ONEHOP_OK && run->worker->plan->graph) {
        result = launch_graphs(run);
    } else {
        for (uint64_t i = 0; i < run->calls && result == ONEHOP_OK; i++) result = enqueue(run);
    }
    return result == ONEHOP_OK ? stamp(run, sample, true) : result;
}

static onehop_result timed_part(perf_run *run) {
    onehop_result result = align(run);
    for (uint64_t sample = 0; sample < run->samples && result == ONEHOP_OK; sample++)
        result = one_sample(run, sample);
    return result == ONEHOP_OK ? wait_all(run) : result;
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static onehop_result read_samples(perf_run *run, perf_rank *rank) {
    const perf_backend *backend = run->worker->backend;
    for (uint64_t sample = 0; sample < run->samples; sample++) {
        double us = (double)(rank->end_ns[sample] - rank->begin_ns[sample]) / 1000;
        onehop_result result = ONEHOP_OK;
        if (backend->events && run->worker->plan->graph)
            result = backend->event_elapsed(&rank->processor, 2 * sample, 2 * sample + 1, &us);
        if (result != ONEHOP_OK) return result;
        rank->sample_us[sample] = us / (double)run->calls;
    }
    return ONEHOP_OK;
}

/* Each figure is made per rank; the side gets the largest of all ranks. */
static onehop_result summarise(perf_run *run, perf_side *side) {
    double mean[ONEHOP_MAX_RANKS] = {0}, p50[ONEHOP_MAX_RANKS], p99[ONEHOP_MAX_RANKS];
    for (int i = 0; i < run->worker->ranks; i++) {
        perf_rank *rank = &run->worker->rank[i];
        onehop_result result = read_samples(run, rank);
        if (result != ONEHOP_OK) return result;
        qsort(rank->sample_us, run->samples, sizeof(double), compare_doubles);
        for (uint64_t j = 0; j < run->samples; j++) mean[i] += rank->sample_us[j];
        mean[i] /= (double)run->samples;
        p50[i] = rank->sample_us[run->samples / 2];
        p99[i] = rank->sample_us[(run->samples * 99 + 99) / 100 - 1];
    }
    onehop_result result = perf_largest(run->worker, mean, &side->time_us);
    if (result == ONEHOP_OK) result = perf_largest(run->worker, p50, &side->p50_us);
    if (result == ONEHOP_OK) result = perf_largest(run->worker, p99, &side->p99_us);
    int world_size = run->worker->plan->world_size;
    side->calls = run->calls * run->samples;
    side->algbw = (double)run->slices.bytes / (side->time_us * 1000);
    int passes = run->worker->plan->collective == ONEHOP_ALL_REDUCE ? 2 : 1;
    side->busbw = side->algbw * passes * (world_size - 1) / world_size;
    return result;
}

/* ---- how many -------------------------------------------------------------------------------- */

static uint64_t clamp(double value, uint64_t low, uint64_t high) {
    if (value < (double)low) return low;
    return value > (double)high ? high : (uint64_t)value;
}

static void choose_counts(perf_run *run, double call_us) {
    const perf_plan *plan = run->worker->plan;
    bool host = plan->device == ONEHOP_DEVICE_HOST;
    if (host && !run->worker->rank[0].processor.stream) {
        double batch = ceil(HOST_MIN_SAMPLE_US / call_us);
        double calls = fmax(HOST_MIN_CALLS, HOST_SIDE_US / call_us);
        run->calls = plan->calls ? 1 : clamp(batch, 1, HOST_MAX_BATCH);
        run->samples =
            plan->calls ? plan->calls : clamp(calls / (double)run->calls, 1, PERF_MAX_SAMPLES);
        return;
    }
    uint64_t calls = run->slices.bytes <= SMALL_BYTES ? SMALL_CALLS : LARGE_CALLS;
    run->calls = plan->calls ? plan->calls : host ? HOST_STREAM_CALLS : calls;
    double by_time = HOST_SIDE_US / (call_us * (double)run->calls);
    run->samples = plan->samples ? plan->samples
                   : host        ? clamp(by_time, MIN_SAMPLES, SAMPLES)
                                 : SAMPLES;
}

/* Eager calls that warm caches and connections up and tell how long a call takes. */
static onehop_result warm_up(perf_run *run) {
    uint64_t calls = run->worker->plan->warmup ? run->worker->plan->warmup : 1;
    double us[ONEHOP_MAX_RANKS] = {0};
    onehop_result result = align(run);
    uint64_t start = oh_clock_ns();
    for (uint64_t i = 0; i < calls && result == ONEHOP_OK; i++) result = enqueue(run);
    if (result == ONEHOP_OK) result = wait_all(run);
    us[0] = (double)(oh_clock_ns() - start) / 1000 / (double)calls;
    if (result == ONEHOP_OK) result = perf_largest(run->worker, us, &us[0]);
    choose_counts(run, fmax(us[0], 0.05));
    return result;
}

static onehop_result prepare_graph(perf_run *run) {
    const perf_backend *backend = run->worker->backend;
    onehop_result result = capture(run, run->calls);
    if (result == ONEHOP_OK) result = launch_graphs(run);
    if (result == ONEHOP_OK) result = wait_all(run);
    for (int i = 0; i < run->worker->ranks && result == ONEHOP_OK && backend->events; i++)
        result = backend->event_record(&run->worker->rank[i].processor, 2 * run->samples);
    return result;
}

/* Outputs that hold no result yet. */
static onehop_result renew_outputs(perf_run *run) {
    onehop_result result = perf_poison(run->worker, run->slices);
    return result == ONEHOP_OK && run->in_place ? set_back(run) : result;
}

/* Calls onto fresh outputs, eager or in a graph, which is captured if there is none yet. */
static onehop_result run_fresh(perf_run *run, uint64_t calls) {
    onehop_result result = renew_outputs(run);
    if (result == ONEHOP_OK) result = perf_barrier(run->worker);
    run->call = 0;
    if (run->worker->plan->graph) {
        if (result == ONEHOP_OK && !run->graph[0]) result = capture(run, calls);
        if (result == ONEHOP_OK) result = launch_graphs(run);
    } else {
        for (uint64_t i = 0; i < calls && result == ONEHOP_OK; i++) result = enqueue(run);
    }
    return result == ONEHOP_OK ? wait_all(run) : result;
}

static onehop_result verify(perf_run *run, perf_side *side, uint64_t *outside) {
    side->wrong = run->worker->plan->check ? 0 : -1;
    if (!run->worker->plan->check) return ONEHOP_OK;
    onehop_result result = ONEHOP_OK;
    uint64_t last = (run->graph[0] ? run->calls : run->call) - 1;
    if (!run->in_place) /* what the timed calls left */
        result = perf_verify(run->worker, run->slices, last, 1, &side->wrong, outside);
    destroy_graphs(run);
    if (result == ONEHOP_OK) result = run_fresh(run, 1);
    if (result != ONEHOP_OK) return result;
    return perf_verify(run->worker, run->slices, 0, 1, &side->wrong, outside);
}

onehop_result perf_try(perf_worker *worker, const perf_target *target, perf_slices slices,
                       bool in_place, int64_t *wrong, uint64_t *outside) {
    perf_run run = {.worker = worker, .target = target, .in_place = in_place, .slices = slices};
    onehop_result result = ONEHOP_OK;
    run.count = slices.bytes / perf_parts(worker->plan) / onehop_dtype_bytes(worker->plan->dtype);
    perf_use_areas(worker, target);
    for (int pass = 0; pass < perf_passes(worker->plan) && result == ONEHOP_OK; pass++) {
        result = run_fresh(&run, slices.count);
        if (result == ONEHOP_OK)
            result = perf_verify(worker, slices, 0, slices.count, wrong, outside);
    }
    destroy_graphs(&run);
    return result;
}

onehop_result perf_measure(perf_worker *worker, const perf_target *target, size_t bytes,
                           bool in_place, perf_side *side, uint64_t *outside) {
    perf_run run = {.worker = worker, .target = target, .in_place = in_place};
    run.slices = perf_slices_for(worker, bytes);
    run.count = bytes / perf_parts(worker->plan) / onehop_dtype_bytes(worker->plan->dtype);
    perf_use_areas(worker, target);
    onehop_result result = renew_outputs(&run);
    if (result == ONEHOP_OK) result = warm_up(&run);
    if (result == ONEHOP_OK && worker->plan->graph) result = prepare_graph(&run);
    if (result == ONEHOP_OK) result = renew_outputs(&run);
    if (result == ONEHOP_OK) result = timed_part(&run);
    if (result == ONEHOP_OK) result = summarise(&run, side);
    if (result == ONEHOP_OK) result = verify(&run, side, outside);
    destroy_graphs(&run);
    return result;
}
