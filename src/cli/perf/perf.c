/* `onehop perf`: flags, and the plan made of them and of the machine. Its parts, each above those
 * that follow; `onehop check` and `onehop tune` make plans of their own and run other bodies:
 *   perf_sizes    the body of perf: the sizes one after another
 *   perf_print, perf_json  the results
 *   perf_start    the start of the ranks
 *   perf_setup    what each rank does before and after its body
 *   perf_run      the timed part
 *   perf_nccl     the foreign libraries beside us
 *   perf_check, perf_numbers  inputs, scalar reference, comparison
 *   perf_worker   a worker: its ranks, their memory, keeping step
 *   perf_floor    what the machine could do at best
 *   perf_result, perf_plan  what was measured, what is to be */
#include "cli/perf/perf_sizes.h"
#include "cli/perf/perf_start.h"
#include "cli/shared/options.h"
#include "protocol/algorithms.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* -1: not given. */
typedef struct perf_flags {
    int64_t min_bytes, max_bytes, factor, calls, warmup, check, dtype, op, replays;
    int64_t ranks, device, layout, ranks_per_device, eager, rotate, early_trigger, compare, source,
        hand_over, pin;
    const char *algorithm, *nccl_path, *json_path;
} perf_flags;

/* Three spellings of each, in the order of `dtypes`. */
static const char *const dtype_words[] = {"float", "half", "bfloat16", "float32", "float16",
                                          "bf16",  "fp32", "fp16",     NULL};
static const onehop_dtype dtypes[] = {ONEHOP_FLOAT32, ONEHOP_FLOAT16, ONEHOP_BFLOAT16};
/* The first two mean one thing; behind them, in the order of onehop_collective. */
static const char *const op_words[] = {"sum", "all_reduce", "reduce_scatter", "all_gather", NULL};
static const char *const layout_words[] = {"process", "thread", "single", NULL};
/* In the order of onehop_source. */
static const char *const source_words[] = {"auto", "workspace", "graph", "multicast", NULL};
/* In the order of PEER_. */
static const char *const compare_words[] = {"nccl", "nccl-symm", NULL};

#define FIELD(name) offsetof(perf_flags, name)
#define MAX_BYTES   ((int64_t)1 << 40)

