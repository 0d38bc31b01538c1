/* Property: the CUDA device loads an image only if its kernels are what the host expects, and a
 * launch hands over its arguments, eager, with programmatic dependent launch, captured and
 * replayed. What a launch costs is printed.
 *
 * The image is built from tiny_kernel.cu; its file is the first argument, or tiny_kernel.fatbin
 * beside this program. */
#include "gpu_test.h"

#include <libgen.h>

struct tiny_args {
    unsigned long long out;
    unsigned int value, count;
};

enum {
    EMPTY,
    WRITE,
    STEP,
    KERNELS,
    WORDS = 1024,
    STEPS = 200
};
static const oh_kernel kernels[KERNELS] = {
    {"tiny_empty", NULL, 256}, {"tiny_write", NULL, 256}, {"tiny_step", NULL, 256}};

static oh_device *device;
static const oh_device_ops *ops;
static oh_function functions[KERNELS];
static void *words;
static const void *images[2];

/* ---- the image ------------------------------------------------------------------------------- */

static void *read_image(const char *path) {
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        fprintf(stderr, "%s: no such image; build it from tests/gpu/tiny_kernel.cu\n", path);
        exit(1);
    }
    CHECK(fseek(file, 0, SEEK_END) == 0);
    long size = ftell(file);
    CHECK(size > 0 && fseek(file, 0, SEEK_SET) == 0);
    void *image = malloc((size_t)size);
    CHECK(image != NULL && fread(image, 1, (size_t)size, file) == (size_t)size);
    fclose(file);
    return image;
}

static void *find_image(int argc, char **argv) {
    char path[4200] = "", self[4096] = "";
    if (argc > 1) return read_image(argv[1]);
    CHECK(readlink("/proc/self/exe", self, sizeof self - 1) > 0);
    snprintf(path, sizeof path, "%s/tiny_kernel.fatbin", dirname(self));
    return read_image(path);
}

