/* The one translation unit of all kernels, compiled by the C compiler for the host device and by nvcc (-x cu) or
 * NVRTC for GPUs. */
#include "kernels/push_1shot.h"

#define OH_INSTANCE(algorithm, body, type, world, bound)                                           \
    OH_KERNEL(onehop_##algorithm##_##type##_w##world, body, OH_##type, world##u, bound)
#include "kernels/instances.def"
