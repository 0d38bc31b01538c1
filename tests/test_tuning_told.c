/* Property: a choice says which rule made it, by table and line, and what was named where another
 * algorithm runs instead; the debug log says it once for each kind of call. */
/* labels: quick */
#include "tuning_kit.h"

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

int main(void) {
    watchdog(110);
    unsetenv("ONEHOP_TUNING");
    says_which_rule();
    tells_rules();
    return 0;
}
