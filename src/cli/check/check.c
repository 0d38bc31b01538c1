/* `onehop check`: every algorithm, source, type and world size that this machine can do, eager and
 * in graphs, against the scalar reference. What the library refuses is listed with its reason.
 *
 * A run is one group of ranks that takes all cells one after another, with perf's worker,
 * reference and guards. Each world size has two: one with slots so small that short messages go in
 * chunks, on memory that peers cannot map, and one with the default storage on memory that they
 * can. Ranks as processes come first: a process that has used a GPU cannot fork ranks. */
#include "cli/check/check_report.h"
#include "cli/perf/perf_check.h"
#include "cli/perf/perf_run.h"
#include "cli/perf/perf_start.h"
#include "cli/shared/options.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    SMALL_SLOT = 8192,
    CALLS = 2,            /* one per parity */
    DEADLINE_MS = 120000, /* of a call, where many ranks share few cores */
    MANY_RANKS = 8,       /* beyond, the short lists: ranks that outnumber the cores are slow */
    REFERENCE_BUDGET = 1 << 24, /* elements made by all ranks to verify one call */
};

static const onehop_dtype dtypes[] = {ONEHOP_FLOAT32, ONEHOP_FLOAT16, ONEHOP_BFLOAT16};

/* Elements of the messages; 0 ends. */
static const size_t quick_short[] = {1, 33, 1031, 7001, 0};
static const size_t quick_long[] = {1040, 33001, 0};
static const size_t full_short[] = {1, 2, 7, 8, 15, 33, 64, 255, 1024, 1031, 4099, 20011, 0};
static const size_t full_long[] = {16, 1040, 33001, 262147, 1048579, 4194307, 0};

typedef struct check_run {
    check_report *report;
    check_column *column;
    const size_t *counts;
} check_run;

/* ---- one cell -------------------------------------------------------------------------------- */

static bool affordable(size_t count, int world_size) {
    return count * (size_t)(world_size * world_size) <= REFERENCE_BUDGET;
}

static bool is_refusal(onehop_result result) {
    return result == ONEHOP_ERR_ALGORITHM || result == ONEHOP_ERR_UNSUPPORTED;
}

static size_t stride_of(size_t bytes) {
    return oh_round_up(bytes + PERF_GUARD, PERF_GUARD) + PERF_GUARD;
}

static onehop_result try_message(perf_worker *worker, size_t count, size_t number, bool in_place,
                                 check_cell *cell) {
    const perf_plan *plan = worker->plan;
    /* What takes parts gets as much in all. */
    size_t parts = perf_parts(plan), part = count < parts ? 1 : count / parts;
    size_t element = onehop_dtype_bytes(plan->dtype), bytes = part * parts * element;
    perf_slices slices = {bytes, stride_of(bytes), CALLS, (number + in_place) % 2 ? element : 0};
    int64_t wrong = 0;
    uint64_t outside = 0;
    /* On the host both ways of an eager call. */
    worker->inline_calls = plan->device == ONEHOP_DEVICE_HOST && plan->layout != LAYOUT_SINGLE &&
                           !plan->graph && number / 2 % 2 == 0;
    onehop_result result =
        perf_try(worker, &perf_target_onehop, slices, in_place, &wrong, &outside);
    worker->inline_calls = false;
    cell->tried = true;
    if (is_refusal(result)) {
        if (!cell->refused[0])
            snprintf(cell->refused, sizeof cell->refused, "%s", onehop_last_error());
        return ONEHOP_OK;
    }
    if (result != ONEHOP_OK) return result;
    cell->outputs += (uint64_t)(plan->world_size * CALLS * perf_passes(plan));
    cell->wrong += (uint64_t)wrong;
    cell->outside += outside;
    return ONEHOP_OK;
}

static onehop_result try_messages(perf_worker *worker, check_cell *cell) {
    const check_run *run = worker->user;
    /* NCCL sums in an order of its own; perf --compare verifies it on integers. */
    if (worker->plan->algorithm == ONEHOP_NCCL) {
        cell->tried = true;
        snprintf(cell->refused, sizeof cell->refused, "its sums depend on NCCL's order");
        return ONEHOP_OK;
    }
    for (size_t i = 0; run->counts[i]; i++)
        for (int in_place = 0; in_place < 2; in_place++) {
            if (!affordable(run->counts[i], worker->plan->world_size)) continue;
            onehop_result result = try_message(worker, run->counts[i], i, in_place, cell);
            if (result != ONEHOP_OK) return result;
        }
    return ONEHOP_OK;
}

/* ---- one run --------------------------------------------------------------------------------- */

