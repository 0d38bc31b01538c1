/* Property: every table of vector kernels that this machine can run gives the bits of a plain
 * scalar reference whose conversions are integer arithmetic. */
/* labels: quick */
#include "device/host/vector.h"

#include "harness.h"

#define SOURCES_MAX 16
#define GUARD       64

/* ---- reference ------------------------------------------------------------------------------- */

static float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float half_value(uint16_t half) {
    uint32_t sign = (uint32_t)(half >> 15) << 31, exponent = (half >> 10) & 31,
             fraction = half & 1023;
    if (exponent == 31) return from_bits(sign | 0x7f800000u | fraction << 13);
    if (exponent != 0) return from_bits(sign | (exponent + 112) << 23 | fraction << 13);
    if (fraction == 0) return from_bits(sign);
    for (exponent = 113; (fraction & 1024) == 0; exponent--) fraction <<= 1;
    return from_bits(sign | exponent << 23 | (fraction & 1023) << 13);
}

/* `value` / 2^shift to the nearest integer, ties to the even one. */
static uint32_t shift_round(uint32_t value, uint32_t shift) {
    if (shift > 31) return 0;
    uint32_t whole = value >> shift, cut = value & ((1u << shift) - 1), half = 1u << (shift - 1);
    return whole + (cut > half || (cut == half && (whole & 1)));
}

static uint16_t half_bits(float value) {
    uint32_t bits = to_bits(value), sign = bits >> 31 << 15, rest = bits & 0x7fffffffu;
    uint32_t exponent = rest >> 23, fraction = rest & 0x7fffffu;
    if (rest > 0x7f800000u) return 0x7fff;
    if (exponent > 142) return (uint16_t)(sign | 0x7c00u);
    if (exponent >= 113) /* a carry out of the fraction raises the exponent, up to infinity */
        return (uint16_t)(sign | (((exponent - 112) << 10) + shift_round(fraction, 13)));
    if (exponent == 0) return (uint16_t)sign;
    return (uint16_t)(sign | shift_round(fraction | 0x800000u, 126 - exponent));
}

static uint16_t bfloat_bits(float value) {
    uint32_t bits = to_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (uint16_t)((bits >> 31 << 15) | shift_round(bits & 0x7fffffffu, 16));
}

static size_t element_bytes(onehop_dtype type) {
    return type == ONEHOP_FLOAT32 ? 4 : 2;
}

static float element(const void *array, size_t i, onehop_dtype type) {
    uint32_t word = 0;
    memcpy(&word, (const char *)array + i * element_bytes(type), element_bytes(type));
    if (type == ONEHOP_FLOAT32) return from_bits(word);
    return type == ONEHOP_FLOAT16 ? half_value((uint16_t)word) : from_bits(word << 16);
}

static uint32_t rounded(float sum, onehop_dtype type) {
    if (type == ONEHOP_FLOAT16) return half_bits(sum);
    if (type == ONEHOP_BFLOAT16) return bfloat_bits(sum);
    return (to_bits(sum) & 0x7fffffffu) > 0x7f800000u ? 0x7fffffffu : to_bits(sum);
}

static void reference(void *out, const void *const *in, int sources, size_t count,
                      onehop_dtype type) {
    for (size_t i = 0; i < count; i++) {
        float sum = element(in[0], i, type);
        for (int s = 1; s < sources; s++) sum += element(in[s], i, type);
        uint32_t word = rounded(sum, type);
        memcpy((char *)out + i * element_bytes(type), &word, element_bytes(type));
    }
}

/* ---- inputs ---------------------------------------------------------------------------------- */

static uint64_t random_state = 1;

/* One in four any bits at all, NaN and subnormals included; the rest within a few binades, so that
 * sums cancel, tie and carry. */
static uint32_t random_element(onehop_dtype type) {
    uint64_t word = random_next(&random_state);
    uint32_t bits = (uint32_t)(word >> 32), choice = word & 7;
    if (choice < 2) return type == ONEHOP_FLOAT32 ? bits : bits & 0xffff;
    uint32_t binade = (uint32_t)(word >> 8) % 12;
    if (type == ONEHOP_FLOAT32) return (bits & 0x807fffffu) | (120 + binade) << 23;
    if (type == ONEHOP_BFLOAT16) return (bits & 0x807fu) | (120 + binade) << 7;
    return (bits & 0x83ffu) | (choice == 2 ? binade % 3 : 10 + binade) << 10;
}

