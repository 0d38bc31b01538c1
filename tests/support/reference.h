/* What every all-reduce test compares with: a scalar sum of its own, inputs that hurt, buffers that
 * notice strangers.
 *
 * The reference adds in fp32 in rank order from rank 0's value and rounds once, by integer
 * arithmetic that shares nothing with the library's. It needs the default floating-point
 * environment. */
#ifndef OH_TEST_REFERENCE_H
#define OH_TEST_REFERENCE_H

#include <onehop.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

size_t reference_element_bytes(onehop_dtype dtype);

/* One element as fp32 bits, exactly; and back, to nearest even, a NaN as the canonical one. */
uint32_t reference_widen(uint32_t bits, onehop_dtype dtype);
uint32_t reference_round(uint32_t fp32_bits, onehop_dtype dtype);

/* out[i] for i < count; in[r] are the ranks' inputs. */
void reference_sum(void *out, const void *const *in, int world, size_t count, onehop_dtype dtype);

/* ---- inputs ---------------------------------------------------------------------------------- */
/* A pure function of (kind, seed, rank, index), so that any rank knows every other's. */
typedef enum input_kind {
    INPUT_INTEGERS, /* small; the sum is exact in any order, and in bf16 */
    INPUT_REAL,     /* random fractions and exponents, both signs */
    INPUT_SPECIAL,  /* zeros of both signs, subnormals, NaN payloads and sentinels, infinities,
                       largest finite */
    INPUT_MIXED,    /* runs of 32 elements of each kind, and runs in which one rank is special */
} input_kind;

uint32_t input_element(input_kind kind, uint64_t seed, int rank, size_t index, onehop_dtype dtype);
/* Elements first .. first + count of such an input. */
void input_fill(void *to, input_kind kind, uint64_t seed, int rank, size_t first, size_t count,
                onehop_dtype dtype);

/* The sum of such inputs, made piece by piece. */
void reference_of_inputs(void *out, input_kind kind, uint64_t seed, int world, size_t first,
                         size_t count, onehop_dtype dtype);

/* ---- buffers with guards --------------------------------------------------------------------- */
typedef struct guarded {
    unsigned char *memory;
    unsigned char *data; /* off bytes after a 64-byte boundary */
    size_t room, bytes;
} guarded;

/* Room for `most` bytes at any offset below 64, with 128 guard bytes on each side. */
guarded guarded_make(size_t max);
/* Poisons all of it and places `bytes` of data `off` bytes after a boundary. */
void *guarded_place(guarded *g, size_t bytes, size_t off);
/* Fails the test if a byte outside the data is not poison any more. */
void guarded_check(const guarded *g, const char *what);
void guarded_free(guarded *g);

/* Fails the test at the first element that differs, saying which. */
void expect_equal(const void *expected, const void *found, size_t count, onehop_dtype dtype,
                  const char *what);

#endif