static void show_progress(const check_run *run, const perf_plan *plan) {
    if (!run->report->progress) return;
    fprintf(stderr, "\r# %d ranks: %s, %s, source %s, %s\033[K", plan->world_size,
            onehop_dtype_name(plan->dtype), onehop_algorithm_name(plan->algorithm),
            onehop_source_name(plan->source), plan->graph ? "graph" : "eager");
}

/* All cells of one type. Every rank keeps its own copy of a cell; rank 0's is reported. */
static onehop_result check_type(perf_worker *worker, perf_plan *plan) {
    const check_run *run = worker->user;
    bool reports = worker->rank[0].rank == 0;
    onehop_result result = perf_fill_inputs(worker);
    for (int k = 0; k < CHECK_KINDS && result == ONEHOP_OK; k++) {
        check_kind kind = check_kind_of(k);
        check_cell *shared = &run->column->cell[k][plan->dtype];
        check_cell own = *shared;
        if (!check_applies(kind, plan->world_size)) continue;
        plan->algorithm = kind.algorithm;
        plan->collective = oh_collective_of(kind.algorithm);
        plan->source = kind.source;
        plan->graph = kind.graph;
        if (reports) show_progress(run, plan);
        result = try_messages(worker, &own);
        if (reports) *shared = own;
    }
    return result;
}

static bool column_is_wrong(const check_column *column) {
    const check_cell *cells = &column->cell[0][0];
    for (size_t i = 0; i < sizeof column->cell / sizeof *cells; i++)
        if (cells[i].wrong || cells[i].outside) return true;
    return false;
}

static onehop_result check_body(perf_worker *worker, bool *wrong_out) {
    const check_run *run = worker->user;
    const perf_plan *shared = worker->plan;
    perf_plan plan = *shared;
    onehop_result result = ONEHOP_OK;
    worker->plan = &plan; /* changes from cell to cell */
    worker->data = perf_switch_may_add(&plan) ? DATA_INTEGERS : DATA_MIXED;
    for (size_t i = 0; i < OH_LENGTH(dtypes) && result == ONEHOP_OK; i++) {
        plan.dtype = dtypes[i];
        result = check_type(worker, &plan);
    }
    worker->plan = shared;
    if (worker->rank[0].rank != 0) return result;
    check_report *report = run->report;
    backend_rank *processor = &worker->rank[0].processor;
    snprintf(report->line, sizeof report->line, "%s", worker->board->row[0].device);
    worker->backend->driver(processor, report->driver, sizeof report->driver);
    worker->backend->clocks(processor, report->clocks, sizeof report->clocks);
    *wrong_out = column_is_wrong(run->column);
    return result;
}

static void run_column(check_report *report, check_column *column, const perf_plan *base,
                       const size_t *counts, bool small) {
    check_run run = {report, column, counts};
    perf_plan plan = *base;
    size_t largest = 0;
    for (size_t i = 0; counts[i]; i++)
        if (affordable(counts[i], column->world_size)) largest = counts[i];
    plan.world_size = column->world_size;
    plan.layout = column->layout;
    plan.ranks_per_device = column->ranks_per_device;
    plan.dtype = ONEHOP_FLOAT32; /* the longest */
    plan.max_bytes = CALLS * stride_of(largest * sizeof(float)) + PERF_GUARD;
    plan.push_bytes = plan.pull_bytes = small ? SMALL_SLOT : 0;
    plan.mapped = !small;
    perf_fresh_name(&plan);
    int code = perf_start(&plan, check_body, &run);
    if (code > column->code) column->code = code;
    column->lost += code > CLI_WRONG_DATA;
}

/* ---- which ----------------------------------------------------------------------------------- */

typedef struct check_flags {
    int64_t ranks, device, quick, corrupt;
    const char *json_path;
} check_flags;

#define FIELD(name) offsetof(check_flags, name)

static const option_row rows[] = {
    {0, "quick", OPTION_SWITCH, FIELD(quick), 0, 0, NULL, NULL, "fewer world sizes and messages"},
    {'g', "ranks", OPTION_INTEGER, FIELD(ranks), 1, ONEHOP_MAX_RANKS, NULL, "N",
     "this world size only"},
    {'J', "json", OPTION_TEXT, FIELD(json_path), 0, 0, NULL, "FILE", "write results as JSON"},
    {0, "device", OPTION_WORD, FIELD(device), 0, 0, perf_device_words, "KIND",
     "auto, cuda or host (auto)"},
    {0, "corrupt", OPTION_INTEGER, FIELD(corrupt), 1, 1 << 30, NULL, "N", NULL},
};

static void add(check_report *report, const check_flags *flags, int world_size, perf_layout layout,
                int devices) {
    if (flags->ranks > 0 && flags->ranks != world_size) return;
    if (report->columns == CHECK_COLUMNS) return;
    check_column *column = &report->column[report->columns++];
    column->world_size = world_size;
    column->layout = layout;
    column->ranks_per_device = devices ? (world_size + devices - 1) / devices : 1;
}