static void fill_random(void *array, size_t count, onehop_dtype type) {
    for (size_t i = 0; i < count; i++) {
        uint32_t word = random_element(type);
        memcpy((char *)array + i * element_bytes(type), &word, element_bytes(type));
    }
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void compare(const oh_vector *table, onehop_dtype type, const void *const *in, int sources,
                    size_t count, const void *out, const void *want) {
    size_t size = element_bytes(type);
    if (memcmp(out, want, count * size) == 0) return;
    for (size_t i = 0; i < count; i++) {
        uint32_t got = 0, expected = 0;
        memcpy(&got, (const char *)out + i * size, size);
        memcpy(&expected, (const char *)want + i * size, size);
        if (got == expected) continue;
        fprintf(stderr, "%s type %d sources %d count %zu element %zu: got %#x, want %#x\n",
                table->isa, (int)type, sources, count, i, got, expected);
        for (int s = 0; s < sources; s++)
            fprintf(stderr, "  in[%d] %a\n", s, (double)element(in[s], i, type));
        exit(1);
    }
}

/* All 65536 values, alone and added to `other`. */
static void test_all_values(const oh_vector *table, onehop_dtype type, uint32_t other, bool alone) {
    enum {
        VALUES = 65536
    };
    static uint16_t every[VALUES], constant[VALUES], out[VALUES], want[VALUES];
    const void *in[2] = {every, constant};
    for (size_t i = 0; i < VALUES; i++) {
        every[i] = (uint16_t)i;
        constant[i] = (uint16_t)other;
    }
    reference(want, in, alone ? 1 : 2, VALUES, type);
    table->reduce[type](out, in, alone ? 1 : 2, VALUES);
    compare(table, type, in, alone ? 1 : 2, VALUES, out, want);
}

static void test_exhaustive(const oh_vector *table, onehop_dtype type, int randoms) {
    static const uint16_t special[] = {
        0x0000, 0x8000, 0x0001, 0x8001, 0x03ff, 0x0400, 0x8400, 0x007f, 0x0080, 0x3c00, 0x3f80,
        0xbc00, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7c01, 0xfe00, 0x7f7f, 0xff7f, 0x7f80, 0xff80,
        0x7f81, 0xffc0, 0x7fff, 0xffff, 0x7e00, 0x1400, 0x1000, 0x7a00, 0x0c01, 0x7b80};
    test_all_values(table, type, 0, true);
    for (size_t i = 0; i < OH_LENGTH(special); i++) test_all_values(table, type, special[i], false);
    for (int i = 0; i < randoms; i++) test_all_values(table, type, random_element(type), false);
}

typedef struct test_case {
    int sources, in_place; /* in_place: which input is the output, or -1 */
    size_t count, offset;  /* offset of every array, in elements */
} test_case;

/* One call with guard bytes around the output and every input at its own odd address. */
static void test_shape(const oh_vector *table, onehop_dtype type, test_case shape) {
    size_t size = element_bytes(type), bytes = shape.count * size;
    char *arrays[SOURCES_MAX], *place[SOURCES_MAX], *out_array = malloc(bytes + 3 * GUARD);
    const void *in[SOURCES_MAX] = {NULL};
    char *want = malloc(bytes + 1), *out = out_array + GUARD + shape.offset * size;
    for (int s = 0; s < shape.sources; s++) {
        /* The end of an input is the end of its block: a sanitizer sees a read beyond it. */
        size_t skip = (shape.offset + (size_t)s) % 16 * size;
        arrays[s] = malloc(skip + bytes + 1);
        in[s] = place[s] = arrays[s] + skip;
        fill_random(place[s], shape.count, type);
    }
    memset(out_array, 0x5a, bytes + 3 * GUARD);
    if (shape.in_place >= 0) {
        memcpy(out, in[shape.in_place], bytes);
        in[shape.in_place] = out;
    }
    reference(want, in, shape.sources, shape.count, type);
    table->reduce[type](out, in, shape.sources, shape.count);
    compare(table, type, in, shape.sources, shape.count, out, want);
    for (size_t i = 0; i < bytes + 3 * GUARD; i++) {
        char *byte = out_array + i;
        if (byte < out || byte >= out + bytes) CHECK(*byte == 0x5a);
    }
    for (int s = 0; s < shape.sources; s++) free(arrays[s]);
    free(out_array);
    free(want);
}

static void test_shapes(const oh_vector *table, onehop_dtype type) {
    for (size_t count = 0; count <= 257; count++) {
        test_case shape = {1 + (int)(count % SOURCES_MAX), -1, count, count % 13};
        test_shape(table, type, shape);
        shape.sources = 2;
        test_shape(table, type, shape);
        shape.in_place = (int)(count & 1);
        test_shape(table, type, shape);
    }
    for (int sources = 1; sources <= SOURCES_MAX; sources++) {
        for (int in_place = -1; in_place < sources; in_place++)
            test_shape(table, type, (test_case){sources, in_place, 333, (size_t)sources});
        test_shape(table, type, (test_case){sources, -1, 4096, (size_t)sources % 5});
    }
    for (size_t offset = 0; offset < 16; offset++)
        test_shape(table, type, (test_case){2, -1, 200, offset});
    test_shape(table, type, (test_case){2, -1, 200000, 0});
    test_shape(table, type, (test_case){3, 1, 200000, 1});
}

static void test_copy(const oh_vector *table) {
    static char from[9000], to[9000];
    fill_random(from, sizeof from / 4, ONEHOP_FLOAT32);
    for (size_t bytes = 0; bytes < 8500; bytes += bytes < 300 ? 1 : 97) {
        size_t skip = bytes % 67;
        memset(to, 0x5a, sizeof to);
        table->copy(to + GUARD + skip, from + bytes % 31, bytes);
        CHECK(memcmp(to + GUARD + skip, from + bytes % 31, bytes) == 0);
        CHECK(to[GUARD + skip - 1] == 0x5a && to[GUARD + skip + bytes] == 0x5a);
    }
}

static void test_choice(void) {
    const oh_vector *const *list = oh_vector_tables();
    size_t count = 0;
    for (; list[count] != NULL; count++) {
        CHECK(setenv("ONEHOP_ISA", list[count]->isa, 1) == 0);
        CHECK_OK(oh_vector_check());
    }
    CHECK(count >= 1 && strcmp(list[count - 1]->isa, "baseline") == 0);
#if defined(__x86_64__)
    CHECK(setenv("ONEHOP_ISA", "neon", 1) == 0);
#else
    CHECK(setenv("ONEHOP_ISA", "avx2", 1) == 0);
#endif
    CHECK_RESULT(ONEHOP_ERR_UNSUPPORTED, oh_vector_check());
    CHECK(strstr(onehop_last_error(), list[0]->isa) != NULL);
    CHECK(setenv("ONEHOP_ISA", "sse9", 1) == 0);
    CHECK_RESULT(ONEHOP_ERR_ENVIRONMENT, oh_vector_check());
    CHECK(setenv("ONEHOP_ISA", "baseline", 1) == 0);
    CHECK(oh_vector_table() == list[count - 1]);
}

int main(void) {
    /* Under a sanitizer, or elsewhere where it is slow, a small number. */
    const char *text = getenv("ONEHOP_TEST_RANDOMS");
    int randoms = text != NULL ? atoi(text) : 32;
    watchdog(100);
    for (const oh_vector *const *list = oh_vector_tables(); *list != NULL; list++) {
        test_copy(*list);
        test_exhaustive(*list, ONEHOP_FLOAT16, randoms);
        test_exhaustive(*list, ONEHOP_BFLOAT16, randoms);
        for (int type = ONEHOP_FLOAT32; type <= ONEHOP_BFLOAT16; type++)
            test_shapes(*list, (onehop_dtype)type);
        printf("%s: ok\n", (*list)->isa);
    }
    test_choice();
    return 0;
}
