/* `onehop which`: the rule of the tuning tables that chooses for a call, and why those before it do
 * not. Needs no GPU: the tables of any device can be asked. */
#include "cli/shared/backend.h"
#include "cli/shared/options.h"
#include "plan/explain.h"
#include "device/device.h"

#include <stdio.h>
#include <string.h>

typedef struct which_flags {
    int64_t dtype, operation, ranks, device, capability, max_blocks, graph, in_place, source, row;
    int64_t nccl, multicast;
    const char *algorithm;
} which_flags;

static const char *const dtype_words[] = {"float",   "half", "bfloat16", "float32",
                                          "float16", "bf16", NULL};
static const onehop_dtype dtypes[] = {ONEHOP_FLOAT32, ONEHOP_FLOAT16, ONEHOP_BFLOAT16};
/* The collectives in the order of onehop_collective, then the fused operations in that of
 * oh_operation. */
static const char *const operation_words[] = {"all_reduce",      "reduce_scatter", "all_gather",
                                              "all_reduce_norm", "tp_qknorm",      NULL};
#define COLLECTIVES 3
static const char *const device_words[] = {"auto", "cuda", "host", NULL};
static const char *const source_words[] = {"auto", "workspace", "graph", "multicast", NULL};

#define FIELD(name) offsetof(which_flags, name)
#define MAX_BYTES   ((int64_t)1 << 40)

static const option_row rows[] = {
    {'d', "datatype", OPTION_WORD, FIELD(dtype), 0, 3, dtype_words, "TYPE",
     "float, half or bfloat16 (float)"},
    {'o', "op", OPTION_WORD, FIELD(operation), 0, 0, operation_words, "OP",
     "all_reduce, reduce_scatter, all_gather, all_reduce_norm or tp_qknorm (all_reduce)"},
    {'g', "ranks", OPTION_INTEGER, FIELD(ranks), 1, ONEHOP_MAX_RANKS, NULL, "N",
     "ranks (all GPUs that are here, else 2)"},
    {0, "device", OPTION_WORD, FIELD(device), 0, 0, device_words, "KIND",
     "auto, cuda or host (auto: what is here)"},
    {0, "sm", OPTION_INTEGER, FIELD(capability), 80, 999, NULL, "N",
     "compute capability of the GPUs, 90 for sm_90 (that of the first one, else 90)"},
    {0, "max-blocks", OPTION_INTEGER, FIELD(max_blocks), 2, 1024, NULL, "N",
     "largest grid (multiprocessors of the first GPU, else 132)"},
    {0, "graph", OPTION_SWITCH, FIELD(graph), 0, 0, NULL, NULL, "a captured call"},
    {0, "in-place", OPTION_SWITCH, FIELD(in_place), 0, 0, NULL, NULL, "input and output are one"},
    {0, "algo", OPTION_TEXT, FIELD(algorithm), 0, 0, NULL, "NAME",
     "the call names an algorithm (auto)"},
    {0, "source", OPTION_WORD, FIELD(source), 0, 0, source_words, "NAME",
     "the call names where a pull algorithm reads (auto)"},
    {0, "row", OPTION_SIZE, FIELD(row), 16, 32768, NULL, "SIZE",
     "bytes of a row of all_reduce_norm (8K)"},
    {0, "nccl", OPTION_SWITCH, FIELD(nccl), 0, 0, NULL, NULL, "with the hand-over to NCCL"},
    {0, "multicast", OPTION_SWITCH, FIELD(multicast), 0, 0, NULL, NULL, "with multicast"},
};

static int64_t given(int64_t value, int64_t fallback) {
    return value < 0 ? fallback : value;
}

/* ---- the question ---------------------------------------------------------------------------- */

/* What is here, for what the flags leave open. */
static int describe_group(const which_flags *flags, oh_explain_group *g) {
    const int64_t kind = given(flags->device, ONEHOP_DEVICE_AUTO);
    oh_device_info info = {.capability = 90, .multiprocessors = 132};
    cuda_census census = {0};
    if (kind != ONEHOP_DEVICE_HOST) cuda_take_census(&census);
    if (census.count) {
        oh_device *device;
        onehop_result result = oh_device_open((onehop_device){ONEHOP_DEVICE_CUDA, 0}, 0, &device);
        if (!result) {
            result = device->ops->info(device, &info);
            device->ops->close(device);
        }
        if (result) return cli_fail("which", cli_exit_for(result), "%s", onehop_last_error());
    }
    g->group.kind = kind                ? (onehop_device_kind)kind
                    : census.count != 0 ? ONEHOP_DEVICE_CUDA
                                        : ONEHOP_DEVICE_HOST;
    const bool cuda = g->group.kind == ONEHOP_DEVICE_CUDA;
    g->group.capability = cuda ? (uint32_t)given(flags->capability, info.capability) : 0;
    g->group.world = (int)given(flags->ranks, census.count > 1 ? census.count : 2);
    if (g->group.world > ONEHOP_MAX_RANKS) g->group.world = ONEHOP_MAX_RANKS;
    g->group.nccl = cuda && flags->nccl > 0;
    g->group.multicast = flags->multicast > 0;
    g->max_blocks = cuda ? (uint32_t)given(flags->max_blocks, info.multiprocessors) : 0;
    return CLI_OK;
}

/* Rows of the message of a fused operation. */
static int describe_rows(const which_flags *flags, oh_operation operation, size_t bytes,
                         oh_rows *out) {
    const size_t row = operation == OH_QKNORM ? 8 : (size_t)given(flags->row, 8192) / 16 * 16;
    if (bytes % row)
        return cli_fail("which", CLI_USAGE, "SIZE %zu: expected whole rows of %zu bytes%s", bytes,
                        row, operation == OH_QKNORM ? ", one a token" : "; see --row");
    *out = oh_explain_rows(operation, bytes / row, row);
    return CLI_OK;
}

