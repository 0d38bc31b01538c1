/* Property: communicators over memory that the program brings give right sums: over memory from
 * onehop_symmetric_alloc, between threads and processes; over the program's own shared mapping,
 * between forked ranks that never met in a rendezvous; and with registrations of captured
 * inputs. */
/* labels: quick */
#include "fault_kit.h"

#define MAX 4

static onehop_layout_config layout_config(int world_size) {
    onehop_layout_config config = ONEHOP_CONFIG_INIT(onehop_layout_config);
    config.device_kind = ONEHOP_DEVICE_HOST;
    config.world_size = world_size;
    config.push_bytes = 4096;
    config.pull_bytes = 65536;
    config.max_registrations = 5;
    return config;
}

static void *aligned_memory(size_t bytes) {
    void *memory = NULL;
    CHECK_INT(0, posix_memalign(&memory, 4096, bytes));
    memset(memory, 0xA5, bytes); /* arming is what initialises it */
    return memory;
}

/* A rank's own part, armed; the caller puts a barrier after it. */
static onehop_comm_config prepare(int rank, int world_size, void *const *buffers) {
    onehop_comm_config config = ONEHOP_CONFIG_INIT(onehop_comm_config);
    onehop_layout layout;
    config.device.kind = ONEHOP_DEVICE_HOST;
    config.rank = rank;
    config.world_size = world_size;
    static __thread onehop_layout_config planned; /* outlives the call, one per rank's thread */
    planned = layout_config(world_size);
    config.layout = &planned;
    config.timeout_ms = KIT_PATIENCE_MS;
    CHECK_OK(onehop_layout_get(config.layout, &layout));
    config.local = aligned_memory(layout.local_bytes);
    config.host = aligned_memory(layout.host_bytes);
    for (int r = 0; r < world_size; r++) config.symmetric[r] = buffers[r];
    CHECK_OK(
        onehop_storage_arm(config.layout, config.device, buffers[rank], config.local, config.host));
    return config;
}

static void release(onehop_comm *comm, const onehop_comm_config *config) {
    onehop_comm_destroy(comm);
    free(config->local);
    free(config->host);
}

static void calls(onehop_comm *comm, int rank, int world_size, unsigned count) {
    kit_buffers *m = kit_buffers_make();
    for (unsigned i = 0; i < count; i++) {
        const kit_way *way = &kit_ways[i % KIT_WAYS];
        onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
        call.algorithm = way->forced;
        kit_fill(m->in, way->count, rank, i);
        float *out = i % 2 ? m->in : m->out;
        CHECK_OK(onehop_comm_all_reduce(comm, m->in, out, way->count, ONEHOP_FLOAT32, ONEHOP_SUM,
                                        i % 4 ? &call : NULL, NULL));
        kit_check(out, way->count, world_size, i);
    }
    free(m);
}

/* ---- symmetric memory ------------------------------------------------------------------------ */

static void on_group(onehop_group *group) {
    const int rank = onehop_group_rank(group), world_size = onehop_group_size(group);
    const onehop_device host = {ONEHOP_DEVICE_HOST, 0};
    const onehop_layout_config config = layout_config(world_size);
    onehop_symmetric *symmetric;
    onehop_layout layout;
    onehop_comm *comm;
    void *buffers[MAX];
    CHECK_OK(onehop_layout_get(&config, &layout));
    CHECK_OK(onehop_symmetric_alloc(group, host, layout.symmetric_bytes, &symmetric));
    CHECK(onehop_symmetric_ptr(symmetric, -1) == NULL &&
          onehop_symmetric_ptr(symmetric, world_size) == NULL);
    for (int r = 0; r < world_size; r++) buffers[r] = onehop_symmetric_ptr(symmetric, r);
    onehop_comm_config c = prepare(rank, world_size, buffers);
    CHECK_OK(onehop_group_barrier(group));
    CHECK_OK(onehop_comm_create(&c, &comm));
    calls(comm, rank, world_size, HARNESS_SANITIZED ? 12 : 60);
    CHECK_OK(onehop_group_barrier(group));
    release(comm, &c);
    onehop_symmetric_free(symmetric);
    /* Ranks that want different sizes, or nothing. */
    CHECK_RESULT(ONEHOP_ERR_DISAGREEMENT,
                 onehop_symmetric_alloc(group, host, rank ? 4096 : 8192, &symmetric));
    CHECK_CONTAINS("rank 1 asks for 4096 bytes, rank 0 for 8192", onehop_last_error());
    CHECK_RESULT(ONEHOP_ERR_ARGUMENT,
                 onehop_symmetric_alloc(group, host, rank == 1 ? 0 : 8192, &symmetric));
    CHECK_CONTAINS("bytes is 0", onehop_last_error());
    CHECK_OK(onehop_group_barrier(group));
}

