/* Property: ranks may come late and leave early. A rank that is late by seconds between set-up and
 * first call is waited for; one that is destroyed right after its last call harms no peer that is
 * still in it, and is named by peers that call again; abort, deadline and SIGTERM end a waiting
 * call. */
/* labels: quick waits */
#include "fault_kit.h"

#include <sched.h>

#define MAX 4

typedef struct scene {
    onehop_group *groups[MAX];
    onehop_context *contexts[MAX];
    int late;    /* rank */
    int aborter; /* rank */
    const kit_way *way;
    int inside; /* atomic: ranks about to wait */
    double abort_at;
    kit_sight sights[MAX];
    int name;
} scene;

/* ---- late between set-up and first call ------------------------------------------------------ */

static void one_is_late(int rank, int world_size, void *argument) {
    scene *s = argument;
    char name[32];
    kit_buffers *m = kit_buffers_make();
    snprintf(name, sizeof name, "late %d", s->name);
    onehop_context *ctx = kit_open(rank, world_size, name, KIT_PATIENCE_MS);
    if (rank == s->late) sleep_ms(2000);
    kit_good_calls(ctx, m, (unsigned)s->name, 8);
    onehop_destroy(ctx);
    free(m);
}

/* All at once: the waiting costs little. */
static void lateness(void) {
    static scene scenes[MAX + 3];
    pid_t pids[MAX * 4];
    int started = 0, n = 0;
    for (int world_size = 2; world_size <= MAX; world_size++) {
        if (HARNESS_SANITIZED && world_size != 3) continue;
        for (int late = 0; late < world_size; late++) {
            if (world_size == 3 && !HARNESS_SANITIZED) continue;
            scene *s = &scenes[n];
            s->late = late;
            s->name = n++;
            for (int r = 0; r < world_size; r++)
                pids[started++] = start_rank(one_is_late, r, world_size, s);
            if (started + MAX > MAX * 4)
                while (started) CHECK_INT(0, wait_rank(pids[--started]));
        }
    }
    while (started) CHECK_INT(0, wait_rank(pids[--started]));
}

/* ---- leaving --------------------------------------------------------------------------------- */

static void nap(uint64_t *random) {
    uint64_t what = random_next(random) % 8;
    if (what < 4) return;
    if (what < 7) {
        for (uint64_t i = random_next(random) % 200; i; i--)
            __atomic_signal_fence(__ATOMIC_SEQ_CST);
        return;
    }
    sched_yield();
}

#define ROUNDS (HARNESS_SANITIZED ? 60 : 2000)

/* The last call of each round: whoever is out first destroys at once. */
static void leave_after_last_call(int rank, int world_size, void *argument) {
    scene *s = argument;
    (void)world_size;
    uint64_t random = (uint64_t)rank + 1;
    kit_buffers *m = kit_buffers_make();
    for (unsigned round = 0; round < ROUNDS; round++) {
        /* Large messages less often: the small ones are the narrow ones. */
        const kit_way *way = &kit_ways[round % 16 == 15 ? 1 : round % 2 ? 2 : 0];
        onehop_context *ctx = kit_open_on(s->groups[rank], KIT_PATIENCE_MS);
        kit_fill(m->in, way->count, rank, round);
        nap(&random);
        onehop_result result = kit_run(ctx, way, m->in, m->out, NULL);
        onehop_destroy(ctx);
        if (result)
            FAIL("round %u, %s: a peer that left after its last call broke this one: %s", round,
                 way->name, onehop_last_error());
        kit_check(m->out, way->count, onehop_group_size(s->groups[rank]), round);
    }
    free(m);
}

/* A monitor asks for the state all the time: that it sees the peer gone must not break the last
 * call, which that peer has made and this one has yet to make. */
typedef struct monitor {
    onehop_context *context;
    int stop;
} monitor;

