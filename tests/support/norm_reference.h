/* What the tests of fused norms compare with: r bit for bit from the scalar sum, y in float64
 * within one rounding, and the bits of y from norm.h run on the host, which all devices must
 * have. */
#ifndef OH_TEST_NORM_REFERENCE_H
#define OH_TEST_NORM_REFERENCE_H

#include "reference.h"

/* Elements without gaps between rows. */
typedef struct norm_data {
    onehop_dtype dtype;
    size_t rows, hidden;
    int world;
    const void *x[ONEHOP_MAX_RANKS];
    const void *residual; /* NULL: none */
    const void *weight;
    float eps;
    bool plus_one;
    float scale; /* 0: of each row */
    /* What must come out. */
    void *r, *y;
    uint8_t *quantised;
    float *scales; /* [rows] */
} norm_data;

/* Fills r, y, quantised and scales, and fails the test where y or a quantised value is not within
 * one rounding of float64: y of the value that fp32 arithmetic with a relative error of 2^-20 may
 * give. */
void norm_reference(const norm_data *d, const char *what);

/* One element that must be x * 1/sqrt(mean + eps) * w within one rounding. */
void norm_expect_near(uint32_t found, double x, double mean, double eps, double w,
                      onehop_dtype dtype, const char *what);

double norm_value(const void *elements, size_t index, onehop_dtype dtype);
double norm_e4m3_value(uint8_t code);

#endif