static void in_thread(int rank, int world_size, void *argument) {
    onehop_group **groups = argument;
    (void)world_size;
    on_group(groups[rank]);
}

static void in_process(int rank, int world_size, void *argument) {
    onehop_group_config config = ONEHOP_CONFIG_INIT(onehop_group_config);
    onehop_group *group;
    (void)argument;
    config.rank = rank;
    config.world_size = world_size;
    const kit_name own = kit_own_name("own storage");
    config.name = own.text;
    config.timeout_ms = 20000;
    CHECK_OK(onehop_group_open(&config, &group));
    on_group(group);
    onehop_group_close(group);
}

/* ---- a mapping of our own, no rendezvous ----------------------------------------------------- */

typedef struct board {
    char *buffers;
    size_t stride;
    uint32_t arrived; /* atomic */
    int silent;       /* rank that never calls, -1: none */
} board;

static void meet(board *b, int world_size) {
    const uint32_t mine = __atomic_add_fetch(&b->arrived, 1, __ATOMIC_ACQ_REL);
    const uint32_t all =
        (mine + (uint32_t)world_size - 1) / (uint32_t)world_size * (uint32_t)world_size;
    while (__atomic_load_n(&b->arrived, __ATOMIC_ACQUIRE) < all) sleep_ms(1);
}

static void on_own_mapping(int rank, int world_size, void *argument) {
    board *b = argument;
    void *buffers[MAX];
    onehop_comm *comm;
    for (int r = 0; r < world_size; r++) buffers[r] = b->buffers + (size_t)r * b->stride;
    onehop_comm_config c = prepare(rank, world_size, buffers);
    if (b->silent >= 0) c.timeout_ms = 300;
    meet(b, world_size);
    CHECK_OK(onehop_comm_create(&c, &comm));
    if (b->silent < 0) {
        calls(comm, rank, world_size, HARNESS_SANITIZED ? 12 : 60);
        meet(b, world_size);
    } else if (rank != b->silent) {
        float in[8] = {1}, out[8];
        const double begun = seconds_now();
        CHECK_RESULT(ONEHOP_ERR_TIMEOUT, onehop_comm_all_reduce(comm, in, out, 8, ONEHOP_FLOAT32,
                                                                ONEHOP_SUM, NULL, NULL));
        char part[32];
        snprintf(part, sizeof part, "rank %d did not take part", b->silent);
        CHECK_CONTAINS(part, onehop_last_error());
        const double took = seconds_now() - begun;
        CHECK(took > 0.25 && took < 0.5 + kit_slack());
        CHECK_RESULT(ONEHOP_ERR_TIMEOUT, onehop_comm_all_reduce(comm, in, out, 8, ONEHOP_FLOAT32,
                                                                ONEHOP_SUM, NULL, NULL));
    }
    release(comm, &c);
}

static void own_mapping(void) {
    for (int world_size = 2; world_size <= MAX; world_size++)
        for (int silent = -1; silent < world_size; silent += world_size - 1) {
            const onehop_layout_config config = layout_config(world_size);
            onehop_layout layout;
            board *b = shared_memory(sizeof *b);
            CHECK_OK(onehop_layout_get(&config, &layout));
            b->stride = (layout.symmetric_bytes + 4095) / 4096 * 4096;
            b->buffers = shared_memory(b->stride * (size_t)world_size);
            b->silent = silent;
            memset(b->buffers, 0xA5, b->stride * (size_t)world_size);
            run_ranks(world_size, on_own_mapping, b);
            munmap(b->buffers, b->stride * (size_t)world_size);
        }
}

/* ---- wrong memory, registrations ------------------------------------------------------------- */

