/* labels: quick asan-off tsan-off timeout=60 */
/* Property: no public function takes more than 16 KB of its caller's stack, the C library's frames
 * included. The stack below a call is painted first and looked at afterwards. Then all is done
 * again on a stack that is no larger, with a page below it that ends the process when it is
 * touched: so what painting might not see (a frame that is skipped over) shows too. Sanitizers need
 * more, hence not theirs. */
#include "fault_kit.h"

#include <ucontext.h>

#define ROOM   ((size_t)512 << 10)
#define LIMIT  16384
#define PAINT  0xa5c35a3ca5c35a3cull
#define HIDDEN 16384
#define COUNT  300000
#define OWN    256 /* what this program's frames take above a call */

static uint64_t *stack_end;
static const char *here;
static size_t deepest;
static bool guarded; /* on the small stack, where nothing can be painted */

/* All below this frame, but for what painting itself needs. */
__attribute__((noinline)) static void paint(void) {
    volatile uint64_t *at = stack_end;
    volatile uint64_t *const to = (uint64_t *)__builtin_frame_address(0) - 32;
    if (guarded) return;
    while (at < to) *at++ = PAINT;
}

__attribute__((noinline)) static void look(const char *call) {
    volatile uint64_t *at = stack_end;
    if (guarded) return;
    while (*at == PAINT) at++;
    const size_t depth = (size_t)((char *)__builtin_frame_address(0) - (char *)at);
    if (depth > deepest) here = call;
    if (depth > deepest) deepest = depth;
    if (getenv("STACK_ALL")) printf("%6zu %s\n", depth, call);
    if (depth > LIMIT)
        FAIL("%s takes %zu bytes of stack, at most %d are promised", call, depth, LIMIT);
}