static const option_row rows[] = {
    {'b', "minbytes", OPTION_SIZE, FIELD(min_bytes), 1, MAX_BYTES, NULL, "SIZE",
     "smallest message (1K)"},
    {'e', "maxbytes", OPTION_SIZE, FIELD(max_bytes), 1, MAX_BYTES, NULL, "SIZE",
     "largest message (64M on GPUs, 16M on the host)"},
    {'f', "stepfactor", OPTION_INTEGER, FIELD(factor), 2, 1 << 20, NULL, "N",
     "factor between sizes (4)"},
    {'g', "ranks", OPTION_INTEGER, FIELD(ranks), 1, ONEHOP_MAX_RANKS, NULL, "N",
     "ranks (all GPUs; on the host 2 to 4, by cores)"},
    {'n', "iters", OPTION_INTEGER, FIELD(calls), 1, PERF_MAX_SAMPLES, NULL, "N",
     "calls in a graph, or timed eager calls (GPU: 100, 20 above 1M; host: by time)"},
    {'w', "warmup_iters", OPTION_INTEGER, FIELD(warmup), 0, 1000000, NULL, "N",
     "calls before the timed part (5)"},
    {'G', "cudagraph", OPTION_INTEGER, FIELD(replays), 0, PERF_MAX_SAMPLES, NULL, "N",
     "replays of a graph (GPU: 20); 0 calls eagerly"},
    {0, "eager", OPTION_SWITCH, FIELD(eager), 0, 0, NULL, NULL, "call eagerly, as -G 0"},
    {'c', "check", OPTION_INTEGER, FIELD(check), 0, 1, NULL, "0|1", "verify results (1)"},
    {'d', "datatype", OPTION_WORD, FIELD(dtype), 0, 3, dtype_words, "TYPE",
     "float, half or bfloat16 (float)"},
    {'o', "op", OPTION_WORD, FIELD(op), 0, 0, op_words, "OP",
     "all_reduce or sum, reduce_scatter, all_gather (all_reduce)"},
    {'J', "json", OPTION_TEXT, FIELD(json_path), 0, 0, NULL, "FILE", "write results as JSON"},
    {0, "device", OPTION_WORD, FIELD(device), 0, 0, perf_device_words, "KIND",
     "auto, cuda or host (auto)"},
    {0, "layout", OPTION_WORD, FIELD(layout), 0, 0, layout_words, "KIND",
     "process or thread per rank, or a single thread for all (process; thread on a shared GPU)"},
    {0, "ranks-per-device", OPTION_INTEGER, FIELD(ranks_per_device), 1, ONEHOP_MAX_RANKS, NULL, "K",
     "ranks that share a GPU (1; 2 where there is one GPU and no -g)"},
    {0, "algo", OPTION_TEXT, FIELD(algorithm), 0, 0, NULL, "NAME", "force an algorithm (auto)"},
    {0, "source", OPTION_WORD, FIELD(source), 0, 0, source_words, "NAME",
     "where pull algorithms read: workspace, graph or multicast (auto)"},
    {0, "rotate", OPTION_SWITCH, FIELD(rotate), 0, 0, NULL, NULL,
     "rotate over buffers of five times the cache, instead of one hot buffer"},
    {0, "early-trigger", OPTION_SWITCH, FIELD(early_trigger), 0, 0, NULL, NULL,
     "promise that nothing else spins on these GPUs"},
    {0, "pin", OPTION_SWITCH, FIELD(pin), 0, 0, NULL, NULL,
     "host: keep each rank on a processor of its own"},
    {0, "compare", OPTION_WORDS, FIELD(compare), 0, 0, compare_words, "LIST",
     "nccl, nccl-symm: time them beside, in the same run (GPUs)"},
    {0, "nccl-handover", OPTION_SWITCH, FIELD(hand_over), 0, 0, NULL, NULL,
     "let the tuning table hand long messages to NCCL (GPUs)"},
    {0, "nccl-lib", OPTION_TEXT, FIELD(nccl_path), 0, 0, NULL, "PATH",
     "the library for both (libnccl.so.2)"},
};

static int usage(const char *format, ...) __attribute__((format(printf, 1, 2)));
static int usage(const char *format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return cli_fail("perf", CLI_USAGE, "%s", text);
}

static int64_t given(int64_t value, int64_t fallback) {
    return value < 0 ? fallback : value;
}

/* ---- the plan -------------------------------------------------------------------------------- */

/* A launcher may start this process for itself: then it starts its ranks itself, as without one.
 * That RANK and WORLD_SIZE say it of a single one is meant. */
static bool started_alone(const oh_launcher *by) {
    return by->rank != OH_ENV_RANK && strcmp(oh_env_text(by->size), "1") == 0;
}

/* A launcher makes this process one rank of ranks that somebody else started. */
static int plan_environment(perf_plan *plan, const perf_flags *flags) {
    const char *rank_text = oh_env_text(OH_ENV_RANK), *size_text = oh_env_text(OH_ENV_WORLD_SIZE);
    const oh_launcher *by = oh_launcher_find();
    int64_t rank = -1, size = -1, local = 0;
    plan->env_rank = -1;
    if (!by && (rank_text || size_text))
        return usage("%s is set without %s; torchrun sets both", rank_text ? "RANK" : "WORLD_SIZE",
                     rank_text ? "WORLD_SIZE" : "RANK");
    if (!by || started_alone(by)) return CLI_OK;
    if (oh_env_integer(by->size, 1, ONEHOP_MAX_RANKS, -1, &size) != ONEHOP_OK ||
        oh_env_integer(by->rank, 0, size - 1, -1, &rank) != ONEHOP_OK ||
        oh_launcher_local_rank(rank, &local) != ONEHOP_OK)
        return usage("%s", onehop_last_error());
    if (flags->ranks >= 0 && flags->ranks != size)
        return usage("-g %lld does not fit %s=%lld", (long long)flags->ranks,
                     oh_env_describe(by->size)->name, (long long)size);
    if (flags->layout > 0)
        return usage("--layout %s: ranks started by %s are processes", layout_words[flags->layout],
                     by->name);
    plan->env_rank = (int)rank;
    plan->env_local_rank = (int)local;
    plan->world_size = (int)size;
    return CLI_OK;
}

