/* The vocabulary in which every protocol is written once and compiled for two targets.
 *
 * Kernel bodies are C in the dialect that gcc, clang, nvcc and NVRTC all accept
 * (docs/architecture.md, "One source, two targets"). They use only what this file and args.h
 * declare. Names are <op>_<order>_<scope>_<type>:
 *   order  relaxed | acquire | release | acq_rel; none: an ordinary access
 *   scope  sys (all processors of the machine) | gpu (this rank's processor)
 *   type   u32 | u64 | unit (16 bytes, four words; never assumed to be atomic as a whole) | pair
 *          (16 bytes, two
 *          words of 8)
 * Memory is named by address (oh_u64), so that no pointer conversions appear in the bodies.
 *
 * prim_cuda.h holds all PTX of the project, prim_host.h the same in __atomic builtins. No #if above
 * this file. */
#ifndef OH_PRIM_H
#define OH_PRIM_H

#include "protocol/regions.h"

/* A word of a landing slot that nobody has written. */
#define OH_SENTINEL 0xFFFFFFFFu

/* What a kernel that is built at run time does to element i of a sum, in fp32, before its one
 * rounding (program.c defines it); else nothing. */
#ifndef OH_EPILOGUE
#define OH_EPILOGUE(a, x, i) (x)
#endif

#if defined(__CUDACC__)
#include "kernels/prim/prim_cuda.h"
#else
#include "kernels/prim/prim_host.h"
#endif

/* e4m3 by integer arithmetic, where the processor has no instruction for it. */
OH_FN oh_u32 oh_e4m3_by_bits(float f) {
    const oh_u32 bits = oh_bits_of_f32(f), sign = bits >> 24 & 0x80u,
                 magnitude = bits & 0x7fffffffu;
    oh_u32 code;
    if (f != f) return 0x7fu;
    if (magnitude >= 0x43e00000u) return sign | 0x7eu; /* 448 and more */
    if (magnitude < 0x3c800000u)                       /* below 2^-6: let the adder round at 2^-9 */
        return sign | (oh_bits_of_f32(oh_f32_of_bits(magnitude) + 16384.0f) - 0x46800000u);
    code = (magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
    return sign | (code - 0x3c0u);
}
OH_FN oh_u32 oh_e4m3x2_by_bits(float low, float high) {
    return oh_e4m3_by_bits(low) | oh_e4m3_by_bits(high) << 8;
}

#endif
