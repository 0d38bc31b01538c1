/* Property: of captured calls that read the ranks' memory, a rank that replays another graph than
 * its peers gets an error, and no rank says OK with wrong sums after a peer has given up. This is
 * the view of a program; test_direct_lanes has the bodies. */
/* The program writes what a peer still reads: no tsan. */
/* labels: quick tsan-off */
#include "fault_kit.h"

#define COUNT 4096

typedef struct job {
    onehop_algorithm algorithm;
    size_t counts[2];
    bool by_abort;
    onehop_group *groups[2];
    onehop_context *contexts[2];
    float *in[2][2], *out[2][2]; /* [rank][graph] */
    onehop_host_graph *graphs[2][2];
} job;

static onehop_device host(void) {
    return (onehop_device){.kind = ONEHOP_DEVICE_HOST};
}

static void capture(job *j, int rank, onehop_stream stream) {
    onehop_context *context = j->contexts[rank];
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    onehop_stats stats;
    call.algorithm = j->algorithm;
    call.blocks = 2;
    CHECK_OK(onehop_capture_begin(context));
    for (int g = 0; g < 2; g++) {
        CHECK_OK(onehop_mem_alloc(host(), COUNT * 4, (void **)&j->in[rank][g]));
        CHECK_OK(onehop_mem_alloc(host(), COUNT * 4, (void **)&j->out[rank][g]));
        CHECK_OK(onehop_host_stream_capture_begin(stream));
        CHECK_OK(onehop_all_reduce(context, j->in[rank][g], j->out[rank][g], j->counts[g],
                                   ONEHOP_FLOAT32, ONEHOP_SUM, &call, stream));
        CHECK_OK(onehop_host_stream_capture_end(stream, &j->graphs[rank][g]));
    }
    CHECK_OK(onehop_capture_end(context));
    CHECK_OK(onehop_get_stats(context, &stats));
    CHECK_INT(2, stats.registrations_direct);
    for (int g = 0; g < 2; g++)
        for (int i = 0; i < COUNT; i++)
            j->in[rank][g][i] = (float)(1 + rank + 10 * g), j->out[rank][g][i] = -1;
}

/* A context and two graphs, on all ranks when this returns. */
static onehop_stream begin(job *j, int rank) {
    onehop_stream stream;
    CHECK_OK(onehop_host_stream_create(&stream));
    j->contexts[rank] = kit_open_on(j->groups[rank], KIT_PATIENCE_MS);
    capture(j, rank, stream);
    CHECK_OK(onehop_group_barrier(j->groups[rank]));
    return stream;
}

static void release(job *j, int rank, onehop_stream stream) {
    onehop_destroy(j->contexts[rank]);
    onehop_host_stream_destroy(stream);
    CHECK_OK(onehop_group_barrier(j->groups[rank]));
    for (int g = 0; g < 2; g++) {
        onehop_host_graph_destroy(j->graphs[rank][g]);
        onehop_mem_free(j->in[rank][g]);
        onehop_mem_free(j->out[rank][g]);
    }
}

/* Rank r replays graph r. */
static void crossed(int rank, int world, void *argument) {
    job *j = argument;
    const onehop_stream stream = begin(j, rank);
    (void)world;
    CHECK_OK(onehop_host_graph_launch(j->graphs[rank][rank], stream));
    CHECK_RESULT(ONEHOP_ERR_MISMATCH, onehop_synchronize(j->contexts[rank], stream));
    CHECK_CONTAINS(j->counts[1] == COUNT ? "ranks 0 and 1 replayed different captured calls"
                                         : "rank 1 made all_reduce of 1000 float32",
                   onehop_last_error());
    CHECK_OK(onehop_group_barrier(j->groups[rank]));
    for (int g = 0; g < 2; g++)
        for (int i = 0; i < COUNT; i++)
            if (j->out[rank][g][i] != -1)
                FAIL("rank %d: element %d of graph %d's output was stored", rank, i, g);
    release(j, rank, stream);
}

/* ---- giving up ------------------------------------------------------------------------------- */
static char *held_page;        /* rank 0 is held when it stores there */
static int is_held, may_go_on; /* atomic */

