/* The vocabulary in which every protocol is written once and compiled for two targets.
 *
 * Kernel bodies are C in the dialect that gcc, clang, nvcc and NVRTC all accept (docs/design.md,
 * "Dialect"). They use only what this file and args.h declare. Names are
 * <op>_<order>_<scope>_<type>:
 *   order  relaxed | acquire | release | acq_rel; none: an ordinary access
 *   scope  sys (all processors of the machine) | gpu (this rank's processor)
 *   type   u32 | u64 | unit (16 bytes, four words; never assumed to be atomic as a whole) | pair (16 bytes, two
 *          words of 8)
 * Memory is named by address (oh_u64), so that no pointer conversions appear in the bodies.
 *
 * prim_cuda.h holds all PTX of the project, prim_host.h the same in __atomic builtins. No #if above
 * this file. */
#ifndef OH_PRIM_H
#define OH_PRIM_H

#include "device/planes.h"

/* The unit in which data is dealt to threads, stored to peers and polled. */
typedef struct oh_unit {
    oh_u32 w[4];
} oh_unit;

/* Two flag words of 8 bytes, each written and read whole. */
typedef struct oh_pair {
    oh_u64 w[2];
} oh_pair;

#define OH_UNIT_BYTES 16

/* A word of a landing slot that nobody has written. */
#define OH_SENTINEL 0xFFFFFFFFu

/* What a kernel that is built at run time does to element i of a sum, in fp32, before its one rounding
 * (program.c defines it); else nothing. */
#ifndef OH_EPILOGUE
#define OH_EPILOGUE(a, x, i) (x)
#endif

#define OH_CONCAT_(a, b) a##b
#define OH_CONCAT(a, b)  OH_CONCAT_(a, b)
#define OH_STATIC_ASSERT(condition, tag)                                                           \
    typedef char OH_CONCAT(oh_static_assert_##tag##_, __LINE__)[(condition) ? 1 : -1]

OH_STATIC_ASSERT(sizeof(oh_u64) == 8 && sizeof(oh_u32) == 4 && sizeof(oh_u16) == 2, widths);
OH_STATIC_ASSERT(sizeof(oh_unit) == OH_UNIT_BYTES, unit);

#if defined(__CUDACC__)
#include "kernels/prim_cuda.h"
#else
#include "kernels/prim_host.h"
#endif

#endif
