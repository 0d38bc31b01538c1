/* `onehop tune`: measures this machine and writes a tuning table for it, for ONEHOP_TUNING. The
 * file is written only after other ranks have used the table: their calls must do what it says, and
 * give the right results. Progress goes to stderr. */
#include "cli/tune/tune_measure.h"
#include "cli/perf/perf_start.h"
#include "cli/shared/options.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef struct tune_flags {
    int64_t ranks, device, min_bytes, max_bytes, dtype, noise, quick, early_trigger, hand_over;
    const char *output, *nccl_path;
} tune_flags;

#define FIELD(name) offsetof(tune_flags, name)
#define MAX_BYTES   ((int64_t)1 << 32)

static const char *const dtype_words[] = {"float", "half", "bfloat16", NULL};

static const option_row rows[] = {
    {'o', "output", OPTION_TEXT, FIELD(output), 0, 0, NULL, "FILE", "the table (onehop.table)"},
    {'g', "ranks", OPTION_INTEGER, FIELD(ranks), 2, ONEHOP_MAX_RANKS, NULL, "N",
     "ranks (all GPUs; on the host 2 to 4, by cores)"},
    {'b', "minbytes", OPTION_SIZE, FIELD(min_bytes), 128, MAX_BYTES, NULL, "SIZE",
     "smallest message (1K)"},
    {'e', "maxbytes", OPTION_SIZE, FIELD(max_bytes), 128, MAX_BYTES, NULL, "SIZE",
     "largest message (256M on GPUs, 16M on the host)"},
    {'d', "datatype", OPTION_WORD, FIELD(dtype), 0, 0, dtype_words, "TYPE",
     "float, half or bfloat16 (GPUs: bfloat16, host: float)"},
    {0, "noise", OPTION_INTEGER, FIELD(noise), 0, 10000, NULL, "PERCENT",
     "most that medians of the same calls may differ by (5)"},
    {0, "quick", OPTION_SWITCH, FIELD(quick), 0, 0, NULL, NULL,
     "fewer calls, sizes four times apart: to try the command, not to tune"},
    {0, "device", OPTION_WORD, FIELD(device), 0, 0, perf_device_words, "KIND",
     "auto, cuda or host (auto)"},
    {0, "early-trigger", OPTION_SWITCH, FIELD(early_trigger), 0, 0, NULL, NULL,
     "promise that nothing else spins on these GPUs"},
    {0, "nccl-handover", OPTION_SWITCH, FIELD(hand_over), 0, 0, NULL, NULL,
     "measure NCCL as one of the algorithms (GPUs)"},
    {0, "nccl-lib", OPTION_TEXT, FIELD(nccl_path), 0, 0, NULL, "PATH",
     "the library for that (libnccl.so.2)"},
};

/* ---- the plan -------------------------------------------------------------------------------- */

static int plan_ranks(perf_plan *plan, const tune_flags *flags) {
    const bool cuda = plan->device == ONEHOP_DEVICE_CUDA;
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    const long usual = cuda ? plan->devices : cores < 2 ? 2 : cores > 4 ? 4 : cores;
    plan->world_size = flags->ranks > 0 ? (int)flags->ranks : (int)usual;
    if (plan->world_size > ONEHOP_MAX_RANKS) plan->world_size = ONEHOP_MAX_RANKS;
    if (cuda && (plan->world_size > plan->devices || plan->world_size < 2))
        return cli_fail(cli_command, CLI_UNSUPPORTED,
                        "%d ranks: there are %d GPUs, and each rank needs one, two ranks at least",
                        plan->world_size, plan->devices);
    if (!cuda && plan->hand_over)
        return cli_fail(cli_command, CLI_UNSUPPORTED,
                        "--nccl-handover: NCCL needs GPUs, the device is host");
    return CLI_OK;
}

static int plan_sizes(perf_plan *plan, const tune_flags *flags) {
    const bool cuda = plan->device == ONEHOP_DEVICE_CUDA, quick = flags->quick > 0;
    const int64_t low = flags->min_bytes > 0 ? flags->min_bytes : 1024;
    const int64_t usual = quick ? 256 << 10 : cuda ? 256 << 20 : 16 << 20;
    const int64_t high = flags->max_bytes > 0 ? flags->max_bytes : usual;
    if (low > high)
        return cli_fail(cli_command, CLI_USAGE, "-b %lld is more than -e %lld", (long long)low,
                        (long long)high);
    /* Whole elements of every type, also halfway. */
    plan->min_bytes = (uint64_t)low / 128 * 128;
    plan->max_bytes = (uint64_t)high;
    plan->factor = quick ? 4 : 2;
    plan->warmup = 5;
    if (!quick) return CLI_OK;
    plan->calls = 20;
    plan->samples = 5;
    return CLI_OK;
}