static void load(const void *image) {
    const oh_kernel missing = {"tiny_missing", NULL, 256}, spill = {"tiny_spill", NULL, 256};
    const oh_kernel wide = {"tiny_write", NULL, 512};
    oh_function none = {NULL, 0, 0, false, false};
    uint32_t resident = 0;
    EXPECT(ONEHOP_ERR_UNSUPPORTED,
           ops->load(device, kernels, KERNELS, functions)); /* no image yet */
    images[0] = image;
    oh_cuda_set_images(images);
    OK(ops->load(device, kernels, KERNELS, functions));
    OK(ops->load(device, kernels, KERNELS, functions)); /* from the loaded library */
    EXPECT(ONEHOP_ERR_INTERNAL, ops->load(device, &missing, 1, &none));
    EXPECT(ONEHOP_ERR_INTERNAL, ops->load(device, &spill, 1, &none));
    printf("refused: %s\n", onehop_last_error());
    EXPECT(ONEHOP_ERR_INTERNAL, ops->load(device, &wide, 1, &none));
    CHECK(none.handle == NULL);
    for (int i = 0; i < KERNELS; i++) {
        CHECK(functions[i].handle != NULL && functions[i].blocks_per_multiprocessor > 0);
        OK(ops->resident_blocks(device, &functions[i], 256, &resident));
        CHECK(resident ==
              functions[i].blocks_per_multiprocessor * oh_cuda_of(device)->multiprocessors);
        printf("%s: %u registers, %u blocks resident, pdl %s\n", kernels[i].name,
               functions[i].registers, resident, functions[i].pdl ? "yes" : "no");
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

static oh_launch launch_of(const oh_function *function, const struct tiny_args *args,
                           onehop_stream stream) {
    oh_launch launch = {function, args, sizeof *args, WORDS / 256, 256, stream};
    return launch;
}

static void wait_idle(onehop_stream stream) {
    bool idle = false;
    while (!idle) OK(ops->stream_idle(device, stream, &idle)); /* the alarm ends it */
}

static void expect_words(unsigned int first, unsigned int step) {
    unsigned int host[WORDS];
    OK(ops->copy(device, host, words, sizeof host));
    for (unsigned int i = 0; i < WORDS; i++) CHECK(host[i] == first + i * step);
}

static void arguments_arrive(onehop_stream stream) {
    struct tiny_args args = {(uintptr_t)words, 4711, WORDS};
    oh_launch launch = launch_of(&functions[WRITE], &args, stream);
    OK(ops->fill(device, words, 0xEE, WORDS * 4));
    OK(ops->launch(device, &launch));
    args.value = 1; /* copied at the launch: no effect */
    wait_idle(stream);
    expect_words(4711, 1);
}

static unsigned int steps_on_host(void) {
    unsigned int x = 0;
    for (unsigned int i = 0; i < STEPS; i++) x = x * (i + 3) + 1;
    return x;
}

static void queue_steps(oh_function *step, onehop_stream stream) {
    for (unsigned int i = 0; i < STEPS; i++) {
        struct tiny_args args = {(uintptr_t)words, i + 3, WORDS};
        oh_launch launch = launch_of(step, &args, stream);
        OK(ops->launch(device, &launch));
    }
}

static void chain(onehop_stream stream, bool pdl) {
    oh_function step = functions[STEP];
    step.pdl = step.pdl && pdl;
    OK(ops->fill(device, words, 0, WORDS * 4));
    queue_steps(&step, stream);
    wait_idle(stream);
    expect_words(steps_on_host(), 0);
}

static void captured(onehop_stream stream, bool pdl) {
    oh_function step = functions[STEP];
    oh_cu_graph graph = NULL;
    gpu_graph_exec exec = NULL;
    size_t nodes = 0;
    step.pdl = step.pdl && pdl;
    DRIVER(gpu.cuStreamBeginCapture_v2(stream, GPU_CAPTURE_GLOBAL));
    queue_steps(&step, stream);
    DRIVER(gpu.cuStreamEndCapture(stream, &graph));
    DRIVER(gpu.cuGraphGetNodes(graph, NULL, &nodes));
    CHECK(nodes == STEPS);
    DRIVER(gpu.cuGraphInstantiateWithFlags(&exec, graph, 0));
    for (int replay = 0; replay < 3; replay++) {
        OK(ops->fill(device, words, 0, WORDS * 4));
        DRIVER(gpu.cuGraphLaunch(exec, stream));
        wait_idle(stream);
        expect_words(steps_on_host(), 0);
    }
    DRIVER(gpu.cuGraphExecDestroy(exec));
    DRIVER(gpu.cuGraphDestroy(graph));
}

static void bad_launch(onehop_stream stream) {
    struct tiny_args args = {(uintptr_t)words, 0, 0};
    oh_launch launch = launch_of(&functions[EMPTY], &args, stream);
    launch.threads = 4096;
    EXPECT(ONEHOP_ERR_DRIVER, ops->launch(device, &launch));
    printf("refused: %s\n", onehop_last_error());
}

static void *fresh_thread(void *stream) {
    arguments_arrive(stream); /* a thread that never had a context */
    chain(stream, true);
    bad_launch(stream);
    return NULL;
}

/* Empty launches, with the queue drained every 256 so that a full queue is not what is measured. */
static void time_launches(onehop_stream stream, bool pdl) {
    enum {
        CALLS = 10000,
        BATCH = 256
    };
    oh_function empty = functions[EMPTY];
    struct tiny_args args = {0, 0, 0};
    oh_launch launch = {&empty, &args, sizeof args, 1, 32, stream};
    uint64_t spent = 0;
    empty.pdl = empty.pdl && pdl;
    for (int done = 0; done < CALLS; done += BATCH) {
        uint64_t start = oh_clock_ns();
        for (int i = 0; i < BATCH; i++)
            if (ops->launch(device, &launch) != ONEHOP_OK) CHECK(false);
        spent += oh_clock_ns() - start;
        wait_idle(stream);
    }
    int calls = (CALLS + BATCH - 1) / BATCH * BATCH;
    printf("launch of an empty kernel, %s: %.0f ns of host time a call\n",
           empty.pdl ? "with pdl" : "without pdl", (double)spent / calls);
}

static void all_launches(void) {
    oh_cu_stream stream = NULL;
    pthread_t thread;
    DRIVER(gpu.cuCtxSetCurrent(oh_cuda_of(device)->context));
    DRIVER(oh_cu.cuStreamCreate(&stream, OH_CU_STREAM_NON_BLOCKING));
    for (int pdl = 0; pdl < 2; pdl++) {
        chain(stream, pdl != 0);
        captured(stream, pdl != 0);
        time_launches(stream, pdl != 0);
    }
    arguments_arrive(stream);
    arguments_arrive(NULL);
    arguments_arrive(OH_CU_STREAM_PER_THREAD);
    bad_launch(stream);
    DRIVER(gpu.cuCtxSetCurrent(NULL));
    CHECK(pthread_create(&thread, NULL, fresh_thread, stream) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    DRIVER(oh_cu.cuStreamDestroy_v2(stream));
}

int main(int argc, char **argv) {
    alarm(120);
    gpu_begin();
    void *image = find_image(argc, argv);
    for (int round = 0; round < 2; round++) { /* the second device object finds the image loaded */
        OK(oh_cuda_device_open(oh_cuda_device_count() - 1, &device));
        ops = device->ops;
        OK(ops->local_alloc(device, WORDS * 4, &words));
        if (round == 0)
            load(image);
        else
            OK(ops->load(device, kernels, KERNELS, functions));
        all_launches();
        ops->local_free(device, words);
        device->ops->close(device);
    }
    free(image);
    printf("ok\n");
    return 0;
}
