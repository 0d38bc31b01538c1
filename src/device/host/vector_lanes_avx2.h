/* Lanes for AVX2 with F16C. See vector_kernels.c for the contract, vector_lanes_generic.h for the
 * pairs. */
#ifndef OH_VECTOR_LANES_AVX2_H
#define OH_VECTOR_LANES_AVX2_H

#include <immintrin.h>
#include <stdint.h>

#define OH_VECTOR_BYTES 32

typedef struct oh_wide {
    __m256 a, b;
} oh_wide;

static inline oh_wide wide_add(oh_wide x, oh_wide y) {
    x.a = _mm256_add_ps(x.a, y.a);
    x.b = _mm256_add_ps(x.b, y.b);
    return x;
}

/* Unordered is true if either operand is a NaN: one comparison serves two vectors. */
static inline bool any_nan(oh_wide x, oh_wide y) {
    __m256 mask_x = _mm256_cmp_ps(x.a, x.b, _CMP_UNORD_Q);
    __m256 mask_y = _mm256_cmp_ps(y.a, y.b, _CMP_UNORD_Q);
    return _mm256_movemask_ps(_mm256_or_ps(mask_x, mask_y)) != 0;
}

static inline oh_wide replace_nan(oh_wide x, uint32_t bits) {
    __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32((int)bits));
    x.a = _mm256_blendv_ps(x.a, nan, _mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q));
    x.b = _mm256_blendv_ps(x.b, nan, _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q));
    return x;
}

static inline oh_wide load_fp32(const void *from) {
    oh_wide x;
    x.a = _mm256_loadu_ps(from);
    x.b = _mm256_loadu_ps((const float *)from + 8);
    return x;
}

static inline void store_fp32(void *to, oh_wide x) {
    _mm256_storeu_ps(to, x.a);
    _mm256_storeu_ps((float *)to + 8, x.b);
}

static inline oh_wide load_fp16(const void *from) {
    oh_wide x;
    x.a = _mm256_cvtph_ps(_mm_loadu_si128(from));
    x.b = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from + 1));
    return x;
}

static inline void store_fp16(void *to, oh_wide x) {
    _mm_storeu_si128(to, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i *)to + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}

static inline oh_wide load_bf16(const void *from) {
    __m256i words = _mm256_loadu_si256(from);
    oh_wide x;
    x.a = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
    x.b = _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32((int)0xffff0000u)));
    return x;
}

/* Rounds all 16 elements at once in 16-bit lanes: `keep` holds the upper halves, `cut` the lower
 * ones. Up if cut > 0x8000, or cut = 0x8000 and keep is odd: cut - (keep even) >= 0x8000. */
static inline void store_bf16(void *to, oh_wide x) {
    __m256i even = _mm256_castps_si256(x.a), odd = _mm256_castps_si256(x.b);
    __m256i keep = _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xaa);
    __m256i cut = _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xaa);
    cut = _mm256_subs_epu16(cut, _mm256_andnot_si256(keep, _mm256_set1_epi16(1)));
    keep = _mm256_sub_epi16(keep, _mm256_srai_epi16(cut, 15));
    _mm256_storeu_si256(to, keep);
}

#endif
