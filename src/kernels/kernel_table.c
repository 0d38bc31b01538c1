/* Kernels as data, stamped from the same list as their bodies. */
#include "kernels/kernels.h"

typedef struct row {
    onehop_algorithm algorithm;
    uint32_t dtype; /* 0: any */
    uint32_t world; /* 0: any */
    bool multicast;
} row;

#define OH_ALGORITHM_1shot_push   ONEHOP_1SHOT_PUSH
#define OH_ALGORITHM_2shot_push   ONEHOP_2SHOT_PUSH
#define OH_ALGORITHM_1shot_pull   ONEHOP_1SHOT_PULL
#define OH_ALGORITHM_2shot_pull   ONEHOP_2SHOT_PULL
#define OH_ALGORITHM_scatter_push ONEHOP_SCATTER_PUSH
#define OH_ALGORITHM_gather_ll    ONEHOP_GATHER_LL
#define OH_ALGORITHM_gather_push  ONEHOP_GATHER_PUSH

#define OH_INSTANCE(algorithm, body, type, world, bound)                                           \
    void onehop_##algorithm##_##type##_w##world(const void *args, oh_grid grid);
#define OH_MULTICAST_INSTANCE(algorithm, body, type)                                               \
    void onehop_##algorithm##_multicast_##type(const void *args, oh_grid grid);
#include "kernels/instances.def"
#undef OH_MULTICAST_INSTANCE
#undef OH_INSTANCE
#define OH_FUSED_INSTANCE(operation, body, arguments, type, world, bound)                          \
    void onehop_##operation##_##type##_w##world(const void *args, oh_grid grid);
#include "kernels/fused.def"
#undef OH_FUSED_INSTANCE

/* In the order of `rows`, then of `fused_rows`. */
static const oh_kernel kernels[] = {
#define OH_INSTANCE(algorithm, body, type, world, bound)                                           \
    {"onehop_" #algorithm "_" #type "_w" #world, onehop_##algorithm##_##type##_w##world, bound},
#define OH_MULTICAST_INSTANCE(algorithm, body, type)                                               \
    {"onehop_" #algorithm "_multicast_" #type, onehop_##algorithm##_multicast_##type,              \
     OH_MULTICAST_BOUND},
#include "kernels/instances.def"
#undef OH_MULTICAST_INSTANCE
#undef OH_INSTANCE
    {NULL, oh_host_1shot, 1},   {NULL, oh_host_2shot, 1},
    {NULL, oh_host_scatter, 1}, {NULL, oh_host_gather, 1},
#define OH_FUSED_INSTANCE(operation, body, arguments, type, world, bound)                          \
    {"onehop_" #operation "_" #type "_w" #world, onehop_##operation##_##type##_w##world, bound},
#include "kernels/fused.def"
#undef OH_FUSED_INSTANCE
    {NULL, oh_host_norm, 1},
};

static const row rows[] = {
#define OH_INSTANCE(algorithm, body, type, world, bound)                                           \
    {OH_ALGORITHM_##algorithm, OH_##type, world, false},
#define OH_MULTICAST_INSTANCE(algorithm, body, type) {OH_ALGORITHM_##algorithm, OH_##type, 0, true},
#include "kernels/instances.def"
#undef OH_MULTICAST_INSTANCE
#undef OH_INSTANCE
    {ONEHOP_HOST_1SHOT, 0, 0, false},
    {ONEHOP_HOST_2SHOT, 0, 0, false},
    {ONEHOP_HOST_SCATTER, 0, 0, false},
    {ONEHOP_HOST_GATHER, 0, 0, false},
};

/* Lines of the lists, in the order of `kernels`. */
static const char *const lines[] = {
#define OH_INSTANCE(algorithm, body, type, world, bound)                                           \
    "OH_INSTANCE(" #algorithm ", " #body ", " #type ", " #world ", " #bound ")\n",
#define OH_MULTICAST_INSTANCE(algorithm, body, type)                                               \
    "OH_MULTICAST_INSTANCE(" #algorithm ", " #body ", " #type ")\n",
#include "kernels/instances.def"
#undef OH_MULTICAST_INSTANCE
#undef OH_INSTANCE
    "",
    "",
    "",
    "",
#define OH_FUSED_INSTANCE(operation, body, arguments, type, world, bound)                          \
    OH_FUSED_LINE "(" #operation ", " #body ", " #arguments ", " #type ", " #world ", " #bound     \
                  ")\n",
#include "kernels/fused.def"
#undef OH_FUSED_INSTANCE
};

typedef struct fused_row {
    oh_operation operation;
    uint32_t dtype, world; /* 0: any */
} fused_row;

#define OH_OPERATION_norm_1shot OH_NORM_1SHOT
#define OH_OPERATION_norm_2shot OH_NORM_2SHOT
#define OH_OPERATION_qknorm     OH_QKNORM

static const fused_row fused_rows[] = {
#define OH_FUSED_INSTANCE(operation, body, arguments, type, world, bound)                          \
    {OH_OPERATION_##operation, OH_##type, world},
#include "kernels/fused.def"
#undef OH_FUSED_INSTANCE
    {OH_HOST_NORM, 0, 0},
};

const oh_kernel *oh_kernel_list(size_t *count_out) {
    *count_out = OH_LENGTH(kernels);
    return kernels;
}

const char *oh_kernel_line(int index) {
    return index >= 0 && (size_t)index < OH_LENGTH(lines) ? lines[index] : "";
}

int oh_kernel_find(onehop_device_kind kind, onehop_algorithm algorithm, onehop_dtype dtype,
                   int world) {
    int any = -1;
    for (size_t i = 0; i < OH_LENGTH(rows); i++) {
        if (rows[i].multicast || rows[i].algorithm != algorithm ||
            (rows[i].dtype && rows[i].dtype != (uint32_t)dtype))
            continue;
        if (kind == ONEHOP_DEVICE_CUDA && !kernels[i].name) continue;
        if (rows[i].world == (uint32_t)world) return (int)i;
        if (!rows[i].world) any = (int)i;
    }
    return any;
}

int oh_kernel_find_fused(onehop_device_kind kind, oh_operation operation, onehop_dtype dtype,
                         int world) {
    int any = -1;
    for (size_t i = 0; i < OH_LENGTH(fused_rows); i++) {
        const fused_row *f = &fused_rows[i];
        const int index = (int)(OH_LENGTH(rows) + i);
        if (f->operation != operation || (f->dtype && f->dtype != (uint32_t)dtype)) continue;
        if (kind == ONEHOP_DEVICE_CUDA && !kernels[index].name) continue;
        if (f->world == (uint32_t)world) return index;
        if (!f->world) any = index;
    }
    return any;
}

int oh_kernel_find_multicast(onehop_algorithm algorithm, onehop_dtype dtype) {
    for (size_t i = 0; i < OH_LENGTH(rows); i++)
        if (rows[i].multicast && rows[i].algorithm == algorithm && rows[i].dtype == (uint32_t)dtype)
            return (int)i;
    return -1;
}

#if OH_HAVE_FATBIN
extern const char oh_kernels_fatbin[], oh_kernels_fatbin_end[];
const void *oh_kernel_image(size_t *size_out) {
    *size_out = (size_t)(oh_kernels_fatbin_end - oh_kernels_fatbin);
    return oh_kernels_fatbin;
}
#else
const void *oh_kernel_image(size_t *size_out) {
    *size_out = 0;
    return NULL;
}
#endif
