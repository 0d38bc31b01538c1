/* See reference.h. */
#include "reference.h"

#include "../harness.h"

#define GUARD  128
#define POISON 0xA5

size_t reference_element_bytes(onehop_dtype dtype) {
    return dtype == ONEHOP_FLOAT32 ? 4 : 2;
}

/* ---- conversions: a binary format by the widths of its two fields ---------------------------- */
static int exponent_width(onehop_dtype dtype) {
    return dtype == ONEHOP_FLOAT16 ? 5 : 8;
}

static int fraction_width(onehop_dtype dtype) {
    return dtype == ONEHOP_FLOAT32 ? 23 : dtype == ONEHOP_FLOAT16 ? 10 : 7;
}

static int top_bit(uint32_t value) {
    int top = -1;
    for (; value; value >>= 1) top++;
    return top;
}

/* A value is significand * 2^quantum. The smallest quantum of a format is that of its
 * subnormals. */
static int min_quantum(onehop_dtype dtype) {
    return 2 - (1 << (exponent_width(dtype) - 1)) - fraction_width(dtype);
}

uint32_t reference_widen(uint32_t bits, onehop_dtype dtype) {
    const int width = fraction_width(dtype), exponents = exponent_width(dtype);
    const uint32_t sign = bits >> (width + exponents) & 1u, largest = (1u << exponents) - 1;
    const uint32_t exponent = bits >> width & largest, fraction = bits & ((1u << width) - 1);
    if (exponent == largest) return sign << 31 | 0x7f800000u | fraction << (23 - width);
    const uint32_t significand = exponent ? fraction | 1u << width : fraction;
    if (!significand) return sign << 31;
    const int quantum = min_quantum(dtype) + (exponent ? (int)exponent - 1 : 0);
    int up = 23 - top_bit(significand);
    /* fp32's own subnormals stay as they are. */
    if (quantum - up < -149) up = quantum + 149;
    return sign << 31 | (((uint32_t)(quantum - up + 149) << 23) + (significand << up));
}

uint32_t reference_round(uint32_t v, onehop_dtype dtype) {
    const int width = fraction_width(dtype), min = min_quantum(dtype);
    const uint32_t infinity = ((1u << exponent_width(dtype)) - 1) << width;
    const uint32_t sign = (v >> 31) << (width + exponent_width(dtype)), magnitude = v & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return infinity | ((1u << width) - 1);
    if (magnitude == 0x7f800000u) return sign | infinity;
    const uint32_t exponent = magnitude >> 23;
    const uint32_t significand = exponent ? (magnitude & 0x7fffffu) | 0x800000u : magnitude;
    if (!significand) return sign;
    const int quantum = (exponent ? (int)exponent : 1) - 150;
    int target = quantum + top_bit(significand) - width;
    if (target < min) target = min;
    const int shift = target - quantum; /* never negative: no type here has more digits than fp32 */
    uint64_t kept = shift > 40 ? 0 : (uint64_t)significand >> shift;
    if (shift > 0 && shift <= 40) {
        const uint64_t rest = significand & (((uint64_t)1 << shift) - 1),
                       half = (uint64_t)1 << (shift - 1);
        if (rest > half || (rest == half && (kept & 1))) kept++;
    }
    const uint64_t encoded = ((uint64_t)(target - min) << width) + kept;
    return sign | (encoded >= infinity ? infinity : (uint32_t)encoded);
}

static uint32_t load(const void *from, size_t index, onehop_dtype dtype) {
    uint32_t wide;
    uint16_t narrow;
    if (dtype == ONEHOP_FLOAT32) {
        memcpy(&wide, (const char *)from + 4 * index, 4);
        return wide;
    }
    memcpy(&narrow, (const char *)from + 2 * index, 2);
    return narrow;
}

static void store(void *to, size_t index, uint32_t bits, onehop_dtype dtype) {
    const uint16_t narrow = (uint16_t)bits;
    if (dtype == ONEHOP_FLOAT32)
        memcpy((char *)to + 4 * index, &bits, 4);
    else
        memcpy((char *)to + 2 * index, &narrow, 2);
}

