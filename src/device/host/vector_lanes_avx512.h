/* Lanes for AVX-512 (F, BW, VL, DQ). See vector_kernels.c for the contract, vector_lanes_generic.h
 * for the pairs, vector_lanes_avx2.h for the rounding. The AVX512_BF16 conversion is of no use: it
 * flushes subnormals. */
#ifndef OH_VECTOR_LANES_AVX512_H
#define OH_VECTOR_LANES_AVX512_H

#include <immintrin.h>
#include <stdint.h>

#define OH_VECTOR_BYTES 64

typedef struct oh_wide {
    __m512 a, b;
} oh_wide;

static inline oh_wide wide_add(oh_wide x, oh_wide y) {
    x.a = _mm512_add_ps(x.a, y.a);
    x.b = _mm512_add_ps(x.b, y.b);
    return x;
}

static inline bool any_nan(oh_wide x, oh_wide y) {
    __mmask16 mask_x = _mm512_cmp_ps_mask(x.a, x.b, _CMP_UNORD_Q);
    __mmask16 mask_y = _mm512_cmp_ps_mask(y.a, y.b, _CMP_UNORD_Q);
    return (mask_x | mask_y) != 0;
}

static inline oh_wide replace_nan(oh_wide x, uint32_t bits) {
    __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32((int)bits));
    x.a = _mm512_mask_mov_ps(x.a, _mm512_cmp_ps_mask(x.a, x.a, _CMP_UNORD_Q), nan);
    x.b = _mm512_mask_mov_ps(x.b, _mm512_cmp_ps_mask(x.b, x.b, _CMP_UNORD_Q), nan);
    return x;
}

static inline oh_wide load_fp32(const void *from) {
    oh_wide x;
    x.a = _mm512_loadu_ps(from);
    x.b = _mm512_loadu_ps((const float *)from + 16);
    return x;
}

static inline void store_fp32(void *to, oh_wide x) {
    _mm512_storeu_ps(to, x.a);
    _mm512_storeu_ps((float *)to + 16, x.b);
}

static inline oh_wide load_fp16(const void *from) {
    oh_wide x;
    x.a = _mm512_cvtph_ps(_mm256_loadu_si256(from));
    x.b = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from + 1));
    return x;
}

static inline void store_fp16(void *to, oh_wide x) {
    _mm256_storeu_si256(to, _mm512_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm256_storeu_si256((__m256i *)to + 1, _mm512_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}

static inline oh_wide load_bf16(const void *from) {
    __m512i words = _mm512_loadu_si512(from);
    oh_wide x;
    x.a = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    x.b = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000u)));
    return x;
}

/* Bits of `upper` where the mask is set, else of `lower`: 0xca is mask ? upper : lower. */
static inline __m512i merge_halves(__m512i upper, __m512i lower) {
    const __m512i mask = _mm512_set1_epi32((int)0xffff0000u);
    return _mm512_ternarylogic_epi32(mask, upper, lower, 0xca);
}

static inline void store_bf16(void *to, oh_wide x) {
    __m512i even = _mm512_castps_si512(x.a), odd = _mm512_castps_si512(x.b);
    __m512i keep = merge_halves(odd, _mm512_srli_epi32(even, 16));
    __m512i cut = merge_halves(_mm512_slli_epi32(odd, 16), even);
    cut = _mm512_subs_epu16(cut, _mm512_andnot_si512(keep, _mm512_set1_epi16(1)));
    keep = _mm512_sub_epi16(keep, _mm512_srai_epi16(cut, 15));
    _mm512_storeu_si512(to, keep);
}

#endif
