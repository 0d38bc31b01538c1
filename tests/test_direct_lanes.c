/* Property: captured pull calls that read the ranks' memory directly store nothing wrong and say OK
 * only with right sums, when something goes wrong:
 *   crossed   ranks replay different captured calls: all of them say MISMATCH, and no byte is
 *             stored, though the data blocks run before the signature block
 *   gives up  the last rank's deadline ends its wait for rank 0, which is held at the n-th access
 *             of its call, for all n; then it writes to its input. A rank that says OK has the
 *             right sums, and no more than the unit in flight is stored to the last rank's output
 *             after its call
 * Also a program that tests/mutants builds from altered sources.
 *
 * test_direct_lanes [deadline in ms [calls in percent]] */
/* The program writes what a peer still reads: no tsan. */
/* labels: quick tsan-off timeout=240 */
#define LANES_ALL_BODIES
#define LANES_HOST_PATHS
#include "lanes.h"

#include <semaphore.h>

#define BLOCKS 2 /* one of data, one for the signature */
#define TYPE   ONEHOP_BFLOAT16

static unsigned deadline_ms = 60000, step = 1;

/* One rank's part in the call at hand. */
typedef struct part {
    lanes_rank *own;
    oh_host_kernel kernel;
    int lane;
    unsigned late_ms; /* before the lane begins */
} part;

static void *part_main(void *argument) {
    const part *p = argument;
    sleep_ms(p->late_ms);
    oh_host_run_worker(p->kernel, &p->own->args, BLOCKS, (uint32_t)p->lane, 2);
    return NULL;
}

static oh_host_kernel kernel_of(const lanes_group *g, lanes_algorithm algorithm) {
    const lanes_call call = {.algorithm = algorithm, .dtype = TYPE};
    return lanes_kernel(g, &call);
}

static void open_group(lanes_group *g, int world) {
    lanes_open(g, world, 1, deadline_ms);
}

/* The arguments of captured call `index` of `count` elements, whose buffers are the ranks' in and
 * out of `data`. */
static void captured(lanes_group *g, int rank, lanes_group *data, uint32_t index, size_t count) {
    lanes_rank *own = &g->ranks[rank];
    oh_args *a = &own->args;
    memset(a, 0, sizeof *a);
    lanes_addresses(own);
    a->in = (uintptr_t)data->ranks[rank].in.data;
    a->out = (uintptr_t)data->ranks[rank].out.data;
    a->count = count;
    a->units = (oh_u32)((count * 2 + 15) / 16);
    a->whole = (oh_u32)(count * 2 / 16);
    a->chunk_bytes = 16ull * a->units;
    a->chunks = 1;
    a->dtype = TYPE;
    a->hash = (oh_u32)count * 2654435761u;
    a->blocks = BLOCKS;
    a->registration = (uintptr_t)&own->registration;
    a->tag = own->registration.tag = 7; /* a rank's own number: alike by chance */
    own->registration.mode = OH_REGISTRATION_DIRECT;
    own->registration.identity = OH_REGISTRATION_IDENTITY(index);
    for (int r = 0; r < g->world; r++) {
        own->registration.in[r] = (uintptr_t)data->ranks[r].in.data;
        own->registration.out[r] = (uintptr_t)data->ranks[r].out.data;
    }
}

static void place(lanes_group *data, size_t count) {
    for (int r = 0; r < data->world; r++) {
        lanes_rank *own = &data->ranks[r];
        input_fill(guarded_place(&own->in, count * 2, 0), INPUT_REAL, 1, r, 0, count, TYPE);
        memset(guarded_place(&own->out, count * 2, 0), 0x5A, count * 2);
    }
}

/* ---- crossed --------------------------------------------------------------------------------- */
/* Rank 0 to world - 2 replay call 0, the last rank call 1, which is as long or shorter, and may be
 * of the other algorithm. `staged`: the last rank replays call 0 too, but has its registration
 * filled as staged. */
static void crossed(int world, lanes_algorithm first, lanes_algorithm last, size_t count0,
                    size_t count1, bool staged) {
    lanes_group g, data[2];
    part parts[ONEHOP_MAX_RANKS][2];
    pthread_t threads[ONEHOP_MAX_RANKS][2];
    char what[100];
    snprintf(what, sizeof what, "%d ranks, calls of %zu and %zu elements", world, count0, count1);
    open_group(&g, world);
    for (int i = 0; i < 2; i++) {
        open_group(&data[i], world);
        place(&data[i], i ? count1 : count0);
    }
    for (int r = 0; r < world; r++) {
        const int i = r == world - 1;
        captured(&g, r, &data[i], (uint32_t)(i && !staged), i ? count1 : count0);
        if (i && staged) g.ranks[r].registration.mode = OH_REGISTRATION_STAGED;
        for (int lane = 0; lane < 2; lane++) {
            /* Lane 1 has the signature block, of two blocks the last. */
            parts[r][lane] =
                (part){&g.ranks[r], kernel_of(&g, i ? last : first), lane, lane ? 30 : 0};
            CHECK(!pthread_create(&threads[r][lane], NULL, part_main, &parts[r][lane]));
        }
    }
    for (int r = 0; r < world; r++)
        for (int lane = 0; lane < 2; lane++) pthread_join(threads[r][lane], NULL);
    for (int r = 0; r < world; r++) {
        const oh_record *found = &g.ranks[r].page.record;
        if ((found->kind & 0xffu) != OH_FAIL_MISMATCH || found->peer != world - 1)
            FAIL("%s: rank %d: expected a mismatch of rank %d, found kind %u, peer %d", what, r,
                 world - 1, found->kind, found->peer);
        for (int i = 0; i < 2; i++) {
            const guarded *out = &data[i].ranks[r].out;
            guarded_check(out, what);
            for (size_t b = 0; b < out->bytes; b++)
                if (out->data[b] != 0x5A)
                    FAIL("%s: byte %zu of rank %d's output of call %d was stored", what, b, r, i);
        }
    }
    for (int i = 0; i < 2; i++) lanes_close(&data[i]);
    lanes_close(&g);
}

