/* The part of gpu_ranks.h that uses no GPU: how a program begins, its processes, its images. */
#include "gpu_ranks.h"

#include <libgen.h>

typedef struct census {
    int count;
    char reason[400];
} census;

static void take_census(int rank, int world_size, void *argument) {
    census *c = argument;
    (void)rank, (void)world_size;
    c->count = oh_cuda_device_count();
    const char *reason = oh_cuda_absent_reason();
    snprintf(c->reason, sizeof c->reason, "%s", reason ? reason : "the driver shows no GPU");
}

int gpu_main(unsigned seconds, int fewest) {
    watchdog(seconds);
    setvbuf(stdout, NULL, _IOLBF, 0);
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32",
           1); /* with fewer queues, streams of ranks wait for each other */
    if (!oh_kernel_images[0]) {
        printf("SKIPPED: built without nvcc, so without GPU kernels\n");
        exit(HARNESS_SKIP);
    }
    census *c = shared_memory(sizeof *c);
    run_ranks(1, take_census, c);
    if (c->count < fewest) {
        if (c->count)
            printf("SKIPPED: needs %d GPUs, found %d\n", fewest, c->count);
        else
            printf("SKIPPED: %s\n", c->reason);
        exit(HARNESS_SKIP);
    }
    return c->count;
}

typedef struct apart {
    void (*fn)(void *);
    void *argument;
} apart;

static void apart_main(int rank, int world_size, void *argument) {
    const apart *a = argument;
    (void)rank, (void)world_size;
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
