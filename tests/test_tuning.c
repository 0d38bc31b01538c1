/* Tuning tables: what is refused and where it stands, that every call has a choice which the group
 * can do, which rules are passed over, that a file decides what really runs, at every bound of
 * every rule too, and that all ranks must have the same one. What can be tested of the hand-over to
 * NCCL without a GPU. */
/* labels: quick */
#include "fault_kit.h"
#include "rank_contexts.h"
#include "reference.h"

#include "cli/tune/tune_measure.h"
#include "context/context.h"
#include "device/nccl/nccl.h"
#include "jit/nvrtc.h"
#include "kernels/kernels.h"
#include "protocol/layout.h"

#include <math.h>
#include <sys/stat.h>

#define HEAD "onehop-tuning 1\n"
#define CUDA HEAD "device cuda\n"
#define HOST HEAD "device host\n"

/* ---- reading --------------------------------------------------------------------------------- */

static onehop_result parse(const char *text, size_t bytes, oh_tuning *tuning) {
    memset(tuning, 0, sizeof *tuning);
    onehop_result result = oh_tuning_parse(tuning, "some.table", text, bytes);
    if (result) oh_tuning_free(tuning);
    return result;
}

static void refused(const char *text, int line, const char *expected, const char *found) {
    oh_tuning tuning;
    char place[32];
    snprintf(place, sizeof place, "some.table:%d: expected", line);
    CHECK_RESULT(ONEHOP_ERR_ENVIRONMENT, parse(text, strlen(text), &tuning));
    CHECK_CONTAINS(place, onehop_last_error());
    CHECK_CONTAINS(expected, onehop_last_error());
    CHECK_CONTAINS(found, onehop_last_error());
}

static void refusals(void) {
    static const char nothing[] = "found \"nothing\"";
    refused("", 0, "onehop-tuning 1", nothing);
    refused("# only a comment\n\n", 2, "onehop-tuning 1", nothing);
    refused("onehop-tuning 2\n", 1, "onehop-tuning 1", "onehop-tuning");
    refused("\n\n2 any any 1shot_push - 3 64", 3, "onehop-tuning 1", "\"2\"");
    refused(HEAD "2 any any 1shot_push - 3 64\n", 2, "\"device ...\" before", "\"2\"");
    refused(HEAD "device\n", 2, "one device", nothing);
    refused(HEAD "device cuda host\n", 2, "one device", "\"host\"");
    refused(HEAD "device tpu\n", 2, "host, cuda", "\"tpu\"");
    refused(HEAD "device sm_91\n", 2, "sm_90", "\"sm_91\"");
    refused(HEAD "device sm_70\n", 2, "sm_90", "\"sm_70\"");
    refused(HEAD "device sm_\n", 2, "sm_90", "\"sm_\"");
    refused(CUDA "2 any any 1shot_push - 3\n", 3, "7 words", "found 6");
    refused(CUDA "2 any any 1shot_push - 3 64 1 2 3\n", 3, "7 words", "found 10");
    static const struct {
        const char *rule, *expected, *found;
    } rules[] = {
        {"1 any any 1shot_push - 3 64", "world size of 2..16", "\"1\""},
        {"17 any any 1shot_push - 3 64", "world size", "\"17\""},
        {"8-3 any any 1shot_push - 3 64", "world size", "\"8-3\""},
        {"2- any any 1shot_push - 3 64", "world size", "\"2-\""},
        {"2K any any 1shot_push - 3 64", "world size", "\"2K\""},
        {"-2 any any 1shot_push - 3 64", "world size", "\"-2\""},
        {"99999999999999999999 any any 1shot_push - 3 64", "world size", "\"9999"},
        {"2 both any 1shot_push - 3 64", "eager, graph or any", "\"both\""},
        {"2 any 1X 1shot_push - 3 64", "bytes such as", "\"1X\""},
        {"2 any K 1shot_push - 3 64", "bytes", "\"K\""},
        {"2 any 0 1shot_push - 3 64", "bytes", "\"0\""},
        {"2 any -8M 1shot_push - 3 64", "bytes", "\"-8M\""},
        {"2 any 8M-8M 1shot_push - 3 64", "bytes", "\"8M-8M\""},
        {"2 any any-8M 1shot_push - 3 64", "bytes", "\"any-8M\""},
        {"2 any 1025G 1shot_push - 3 64", "bytes", "\"1025G\""},
        {"2 any 99999999999G 1shot_push - 3 64", "bytes", "\"99999999999G\""},
        {"2 any 1KB 1shot_push - 3 64", "bytes", "\"1KB\""},
        {"2 any any ring - 3 64", "an algorithm: 1shot_push", "\"ring\""},
        {"2 any any local_copy - 3 64", "an algorithm", "\"local_copy\""},
        {"2 any any auto - 3 64", "an algorithm", "\"auto\""},
        {"2 any any 1shot_push graph 3 64", "- for others", "\"graph\""},
        {"2 any any 1shot_pull - 3 64", "workspace, graph or multicast", "\"-\""},
        {"2 any any 1shot_push - 1 64", "blocks: 2..1024", "\"1\""},
        {"2 any any 1shot_push - 1025 64", "blocks", "\"1025\""},
        {"2 any any 1shot_push - - 64", "blocks", "\"-\""},
        {"2 any any host_1shot - 1 1", "for the host host_1shot", "\"host_1shot\""},
        {"2 any any nccl - 3 64", "- for nccl", "\"3\""},
        {"2 any any nccl - - 64", "- for nccl", "\"64\""},
        {"2 any any 1shot_push - 3 48", "a multiple of 32", "\"48\""},
        {"2 any any 1shot_push - 3 0", "threads", "\"0\""},
        {"2 any any 1shot_push - 3 1056", "threads", "\"1056\""},
    };
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        char text[160];
        snprintf(text, sizeof text, CUDA "# fine\n2 any 1K 1shot_push - 3 64 # fine\n%s\n",
                 rules[i].rule);
        refused(text, 5, rules[i].expected, rules[i].found);
    }
    refused(HOST "2 any any 1shot_push - 3 32\n", 3, "1 on the host", "\"32\"");
    refused(HOST "2 any any host_1shot - 2 1\n", 3, "1 for host_1shot", "\"2\"");
    refused(HOST "2 any any nccl - - -\n", 3, "for GPUs nccl", "\"nccl\"");
    oh_tuning tuning;
    static const char binary[] = CUDA "2 any any 1sh\0t_push - 3 64\n";
    CHECK_RESULT(ONEHOP_ERR_ENVIRONMENT, parse(binary, sizeof binary - 1, &tuning));
    CHECK_CONTAINS("1sh?t_push", onehop_last_error());
}

