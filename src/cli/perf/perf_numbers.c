/* Conversions of the reference, one element at a time and by arithmetic on values, not on lanes:
 * slow, plain and unlike the code under test. */
#include "cli/perf/perf_numbers.h"

#include <math.h>
#include <pthread.h>
#include <string.h>

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

static float decode_half(uint16_t bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float magnitude;
    if (exponent == 31)
        magnitude = fraction ? NAN : INFINITY;
    else if (exponent == 0)
        magnitude = ldexpf((float)fraction, -24);
    else
        magnitude = ldexpf((float)(1024 + fraction), exponent - 25);
    return copysignf(magnitude, bits & 0x8000 ? -1.0f : 1.0f);
}

static float half_values[65536];
static pthread_once_t half_once = PTHREAD_ONCE_INIT;

static void fill_half_values(void) {
    for (uint32_t bits = 0; bits < 65536; bits++) half_values[bits] = decode_half((uint16_t)bits);
}

/* Nearest half, ties to even. The step between neighbours at |value| is 2^(e-10); the quotient is
 * exact, because both are powers of two apart, and rintf rounds it as wanted. */
static uint16_t encode_half(float value) {
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    int exponent;
    if (isinf(value)) return sign | 0x7C00;
    if (value == 0) return sign;
    frexpf(value, &exponent); /* |value| in [2^(exponent-1), 2^exponent) */
    int step = (exponent < -13 ? -13 : exponent) - 11;
    int steps = (int)rintf(ldexpf(fabsf(value), -step)); /* up to 2048 */
    if (exponent > 16 || (exponent == 16 && steps > 2047)) return sign | 0x7C00;
    /* Below 2^-14 the steps are the fraction; above, adding them carries into the exponent by
     * itself. */
    return (uint16_t)(sign + ((exponent < -13 ? -13 : exponent) + 13) * 1024 + steps);
}

/* Nearest bfloat16, ties to even: the upper half plus one when the lower half is over a half
 * step. */
static uint16_t encode_bfloat16(float value) {
    uint32_t bits = to_bits(value), upper = bits >> 16, lower = bits & 0xFFFF;
    if (lower > 0x8000 || (lower == 0x8000 && (upper & 1))) upper++;
    return (uint16_t)upper;
}

float perf_decode(onehop_dtype dtype, const void *element) {
    uint16_t half;
    float value;
    if (dtype == ONEHOP_FLOAT32) {
        memcpy(&value, element, sizeof value);
        return value;
    }
    memcpy(&half, element, sizeof half);
    if (dtype == ONEHOP_BFLOAT16) return from_bits((uint32_t)half << 16);
    pthread_once(&half_once, fill_half_values);
    return half_values[half];
}

void perf_encode(onehop_dtype dtype, float value, void *element) {
    if (dtype == ONEHOP_FLOAT32) {
        uint32_t bits = isnan(value) ? 0x7FFFFFFF : to_bits(value);
        memcpy(element, &bits, sizeof bits);
        return;
    }
    uint16_t half = dtype == ONEHOP_FLOAT16 ? encode_half(value) : encode_bfloat16(value);
    if (isnan(value)) half = 0x7FFF; /* the canonical NaN, whatever the payload was */
    memcpy(element, &half, sizeof half);
}
