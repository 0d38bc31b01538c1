/* See norm_reference.h. */
#include "norm_reference.h"

#include "../harness.h"
#include "kernels/fused/norm.h"
#include "kernels/kernels.h"

#include <math.h>

double norm_value(const void *elements, size_t index, onehop_dtype dtype) {
    uint32_t bits = 0, wide;
    float f;
    const size_t size = reference_element_bytes(dtype);
    memcpy(&bits, (const char *)elements + index * size, size);
    wide = reference_widen(bits, dtype);
    memcpy(&f, &wide, sizeof f);
    return f;
}

double norm_e4m3_value(uint8_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const double value = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
    if ((code & 0x7f) == 0x7f) return NAN;
    return code & 0x80 ? -value : value;
}

static double rounded(double value, onehop_dtype dtype) {
    const float f = (float)value;
    uint32_t bits, out = 0;
    memcpy(&bits, &f, sizeof bits);
    out = reference_round(bits, dtype);
    return norm_value(&out, 0, dtype);
}

/* 2^-20: some 16 roundings of fp32 on the way to a value; and the least subnormal, before it meets
 * w. */
static double slack_of(double y, double w) {
    return fabs(y) * 0x1p-20 + 0x1p-148 * (fabs(w) + 1);
}

void norm_expect_near(uint32_t found, double x, double mean, double eps, double w,
                      onehop_dtype dtype, const char *what) {
    const double inverse = mean > 0x1.fffffp127 ? 0 : 1 / sqrt(mean + eps), y = x * inverse * w;
    const double value = norm_value(&found, 0, dtype), slack = slack_of(y, w);
    const uint32_t nan = dtype == ONEHOP_FLOAT32 ? 0x7fffffffu : 0x7fffu;
    if (isnan(y) ? found == nan
                 : value >= rounded(y - slack, dtype) && value <= rounded(y + slack, dtype))
        return;
    FAIL("%s: expected %.9g, found %.9g (0x%x)", what, y, value, found);
}

static void expect_quantised(uint8_t code, double value, double slack, const char *what) {
    double best = INFINITY, capped = value > 448 ? 448 : value < -448 ? -448 : value;
    for (int c = 0; c < 256; c++) {
        const double distance = fabs(norm_e4m3_value((uint8_t)c) - capped);
        if (distance < best) best = distance;
    }
    if (isnan(value) ? code == 0x7f : fabs(norm_e4m3_value(code) - capped) <= best + slack) return;
    FAIL("%s: expected %.9g as e4m3, found 0x%02x, %.9g", what, value, code, norm_e4m3_value(code));
}

static void check_row(const norm_data *d, size_t row, const char *what) {
    const size_t first = row * d->hidden, size = reference_element_bytes(d->dtype);
    double squares = 0, max = 0;
    char where[200];
    for (size_t i = 0; i < d->hidden; i++) squares += pow(norm_value(d->r, first + i, d->dtype), 2);
    const double mean = squares > 0x1.fffffp127 ? INFINITY : squares / (double)d->hidden;
    const double inverse = isinf(mean) ? 0 : 1 / sqrt(mean + (double)d->eps);
    for (size_t i = 0; i < d->hidden; i++) {
        const double w = norm_value(d->weight, i, d->dtype) + (d->plus_one ? 1 : 0);
        const double x = norm_value(d->r, first + i, d->dtype), y = x * inverse * w;
        uint32_t bits = 0;
        snprintf(where, sizeof where, "%s: row %zu, element %zu", what, row, i);
        memcpy(&bits, (char *)d->y + (first + i) * size, size);
        norm_expect_near(bits, x, mean, (double)d->eps, w, d->dtype, where);
        if (fabs(y) > max) max = fabs(y);
        if (i < 64 && fabs(y) < 0x1p120)
            expect_quantised(d->quantised[first + i], y / (double)d->scales[row],
                             fabs(y) * 0x1p-18 / (double)d->scales[row], where);
    }
    if (!d->scale && max > 0x1p-100 && max < 0x1p120 &&
        fabs((double)d->scales[row] * 448 / max - 1) > 0x1p-19)
        FAIL("%s: row %zu: scale is %g, expected %g", what, row, (double)d->scales[row], max / 448);
}

static void make_row(const norm_data *d, size_t row) {
    const size_t bytes = d->hidden * reference_element_bytes(d->dtype);
    static _Thread_local oh_unit r[OH_KEPT_ROOM(OH_NORM_UNITS)];
    static _Thread_local _Alignas(64) char scratch[OH_SCRATCH_BYTES];
    const oh_host_side side = {(uintptr_t)scratch};
    const oh_grid alone = {0, 1, 0, 1};
    const oh_norm_turn turn = {(oh_u32)row, 0, 1, 0.0f};
    oh_norm_args n;
    memset(&n, 0, sizeof n);
    memset(r, 0, sizeof r);
    memcpy(r, (char *)d->r + row * bytes, bytes);
    n.call.units = (oh_u32)((bytes + OH_UNIT_BYTES - 1) / OH_UNIT_BYTES);
    n.call.out = (uintptr_t)d->y;
    n.call.host_poll_argument = (uintptr_t)&side;
    n.weight = (uintptr_t)d->weight;
    n.quantised = (uintptr_t)d->quantised;
    n.row_scales = d->scale ? 0 : (uintptr_t)d->scales;
    n.out_stride = bytes;
    n.quantised_stride = d->hidden;
    n.row_bytes = (oh_u32)bytes;
    n.lanes = oh_lanes_of(n.call.units);
    n.plus_one = d->plus_one;
    n.eps = d->eps;
    n.inverse_hidden = 1.0f / (float)d->hidden;
    n.scale = d->scale;
    if (d->scale) d->scales[row] = d->scale;
    if (d->dtype == ONEHOP_BFLOAT16)
        oh_norm_row(&n, alone, turn, r, OH_BF16);
    else if (d->dtype == ONEHOP_FLOAT16)
        oh_norm_row(&n, alone, turn, r, OH_F16);
    else
        oh_norm_row(&n, alone, turn, r, OH_F32);
}

void norm_reference(const norm_data *d, const char *what) {
    const void *in[ONEHOP_MAX_RANKS + 1];
    int sources = d->world;
    for (int r = 0; r < d->world; r++) in[r] = d->x[r];
    if (d->residual) in[sources++] = d->residual;
    reference_sum(d->r, in, sources, d->rows * d->hidden, d->dtype);
    for (size_t row = 0; row < d->rows; row++) {
        make_row(d, row);
        check_row(d, row, what);
    }
}
