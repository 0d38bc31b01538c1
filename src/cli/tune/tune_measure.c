/* What the ranks of `onehop tune` do. For every size: all ways once, the best of these again until
 * their medians repeat, the best of them is a rule. Between sizes whose rules differ in algorithm
 * the point where they cross is sought by halving.
 *
 * All figures are the largest of all ranks and equal on all ranks, so the ranks decide alike
 * without talking. */
#include "cli/tune/tune_measure.h"
#include "cli/perf/perf_run.h"
#include "device/device.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    WAYS = 256,
    FIRST_SAMPLES = 5, /* to find the finalists */
    FINALISTS = 3,
    MEDIANS = 12, /* of one finalist at most, until they settle */
    HALVINGS = 2,
};

/* A change of grid or algorithm must be worth so much: tables stay short. */
#define WORTH 0.01

/* ---- names ----------------------------------------------------------------------------------- */

bool tune_same_way(const tune_way *a, const tune_way *b) {
    return a->algorithm == b->algorithm && a->source == b->source && a->blocks == b->blocks &&
           a->threads == b->threads;
}

void tune_name_way(const tune_way *way, char *text, size_t size) {
    char source[32] = "", grid[32] = "";
    if (way->source) snprintf(source, sizeof source, " over %s", onehop_source_name(way->source));
    if (way->threads > 1) snprintf(grid, sizeof grid, ", %u x %u", way->blocks, way->threads);
    snprintf(text, size, "%s%s%s", onehop_algorithm_name(way->algorithm), source, grid);
}

static void say(const perf_worker *worker, const tune_way *way, bool final) {
    const tune_run *run = worker->user;
    char name[96];
    if (worker->rank[0].rank != 0 || (!final && !run->progress)) return;
    tune_name_way(way, name, sizeof name);
    fprintf(stderr, "%s# %s, %llu bytes: %s", run->progress ? "\r" : "",
            worker->plan->graph ? "graph" : "eager", (unsigned long long)run->bytes, name);
    if (final) fprintf(stderr, ", %.2f us", way->us);
    fprintf(stderr, "%s%s", run->progress ? "\033[K" : "", final ? "\n" : "");
}

/* ---- one way --------------------------------------------------------------------------------- */

static onehop_result call_way(perf_worker *worker, perf_rank *rank, const void *in, void *out,
                              size_t count) {
    const tune_run *run = worker->user;
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    call.algorithm = run->way.algorithm;
    call.source = run->way.source;
    call.blocks = run->way.blocks;
    call.threads = run->way.threads;
    if (call.source == ONEHOP_SOURCE_GRAPH && !worker->capturing)
        call.source = ONEHOP_SOURCE_WORKSPACE; /* to warm up */
    return onehop_all_reduce(rank->context, in, out, count, worker->plan->dtype, ONEHOP_SUM, &call,
                             worker->inline_calls ? NULL : rank->processor.stream);
}

static onehop_result wait_way(perf_worker *worker, perf_rank *rank) {
    return perf_target_onehop.wait(worker, rank);
}

static const perf_target target = {
    .name = "onehop", .registers = true, .call = call_way, .wait = wait_way};

/* What the library refuses takes for ever. */
static onehop_result measure(perf_worker *worker, tune_way *way) {
    tune_run *run = worker->user;
    perf_side side = {0};
    uint64_t outside = 0;
    run->way = *way;
    way->us = INFINITY;
    say(worker, way, false);
    onehop_result result = perf_measure(worker, &target, run->bytes, false, &side, &outside);
    if (result == ONEHOP_ERR_ALGORITHM || result == ONEHOP_ERR_UNSUPPORTED) return ONEHOP_OK;
    if (result == ONEHOP_OK) way->us = side.p50_us;
    return result;
}

static void refuse(perf_worker *worker, const tune_way *way, const double *us) {
    tune_run *run = worker->user;
    char name[96];
    tune_name_way(way, name, sizeof name);
    run->refused = true;
    if (worker->rank[0].rank != 0) return;
    snprintf(run->report->noise, sizeof run->report->noise,
             "%s at %llu bytes, %s: medians of %.3f, %.3f and %.3f us differ by %.1f %%, more than "
             "%.1f %%, the last of %d; nothing was written",
             name, (unsigned long long)run->bytes, worker->plan->graph ? "graph" : "eager", us[0],
             us[1], us[2], 100 * (us[TUNE_REPEATS - 1] / us[0] - 1), 100 * run->noise, MEDIANS);
}

