/* Property: if one rank does something else than its peers, all ranks get the same error, in time,
 * naming the same rank. The rank makes other calls, has other settings or another rank's number, or
 * does nothing at all. */
/* labels: quick waits */
#include "fault_kit.h"

#define W 3

/* ---- different calls ------------------------------------------------------------------------- */

typedef enum difference {
    COUNT,
    PATH, /* small on some, large on others */
    DTYPE_SAME_WIDTH,
    DTYPE_SAME_BYTES,
    ALGORITHM,
    BLOCKS,
    ORDER,
    DIFFERENCES,
    PAIR /* of named algorithms */
} difference;

static const char *const words[DIFFERENCES] = {
    "count", "path", "dtype, same width", "dtype, same bytes", "algorithm", "blocks", "order"};

typedef struct scene {
    onehop_group *groups[W];
    kit_sight sights[W];
    difference what;
    int odd;
    size_t count; /* to begin with */
    onehop_algorithm usual, other;
} scene;

static onehop_result differing_call(onehop_context *ctx, const scene *s, bool odd, kit_buffers *m) {
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    size_t count = s->count;
    onehop_dtype dtype = ONEHOP_FLOAT32;
    if (s->what == COUNT) count += odd;
    if (s->what == PATH && odd) count = 40000;
    if (s->what == DTYPE_SAME_WIDTH) dtype = odd ? ONEHOP_FLOAT16 : ONEHOP_BFLOAT16;
    if (s->what == DTYPE_SAME_BYTES && odd) {
        dtype = ONEHOP_BFLOAT16;
        count *= 2;
    }
    if (s->what == ALGORITHM && odd) call.algorithm = ONEHOP_1SHOT_PUSH;
    if (s->what == PAIR) call.algorithm = odd ? s->other : s->usual;
    if (s->what == BLOCKS) {
        call.algorithm = ONEHOP_1SHOT_PUSH;
        call.blocks = odd ? 2 : 3;
    }
    if (s->what == ORDER) {
        onehop_result result = onehop_all_reduce(ctx, m->in, m->out, odd ? 100 : 200,
                                                 ONEHOP_FLOAT32, ONEHOP_SUM, NULL, NULL);
        if (result) return result;
        count = odd ? 200 : 100;
    }
    return onehop_all_reduce(ctx, m->in, m->out, count, dtype, ONEHOP_SUM, &call, NULL);
}

static void one_differs(int rank, int world_size, void *argument) {
    scene *s = argument;
    (void)world_size;
    kit_buffers *m = kit_buffers_make();
    memset(m->in, 0, sizeof m->in);
    onehop_context *ctx = kit_open_on(s->groups[rank], KIT_PATIENCE_MS);
    kit_good_calls(ctx, m, 0, 3);
    if (rank == (s->odd + 1) % W) sleep_ms(5);
    double begun = seconds_now();
    onehop_result result = differing_call(ctx, s, rank == s->odd, m);
    CHECK(seconds_now() - begun < 5); /* long before the deadline */
    kit_note(ctx, result, &s->sights[rank]);
    /* It stays dead, and says so at once. */
    CHECK_RESULT(ONEHOP_ERR_MISMATCH, kit_call(ctx, &kit_ways[0], m, 1));
    CHECK_RESULT(ONEHOP_ERR_MISMATCH, onehop_synchronize(ctx, NULL));
    CHECK_OK(onehop_group_barrier(s->groups[rank]));
    onehop_destroy(ctx);
    /* The group has not suffered. */
    ctx = kit_open_on(s->groups[rank], KIT_PATIENCE_MS);
    kit_good_calls(ctx, m, 0, 2);
    onehop_destroy(ctx);
    free(m);
}

static void expect_mismatch(scene *s, const char *where) {
    memset(s->sights, 0, sizeof s->sights);
    run_threads(W, one_differs, s);
    /* The lowest rank that differs from rank 0. */
    for (int r = 0; r < W; r++)
        kit_expect(&s->sights[r], ONEHOP_ERR_MISMATCH, s->odd ? s->odd : 1, where);
    /* Both values, on all ranks. */
    static const char *const one[DIFFERENCES] = {
        "of 9 float32", "of 40000 float32", "of 8 float16",  "of 16 bfloat16",
        "1shot_push",   "grid 2x",          "of 100 float32"};
    static const char *const usual[DIFFERENCES] = {"of 8 float32",  "of 8 float32", "of 8 bfloat16",
                                                   "of 8 float32",  "host_1shot",   "grid 3x",
                                                   "of 200 float32"};
    for (int r = 0; r < W; r++) {
        CHECK_CONTAINS(", rank 0 all_reduce of ", s->sights[r].text);
        if (s->what >= DIFFERENCES || s->count != 8) continue;
        CHECK_CONTAINS(one[s->what], s->sights[r].text);
        CHECK_CONTAINS(usual[s->what], s->sights[r].text);
    }
}

