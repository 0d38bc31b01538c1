/* Lanes for any 64-bit little-endian machine, by the compiler's vector types: SSE2, NEON. See
 * vector_kernels.c for the contract.
 *
 * 16-bit elements are widened in pairs: a 32-bit word holds an even and an odd element, `a` gets
 * the even ones of a vector, `b` the odd ones. So nothing ever crosses a 32-bit lane. */
#ifndef OH_VECTOR_LANES_GENERIC_H
#define OH_VECTOR_LANES_GENERIC_H

#include <stdint.h>
#include <string.h>

#define OH_VECTOR_BYTES 16

typedef float oh_floats __attribute__((vector_size(OH_VECTOR_BYTES)));
typedef uint32_t oh_words __attribute__((vector_size(OH_VECTOR_BYTES)));
typedef int32_t oh_masks __attribute__((vector_size(OH_VECTOR_BYTES)));

typedef struct oh_wide {
    oh_floats a, b;
} oh_wide;

static inline oh_words read_words(const void *from) {
    oh_words words;
    memcpy(&words, from, sizeof words);
    return words;
}

static inline void write_words(void *to, oh_words words) {
    memcpy(to, &words, sizeof words);
}

static inline oh_words pick(oh_masks mask, oh_words yes, oh_words no) {
    return ((oh_words)mask & yes) | (~(oh_words)mask & no);
}

static inline oh_wide wide_add(oh_wide x, oh_wide y) {
    x.a += y.a;
    x.b += y.b;
    return x;
}

static inline bool any_nan(oh_wide x, oh_wide y) {
    oh_masks mask = (x.a != x.a) | (x.b != x.b) | (y.a != y.a) | (y.b != y.b);
    uint64_t halves[2];
    memcpy(halves, &mask, sizeof halves);
    return (halves[0] | halves[1]) != 0;
}

static inline oh_wide replace_nan(oh_wide x, uint32_t bits) {
    oh_words nan = (oh_words){0} + bits;
    x.a = (oh_floats)pick(x.a != x.a, nan, (oh_words)x.a);
    x.b = (oh_floats)pick(x.b != x.b, nan, (oh_words)x.b);
    return x;
}

static inline oh_wide load_fp32(const void *from) {
    oh_wide x;
    x.a = (oh_floats)read_words(from);
    x.b = (oh_floats)read_words((const char *)from + OH_VECTOR_BYTES);
    return x;
}

static inline void store_fp32(void *to, oh_wide x) {
    write_words(to, (oh_words)x.a);
    write_words((char *)to + OH_VECTOR_BYTES, (oh_words)x.b);
}

static inline oh_wide load_bf16(const void *from) {
    oh_words words = read_words(from);
    oh_wide x;
    x.a = (oh_floats)(words << 16);
    x.b = (oh_floats)(words & 0xffff0000u);
    return x;
}

/* Nearest even: adds just under half a unit, and the rest if the unit is odd. */
static inline oh_words round_bf16(oh_words bits) {
    return bits + 0x7fffu + ((bits >> 16) & 1u);
}

static inline void store_bf16(void *to, oh_wide x) {
    oh_words even = round_bf16((oh_words)x.a), odd = round_bf16((oh_words)x.b);
    write_words(to, (even >> 16) | (odd & 0xffff0000u));
}

#ifndef OH_VECTOR_OWN_FP16
/* binary16 in the low half of each word. Normal: rebias the exponent, 15 to 127. Subnormal: put the
 * fraction under a 0.5, whose unit in the last place is 2^-24, and subtract the 0.5, exactly. */
static inline oh_floats widen_fp16(oh_words half) {
    oh_words sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
    oh_words normal = (rest << 13) + (112u << 23), special = (rest << 13) | 0x7f800000u;
    oh_words tiny = (oh_words)((oh_floats)(rest | 0x3f000000u) - 0.5f);
    oh_words bits = pick((oh_masks)rest < 0x0400, tiny, normal);
    bits = pick((oh_masks)rest >= 0x7c00, special, bits);
    return (oh_floats)(bits | sign);
}

/* The way back. Below 2^-14 the float add of 0.5 does the rounding; from 65520 on the carry of the
 * rounding runs into the exponent and gives infinity, from 65536 on it is put there. NaN must
 * already be a NaN of all ones in its upper ten fraction bits. */
static inline oh_words round_fp16(oh_floats value) {
    oh_words bits = (oh_words)value, sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
    oh_words normal = (rest - (112u << 23) + 0xfffu + ((rest >> 13) & 1u)) >> 13;
    oh_words tiny = (oh_words)((oh_floats)rest + 0.5f) - 0x3f000000u;
    oh_words half = pick((oh_masks)rest < 0x38800000, tiny, normal);
    half = pick((oh_masks)rest >= 0x47800000, (oh_words){0} + 0x7c00u, half);
    half = pick((oh_masks)rest > 0x7f800000, (oh_words){0} + 0x7fffu, half);
    return half | sign;
}

static inline oh_wide load_fp16(const void *from) {
    oh_words words = read_words(from);
    oh_wide x;
    x.a = widen_fp16(words & 0xffffu);
    x.b = widen_fp16(words >> 16);
    return x;
}

static inline void store_fp16(void *to, oh_wide x) {
    write_words(to, round_fp16(x.a) | (round_fp16(x.b) << 16));
}
#endif

#endif
