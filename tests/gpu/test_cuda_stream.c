/* Property: the CUDA device tells streams apart, refuses those of another context, knows which are
 * captured or idle, keeps their order, and leaves the calling thread's state as it was.
 *
 * Streams are kept busy by a host function that waits for a word. So nothing here depends on timing
 * but the small sleeps that let a wrong order show. */
#include "gpu_test.h"

static oh_device *device;
static const oh_device_ops *ops;

/* ---- a stream that stays busy until it is let go --------------------------------------------- */

static void wait_for_word(void *word) {
    while (atomic_load_explicit((atomic_int *)word, memory_order_acquire) == 0) oh_sleep_us(50);
}

static bool idle(onehop_stream stream) {
    bool answer = false;
    OK(ops->stream_idle(device, stream, &answer));
    return answer;
}

static void wait_idle(onehop_stream stream) {
    while (!idle(stream)) oh_sleep_us(100); /* the alarm ends it */
}

static onehop_stream new_stream(unsigned int flags) {
    oh_cu_stream stream = NULL;
    DRIVER(gpu.cuCtxSetCurrent(oh_cuda_of(device)->context));
    DRIVER(oh_cu.cuStreamCreate(&stream, flags));
    DRIVER(gpu.cuCtxSetCurrent(NULL));
    return stream;
}

/* ---- identity -------------------------------------------------------------------------------- */

static void *per_thread_id(void *out) {
    oh_stream_info info;
    OK(ops->stream_info(device, OH_CU_STREAM_PER_THREAD, &info));
    *(uint64_t *)out = info.id;
    return NULL;
}