static void wrong_memory(void) {
    onehop_layout_config config = layout_config(2);
    onehop_layout layout;
    onehop_comm *comm = NULL;
    const onehop_device host = {ONEHOP_DEVICE_HOST, 0};
    CHECK_OK(onehop_layout_get(&config, &layout));
    CHECK_INT(4096, layout.push_bytes);
    CHECK_INT(65536, layout.pull_bytes);
    CHECK_INT(5, layout.max_registrations);
    char *buffers[2] = {aligned_memory(layout.symmetric_bytes),
                        aligned_memory(layout.symmetric_bytes)};
    onehop_comm_config good = prepare(0, 2, (void *const *)buffers), c = good;
#define WRONG(change, result, part)                                                                \
    do {                                                                                           \
        c = good;                                                                                  \
        change;                                                                                    \
        CHECK_RESULT(result, onehop_comm_create(&c, &comm));                                       \
        CHECK_CONTAINS(part, onehop_last_error());                                                 \
        CHECK(comm == NULL);                                                                       \
    } while (0)
    CHECK_RESULT(ONEHOP_ERR_NULL, onehop_comm_create(&c, NULL));
    WRONG(c.symmetric[1] = NULL, ONEHOP_ERR_NULL, "symmetric memory of rank 1 is NULL");
    WRONG(c.local = NULL, ONEHOP_ERR_NULL, "local memory of rank 0 is NULL");
    WRONG(c.host = NULL, ONEHOP_ERR_NULL, "host memory of rank 0 is NULL");
    WRONG(c.symmetric[1] = buffers[1] + 64, ONEHOP_ERR_ALIGNMENT, "not aligned to 4096");
    WRONG(c.local = (char *)c.local + 8, ONEHOP_ERR_ALIGNMENT, "not aligned to 256");
    WRONG(c.host = (char *)c.host + 8, ONEHOP_ERR_ALIGNMENT, "not aligned to 256");
    WRONG(c.rank = 2, ONEHOP_ERR_RANK, "rank is 2, expected 0..1");
    WRONG(c.rank = -1, ONEHOP_ERR_RANK, "rank is -1");
    WRONG(c.world_size = 17, ONEHOP_ERR_WORLD_SIZE, "world size is 17, expected 1..16");
    WRONG(c.world_size = 0, ONEHOP_ERR_WORLD_SIZE, "world size is 0");
    onehop_layout_config other = *good.layout;
    other.world_size = 3;
    WRONG(c.layout = NULL, ONEHOP_ERR_NULL, "layout is NULL");
    WRONG(c.layout = &other, ONEHOP_ERR_WORLD_SIZE, "layout is for 3 ranks, world size is 2");
    WRONG(c.flags = 64, ONEHOP_ERR_ARGUMENT, "flags 0x40");
    other = *good.layout;
    other.push_bytes = 5;
    WRONG(c.layout = &other, ONEHOP_ERR_ARGUMENT, "push_bytes is 5");
    WRONG(c.timeout_ms = UINT32_MAX, ONEHOP_ERR_ARGUMENT, "timeout_ms");
    WRONG((c.device.kind = ONEHOP_DEVICE_CUDA, c.device.ordinal = 9999), ONEHOP_ERR_NO_DEVICE, " ");
    WRONG(c.device.kind = (onehop_device_kind)12, ONEHOP_ERR_ARGUMENT, "device kind is 12");
    CHECK_RESULT(ONEHOP_ERR_ALIGNMENT,
                 onehop_storage_arm(&config, host, buffers[0] + 16, c.local, c.host));
    CHECK_CONTAINS("4096, 256, 256", onehop_last_error());
    config.push_bytes = 12;
    CHECK_RESULT(ONEHOP_ERR_ARGUMENT,
                 onehop_storage_arm(&config, host, buffers[0], good.local, good.host));

    uint32_t registration = 77, first;
    void *in[2] = {buffers[0], buffers[1]};
    CHECK_OK(onehop_comm_create(&good, &comm));
    for (uint32_t i = 0; i < layout.max_registrations; i++) {
        CHECK_OK(onehop_comm_registration_take(comm, &registration));
        CHECK_INT(i, registration);
    }
    CHECK_RESULT(ONEHOP_ERR_TOO_LARGE, onehop_comm_registration_take(comm, &registration));
    CHECK_CONTAINS("all 5 registrations", onehop_last_error());
    CHECK_OK(onehop_comm_registration_fill(comm, 2, (const void *const *)in, in));
    void *part[2] = {buffers[0], NULL};
    CHECK_RESULT(ONEHOP_ERR_NULL,
                 onehop_comm_registration_fill(comm, 2, (const void *const *)part, in));
    CHECK_CONTAINS("in of rank 1 is NULL", onehop_last_error());
    CHECK_RESULT(ONEHOP_ERR_NULL,
                 onehop_comm_registration_fill(comm, 2, (const void *const *)in, part));
    CHECK_OK(onehop_comm_registration_fill(comm, 3, (const void *const *)in, NULL));
    CHECK_OK(onehop_comm_registration_fill(comm, 4, NULL, NULL));
    CHECK_RESULT(ONEHOP_ERR_ARGUMENT, onehop_comm_registration_fill(comm, 5, NULL, NULL));
    CHECK_CONTAINS("registration 5 is not taken", onehop_last_error());
    CHECK_RESULT(ONEHOP_ERR_ARGUMENT, onehop_comm_registration_release(comm, UINT32_MAX));
    CHECK_OK(onehop_comm_registration_release(comm, 2));
    CHECK_RESULT(ONEHOP_ERR_ARGUMENT, onehop_comm_registration_release(comm, 2));
    CHECK_RESULT(ONEHOP_ERR_ARGUMENT, onehop_comm_registration_fill(comm, 2, NULL, NULL));
    CHECK_OK(onehop_comm_registration_take(comm, &first));
    CHECK_INT(2, first);
    CHECK_RESULT(ONEHOP_ERR_NULL, onehop_comm_registration_take(comm, NULL));
    CHECK_RESULT(ONEHOP_ERR_NULL, onehop_comm_all_reduce(comm, NULL, buffers[0], 4, ONEHOP_FLOAT32,
                                                         ONEHOP_SUM, NULL, NULL));
    release(comm, &good);
    for (int r = 0; r < 2; r++) free(buffers[r]);
}