static int plan_device(perf_plan *plan, const perf_flags *flags) {
    return perf_find_device(plan, flags->device);
}

static int plan_ranks_on_gpus(perf_plan *plan, const perf_flags *flags) {
    if (plan->env_rank >= 0) return CLI_OK;
    /* One GPU alone would have nobody to talk to. */
    if (plan->devices == 1 && flags->ranks < 0 && flags->ranks_per_device < 0)
        plan->ranks_per_device = 2;
    plan->world_size = (int)given(flags->ranks, (int64_t)plan->devices * plan->ranks_per_device);
    if (plan->world_size > ONEHOP_MAX_RANKS) plan->world_size = ONEHOP_MAX_RANKS;
    if (plan->world_size > plan->devices * plan->ranks_per_device)
        return cli_fail(
            "perf", CLI_UNSUPPORTED,
            "-g %d: there are %d GPUs; --ranks-per-device %d would let ranks share them",
            plan->world_size, plan->devices,
            (plan->world_size + plan->devices - 1) / plan->devices);
    if (plan->ranks_per_device > 1 && flags->layout < 0) plan->layout = LAYOUT_THREAD;
    return CLI_OK;
}

static int plan_ranks(perf_plan *plan, const perf_flags *flags) {
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    plan->layout = (perf_layout)given(flags->layout, LAYOUT_PROCESS);
    plan->ranks_per_device = (int)given(flags->ranks_per_device, 1);
    plan->pin = flags->pin > 0;
    if (plan->pin && (plan->device == ONEHOP_DEVICE_CUDA || plan->layout == LAYOUT_SINGLE))
        return usage("--pin: for ranks on the host, a process or a thread each");
    if (plan->device == ONEHOP_DEVICE_CUDA) return plan_ranks_on_gpus(plan, flags);
    if (flags->ranks_per_device > 1)
        return usage("--ranks-per-device %d: the host is one device; use -g",
                     plan->ranks_per_device);
    if (plan->env_rank < 0)
        plan->world_size = (int)given(flags->ranks, cores < 2 ? 2 : cores > 4 ? 4 : cores);
    return CLI_OK;
}

static int plan_sizes(perf_plan *plan, const perf_flags *flags) {
    int64_t element = (int64_t)onehop_dtype_bytes(plan->dtype) * (int64_t)perf_parts(plan);
    int64_t largest = (int64_t)(plan->device == ONEHOP_DEVICE_CUDA ? 64 : 16) << 20;
    int64_t low = given(flags->min_bytes, 1024);
    int64_t high = given(flags->max_bytes, low > largest ? low : largest);
    if (flags->min_bytes < 0 && low > high) low = high;
    if (low > high) return usage("-b %lld is more than -e %lld", (long long)low, (long long)high);
    if (low < element)
        return usage("%s %lld is less than one element of %s%s (%lld bytes)",
                     flags->min_bytes < 0 ? "-e" : "-b", (long long)low,
                     onehop_dtype_name(plan->dtype), perf_parts(plan) > 1 ? " for each rank" : "",
                     (long long)element);
    plan->min_bytes = (uint64_t)low;
    plan->max_bytes = (uint64_t)high;
    plan->factor = (uint64_t)given(flags->factor, 4);
    return CLI_OK;
}

static int plan_algorithm(perf_plan *plan, const perf_flags *flags) {
    char list[256];
    plan->algorithm = ONEHOP_ALGORITHM_AUTO;
    plan->source = (onehop_source)given(flags->source, ONEHOP_SOURCE_NONE);
    /* GPUs share any memory that perf takes. */
    plan->mapped = plan->source == ONEHOP_SOURCE_GRAPH && plan->device == ONEHOP_DEVICE_HOST;
    if (!flags->algorithm || strcmp(flags->algorithm, "auto") == 0) return CLI_OK;
    plan->algorithm = oh_algorithm_named(flags->algorithm);
    if (plan->algorithm != ONEHOP_ALGORITHM_AUTO) return CLI_OK;
    return usage("--algo '%s': expected one of auto, %s", flags->algorithm,
                 oh_algorithm_list(UINT32_MAX, list, sizeof list));
}

