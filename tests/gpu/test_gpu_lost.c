/* Property (C07 on GPUs): when one of two processes is killed, stopped or exits in the middle of
 * calls, the other's kernel leaves the GPU, and synchronize and status name the lost rank: at once
 * if its process is gone, within the deadline if it is silent. A new group of the same name works
 * in fresh processes.
 *
 * Each process has a GPU. Two processes that share the only GPU do without MPS, since the death of
 * one of its clients may end the others; the GPU then serves one after the other, milliseconds a
 * call. */
/* labels: timeout=150 */
#include "gpu_ranks.h"

#define DEADLINE_MS    1500u
#define PATIENCE_MS    20000u
#define AT_ONCE        0.5 /* s */
#define AT_ONCE_SHARED 1.5 /* s, where the GPU serves one process after the other */
#define MAX            ((size_t)2 << 20)

typedef enum fate {
    KILLED,
    STOPPED,
    EXITED,
    FATES
} fate;
typedef enum way {
    SMALL,
    LARGE,
    CHUNKED,
    GRAPH,
    IDLE,
    WAYS
} way;

static const char *const fates[FATES] = {"killed", "stopped", "exited without destroy"};
static const char *const ways[WAYS] = {"small calls", "1 MiB calls", "calls in chunks", "replays",
                                       "a pause"};
static const size_t counts[WAYS] = {1000, (size_t)1 << 18, 300000, 5000, 1000};

typedef struct sight {
    int seen; /* atomic; set last */
    onehop_result result, status;
    int peer;
    double at;
    bool idle;
    char text[300];
} sight;

typedef struct scene {
    fate fate;
    way way;
    int victim;
    char name[128];
    uint32_t calls[2]; /* atomic: batches completed */
    int leave, pause;  /* atomic: the victim exits; both stop calling and look only */
    sight sights[2];
    double fell_at; /* written by whoever makes it fall */
} scene;

static float value_of(const gpu_rank *r, uint32_t batch) {
    return (float)((r->rank + 1) * (int)(1 + batch % 1000));
}

static void spread(gpu_rank *r, void *in, uint32_t batch, size_t count) {
    const float value = value_of(r, batch);
    uint32_t word;
    memcpy(&word, &value, 4);
    gpu_fill_words_later(r, in, word, count, r->stream);
}

static void expect_sum(gpu_rank *r, const void *out, uint32_t batch, size_t count) {
    const float want = 3 * (float)(1 + batch % 1000);
    const float *found = r->pinned;
    gpu_read(r, r->pinned, out, count * 4);
    for (size_t i = 0; i < count; i++)
        if (found[i] != want)
            FAIL("rank %d, batch %u, element %zu: expected %g, found %g", r->rank, batch, i,
                 (double)want, (double)found[i]);
}

/* Eight calls, then a wait for them. */
static onehop_result batch(gpu_rank *r, const gpu_graph *graph, void *in, void *out,
                           uint32_t number, size_t count) {
    onehop_result result = ONEHOP_OK;
    spread(r, in, number, count);
    for (int i = 0; i < 8 && !result; i++)
        if (graph)
            gpu_graph_launch(r, graph, r->stream);
        else
            result = onehop_all_reduce(r->context, in, out, count, ONEHOP_FLOAT32, ONEHOP_SUM, NULL,
                                       r->stream);
    const onehop_result waited = onehop_synchronize(r->context, r->stream);
    return result ? result : waited;
}

static void note(gpu_rank *r, sight *s, onehop_result result) {
    onehop_failure failure;
    s->at = seconds_now();
    s->result = result;
    s->status = onehop_status(r->context, &failure);
    s->peer = failure.peer;
    s->idle = gpu_stream_idle(r, r->stream);
    snprintf(s->text, sizeof s->text, "%s", failure.text);
    __atomic_store_n(&s->seen, 1, __ATOMIC_RELEASE);
}

static void leave_if_told(const gpu_rank *r, scene *s) {
    if (r->rank != s->victim || !__atomic_load_n(&s->leave, __ATOMIC_RELAXED)) return;
    s->fell_at = seconds_now();
    _exit(0);
}