/* The median of the last medians, once these are alike; else the run is refused. */
static onehop_result settle(perf_worker *worker, tune_way *way) {
    tune_run *run = worker->user;
    double medians[MEDIANS], us[TUNE_REPEATS];
    for (int i = 0; i < MEDIANS; i++) {
        onehop_result result = measure(worker, way);
        if (result != ONEHOP_OK) return result;
        medians[i] = way->us;
        if (!tune_settled(medians, i + 1, run->noise, us)) continue;
        way->us = us[TUNE_REPEATS / 2];
        return ONEHOP_OK;
    }
    refuse(worker, way, us);
    return ONEHOP_OK;
}

/* ---- all ways -------------------------------------------------------------------------------- */

static void add(tune_way *ways, size_t *count, tune_way way) {
    if (*count < WAYS) ways[(*count)++] = way;
}

/* Grids that give a thread a unit or so, as far as there are: fewer units than the smallest grid
 * has threads, or more than the largest, leave those. */
static void add_grids(const tune_run *run, tune_way *ways, size_t *count, tune_way way) {
    static const uint32_t data_blocks[] = {2, 4, 8, 16, 32, 64, 128, 0};
    const uint64_t units = (run->bytes + 15) / 16, max = (run->max_blocks - 1) * 1024ull;
    const uint64_t wanted = units > max ? max : units < 128 ? 128 : units;
    for (size_t b = 0; b < OH_LENGTH(data_blocks); b++) {
        const uint32_t blocks = data_blocks[b] ? data_blocks[b] + 1 : run->max_blocks;
        if (blocks > run->max_blocks) continue;
        for (uint32_t threads = 64; threads <= 1024; threads *= 2) {
            const uint64_t grid = (uint64_t)(blocks - 1) * threads;
            if (grid > 2 * wanted || 4 * grid < wanted) continue;
            way.blocks = blocks;
            way.threads = threads;
            add(ways, count, way);
        }
    }
}

static size_t list_ways(const perf_worker *worker, tune_way *ways) {
    static const tune_way on_host[] = {{ONEHOP_HOST_1SHOT, ONEHOP_SOURCE_NONE, 1, 1, 0},
                                       {ONEHOP_HOST_2SHOT, ONEHOP_SOURCE_NONE, 1, 1, 0}};
    static const tune_way on_gpus[] = {{ONEHOP_1SHOT_PUSH, ONEHOP_SOURCE_NONE, 0, 0, 0},
                                       {ONEHOP_2SHOT_PUSH, ONEHOP_SOURCE_NONE, 0, 0, 0},
                                       {ONEHOP_1SHOT_PULL, ONEHOP_SOURCE_WORKSPACE, 0, 0, 0},
                                       {ONEHOP_2SHOT_PULL, ONEHOP_SOURCE_WORKSPACE, 0, 0, 0},
                                       {ONEHOP_1SHOT_PULL, ONEHOP_SOURCE_GRAPH, 0, 0, 0},
                                       {ONEHOP_2SHOT_PULL, ONEHOP_SOURCE_GRAPH, 0, 0, 0}};
    static const tune_way nccl = {ONEHOP_NCCL, ONEHOP_SOURCE_NONE, 0, 0, 0};
    size_t count = 0;
    if (worker->plan->device == ONEHOP_DEVICE_HOST) {
        for (size_t i = 0; i < OH_LENGTH(on_host); i++) add(ways, &count, on_host[i]);
        return count;
    }
    for (size_t i = 0; i < OH_LENGTH(on_gpus); i++)
        if (on_gpus[i].source != ONEHOP_SOURCE_GRAPH || worker->plan->graph)
            add_grids(worker->user, ways, &count, on_gpus[i]);
    if (worker->plan->hand_over) add(ways, &count, nccl);
    return count;
}

static int compare_ways(const void *a, const void *b) {
    const tune_way *x = a, *y = b;
    return (x->us > y->us) - (x->us < y->us);
}

/* In place it would overwrite what a peer still reads. */
static bool serves_in_place(const tune_way *way) {
    return way->algorithm != ONEHOP_1SHOT_PULL || way->source != ONEHOP_SOURCE_GRAPH;
}

/* The settled best of the sorted ways that `ok` allows (NULL: all), or the one before if it is as
 * good. */
