/* Kernels as data, stamped from the same list as their bodies. */
#include "kernels/kernels.h"

#define OH_IN_UNIT(n) 1

typedef struct row {
    oh_operation operation;
    uint32_t algorithm; /* onehop_algorithm */
    uint32_t dtype;     /* 0: any */
    uint32_t world;     /* 0: any */
    bool multicast;
} row;

/* Constants by the names of instances.def. */
enum {
#define OH_ALGORITHM(name, constant, number, collective, family, device, blocks)                   \
    OH_ALGORITHM_##name = number,
#include "protocol/algorithms.def"
#undef OH_ALGORITHM
};

/* Paths of the host alone have one kernel each, oh_<name>, for every type and number of ranks. */
#define OH_ALGORITHM(name, constant, number, collective, family, device, blocks)                   \
    OH_ON_##device(name)
#define OH_ON_ANY(name)
#define OH_ON_CUDA(name)

#define OH_INSTANCE(algorithm, body, type, world, bound)                                           \
    void onehop_##algorithm##_##type##_w##world(const void *args, oh_grid grid);
#define OH_MULTICAST_INSTANCE(algorithm, body, type)                                               \
    void onehop_##algorithm##_multicast_##type(const void *args, oh_grid grid);
#include "kernels/instances.def"
#undef OH_MULTICAST_INSTANCE
#undef OH_INSTANCE
#define OH_FUSED_INSTANCE(operation, body, arguments, type, world, bound)                          \
    void onehop_##operation##_##type##_w##world(const void *args, oh_grid grid);
#include "kernels/fused/fused.def"
#undef OH_FUSED_INSTANCE

/* In the order of `rows`. */
static const oh_kernel kernels[] = {
#define OH_INSTANCE(algorithm, body, type, world, bound)                                           \
    {"onehop_" #algorithm "_" #type "_w" #world, onehop_##algorithm##_##type##_w##world, bound},
#define OH_MULTICAST_INSTANCE(algorithm, body, type)                                               \
    {"onehop_" #algorithm "_multicast_" #type, onehop_##algorithm##_multicast_##type,              \
     OH_MULTICAST_BOUND},
#include "kernels/instances.def"
#undef OH_MULTICAST_INSTANCE
#undef OH_INSTANCE
#define OH_ON_HOST(name) {NULL, oh_##name, 1},
#include "protocol/algorithms.def"
#undef OH_ON_HOST
#define OH_FUSED_INSTANCE(operation, body, arguments, type, world, bound)                          \
    {"onehop_" #operation "_" #type "_w" #world, onehop_##operation##_##type##_w##world, bound},
#include "kernels/fused/fused.def"
#undef OH_FUSED_INSTANCE
    {NULL, oh_host_norm, 1},
};

/* Operation and algorithm by the names of fused.def. */
#define OH_OPERATION_norm_1shot OH_NORM, ONEHOP_1SHOT_PUSH
#define OH_OPERATION_norm_2shot OH_NORM, ONEHOP_2SHOT_PUSH
#define OH_OPERATION_qknorm     OH_QKNORM, ONEHOP_1SHOT_PUSH

static const row rows[] = {
#define OH_INSTANCE(algorithm, body, type, world, bound)                                           \
    {OH_PLAIN, OH_ALGORITHM_##algorithm, OH_##type, world, false},
#define OH_MULTICAST_INSTANCE(algorithm, body, type)                                               \
    {OH_PLAIN, OH_ALGORITHM_##algorithm, OH_##type, 0, true},
#include "kernels/instances.def"
#undef OH_MULTICAST_INSTANCE
#undef OH_INSTANCE
#define OH_ON_HOST(name) {OH_PLAIN, OH_ALGORITHM_##name, 0, 0, false},
#include "protocol/algorithms.def"
#undef OH_ON_HOST
#define OH_FUSED_INSTANCE(operation, body, arguments, type, world, bound)                          \
    {OH_OPERATION_##operation, OH_##type, world, false},
#include "kernels/fused/fused.def"
#undef OH_FUSED_INSTANCE
    {OH_NORM, ONEHOP_HOST_1SHOT, 0, 0, false},
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
#define OH_ON_HOST(name) "",
#include "protocol/algorithms.def"
#undef OH_ON_HOST
#define OH_FUSED_INSTANCE(operation, body, arguments, type, world, bound)                          \
    OH_FUSED_LINE "(" #operation ", " #body ", " #arguments ", " #type ", " #world ", " #bound     \
                  ")\n",
#include "kernels/fused/fused.def"
#undef OH_FUSED_INSTANCE
};

const oh_kernel *oh_kernel_list(size_t *count_out) {
    *count_out = OH_LENGTH(kernels);
    return kernels;
}

const char *oh_kernel_line(int index) {
    return index >= 0 && (size_t)index < OH_LENGTH(lines) ? lines[index] : "";
}

int oh_kernel_find(onehop_device_kind kind, oh_operation operation, onehop_algorithm algorithm,
                   onehop_dtype dtype, int world) {
    int any = -1;
    for (size_t i = 0; i < OH_LENGTH(rows); i++) {
        const row *r = &rows[i];
        if (r->multicast || r->operation != operation || r->algorithm != (uint32_t)algorithm ||
            (r->dtype && r->dtype != (uint32_t)dtype))
            continue;
        if (kind == ONEHOP_DEVICE_CUDA && !kernels[i].name) continue;
        if (r->world == (uint32_t)world) return (int)i;
        if (!r->world) any = (int)i;
    }
    return any;
}

int oh_kernel_find_multicast(onehop_algorithm algorithm, onehop_dtype dtype) {
    for (size_t i = 0; i < OH_LENGTH(rows); i++)
        if (rows[i].multicast && rows[i].algorithm == (uint32_t)algorithm &&
            rows[i].dtype == (uint32_t)dtype)
            return (int)i;
    return -1;
}
