/* Lanes for AArch64: the generic ones, with the conversions of binary16 by the instructions that
 * every AArch64 processor has. `a` and `b` are the lower and upper half of the vector then. */
#ifndef OH_VECTOR_LANES_NEON_H
#define OH_VECTOR_LANES_NEON_H

#include <arm_neon.h>

#define OH_VECTOR_OWN_FP16 1
#include "device/host/vector_lanes_generic.h"

static inline oh_wide load_fp16(const void *from) {
    float16x8_t halves = vreinterpretq_f16_u8(vld1q_u8(from));
    oh_wide x;
    x.a = (oh_floats)vcvt_f32_f16(vget_low_f16(halves));
    x.b = (oh_floats)vcvt_high_f32_f16(halves);
    return x;
}

static inline void store_fp16(void *to, oh_wide x) {
    float16x4_t low = vcvt_f16_f32((float32x4_t)x.a);
    vst1q_u8(to, vreinterpretq_u8_f16(vcvt_high_f16_f32(low, (float32x4_t)x.b)));
}

#endif
