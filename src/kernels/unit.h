/* Units of data: loading and storing 16 bytes of a message of any length and alignment, and summing
 * them.
 *
 * The map from units to threads never depends on alignment, only how a unit is loaded does. The
 * last unit of a message may be short: missing elements read as zero and are not stored. */
#ifndef OH_UNIT_H
#define OH_UNIT_H

#include "kernels/prim/prim.h"
#include "protocol/args.h"

/* One chunk of a message, in units. Chunks are below 4 GiB, so that bytes are counted in 32
 * bits. */
typedef struct oh_message {
    oh_u64 first;   /* byte of the message with which the chunk begins */
    oh_u64 in, out; /* addresses of the chunk */
    oh_u32 bytes;   /* of the chunk */
    oh_u32 units;   /* bytes / 16, rounded up */
    oh_u32 whole;   /* units before this one are loaded and stored 16 bytes at once */
} oh_message;

OH_FN oh_message oh_message_of(const oh_args *a, oh_u32 dtype, oh_u64 chunk) {
    const oh_u64 first = chunk * a->chunk_bytes;
    const oh_u64 left = a->count * OH_ELEMENT_BYTES(dtype) - first;
    oh_message m;
    m.first = first;
    m.in = a->in + first;
    m.out = a->out + first;
    m.bytes = (oh_u32)(left < a->chunk_bytes ? left : a->chunk_bytes);
    m.units = m.bytes / OH_UNIT_BYTES + (m.bytes % OH_UNIT_BYTES != 0);
    m.whole = ((a->in | a->out) & (OH_UNIT_BYTES - 1)) == 0 ? m.bytes / OH_UNIT_BYTES : 0;
    return m;
}

/* Of a unit, from the begin of the message. */
OH_FN oh_u64 oh_unit_offset(const oh_message *m, oh_u32 unit) {
    return m->first + (oh_u64)unit * OH_UNIT_BYTES;
}

/* Element by element: unaligned, or the short last unit. `left` bytes of the message begin at the
 * address. */
OH_SLOW_FN oh_unit oh_load_elements(oh_u64 in, oh_u32 left, oh_u32 dtype) {
    const oh_u32 bytes = left < OH_UNIT_BYTES ? left : OH_UNIT_BYTES;
    oh_unit v;
    oh_u32 i;
    for (i = 0; i < 4; i++) v.w[i] = 0;
    if (dtype == OH_F32) {
        OH_UNROLL
        for (i = 0; i < 4; i++)
            if (4 * i < bytes) v.w[i] = oh_ld_u32(in + 4 * i);
    } else {
        OH_UNROLL
        for (i = 0; i < 8; i++)
            if (2 * i < bytes) v.w[i / 2] |= (oh_u32)oh_ld_u16(in + 2 * i) << (i % 2 * 16);
    }
    return v;
}

OH_SLOW_FN void oh_store_elements(oh_u64 out, oh_u32 left, oh_unit v, oh_u32 dtype) {
    const oh_u32 bytes = left < OH_UNIT_BYTES ? left : OH_UNIT_BYTES;
    oh_u32 i;
    if (dtype == OH_F32) {
        OH_UNROLL
        for (i = 0; i < 4; i++)
            if (4 * i < bytes) oh_st_u32(out + 4 * i, v.w[i]);
    } else {
        OH_UNROLL
        for (i = 0; i < 8; i++)
            if (2 * i < bytes) oh_st_u16(out + 2 * i, (oh_u16)(v.w[i / 2] >> (i % 2 * 16)));
    }
}

OH_FN oh_unit oh_load_unit(const oh_message *m, oh_u32 unit, oh_u32 dtype) {
    const oh_u64 first = (oh_u64)unit * OH_UNIT_BYTES;
    if (unit < m->whole) return oh_ld_unit(m->in + first);
    return oh_load_elements(m->in + first, m->bytes - unit * OH_UNIT_BYTES, dtype);
}
OH_FN void oh_store_unit(const oh_message *m, oh_u32 unit, oh_unit v, oh_u32 dtype) {
    const oh_u64 first = (oh_u64)unit * OH_UNIT_BYTES;
    if (unit < m->whole)
        oh_st_unit(m->out + first, v);
    else
        oh_store_elements(m->out + first, m->bytes - unit * OH_UNIT_BYTES, v, dtype);
}

/* Replaces words that look like the sentinel: two NaNs by two NaNs, one NaN by one. */
OH_FN oh_unit oh_sanitise(oh_unit v, oh_u32 dtype) {
    const oh_u32 other = dtype == OH_F32 ? 0x7FFFFFFFu : 0xFFFF7FFFu;
    oh_u32 i;
    OH_UNROLL
    for (i = 0; i < 4; i++)
        if (v.w[i] == OH_SENTINEL) v.w[i] = other;
    return v;
}