static void different_calls(void) {
    static const size_t counts[] = {8, 40000};
    scene s;
    memset(&s, 0, sizeof s);
    CHECK_OK(onehop_group_open_local(W, s.groups));
    for (int what = 0; what < DIFFERENCES; what++)
        for (s.odd = 0; s.odd < W; s.odd++) {
            char where[96];
            s.what = (difference)what;
            s.count = what == PATH || what == ALGORITHM ? 8 : counts[s.odd % 2];
            snprintf(where, sizeof where, "%s differs on rank %d", words[what], s.odd);
            expect_mismatch(&s, where);
        }
    for (int r = 0; r < W; r++) onehop_group_close(s.groups[r]);
}

/* Whatever the others wait for, flags, slots or barriers: each algorithm against each other one. */
static void different_algorithms(void) {
    static const onehop_algorithm all[] = {ONEHOP_HOST_1SHOT, ONEHOP_HOST_2SHOT, ONEHOP_1SHOT_PUSH,
                                           ONEHOP_2SHOT_PUSH, ONEHOP_1SHOT_PULL, ONEHOP_2SHOT_PULL};
    scene s;
    memset(&s, 0, sizeof s);
    s.what = PAIR;
    CHECK_OK(onehop_group_open_local(W, s.groups));
    for (int i = 0; i < 36; i++) {
        char where[96];
        if (i % 6 == i / 6) continue;
        s.usual = all[i / 6];
        s.other = all[i % 6];
        s.odd = (i / 6 + i) % W;
        s.count = i % 2 ? 100 : 40000;
        snprintf(where, sizeof where, "%s, but %s on rank %d", onehop_algorithm_name(s.usual),
                 onehop_algorithm_name(s.other), s.odd);
        expect_mismatch(&s, where);
    }
    for (int r = 0; r < W; r++) onehop_group_close(s.groups[r]);
}

/* A rank that makes no call at all: the deadline. */
static void one_is_silent(int rank, int world_size, void *argument) {
    scene *s = argument;
    (void)world_size;
    kit_buffers *m = kit_buffers_make();
    onehop_context *ctx = kit_open_on(s->groups[rank], 300);
    kit_good_calls(ctx, m, 0, 3);
    if (rank == s->odd) {
        sleep_ms(600);
        onehop_failure failure;
        CHECK_RESULT(ONEHOP_ERR_TIMEOUT,
                     onehop_status(ctx, &failure)); /* it hears of it without a call */
        CHECK_INT(rank, failure.peer);
        CHECK_CONTAINS("(this one)", failure.text);
        kit_note(ctx, kit_call(ctx, &kit_ways[0], m, 3), &s->sights[rank]);
    } else {
        double begun = seconds_now();
        onehop_result result = kit_call(ctx, &kit_ways[rank % KIT_WAYS], m, 3);
        CHECK(seconds_now() - begun > 0.25);
        kit_note(ctx, result, &s->sights[rank]);
    }
    CHECK_OK(onehop_group_barrier(s->groups[rank]));
    onehop_destroy(ctx);
    free(m);
}

static void silence(void) {
    scene s;
    memset(&s, 0, sizeof s);
    CHECK_OK(onehop_group_open_local(2, s.groups));
    for (s.odd = 0; s.odd < 2; s.odd++) {
        memset(s.sights, 0, sizeof s.sights);
        run_threads(2, one_is_silent, &s);
        for (int r = 0; r < 2; r++)
            kit_expect(&s.sights[r], ONEHOP_ERR_TIMEOUT, s.odd, "a silent rank");
    }
    for (int r = 0; r < 2; r++) onehop_group_close(s.groups[r]);
}

/* ---- different settings ---------------------------------------------------------------------- */

#define SETTINGS 7

