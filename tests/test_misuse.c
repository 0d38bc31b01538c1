/* Property: every wrong argument gets its own status and a sentence that says what was expected and
 * found, and leaves the object as good as it was. */
/* labels: quick */
#define ONEHOP_EXPERIMENTAL
#include "fault_kit.h"

#define REFUSED(expected, part, call)                                                              \
    do {                                                                                           \
        CHECK_RESULT(expected, call);                                                              \
        CHECK_CONTAINS(part, onehop_last_error());                                                 \
    } while (0)

static const onehop_device host = {ONEHOP_DEVICE_HOST, 0};
static float a[4096], b[4096], c[4096];

/* ---- two ranks in one thread: a context that is still good ----------------------------------- */

typedef struct pair {
    onehop_context *contexts[2];
    onehop_stream streams[2];
} pair;

static void pair_open(pair *p) {
    onehop_config config = kit_config(KIT_PATIENCE_MS);
    CHECK_OK(onehop_create_all(&config, 2, NULL, p->contexts));
    for (int r = 0; r < 2; r++) CHECK_OK(onehop_host_stream_create(&p->streams[r]));
}

static void pair_close(pair *p) {
    for (int r = 0; r < 2; r++) {
        onehop_destroy(p->contexts[r]);
        onehop_host_stream_destroy(p->streams[r]);
    }
}

static void pair_works(pair *p) {
    static unsigned call;
    float in[2][300], out[2][300];
    call++;
    for (int r = 0; r < 2; r++) {
        kit_fill(in[r], 300, r, call);
        CHECK_OK(onehop_all_reduce(p->contexts[r], in[r], out[r], 300, ONEHOP_FLOAT32, ONEHOP_SUM,
                                   NULL, p->streams[r]));
    }
    for (int r = 0; r < 2; r++) {
        CHECK_OK(onehop_synchronize(p->contexts[r], p->streams[r]));
        kit_check(out[r], 300, 2, call);
    }
}

