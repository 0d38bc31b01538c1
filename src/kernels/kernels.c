/* All kernels, compiled by the C compiler for the host device and by nvcc (-x cu) or NVRTC for
 * GPUs. With OH_UNIT=1..6 only that part of the lists, so that several compilers work on it beside
 * each other (cmake/kernels.cmake); without it every kernel. */
#include "kernels/gather/gather_ll.h"
#include "kernels/gather/gather_push.h"
#include "kernels/fused/norm_1shot.h"
#include "kernels/fused/norm_2shot.h"
#include "kernels/pull/pull_1shot.h"
#include "kernels/pull/pull_2shot.h"
#include "kernels/multicast/pull_multicast.h"
#include "kernels/push/push_1shot.h"
#include "kernels/push/push_2shot.h"
#include "kernels/push/push_scatter.h"
#include "kernels/fused/qknorm.h"

#define OH_INSTANCE(algorithm, body, type, world, bound)                                           \
    OH_KERNEL(onehop_##algorithm##_##type##_w##world, bound, body(a, g, OH_##type, world##u))
/* Nothing in these depends on a type. */
#define OH_LL_BODY(a, g, dtype, world)          oh_gather_ll(a, g, world)
#define OH_GATHER_PUSH_BODY(a, g, dtype, world) oh_gather_push(a, g)
#define OH_MULTICAST_INSTANCE(algorithm, body, type)                                               \
    OH_MULTICAST_KERNEL(onehop_##algorithm##_multicast_##type, OH_MULTICAST_BOUND,                 \
                        body(a, g, OH_##type))
#ifdef OH_UNIT
#define OH_IN_UNIT(n) (OH_UNIT == (n))
#else
#define OH_IN_UNIT(n) 1
#endif
#include "kernels/instances.def"

#define OH_FUSED_INSTANCE(operation, body, arguments, type, world, bound)                          \
    OH_KERNEL_OF(arguments, onehop_##operation##_##type##_w##world, bound,                         \
                 body(a, g, OH_##type, world##u))
#if OH_IN_UNIT(6)
#include "kernels/fused/fused.def"
#endif