static onehop_result look_until_lost(gpu_rank *r, scene *s) {
    const double begun = seconds_now();
    onehop_result result = ONEHOP_OK;
    while (!result && seconds_now() - begun < 10) {
        result = onehop_status(r->context, NULL);
        leave_if_told(r, s);
        sleep_ms(1);
    }
    return result;
}

static void work(gpu_rank *ranks, int here, void *argument) {
    scene *s = argument;
    gpu_rank *r = &ranks[0];
    const size_t count = counts[s->way];
    void *in = gpu_alloc(r, MAX), *out = gpu_alloc(r, MAX);
    gpu_graph graph;
    onehop_result result = ONEHOP_OK;
    (void)here;
    if (s->way == GRAPH) {
        gpu_capture_begin(&r, 1);
        for (int i = 0; i < 8; i++)
            CHECK_OK(onehop_all_reduce(r->context, in, out, count, ONEHOP_FLOAT32, ONEHOP_SUM, NULL,
                                       r->stream));
        gpu_capture_end(&r, 1, &graph);
    }
    gpu_barrier(r);
    for (uint32_t n = 0; !result; n++) {
        if (s->way == IDLE && n == 5) {
            __atomic_fetch_add(&s->calls[r->rank], 5, __ATOMIC_RELAXED);
            result = look_until_lost(r, s);
            if (!result) FAIL("rank %d: status saw nothing in 10 s", r->rank);
            break;
        }
        result = batch(r, s->way == GRAPH ? &graph : NULL, in, out, n, count);
        if (!result && n % 16 == 0) expect_sum(r, out, n, count);
        __atomic_fetch_add(&s->calls[r->rank], 1, __ATOMIC_RELAXED);
        leave_if_told(r, s);
    }
    note(r, &s->sights[r->rank], result);
    CHECK_RESULT(result, onehop_all_reduce(r->context, in, out, count, ONEHOP_FLOAT32, ONEHOP_SUM,
                                           NULL, r->stream));
    gpu_fill(r, out, 0, MAX); /* the GPU and the stream are of use still */
    gpu_free(r, in);
    gpu_free(r, out);
    if (s->way == GRAPH) gpu_graph_free(r, &graph);
}

static void good_calls(gpu_rank *ranks, int here, void *argument) {
    gpu_rank *r = &ranks[0];
    void *in = gpu_alloc(r, MAX), *out = gpu_alloc(r, MAX);
    (void)here, (void)argument;
    for (uint32_t n = 0; n < 20; n++) {
        CHECK_OK(batch(r, NULL, in, out, n, 5000));
        expect_sum(r, out, n, 5000);
    }
    gpu_barrier(r);
    gpu_free(r, in);
    gpu_free(r, out);
}

static gpu_setup setup_of(const scene *s, onehop_config *config, uint32_t timeout_ms) {
    memset(config, 0, sizeof *config);
    config->push_bytes = s->way == CHUNKED ? 65536 : 0;
    config->timeout_ms = timeout_ms;
    return (gpu_setup){.layout = GPU_PROCESSES,
                       .world = 2,
                       .gpus = gpu_is_shared() ? 1 : 2,
                       .config = config,
                       .name = s->name};
}

/* gpu_run_here ends with a barrier that a lost peer does not join: so the rank's process ends by
 * itself. */
static void work_and_exit(gpu_rank *ranks, int here, void *argument) {
    work(ranks, here, argument);
    onehop_destroy(ranks[0].context);
    exit(0);
}

static void rank_main(int rank, int world_size, void *argument) {
    scene *s = argument;
    onehop_config config;
    const gpu_setup setup = setup_of(s, &config, s->fate == STOPPED ? DEADLINE_MS : PATIENCE_MS);
    (void)world_size;
    gpu_run_here(&setup, rank, NULL, work_and_exit, s);
}

static void await_calls(const scene *s, uint32_t min) {
    const double begun = seconds_now();
    for (int r = 0; r < 2; r++)
        while (__atomic_load_n(&s->calls[r], __ATOMIC_RELAXED) < min) {
            if (seconds_now() - begun > 25) FAIL("rank %d made no calls in 25 s", r);
            sleep_ms(1);
        }
}

