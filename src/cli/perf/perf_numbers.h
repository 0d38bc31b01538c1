/* A scalar's way from and to the data types, written apart from the library's. */
#ifndef OH_CLI_PERF_NUMBERS_H
#define OH_CLI_PERF_NUMBERS_H

#include <onehop.h>

float perf_decode(onehop_dtype dtype, const void *element);
void perf_encode(onehop_dtype dtype, float value, void *element);

#endif
