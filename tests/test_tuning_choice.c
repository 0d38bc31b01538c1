/* Property: every call has a choice, by a rule, that its group can do. Rules that the call or the
 * group cannot use are passed over; grids and sizes of buffers follow from the rules; a choice
 * names its rule and line. */
/* labels: quick */
#include "tuning_kit.h"

#include "cli/tune/tune_measure.h"
#include "kernels/kernels.h"

#include <math.h>

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
    total();
    passed_over();
    windows_of_multicast();
    grids();
    says_which_rule();
    sizes_on_gpus();
    medians_that_settle();
    return 0;
}