static void arguments_of_calls(void) {
    pair p;
    onehop_choice choice;
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    char *bytes = (char *)a;
    pair_open(&p);
    onehop_context *ctx = p.contexts[0];
    onehop_stream s = p.streams[0];
    onehop_stats before, after;
    CHECK_OK(onehop_get_stats(ctx, &before));

#define CALL(in, out, n, type, op)                                                                 \
    onehop_all_reduce(ctx, in, out, n, (onehop_dtype)(type), (onehop_op)(op), NULL, s)
    REFUSED(ONEHOP_ERR_NULL, "in is NULL", CALL(NULL, b, 8, 1, 1));
    REFUSED(ONEHOP_ERR_NULL, "out is NULL", CALL(a, NULL, 8, 1, 1));
    REFUSED(ONEHOP_ERR_DTYPE, "data type 0 is unknown; expected float32 (1)", CALL(a, b, 8, 0, 1));
    REFUSED(ONEHOP_ERR_DTYPE, "data type 77", CALL(a, b, 8, 77, 1));
    REFUSED(ONEHOP_ERR_DTYPE, "data type -1", CALL(a, b, 8, -1, 1));
    REFUSED(ONEHOP_ERR_OP, "reduction 0 is unknown; expected sum (1)", CALL(a, b, 8, 1, 0));
    REFUSED(ONEHOP_ERR_OP, "reduction 2", CALL(a, b, 8, 1, 2));
    REFUSED(ONEHOP_ERR_DTYPE, "data type 0", CALL(a, b, 0, 0, 1)); /* also of nothing */
    call.prefetch_bytes = 5;
    REFUSED(ONEHOP_ERR_NULL, "prefetch is NULL, its bytes are 5",
            onehop_all_reduce(ctx, a, b, 8, ONEHOP_FLOAT32, ONEHOP_SUM, &call, s));
    call.prefetch_bytes = 0;
    for (int i = ONEHOP_ALGORITHM_AUTO; i <= ONEHOP_LOCAL_COPY; i++) { /* by whatever name */
        call.algorithm = (onehop_algorithm)i;
        REFUSED(ONEHOP_ERR_OP, "reduction 3",
                onehop_all_reduce(ctx, a, b, 8, ONEHOP_FLOAT32, (onehop_op)3, &call, s));
        REFUSED(ONEHOP_ERR_DTYPE, "data type 4",
                onehop_all_reduce(ctx, a, b, 8, (onehop_dtype)4, ONEHOP_SUM, &call, s));
    }
    for (int off = 1; off < 4; off++) {
        REFUSED(ONEHOP_ERR_ALIGNMENT, "in at", CALL(bytes + off, b, 8, ONEHOP_FLOAT32, 1));
        REFUSED(ONEHOP_ERR_ALIGNMENT, "out at", CALL(b, bytes + off, 8, ONEHOP_FLOAT32, 1));
    }
    REFUSED(ONEHOP_ERR_ALIGNMENT, "2-byte element", CALL(bytes + 1, b, 8, ONEHOP_FLOAT16, 1));
    REFUSED(ONEHOP_ERR_ALIGNMENT, "2-byte element", CALL(b, bytes + 3, 8, ONEHOP_BFLOAT16, 1));
    REFUSED(ONEHOP_ERR_OVERLAP, "overlap without being equal", CALL(a, a + 1, 8, 1, 1));
    REFUSED(ONEHOP_ERR_OVERLAP, "overlap", CALL(a + 7, a, 8, 1, 1));
    REFUSED(ONEHOP_ERR_OVERLAP, "overlap", CALL(a, bytes + 2, 8, ONEHOP_FLOAT16, 1));
    REFUSED(ONEHOP_ERR_TOO_LARGE, "at most 2^40 bytes", CALL(a, b, ((size_t)1 << 38) + 1, 1, 1));
    REFUSED(ONEHOP_ERR_TOO_LARGE, "at most 2^40 bytes", CALL(a, b, SIZE_MAX, 1, 1));
#undef CALL
    REFUSED(ONEHOP_ERR_STREAM, "not a live stream",
            onehop_all_reduce(ctx, a, b, 8, ONEHOP_FLOAT32, ONEHOP_SUM, NULL,
                              (onehop_stream)(void *)a));
    REFUSED(ONEHOP_ERR_STREAM,
            "onehop_create_all", /* would wait for ranks that this thread drives */
            onehop_all_reduce(ctx, a, b, 8, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, NULL));
    CHECK_OK(onehop_all_reduce(ctx, NULL, NULL, 0, ONEHOP_FLOAT32, ONEHOP_SUM, NULL,
                               s)); /* nothing to do */

#define WITH(field, value)                                                                         \
    (memset((char *)&call + sizeof call.struct_size, 0, sizeof call - sizeof call.struct_size),    \
     call.field = (value), onehop_all_reduce(ctx, a, b, 8, ONEHOP_FLOAT32, ONEHOP_SUM, &call, s))
    REFUSED(ONEHOP_ERR_ALGORITHM, "(99) is not available on the host device",
            WITH(algorithm, (onehop_algorithm)99));
    REFUSED(ONEHOP_ERR_ALGORITHM, "nccl", WITH(algorithm, ONEHOP_NCCL));
    REFUSED(ONEHOP_ERR_ALGORITHM, "local_copy", WITH(algorithm, ONEHOP_LOCAL_COPY));
    REFUSED(ONEHOP_ERR_ALGORITHM, "source workspace", WITH(source, ONEHOP_SOURCE_WORKSPACE));
    REFUSED(ONEHOP_ERR_ALGORITHM, "source graph needs a call that is captured",
            WITH(algorithm, (call.source = ONEHOP_SOURCE_GRAPH, ONEHOP_1SHOT_PULL)));
    REFUSED(ONEHOP_ERR_ALGORITHM, "source multicast is off: ONEHOP_MULTICAST is not 1. It needs",
            WITH(algorithm, (call.source = ONEHOP_SOURCE_MULTICAST, ONEHOP_2SHOT_PULL)));
    REFUSED(ONEHOP_ERR_ALGORITHM, "takes 1..1 blocks here, found 5", WITH(blocks, 5));
    REFUSED(ONEHOP_ERR_ALGORITHM, "takes 1..1 threads", WITH(threads, 32));
    call.algorithm = ONEHOP_1SHOT_PUSH;
    call.threads = 0;
    call.blocks = 17;
    REFUSED(ONEHOP_ERR_ALGORITHM, "takes 2..16 blocks here, found 17",
            onehop_all_reduce(ctx, a, b, 8, ONEHOP_FLOAT32, ONEHOP_SUM, &call, s));
    call.blocks = 1;
    REFUSED(ONEHOP_ERR_ALGORITHM, "found 1",
            onehop_all_reduce(ctx, a, b, 8, ONEHOP_FLOAT32, ONEHOP_SUM, &call, s));
#undef WITH
    REFUSED(ONEHOP_ERR_ARGUMENT, "mode is 7, expected eager (0) or graph (1)",
            would_use(ctx, 64, ONEHOP_FLOAT32, ONEHOP_SUM, (onehop_mode)7, 0, &choice));
    REFUSED(ONEHOP_ERR_ARGUMENT, "6 bytes, expected a positive multiple of 4",
            would_use(ctx, 6, ONEHOP_FLOAT32, ONEHOP_SUM, ONEHOP_MODE_EAGER, 0, &choice));
    REFUSED(ONEHOP_ERR_ARGUMENT, "0 bytes",
            would_use(ctx, 0, ONEHOP_FLOAT32, ONEHOP_SUM, ONEHOP_MODE_EAGER, 0, &choice));
    REFUSED(ONEHOP_ERR_DTYPE, "data type 9",
            would_use(ctx, 64, (onehop_dtype)9, ONEHOP_SUM, ONEHOP_MODE_EAGER, 0, &choice));
    REFUSED(ONEHOP_ERR_OP, "reduction 9",
            would_use(ctx, 64, ONEHOP_FLOAT32, (onehop_op)9, ONEHOP_MODE_EAGER, 0, &choice));
    REFUSED(ONEHOP_ERR_ARGUMENT, "0 ms, expected 1..", onehop_set_timeout(ctx, 0));
    REFUSED(ONEHOP_ERR_ARGUMENT, "4294967295 ms", onehop_set_timeout(ctx, UINT32_MAX));
    REFUSED(ONEHOP_ERR_STATE, "not capturing", onehop_capture_end(ctx));
    REFUSED(ONEHOP_ERR_STATE, "not capturing", onehop_capture_end_all(p.contexts, 2));
    CHECK_OK(onehop_capture_begin_all(p.contexts, 2));
    REFUSED(ONEHOP_ERR_STATE, "already capturing", onehop_capture_begin(ctx));
    REFUSED(ONEHOP_ERR_STATE, "rank 0 is already capturing",
            onehop_capture_begin_all(p.contexts, 2));
    REFUSED(ONEHOP_ERR_STATE, "onehop_capture_end_all", onehop_capture_end(ctx));
    REFUSED(ONEHOP_ERR_ARGUMENT, "expected rank 0 of 1", onehop_capture_end_all(p.contexts, 1));
    REFUSED(ONEHOP_ERR_ARGUMENT, "n is 0", onehop_capture_end_all(p.contexts, 0));
    CHECK_OK(onehop_capture_end_all(p.contexts, 2)); /* the refused ends have ended nothing */
    CHECK_OK(onehop_get_stats(ctx, &after));
    CHECK_INT(before.calls, after.calls);
    pair_works(&p);
    pair_works(&p);
    CHECK_OK(onehop_status(ctx, NULL));
    pair_close(&p);
}