/* ---- gives up -------------------------------------------------------------------------------- */
static _Thread_local size_t accesses, held_at; /* held_at 0: never */
static sem_t go_on;

static void watch(void) {
    if (++accesses != held_at) return;
    while (sem_wait(&go_on)) {
    }
}

typedef struct giving_up {
    lanes_group *g;
    oh_host_kernel kernel;
    size_t at; /* of rank 0 */
    size_t accesses[ONEHOP_MAX_RANKS];
    unsigned char *left_with; /* output of the last rank when its call ended */
    size_t bytes;
} giving_up;

static void giving_up_main(int rank, int world, void *argument) {
    giving_up *u = argument;
    lanes_rank *own = &u->g->ranks[rank];
    const bool last = rank == world - 1;
    accesses = 0;
    held_at = rank == 0 ? u->at : 0;
    chaos_watch = watch;
    oh_host_run_worker(u->kernel, &own->args, BLOCKS, 0, 1);
    chaos_watch = NULL;
    u->accesses[rank] = accesses;
    if (!last) return;
    if (own->page.record.kind) {
        memset(own->in.data, 0x77, u->bytes);
        memcpy(u->left_with, own->out.data, u->bytes);
    }
    sem_post(&go_on);
}

/* Returns the accesses of rank 0. `later`: a verdict on a later call is there already. */
static size_t one_gives_up(int world, lanes_algorithm algorithm, size_t count, size_t at,
                           bool later) {
    lanes_group g;
    giving_up u = {&g, NULL, at, {0}, NULL, count * 2};
    unsigned char *want = lanes_memory(count * 2, 0);
    char what[120];
    snprintf(what, sizeof what, "%d ranks, %s, rank 0 held at %zu%s", world,
             algorithm == LANES_PULL_1SHOT ? "1shot_pull" : "2shot_pull", at,
             later ? ", a later loss is known" : "");
    open_group(&g, world);
    place(&g, count);
    u.kernel = kernel_of(&g, algorithm);
    u.left_with = lanes_memory(count * 2, 0x5A);
    while (!sem_trywait(&go_on)) continue;
    for (int r = 0; r < world; r++) {
        oh_control *control = (oh_control *)((char *)g.ranks[r].buffer + g.regions.control);
        captured(&g, r, &g, 1, count);
        if (!later) continue;
        control->verdicts[world - 2] = OH_VERDICT(OH_FAIL_LOST, 0, 3);
        control->given_up = 1;
    }
    if (at) g.ranks[world - 1].local->deadline_ns = 3000000;
    run_threads(world, giving_up_main, &u);
    reference_of_inputs(want, INPUT_REAL, 1, world, 0, count, TYPE);
    const bool gave_up = g.ranks[world - 1].page.record.kind != 0;
    for (int r = 0; r < world; r++) {
        guarded_check(&g.ranks[r].out, what);
        if (!g.ranks[r].page.record.kind)
            expect_equal(want, g.ranks[r].out.data, count, TYPE, what);
    }
    size_t stored = 0; /* units */
    for (size_t i = 0; gave_up && i < count * 2; i += 16)
        stored += memcmp(u.left_with + i, g.ranks[world - 1].out.data + i,
                         count * 2 - i < 16 ? count * 2 - i : 16) != 0;
    if (stored > 1)
        FAIL("%s: %zu units of the rank that gave up were stored after its call", what, stored);
    if (!at && gave_up) FAIL("%s: nobody was held, and the call failed", what);
    lanes_close(&g);
    free(u.left_with);
    free(want);
    return u.accesses[0];
}

static void gives_up(int world, lanes_algorithm algorithm, size_t count, unsigned every) {
    const size_t all = one_gives_up(world, algorithm, count, 0, false);
    for (size_t at = 1; at <= all; at += every * step)
        (void)one_gives_up(world, algorithm, count, at, false);
    for (size_t at = all / 2; world > 2 && at <= all; at += 2 * every * step)
        (void)one_gives_up(world, algorithm, count, at, true);
}

int main(int argc, char **argv) {
    if (argc > 1) deadline_ms = (unsigned)atoi(argv[1]);
    if ((argc > 2 && atoi(argv[2]) < 100) || HARNESS_SANITIZED) step = 3;
    watchdog(230);
    sem_init(&go_on, 0, 0);
    for (int world = 2; world <= 3; world++)
        for (int k = 0; k < 4; k++)
            crossed(world, k % 2 ? LANES_PULL_2SHOT : LANES_PULL_1SHOT,
                    k == 1 || k == 2 ? LANES_PULL_2SHOT : LANES_PULL_1SHOT, 2100,
                    k < 2 ? 2100 : 300, false);
    crossed(5, LANES_PULL_2SHOT, LANES_PULL_2SHOT, 2100, 40, false);
    crossed(2, LANES_PULL_1SHOT, LANES_PULL_1SHOT, 2100, 2100, true);
    crossed(3, LANES_PULL_2SHOT, LANES_PULL_2SHOT, 2100, 2100, true);
    gives_up(2, LANES_PULL_1SHOT, 150, 1);
    gives_up(2, LANES_PULL_2SHOT, 150, 1);
    gives_up(3, LANES_PULL_1SHOT, 150, 3);
    gives_up(3, LANES_PULL_2SHOT, 230, 3);
    gives_up(5, LANES_PULL_2SHOT, 300, 5);
    return 0;
}
