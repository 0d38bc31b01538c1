/* Property: calls of two and of three communicators in flight together on one GPU, begun in another
 * order on each rank, all end and are right (residency.h). Creation refuses grids that would
 * not fit, unless the caller promises that their calls never meet.
 *
 * Ranks are threads that share the GPU, so their grids fill it: with grids as large as for a
 * communicator alone all calls above 8 MiB would wait for each other until the deadline. Prints the
 * grids that each communicator got. With an argument the promise is made and broken: all grids are
 * whole, and the program fails by a TIMEOUT. */
/* labels: timeout=150 */
#include "gpu_ranks.h"

#define COMMUNICATORS 3
#define MAX           ((size_t)64 << 20)

static uint32_t flags;
static onehop_group *groups[COMMUNICATORS][ONEHOP_MAX_RANKS]; /* the first: of gpu_run */

/* One communicator of one rank, with a stream and memory of its own. */
typedef struct lane {
    onehop_context *context;
    onehop_stream stream;
    unsigned char *in, *out, *sum, *expected, *weight;
    uint32_t *wrong;
} lane;

static onehop_config config_for(const gpu_rank *r, onehop_group *group) {
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    config.device.kind = ONEHOP_DEVICE_CUDA;
    config.device.ordinal = r->gpu;
    config.group = group;
    config.timeout_ms = GPU_TIMEOUT_MS;
    config.init_timeout_ms = 60000;
    return config;
}

static void fill_with(const gpu_rank *r, void *to, float value) {
    uint32_t word;
    memcpy(&word, &value, 4);
    gpu_fill_words_later(r, to, word, MAX / 4, r->stream);
}

static lane open_lane(gpu_rank *r, int i) {
    lane l = {r->context,        i == 0 ? r->stream : i == 1 ? r->second : gpu_stream_make(r),
              gpu_alloc(r, MAX), gpu_alloc(r, MAX),
              gpu_alloc(r, MAX), gpu_alloc(r, MAX),
              gpu_alloc(r, MAX), gpu_alloc(r, 4)};
    if (i > 0) {
        onehop_config config = config_for(r, groups[i][r->rank]);
        config.flags = flags;
        CHECK_OK(onehop_create(&config, &l.context));
    }
    fill_with(r, l.in, (float)((r->rank + 1) * (i + 1)));
    fill_with(r, l.expected, (float)(r->world * (r->world + 1) / 2 * (i + 1)));
    fill_with(r, l.weight, 1);
    gpu_fill(r, l.wrong, 0, 4);
    gpu_spin_later(r, 1, l.stream);
    while (!gpu_stream_idle(r, l.stream)) sleep_ms(1);
    return l;
}

static void close_lane(gpu_rank *r, lane *l, int i) {
    void *const all[] = {l->in, l->out, l->sum, l->expected, l->weight, l->wrong};
    for (size_t k = 0; k < sizeof all / sizeof *all; k++) gpu_free(r, all[k]);
    if (i > 0) onehop_destroy(l->context);
    if (i > 1) gpu_stream_free(r, l->stream);
}

/* The sum, alone or with the norm: then it is residual_out. */
static onehop_result call(lane *l, size_t bytes, bool norm) {
    onehop_norm n = ONEHOP_CONFIG_INIT(onehop_norm);
    if (!norm)
        return onehop_all_reduce(l->context, l->in, l->sum, bytes / 4, ONEHOP_FLOAT32, ONEHOP_SUM,
                                 NULL, l->stream);
    n.x = l->in;
    n.weight = l->weight;
    n.normed = l->out;
    n.residual_out = l->sum;
    n.hidden = 1024;
    n.rows = bytes / 4096;
    n.dtype = ONEHOP_FLOAT32;
    n.eps = 1e-6f;
    return onehop_all_reduce_norm(l->context, &n, NULL, l->stream);
}

static void begin(const gpu_rank *r, lane *lanes, int count, size_t bytes, int round) {
    for (int k = 0; k < count; k++) {
        /* Each rank begins with another communicator, and every second goes backwards. */
        const int at = r->rank % 2 ? count - 1 - k : k, i = (at + r->rank / 2 + round) % count;
        CHECK_OK(call(&lanes[i], bytes, (i + round) % 2));
    }
}

static void end(const gpu_rank *r, lane *lanes, int count, size_t bytes, int round) {
    for (int i = 0; i < count; i++) {
        const onehop_result result = onehop_synchronize(lanes[i].context, lanes[i].stream);
        if (result)
            FAIL("rank %d of %d, %d communicators, %zu bytes, round %d, communicator %d: %s",
                 r->rank, r->world, count, bytes, round, i, onehop_last_error());
    }
}