static float float_of(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

void reference_sum(void *out, const void *const *in, int world, size_t count, onehop_dtype dtype) {
    for (size_t i = 0; i < count; i++) {
        float sum = float_of(reference_widen(load(in[0], i, dtype), dtype));
        uint32_t bits;
        for (int r = 1; r < world; r++)
            sum += float_of(reference_widen(load(in[r], i, dtype), dtype));
        memcpy(&bits, &sum, 4);
        store(out, i, reference_round(bits, dtype), dtype);
    }
}

/* ---- inputs ---------------------------------------------------------------------------------- */
static uint64_t scramble(uint64_t a) {
    return random_next(&a);
}

static uint32_t real(uint64_t random, onehop_dtype dtype) {
    /* Exponents 2^-6 .. 2^9: sums of 16 stay finite in fp16. */
    const uint32_t exponent = 121u + (uint32_t)(random >> 32) % 16u;
    return reference_round(
        (uint32_t)random << 31 | exponent << 23 | (uint32_t)(random >> 40 & 0x7fffff), dtype);
}

static uint32_t special(uint64_t random, onehop_dtype dtype) {
    static const uint32_t words[] = {
        0x00000000u, 0x80000000u, 0x00000001u, 0x80000001u, 0x007fffffu, 0x807fffffu,
        0x00800000u, 0x7f7fffffu, 0xff7fffffu, 0x7f800000u, 0xff800000u, 0x7fffffffu,
        0xffffffffu, 0xffff7fffu, 0x7f800001u, 0xffc00000u, 0x7fc12345u, 0x7149f2cau};
    static const uint16_t bf16[] = {0x0000, 0x8000, 0x0001, 0x8001, 0x007f, 0x807f,
                                    0x0080, 0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7fff,
                                    0xffff, 0xffff, 0x7f81, 0xffc0, 0x7fc1, 0x714a};
    static const uint16_t fp16[] = {0x0000, 0x8000, 0x0001, 0x8001, 0x03ff, 0x83ff,
                                    0x0400, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7fff,
                                    0xffff, 0xffff, 0x7c01, 0xfe00, 0x7d23, 0x0200};
    const uint32_t low = (uint32_t)random & 0x7fffffu, sign = (uint32_t)(random >> 60 & 1);
    const size_t pick = (size_t)(random >> 32 & 0xffff);
    if (pick % 4 == 0) { /* a subnormal, any */
        if (dtype == ONEHOP_FLOAT32) return sign << 31 | low;
        return sign << 15 | (low & (dtype == ONEHOP_FLOAT16 ? 0x3ffu : 0x7fu));
    }
    if (dtype == ONEHOP_FLOAT32) return words[pick % 18];
    return dtype == ONEHOP_FLOAT16 ? fp16[pick % 18] : bf16[pick % 18];
}

uint32_t input_element(input_kind kind, uint64_t seed, int rank, size_t index, onehop_dtype dtype) {
    const uint64_t random =
        scramble(seed * 0x9e3779b97f4a7c15ull + index * 0x100000001b3ull + (uint64_t)rank);
    if (kind == INPUT_MIXED) {
        static const input_kind turns[] = {INPUT_REAL, INPUT_INTEGERS, INPUT_REAL, INPUT_SPECIAL};
        kind = turns[index / 32 % 4];
        if (index / 32 % 4 == 2 && (uint64_t)rank == index % 5) kind = INPUT_SPECIAL;
    }
    if (kind == INPUT_SPECIAL) return special(random, dtype);
    if (kind == INPUT_REAL) return real(random, dtype);
    const float whole = (float)((int)(random % 15) - 7);
    uint32_t bits;
    memcpy(&bits, &whole, 4);
    return reference_round(bits, dtype);
}

void input_fill(void *to, input_kind kind, uint64_t seed, int rank, size_t first, size_t count,
                onehop_dtype dtype) {
    for (size_t i = 0; i < count; i++)
        store(to, i, input_element(kind, seed, rank, first + i, dtype), dtype);
}

void reference_of_inputs(void *out, input_kind kind, uint64_t seed, int world, size_t first,
                         size_t count, onehop_dtype dtype) {
    enum {
        PIECE = 256
    };
    uint32_t pieces[ONEHOP_MAX_RANKS][PIECE];
    const void *in[ONEHOP_MAX_RANKS];
    for (size_t at = 0; at < count; at += PIECE) {
        const size_t now = count - at < PIECE ? count - at : PIECE;
        for (int r = 0; r < world; r++) {
            input_fill(pieces[r], kind, seed, r, first + at, now, dtype);
            in[r] = pieces[r];
        }
        reference_sum((char *)out + at * reference_element_bytes(dtype), in, world, now, dtype);
    }
}

/* ---- buffers with guards --------------------------------------------------------------------- */
guarded guarded_make(size_t max) {
    guarded g = {NULL, NULL, (max + 2 * GUARD + 64 + 63) / 64 * 64, 0};
    g.memory = aligned_alloc(64, g.room);
    if (!g.memory) FAIL("no memory for %zu bytes", g.room);
    return g;
}

void *guarded_place(guarded *g, size_t bytes, size_t off) {
    if (GUARD + off + bytes + GUARD > g->room)
        FAIL("%zu bytes at offset %zu do not fit", bytes, off);
    memset(g->memory, POISON, GUARD + off + bytes + GUARD);
    g->data = g->memory + GUARD + off;
    g->bytes = bytes;
    return g->data;
}

void guarded_check(const guarded *g, const char *what) {
    for (const unsigned char *p = g->memory; p < g->data; p++)
        if (*p != POISON) FAIL("%s: byte %td before the buffer was overwritten", what, g->data - p);
    for (const unsigned char *p = g->data + g->bytes; p < g->data + g->bytes + GUARD; p++)
        if (*p != POISON)
            FAIL("%s: byte %td after the buffer was overwritten", what,
                 p - g->data - (ptrdiff_t)g->bytes);
}

void guarded_free(guarded *g) {
    free(g->memory);
    g->memory = g->data = NULL;
}

void expect_equal(const void *expected, const void *found, size_t count, onehop_dtype dtype,
                  const char *what) {
    if (!memcmp(expected, found, count * reference_element_bytes(dtype))) return;
    for (size_t i = 0; i < count; i++) {
        const uint32_t want = load(expected, i, dtype), have = load(found, i, dtype);
        if (want != have)
            FAIL("%s: %s element %zu of %zu: expected 0x%x, found 0x%x", what,
                 onehop_dtype_name(dtype), i, count, want, have);
    }
}