static int plan_mode(perf_plan *plan, const perf_flags *flags) {
    bool cuda = plan->device == ONEHOP_DEVICE_CUDA;
    if (flags->eager > 0 && flags->replays > 0)
        return usage("--eager contradicts -G %lld", (long long)flags->replays);
    plan->graph = flags->eager > 0 ? false : flags->replays < 0 ? cuda : flags->replays > 0;
    plan->samples = flags->replays > 0 ? (uint64_t)flags->replays : 0;
    plan->calls = (uint64_t)given(flags->calls, 0);
    plan->warmup = (uint64_t)given(flags->warmup, 5);
    plan->check = given(flags->check, 1) != 0;
    plan->rotate = flags->rotate > 0;
    plan->early_trigger = flags->early_trigger > 0;
    return CLI_OK;
}

static int plan_nccl(perf_plan *plan, const perf_flags *flags) {
    const char *flag = flags->compare > 0 ? "--compare" : "--nccl-handover";
    int64_t on = flags->hand_over > 0;
    plan->peers = (uint32_t)given(flags->compare, 0);
    plan->nccl_path = flags->nccl_path;
    if (!on && oh_env_integer(OH_ENV_NCCL, 0, 1, 0, &on) != ONEHOP_OK)
        return usage("%s", onehop_last_error());
    plan->hand_over = on;
    if (!plan->peers && flags->hand_over <= 0) return CLI_OK;
    if (plan->device != ONEHOP_DEVICE_CUDA)
        return cli_fail("perf", CLI_UNSUPPORTED, "%s: NCCL needs GPUs, the device is host", flag);
    if (plan->layout == LAYOUT_SINGLE || plan->ranks_per_device > 1)
        return cli_fail("perf", CLI_UNSUPPORTED,
                        "%s: needs a process or a thread per GPU, one rank each", flag);
    return CLI_OK;
}

static int plan_json(perf_plan *plan, const perf_flags *flags) {
    return output_open(&plan->file, "-J", flags->json_path);
}

static int make_plan(perf_plan *plan, const perf_flags *flags, int argc, char **argv) {
    static int (*const steps[])(perf_plan *, const perf_flags *) = {
        plan_environment, plan_device, plan_ranks, plan_sizes,
        plan_algorithm,   plan_mode,   plan_nccl,  plan_json,
    };
    plan->dtype = dtypes[given(flags->dtype, 0)];
    if (flags->op > 1) plan->collective = (onehop_collective)(flags->op - 1);
    perf_fresh_name(plan);
    perf_command_line(argc, argv, plan->command_line, sizeof plan->command_line);
    for (size_t i = 0; i < OH_LENGTH(steps); i++) {
        int code = steps[i](plan, flags);
        if (code != CLI_OK) return code;
    }
    return CLI_OK;
}

/* ---- the run --------------------------------------------------------------------------------- */

int cli_perf(int argc, char **argv) {
    perf_flags flags;
    perf_plan plan = {0};
    memset(&flags, 0xFF, sizeof flags); /* every number -1 */
    flags.algorithm = flags.nccl_path = flags.json_path = NULL;
    static const char usage_text[] = "perf [FLAGS]\n"
                                     "\n"
                                     "Times and verifies all-reduce, reduce-scatter or all-gather. "
                                     "Defaults in brackets; SIZE takes K, M, G.\n"
                                     "\n";
    const int end = options_read(rows, OH_LENGTH(rows), usage_text, argc, argv, &flags);
    if (end != OPTIONS_GO_ON) return end;
    int code = make_plan(&plan, &flags, argc, argv);
    return code == CLI_OK ? perf_start(&plan, perf_all_sizes, NULL) : code;
}