static void *watch(void *argument) {
    monitor *w = argument;
    while (!__atomic_load_n(&w->stop, __ATOMIC_RELAXED)) {
        onehop_result result = onehop_status(w->context, NULL);
        CHECK(result == ONEHOP_OK || result == ONEHOP_ERR_PEER_LOST);
    }
    return NULL;
}

static void leave_while_watched(int rank, int world_size, void *argument) {
    scene *s = argument;
    kit_buffers *m = kit_buffers_make();
    for (unsigned round = 0; round < (HARNESS_SANITIZED ? 20u : 100u); round++) {
        const kit_way *way = &kit_ways[round % KIT_WAYS];
        onehop_context *ctx = kit_open_on(s->groups[rank], KIT_PATIENCE_MS);
        monitor w = {ctx, 0};
        pthread_t thread;
        kit_good_calls(ctx, m, 0, round % 3);
        if (rank) CHECK_INT(0, pthread_create(&thread, NULL, watch, &w));
        kit_fill(m->in, way->count, rank, round);
        /* The push path and calls of several chunks end on no rank before all have begun. */
        if (rank && way == &kit_ways[0]) sleep_ms(1 + round % 3);
        onehop_result result = kit_run(ctx, way, m->in, m->out, NULL);
        if (result) FAIL("round %u: %s", round, onehop_last_error());
        kit_check(m->out, way->count, world_size, round);
        if (rank) {
            __atomic_store_n(&w.stop, 1, __ATOMIC_RELAXED);
            pthread_join(thread, NULL);
        }
        onehop_destroy(ctx);
    }
    free(m);
}

/* The same between processes, the group going with the context. */
static void leave_after_last_call_process(int rank, int world_size, void *argument) {
    (void)argument;
    char name[32];
    uint64_t random = (uint64_t)rank + 77;
    kit_buffers *m = kit_buffers_make();
    for (unsigned round = 0; round < (HARNESS_SANITIZED ? 20u : 150u); round++) {
        const kit_way *way = &kit_ways[round % KIT_WAYS];
        snprintf(name, sizeof name, "leaving %u", round);
        onehop_context *ctx = kit_open(rank, world_size, name, KIT_PATIENCE_MS);
        kit_fill(m->in, way->count, rank, round);
        nap(&random);
        CHECK_OK(kit_run(ctx, way, m->in, m->out, NULL));
        onehop_destroy(ctx);
        kit_check(m->out, way->count, world_size, round);
    }
    free(m);
}

/* Peers go on calling: PEER_LOST, soon, naming the rank. */
static void leave_early(int rank, int world_size, void *argument) {
    scene *s = argument;
    char name[32];
    (void)world_size;
    kit_buffers *m = kit_buffers_make();
    snprintf(name, sizeof name, "early %d", s->name);
    onehop_context *ctx = s->groups[0] ? kit_open_on(s->groups[rank], KIT_PATIENCE_MS)
                                       : kit_open(rank, world_size, name, KIT_PATIENCE_MS);
    kit_good_calls(ctx, m, 0, 5);
    if (rank != s->late) {
        double begun = seconds_now();
        onehop_result result = kit_call(ctx, s->way, m, 5);
        CHECK(seconds_now() - begun < 5);
        kit_note(ctx, result, &s->sights[rank]);
        kit_expect(&s->sights[rank], ONEHOP_ERR_PEER_LOST, s->late, s->way->name);
        if (s->groups[0]) CHECK_OK(onehop_group_barrier(s->groups[rank]));
    } else {
        sleep_ms(20);
    }
    onehop_destroy(ctx);
    if (rank == s->late && s->groups[0]) CHECK_OK(onehop_group_barrier(s->groups[rank]));
    free(m);
}

