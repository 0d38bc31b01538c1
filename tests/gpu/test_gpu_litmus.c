/* Property: the GPU keeps the orders that the protocols rely on. Kernels of the test's own
 * (litmus.cu) ask it:
 *   (i)   in a chain of programmatic dependent launches whose middle kernels trigger early and
 *         never wait, has the first kernel ended when the last comes out of its wait? Reported; the
 *         kernels of onehop always wait.
 *   (ii)  a re-arming and the peer's next-but-one push to the same words, no fence between: how
 *         many are lost? Reported, expected none; the protocol has a fence there.
 *   (iii) weak loads of a peer's memory after a relaxed enter: how many are stale? None may be:
 *         pull_direct.h reads so, what earlier kernels wrote. (The memory model promises it with a
 *         release and an acquire only.)
 * Fails if a load of (iii) is stale, if a wait runs out in a way that none of these explains, or if
 * data is neither old nor new. */
/* labels: timeout=120 */
#include "gpu_ranks.h"

typedef struct litmus_args {
    uint64_t mine, peer, counts, limit_ns;
    uint32_t round, rounds, delay_ns, unused;
} litmus_args;

typedef struct litmus_counts {
    uint32_t trials, early, lost, stale, stuck, wrong;
} litmus_counts;

enum {
    FIRST,
    PASS,
    LAST,
    REARM,
    WRITE,
    PULL,
    KERNELS
};

static const oh_kernel kernels[KERNELS] = {{"litmus_first", NULL, 32},  {"litmus_pass", NULL, 32},
                                           {"litmus_last", NULL, 32},   {"litmus_rearm", NULL, 256},
                                           {"litmus_write", NULL, 256}, {"litmus_pull", NULL, 256}};

enum {
    THREADS = 256,
    BLOCKS = 64
};
#define UNITS_BYTES ((size_t)BLOCKS * THREADS * 16)
#define LIMIT_NS    1000000000ull

/* One side of an exchange. Both may be on one GPU. */
typedef struct side {
    oh_device *device;
    oh_function functions[KERNELS];
    oh_mem memory, theirs;
    void *counts;
    oh_cu_stream stream;
} side;

static int gpus_found;

#define DRIVER(call) CHECK((call) == OH_CU_SUCCESS)

static void in_context(const side *s, bool enter) {
    oh_cu_context popped;
    if (enter)
        DRIVER(oh_cu.cuCtxPushCurrent_v2(oh_cuda_of(s->device)->context));
    else
        DRIVER(oh_cu.cuCtxPopCurrent_v2(&popped));
}

static void open_side(side *s, int ordinal) {
    memset(s, 0, sizeof *s);
    CHECK_OK(oh_cuda_device_open(ordinal, &s->device));
    CHECK_OK(s->device->ops->load(s->device, kernels, KERNELS, s->functions));
    CHECK_OK(
        s->device->ops->mem_create(s->device, 2 * UNITS_BYTES + 2 * BLOCKS * 128, 0, &s->memory));
    CHECK_OK(s->device->ops->local_alloc(s->device, sizeof(litmus_counts), &s->counts));
    in_context(s, true);
    DRIVER(oh_cu.cuStreamCreate(&s->stream, OH_CU_STREAM_NON_BLOCKING));
    in_context(s, false);
}

static void close_side(side *s) {
    in_context(s, true);
    DRIVER(oh_cu.cuStreamDestroy_v2(s->stream));
    in_context(s, false);
    s->device->ops->local_free(s->device, s->counts);
    s->device->ops->mem_release(s->device, &s->theirs);
    s->device->ops->mem_release(s->device, &s->memory);
    s->device->ops->close(s->device);
}

static litmus_args args_of(const side *s) {
    litmus_args a = {(uintptr_t)s->memory.ptr,
                     (uintptr_t)s->theirs.ptr,
                     (uintptr_t)s->counts,
                     LIMIT_NS,
                     0,
                     0,
                     0,
                     0};
    return a;
}

static void launch(side *s, int kernel, const litmus_args *args, uint32_t blocks, uint32_t threads,
                   bool pdl) {
    oh_function function = s->functions[kernel];
    function.pdl = function.pdl && pdl;
    const oh_launch l = {&function, args, sizeof *args, blocks, threads, s->stream};
    CHECK_OK(s->device->ops->launch(s->device, &l));
}

static litmus_counts counts_now(side *s) {
    litmus_counts counts;
    in_context(s, true);
    DRIVER(oh_cu.cuStreamSynchronize(s->stream));
    in_context(s, false);
    CHECK_OK(s->device->ops->copy(s->device, &counts, s->counts, sizeof counts));
    return counts;
}

static void reset(side *s, int memory_byte) {
    CHECK_OK(s->device->ops->fill(s->device, s->counts, 0, sizeof(litmus_counts)));
    CHECK_OK(s->device->ops->fill(s->device, s->memory.ptr, memory_byte, s->memory.bytes));
}

/* ---- (i) ------------------------------------------------------------------------------------- */

