/* Property: the matrix of the reference system's own test gives, in all bits,
 *   two processes, a GPU each          what ncclAllReduce gives on the same inputs and streams
 *   4 and 8 ranks that share the GPUs  what the scalar reference gives
 *
 * Ten lengths from 16 elements to 4 million, three types, three algorithms, eager and in graphs.
 * Each of the 180 combinations makes 16 loops of 4 calls over integers 0..15, other ones in each
 * loop; a graph holds the 4 calls and is replayed. Captured 2shot_pull runs in place and, once
 * more, out of place.
 *
 * Under MPS the two processes may share the only GPU. NCCL refuses two ranks on one GPU of one
 * host, so each process names a host of its own. NCCL then goes through loopback sockets, which are
 * slow: 2 loops there, not 16. Without NCCL (ONEHOP_NCCL_LIB), or with one GPU and no MPS, the
 * first part is skipped, and the exit status says so if the rest is right. NCCL runs without NVLink
 * multicast.
 *
 * The inputs of a call are a window of one array per rank that moves from call to call, so the
 * result of an earlier call is wrong. All is compared on the GPU. */
/* labels: timeout=240 */
#include "gpu_batch.h"

#include "device/nccl/nccl_api.h"

#define LOOPS        16
#define LOOPS_SHARED 2
#define CALLS        4
#define COMBINATIONS 180
#define MAX          ((size_t)4 << 20) /* elements of a call */
#define STEP         104               /* from window to window; keeps them on 16 bytes */
#define ROOM         (MAX + (size_t)LOOPS * CALLS * STEP)
#define MAX_RANKS    8
#define PART_SECONDS 45

typedef struct combination {
    size_t count;
    onehop_dtype dtype;
    onehop_algorithm algorithm;
    bool graph;
} combination;

/* Of a combination, over all ranks. */
typedef struct outcome {
    uint32_t right; /* ranks */
    uint32_t wrong; /* 32-bit words */
    uint32_t rank, loop, call;
    bool in_place;
} outcome;

/* Shared by processes. */
typedef struct job {
    gpu_data *data;
    bool against_nccl;
    size_t loops;
    char no_nccl[400]; /* why there is none; empty: there is */
    char nccl_version[32];
    oh_nccl_id nccl;
    outcome outcomes[COMBINATIONS];
    uint64_t direct, staged; /* captured calls of rank 0, by how their memory was reached */
} job;

/* What a rank works with; all but the counters in one allocation. */
typedef struct bench {
    gpu_rank *rank;
    job *job;
    void *nccl;
    unsigned char *memory, *inputs, *sums;
    unsigned char *in[CALLS], *out[CALLS], *expected[CALLS];
    uint32_t *wrong; /* words of each call */
} bench;

static const onehop_dtype dtypes[] = {ONEHOP_FLOAT32, ONEHOP_FLOAT16, ONEHOP_BFLOAT16};

static combination combination_of(size_t number) {
    static const size_t counts[] = {16, 32, 512, 1024, 1040, 4096, 32768, 262144, 2097152, MAX};
    static const onehop_algorithm algorithms[] = {ONEHOP_1SHOT_PUSH, ONEHOP_1SHOT_PULL,
                                                  ONEHOP_2SHOT_PULL};
    return (combination){counts[number / 6 % 10], dtypes[number / 60], algorithms[number / 2 % 3],
                         number % 2 != 0};
}

static const char *name_of(const combination *c) {
    static _Thread_local char text[120];
    snprintf(text, sizeof text, "%zu x %s, %s, %s", c->count, onehop_dtype_name(c->dtype),
             onehop_algorithm_name(c->algorithm), c->graph ? "graph" : "eager");
    return text;
}

/* ---- inputs ---------------------------------------------------------------------------------- */

static void fill_integers(unsigned char *to, int rank, onehop_dtype dtype) {
    const size_t size = reference_element_bytes(dtype);
    uint32_t values[16];
    uint64_t state = (uint64_t)rank * 3 + (uint64_t)dtype, random = 0;
    for (int i = 0; i < 16; i++) {
        const float whole = (float)i;
        memcpy(&values[i], &whole, 4);
        values[i] = reference_round(values[i], dtype);
    }
    for (size_t i = 0; i < ROOM; i++) {
        random = i % 16 ? random >> 4 : random_next(&state);
        memcpy(to + i * size, &values[random & 15], size); /* little endian */
    }
}