/* Blanks, comments, ends of lines, a missing last one. */
static void layouts(void) {
    static const char neat[] = CUDA "3-8 graph 8M-any 2shot_pull graph 65 max\n";
    static const char wild[] = "\r\n#x\n \tonehop-tuning\t1#\r\n\n  device  cuda # y\n#\n"
                               "3-8\tgraph   8M-any 2shot_pull graph 65 max\r";
    oh_tuning a, b;
    CHECK_OK(parse(neat, sizeof neat - 1, &a));
    CHECK_OK(parse(wild, sizeof wild - 1, &b));
    CHECK_INT(1, a.count);
    CHECK(oh_tuning_hash(&a) == oh_tuning_hash(&b));
    const oh_tuning_rule *rule = &a.rules[0];
    CHECK(rule->device == OH_TUNING_CUDA && rule->world_low == 3 && rule->world_high == 8);
    CHECK(rule->modes == 1u << ONEHOP_MODE_GRAPH && rule->above == 8u << 20 &&
          rule->up_to == UINT64_MAX);
    CHECK(rule->algorithm == ONEHOP_2SHOT_PULL && rule->source == ONEHOP_SOURCE_GRAPH);
    CHECK(rule->blocks == 65 && rule->threads == OH_TUNING_MAX);
    oh_tuning_free(&b);
    b.rules = a.rules, b.count = a.count;
    const uint64_t hash = oh_tuning_hash(&a);
    b.rules[0].threads = 64;
    CHECK(oh_tuning_hash(&b) != hash);
    oh_tuning_free(&a);
}

/* ---- choosing -------------------------------------------------------------------------------- */

static bool multicast; /* of the groups to come */

static void init(oh_dispatch *d, onehop_device_kind kind, uint32_t capability, int world, bool nccl,
                 const oh_tuning *tuning) {
    const oh_dispatch_group group = {kind, capability, world, nccl, multicast};
    onehop_layout_config config = ONEHOP_CONFIG_INIT(onehop_layout_config);
    onehop_layout layout;
    config.device_kind = kind;
    config.world_size = world;
    if (kind == ONEHOP_DEVICE_CUDA) config.max_blocks = 132;
    CHECK_OK(oh_dispatch_init(d, &group, tuning));
    CHECK_OK(oh_layout_plan(&config, &layout, &d->regions));
}

static void check_plan(const oh_dispatch *d, const oh_question *q) {
    oh_plan plan;
    CHECK_OK(oh_dispatch_choose(d, q, &plan));
    const onehop_choice *c = &plan.choice;
    if (c->algorithm == ONEHOP_NCCL) {
        CHECK(d->nccl && plan.kernel < 0 && c->chunks == 1 && !c->blocks && !c->threads);
        return;
    }
    size_t count;
    const oh_kernel *kernels = oh_kernel_list(&count);
    CHECK(plan.kernel >= 0 && plan.kernel == (c->source == ONEHOP_SOURCE_MULTICAST
                                                  ? oh_kernel_find_multicast(c->algorithm, q->dtype)
                                                  : oh_kernel_find(d->kind, OH_PLAIN, c->algorithm,
                                                                   q->dtype, d->world)));
    CHECK(plan.chunk_bytes > 0 && plan.chunk_bytes <= UINT32_MAX);
    CHECK(c->chunks == (q->bytes + plan.chunk_bytes - 1) / plan.chunk_bytes);
    CHECK(c->blocks >= 1 && c->blocks <= d->regions.max_blocks);
    /* What lies in the regions at a time fits there. */
    if (c->algorithm == ONEHOP_GATHER_LL)
        CHECK(c->chunks == 1 && 2 * q->bytes <= d->regions.ll_bytes);
    if (c->algorithm == ONEHOP_GATHER_PUSH)
        CHECK((size_t)d->world * 4 * plan.chunk_bytes <= d->regions.pull_bytes);
    const size_t box = OH_BOX_BYTES(d->regions.pull_bytes, (size_t)d->world);
    if (c->algorithm == ONEHOP_HOST_GATHER)
        CHECK((c->chunks == 1 ? 1 : 4) * plan.chunk_bytes <= d->regions.pull_bytes);
    if (c->algorithm == ONEHOP_HOST_1SHOT || c->algorithm == ONEHOP_HOST_SCATTER)
        CHECK((c->chunks == 1 ? 1 : 2) * plan.chunk_bytes <= box);
    /* Two results of a shard, which is whole lines of 128 bytes. */
    if (c->algorithm == ONEHOP_HOST_2SHOT)
        CHECK(2 * oh_round_up((plan.chunk_bytes + (size_t)d->world - 1) / (size_t)d->world, 128) <=
              box);
    CHECK(c->threads >= 1 && c->threads <= kernels[plan.kernel].max_threads);
    if (d->kind == ONEHOP_DEVICE_CUDA) CHECK(c->blocks >= 2 && c->threads % 32 == 0);
    if (d->kind == ONEHOP_DEVICE_HOST) CHECK(c->threads == 1);
    const bool pull = c->algorithm == ONEHOP_1SHOT_PULL || c->algorithm == ONEHOP_2SHOT_PULL;
    CHECK(pull ? c->source == ONEHOP_SOURCE_WORKSPACE || c->source == ONEHOP_SOURCE_GRAPH ||
                     (c->source == ONEHOP_SOURCE_MULTICAST && multicast)
               : c->source == ONEHOP_SOURCE_NONE);
    if (c->source == ONEHOP_SOURCE_GRAPH)
        CHECK(q->mode == ONEHOP_MODE_GRAPH && !(c->algorithm == ONEHOP_1SHOT_PULL && q->in_place));
}

/* Around powers of two, for every type, mode and place. */
static void check_sizes(const oh_dispatch *d) {
    for (int power = 1; power <= 40; power++)
        for (int type = ONEHOP_FLOAT32; type <= ONEHOP_BFLOAT16; type++)
            for (int how = 0; how < 12; how++) {
                const size_t size = onehop_dtype_bytes((onehop_dtype)type);
                const size_t bytes = ((size_t)1 << power) + (size_t)(how % 3 - 1) * size;
                oh_question q = {bytes,
                                 (onehop_dtype)type,
                                 (onehop_mode)(how / 3 % 2),
                                 how >= 6,
                                 NULL,
                                 ONEHOP_ALL_REDUCE,
                                 NULL};
                if (bytes > 0 && bytes % size == 0 && bytes <= (size_t)1 << 40) check_plan(d, &q);
                if (!bytes || bytes % size || bytes > ((size_t)1 << 40) / (size_t)d->world)
                    continue;
                q.in_place = false;
                q.collective = ONEHOP_REDUCE_SCATTER;
                check_plan(d, &q);
                q.collective = ONEHOP_ALL_GATHER;
                q.dtype = 0;
                q.bytes += (size_t)(how % 2);
                check_plan(d, &q);
            }
}

