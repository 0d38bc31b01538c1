/* The loops of vector.h, compiled once per instruction set with -DOH_ISA=<name>. All sums of a call
 * are formed in registers, two units at a time, so memory is passed over once however many sources
 * there are.
 *
 * A lanes header supplies one unit of work, an oh_wide: two vectors of fp32, `a` and `b`, which
 * hold OH_VECTOR_BYTES / 2 elements of any type: load_<type>, store_<type>   from and to memory of
 * any alignment; store rounds to nearest even wide_add                    element by element
 *   any_nan, replace_nan        is there a NaN; put a NaN of these bits in place of each
 * store may assume that a NaN has the bits of `nan_bits` below. A NaN is rare: it costs one test
 * per two units, and the cure only when there is one. */
#include "device/host/vector.h"

#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "device/host/vector_lanes_avx512.h"
#elif defined(__AVX2__) && defined(__F16C__)
#include "device/host/vector_lanes_avx2.h"
#elif defined(__aarch64__)
#include "device/host/vector_lanes_neon.h"
#else
#include "device/host/vector_lanes_generic.h"
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the pairs of 16-bit elements are laid out for little-endian machines"
#endif

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define UNIT          (OH_VECTOR_BYTES / 2)
#define STEP          (2 * UNIT)

typedef struct unit_pair {
    oh_wide first, second;
} unit_pair;

ALWAYS_INLINE size_t size_of(onehop_dtype type) {
    return type == ONEHOP_FLOAT32 ? 4 : 2;
}

/* The fp32 NaN that each store turns into the type's canonical one. */
ALWAYS_INLINE uint32_t nan_bits(onehop_dtype type) {
    return type == ONEHOP_FLOAT32   ? 0x7fffffffu
           : type == ONEHOP_FLOAT16 ? 0x7fffe000u
                                    : 0x7fff0000u;
}

ALWAYS_INLINE oh_wide load(const char *from, onehop_dtype type) {
    if (type == ONEHOP_FLOAT32) return load_fp32(from);
    return type == ONEHOP_FLOAT16 ? load_fp16(from) : load_bf16(from);
}

ALWAYS_INLINE void store(char *to, oh_wide value, onehop_dtype type) {
    if (type == ONEHOP_FLOAT32)
        store_fp32(to, value);
    else if (type == ONEHOP_FLOAT16)
        store_fp16(to, value);
    else
        store_bf16(to, value);
}

ALWAYS_INLINE unit_pair load_pair(const char *from, onehop_dtype type) {
    unit_pair pair;
    pair.first = load(from, type);
    pair.second = load(from + UNIT * size_of(type), type);
    return pair;
}

ALWAYS_INLINE unit_pair add_pair(unit_pair x, unit_pair y) {
    x.first = wide_add(x.first, y.first);
    x.second = wide_add(x.second, y.second);
    return x;
}

ALWAYS_INLINE void store_pair(char *to, unit_pair pair, onehop_dtype type) {
    if (__builtin_expect(any_nan(pair.first, pair.second), 0)) {
        pair.first = replace_nan(pair.first, nan_bits(type));
        pair.second = replace_nan(pair.second, nan_bits(type));
    }
    store(to, pair.first, type);
    store(to + UNIT * size_of(type), pair.second, type);
}

/* Whole steps. `sources` is a constant for the usual numbers of ranks, so that the inner loop
 * unrolls. */
ALWAYS_INLINE void reduce_steps(char *out, const void *const *in, int sources, size_t bytes,
                                onehop_dtype type) {
    for (size_t at = 0; at < bytes; at += STEP * size_of(type)) {
        unit_pair sum = load_pair((const char *)in[0] + at, type);
#pragma GCC unroll 8
        for (int s = 1; s < sources; s++)
            sum = add_pair(sum, load_pair((const char *)in[s] + at, type));
        store_pair(out + at, sum, type);
    }
}

/* Fewer elements than a step: through a buffer, so that nothing outside the arrays is touched. */
ALWAYS_INLINE void reduce_rest(char *out, const void *const *in, int sources, size_t at,
                               size_t bytes, onehop_dtype type) {
    char buffer[STEP * 4] = {0};
    unit_pair sum;
    memcpy(buffer, (const char *)in[0] + at, bytes);
    sum = load_pair(buffer, type);
    for (int s = 1; s < sources; s++) {
        memcpy(buffer, (const char *)in[s] + at, bytes);
        sum = add_pair(sum, load_pair(buffer, type));
    }
    store_pair(buffer, sum, type);
    memcpy(out + at, buffer, bytes);
}

ALWAYS_INLINE void reduce_type(void *out, const void *const *in, int sources, size_t count,
                               onehop_dtype type) {
    size_t bytes = count * size_of(type), whole = bytes - count % STEP * size_of(type);
    if (sources == 2) {
        const void *const two[2] = {in[0], in[1]};
        reduce_steps(out, two, 2, whole, type);
    } else if (sources == 4) {
        const void *const four[4] = {in[0], in[1], in[2], in[3]};
        reduce_steps(out, four, 4, whole, type);
    } else {
        reduce_steps(out, in, sources, whole, type);
    }
    if (whole < bytes) reduce_rest(out, in, sources, whole, bytes - whole, type);
}

static void reduce_fp32(void *out, const void *const *in, int sources, size_t count) {
    reduce_type(out, in, sources, count, ONEHOP_FLOAT32);
}

static void reduce_fp16(void *out, const void *const *in, int sources, size_t count) {
    reduce_type(out, in, sources, count, ONEHOP_FLOAT16);
}

static void reduce_bf16(void *out, const void *const *in, int sources, size_t count) {
    reduce_type(out, in, sources, count, ONEHOP_BFLOAT16);
}

static void copy(void *to, const void *from, size_t bytes) {
    memcpy(to, from, bytes);
}

#define PASTE_(a, b) a##b
#define PASTE(a, b)  PASTE_(a, b)
#define TEXT_(a)     #a
#define TEXT(a)      TEXT_(a)

extern const oh_vector PASTE(oh_vector_, OH_ISA);
const oh_vector PASTE(oh_vector_,
                      OH_ISA) = {TEXT(OH_ISA), copy, {NULL, reduce_fp32, reduce_fp16, reduce_bf16}};