/* The comparison finds what the host finds. */
static void check_comparison(const bench *b) {
    enum {
        WORDS = 4096
    };
    const gpu_rank *r = b->rank;
    const gpu_data *data = b->job->data;
    uint32_t *found = r->pinned, differ = 0;
    for (size_t i = 0; i < WORDS; i++)
        differ += memcmp(data->in[r->rank] + 4 * i, data->sum + 4 * i, 4) != 0;
    gpu_fill(r, b->wrong, 0, sizeof *b->wrong);
    gpu_compare_later(r, b->inputs, b->sums, WORDS, b->wrong, r->stream);
    gpu_compare_later(r, b->sums, b->sums, WORDS, b->wrong, r->stream);
    gpu_read(r, found, b->wrong, sizeof *found);
    CHECK(differ > 0);
    CHECK_INT(differ, *found);
}

static void load(bench *b, onehop_dtype dtype) {
    const gpu_rank *r = b->rank;
    const size_t bytes = ROOM * reference_element_bytes(dtype);
    gpu_barrier(r); /* nobody reads the old data any more */
    fill_integers(b->job->data->in[r->rank], r->rank, dtype);
    gpu_data_sum(b->job->data, b->rank, 1, dtype, ROOM);
    gpu_write(r, b->inputs, b->job->data->in[r->rank], bytes);
    gpu_write(r, b->sums, b->job->data->sum, bytes);
    check_comparison(b);
}

/* ---- one combination ------------------------------------------------------------------------- */

static onehop_result make_calls(const bench *b, const combination *c, bool in_place) {
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    onehop_result result = ONEHOP_OK;
    call.algorithm = c->algorithm;
    if (c->algorithm != ONEHOP_1SHOT_PUSH)
        call.source = c->graph ? ONEHOP_SOURCE_GRAPH : ONEHOP_SOURCE_WORKSPACE;
    for (size_t k = 0; k < CALLS && !result; k++)
        result = onehop_all_reduce(b->rank->context, in_place ? b->out[k] : b->in[k], b->out[k],
                                   c->count, c->dtype, ONEHOP_SUM, &call, b->rank->stream);
    return result;
}

/* What the calls of a loop should have given, beside what they gave. */
static onehop_result compare(const bench *b, const combination *c, size_t loop) {
    const gpu_rank *r = b->rank;
    const size_t size = reference_element_bytes(c->dtype);
    onehop_result result = ONEHOP_OK;
    for (size_t k = 0; k < CALLS && !result; k++) {
        const size_t number = loop * CALLS + k;
        const unsigned char *expected = b->sums + number * STEP * size;
        if (b->nccl) {
            expected = b->expected[k];
            result = oh_nccl_all_reduce(r->context->device, b->nccl, b->in[k], b->expected[k],
                                        c->count, c->dtype, r->stream);
        }
        gpu_compare_later(r, b->out[k], expected, c->count * size / 4, &b->wrong[number],
                          r->stream);
    }
    return result;
}

static onehop_result run_loop(const bench *b, const combination *c, size_t loop, bool in_place,
                              const gpu_graph *graph) {
    const gpu_rank *r = b->rank;
    const size_t size = reference_element_bytes(c->dtype), bytes = c->count * size;
    onehop_result result = ONEHOP_OK;
    for (size_t k = 0; k < CALLS; k++) {
        const unsigned char *window = b->inputs + (loop * CALLS + k) * STEP * size;
        gpu_consume_later(r, b->in[k], window, bytes, r->stream);
        if (in_place) gpu_consume_later(r, b->out[k], window, bytes, r->stream);
    }
    if (graph)
        gpu_graph_launch(r, graph, r->stream);
    else
        result = make_calls(b, c, in_place);
    if (!result) result = compare(b, c, loop);
    return result ? result : onehop_synchronize(r->context, r->stream);
}

/* Reads the counters. False if a word was wrong. */
static bool judge(const bench *b, outcome *o, bool in_place) {
    const uint32_t *wrong = b->rank->pinned;
    uint32_t words = 0, first = 0;
    gpu_read(b->rank, b->rank->pinned, b->wrong, LOOPS * CALLS * sizeof *wrong);
    for (uint32_t i = LOOPS * CALLS; i-- > 0;) {
        words += wrong[i];
        if (wrong[i]) first = i;
    }
    if (!words) return true;
    if (__atomic_fetch_add(&o->wrong, words, __ATOMIC_ACQ_REL) == 0) {
        o->rank = (uint32_t)b->rank->rank;
        o->loop = first / CALLS;
        o->call = first % CALLS;
        o->in_place = in_place;
    }
    return false;
}