static onehop_result choose(perf_worker *worker, const tune_way *ways, size_t count,
                            bool (*ok)(const tune_way *), const tune_way *before, tune_way *best) {
    const tune_run *run = worker->user;
    tune_way final[FINALISTS + 1];
    size_t finals = 0;
    onehop_result result = ONEHOP_OK;
    for (size_t i = 0; i < count && finals < FINALISTS; i++)
        if (isfinite(ways[i].us) && (!ok || ok(&ways[i])) &&
            (!finals || ways[i].us < 2 * final[0].us))
            final[finals++] = ways[i];
    bool kept = !before;
    for (size_t i = 0; i < finals && before; i++) kept |= tune_same_way(&final[i], before);
    if (!kept) final[finals++] = *before;
    for (size_t i = 0; i < finals && result == ONEHOP_OK && !run->refused; i++)
        result = settle(worker, &final[i]);
    if (result == ONEHOP_OK && (!finals || !isfinite(final[0].us)))
        result = oh_error(ONEHOP_ERR_UNSUPPORTED, "no algorithm serves %llu bytes",
                          (unsigned long long)run->bytes);
    if (result != ONEHOP_OK) return result;
    *best = final[0];
    for (size_t i = 1; i < finals; i++)
        if (final[i].us < best->us) *best = final[i];
    for (size_t i = 0; i < finals && before; i++)
        if (tune_same_way(&final[i], before) && final[i].us <= best->us * (1 + WORTH))
            *best = final[i];
    return result;
}

static onehop_result tune_size(perf_worker *worker, const tune_rule *before, tune_rule *rule) {
    tune_run *run = worker->user;
    tune_way ways[WAYS];
    const size_t count = list_ways(worker, ways);
    const uint64_t samples = run->plan->samples;
    onehop_result result = ONEHOP_OK;
    rule->bytes = run->bytes;
    run->plan->samples = FIRST_SAMPLES;
    for (size_t i = 0; i < count && result == ONEHOP_OK; i++) result = measure(worker, &ways[i]);
    run->plan->samples = samples;
    if (result != ONEHOP_OK) return result;
    qsort(ways, count, sizeof *ways, compare_ways);
    result = choose(worker, ways, count, NULL, before ? &before->way : NULL, &rule->way);
    rule->in_place = rule->way;
    if (result == ONEHOP_OK && !run->refused && !serves_in_place(&rule->way))
        result = choose(worker, ways, count, serves_in_place, before ? &before->in_place : NULL,
                        &rule->in_place);
    if (result == ONEHOP_OK && !run->refused) say(worker, &rule->way, true);
    return result;
}

/* ---- one mode -------------------------------------------------------------------------------- */

/* Up to where the lower of two neighbours is the better one. */
static onehop_result find_crossover(perf_worker *worker, tune_rule *low, const tune_rule *high) {
    tune_run *run = worker->user;
    uint64_t above = high->bytes;
    for (int i = 0; i < HALVINGS && !run->refused; i++) {
        tune_way a = low->way, b = high->way;
        run->bytes = (low->bytes + above) / 2 / 128 * 128;
        if (run->bytes <= low->bytes) break;
        onehop_result result = settle(worker, &a);
        if (result == ONEHOP_OK && !run->refused) result = settle(worker, &b);
        if (result != ONEHOP_OK) return result;
        if (a.us > b.us) {
            above = run->bytes;
            continue;
        }
        low->bytes = run->bytes;
        low->way.us = a.us;
    }
    return ONEHOP_OK;
}

static size_t merge(tune_rule *rules, size_t count) {
    size_t kept = 0;
    for (size_t i = 0; i < count; i++) {
        if (kept && tune_same_way(&rules[kept - 1].way, &rules[i].way) &&
            tune_same_way(&rules[kept - 1].in_place, &rules[i].in_place))
            kept--;
        rules[kept++] = rules[i];
    }
    return kept;
}

static onehop_result tune_mode(perf_worker *worker, tune_rule *rules, size_t *count_out) {
    const perf_plan *plan = worker->plan;
    tune_run *run = worker->user;
    onehop_result result = ONEHOP_OK;
    size_t count = 0;
    for (uint64_t bytes = plan->min_bytes; bytes <= plan->max_bytes; bytes *= plan->factor) {
        run->bytes = bytes;
        result = tune_size(worker, count ? &rules[count - 1] : NULL, &rules[count]);
        if (result != ONEHOP_OK || run->refused) return result;
        count++;
    }
    for (size_t i = 0; i + 1 < count && result == ONEHOP_OK && !run->refused; i++)
        if (rules[i].way.algorithm != rules[i + 1].way.algorithm ||
            rules[i].way.source != rules[i + 1].way.source)
            result = find_crossover(worker, &rules[i], &rules[i + 1]);
    *count_out = merge(rules, count);
    return result;
}

/* ---- the run --------------------------------------------------------------------------------- */