static void total(void) {
    static const uint32_t capabilities[] = {80, 90, 100, 103, 120};
    /* A file whose rules serve next to nothing leaves the rest to the tables compiled in. */
    static const char sparse[] = CUDA "2-16 graph 4K-8K 1shot_pull graph 1024 1024\n"
                                      "device host\n5 any 7 1shot_push - max max\n";
    oh_tuning tuning, file;
    oh_dispatch d;
    CHECK_OK(oh_tuning_load(&tuning));
    for (int with_file = 0; with_file < 2; with_file++) {
        for (int world = 2; world <= ONEHOP_MAX_RANKS; world++) {
            init(&d, ONEHOP_DEVICE_HOST, 0, world, false, &tuning);
            check_sizes(&d);
            for (int i = 0; i < 10; i++) {
                init(&d, ONEHOP_DEVICE_CUDA, capabilities[i / 2], world, i % 2, &tuning);
                check_sizes(&d);
            }
        }
        if (with_file) break;
        CHECK_OK(parse(sparse, sizeof sparse - 1, &file));
        file.rules = realloc(file.rules, (file.count + tuning.count) * sizeof *file.rules);
        memcpy(file.rules + file.count, tuning.rules, tuning.count * sizeof *tuning.rules);
        file.count += tuning.count;
        oh_tuning_free(&tuning);
        tuning = file;
    }
    oh_tuning_free(&tuning);
}

static oh_plan choose(const oh_dispatch *d, size_t bytes, onehop_mode mode, bool in_place,
                      const onehop_call *call) {
    const oh_question q = {bytes, ONEHOP_BFLOAT16, mode, in_place, call, ONEHOP_ALL_REDUCE, NULL};
    oh_plan plan;
    CHECK_OK(oh_dispatch_choose(d, &q, &plan));
    return plan;
}