static void await_sight(const scene *s, int rank) {
    const double begun = seconds_now();
    while (!__atomic_load_n(&s->sights[rank].seen, __ATOMIC_ACQUIRE)) {
        if (seconds_now() - begun > 15)
            FAIL("%s in %s: rank %d still waits after 15 s", fates[s->fate], ways[s->way], rank);
        sleep_ms(1);
    }
}

static void expect_sight(const scene *s, int rank, onehop_result expected) {
    const sight *g = &s->sights[rank];
    if (g->result != expected || g->status != expected || g->peer != s->victim || !g->idle)
        FAIL("rank %d %s in %s: rank %d got %s, status %s, culprit %d, stream %s: %s", s->victim,
             fates[s->fate], ways[s->way], rank, onehop_result_name(g->result),
             onehop_result_name(g->status), g->peer, g->idle ? "idle" : "busy", g->text);
}

static void play(scene *s, unsigned delay_ms) {
    const int other = 1 - s->victim;
    const double at_once = gpu_is_shared() ? AT_ONCE_SHARED : AT_ONCE;
    const onehop_result expected = s->fate == STOPPED ? ONEHOP_ERR_TIMEOUT : ONEHOP_ERR_PEER_LOST;
    double gone_after = 0;
    onehop_config config;
    pid_t pids[2];
    for (int r = 0; r < 2; r++) pids[r] = start_rank(rank_main, r, 2, s);
    await_calls(s, 6);
    sleep_ms(delay_ms);
    if (s->fate != EXITED) s->fell_at = seconds_now();
    if (s->fate == EXITED)
        __atomic_store_n(&s->leave, 1, __ATOMIC_RELAXED);
    else
        kill(pids[s->victim], s->fate == STOPPED ? SIGSTOP : SIGKILL);
    if (s->fate != STOPPED) {
        CHECK_INT(s->fate == EXITED ? 0 : 128 + SIGKILL, wait_rank(pids[s->victim]));
        gone_after = seconds_now() - s->fell_at;
    }
    await_sight(s, other);
    const double took = s->sights[other].at - s->fell_at;
    printf("rank %d %s in %s: the other knew after %.0f ms", s->victim, fates[s->fate],
           ways[s->way], 1e3 * took);
    if (s->fate != STOPPED) printf(" (its process was gone after %.0f ms)", 1e3 * gone_after);
    printf("\n");
    expect_sight(s, other, expected);
    if (s->fate == STOPPED) {
        if (took < 0.8e-3 * DEADLINE_MS || took > 1e-3 * DEADLINE_MS + at_once)
            FAIL("gave up after %.2f s, deadline %u ms", took, DEADLINE_MS);
        kill(pids[s->victim], SIGCONT);
        await_sight(s, s->victim);
        expect_sight(s, s->victim, expected); /* the one that comes late hears that it was */
        CHECK_INT(0, wait_rank(pids[s->victim]));
    } else if (took > at_once) {
        FAIL("the other knew after %.0f ms, expected at most %.0f", 1e3 * took, 1e3 * at_once);
    }
    CHECK_INT(0, wait_rank(pids[other]));
    const gpu_setup again = setup_of(s, &config, PATIENCE_MS);
    gpu_run(&again, good_calls, NULL); /* the same name */
}

int main(void) {
    static const struct {
        fate fate;
        way way;
        int victim;
    } scenes[] = {{KILLED, SMALL, 1},  {KILLED, LARGE, 0}, {KILLED, CHUNKED, 1},
                  {KILLED, GRAPH, 0},  {KILLED, IDLE, 1},  {STOPPED, SMALL, 0},
                  {STOPPED, GRAPH, 1}, {EXITED, SMALL, 0}, {EXITED, CHUNKED, 1}};
    gpu_main(140, 1);
    gpu_leave_mps();
    scene *s = shared_memory(sizeof *s);
    uint64_t random = 7;
    for (size_t i = 0; i < sizeof scenes / sizeof *scenes; i++) {
        memset(s, 0, sizeof *s);
        s->fate = scenes[i].fate;
        s->way = scenes[i].way;
        s->victim = scenes[i].victim;
        snprintf(s->name, sizeof s->name, "%s", own_name("lost"));
        play(s, 5 + (unsigned)(random_next(&random) % 20));
    }
    return 0;
}