/* Collective. False if the communicator is dead; *right_out is cleared if a result was wrong. */
static bool run_form(bench *b, const combination *c, outcome *o, bool in_place, bool *right_out) {
    gpu_rank *r = b->rank;
    gpu_graph graph;
    onehop_result result = ONEHOP_OK;
    gpu_fill(r, b->wrong, 0, LOOPS * CALLS * sizeof *b->wrong);
    gpu_barrier(r);
    if (c->graph) {
        gpu_capture_begin(&r, 1);
        result = make_calls(b, c, in_place);
        if (!result) gpu_capture_end(&r, 1, &graph);
    }
    for (size_t loop = 0; loop < b->job->loops && !result; loop++)
        result = run_loop(b, c, loop, in_place, c->graph ? &graph : NULL);
    if (result) {
        fprintf(stderr, "rank %d of %d, %s: %s\n", r->rank, r->world, name_of(c),
                onehop_last_error());
        return false;
    }
    gpu_barrier(r);
    if (c->graph) gpu_graph_free(r, &graph);
    if (!judge(b, o, in_place)) *right_out = false;
    return true;
}

static bool run_combination(bench *b, size_t number) {
    const combination c = combination_of(number);
    outcome *o = &b->job->outcomes[number];
    const bool twice = c.graph && c.algorithm == ONEHOP_2SHOT_PULL;
    bool right = true;
    bool alive = run_form(b, &c, o, twice, &right);
    if (alive && twice) alive = run_form(b, &c, o, false, &right);
    if (alive && right) __atomic_fetch_add(&o->right, 1, __ATOMIC_RELAXED);
    return alive;
}

/* ---- one rank -------------------------------------------------------------------------------- */

/* Takes two processes on one GPU for two hosts. Read by NCCL once, when it begins. */
static void name_host(int rank) {
    char host[32];
    snprintf(host, sizeof host, "onehop-host-%d", rank);
    setenv("NCCL_HOSTID", host, 1);
    setenv("NCCL_SOCKET_IFNAME", "lo", 1);
}

static void open_nccl(bench *b) {
    const gpu_rank *r = b->rank;
    job *j = b->job;
    if (gpu_is_shared()) name_host(r->rank);
    CHECK_OK(oh_nccl_open(NULL));
    if (r->rank == 0) {
        CHECK_OK(oh_nccl_check(oh_nccl.ncclGetUniqueId(&j->nccl), "ncclGetUniqueId"));
        memcpy(j->nccl_version, oh_nccl.version, sizeof j->nccl_version);
    }
    gpu_barrier(r);
    CHECK_OK(oh_nccl_connect(r->context->device, &j->nccl, r->rank, r->world, &b->nccl));
}

static void open_bench(bench *b, gpu_rank *rank, job *j) {
    const size_t array = oh_round_up(ROOM * 4, 256), buffer = MAX * 4;
    memset(b, 0, sizeof *b);
    b->rank = rank;
    b->job = j;
    b->memory = gpu_alloc(rank, 2 * array + 3 * CALLS * buffer);
    b->inputs = b->memory;
    b->sums = b->inputs + array;
    for (size_t k = 0; k < CALLS; k++) {
        b->in[k] = b->sums + array + 3 * k * buffer;
        b->out[k] = b->in[k] + buffer;
        b->expected[k] = b->out[k] + buffer;
    }
    b->wrong = gpu_alloc(rank, LOOPS * CALLS * sizeof *b->wrong);
    if (j->against_nccl) open_nccl(b);
}

/* No peer may use the memory any more. */
static void close_bench(bench *b) {
    if (b->nccl) oh_nccl_disconnect(b->rank->context->device, b->nccl, false);
    gpu_free(b->rank, b->memory);
    gpu_free(b->rank, b->wrong);
}

static void run_all(gpu_rank *ranks, int here, void *argument) {
    bench b;
    onehop_stats stats;
    bool alive = true;
    CHECK_INT(1, here);
    open_bench(&b, ranks, argument);
    for (size_t i = 0; i < COMBINATIONS && alive; i++) {
        if (i % 60 == 0) load(&b, dtypes[i / 60]);
        alive = run_combination(&b, i);
    }
    CHECK_OK(onehop_get_stats(ranks->context, &stats));
    if (ranks->rank == 0) {
        b.job->direct = stats.registrations_direct;
        b.job->staged = stats.registrations_staged;
    }
    if (!alive) return; /* the memory goes with the process */
    gpu_expect_idle(ranks, 1);
    close_bench(&b);
}