static void null_pointers(void) {
    pair p;
    onehop_context *none[2] = {NULL, NULL}, *context = NULL;
    onehop_config config = kit_config(0);
    onehop_group_config group_config = ONEHOP_CONFIG_INIT(onehop_group_config);
    onehop_layout_config layout_config = ONEHOP_CONFIG_INIT(onehop_layout_config);
    onehop_group *groups[2], *group = NULL;
    onehop_layout layout;
    onehop_choice choice;
    onehop_stats stats;
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    onehop_host_graph *graph = NULL;
    uint32_t row;
    void *memory = NULL;
    onehop_symmetric *symmetric = NULL;
    onehop_comm *comm = NULL;
    pair_open(&p);
    CHECK_OK(onehop_group_open_local(2, groups));

    REFUSED(ONEHOP_ERR_NULL, "config", onehop_group_open(NULL, &group));
    REFUSED(ONEHOP_ERR_NULL, "group_out", onehop_group_open(&group_config, NULL));
    REFUSED(ONEHOP_ERR_NULL, "groups_out", onehop_group_open_local(2, NULL));
    REFUSED(ONEHOP_ERR_NULL, "group is NULL", onehop_group_allgather(NULL, a, b, 4));
    REFUSED(ONEHOP_ERR_NULL, "send or recv", onehop_group_allgather(groups[0], NULL, b, 4));
    REFUSED(ONEHOP_ERR_NULL, "send or recv", onehop_group_allgather(groups[0], a, NULL, 4));
    REFUSED(ONEHOP_ERR_ARGUMENT, "at most",
            onehop_group_allgather(groups[0], a, b, ((size_t)16 << 20) + 1));
    REFUSED(ONEHOP_ERR_NULL, "group is NULL", onehop_group_barrier(NULL));
    REFUSED(ONEHOP_ERR_NULL, "NULL", onehop_group_shrink(NULL, NULL, 0, &group));
    REFUSED(ONEHOP_ERR_UNSUPPORTED, "cannot shrink",
            onehop_group_shrink(groups[0], NULL, 0, &group));
    CHECK_INT(-1, onehop_group_rank(NULL));
    CHECK_INT(0, onehop_group_size(NULL));
    REFUSED(ONEHOP_ERR_NULL, "ptr_out", onehop_mem_alloc(host, 64, NULL));
    REFUSED(ONEHOP_ERR_ARGUMENT, "bytes is 0", onehop_mem_alloc(host, 0, &memory));
    REFUSED(ONEHOP_ERR_NULL, "group is NULL", onehop_symmetric_alloc(NULL, host, 64, &symmetric));
    REFUSED(ONEHOP_ERR_NULL, "symmetric_out", onehop_symmetric_alloc(groups[0], host, 64, NULL));
    CHECK(onehop_symmetric_ptr(NULL, 0) == NULL);
    REFUSED(ONEHOP_ERR_NULL, "config", onehop_layout_get(NULL, &layout));
    REFUSED(ONEHOP_ERR_NULL, "layout_out", onehop_layout_get(&layout_config, NULL));
    REFUSED(ONEHOP_ERR_NULL, "NULL", onehop_storage_arm(NULL, host, a, b, c));
    REFUSED(ONEHOP_ERR_NULL, "NULL", onehop_storage_arm(&layout_config, host, NULL, b, c));
    REFUSED(ONEHOP_ERR_NULL, "NULL", onehop_storage_arm(&layout_config, host, a, NULL, c));
    REFUSED(ONEHOP_ERR_NULL, "NULL", onehop_storage_arm(&layout_config, host, a, b, NULL));
    REFUSED(ONEHOP_ERR_NULL, "config", onehop_comm_create(NULL, &comm));
    REFUSED(ONEHOP_ERR_NULL, "comm",
            onehop_comm_all_reduce(NULL, a, b, 8, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, NULL));
    REFUSED(ONEHOP_ERR_NULL, "NULL", onehop_comm_registration_take(NULL, &row));
    REFUSED(ONEHOP_ERR_NULL, "comm", onehop_comm_registration_fill(NULL, 0, NULL, NULL));
    REFUSED(ONEHOP_ERR_NULL, "comm", onehop_comm_registration_release(NULL, 0));
    REFUSED(ONEHOP_ERR_NULL, "config", onehop_create(NULL, &context));
    REFUSED(ONEHOP_ERR_NULL, "context_out", onehop_create(&config, NULL));
    REFUSED(ONEHOP_ERR_NULL, "config", onehop_create_all(NULL, 2, NULL, none));
    REFUSED(ONEHOP_ERR_NULL, "contexts_out", onehop_create_all(&config, 2, NULL, NULL));
    CHECK_INT(-1, onehop_rank(NULL));
    CHECK_INT(0, onehop_world_size(NULL));
    CHECK_INT(ONEHOP_DEVICE_AUTO, onehop_get_device(NULL).kind);
    REFUSED(ONEHOP_ERR_NULL, "context",
            onehop_all_reduce(NULL, a, b, 8, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, NULL));
    REFUSED(ONEHOP_ERR_NULL, "context",
            onehop_all_reduce(NULL, a, b, 8, ONEHOP_FLOAT32, ONEHOP_SUM, &call, NULL));
    REFUSED(ONEHOP_ERR_NULL, "context",
            would_use(NULL, 8, ONEHOP_FLOAT32, ONEHOP_SUM, 0, 0, &choice));
    REFUSED(ONEHOP_ERR_NULL, "choice_out",
            would_use(p.contexts[0], 8, ONEHOP_FLOAT32, ONEHOP_SUM, 0, 0, NULL));
    REFUSED(ONEHOP_ERR_NULL, "context", onehop_capture_begin(NULL));
    REFUSED(ONEHOP_ERR_NULL, "context", onehop_capture_end(NULL));
    REFUSED(ONEHOP_ERR_NULL, "contexts", onehop_capture_begin_all(NULL, 2));
    REFUSED(ONEHOP_ERR_NULL, "context 0", onehop_capture_begin_all(none, 2));
    REFUSED(ONEHOP_ERR_NULL, "contexts", onehop_capture_end_all(NULL, 2));
    REFUSED(ONEHOP_ERR_NULL, "context 0", onehop_capture_end_all(none, 2));
    REFUSED(ONEHOP_ERR_NULL, "context", onehop_synchronize(NULL, NULL));
    REFUSED(ONEHOP_ERR_NULL, "context", onehop_status(NULL, NULL));
    REFUSED(ONEHOP_ERR_NULL, "context", onehop_abort(NULL));
    REFUSED(ONEHOP_ERR_NULL, "context", onehop_set_timeout(NULL, 1));
    REFUSED(ONEHOP_ERR_NULL, "context", onehop_get_stats(NULL, &stats));
    REFUSED(ONEHOP_ERR_NULL, "stats_out", onehop_get_stats(p.contexts[0], NULL));
    REFUSED(ONEHOP_ERR_NULL, "stream_out", onehop_host_stream_create(NULL));
    REFUSED(ONEHOP_ERR_NULL, "stream", onehop_host_stream_synchronize(NULL));
    REFUSED(ONEHOP_ERR_NULL, "stream", onehop_host_stream_capture_begin(NULL));
    REFUSED(ONEHOP_ERR_NULL, "stream", onehop_host_stream_capture_end(NULL, &graph));
    REFUSED(ONEHOP_ERR_NULL, "graph_out", onehop_host_stream_capture_end(p.streams[0], NULL));
    REFUSED(ONEHOP_ERR_NULL, "graph", onehop_host_graph_launch(NULL, p.streams[0]));
    REFUSED(ONEHOP_ERR_STATE, "not being captured",
            onehop_host_stream_capture_end(p.streams[0], &graph));
    CHECK_OK(onehop_host_stream_capture_begin(p.streams[0]));
    REFUSED(ONEHOP_ERR_STATE, "already", onehop_host_stream_capture_begin(p.streams[0]));
    REFUSED(ONEHOP_ERR_STATE, "synchronized", onehop_host_stream_synchronize(p.streams[0]));
    CHECK_OK(onehop_host_stream_capture_end(p.streams[0], &graph));
    onehop_host_graph_destroy(graph);
    CHECK(group == NULL && context == NULL && comm == NULL && symmetric == NULL && memory == NULL);

    onehop_group_close(NULL);
    onehop_mem_free(NULL);
    onehop_symmetric_free(NULL);
    onehop_comm_destroy(NULL);
    onehop_destroy(NULL);
    onehop_host_graph_destroy(NULL);
    onehop_host_stream_destroy(NULL);
    pair_works(&p);
    pair_close(&p);
    for (int r = 0; r < 2; r++) onehop_group_close(groups[r]);
}