static bool is_taken(const check_flags *flags, int world_size) {
    if (flags->ranks > 0) return true;
    if (flags->quick > 0)
        return world_size == 2 || world_size == 3 || world_size == 4 || world_size == 8;
    return world_size <= MANY_RANKS || world_size % 4 == 0;
}

static void choose_on_host(check_report *report, const check_flags *flags) {
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    for (int w = 1; w <= ONEHOP_MAX_RANKS; w++) {
        bool too_slow = w > MANY_RANKS && w > 2 * cores && flags->ranks < 0;
        if (is_taken(flags, w) && !too_slow) add(report, flags, w, LAYOUT_PROCESS, 0);
    }
    for (int w = 2; w <= 4 && flags->quick <= 0; w += 2) {
        add(report, flags, w, LAYOUT_THREAD, 0);
        add(report, flags, w, LAYOUT_SINGLE, 0);
    }
}

/* A process for each of as many ranks as there are GPUs; more ranks are threads that share them. */
static void choose_on_gpus(check_report *report, const check_flags *flags, int devices) {
    enum {
        MAX_PER_GPU = 8
    };
    for (int w = 1; w <= devices && w <= ONEHOP_MAX_RANKS; w++)
        if (is_taken(flags, w)) add(report, flags, w, LAYOUT_PROCESS, devices);
    for (int w = 2; w <= devices && flags->quick <= 0; w *= 2) {
        add(report, flags, w, LAYOUT_THREAD, devices);
        add(report, flags, w, LAYOUT_SINGLE, devices);
    }
    for (int w = devices + 1; w <= devices * MAX_PER_GPU && w <= ONEHOP_MAX_RANKS; w++)
        if (is_taken(flags, w)) add(report, flags, w, LAYOUT_THREAD, devices);
}

static int choose(check_report *report, const check_flags *flags, const perf_plan *plan) {
    if (plan->device == ONEHOP_DEVICE_CUDA)
        choose_on_gpus(report, flags, plan->devices);
    else
        choose_on_host(report, flags);
    if (report->columns) return CLI_OK;
    return cli_fail(cli_command, CLI_UNSUPPORTED, "-g %lld: %d GPUs do not take that many ranks",
                    (long long)flags->ranks, plan->devices);
}

static int check(check_report *report, const check_flags *flags, perf_plan *plan) {
    int code = output_open(&plan->file, "-J", flags->json_path);
    if (code == CLI_OK) code = perf_find_device(plan, flags->device);
    if (code == CLI_OK) code = choose(report, flags, plan);
    if (code != CLI_OK) return code;
    /* As perf_start does for ranks that share a GPU, but before any run of this process has opened
     * the driver. */
    if (plan->device == ONEHOP_DEVICE_CUDA) setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    report->device = plan->device;
    report->progress = isatty(STDERR_FILENO);
    for (int i = 0; i < report->columns; i++) {
        check_column *column = &report->column[i];
        bool quick = flags->quick > 0 || column->world_size > MANY_RANKS;
        run_column(report, column, plan, quick ? quick_short : full_short, true);
        run_column(report, column, plan, quick ? quick_long : full_long, false);
        if (column->code > code) code = column->code;
    }
    if (report->progress) fprintf(stderr, "\r\033[K");
    check_print(report);
    onehop_result written = output_write(&plan->file, check_write_json, report);
    return written == ONEHOP_OK
               ? code
               : cli_fail(cli_command, cli_exit_for(written), "%s", onehop_last_error());
}

int cli_check(int argc, char **argv) {
    check_flags flags = {-1, -1, -1, -1, NULL};
    perf_plan plan = {.env_rank = -1, .check = true, .with_stream = true};
    static const char usage_text[] =
        "check [FLAGS]\n"
        "\n"
        "Compares every algorithm, source, type and world size that this machine can do\n"
        "with a scalar reference, bit by bit.\n"
        "\n";
    const int end = options_read(rows, OH_LENGTH(rows), usage_text, argc, argv, &flags);
    if (end != OPTIONS_GO_ON) return end;
    if (perf_refuse_launcher() != CLI_OK) return CLI_USAGE;
    plan.corrupt = flags.corrupt > 0 ? (int)flags.corrupt : 0;
    if (!oh_env_text(OH_ENV_TIMEOUT_MS)) plan.timeout_ms = DEADLINE_MS;
    check_report *report =
        mmap(NULL, sizeof *report, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (report == MAP_FAILED) return cli_fail(cli_command, CLI_UNSUPPORTED, "no shared memory");
    perf_command_line(argc, argv, report->command_line, sizeof report->command_line);
    int code = check(report, &flags, &plan);
    munmap(report, sizeof *report);
    return code;
}