static void chain(side *s, uint32_t passes, uint32_t delay_ns) {
    enum {
        TRIALS = 20000
    };
    litmus_args a = args_of(s);
    a.delay_ns = delay_ns;
    reset(s, 0);
    for (uint32_t trial = 1; trial <= TRIALS; trial++) {
        a.round = trial;
        launch(s, FIRST, &a, 1, 32, false);
        for (uint32_t i = 0; i < passes; i++) launch(s, PASS, &a, 1, 32, true);
        launch(s, LAST, &a, 1, 1, true);
    }
    const litmus_counts c = counts_now(s);
    CHECK_INT(TRIALS, c.trials);
    printf("(i) %u kernels that never wait between, first kernel of %u ns: the last began before "
           "the first had ended in "
           "%u of %u\n",
           passes, delay_ns, c.early, c.trials);
    if (!passes && c.early) FAIL("a wait for the kernel right before it does not hold");
}

/* ---- (ii) ------------------------------------------------------------------------------------ */

static void rearm_against_push(side *sides) {
    enum {
        LAUNCHES = 16,
        ROUNDS = 500
    };
    uint64_t trials = 0, lost = 0, wrong = 0;
    for (uint32_t n = 0; n < LAUNCHES && !lost; n++) {
        for (int i = 0; i < 2; i++) reset(&sides[i], 0xFF);
        for (int i = 0; i < 2; i++) {
            litmus_args a = args_of(&sides[i]);
            a.round = n * ROUNDS;
            a.rounds = ROUNDS;
            launch(&sides[i], REARM, &a, BLOCKS, THREADS, false);
        }
        for (int i = 0; i < 2; i++) {
            const litmus_counts c = counts_now(&sides[i]);
            trials += c.trials;
            lost += c.lost;
            wrong += c.wrong;
        }
    }
    printf("(ii) re-arm against push without a fence: %llu threads lost a unit (both sides of one "
           "count) in %llu exchanges\n",
           (unsigned long long)lost, (unsigned long long)trials);
    if (wrong)
        FAIL("%llu units held neither the sentinel nor what was sent", (unsigned long long)wrong);
}

/* ---- (iii) ----------------------------------------------------------------------------------- */

static void weak_loads(side *sides) {
    enum {
        ROUNDS = 3000
    };
    uint64_t loads = 0, stale = 0, stuck = 0;
    for (int i = 0; i < 2; i++) reset(&sides[i], 0);
    for (uint32_t round = 1; round <= ROUNDS; round++)
        for (int i = 0; i < 2; i++) {
            litmus_args a = args_of(&sides[i]);
            a.round = round;
            launch(&sides[i], WRITE, &a, BLOCKS, THREADS, true);
            launch(&sides[i], PULL, &a, BLOCKS, THREADS, true);
            if (round % 100 || i == 0) continue;
            for (int k = 0; k < 2; k++) counts_now(&sides[k]); /* keeps the queues short */
        }
    for (int i = 0; i < 2; i++) {
        const litmus_counts c = counts_now(&sides[i]);
        loads += c.trials;
        stale += c.stale;
        stuck += c.stuck;
    }
    printf("(iii) weak loads of a peer after a relaxed enter: %llu stale of %llu words; none may "
           "be\n",
           (unsigned long long)stale, (unsigned long long)loads);
    if (stale) FAIL("%llu stale words: pull_direct.h would sum them", (unsigned long long)stale);
    if (loads == 0) FAIL("no words were loaded");
    if (stuck) FAIL("%llu waits for an enter or exit word ran out", (unsigned long long)stuck);
}

/* As a peer of this process would: that finds the one mapping there is. */
static void map_memory_of(const side *owner, side *reader) {
    oh_mem_handle handle;
    int fd;
    CHECK_OK(owner->device->ops->mem_export(owner->device, &owner->memory, &handle, &fd));
    CHECK_OK(reader->device->ops->mem_import(reader->device, &handle, fd, &reader->theirs));
    if (fd >= 0) close(fd);
}

static void exchanges(int first, int second) {
    side sides[2];
    open_side(&sides[0], first);
    open_side(&sides[1], second);
    for (int i = 0; i < 2; i++) map_memory_of(&sides[1 - i], &sides[i]);
    printf("between GPU %d and GPU %d:\n", first, second);
    rearm_against_push(sides);
    weak_loads(sides);
    for (int i = 0; i < 2; i++) close_side(&sides[i]);
}

static void ask(void *argument) {
    size_t bytes;
    side s;
    (void)argument;
    const void *images[] = {gpu_image("litmus", &bytes), NULL};
    oh_cuda_set_images(images);
    open_side(&s, 0);
    if (s.functions[LAST].pdl) {
        for (uint32_t passes = 0; passes < 4; passes++) chain(&s, passes, 3000);
        chain(&s, 1, 30000);
    } else {
        printf("(i) this GPU has no programmatic dependent launch\n");
    }
    close_side(&s);
    exchanges(0, 0);
    if (gpus_found > 1) exchanges(0, 1);
}

int main(void) {
    gpus_found = gpu_main(100, 1);
    gpu_apart(ask, NULL);
    return 0;
}