/* ---- places and sizes ------------------------------------------------------------------------ */

static void places(void) {
    static const int bad_worlds[] = {-1, 17, 1 << 30};
    static const int bad_ranks[] = {-1, 2, 1 << 30};
    onehop_config config = kit_config(0);
    onehop_group_config group_config = ONEHOP_CONFIG_INIT(onehop_group_config);
    onehop_layout_config layout_config = ONEHOP_CONFIG_INIT(onehop_layout_config);
    onehop_context *contexts[17] = {NULL};
    onehop_group *groups[17] = {NULL};
    onehop_layout layout;
    char found[24];
    config.name = group_config.name = "places, never opened";
    layout_config.device_kind = ONEHOP_DEVICE_HOST;
    for (int i = 0; i < 3; i++) {
        config.rank = group_config.rank = 0;
        config.world_size = group_config.world_size = layout_config.world_size = bad_worlds[i];
        snprintf(found, sizeof found, "is %d", bad_worlds[i]);
        REFUSED(ONEHOP_ERR_WORLD_SIZE, found, onehop_create(&config, contexts));
        REFUSED(ONEHOP_ERR_WORLD_SIZE, found, onehop_group_open(&group_config, groups));
        REFUSED(ONEHOP_ERR_WORLD_SIZE, found, onehop_group_open_local(bad_worlds[i], groups));
        REFUSED(ONEHOP_ERR_WORLD_SIZE, found, onehop_layout_get(&layout_config, &layout));
        config.world_size = group_config.world_size = 2;
        config.rank = group_config.rank = bad_ranks[i];
        snprintf(found, sizeof found, "is %d", bad_ranks[i]);
        REFUSED(ONEHOP_ERR_RANK, found, onehop_create(&config, contexts));
        CHECK_CONTAINS("expected 0 to 1", onehop_last_error());
        REFUSED(ONEHOP_ERR_RANK, found, onehop_group_open(&group_config, groups));
    }
    config = kit_config(0);
    REFUSED(ONEHOP_ERR_WORLD_SIZE, "is 0", onehop_group_open_local(0, groups));
    REFUSED(ONEHOP_ERR_WORLD_SIZE, "n is 0, expected 1..16",
            onehop_create_all(&config, 0, NULL, contexts));
    REFUSED(ONEHOP_ERR_WORLD_SIZE, "n is 17", onehop_create_all(&config, 17, NULL, contexts));
    REFUSED(ONEHOP_ERR_WORLD_SIZE, "n is -1", onehop_create_all(&config, -1, NULL, contexts));
    config.world_size = 2;
    REFUSED(ONEHOP_ERR_ARGUMENT, "must be zero", onehop_create_all(&config, 2, NULL, contexts));

    config = kit_config(0);
#define SETTING(field, value, result, part)                                                        \
    do {                                                                                           \
        onehop_config wrong = config;                                                              \
        wrong.field = (value);                                                                     \
        REFUSED(result, part, onehop_create_all(&wrong, 2, NULL, contexts));                       \
    } while (0)
    SETTING(push_bytes, 4097, ONEHOP_ERR_ARGUMENT,
            "push_bytes is 4097, expected a multiple of 4096");
    SETTING(push_bytes, (size_t)8 << 30, ONEHOP_ERR_ARGUMENT, "push_bytes");
    SETTING(pull_bytes, 100, ONEHOP_ERR_ARGUMENT, "pull_bytes is 100, expected a multiple of 4096");
    SETTING(max_blocks, 1, ONEHOP_ERR_ARGUMENT, "max_blocks is 1, expected 2..1024");
    SETTING(max_blocks, 1025, ONEHOP_ERR_ARGUMENT, "max_blocks is 1025");
    SETTING(max_registrations, (1u << 20) + 1, ONEHOP_ERR_ARGUMENT, "max_registrations is 1048577");
    SETTING(flags, 0x80, ONEHOP_ERR_ARGUMENT, "flags 0x80");
    SETTING(max_bytes, ((size_t)128 << 20) + 1, ONEHOP_ERR_TOO_LARGE,
            "max_bytes is 134217729, expected at most 128 MiB");
    SETTING(timeout_ms, UINT32_MAX, ONEHOP_ERR_ARGUMENT, "timeout_ms is 4294967295");
    SETTING(device.kind, (onehop_device_kind)9, ONEHOP_ERR_ARGUMENT, "device kind is 9");
    onehop_config gpu = config;
    gpu.device.kind = ONEHOP_DEVICE_CUDA;
    gpu.device.ordinal = 9999; /* absent with and without GPUs */
    CHECK_RESULT(ONEHOP_ERR_NO_DEVICE, onehop_create_all(&gpu, 2, NULL, contexts));
    CHECK(strlen(onehop_last_error()) > 20);
    onehop_device device = {ONEHOP_DEVICE_CUDA, 9999};
    void *memory = NULL;
    CHECK_RESULT(ONEHOP_ERR_NO_DEVICE, onehop_mem_alloc(device, 64, &memory));
    CHECK(contexts[0] == NULL && groups[0] == NULL && memory == NULL);
#undef SETTING
}