/* Every default is what the header says. */
static void defaults(void) {
    for (int kind = ONEHOP_DEVICE_CUDA; kind <= ONEHOP_DEVICE_HOST; kind++)
        for (int world_size = 1; world_size <= ONEHOP_MAX_RANKS; world_size++) {
            onehop_layout_config config = ONEHOP_CONFIG_INIT(onehop_layout_config);
            onehop_layout layout;
            const size_t mib = (size_t)1 << 20, total = (kind == ONEHOP_DEVICE_CUDA ? 64 : 4) * mib;
            const size_t max = (kind == ONEHOP_DEVICE_CUDA ? 16 : 1) * mib,
                         pull = (kind == ONEHOP_DEVICE_CUDA ? 32 : 1) * mib,
                         share = total / (2 * (size_t)world_size);
            config.device_kind = (onehop_device_kind)kind;
            config.world_size = world_size;
            CHECK_OK(onehop_layout_get(&config, &layout));
            CHECK_INT((share < max ? share : max) / 4096 * 4096, layout.push_bytes);
            CHECK_INT(pull, layout.pull_bytes);
            CHECK_INT(kind == ONEHOP_DEVICE_CUDA ? 64 : 16, layout.max_blocks);
            CHECK_INT(kind == ONEHOP_DEVICE_CUDA ? 4096 : 256, layout.max_registrations);
            CHECK(layout.symmetric_bytes >=
                  2 * (size_t)world_size * layout.push_bytes + 2 * layout.pull_bytes);
            CHECK_INT(0, layout.symmetric_bytes % 4096 + layout.local_bytes % 256 +
                             layout.host_bytes % 256);
        }
}

/* A communicator of one rank copies; it has no peers to meet. */
static void alone(void) {
    onehop_layout_config plan = layout_config(1);
    onehop_layout layout;
    CHECK_OK(onehop_layout_get(&plan, &layout));
    void *buffers[1] = {aligned_memory(layout.symmetric_bytes)};
    onehop_comm_config config = prepare(0, 1, buffers);
    onehop_comm *comm = NULL;
    float in[5] = {1, -2, 3, -0.0f, 5}, out[5] = {9, 9, 9, 9, 9};
    CHECK_OK(onehop_comm_create(&config, &comm));
    CHECK_OK(onehop_comm_all_reduce(comm, in, out, 5, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, NULL));
    CHECK(memcmp(in, out, sizeof in) == 0);
    CHECK_OK(onehop_comm_all_reduce(comm, out, out, 5, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, NULL));
    CHECK(memcmp(in, out, sizeof in) == 0);
    release(comm, &config);
    free(buffers[0]);
}

int main(void) {
    onehop_group *groups[MAX];
    watchdog(110);
    defaults();
    wrong_memory();
    for (int world_size = 2; world_size <= MAX; world_size += 2) {
        CHECK_OK(onehop_group_open_local(world_size, groups));
        run_threads(world_size, in_thread, groups);
        for (int r = 0; r < world_size; r++) onehop_group_close(groups[r]);
        run_ranks(world_size, in_process, NULL);
    }
    own_mapping();
    alone();
    return 0;
}