/* Bits are compared, never floats: flush-to-zero would turn a subnormal into a sentinel of
 * zeros. */
OH_FN oh_i32 oh_unit_arrived(oh_unit v) {
    return v.w[0] != OH_SENTINEL && v.w[1] != OH_SENTINEL && v.w[2] != OH_SENTINEL &&
           v.w[3] != OH_SENTINEL;
}
OH_FN oh_unit oh_unit_armed(void) {
    oh_unit v;
    oh_u32 i;
    OH_UNROLL
    for (i = 0; i < 4; i++) v.w[i] = OH_SENTINEL;
    return v;
}

OH_FN oh_unit oh_unit_minus_zero(oh_u32 dtype) {
    oh_unit v;
    oh_u32 i;
    OH_UNROLL
    for (i = 0; i < 4; i++) v.w[i] = dtype == OH_F32 ? 0x80000000u : 0x80008000u;
    return v;
}

/* As oh_here_u32. */
OH_FN oh_unit oh_unit_here(oh_unit v) {
    oh_u32 i;
    OH_UNROLL
    for (i = 0; i < 4; i++) v.w[i] = oh_here_u32(v.w[i]);
    return v;
}

/* ---- sums: fp32, in the order the caller adds, one rounding at the end ----------------------- */
typedef struct oh_sum {
    float f[8];
} oh_sum;

OH_FN oh_sum oh_sum_of(oh_unit v, oh_u32 dtype) {
    oh_sum s;
    oh_u32 i;
    OH_UNROLL
    for (i = 0; i < 4; i++) {
        if (dtype == OH_F32) {
            s.f[i] = oh_f32_of_bits(v.w[i]);
            s.f[i + 4] = 0.0f;
        } else if (dtype == OH_BF16) {
            s.f[2 * i] = oh_f32_of_bits(v.w[i] << 16);
            s.f[2 * i + 1] = oh_f32_of_bits(v.w[i] & 0xFFFF0000u);
        } else {
            s.f[2 * i] = oh_f32_of_f16(v.w[i] & 0xFFFFu);
            s.f[2 * i + 1] = oh_f32_of_f16(v.w[i] >> 16);
        }
    }
    return s;
}
OH_FN oh_sum oh_sums_added(oh_sum s, oh_sum t, oh_u32 dtype) {
    oh_u32 i;
    OH_UNROLL
    for (i = 0; i < (dtype == OH_F32 ? 4u : 8u); i++) s.f[i] += t.f[i];
    return s;
}
OH_FN oh_sum oh_sum_add(oh_sum s, oh_unit v, oh_u32 dtype) {
    return oh_sums_added(s, oh_sum_of(v, dtype), dtype);
}
/* As oh_here_u32. */
OH_FN oh_sum oh_sum_here(oh_sum s, oh_u32 dtype) {
    oh_u32 i;
    OH_UNROLL
    for (i = 0; i < (dtype == OH_F32 ? 4u : 8u); i++)
        s.f[i] = oh_f32_of_bits(oh_here_u32(oh_bits_of_f32(s.f[i])));
    return s;
}
OH_FN oh_unit oh_sum_rounded(oh_sum s, oh_u32 dtype) {
    oh_unit v;
    oh_u32 i;
    OH_UNROLL
    for (i = 0; i < 4; i++) {
        if (dtype == OH_F32)
            v.w[i] = oh_canonical_f32(s.f[i]);
        else if (dtype == OH_BF16)
            v.w[i] = oh_bf16x2_of_f32(s.f[2 * i], s.f[2 * i + 1]);
        else
            v.w[i] = oh_f16x2_of_f32(s.f[2 * i], s.f[2 * i + 1]);
    }
    return v;
}
/* The same at the end of an all-reduce; `offset` in bytes from the begin of the message. */
OH_FN oh_unit oh_sum_finished(const oh_args *a, oh_sum s, oh_u64 offset, oh_u32 dtype) {
    const oh_u64 first = offset / OH_ELEMENT_BYTES(dtype);
    oh_u32 i;
    OH_UNROLL
    for (i = 0; i < OH_UNIT_BYTES / OH_ELEMENT_BYTES(dtype); i++)
        s.f[i] = OH_EPILOGUE(a, s.f[i], first + i);
    (void)a;
    (void)first;
    return oh_sum_rounded(s, dtype);
}

#endif