static int describe_call(const which_flags *flags, onehop_call *call) {
    char list[256];
    call->source = (onehop_source)given(flags->source, ONEHOP_SOURCE_NONE);
    if (!flags->algorithm || !strcmp(flags->algorithm, "auto")) return CLI_OK;
    call->algorithm = oh_algorithm_named(flags->algorithm);
    if (call->algorithm != ONEHOP_ALGORITHM_AUTO) return CLI_OK;
    return cli_fail("which", CLI_USAGE, "--algo '%s': expected one of auto, %s", flags->algorithm,
                    oh_algorithm_list(UINT32_MAX, list, sizeof list));
}

/* ---- the answer ------------------------------------------------------------------------------ */

static void print_rule(void *user, const oh_explained *rule) {
    char place[128];
    (void)user;
    snprintf(place, sizeof place, "%s:%u", rule->table, rule->line);
    printf("  %-20s  %-46s  %s\n", place, rule->text, rule->why ? rule->why : "chosen");
}

static void print_question(const oh_explain_group *g, const oh_question *q) {
    printf("%s of %zu bytes",
           q->rows ? oh_operation_name(q->rows->operation) : onehop_collective_name(q->collective),
           q->bytes);
    if (q->rows) printf(" (%zu rows of %zu)", q->rows->count, q->rows->bytes);
    if (q->collective != ONEHOP_ALL_REDUCE) printf(" a rank");
    if (q->dtype) printf(", %s", onehop_dtype_name(q->dtype));
    printf(", %d rank%s, ", g->group.world, g->group.world == 1 ? "" : "s");
    if (g->group.kind == ONEHOP_DEVICE_CUDA)
        printf("sm_%u, grids to %u blocks", g->group.capability, g->max_blocks);
    else
        printf("host");
    printf(", %s%s\n", q->mode == ONEHOP_MODE_GRAPH ? "captured" : "eager",
           q->in_place ? ", in place" : "");
}

static void print_choice(const onehop_choice *c) {
    printf("runs %s", onehop_algorithm_name(c->algorithm));
    if (c->instead_of)
        printf(" instead of %s, which cannot serve it", onehop_algorithm_name(c->instead_of));
    if (c->source) printf(" over %s", onehop_source_name(c->source));
    if (c->threads) printf(", grid %u x %u", c->blocks, c->threads);
    if (c->blocks && !c->threads) printf(", %u blocks", c->blocks);
    printf(", %u chunk%s, ", c->chunks, c->chunks == 1 ? "" : "s");
    if (c->table)
        printf("by %s:%u\n", c->table, c->line);
    else
        printf("by no rule\n");
}

static int which(size_t bytes, const which_flags *flags) {
    const int64_t operation = given(flags->operation, 0);
    const bool fused = operation >= COLLECTIVES;
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    oh_explain_group group = {0};
    oh_rows message;
    onehop_choice choice;
    oh_question q = {.bytes = bytes,
                     .dtype = dtypes[given(flags->dtype, 0)],
                     .mode = flags->graph > 0 ? ONEHOP_MODE_GRAPH : ONEHOP_MODE_EAGER,
                     .call = &call,
                     .rows = fused ? &message : NULL};
    if (!fused) q.collective = (onehop_collective)operation;
    q.in_place = q.collective == ONEHOP_ALL_REDUCE && !fused && flags->in_place > 0;
    if (q.collective == ONEHOP_ALL_GATHER) q.dtype = 0;
    if (q.dtype && !fused && bytes % onehop_dtype_bytes(q.dtype))
        return cli_fail("which", CLI_USAGE, "SIZE %zu: expected whole elements of %s", bytes,
                        onehop_dtype_name(q.dtype));
    int code = describe_group(flags, &group);
    if (!code) code = describe_call(flags, &call);
    if (!code && fused)
        code = describe_rows(flags, (oh_operation)(operation - COLLECTIVES + OH_NORM), bytes,
                             &message);
    if (code) return code;
    print_question(&group, &q);
    const onehop_result result = oh_explain(&group, &q, print_rule, NULL, &choice);
    if (result) return cli_fail("which", cli_exit_for(result), "%s", onehop_last_error());
    print_choice(&choice);
    return CLI_OK;
}

int cli_which(int argc, char **argv) {
    which_flags flags;
    int64_t bytes = 0;
    const bool sized = argc > 1 && argv[1][0] != '-';
    memset(&flags, 0xFF, sizeof flags); /* every number -1 */
    flags.algorithm = NULL;
    if (sized && (options_number(argv[1], 1, &bytes) || bytes < 1 || bytes > MAX_BYTES))
        return cli_fail("which", CLI_USAGE,
                        "SIZE '%s': expected 1 to 1024G, with an optional K, M or G", argv[1]);
    if (sized) argv[1] = argv[0];
    static const char usage_text[] = "which SIZE [FLAGS]\n"
                                     "\n"
                                     "Says which rule of the tuning tables chooses the algorithm "
                                     "of a message of SIZE bytes (of one rank's\n"
                                     "part, of reduce_scatter and all_gather), and why those "
                                     "before it do not. Defaults in brackets.\n"
                                     "\n";
    const int end =
        options_read(rows, OH_LENGTH(rows), usage_text, argc - sized, argv + sized, &flags);
    if (end != OPTIONS_GO_ON) return end;
    if (!sized) return cli_fail("which", CLI_USAGE, "SIZE is missing; see onehop which --help");
    return which((size_t)bytes, &flags);
}