#define EXPECT(want, bytes, mode, in_place)                                                        \
    CHECK_TEXT(want, onehop_algorithm_name(                                                        \
                         choose(&d, bytes, ONEHOP_MODE_##mode, in_place, NULL).choice.algorithm))

static void init_text(oh_dispatch *d, const char *text, uint32_t capability, int world, bool nccl) {
    oh_tuning tuning;
    CHECK_OK(parse(text, strlen(text), &tuning));
    init(d, ONEHOP_DEVICE_CUDA, capability, world, nccl, &tuning);
    oh_tuning_free(&tuning);
}

static void passed_over(void) {
    oh_dispatch d;
    /* What a call cannot use. */
    init_text(&d,
              CUDA "2 any 1K 1shot_pull graph 3 64\n"
                   "2 any 2K 2shot_pull graph 3 64\n"
                   "2 any any 1shot_push - 3 64\n",
              90, 2, false);
    EXPECT("1shot_pull", 1024, GRAPH, false);
    EXPECT("2shot_pull", 1024, GRAPH, true);
    EXPECT("1shot_push", 1024, EAGER, false);
    EXPECT("2shot_pull", 1026, GRAPH, false);
    EXPECT("1shot_push", 2050, GRAPH, false);
    CHECK_INT(ONEHOP_SOURCE_GRAPH, choose(&d, 8, ONEHOP_MODE_GRAPH, false, NULL).choice.source);
    /* What the group cannot: multicast, nccl, other families, other numbers of ranks. */
    static const char text[] = CUDA "2 any any 2shot_pull multicast 3 64\n"
                                    "2 any 8-16 nccl - - -\n"
                                    "3-16 any any 2shot_pull workspace 3 64\n"
                                    "device sm_90\n2 any any 1shot_pull workspace 3 64\n"
                                    "device sm_100\n2 any any 2shot_pull workspace 3 64\n"
                                    "device cuda\n2 any any 1shot_push - 3 64\n";
    init_text(&d, text, 90, 2, false);
    EXPECT("1shot_pull", 16, EAGER, false);
    init_text(&d, text, 90, 2, true);
    EXPECT("1shot_pull", 8, EAGER, false);
    EXPECT("nccl", 10, EAGER, false);
    EXPECT("nccl", 16, GRAPH, true);
    EXPECT("1shot_pull", 18, EAGER, false);
    init_text(&d, text, 103, 2, false);
    EXPECT("2shot_pull", 16, EAGER, false);
    init_text(&d, text, 120, 2, false);
    EXPECT("1shot_push", 16, EAGER, false);
    /* 2shot_push gives each rank a unit at least; without a kernel it is never chosen. */
    init_text(&d, CUDA "4 any any 2shot_push - 3 64\n4 any any 1shot_push - 3 64\n", 90, 4, false);
    const bool built =
        oh_kernel_find(ONEHOP_DEVICE_CUDA, OH_PLAIN, ONEHOP_2SHOT_PUSH, ONEHOP_BFLOAT16, 4) >= 0;
    EXPECT("1shot_push", 48, EAGER, false);
    EXPECT(built ? "2shot_push" : "1shot_push", 50, EAGER, false);
    /* A table that lacks something: found, not guessed. */
    init_text(&d, CUDA "2 any 1K 1shot_push - 3 64\n", 90, 2, false);
    const oh_question q = {1026, ONEHOP_BFLOAT16, ONEHOP_MODE_EAGER, false, NULL, ONEHOP_ALL_REDUCE,
                           NULL};
    oh_plan plan;
    CHECK_RESULT(ONEHOP_ERR_INTERNAL, oh_dispatch_choose(&d, &q, &plan));
}

/* Rules over multicast serve where it is on, windows too; unnamed calls only by a rule. */
static void windows_of_multicast(void) {
    static const char text[] = CUDA "2 graph 1K-2K 2shot_pull multicast 5 max\n"
                                    "2 eager 1K 1shot_pull multicast 7 64\n"
                                    "2 any any 2shot_pull workspace 9 32\n";
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    oh_dispatch d;
    oh_plan plan;
    multicast = true;
    init_text(&d, text, 90, 2, false);
    multicast = false;
    CHECK_INT(3, d.rule_count);
    plan = choose(&d, 1024, ONEHOP_MODE_EAGER, true, NULL);
    CHECK_INT(ONEHOP_SOURCE_MULTICAST, plan.choice.source);
    CHECK_INT(ONEHOP_1SHOT_PULL, plan.choice.algorithm);
    CHECK_INT(oh_kernel_find_multicast(ONEHOP_1SHOT_PULL, ONEHOP_BFLOAT16), plan.kernel);
    CHECK_INT(7, plan.choice.blocks);
    plan = choose(&d, 1026, ONEHOP_MODE_EAGER, false, NULL);
    CHECK_INT(ONEHOP_SOURCE_WORKSPACE, plan.choice.source);
    plan = choose(&d, 1024, ONEHOP_MODE_GRAPH, false, NULL);
    CHECK_INT(ONEHOP_SOURCE_WORKSPACE, plan.choice.source);
    plan = choose(&d, 2048, ONEHOP_MODE_GRAPH, false, NULL);
    CHECK_INT(ONEHOP_SOURCE_MULTICAST, plan.choice.source);
    CHECK_INT(512, plan.choice.threads);
    call.algorithm = ONEHOP_2SHOT_PULL;
    call.source = ONEHOP_SOURCE_MULTICAST;
    plan = choose(&d, 64, ONEHOP_MODE_EAGER, false, &call);
    CHECK_INT(oh_kernel_find_multicast(ONEHOP_2SHOT_PULL, ONEHOP_BFLOAT16), plan.kernel);
    init_text(&d, text, 90, 2, false);
    CHECK_INT(1, d.rule_count);
    const oh_question q = {64,  ONEHOP_BFLOAT16, ONEHOP_MODE_EAGER, false, &call, ONEHOP_ALL_REDUCE,
                           NULL};
    CHECK_RESULT(ONEHOP_ERR_ALGORITHM, oh_dispatch_choose(&d, &q, &plan));
}

static void expect_grid(const oh_plan *plan, uint32_t blocks, uint32_t threads) {
    CHECK_INT(blocks, plan->choice.blocks);
    CHECK_INT(threads, plan->choice.threads);
}

static void grids(void) {
    static const char text[] = CUDA "2-8 any 1K 1shot_push - 9 128\n"
                                    "2-8 any any 2shot_pull workspace max max\n"
                                    "2-8 any any 1shot_push - 200 1024\n";
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    oh_dispatch d;
    oh_tuning tuning;
    oh_plan plan;
    init_text(&d, text, 90, 2, false);
    plan = choose(&d, 1024, ONEHOP_MODE_EAGER, false, NULL);
    expect_grid(&plan, 9, 128);
    plan = choose(&d, 1026, ONEHOP_MODE_EAGER, false, NULL);
    expect_grid(&plan, 132, 512); /* max: what the kernel and the GPU take */
    /* By name: the rule of that algorithm, clipped; one that has none takes another's grid. */
    call.algorithm = ONEHOP_1SHOT_PUSH;
    plan = choose(&d, 1026, ONEHOP_MODE_EAGER, false, &call);
    expect_grid(&plan, 132, 1024);
    call.algorithm = ONEHOP_1SHOT_PULL;
    plan = choose(&d, 64, ONEHOP_MODE_EAGER, false, &call);
    expect_grid(&plan, 9, 128);
    call.blocks = 5;
    plan = choose(&d, 64, ONEHOP_MODE_EAGER, false, &call);
    expect_grid(&plan, 5, 128);
    init_text(&d, text, 90, 8, false); /* a kernel of 8 ranks takes 512 threads */
    call.blocks = 0;
    call.algorithm = ONEHOP_1SHOT_PUSH;
    plan = choose(&d, 1026, ONEHOP_MODE_EAGER, false, &call);
    expect_grid(&plan, 132, 512);
    /* NCCL brings its own. */
    init_text(&d, CUDA "2 any any nccl - - -\n2 any any 1shot_push - 7 96\n", 90, 2, true);
    call.algorithm = ONEHOP_2SHOT_PULL;
    plan = choose(&d, 64, ONEHOP_MODE_EAGER, false, &call);
    expect_grid(&plan, 7, 96);
    call.algorithm = ONEHOP_NCCL;
    plan = choose(&d, 64, ONEHOP_MODE_EAGER, false, &call);
    expect_grid(&plan, 0, 0);
    call.blocks = 3;
    const oh_question q = {64,  ONEHOP_BFLOAT16, ONEHOP_MODE_EAGER, false, &call, ONEHOP_ALL_REDUCE,
                           NULL};
    CHECK_RESULT(ONEHOP_ERR_ALGORITHM, oh_dispatch_choose(&d, &q, &plan));
    /* What was measured stays. */
    static const struct {
        size_t bytes;
        uint32_t blocks, threads;
    } measured[] = {{1024, 3, 64},     {4096, 5, 128},      {16384, 9, 128},     {65536, 33, 128},
                    {262144, 65, 256}, {1048576, 129, 512}, {1 << 26, 132, 1024}};
    CHECK_OK(oh_tuning_load(&tuning));
    init(&d, ONEHOP_DEVICE_CUDA, 90, 2, false, &tuning);
    for (size_t i = 0; i < sizeof measured / sizeof *measured; i++)
        for (int mode = 0; mode < 2; mode++) {
            plan = choose(&d, measured[i].bytes, (onehop_mode)mode, false, NULL);
            CHECK_INT(ONEHOP_1SHOT_PUSH, plan.choice.algorithm);
            expect_grid(&plan, measured[i].blocks, measured[i].threads);
        }
    oh_tuning_free(&tuning);
}

/* Buffers of GPUs follow the longest messages that go that way. */
static void sizes_on_gpus(void) {
    static const char text[] = CUDA "2 eager 3M 1shot_push - 3 64\n"
                                    "2 any 100M-any nccl - - -\n"
                                    "2 graph 1M 1shot_push - 3 64\n"
                                    "2 any any 2shot_pull workspace 3 64\n";
    static const struct {
        size_t max_bytes;
        bool uncap;
        size_t usual, push, pull; /* KiB */
    } cases[] = {
        {0, false, 8192, 3072, 32768}, /* what is usual, for all-gathers */
        {0, false, 2048, 2048, 32768},    {0, true, 2048, 3072, 102400},   /* nccl has the rest */
        {8192, false, 1024, 3072, 16384}, {2048, false, 1024, 2048, 4096}, /* twice as much */
        {1, false, 8192, 64, 1024},                                        /* the least */
    };
    onehop_layout usual = {.pull_bytes = (size_t)32 << 20};
    oh_dispatch d;
    size_t push, pull;
    init_text(&d, text, 90, 2, true);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        usual.push_bytes = cases[i].usual << 10;
        oh_dispatch_sizes(&d, cases[i].max_bytes << 10, cases[i].uncap, &usual, &push, &pull);
        CHECK_INT(cases[i].push << 10, push);
        CHECK_INT(cases[i].pull << 10, pull);
    }
    init_text(&d, CUDA "4 any 6M 2shot_push - 3 64\n4 any any 2shot_pull workspace 3 64\n", 90, 4,
              false);
    usual.push_bytes = 1 << 25;
    oh_dispatch_sizes(&d, 0, false, &usual, &push, &pull);
    if (oh_kernel_find(ONEHOP_DEVICE_CUDA, OH_PLAIN, ONEHOP_2SHOT_PUSH, ONEHOP_FLOAT32, 4) >= 0)
        CHECK_INT(3 << 20, push); /* two shards */
    init_text(&d, text, 90, 2, false);
    oh_dispatch_sizes(&d, 0, true, &usual, &push, &pull);
    CHECK_INT(OH_DISPATCH_MAX_BYTES, pull);
    oh_dispatch_sizes(&d, 2000001, false, &usual, &push, &pull);
    CHECK_INT(2002944, push); /* whole pages */
}

/* ---- which rule ------------------------------------------------------------------------------ */

static void expect_rule(const oh_plan *plan, uint32_t line, const char *text) {
    uint32_t found;
    char rule[OH_TUNING_TEXT];
    CHECK(plan->rule != NULL);
    CHECK_TEXT("some.table", oh_tuning_where(plan->rule, &found));
    CHECK_INT(line, found);
    CHECK_TEXT(text, oh_tuning_text(plan->rule, rule));
}

/* Table and line of the rule that chose, of a named algorithm of the one that gave its grid; and
 * what was named, if another runs in its place. */
static void says_which_rule(void) {
    static const char text[] = CUDA "2 any any 1shot_push - 3 64\n# others\n\n"
                                    "3-8 eager 1K 1shot_push - 9 128\n"
                                    "3-8 any 3000-64M 2shot_push - max max\n"
                                    "3-8 any any 2shot_pull workspace 65 512\n";
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    oh_dispatch d;
    oh_plan plan;
    init_text(&d, text, 90, 4, false);
    plan = choose(&d, 1024, ONEHOP_MODE_EAGER, false, NULL);
    expect_rule(&plan, 6, "3-8 eager 1K 1shot_push - 9 128");
    CHECK_INT(ONEHOP_ALGORITHM_AUTO, plan.choice.instead_of);
    plan = choose(&d, 1024, ONEHOP_MODE_GRAPH, false, NULL);
    expect_rule(&plan, 8, "3-8 any any 2shot_pull workspace 65 512");
    plan = choose(&d, 4096, ONEHOP_MODE_GRAPH, false, NULL);
    expect_rule(&plan, 7, "3-8 any 3000-64M 2shot_push - max max");
    call.algorithm = ONEHOP_2SHOT_PUSH;
    plan = choose(&d, 64, ONEHOP_MODE_EAGER, false, &call);
    CHECK_INT(ONEHOP_2SHOT_PUSH, plan.choice.algorithm);
    CHECK_INT(ONEHOP_ALGORITHM_AUTO, plan.choice.instead_of);
    expect_rule(&plan, 6,
                "3-8 eager 1K 1shot_push - 9 128"); /* has none that fits: the grid of this */
    plan = choose(&d, 48, ONEHOP_MODE_EAGER, false, &call);
    CHECK_INT(ONEHOP_1SHOT_PUSH, plan.choice.algorithm);
    CHECK_INT(ONEHOP_2SHOT_PUSH, plan.choice.instead_of);
    expect_rule(&plan, 6, "3-8 eager 1K 1shot_push - 9 128");
}

static char told[8][400];
static int lines_told;

static void keep_told(void *user, onehop_log_level level, const char *line) {
    (void)user;
    if (level != ONEHOP_LOG_DEBUG || !strstr(line, " bytes of ")) return;
    CHECK(lines_told < 8);
    snprintf(told[lines_told++], sizeof told[0], "%s", line);
}

/* The debug log says the rule once for each kind of call; at other levels nothing. */
static void tells_once(int rank, int world_size, void *argument) {
    const bool debug = *(const bool *)argument;
    setenv("ONEHOP_LOG", debug ? "debug" : "info", 1);
    onehop_set_log(keep_told, NULL);
    onehop_context *ctx = kit_open(rank, world_size, debug ? "told" : "not told", KIT_PATIENCE_MS);
    const kit_way ways[] = {{"auto", 256, ONEHOP_ALGORITHM_AUTO},
                            {"named", 8, ONEHOP_2SHOT_PUSH},
                            {"auto", 257, ONEHOP_ALGORITHM_AUTO}};
    kit_buffers *m = kit_buffers_make();
    for (int i = 0; i < 9; i++) CHECK_OK(kit_call(ctx, &ways[i % 3], m, 5));
    onehop_destroy(ctx);
    onehop_set_log(NULL, NULL);
    unsetenv("ONEHOP_LOG");
    free(m);
    CHECK_INT(debug ? 3 : 0, lines_told);
    if (!debug) return;
    CHECK_CONTAINS("all_reduce of 1024 bytes of float32, eager: host_1shot, grid 1x1, 1 chunk, by "
                   "host.table:10 (3 any 64K host_1shot - 1 1)",
                   told[0]);
    CHECK_CONTAINS(
        "of 32 bytes of float32, eager: 1shot_push instead of 2shot_push, which cannot serve "
        "it, grid 3x1, 1 chunk, by no rule",
        told[1]);
    CHECK_CONTAINS("of 1028 bytes", told[2]);
}

static void tells_rules(void) {
    for (int debug = 0; debug < 2; debug++) {
        bool on = debug;
        run_ranks(3, tells_once, &on);
    }
}

/* ---- a file decides -------------------------------------------------------------------------- */

#define W 3

typedef struct tables {
    char folder[64];
    char path[W][96]; /* one for each rank */
} tables;

static void write_table(const char *path, const char *text) {
    FILE *file = fopen(path, "w");
    CHECK(file && fputs(text, file) >= 0 && fclose(file) == 0);
}

/* Every rank reads a file of its own; rank 1 may read `other`. */
static void make_tables(tables *t, const char *text, const char *other) {
    char folder[] = "/tmp/onehop-tuning-XXXXXX";
    CHECK(mkdtemp(folder) != NULL);
    memcpy(t->folder, folder, sizeof folder);
    for (int r = 0; r < W; r++) {
        snprintf(t->path[r], sizeof t->path[r], "%s/rank%d.table", folder, r);
        write_table(t->path[r], r == 1 && other ? other : text);
    }
}

static void remove_tables(tables *t) {
    for (int r = 0; r < W; r++) unlink(t->path[r]);
    rmdir(t->folder);
}

static const char host_table[] = HOST "3 any 1K 1shot_push - 5 1\n"
                                      "3 eager 1K-2K 2shot_pull workspace 4 1\n"
                                      "3 graph 4K 1shot_pull graph 4 1\n"
                                      "3 any 8K host_2shot - 1 1\n";

static void expect_run(onehop_context *ctx, size_t count, onehop_algorithm want, uint32_t blocks) {
    const size_t bytes = count * sizeof(float);
    onehop_choice choice;
    onehop_stats before, after;
    CHECK_OK(would_use(ctx, bytes, ONEHOP_FLOAT32, ONEHOP_SUM, ONEHOP_MODE_EAGER, 0, &choice));
    CHECK_INT(want, choice.algorithm);
    CHECK_INT(blocks, choice.blocks);
    kit_way way = {"by table", count, ONEHOP_ALGORITHM_AUTO};
    kit_buffers *m = kit_buffers_make();
    CHECK_OK(onehop_get_stats(ctx, &before));
    CHECK_OK(kit_call(ctx, &way, m, 5));
    kit_check(m->out, count, W, 5);
    CHECK_OK(onehop_get_stats(ctx, &after));
    CHECK_INT(before.calls_by[want] + 1, after.calls_by[want]);
    free(m);
}

/* A captured call: counted as what would_use says of graphs, and right when replayed. */
static void expect_captured(onehop_context *ctx, size_t count, bool in_place,
                            onehop_algorithm want) {
    const size_t bytes = count * sizeof(float);
    onehop_choice choice;
    onehop_stats before, after;
    onehop_stream stream;
    onehop_host_graph *graph;
    kit_buffers *m = kit_buffers_make();
    float *out = in_place ? m->in : m->out;
    CHECK_OK(
        would_use(ctx, bytes, ONEHOP_FLOAT32, ONEHOP_SUM, ONEHOP_MODE_GRAPH, in_place, &choice));
    CHECK_INT(want, choice.algorithm);
    CHECK_OK(onehop_host_stream_create(&stream));
    CHECK_OK(onehop_get_stats(ctx, &before));
    CHECK_OK(onehop_capture_begin(ctx));
    CHECK_OK(onehop_host_stream_capture_begin(stream));
    CHECK_OK(onehop_all_reduce(ctx, m->in, out, count, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, stream));
    CHECK_OK(onehop_host_stream_capture_end(stream, &graph));
    CHECK_OK(onehop_capture_end(ctx));
    CHECK_OK(onehop_get_stats(ctx, &after));
    CHECK_INT(before.calls_by[want] + 1, after.calls_by[want]);
    kit_fill(m->in, count, onehop_rank(ctx), 7);
    CHECK_OK(onehop_host_graph_launch(graph, stream));
    CHECK_OK(onehop_synchronize(ctx, stream));
    kit_check(out, count, W, 7);
    onehop_host_graph_destroy(graph);
    onehop_host_stream_destroy(stream);
    free(m);
}

static void by_file(int rank, int world_size, void *argument) {
    const tables *t = argument;
    setenv("ONEHOP_TUNING", t->path[rank], 1);
    onehop_context *ctx = kit_open(rank, world_size, "by file", KIT_PATIENCE_MS);
    onehop_choice choice;
    CHECK_OK(would_use(ctx, 1028, ONEHOP_FLOAT32, ONEHOP_SUM, ONEHOP_MODE_EAGER, 0, &choice));
    CHECK_TEXT(t->path[rank], choice.table);
    CHECK_INT(rank == 1 ? 5 : 4, choice.line); /* rank 1's file has a comment more */
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    const onehop_query query = {
        .struct_size = sizeof query, .bytes = 32, .dtype = ONEHOP_FLOAT32, .call = &call};
    call.algorithm = ONEHOP_2SHOT_PUSH;
    CHECK_OK(onehop_would_use(ctx, &query, &choice)); /* less than a unit for each of three */
    CHECK_INT(ONEHOP_1SHOT_PUSH, choice.algorithm);
    CHECK_INT(ONEHOP_2SHOT_PUSH, choice.instead_of);
    CHECK_INT(5, choice.blocks);
    call.algorithm = ONEHOP_NCCL;
    CHECK_RESULT(ONEHOP_ERR_ALGORITHM, onehop_would_use(ctx, &query, &choice));
    CHECK_RESULT(ONEHOP_ERR_NULL, onehop_would_use(ctx, NULL, &choice));
    expect_run(ctx, 256, ONEHOP_1SHOT_PUSH, 5);
    expect_run(ctx, 257, ONEHOP_2SHOT_PULL, 4);
    expect_run(ctx, 513, ONEHOP_HOST_2SHOT, 1);
    expect_run(ctx, 2049, ONEHOP_HOST_1SHOT, 1); /* beyond the file: as without it */
    expect_run(ctx, 70000, ONEHOP_HOST_2SHOT, 1);
    expect_captured(ctx, 256, true, ONEHOP_1SHOT_PUSH);
    expect_captured(ctx, 512, false, ONEHOP_1SHOT_PULL);
    expect_captured(ctx, 512, true, ONEHOP_HOST_2SHOT);
    expect_captured(ctx, 70000, false, ONEHOP_HOST_2SHOT);
    onehop_destroy(ctx);
}

typedef struct refusal {
    tables t;
    onehop_result result;
    const char *words[2];
} refusal;

static void not_by_file(int rank, int world_size, void *argument) {
    const refusal *s = argument;
    onehop_config config = kit_config(KIT_PATIENCE_MS);
    onehop_context *ctx = NULL;
    const kit_name own = kit_own_name(s->words[0]);
    config.rank = rank;
    config.world_size = world_size;
    config.name = own.text;
    setenv("ONEHOP_TUNING", s->t.path[rank], 1);
    CHECK_RESULT(s->result, onehop_create(&config, &ctx));
    CHECK(ctx == NULL);
    for (int i = 0; i < 2; i++) CHECK_CONTAINS(s->words[i], onehop_last_error());
}

static void files(void) {
    tables t;
    make_tables(&t, host_table,
                HOST "# in other words\n3 any 1K 1shot_push - 5 1\n"
                     "3 eager 1024-2048 2shot_pull workspace 4 1\n"
                     "3 graph 0-4K 1shot_pull graph 4 1\n"
                     "3 any 8K host_2shot - 1 1\n");
    run_ranks(W, by_file, &t);
    remove_tables(&t);

    static const struct {
        const char *other;
        onehop_result result;
        const char *words[2];
    } cases[] = {
        {HOST "3 any 1K 1shot_push - 6 1\n",
         ONEHOP_ERR_DISAGREEMENT,
         {"ONEHOP_TUNING) is", "on rank 1"}},
        {HOST "3 any 1K ring - 6 1\n", ONEHOP_ERR_ENVIRONMENT, {"rank1.table:3:", "\"ring\""}},
        {NULL, ONEHOP_ERR_ENVIRONMENT, {"ONEHOP_TUNING: the tuning table", "No such file"}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        refusal s = {.result = cases[i].result, .words = {cases[i].words[0], cases[i].words[1]}};
        make_tables(&s.t, host_table, cases[i].other);
        if (!cases[i].other) unlink(s.t.path[1]);
        run_ranks(W, not_by_file, &s);
        remove_tables(&s.t);
    }
}

static onehop_result load_from(const char *path) {
    oh_tuning tuning;
    setenv("ONEHOP_TUNING", path, 1);
    onehop_result result = oh_tuning_load(&tuning);
    oh_tuning_free(&tuning);
    unsetenv("ONEHOP_TUNING");
    return result;
}

/* A pipe to which nobody writes: neither the table nor a library is waited for. */
static void pipes(const char *folder) {
    char path[128];
    uint32_t version;
    snprintf(path, sizeof path, "%s/pipe", folder);
    CHECK(mkfifo(path, 0600) == 0);
    CHECK_RESULT(ONEHOP_ERR_ENVIRONMENT, load_from(path));
    CHECK_CONTAINS("no regular file", onehop_last_error());
    CHECK_RESULT(ONEHOP_ERR_UNSUPPORTED, oh_nccl_open(path));
    CHECK_CONTAINS("no regular file", onehop_last_error());
    setenv("ONEHOP_NVRTC", path, 1);
    CHECK_RESULT(ONEHOP_ERR_UNSUPPORTED, oh_nvrtc_open(&version));
    CHECK_CONTAINS("no regular file", onehop_last_error());
    unsetenv("ONEHOP_NVRTC");
    unlink(path);
}

static void odd_files(void) {
    tables t;
    make_tables(&t, host_table, NULL);
    CHECK_OK(load_from(t.path[0]));
    CHECK_RESULT(ONEHOP_ERR_ENVIRONMENT, load_from(t.folder));
    CHECK_CONTAINS("no regular file", onehop_last_error());
    CHECK_RESULT(ONEHOP_ERR_ENVIRONMENT, load_from("/dev/zero"));
    CHECK_CONTAINS("no regular file", onehop_last_error());
    pipes(t.folder);
    CHECK(truncate(t.path[0], 2 << 20) == 0);
    CHECK_RESULT(ONEHOP_ERR_ENVIRONMENT, load_from(t.path[0]));
    CHECK_CONTAINS("longer than", onehop_last_error());
    /* More rules than a group may have. */
    FILE *file = fopen(t.path[0], "w");
    fputs(HOST, file);
    for (int i = 1; i <= OH_DISPATCH_RULES; i++)
        fprintf(file, "2 any %d host_1shot - 1 1\n", 4 * i);
    fclose(file);
    setenv("ONEHOP_TUNING", t.path[0], 1);
    onehop_context *contexts[3];
    onehop_config config = kit_config(KIT_PATIENCE_MS);
    CHECK_RESULT(ONEHOP_ERR_ENVIRONMENT, onehop_create_all(&config, 2, NULL, contexts));
    CHECK_CONTAINS("more than 192 rules", onehop_last_error());
    CHECK_OK(onehop_create_all(&config, 3, NULL, contexts)); /* none is for 3 */
    for (int r = 0; r < 3; r++) onehop_destroy(contexts[r]);
    unsetenv("ONEHOP_TUNING");
    remove_tables(&t);
}

/* ---- every bound ----------------------------------------------------------------------------- */

/* Every algorithm and source, both modes, windows, gaps that the default table serves, a bound
 * within a unit. */
static const char bounds_table[] = HOST "2-16 any 64 1shot_push - 3 1\n"
                                        "2-16 eager 100-1K 2shot_push - 3 1\n"
                                        "2-16 graph 1K 1shot_pull graph 3 1\n"
                                        "2-3 any 2K host_1shot - 1 1\n"
                                        "2-16 eager 2050 1shot_pull workspace 4 1\n"
                                        "2-16 graph 4K 2shot_pull graph 5 1\n"
                                        "4-16 any 6K 2shot_push - max 1\n"
                                        "2-16 any 8K-12K 2shot_pull workspace 2 1\n"
                                        "3-8 any 16K host_2shot - 1 1\n"
                                        "2-16 any 20000 1shot_push - 7 1\n";

enum {
    EDGE_CALLS = 360,
    EDGE_MAX = 70000, /* bytes of a call */
    EDGE_GUARD = 64
};

typedef struct edge_call {
    onehop_dtype dtype;
    size_t count, at; /* of the output in the arena */
    bool in_place;
} edge_call;

typedef struct edge_data {
    unsigned char *in[ONEHOP_BFLOAT16 + 1][ONEHOP_MAX_RANKS], *sum[ONEHOP_BFLOAT16 + 1];
    size_t compared;
} edge_data;

/* An element below, at and above each bound of each rule that the group has: of each type, in place
 * and out of place on few ranks, a third of that on many. */
static size_t list_edges(const onehop_context *ctx, edge_call *calls, size_t *room_out) {
    const oh_dispatch *d = &ctx->comm->dispatch;
    const size_t step = onehop_world_size(ctx) > 3 ? 3 : 1;
    size_t n = 0, used = EDGE_GUARD;
    for (size_t i = 0; i < 2 * d->rule_count; i++) {
        const uint64_t bound = i % 2 ? d->rules[i / 2].above : d->rules[i / 2].up_to;
        if (d->rules[i / 2].operation != OH_PLAIN) continue;
        for (size_t k = 0; bound && bound < EDGE_MAX - 4 && k < 18; k++) {
            edge_call *c = &calls[n];
            if ((i / 2 + k + k / 3) % step) continue;
            CHECK(++n <= EDGE_CALLS);
            c->dtype = (onehop_dtype)(1 + k % 3);
            c->count = bound / onehop_dtype_bytes(c->dtype) + k / 3 % 3 - 1;
            c->in_place = k >= 9;
            c->at = used;
            used += oh_round_up(c->count * onehop_dtype_bytes(c->dtype), 64) + EDGE_GUARD;
        }
    }
    *room_out = used;
    return n;
}

/* One call: counted under the algorithm that would_use names, and under no other. */
static void edge_run(onehop_context *ctx, const edge_call *c, const void *in, void *out,
                     onehop_mode mode, onehop_stream stream) {
    const size_t bytes = c->count * onehop_dtype_bytes(c->dtype);
    onehop_choice choice;
    onehop_stats before, after;
    CHECK_OK(would_use(ctx, bytes, c->dtype, ONEHOP_SUM, mode, c->in_place, &choice));
    CHECK_OK(onehop_get_stats(ctx, &before));
    CHECK_OK(onehop_all_reduce(ctx, in, out, c->count, c->dtype, ONEHOP_SUM, NULL, stream));
    CHECK_OK(onehop_get_stats(ctx, &after));
    CHECK_INT(before.bytes + bytes, after.bytes);
    CHECK_INT(before.registrations_used + (choice.source == ONEHOP_SOURCE_GRAPH),
              after.registrations_used);
    for (int a = 0; a < 16; a++)
        if (after.calls_by[a] != before.calls_by[a] + (a == (int)choice.algorithm))
            FAIL("%zu bytes of %s%s, mode %d, %d ranks: %s was promised, %s counted", bytes,
                 onehop_dtype_name(c->dtype), c->in_place ? " in place" : "", (int)mode,
                 onehop_world_size(ctx), onehop_algorithm_name(choice.algorithm),
                 onehop_algorithm_name((onehop_algorithm)a));
}

static void edges_of_mode(onehop_context *ctx, edge_data *data, onehop_mode mode) {
    const int rank = onehop_rank(ctx);
    edge_call calls[EDGE_CALLS];
    size_t room;
    onehop_stream stream = NULL;
    onehop_host_graph *graph = NULL;
    const size_t n = list_edges(ctx, calls, &room);
    unsigned char *arena = aligned_alloc(64, room), *want = aligned_alloc(64, room);
    CHECK(n > 0 && arena && want);
    memset(arena, 0xA5, room);
    memset(want, 0xA5, room);
    if (mode == ONEHOP_MODE_GRAPH) {
        CHECK_OK(onehop_host_stream_create(&stream));
        CHECK_OK(onehop_capture_begin(ctx));
        CHECK_OK(onehop_host_stream_capture_begin(stream));
    }
    for (size_t i = 0; i < n; i++) {
        const edge_call *c = &calls[i];
        const size_t bytes = c->count * onehop_dtype_bytes(c->dtype);
        const unsigned char *in = data->in[c->dtype][rank];
        memcpy(want + c->at, data->sum[c->dtype], bytes);
        if (c->in_place) memcpy(arena + c->at, in, bytes);
        edge_run(ctx, c, c->in_place ? arena + c->at : in, arena + c->at, mode, stream);
    }
    if (mode == ONEHOP_MODE_GRAPH) {
        CHECK_OK(onehop_host_stream_capture_end(stream, &graph));
        CHECK_OK(onehop_capture_end(ctx));
        CHECK_OK(onehop_host_graph_launch(graph, stream));
        CHECK_OK(onehop_synchronize(ctx, stream));
        onehop_host_graph_destroy(graph);
        onehop_host_stream_destroy(stream);
    }
    CHECK_BYTES(want, arena, room); /* outputs and what lies between */
    if (rank == 0) data->compared += n;
    ranks_barrier(ctx); /* peers may read what this rank captured */
    free(arena);
    free(want);
}

static void at_bounds(onehop_context *ctx, int rank, int world, void *argument) {
    edge_data *data = argument;
    const void *in[ONEHOP_MAX_RANKS];
    for (int t = ONEHOP_FLOAT32; t <= ONEHOP_BFLOAT16; t++)
        input_fill(data->in[t][rank], INPUT_REAL, (uint64_t)t, rank, 0,
                   EDGE_MAX / onehop_dtype_bytes((onehop_dtype)t), (onehop_dtype)t);
    ranks_barrier(ctx);
    for (int t = ONEHOP_FLOAT32; t <= ONEHOP_BFLOAT16 && rank == 0; t++) {
        for (int r = 0; r < world; r++) in[r] = data->in[t][r];
        reference_sum(data->sum[t], in, world, EDGE_MAX / onehop_dtype_bytes((onehop_dtype)t),
                      (onehop_dtype)t);
    }
    ranks_barrier(ctx);
    edges_of_mode(ctx, data, ONEHOP_MODE_EAGER);
    edges_of_mode(ctx, data, ONEHOP_MODE_GRAPH);
}

static void bounds(void) {
    static const int worlds[] = {2, 3, 5, 8};
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    edge_data data;
    tables t;
    memset(&data, 0, sizeof data);
    for (int d = ONEHOP_FLOAT32; d <= ONEHOP_BFLOAT16; d++) {
        data.sum[d] = aligned_alloc(64, EDGE_MAX / 64 * 64 + 64);
        for (int r = 0; r < ONEHOP_MAX_RANKS; r++)
            data.in[d][r] = aligned_alloc(64, EDGE_MAX / 64 * 64 + 64);
    }
    config.push_bytes = 8192;
    config.pull_bytes = 16384;
    config.max_registrations = EDGE_CALLS;
    make_tables(&t, bounds_table, NULL);
    setenv("ONEHOP_TUNING", t.path[0], 1);
    for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++)
        ranks_run(RANKS_AS_THREADS, worlds[i], &config, at_bounds, &data);
    unsetenv("ONEHOP_TUNING");
    remove_tables(&t);
    CHECK(data.compared > 1000);
    for (int d = ONEHOP_FLOAT32; d <= ONEHOP_BFLOAT16; d++) {
        for (int r = 0; r < ONEHOP_MAX_RANKS; r++) free(data.in[d][r]);
        free(data.sum[d]);
    }
}

/* ---- sizes on the host ----------------------------------------------------------------------- */

static void sizes(void) {
    static const struct {
        size_t max_bytes, push_bytes, pull_bytes; /* given */
        size_t push, pull;                        /* in force */
    } cases[] = {
        {0, 4096, 65536, 4096, 65536},
        {1 << 20, 8192, 0, 8192, 1 << 20},
        {100000, 0, 4096, 102400, 4096},
        {0, 0, 0, 1 << 20, 1 << 20},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
        onehop_context *contexts[2];
        onehop_stats stats;
        config.device.kind = ONEHOP_DEVICE_HOST;
        config.max_bytes = cases[i].max_bytes;
        config.push_bytes = cases[i].push_bytes;
        config.pull_bytes = cases[i].pull_bytes;
        config.flags = ONEHOP_FLAG_UNCAP; /* of no effect here */
        CHECK_OK(onehop_create_all(&config, 2, NULL, contexts));
        CHECK_OK(onehop_get_stats(contexts[1], &stats));
        CHECK_INT(cases[i].push, stats.push_bytes);
        CHECK_INT(cases[i].pull, stats.pull_bytes);
        CHECK(stats.symmetric_bytes >= 4 * cases[i].push + 2 * cases[i].pull);
        for (int r = 0; r < 2; r++) onehop_destroy(contexts[r]);
    }
}

/* ---- NCCL ------------------------------------------------------------------------------------ */

/* Rank 1 alone switches it on: all hear of it. */
static void nccl_on_the_host(int rank, int world_size, void *argument) {
    onehop_config config = kit_config(KIT_PATIENCE_MS);
    onehop_context *ctx = NULL;
    const kit_name own = kit_own_name("nccl");
    (void)argument;
    config.rank = rank;
    config.world_size = world_size;
    config.name = own.text;
    if (rank == 1) setenv("ONEHOP_NCCL", "1", 1);
    CHECK_RESULT(ONEHOP_ERR_UNSUPPORTED, onehop_create(&config, &ctx));
    CHECK_CONTAINS("NCCL needs GPUs", onehop_last_error());
}

static void nccl(void) {
    onehop_config config = kit_config(KIT_PATIENCE_MS);
    onehop_context *contexts[2];
    run_ranks(W, nccl_on_the_host, NULL);
    config.flags = ONEHOP_FLAG_NCCL;
    CHECK_RESULT(ONEHOP_ERR_UNSUPPORTED, onehop_create_all(&config, 2, NULL, contexts));
    CHECK_CONTAINS("a thread or a process for each rank", onehop_last_error());
    config.world_size = 1;
    CHECK_RESULT(ONEHOP_ERR_UNSUPPORTED, onehop_create(&config, contexts));
    setenv("ONEHOP_NCCL", "yes", 1);
    config.flags = 0;
    CHECK_RESULT(ONEHOP_ERR_ENVIRONMENT, onehop_create(&config, contexts));
    CHECK_CONTAINS("ONEHOP_NCCL", onehop_last_error());
    unsetenv("ONEHOP_NCCL");
    /* The library: none, one that is no NCCL. */
    setenv("ONEHOP_NCCL_LIB", "/nonexistent/libnccl.so", 1);
    CHECK_RESULT(ONEHOP_ERR_UNSUPPORTED, oh_nccl_open(NULL));
    CHECK_CONTAINS("/nonexistent/libnccl.so", onehop_last_error());
    CHECK_CONTAINS("ONEHOP_NCCL_LIB", onehop_last_error());
    CHECK_RESULT(ONEHOP_ERR_UNSUPPORTED, oh_nccl_open("libc.so.6"));
    CHECK_CONTAINS("libc.so.6 has no nccl", onehop_last_error());
}

/* Of the tuner: medians are good once the last three are alike, wherever they begin. */
static void medians_that_settle(void) {
    const double inf = INFINITY, seen[] = {4.3, 4.9, 4.676, 4.678, 4.7}, never[] = {inf, inf, inf},
                 mixed[] = {inf, 4.7, 4.7};
    double us[TUNE_REPEATS];
    CHECK(!tune_settled(seen, 2, 0.05, us));
    CHECK(!tune_settled(seen, 3, 0.05, us) && !tune_settled(seen, 4, 0.0, us));
    CHECK(us[0] == 4.676 && us[1] == 4.678 && us[2] == 4.9);
    CHECK(tune_settled(seen, 5, 0.05, us));
    CHECK(us[TUNE_REPEATS / 2] == 4.678);
    CHECK(tune_settled(never, 3, 0.05, us) && isinf(us[TUNE_REPEATS / 2]));
    CHECK(!tune_settled(mixed, 3, 0.05, us));
}

int main(void) {
    watchdog(110);
    unsetenv("ONEHOP_TUNING");
    refusals();
    layouts();
    total();
    passed_over();
    windows_of_multicast();
    grids();
    says_which_rule();
    tells_rules();
    sizes_on_gpus();
    medians_that_settle();
    odd_files();
    bounds();
    sizes();
    files();
    nccl();
    return 0;
}
