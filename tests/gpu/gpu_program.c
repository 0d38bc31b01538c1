/* The part of gpu_ranks.h that uses no GPU: how a program begins, its processes, its images. */
#include "gpu_ranks.h"

#include <libgen.h>

typedef struct census {
    int count;
    bool mps;
    char reason[400];
} census;

static const census *machine;

static void take_census(int rank, int world_size, void *argument) {
    census *c = argument;
    (void)rank, (void)world_size;
    c->count = oh_cuda_device_count();
    const char *reason = oh_cuda_absent_reason();
    snprintf(c->reason, sizeof c->reason, "%s", reason ? reason : "the driver shows no GPU");
    oh_cu_device device;
    int mps = 0;
    if (c->count && !oh_cu.cuDeviceGet(&device, 0) &&
        !oh_cu.cuDeviceGetAttribute(&mps, OH_CU_DEVICE_MPS, device))
        c->mps = mps != 0;
}

int gpu_main(unsigned seconds, int fewest) {
    watchdog(seconds);
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (!oh_kernel_images[0]) {
        printf("SKIPPED: built without nvcc, so without GPU kernels\n");
        exit(HARNESS_SKIP);
    }
    census *c = shared_memory(sizeof *c);
    run_ranks(1, take_census, c);
    machine = c;
    /* With fewer queues, streams of ranks in one process wait for each other. */
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    if (c->count < fewest) {
        if (c->count)
            printf("SKIPPED: needs %d GPUs, found %d\n", fewest, c->count);
        else
            printf("SKIPPED: %s\n", c->reason);
        exit(HARNESS_SKIP);
    }
    return c->count;
}

bool gpu_is_shared(void) {
    return machine && machine->count == 1;
}

int gpu_for_processes(void) {
    if (machine->count > 1) return 2;
    if (machine->mps) return 1;
    printf("one GPU and no MPS: nothing here with a process per rank\n");
    return 0;
}

void gpu_leave_mps(void) {
    unsetenv("CUDA_MPS_PIPE_DIRECTORY");
    unsetenv("CUDA_MPS_LOG_DIRECTORY");
}

typedef struct apart {
    void (*fn)(void *);
    void *argument;
} apart;

static void apart_main(int rank, int world_size, void *argument) {
    const apart *a = argument;
    (void)rank, (void)world_size;
    gpu_leave_mps();
    a->fn(a->argument);
}

void gpu_apart(void (*fn)(void *), void *argument) {
    apart a = {fn, argument};
    run_ranks(1, apart_main, &a);
}

const void *gpu_image(const char *name, size_t *bytes_out) {
    char self[4096] = "", path[4200];
    if (readlink("/proc/self/exe", self, sizeof self - 1) <= 0)
        FAIL("cannot tell where this program lies");
    snprintf(path, sizeof path, "%s/%s.fatbin", dirname(self), name);
    FILE *file = fopen(path, "rb");
    if (!file) FAIL("%s: no such image", path);
    CHECK(fseek(file, 0, SEEK_END) == 0);
    const long size = ftell(file);
    CHECK(size > 0 && fseek(file, 0, SEEK_SET) == 0);
    void *image = malloc((size_t)size);
    CHECK(image && fread(image, 1, (size_t)size, file) == (size_t)size);
    fclose(file);
    *bytes_out = (size_t)size;
    return image;
}