static int make_plan(perf_plan *plan, const tune_flags *flags) {
    static const onehop_dtype dtypes[] = {ONEHOP_FLOAT32, ONEHOP_FLOAT16, ONEHOP_BFLOAT16};
    *plan = (perf_plan){.env_rank = -1, .ranks_per_device = 1, .with_stream = true};
    plan->early_trigger = flags->early_trigger > 0;
    plan->hand_over = flags->hand_over > 0;
    plan->nccl_path = flags->nccl_path;
    int code = output_open(&plan->file, "-o", flags->output);
    if (code == CLI_OK) code = perf_find_device(plan, flags->device);
    if (code == CLI_OK) code = plan_ranks(plan, flags);
    if (code == CLI_OK) code = plan_sizes(plan, flags);
    plan->dtype = plan->device == ONEHOP_DEVICE_CUDA ? ONEHOP_BFLOAT16 : ONEHOP_FLOAT32;
    if (flags->dtype >= 0) plan->dtype = dtypes[flags->dtype];
    return code;
}

/* ---- the table ------------------------------------------------------------------------------- */

typedef struct table {
    const perf_plan *plan;
    const tune_report *report;
    char command_line[512];
    double noise;
} table;

/* 64K for a round size, else the number. */
static void size_text(uint64_t bytes, char *text, size_t size) {
    static const char *const suffixes[] = {"", "K", "M", "G"};
    int suffix = 0;
    while (suffix < 3 && bytes % 1024 == 0) {
        bytes /= 1024;
        suffix++;
    }
    snprintf(text, size, "%llu%s", (unsigned long long)bytes, suffixes[suffix]);
}

static void write_rule(FILE *file, const table *t, int mode, const char *bytes,
                       const tune_way *way) {
    char blocks[16] = "-", threads[16] = "-";
    if (way->blocks) snprintf(blocks, sizeof blocks, "%u", way->blocks);
    if (way->threads) snprintf(threads, sizeof threads, "%u", way->threads);
    fprintf(file, "  %-6d %-5s  %-10s %-11s %-10s %-7s %-7s # %.2f us\n", t->plan->world_size,
            mode == ONEHOP_MODE_GRAPH ? "graph" : "eager", bytes,
            onehop_algorithm_name(way->algorithm),
            way->source ? onehop_source_name(way->source) : "-", blocks, threads, way->us);
}

static void write_mode(FILE *file, const table *t, int mode) {
    const tune_report *report = t->report;
    for (size_t i = 0; i < report->count[mode]; i++) {
        const tune_rule *rule = &report->rules[mode][i];
        char bytes[32] = "any";
        if (i + 1 < report->count[mode]) size_text(rule->bytes, bytes, sizeof bytes);
        write_rule(file, t, mode, bytes, &rule->way);
        if (!tune_same_way(&rule->way, &rule->in_place))
            write_rule(file, t, mode, bytes, &rule->in_place);
    }
}

static void write_table(FILE *file, void *user) {
    const table *t = user;
    const tune_report *report = t->report;
    char date[32], low[32], high[32];
    const time_t now = time(NULL);
    struct tm parts;
    strftime(date, sizeof date, "%Y-%m-%d", gmtime_r(&now, &parts));
    size_text(t->plan->min_bytes, low, sizeof low);
    size_text(t->plan->max_bytes, high, sizeof high);
    fprintf(file, "onehop-tuning 1\n\n# Measured on %s by onehop %s (commit %s): %s\n", date,
            cli_version(), ONEHOP_COMMIT, t->command_line);
    fprintf(file, "# %d ranks, a process each, %s, %s to %s, early_trigger %s%s%s\n",
            t->plan->world_size, onehop_dtype_name(t->plan->dtype), low, high,
            t->plan->early_trigger ? "on" : "off", report->driver[0] ? ", driver " : "",
            report->driver);
    for (int r = 0; r < t->plan->world_size; r++)
        fprintf(file, "# rank %d: %s\n", r, report->device[r]);
    fprintf(file,
            "# Times are medians, the largest of all ranks, at the last size of a rule; three\n"
            "# medians of a rule differ by %g %% at most. Longer messages go as the longest.\n",
            100 * t->noise);
    if (report->capability)
        fprintf(file, "\ndevice sm_%u\n", report->capability / 10 * 10);
    else
        fprintf(file, "\ndevice host\n");
    fprintf(file, "# world mode   bytes      algorithm   source     blocks  threads\n");
    for (int mode = 0; mode < 2; mode++) write_mode(file, t, mode);
}