/* Sizes that no struct has; a longer struct is fine if it sets nothing we do not know. */
#define TRY_SIZES(type, object, call)                                                              \
    do {                                                                                           \
        static const size_t bad[] = {0,       1,       8, sizeof(type) - 1, sizeof(type) + 1,      \
                                     1 << 20, SIZE_MAX};                                           \
        for (size_t i_ = 0; i_ < sizeof bad / sizeof *bad; i_++) {                                 \
            (object)->struct_size = bad[i_];                                                       \
            REFUSED(ONEHOP_ERR_STRUCT_SIZE, #type, call);                                          \
        }                                                                                          \
        (object)->struct_size = sizeof(type) + 2 * sizeof(size_t);                                 \
        ((size_t *)((object) + 1))[1] = 5;                                                         \
        REFUSED(ONEHOP_ERR_STRUCT_SIZE, "does not have", call);                                    \
        ((size_t *)((object) + 1))[1] = 0;                                                         \
    } while (0)

static void struct_sizes(void) {
    struct {
        onehop_config config;
        size_t tail[2];
    } config = {.config = kit_config(0)};
    struct {
        onehop_group_config config;
        size_t tail[2];
    } group = {.config = {.world_size = 1}};
    struct {
        onehop_layout_config config;
        size_t tail[2];
    } layout = {.config = {.device_kind = ONEHOP_DEVICE_HOST, .world_size = 2}};
    struct {
        onehop_comm_config config;
        size_t tail[2];
    } comm = {.config = {.device = host, .world_size = 2}};
    struct {
        onehop_call call;
        size_t tail[2];
    } call = {.call = {.algorithm = ONEHOP_ALGORITHM_AUTO}};
    onehop_context *contexts[2];
    onehop_group *opened;
    onehop_layout sizes;
    onehop_comm *made;
    pair p;
    pair_open(&p);
    TRY_SIZES(onehop_config, &config.config, onehop_create_all(&config.config, 2, NULL, contexts));
    CHECK_OK(onehop_create_all(&config.config, 2, NULL, contexts));
    for (int r = 0; r < 2; r++) onehop_destroy(contexts[r]);
    config.config.world_size = 1;
    TRY_SIZES(onehop_config, &config.config, onehop_create(&config.config, contexts));
    CHECK_OK(onehop_create(&config.config, contexts));
    onehop_destroy(contexts[0]);
    TRY_SIZES(onehop_group_config, &group.config, onehop_group_open(&group.config, &opened));
    CHECK_OK(onehop_group_open(&group.config, &opened));
    onehop_group_close(opened);
    TRY_SIZES(onehop_layout_config, &layout.config, onehop_layout_get(&layout.config, &sizes));
    CHECK_OK(onehop_layout_get(&layout.config, &sizes));
    TRY_SIZES(onehop_comm_config, &comm.config, onehop_comm_create(&comm.config, &made));
    TRY_SIZES(onehop_call, &call.call,
              onehop_all_reduce(p.contexts[0], a, b, 8, ONEHOP_FLOAT32, ONEHOP_SUM, &call.call,
                                p.streams[0]));
    call.call.prefetch = a; /* a matter of each rank alone */
    for (int r = 0; r < 2; r++, call.call.prefetch_bytes = sizeof *a)
        CHECK_OK(onehop_all_reduce(p.contexts[r], r ? c : a, b + 100 * r, 8, ONEHOP_FLOAT32,
                                   ONEHOP_SUM, &call.call, p.streams[r]));
    for (int r = 0; r < 2; r++) CHECK_OK(onehop_synchronize(p.contexts[r], p.streams[r]));
    pair_works(&p);
    pair_close(&p);
}

/* ---- environment ----------------------------------------------------------------------------- */

typedef struct setting {
    const char *name, *value;
} setting;

static void with_setting(int rank, int world_size, void *argument) {
    const setting *s = argument;
    onehop_config config = kit_config(0);
    onehop_context *context = NULL, *all[2] = {NULL, NULL};
    char quoted[80];
    (void)rank, (void)world_size;
    setenv("RANK", "0", 1);
    setenv("WORLD_SIZE", "1", 1);
    setenv(s->name, s->value, 1);
    config.device.kind = ONEHOP_DEVICE_AUTO;
    config.init_timeout_ms = 0;
    onehop_result result = onehop_create(&config, &context);
    config.world_size = 0;
    if (!result) {
        onehop_destroy(context);
        result = onehop_create_all(&config, 2, NULL, all);
    }
    if (result != ONEHOP_ERR_ENVIRONMENT)
        FAIL("%s=%s: expected ENVIRONMENT, found %s", s->name, s->value,
             onehop_result_name(result));
    CHECK_CONTAINS(s->name, onehop_last_error());
    snprintf(quoted, sizeof quoted, "is \"%s\": expected", s->value);
    CHECK_CONTAINS(quoted, onehop_last_error());
    CHECK(all[0] == NULL);
    unsetenv(s->name);
    CHECK_OK(onehop_create_all(&config, 2, NULL, all)); /* the process is as good as before */
    for (int r = 0; r < 2; r++) onehop_destroy(all[r]);
}

/* Rank 1's environment is wrong in what this program's config and device would never ask for. */
static void with_setting_of_one(int rank, int world_size, void *argument) {
    const setting *s = argument;
    onehop_config config = kit_config(20000);
    onehop_context *context = NULL;
    char quoted[80];
    const kit_name name = kit_own_name(s->name);
    config.rank = rank;
    config.world_size = world_size;
    config.name = name.text;
    if (rank == 1) setenv(s->name, s->value, 1);
    const double start = seconds_now();
    CHECK_RESULT(ONEHOP_ERR_ENVIRONMENT, onehop_create(&config, &context));
    CHECK(seconds_now() - start < 5);
    snprintf(quoted, sizeof quoted, "%s is \"%s\": expected", s->name, s->value);
    CHECK_CONTAINS(quoted, onehop_last_error());
}

static void environment_of_one(void) {
    static const setting bad[] = {
        {"ONEHOP_TIMEOUT_MS", "soon"}, {"ONEHOP_INIT_TIMEOUT_MS", "0"}, {"ONEHOP_DEVICE", "tpu"},
        {"ONEHOP_ISA", "sse9"},        {"ONEHOP_NCCL", "yes"},          {"ONEHOP_MULTICAST", "2"},
        {"ONEHOP_JIT", "garbage"},     {"ONEHOP_JIT_ARCH", "sm_90"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        setting s = bad[i];
        pid_t ranks[2];
        for (int r = 0; r < 2; r++) ranks[r] = start_rank(with_setting_of_one, r, 2, &s);
        for (int r = 0; r < 2; r++) CHECK_INT(0, wait_rank(ranks[r]));
    }
}

static void environment(void) {
    static const setting bad[] = {
        {"ONEHOP_TIMEOUT_MS", "abc"},
        {"ONEHOP_TIMEOUT_MS", "0"},
        {"ONEHOP_TIMEOUT_MS", "-5"},
        {"ONEHOP_TIMEOUT_MS", "1e3"},
        {"ONEHOP_TIMEOUT_MS", "10 "},
        {"ONEHOP_TIMEOUT_MS", "99999999999999999999"},
        {"ONEHOP_LOG", "loud"},
        {"ONEHOP_LOG", "Warn"},
        {"ONEHOP_DEVICE", "tpu"},
        {"ONEHOP_ISA", "sse9"},
        {"RANK", "x"},
        {"RANK", "-1"},
        {"WORLD_SIZE", "two"},
        {"WORLD_SIZE", "0"},
        {"ONEHOP_INIT_TIMEOUT_MS", "0x10"},
        {"LOCAL_WORLD_SIZE", "many"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        setting s = bad[i];
        CHECK_INT(0, wait_rank(start_rank(with_setting, 0, 1, &s)));
    }
}

int main(void) {
    watchdog(110);
    null_pointers();
    arguments_of_calls();
    places();
    struct_sizes();
    environment();
    environment_of_one();
    return 0;
}
