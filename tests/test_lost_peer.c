/* Property: if a rank is killed, stopped or exits in the middle of calls, the others all get the
 * same error naming it, in time. A stopped rank that goes on names itself. A new group of the same
 * name works at once. */
/* labels: quick waits */
#include "fault_kit.h"

#define MAX 4

typedef enum fate {
    KILLED,
    STOPPED,
    EXITED, /* without destroy */
    FATES
} fate;

typedef struct scene {
    const char *name;
    fate fate;
    const kit_way *way;
    int victim, second; /* second: another one, -1 if none */
    pid_t pids[MAX];
    uint32_t calls[MAX]; /* atomic: completed by each rank */
    int leave;           /* atomic: the victim exits now */
    double fell_at;      /* when the victim went */
    kit_sight sights[MAX];
} scene;

static uint32_t timeout_of(const scene *s) {
    return s->fate == STOPPED ? KIT_TIMEOUT_MS : KIT_PATIENCE_MS;
}

static void work(int rank, int world_size, void *argument) {
    scene *s = argument;
    kit_buffers *m = kit_buffers_make();
    onehop_context *ctx = kit_open(rank, world_size, s->name, timeout_of(s));
    onehop_result result = ONEHOP_OK;
    for (unsigned i = 0; !result; i++) {
        result = kit_call(ctx, s->way, m, i);
        __atomic_fetch_add(&s->calls[rank], 1, __ATOMIC_RELAXED);
        if (rank == s->victim && s->fate == EXITED && __atomic_load_n(&s->leave, __ATOMIC_RELAXED))
            _exit(0);
    }
    kit_note(ctx, result, &s->sights[rank]);
    CHECK_RESULT(result, kit_call(ctx, s->way, m, 0));
    onehop_destroy(ctx);
    free(m);
}

/* Survivors and a new rank, or the one that went on, meet again under the same name. */
static void work_and_meet_again(int rank, int world_size, void *argument) {
    scene *s = argument;
    if (!s->sights[rank].seen) work(rank, world_size, s);
    kit_buffers *m = kit_buffers_make();
    onehop_context *ctx = kit_open(rank, world_size, s->name, KIT_PATIENCE_MS);
    kit_good_calls(ctx, m, 0, 6);
    onehop_destroy(ctx);
    free(m);
}

static bool all_saw(const scene *s, int world_size, int except) {
    for (int r = 0; r < world_size; r++)
        if (r != except && r != s->second && !__atomic_load_n(&s->sights[r].seen, __ATOMIC_ACQUIRE))
            return false;
    return true;
}

/* Returns how much time this process lost meanwhile to others on its core: added to the limits. */
static double await_sights(const scene *s, int world_size, int except) {
    double begun = seconds_now(), before = begun, lost = 0;
    while (!all_saw(s, world_size, except)) {
        if (before - begun > 10) FAIL("%s: survivors still wait after 10 s", s->name);
        sleep_ms(1);
        const double now = seconds_now();
        if (now - before > 0.003) lost += now - before;
        before = now;
    }
    return lost;
}

static void await_calls(const scene *s, int world_size, uint32_t count) {
    for (int r = 0; r < world_size; r++)
        while (__atomic_load_n(&s->calls[r], __ATOMIC_RELAXED) < count) sleep_ms(1);
}

static void strike(scene *s, uint64_t *random) {
    sleep_ms(1 + (unsigned)(random_next(random) % 12));
    s->fell_at = seconds_now();
    if (s->fate == EXITED)
        __atomic_store_n(&s->leave, 1, __ATOMIC_RELAXED);
    else
        kill(s->pids[s->victim], s->fate == STOPPED ? SIGSTOP : SIGKILL);
    if (s->second >= 0) kill(s->pids[s->second], SIGKILL);
}

static void restart(scene *s, int rank, int world_size) {
    CHECK_INT(s->fate == EXITED ? 0 : 128 + SIGKILL, wait_rank(s->pids[rank]));
    s->sights[rank].seen = 1;
    s->pids[rank] = start_rank(work_and_meet_again, rank, world_size, s);
}

static void play(scene *s, int world_size, uint64_t *random) {
    const onehop_result expected = s->fate == STOPPED ? ONEHOP_ERR_TIMEOUT : ONEHOP_ERR_PEER_LOST;
    for (int r = 0; r < world_size; r++)
        s->pids[r] = start_rank(work_and_meet_again, r, world_size, s);
    await_calls(s, world_size, 3);
    double slack = kit_slack();
    strike(s, random);
    slack += await_sights(s, world_size, s->victim) + kit_slack();
    int culprit = s->victim;
    for (int r = 0; r < world_size; r++) {
        if (r == s->victim || r == s->second) continue;
        const double took = s->sights[r].at - s->fell_at, limit = s->fate == STOPPED ? 1.2 : 1.0;
        if (s->second >= 0 && s->sights[r].peer == s->second)
            culprit = s->second; /* either, but one */
        kit_expect(&s->sights[r], expected, culprit, s->name);
        if (took > limit + slack) FAIL("%s: rank %d heard of it after %.3f s", s->name, r, took);
        if (s->fate == STOPPED && took < 0.9)
            FAIL("%s: rank %d gave up after %.3f s", s->name, r, took);
    }
    if (s->fate == STOPPED) {
        kill(s->pids[s->victim], SIGCONT);
        await_sights(s, world_size, -1);
        kit_expect(&s->sights[s->victim], expected, s->victim, s->name);
        CHECK_CONTAINS("(this one)", s->sights[s->victim].text);
    } else {
        restart(s, s->victim, world_size);
    }
    if (s->second >= 0) {
        s->fate = KILLED;
        restart(s, s->second, world_size);
    }
    for (int r = 0; r < world_size; r++) CHECK_INT(0, wait_rank(s->pids[r]));
}

int main(int argc, char **argv) {
    static const char *const words[FATES] = {"killed", "stopped", "exited"};
    scene *s = shared_memory(sizeof *s);
    char name[96];
    uint64_t random =
        argc > 1 ? strtoull(argv[1], NULL, 10) : 20261129; /* other moments of death */
    watchdog(115);
    for (int world_size = HARNESS_SANITIZED ? 3 : 2; world_size <= (HARNESS_SANITIZED ? 3 : MAX);
         world_size++)
        for (int how = 0; how < FATES; how++)
            for (int way = 0; way < KIT_WAYS; way++) {
                const int victim = (int)(random_next(&random) % (uint64_t)world_size);
                memset(s, 0, sizeof *s);
                snprintf(name, sizeof name, "rank %d of %d %s in %s", victim, world_size,
                         words[how], kit_ways[way].name);
                s->name = name;
                s->fate = (fate)how;
                s->way = &kit_ways[way];
                s->victim = victim;
                s->second = -1;
                play(s, world_size, &random);
            }
    /* Two at once: one may have sent what the other has not. */
    for (int i = 0; i < (HARNESS_SANITIZED ? 3 : 12); i++) {
        memset(s, 0, sizeof *s);
        snprintf(name, sizeof name, "two ranks killed in %s, %d", kit_ways[i % KIT_WAYS].name, i);
        s->name = name;
        s->way = &kit_ways[i % KIT_WAYS];
        s->victim = 1 + i % 3;
        s->second = (i + 1 + i / 3 % 2) % 3 == i % 3 ? 0 : 1 + (i + 1 + i / 3 % 2) % 3;
        play(s, MAX, &random);
    }
    return 0;
}