static void leaving(void) {
    scene s;
    for (int world_size = 2; world_size <= 3; world_size++) {
        memset(&s, 0, sizeof s);
        CHECK_OK(onehop_group_open_local(world_size, s.groups));
        if (world_size == 2 || HARNESS_SANITIZED)
            run_threads(world_size, leave_after_last_call, &s);
        for (int way = 0; way < KIT_WAYS; way++) {
            s.way = &kit_ways[way];
            s.late = way % world_size;
            memset(s.sights, 0, sizeof s.sights);
            run_threads(world_size, leave_early, &s);
        }
        run_threads(world_size, leave_while_watched, &s);
        for (int r = 0; r < world_size; r++) onehop_group_close(s.groups[r]);
    }
    memset(&s, 0, sizeof s);
    for (s.late = 0; s.late < 3; s.late++) {
        s.way = &kit_ways[s.late];
        s.name++;
        run_ranks(3, leave_early, &s);
    }
    run_ranks(2, leave_after_last_call_process, NULL);
    run_ranks(3, leave_after_last_call_process, NULL);
}

/* ---- abort, deadline and status beside a waiting call ---------------------------------------- */

/* All ranks but `late` wait in a call; a thread of `aborter` ends it. */
static void wait_and_be_aborted(int rank, int world_size, void *argument) {
    scene *s = argument;
    kit_buffers *m = kit_buffers_make();
    onehop_context *ctx = kit_open_on(s->groups[rank], KIT_PATIENCE_MS);
    s->contexts[rank] = ctx;
    kit_good_calls(ctx, m, 0, 4);
    __atomic_add_fetch(&s->inside, 1, __ATOMIC_ACQ_REL);
    if (rank == s->late) {
        while (__atomic_load_n(&s->inside, __ATOMIC_ACQUIRE) < world_size) sleep_ms(1);
        sleep_ms(30);
        s->abort_at = seconds_now();
        CHECK_OK(onehop_abort(s->contexts[s->aborter]));
        CHECK_OK(onehop_group_barrier(s->groups[rank]));
        /* All that the first call needs may be there already. */
        onehop_result result = kit_call(ctx, s->way, m, 4);
        if (!result) result = kit_call(ctx, s->way, m, 5);
        kit_note(ctx, result, &s->sights[rank]);
        CHECK_OK(onehop_group_barrier(s->groups[rank]));
    } else {
        onehop_result result = kit_call(ctx, s->way, m, 4);
        kit_note(ctx, result, &s->sights[rank]);
        CHECK_OK(onehop_group_barrier(s->groups[rank]));
        CHECK_OK(onehop_group_barrier(s->groups[rank]));
    }
    onehop_destroy(ctx);
    free(m);
}

static void aborting(void) {
    scene s;
    for (int world_size = 2; world_size <= 3; world_size++)
        for (int way = 0; way < KIT_WAYS; way++)
            for (int own = 0; own < 2; own++) { /* the waiting rank's context, or the late one's */
                memset(&s, 0, sizeof s);
                CHECK_OK(onehop_group_open_local(world_size, s.groups));
                s.way = &kit_ways[way];
                s.late = way % world_size;
                s.aborter = own ? s.late : (s.late + 1) % world_size;
                const double slack = kit_slack();
                run_threads(world_size, wait_and_be_aborted, &s);
                for (int r = 0; r < world_size; r++) {
                    kit_expect(&s.sights[r], ONEHOP_ERR_ABORTED, -1, s.way->name);
                    CHECK_CONTAINS("aborted by onehop_abort", s.sights[r].text);
                    const double took = s.sights[r].at - s.abort_at;
                    if (r != s.late && took > 0.1 + slack + kit_slack())
                        FAIL("rank %d of %d ended %.3f s after the abort", r, world_size, took);
                    onehop_group_close(s.groups[r]);
                }
            }
}

/* The deadline is shortened while a call waits, by another thread. */
static void *shorten(void *argument) {
    sleep_ms(100);
    CHECK_OK(onehop_set_timeout(argument, 200));
    return NULL;
}