#define STEP(expected, call)                                                                       \
    do {                                                                                           \
        paint();                                                                                   \
        const onehop_result result_ = (call);                                                      \
        look(#call);                                                                               \
        CHECK_RESULT(expected, result_);                                                           \
    } while (0)
#define OK(call) STEP(ONEHOP_OK, call)
#define END(call)                                                                                  \
    do {                                                                                           \
        paint();                                                                                   \
        call;                                                                                      \
        look(#call);                                                                               \
    } while (0)

/* Objects of the one thread that measures; static, so that its own frame is small. */
static int rank;
static onehop_group *group, *second;
static onehop_context *context, *all[ONEHOP_MAX_RANKS];
static onehop_stream stream;
static onehop_host_graph *graph;
static const onehop_device host = {ONEHOP_DEVICE_HOST, 0};
static float *memory, scales[8];
static unsigned char *bytes;

static int through_group(void *user, const void *send, void *recv, size_t size) {
    return onehop_group_allgather(user, send, recv, size) ? -1 : 0;
}

static void open_and_create(void) {
    static onehop_group_config g = ONEHOP_CONFIG_INIT(onehop_group_config);
    static onehop_config config;
    config = kit_config(KIT_PATIENCE_MS);
    g.rank = rank;
    g.world_size = 2;
    g.name = own_name("stack");
    g.allgather = NULL; /* of the run before */
    OK(onehop_group_open(&g, &group));
    g.allgather = through_group;
    g.user = group;
    OK(onehop_group_open(&g, &second));
    OK(onehop_group_barrier(second));
    END(onehop_group_close(second));
    config.group = group;
    config.push_bytes = 1 << 18;
    config.pull_bytes = 1 << 20;
    OK(onehop_create(&config, &context));
    OK(onehop_mem_alloc(host, 4 * COUNT * sizeof *memory, (void **)&memory));
    bytes = calloc(4, COUNT);
}

static void call_each(void) {
    static onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    static const int ways[] = {ONEHOP_1SHOT_PUSH, ONEHOP_2SHOT_PUSH, ONEHOP_1SHOT_PULL,
                               ONEHOP_2SHOT_PULL, ONEHOP_HOST_1SHOT, ONEHOP_HOST_2SHOT};
    for (int i = 0; i < 6; i++)
        for (int type = ONEHOP_FLOAT32; type <= ONEHOP_BFLOAT16; type++) {
            call.algorithm = (onehop_algorithm)ways[i];
            OK(onehop_all_reduce(context, memory, memory + COUNT, COUNT, (onehop_dtype)type,
                                 ONEHOP_SUM, &call, NULL));
        }
    OK(onehop_all_reduce(context, memory, memory, 1001, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, NULL));
    OK(onehop_reduce_scatter(context, memory, memory + 2 * COUNT, COUNT / 2, ONEHOP_FLOAT32,
                             ONEHOP_SUM, NULL, NULL));
    OK(onehop_all_gather(context, memory, memory + COUNT, COUNT, NULL, NULL));
}

static void call_norms(void) {
    static onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    static onehop_norm norm = ONEHOP_CONFIG_INIT(onehop_norm);
    static onehop_qknorm qk = ONEHOP_CONFIG_INIT(onehop_qknorm);
    static const int ways[] = {ONEHOP_1SHOT_PUSH, ONEHOP_2SHOT_PUSH, ONEHOP_HOST_1SHOT};
    norm.x = norm.weight = memory;
    norm.residual_in = memory + COUNT;
    norm.normed = memory + 2 * COUNT;
    norm.quantised = bytes;
    norm.row_scales = scales;
    norm.rows = 4;
    for (int i = 0; i < 3; i++)
        for (int type = ONEHOP_FLOAT32; type <= ONEHOP_BFLOAT16; type++) {
            norm.dtype = (onehop_dtype)type;
            norm.hidden = type == ONEHOP_FLOAT32 ? HIDDEN / 2 : HIDDEN;
            call.algorithm = (onehop_algorithm)ways[i];
            OK(onehop_all_reduce_norm(context, &norm, &call, NULL));
        }
    qk.q = memory;
    qk.k = memory + COUNT;
    qk.q_weight = memory + 2 * COUNT;
    qk.k_weight = memory + 3 * COUNT;
    qk.tokens = 8;
    qk.q_width = qk.k_width = 1024;
    qk.dtype = ONEHOP_BFLOAT16;
    OK(onehop_tp_qknorm(context, &qk, NULL, NULL));
}

static void capture(void) {
    static onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    call.algorithm = ONEHOP_2SHOT_PULL;
    call.source = ONEHOP_SOURCE_GRAPH;
    OK(onehop_host_stream_create(&stream));
    OK(onehop_capture_begin(context));
    OK(onehop_host_stream_capture_begin(stream));
    for (int i = 0; i < 40; i++)
        OK(onehop_all_reduce(context, memory, memory + COUNT, 4096, ONEHOP_FLOAT32, ONEHOP_SUM,
                             &call, stream));
    OK(onehop_host_stream_capture_end(stream, &graph));
    OK(onehop_capture_end(context));
    OK(onehop_host_graph_launch(graph, NULL));
    OK(onehop_host_graph_launch(graph, stream));
    OK(onehop_host_stream_synchronize(stream));
}

static void ask(void) {
    static onehop_stats stats;
    static onehop_choice choice;
    static onehop_failure failure;
    static onehop_symmetric *symmetric;
    OK(onehop_get_stats(context, &stats));
    CHECK_INT(40, stats.registrations_direct);
    OK(would_use(context, 4096, ONEHOP_FLOAT32, ONEHOP_SUM, ONEHOP_MODE_EAGER, 0, &choice));
    OK(onehop_prepare(context, NULL));
    OK(onehop_set_timeout(context, 20000));
    OK(onehop_synchronize(context, stream));
    OK(onehop_status(context, &failure));
    OK(onehop_symmetric_alloc(group, host, 100000, &symmetric));
    END(onehop_symmetric_free(symmetric));
    OK(onehop_group_barrier(group));
    if (rank == 0) OK(onehop_abort(context));
    OK(onehop_group_barrier(group));
    STEP(ONEHOP_ERR_ABORTED, onehop_status(context, &failure));
    STEP(ONEHOP_ERR_ABORTED,
         onehop_all_reduce(context, memory, memory, 1, ONEHOP_FLOAT32, ONEHOP_SUM, NULL, NULL));
}

static void make_all(void) {
    static onehop_config config;
    config = kit_config(KIT_PATIENCE_MS);
    OK(onehop_create_all(&config, ONEHOP_MAX_RANKS, NULL, all));
    OK(onehop_capture_begin_all(all, ONEHOP_MAX_RANKS));
    OK(onehop_capture_end_all(all, ONEHOP_MAX_RANKS));
    for (int r = 0; r < ONEHOP_MAX_RANKS; r++) END(onehop_destroy(all[r]));
}

static void make_comm(void) {
    static onehop_layout_config layout = ONEHOP_CONFIG_INIT(onehop_layout_config);
    static onehop_comm_config config = ONEHOP_CONFIG_INIT(onehop_comm_config);
    static onehop_layout sizes;
    static onehop_comm *comm;
    layout.device_kind = config.device.kind = ONEHOP_DEVICE_HOST;
    layout.world_size = config.world_size = 1;
    OK(onehop_layout_get(&layout, &sizes));
    char *buffer = aligned_alloc(
        4096, sizes.symmetric_bytes + 2 * 4096 + sizes.local_bytes + sizes.host_bytes + 4096 -
                  (sizes.symmetric_bytes + sizes.local_bytes + sizes.host_bytes) % 4096);
    config.layout = &layout;
    config.symmetric[0] = buffer;
    config.local = buffer + sizes.symmetric_bytes;
    config.host = (char *)config.local + (sizes.local_bytes + 4095) / 4096 * 4096;
    OK(onehop_storage_arm(&layout, host, buffer, config.local, config.host));
    OK(onehop_comm_create(&config, &comm));
    END(onehop_comm_destroy(comm));
    free(buffer);
}

static void do_all(void) {
    open_and_create();
    call_each();
    call_norms();
    capture();
    ask();
    make_comm();
    END(onehop_host_graph_destroy(graph));
    END(onehop_destroy(context));
    END(onehop_host_stream_destroy(stream));
    END(onehop_mem_free(memory));
    END(onehop_group_close(group));
    if (rank == 0) make_all();
    free(bytes);
}

static void *measure(void *argument) {
    (void)argument;
    do_all();
    return NULL;
}

/* A context and not a thread: of a thread's stack the C library takes a part that differs from one
 * version to another. */
static void run_guarded(void) {
    static ucontext_t caller, small;
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t room = (LIMIT + OWN + page - 1) / page * page;
    char *low = mmap(NULL, page + room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(low != MAP_FAILED);
    CHECK(!mprotect(low + page, room, PROT_READ | PROT_WRITE));
    CHECK(!getcontext(&small));
    small.uc_stack = (stack_t){.ss_sp = low + page, .ss_size = LIMIT + OWN};
    small.uc_link = &caller;
    guarded = true;
    makecontext(&small, do_all, 0);
    CHECK(!swapcontext(&caller, &small));
    guarded = false;
    munmap(low, page + room);
}

static void run(int own, int world, void *argument) {
    pthread_attr_t attributes;
    pthread_t thread;
    (void)world, (void)argument;
    rank = own;
    stack_end = mmap(NULL, ROOM, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(stack_end != MAP_FAILED);
    pthread_attr_init(&attributes);
    CHECK(!pthread_attr_setstack(&attributes, stack_end, ROOM));
    CHECK(!pthread_create(&thread, &attributes, measure, NULL));
    pthread_join(thread, NULL);
    run_guarded();
    printf("rank %d: at most %zu bytes of stack, in %s\n", rank, deepest, here);
}

int main(void) {
    watchdog(50);
    run_ranks(2, run, NULL);
    return 0;
}