/* Lowest of all ranks. */
static onehop_result lowest(perf_worker *worker, uint32_t mine, uint32_t *out) {
    const double value = -(double)mine;
    double largest;
    /* perf_largest starts from 0. */
    const double shifted = value + UINT16_MAX;
    onehop_result result = perf_largest(worker, &shifted, &largest);
    *out = (uint32_t)(UINT16_MAX - largest);
    return result;
}

static onehop_result describe(perf_worker *worker) {
    tune_run *run = worker->user;
    tune_report *report = run->report;
    perf_rank *rank = &worker->rank[0];
    oh_device *device;
    oh_device_info info;
    uint32_t capability = 0;
    onehop_result result = oh_device_open(rank->processor.device, rank->rank, &device);
    if (result != ONEHOP_OK) return result;
    result = device->ops->info(device, &info);
    device->ops->close(device);
    if (result == ONEHOP_OK) result = lowest(worker, info.multiprocessors, &run->max_blocks);
    if (result == ONEHOP_OK) result = lowest(worker, info.capability, &capability);
    if (result != ONEHOP_OK || rank->rank != 0) return result;
    report->capability = capability;
    worker->backend->driver(&rank->processor, report->driver, sizeof report->driver);
    for (int r = 0; r < worker->plan->world_size; r++)
        snprintf(report->device[r], sizeof report->device[r], "%s", worker->board->row[r].device);
    return ONEHOP_OK;
}

onehop_result tune_measure(perf_worker *worker, bool *wrong_out) {
    tune_run own = *(tune_run *)worker->user;
    const perf_plan *shared = worker->plan;
    perf_plan plan = *shared;
    tune_rule rules[TUNE_RULES];
    (void)wrong_out;
    worker->plan = own.plan = &plan;
    worker->user = &own;
    onehop_result result = describe(worker);
    for (int mode = 0; mode < 2 && result == ONEHOP_OK && !own.refused; mode++) {
        size_t count = 0;
        plan.graph = mode == ONEHOP_MODE_GRAPH;
        worker->inline_calls = plan.device == ONEHOP_DEVICE_HOST && !plan.graph;
        result = tune_mode(worker, rules, &count);
        if (worker->rank[0].rank != 0) continue;
        memcpy(own.report->rules[mode], rules, sizeof rules);
        own.report->count[mode] = count;
    }
    worker->inline_calls = false;
    worker->plan = shared;
    return result;
}

/* ---- the trial ------------------------------------------------------------------------------- */

static onehop_result try_rule(perf_worker *worker, const tune_rule *rule, bool in_place,
                              bool *wrong_out) {
    const tune_way *way = in_place ? &rule->in_place : &rule->way;
    const perf_plan *plan = worker->plan;
    onehop_choice choice;
    int64_t wrong = 0;
    uint64_t outside = 0;
    char name[96];
    onehop_query query = ONEHOP_CONFIG_INIT(onehop_query);
    query.bytes = rule->bytes;
    query.dtype = plan->dtype;
    query.mode = plan->graph ? ONEHOP_MODE_GRAPH : ONEHOP_MODE_EAGER;
    query.in_place = in_place;
    onehop_result result = onehop_would_use(worker->rank[0].context, &query, &choice);
    if (result != ONEHOP_OK) return result;
    const tune_way found = {choice.algorithm, choice.source, choice.blocks, choice.threads, 0};
    tune_name_way(way, name, sizeof name);
    if (!tune_same_way(way, &found))
        return oh_error(ONEHOP_ERR_INTERNAL,
                        "the table says %s for %llu bytes, the library takes %s", name,
                        (unsigned long long)rule->bytes, onehop_algorithm_name(choice.algorithm));
    result = perf_try(worker, &perf_target_onehop, perf_slices_for(worker, rule->bytes), in_place,
                      &wrong, &outside);
    *wrong_out |= wrong || outside;
    return result;
}

onehop_result tune_try(perf_worker *worker, bool *wrong_out) {
    const tune_run *run = worker->user;
    const perf_plan *shared = worker->plan;
    perf_plan plan = *shared;
    onehop_result result = ONEHOP_OK;
    worker->plan = &plan;
    for (int mode = 0; mode < 2; mode++) {
        plan.graph = mode == ONEHOP_MODE_GRAPH;
        for (size_t i = 0; i < run->report->count[mode] && result == ONEHOP_OK; i++)
            for (int in_place = 0; in_place < 2 && result == ONEHOP_OK; in_place++)
                result = try_rule(worker, &run->report->rules[mode][i], in_place, wrong_out);
    }
    worker->plan = shared;
    return result;
}