static void check(const gpu_rank *r, lane *lanes, int count, size_t bytes) {
    uint32_t *wrong = r->pinned;
    for (int i = 0; i < count; i++) {
        lane *l = &lanes[i];
        gpu_compare_later(r, l->sum, l->expected, bytes / 4, l->wrong, r->stream);
        gpu_read(r, wrong, l->wrong, 4);
        if (*wrong)
            FAIL("rank %d of %d, %d communicators, %zu bytes: communicator %d has %u wrong sums",
                 r->rank, r->world, count, bytes, i, *wrong);
        gpu_fill(r, l->sum, 0xA5, bytes);
    }
}

static void together(gpu_rank *r, lane *lanes, int count) {
    static const size_t sizes[] = {4096, 65536, 1 << 20, 4 << 20, 8 << 20, 16 << 20, 32 << 20, MAX};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        const int rounds = sizes[s] > (4 << 20) ? 12 : 40;
        for (int i = 0; i < count; i++) { /* alone: kernels are loaded */
            begin(r, &lanes[i], 1, sizes[s], i);
            end(r, &lanes[i], 1, sizes[s], i);
            gpu_barrier(r);
        }
        for (int round = 0; round < rounds; round++) {
            gpu_barrier(r);
            begin(r, lanes, count, sizes[s], round);
            end(r, lanes, count, sizes[s], round);
        }
        gpu_barrier(r);
        check(r, lanes, count, sizes[s]);
        gpu_barrier(r);
    }
}

static uint32_t blocks_of(const onehop_context *context) {
    return context->regions.max_blocks;
}

/* A fourth beside them: too large a grid is refused, on all ranks alike; with the promise it may be
 * as large as if it were alone. */
static void refuse(gpu_rank *r, onehop_group *group, const lane *lanes) {
    onehop_config config = config_for(r, group);
    onehop_context *context;
    config.max_blocks = blocks_of(lanes[0].context);
    CHECK_RESULT(ONEHOP_ERR_ARGUMENT, onehop_create(&config, &context));
    CHECK_CONTAINS("ONEHOP_FLAG_ORDERED", onehop_last_error());
    config.max_blocks = 0;
    config.flags = ONEHOP_FLAG_ORDERED;
    CHECK_OK(onehop_create(&config, &context));
    CHECK_INT(blocks_of(lanes[0].context), blocks_of(context));
    gpu_barrier(r);
    onehop_destroy(context);
}

static void rank_main(gpu_rank *r, int here, void *argument) {
    onehop_group *const *extra = argument;
    lane lanes[COMMUNICATORS];
    (void)here;
    for (int i = 0; i < COMMUNICATORS; i++) lanes[i] = open_lane(r, i);
    if (r->rank == 0)
        printf(
            "world size %d: grids of at most %u, %u and %u blocks on a GPU of %u multiprocessors\n",
            r->world, blocks_of(lanes[0].context), blocks_of(lanes[1].context),
            blocks_of(lanes[2].context), r->multiprocessors);
    gpu_barrier(r);
    together(r, lanes, 2);
    together(r, lanes, COMMUNICATORS);
    refuse(r, extra[r->rank], lanes);
    gpu_barrier(r);
    for (int i = 0; i < COMMUNICATORS; i++) close_lane(r, &lanes[i], i);
}

static void run(int world, int gpus) {
    const gpu_setup setup = {.layout = GPU_THREADS, .world = world, .gpus = gpus};
    onehop_group *extra[ONEHOP_MAX_RANKS];
    const double start = seconds_now();
    for (int i = 1; i < COMMUNICATORS; i++) CHECK_OK(onehop_group_open_local(world, groups[i]));
    CHECK_OK(onehop_group_open_local(world, extra));
    gpu_run(&setup, rank_main, extra);
    for (int r = 0; r < world; r++) {
        for (int i = 1; i < COMMUNICATORS; i++) onehop_group_close(groups[i][r]);
        onehop_group_close(extra[r]);
    }
    printf("world size %d on %d GPU%s: all calls right, %.1f s\n", world, gpus, gpus > 1 ? "s" : "",
           seconds_now() - start);
}

static void all(void *argument) {
    const int gpus = *(int *)argument;
    run(2, 1);
    run(4, 1);
    if (gpus > 1) run(2, 2);
}

int main(int argc, char **argv) {
    int gpus = gpu_main(140, 1);
    (void)argv;
    flags = argc > 1 ? ONEHOP_FLAG_ORDERED : 0;
    gpu_apart(all, &gpus);
    return 0;
}