static const char *change_setting(onehop_config *config, int which) {
    switch (which) {
    case 0:
        config->push_bytes = 8192;
        return "push_bytes";
    case 1:
        config->pull_bytes = 8192;
        return "pull_bytes";
    case 2:
        config->flags = ONEHOP_FLAG_EARLY_TRIGGER;
        return "flags";
    case 3:
        config->max_blocks = 4;
        return "max_blocks";
    case 4:
        config->max_registrations = 8;
        return "max_registrations";
    case 5:
        config->push_bytes = 0, config->max_bytes = 1 << 20;
        return "max_bytes";
    default:
        config->push_bytes = 100;
        return "push_bytes"; /* and wrong as well */
    }
}

static void one_is_set_differently(int rank, int world_size, void *argument) {
    scene *s = argument;
    (void)world_size;
    kit_buffers *m = kit_buffers_make();
    for (int which = 0; which < SETTINGS; which++) {
        onehop_config config = kit_config(KIT_PATIENCE_MS), other = config;
        onehop_context *ctx = NULL;
        const char *word = change_setting(&other, which);
        if (rank == s->odd) config = other;
        config.group = s->groups[rank];
        CHECK_RESULT(ONEHOP_ERR_DISAGREEMENT, onehop_create(&config, &ctx));
        CHECK_CONTAINS(word, onehop_last_error());
        CHECK_CONTAINS("it must be equal", onehop_last_error());
        CHECK_CONTAINS(s->odd == 2 ? "on rank 2" : "on rank 1", onehop_last_error());
        CHECK(ctx == NULL);
    }
    /* One rank alone has a wrong value: all hear why. */
    onehop_config config = kit_config(0);
    onehop_context *ctx = NULL;
    config.group = s->groups[rank];
    if (rank == s->odd) config.flags = 0x80;
    CHECK_RESULT(ONEHOP_ERR_ARGUMENT, onehop_create(&config, &ctx));
    CHECK_CONTAINS("flags 0x80", onehop_last_error());
    if (rank == s->odd) config = kit_config(UINT32_MAX);
    config.flags = 0;
    config.group = s->groups[rank];
    CHECK_RESULT(ONEHOP_ERR_ARGUMENT, onehop_create(&config, &ctx));
    CHECK_CONTAINS("timeout_ms", onehop_last_error());
    ctx = kit_open_on(s->groups[rank], KIT_PATIENCE_MS);
    kit_good_calls(ctx, m, 0, 3);
    onehop_destroy(ctx);
    free(m);
}

static void different_settings(void) {
    scene s;
    memset(&s, 0, sizeof s);
    CHECK_OK(onehop_group_open_local(W, s.groups));
    for (s.odd = 0; s.odd < W; s.odd++) run_threads(W, one_is_set_differently, &s);
    for (int r = 0; r < W; r++) onehop_group_close(s.groups[r]);
}

/* ---- who is there ---------------------------------------------------------------------------- */

static void try_place(int rank, int world_size, const char *name, uint32_t wait_ms,
                      onehop_result expected, const char *part) {
    onehop_config config = kit_config(0);
    onehop_context *ctx = NULL;
    config.rank = rank;
    config.world_size = world_size;
    const kit_name own = kit_own_name(name);
    config.name = own.text;
    config.init_timeout_ms = wait_ms;
    CHECK_RESULT(expected, onehop_create(&config, &ctx));
    if (expected) CHECK_CONTAINS(part, onehop_last_error());
    onehop_destroy(ctx);
}

/* Processes 0 and 1 are both rank 0; rank 1 comes when these have failed, and is told. */
static void twice_the_same(int rank, int world_size, void *argument) {
    (void)argument, (void)world_size;
    sleep_ms(100u * (unsigned)rank);
    try_place(rank == 2, 2, "kit twice", 5000, ONEHOP_ERR_DUPLICATE_RANK,
              "both claim rank 0 of group \"kit twice");
}

static void two_are_missing(int rank, int world_size, void *argument) {
    (void)argument, (void)world_size;
    try_place(2 * rank, 4, "kit two missing", 300, ONEHOP_ERR_MISSING_PEER, "ranks 1, 3 of group");
}

int main(void) {
    watchdog(110);
    different_calls();
    different_algorithms();
    silence();
    different_settings();
    run_ranks(3, twice_the_same, NULL);
    run_ranks(2, two_are_missing, NULL);
    return 0;
}