static void identity(void) {
    onehop_stream a = new_stream(OH_CU_STREAM_NON_BLOCKING), b = new_stream(0);
    oh_stream_info ia, ib, again, legacy;
    uint64_t here, there;
    pthread_t thread;
    OK(ops->stream_info(device, a, &ia));
    OK(ops->stream_info(device, b, &ib));
    OK(ops->stream_info(device, a, &again));
    CHECK(ia.id != 0 && ib.id != 0 && ia.id != ib.id && again.id == ia.id);
    CHECK(!ia.capturing && !ib.capturing);
    OK(ops->stream_info(device, NULL, &legacy));
    CHECK(legacy.id == 0 && !legacy.capturing);
    OK(ops->stream_info(device, OH_CU_STREAM_LEGACY, &legacy));
    CHECK(legacy.id == 0);
    per_thread_id(&here);
    CHECK(pthread_create(&thread, NULL, per_thread_id, &there) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    printf("per-thread stream ids: %llu here, %llu in another thread\n", (unsigned long long)here,
           (unsigned long long)there);
    CHECK(here != 0 && there != 0);
    if (here == there) printf("NOTE: per-thread streams of two threads have one id\n");
    DRIVER(oh_cu.cuStreamDestroy_v2(a));
    DRIVER(oh_cu.cuStreamDestroy_v2(b));
}

static void foreign_stream(int ordinal) {
    oh_cu_context context = NULL;
    oh_cu_stream stream = NULL;
    oh_stream_info info = {1234, false, 0};
    oh_cu_device at;
    DRIVER(oh_cu.cuDeviceGet(&at, ordinal));
    DRIVER(gpu.cuCtxCreate_v2(&context, 0, at)); /* also makes it current */
    DRIVER(oh_cu.cuStreamCreate(&stream, OH_CU_STREAM_NON_BLOCKING));
    EXPECT(ONEHOP_ERR_STREAM, ops->stream_info(device, stream, &info));
    printf("refused: %s\n", onehop_last_error());
    CHECK(info.id == 1234);
    EXPECT(ONEHOP_ERR_STREAM, ops->stream_info(device, stream, &info)); /* not remembered as good */
    OK(ops->stream_info(device, NULL,
                        &info)); /* NULL means the primary context's, whatever is current */
    CHECK(idle(NULL));
    DRIVER(oh_cu.cuStreamDestroy_v2(stream));
    DRIVER(gpu.cuCtxDestroy_v2(context));
}

/* ---- idleness and order ---------------------------------------------------------------------- */

static void order(onehop_stream earlier, onehop_stream later) {
    void *memory;
    atomic_int word;
    atomic_init(&word, 0);
    OK(ops->local_alloc(device, 4096, &memory));
    DRIVER(gpu.cuCtxSetCurrent(oh_cuda_of(device)->context));
    DRIVER(gpu.cuLaunchHostFunc(earlier, wait_for_word, &word));
    oh_cu_ptr at = (oh_cu_ptr)(uintptr_t)memory;
    DRIVER(oh_cu.cuMemsetD8Async(at, 1, 4096, later)); /* without order it passes the busy stream */
    wait_idle(later);
    CHECK(!idle(earlier));
    OK(ops->stream_order(device, earlier, later));
    DRIVER(oh_cu.cuMemsetD8Async(at, 2, 4096, later));
    oh_sleep_us(20000);
    CHECK(!idle(later));
    CHECK(gpu_all(device, memory, 4096, 1)); /* on the internal stream, which waits for neither */
    atomic_store_explicit(&word, 1, memory_order_release);
    wait_idle(later);
    CHECK(idle(earlier) && gpu_all(device, memory, 4096, 2));
    DRIVER(gpu.cuCtxSetCurrent(NULL));
    ops->local_free(device, memory);
}

/* ---- capture --------------------------------------------------------------------------------- */

static void internal_calls_are_legal(void) {
    oh_mem mem;
    void *local;
    char byte = 9;
    oh_device *second;
    OK(ops->mem_create(device, 4096, 0, &mem));
    OK(ops->fill(device, mem.ptr, 7, 4096));
    OK(ops->copy(device, mem.ptr, &byte, 1));
    OK(ops->local_alloc(device, 4096, &local));
    OK(oh_cuda_device_open(0, &second));
    second->ops->close(second);
    ops->local_free(device, local);
    ops->mem_release(device, &mem);
}

static size_t end_capture(onehop_stream stream) {
    oh_cu_graph graph = NULL;
    size_t nodes = 0;
    DRIVER(gpu.cuStreamEndCapture(stream, &graph));
    DRIVER(gpu.cuGraphGetNodes(graph, NULL, &nodes));
    DRIVER(gpu.cuGraphDestroy(graph));
    return nodes;
}

/* A capture in the strictest mode, into which internal calls of this thread fall. */
static void capture(unsigned int flags) {
    onehop_stream a = new_stream(flags), b = new_stream(OH_CU_STREAM_NON_BLOCKING);
    oh_stream_info info;
    bool answer = true;
    void *memory;
    OK(ops->local_alloc(device, 4096, &memory));
    oh_cu_ptr at = (oh_cu_ptr)(uintptr_t)memory;
    DRIVER(gpu.cuCtxSetCurrent(oh_cuda_of(device)->context));
    DRIVER(gpu.cuStreamBeginCapture_v2(a, GPU_CAPTURE_GLOBAL));
    OK(ops->stream_info(device, a, &info));
    CHECK(info.capturing);
    OK(ops->stream_info(device, b, &info));
    CHECK(!info.capturing);
    EXPECT(ONEHOP_ERR_STREAM, ops->stream_idle(device, a, &answer));
    CHECK(idle(b));
    internal_calls_are_legal();
    OK(ops->stream_order(device, b, a)); /* live before captured: nothing */
    OK(ops->stream_order(device, a, b)); /* captured before live: nothing */
    OK(ops->stream_info(device, b, &info));
    CHECK(!info.capturing); /* b was not pulled into the capture */
    if (flags == 0) {       /* a blocking stream makes the legacy stream unusable */
        EXPECT(ONEHOP_ERR_STREAM, ops->stream_info(device, NULL, &info));
        EXPECT(ONEHOP_ERR_STREAM, ops->stream_idle(device, NULL, &answer));
        EXPECT(ONEHOP_ERR_STREAM, ops->stream_order(device, NULL, b));
    } else {
        OK(ops->stream_info(device, NULL, &info));
        CHECK(!info.capturing);
    }
    DRIVER(oh_cu.cuMemsetD8Async(at, 3, 4096, a));
    CHECK(end_capture(a) == 1); /* the memset and nothing of ours */
    DRIVER(gpu.cuCtxSetCurrent(NULL));
    ops->local_free(device, memory);
    DRIVER(oh_cu.cuStreamDestroy_v2(a));
    DRIVER(oh_cu.cuStreamDestroy_v2(b));
}

/* Two streams of one capture: the event becomes an edge. */
static void order_within_capture(void) {
    onehop_stream a = new_stream(OH_CU_STREAM_NON_BLOCKING);
    onehop_stream b = new_stream(OH_CU_STREAM_NON_BLOCKING);
    oh_cu_event fork;
    oh_stream_info info;
    void *memory;
    OK(ops->local_alloc(device, 4096, &memory));
    oh_cu_ptr at = (oh_cu_ptr)(uintptr_t)memory;
    DRIVER(gpu.cuCtxSetCurrent(oh_cuda_of(device)->context));
    DRIVER(oh_cu.cuEventCreate(&fork, OH_CU_EVENT_DISABLE_TIMING));
    DRIVER(gpu.cuStreamBeginCapture_v2(a, GPU_CAPTURE_GLOBAL));
    DRIVER(oh_cu.cuEventRecord(fork, a));
    DRIVER(oh_cu.cuStreamWaitEvent(b, fork, 0)); /* b joins the capture */
    OK(ops->stream_info(device, b, &info));
    CHECK(info.capturing);
    DRIVER(oh_cu.cuMemsetD8Async(at, 4, 4096, b));
    OK(ops->stream_order(device, b, a));
    DRIVER(oh_cu.cuMemsetD8Async(at, 5, 4096, a));
    CHECK(end_capture(a) == 2); /* fails as unjoined if the order were lost */
    DRIVER(oh_cu.cuEventDestroy_v2(fork));
    DRIVER(gpu.cuCtxSetCurrent(NULL));
    ops->local_free(device, memory);
    order(a, b); /* the event serves live streams again */
    DRIVER(oh_cu.cuStreamDestroy_v2(a));
    DRIVER(oh_cu.cuStreamDestroy_v2(b));
}

static void count_gone(void *argument) {
    atomic_fetch_add((_Atomic int *)argument, 1);
}

/* The driver's thread calls in its own time. */
static void expect_gone(_Atomic int *gone, int expected) {
    for (int i = 0; i < 5000 && atomic_load(gone) < expected; i++) oh_sleep_us(1000);
    CHECK(atomic_load(gone) == expected);
}

/* Who is tied to a captured graph hears of the end of the last thing made from it. */
static void retain_graph(void) {
    onehop_stream a = new_stream(OH_CU_STREAM_NON_BLOCKING);
    oh_cu_graph graph;
    gpu_graph_exec exec;
    oh_stream_info info;
    uint64_t captures[2];
    _Atomic int gone[2] = {0, 0};
    void *memory;
    OK(ops->local_alloc(device, 4096, &memory));
    DRIVER(gpu.cuCtxSetCurrent(oh_cuda_of(device)->context));
    for (int i = 0; i < 2; i++) {
        DRIVER(gpu.cuStreamBeginCapture_v2(a, GPU_CAPTURE_GLOBAL));
        OK(ops->stream_info(device, a, &info));
        captures[i] = info.capture;
        OK(ops->graph_retain(device, a, count_gone, &gone[0]));
        DRIVER(oh_cu.cuMemsetD8Async((oh_cu_ptr)(uintptr_t)memory, 3, 4096, a));
        DRIVER(gpu.cuStreamEndCapture(a, &graph));
        OK(ops->stream_info(device, a, &info));
        CHECK(!info.capturing && info.capture == 0);
        DRIVER(gpu.cuGraphInstantiateWithFlags(&exec, graph, 0));
        DRIVER(gpu.cuGraphDestroy(graph));
        DRIVER(gpu.cuGraphLaunch(exec, a));
        DRIVER(oh_cu.cuStreamSynchronize(a));
        oh_sleep_us(20000);
        CHECK(atomic_load(&gone[0]) == i);
        DRIVER(gpu.cuGraphExecDestroy(exec));
        expect_gone(&gone[0], i + 1);
    }
    CHECK(captures[0] != 0 && captures[1] != 0 && captures[0] != captures[1]);
    EXPECT(ONEHOP_ERR_STREAM, ops->graph_retain(device, a, count_gone, &gone[1]));
    expect_gone(&gone[1], 1); /* without a graph, at once */
    DRIVER(gpu.cuCtxSetCurrent(NULL));
    ops->local_free(device, memory);
    DRIVER(oh_cu.cuStreamDestroy_v2(a));
}

/* The same under a context that is current already and under a foreign one. */
static void current_contexts(void) {
    oh_cu_context foreign = NULL;
    oh_cu_device at;
    DRIVER(gpu.cuCtxSetCurrent(oh_cuda_of(device)->context));
    internal_calls_are_legal();
    DRIVER(oh_cu.cuDeviceGet(&at, oh_cuda_device_count() - 1));
    DRIVER(gpu.cuCtxCreate_v2(&foreign, 0, at));
    internal_calls_are_legal();
    DRIVER(gpu.cuCtxDestroy_v2(foreign));
    DRIVER(gpu.cuCtxSetCurrent(NULL));
    internal_calls_are_legal();
}

static void *fresh_thread(void *none) {
    bool answer = false;
    internal_calls_are_legal(); /* a thread that never had a context */
    OK(ops->stream_idle(device, NULL, &answer));
    CHECK(answer);
    return none;
}

static double ns_per_stream_info(onehop_stream stream) {
    enum {
        CALLS = 100000
    };
    oh_stream_info info;
    DRIVER(gpu.cuCtxSetCurrent(oh_cuda_of(device)->context));
    uint64_t start = oh_clock_ns();
    for (int i = 0; i < CALLS; i++)
        if (ops->stream_info(device, stream, &info) != ONEHOP_OK) CHECK(false);
    uint64_t end = oh_clock_ns();
    DRIVER(gpu.cuCtxSetCurrent(NULL));
    return (double)(end - start) / CALLS;
}

int main(void) {
    pthread_t thread;
    alarm(120);
    gpu_begin();
    OK(oh_cuda_device_open(0, &device));
    ops = device->ops;
    identity();
    foreign_stream(0);
    if (oh_cuda_device_count() > 1) foreign_stream(1);
    current_contexts();
    CHECK(pthread_create(&thread, NULL, fresh_thread, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    onehop_stream a = new_stream(OH_CU_STREAM_NON_BLOCKING);
    onehop_stream b = new_stream(OH_CU_STREAM_NON_BLOCKING);
    order(a, b);
    order(b, a);
    order(OH_CU_STREAM_PER_THREAD, a);
    OK(ops->stream_order(device, a, a));
    OK(ops->stream_order(device, NULL, OH_CU_STREAM_LEGACY));
    capture(OH_CU_STREAM_NON_BLOCKING);
    capture(0);
    order_within_capture();
    retain_graph();
    printf("stream_info: %.0f ns a call, legacy %.0f ns\n", ns_per_stream_info(a),
           ns_per_stream_info(NULL));
    DRIVER(oh_cu.cuStreamDestroy_v2(a));
    DRIVER(oh_cu.cuStreamDestroy_v2(b));
    device->ops->close(device);
    printf("ok\n");
    return 0;
}