/* ---- parts ----------------------------------------------------------------------------------- */

typedef struct part {
    job *job;
    gpu_setup setup;
} part;

static void part_main(int rank, int world_size, void *argument) {
    const part *p = argument;
    (void)rank, (void)world_size;
    watchdog(PART_SECONDS);
    if (p->setup.layout != GPU_PROCESSES) gpu_leave_mps();
    gpu_run(&p->setup, run_all, p->job);
}

/* How many combinations were right on all ranks; a line for each of the others that was reached. */
static int count_right(const job *j, int world) {
    int right = 0, missed = 0;
    for (size_t i = 0; i < COMBINATIONS; i++) {
        const combination c = combination_of(i);
        const outcome *o = &j->outcomes[i];
        if (o->right == (uint32_t)world && !o->wrong)
            right++;
        else if (o->wrong)
            printf("  WRONG %s: %u words, %u of %d ranks right; first seen by rank %u in loop %u, "
                   "call %u%s\n",
                   name_of(&c), o->wrong, o->right, world, o->rank, o->loop, o->call,
                   o->in_place ? ", in place" : "");
        else if (missed++ == 0)
            printf("  NOT DONE %s: %u of %d ranks right\n", name_of(&c), o->right, world);
    }
    if (missed > 1) printf("  NOT DONE: %d more after it\n", missed - 1);
    return right;
}

/* A process of its own: what goes wrong in it ends neither the count nor the other parts. */
static bool run_part(job *j, bool against_nccl, int world, int gpus) {
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    part p = {j, {.world = world, .gpus = gpus, .config = &config, .dies = true}};
    const double start = seconds_now();
    config.timeout_ms = 10000;
    config.init_timeout_ms = 20000;
    p.setup.layout = against_nccl ? GPU_PROCESSES : GPU_THREADS;
    j->against_nccl = against_nccl;
    j->loops = against_nccl && gpus == 1 ? LOOPS_SHARED : LOOPS;
    j->direct = j->staged = 0;
    memset(j->outcomes, 0, sizeof j->outcomes);
    const int status = wait_rank(start_rank(part_main, 0, 1, &p));
    const int right = count_right(j, world);
    printf(
        "%d/%d at W=%d, %d GPU%s, %s against %s%s; captured pull calls: %llu direct, %llu staged; "
        "%.1f s%s%s\n",
        right, COMBINATIONS, world, gpus, gpus > 1 ? "s" : "",
        against_nccl ? "processes" : "threads", against_nccl ? "NCCL " : "the scalar reference",
        against_nccl ? j->nccl_version : "", (unsigned long long)j->direct,
        (unsigned long long)j->staged, seconds_now() - start,
        j->loops == LOOPS ? "" : "; 2 loops instead of 16: NCCL goes through loopback sockets",
        status ? "; ENDED EARLY, see above" : "");
    return right == COMBINATIONS && !status;
}

static void look_for_nccl(int rank, int world_size, void *argument) {
    job *j = argument;
    (void)rank, (void)world_size;
    if (oh_nccl_open(NULL)) snprintf(j->no_nccl, sizeof j->no_nccl, "%s", onehop_last_error());
}

int main(void) {
    setenv("NCCL_NVLS_ENABLE", "0", 1);
    const int gpus = gpu_main(3 * PART_SECONDS + 10, 1);
    job *j = shared_memory(sizeof *j);
    bool right = true;
    j->data = gpu_data_make(ROOM, MAX_RANKS);
    run_ranks(1, look_for_nccl, j);
    const int apart = gpu_for_processes();
    if (!apart) snprintf(j->no_nccl, sizeof j->no_nccl, "it needs 2 GPUs, or one under MPS");
    if (!j->no_nccl[0]) right = run_part(j, true, 2, apart);
    for (int world = 4; world <= MAX_RANKS; world *= 2)
        if (!run_part(j, false, world, gpus > 1 ? 2 : 1)) right = false;
    if (!right) return 1;
    if (!j->no_nccl[0]) return 0;
    printf("SKIPPED: the part against NCCL: %s; the rest is right\n", j->no_nccl);
    return HARNESS_SKIP;
}