static void hold(int number, siginfo_t *info, void *where) {
    (void)number, (void)where;
    if ((char *)((uintptr_t)info->si_addr & ~(uintptr_t)4095) != held_page) _exit(3);
    __atomic_store_n(&is_held, 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&may_go_on, __ATOMIC_ACQUIRE)) usleep(1000);
    mprotect(held_page, 4096, PROT_READ | PROT_WRITE);
}

static void *aborter(void *argument) {
    const job *j = argument;
    while (!__atomic_load_n(&is_held, __ATOMIC_ACQUIRE)) usleep(1000);
    usleep(20000);
    CHECK_OK(onehop_abort(j->contexts[1]));
    return NULL;
}

static void first_rank(job *j) {
    onehop_context *context = j->contexts[0];
    const onehop_result wanted = j->by_abort ? ONEHOP_ERR_ABORTED : ONEHOP_ERR_TIMEOUT;
    float small[4] = {0};
    held_page = (char *)j->out[0][0] + 4096;
    CHECK(!mprotect(held_page, 4096, PROT_NONE));
    CHECK_OK(onehop_host_graph_launch(j->graphs[0][0], NULL));
    CHECK_RESULT(wanted, onehop_synchronize(context, NULL));
    CHECK_RESULT(wanted, onehop_status(context, NULL));
    CHECK_RESULT(wanted, onehop_all_reduce(context, small, small, 4, ONEHOP_FLOAT32, ONEHOP_SUM,
                                           NULL, NULL));
}

static void second_rank(job *j) {
    onehop_context *context = j->contexts[1];
    float *in = j->in[1][0], *out = j->out[1][0];
    pthread_t helper;
    if (j->by_abort)
        CHECK(!pthread_create(&helper, NULL, aborter, j));
    else
        CHECK_OK(onehop_set_timeout(context, 100));
    CHECK_OK(onehop_host_graph_launch(j->graphs[1][0], NULL));
    CHECK_RESULT(j->by_abort ? ONEHOP_ERR_ABORTED : ONEHOP_ERR_TIMEOUT,
                 onehop_synchronize(context, NULL));
    if (j->by_abort) pthread_join(helper, NULL);
    while (!__atomic_load_n(&is_held, __ATOMIC_ACQUIRE)) usleep(1000);
    for (int i = 0; i < COUNT; i++) in[i] = 777, out[i] = 5555;
    __atomic_store_n(&may_go_on, 1, __ATOMIC_RELEASE);
    usleep(50000);
    for (int i = 0; i < COUNT; i++)
        if (out[i] != 5555) FAIL("element %d was stored after the call had ended", i);
}

/* In the ranks' own threads, where the handler can hold one. Rank 1 ends its call while rank 0 is
 * in the midst of it, and writes to the call's memory. */
static void giving_up(int rank, int world, void *argument) {
    job *j = argument;
    const onehop_stream stream = begin(j, rank);
    (void)world;
    if (rank == 0)
        first_rank(j);
    else
        second_rank(j);
    CHECK_OK(onehop_group_barrier(j->groups[rank]));
    release(j, rank, stream);
}

static void run(job *j, rank_fn fn) {
    is_held = may_go_on = 0;
    CHECK_OK(onehop_group_open_local(2, j->groups));
    run_threads(2, fn, j);
    for (int r = 0; r < 2; r++) onehop_group_close(j->groups[r]);
}

int main(void) {
    struct sigaction action;
    watchdog(110);
    memset(&action, 0, sizeof action);
    action.sa_sigaction = hold;
    action.sa_flags = SA_SIGINFO;
    CHECK(!sigaction(SIGSEGV, &action, NULL));
    for (int k = 0; k < 4; k++) {
        job j = {.algorithm = k % 2 ? ONEHOP_2SHOT_PULL : ONEHOP_1SHOT_PULL,
                 .counts = {COUNT, k / 2 ? 1000 : COUNT},
                 .by_abort = k / 2};
        run(&j, crossed);
        j.counts[1] = COUNT;
        run(&j, giving_up);
    }
    return 0;
}