/* ---- the run --------------------------------------------------------------------------------- */

static int try_table(const perf_plan *base, tune_run *run, const char *path) {
    perf_plan plan = *base;
    plan.check = true;
    plan.calls = plan.samples = 1;
    perf_fresh_name(&plan);
    setenv(oh_env_describe(OH_ENV_TUNING)->name, path, 1);
    return perf_start(&plan, tune_try, run);
}

/* The trial reads the table from memory that has no name: nobody else can put another in its place,
 * and nothing is left if it fails. Forked ranks inherit the descriptor. */
static int try_in_memory(const perf_plan *plan, tune_run *run, table *t) {
    char path[64];
    const int file = memfd_create("onehop table", MFD_CLOEXEC);
    if (file < 0) return cli_fail(cli_command, CLI_UNSUPPORTED, "no memory: %s", strerror(errno));
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    onehop_result result =
        output_fill(fcntl(file, F_DUPFD_CLOEXEC, 3), "the table on trial", write_table, t);
    int code = result == ONEHOP_OK
                   ? try_table(plan, run, path)
                   : cli_fail(cli_command, CLI_UNSUPPORTED, "%s", onehop_last_error());
    close(file);
    return code;
}

static int write_tried(const perf_plan *plan, tune_run *run, table *t) {
    int code = try_in_memory(plan, run, t);
    if (code != CLI_OK) return code;
    if (output_write(&plan->file, write_table, t) != ONEHOP_OK)
        return cli_fail(cli_command, CLI_UNSUPPORTED, "%s", onehop_last_error());
    printf("%s: %zu rules for eager calls, %zu for graphs, used and verified\n", plan->file.path,
           run->report->count[ONEHOP_MODE_EAGER], run->report->count[ONEHOP_MODE_GRAPH]);
    return CLI_OK;
}

static int tune(const tune_flags *flags, tune_report *report, int argc, char **argv) {
    perf_plan plan;
    tune_run run = {.report = report, .progress = isatty(STDERR_FILENO)};
    table t = {.plan = &plan, .report = report};
    int code = make_plan(&plan, flags);
    if (code != CLI_OK) return code;
    run.noise = (double)(flags->noise >= 0 ? flags->noise : flags->quick > 0 ? 25 : 5) / 100;
    t.noise = run.noise;
    perf_command_line(argc, argv, t.command_line, sizeof t.command_line);
    perf_fresh_name(&plan);
    code = perf_start(&plan, tune_measure, &run);
    if (run.progress) fprintf(stderr, "\r\033[K");
    if (code != CLI_OK) return code;
    if (report->noise[0]) return cli_fail(cli_command, CLI_NOISE, "%s", report->noise);
    return write_tried(&plan, &run, &t);
}

int cli_tune(int argc, char **argv) {
    tune_flags flags;
    memset(&flags, 0xFF, sizeof flags); /* every number -1 */
    flags.output = "onehop.table";
    flags.nccl_path = NULL;
    static const char usage_text[] =
        "tune [FLAGS]\n"
        "\n"
        "Measures which algorithm and grid is best for which message and writes a tuning table,\n"
        "to be named by ONEHOP_TUNING. Defaults in brackets; SIZE takes K, M, G.\n"
        "\n";
    const int end = options_read(rows, OH_LENGTH(rows), usage_text, argc, argv, &flags);
    if (end != OPTIONS_GO_ON) return end;
    if (perf_refuse_launcher() != CLI_OK) return CLI_USAGE;
    tune_report *report =
        mmap(NULL, sizeof *report, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (report == MAP_FAILED) return cli_fail(cli_command, CLI_UNSUPPORTED, "no shared memory");
    int code = tune(&flags, report, argc, argv);
    munmap(report, sizeof *report);
    return code;
}