static void wait_with_a_new_deadline(int rank, int world_size, void *argument) {
    scene *s = argument;
    (void)world_size;
    kit_buffers *m = kit_buffers_make();
    onehop_context *ctx = kit_open_on(s->groups[rank], KIT_PATIENCE_MS);
    kit_good_calls(ctx, m, 0, 4);
    if (rank == 0) {
        pthread_t thread;
        const double begun = seconds_now();
        CHECK_INT(0, pthread_create(&thread, NULL, shorten, ctx));
        kit_note(ctx, kit_call(ctx, &kit_ways[0], m, 4), &s->sights[0]);
        pthread_join(thread, NULL);
        kit_expect(&s->sights[0], ONEHOP_ERR_TIMEOUT, 1, "new deadline");
        CHECK(s->sights[0].at - begun < 0.5 + kit_slack());
        CHECK(s->sights[0].at - begun > 0.15);
    }
    CHECK_OK(onehop_group_barrier(s->groups[rank]));
    onehop_destroy(ctx);
    free(m);
}

/* Another thread asks for the state while calls run. */
typedef struct asker {
    onehop_context *context;
    int stop;
    uint64_t asked;
} asker;

static void *ask(void *argument) {
    asker *a = argument;
    onehop_failure failure;
    while (!__atomic_load_n(&a->stop, __ATOMIC_RELAXED)) {
        CHECK_OK(onehop_status(a->context, &failure));
        CHECK_INT(-1, failure.peer);
        CHECK_OK(onehop_set_timeout(a->context, KIT_PATIENCE_MS));
        a->asked++;
        sched_yield();
    }
    return NULL;
}

static void call_and_be_asked(int rank, int world_size, void *argument) {
    scene *s = argument;
    (void)world_size;
    kit_buffers *m = kit_buffers_make();
    onehop_context *ctx = kit_open_on(s->groups[rank], KIT_PATIENCE_MS);
    pthread_t thread;
    asker a = {ctx, 0, 0};
    CHECK_INT(0, pthread_create(&thread, NULL, ask, &a));
    kit_good_calls(ctx, m, 0, HARNESS_SANITIZED ? 60 : 600);
    __atomic_store_n(&a.stop, 1, __ATOMIC_RELAXED);
    pthread_join(thread, NULL);
    CHECK(a.asked > 0);
    CHECK_OK(onehop_group_barrier(s->groups[rank]));
    onehop_destroy(ctx);
    free(m);
}

static void beside_calls(void) {
    scene s;
    memset(&s, 0, sizeof s);
    CHECK_OK(onehop_group_open_local(2, s.groups));
    run_threads(2, wait_with_a_new_deadline, &s);
    run_threads(2, call_and_be_asked, &s);
    for (int r = 0; r < 2; r++) onehop_group_close(s.groups[r]);
}

/* ---- SIGTERM --------------------------------------------------------------------------------- */

static void wait_for_ever(int rank, int world_size, void *argument) {
    scene *s = argument;
    kit_buffers *m = kit_buffers_make();
    signal(SIGTERM, SIG_DFL);
    onehop_context *ctx = kit_open(rank, world_size, "terminated", KIT_PATIENCE_MS);
    kit_good_calls(ctx, m, 0, 2);
    __atomic_add_fetch(&s->inside, 1, __ATOMIC_ACQ_REL);
    if (rank == 1) sleep_ms(60000);
    kit_call(ctx, &kit_ways[0], m, 2);
    FAIL("rank 0 was to be terminated");
}

static void termination(void) {
    scene *s = shared_memory(sizeof *s);
    pid_t pids[2];
    for (int r = 0; r < 2; r++) pids[r] = start_rank(wait_for_ever, r, 2, s);
    while (__atomic_load_n(&s->inside, __ATOMIC_ACQUIRE) < 2) sleep_ms(1);
    sleep_ms(50);
    const double begun = seconds_now();
    kill(pids[0], SIGTERM);
    CHECK_INT(128 + SIGTERM, wait_rank(pids[0]));
    CHECK(seconds_now() - begun < 0.5 + kit_slack());
    kill(pids[1], SIGTERM);
    CHECK_INT(128 + SIGTERM, wait_rank(pids[1]));
}

int main(void) {
    watchdog(115);
    termination();
    lateness();
    aborting();
    beside_calls();
    leaving();
    return 0;
}
