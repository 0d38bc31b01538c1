/* The words in which memory and arguments are described, alike for every compiler. In the dialect
 * of kernels (docs/architecture.md, "One source, two targets"). */
#ifndef OH_WORDS_H
#define OH_WORDS_H

typedef unsigned char oh_u8;
typedef unsigned short oh_u16;
typedef unsigned int oh_u32;
typedef int oh_i32;
typedef unsigned long long oh_u64;

#define OH_MAX_RANKS 16

/* The unit in which data is dealt to threads, stored to peers and polled. */
typedef struct oh_unit {
    oh_u32 w[4];
} oh_unit;

/* Two LL words of 8 bytes, each written and read whole. */
typedef struct oh_pair {
    oh_u64 w[2];
} oh_pair;

#define OH_UNIT_BYTES 16

/* Most threads that work on a row together. */
#define OH_MAX_LANES 512

#define OH_CONCAT_(a, b) a##b
#define OH_CONCAT(a, b)  OH_CONCAT_(a, b)
#define OH_STATIC_ASSERT(condition, tag)                                                           \
    typedef char OH_CONCAT(oh_static_assert_##tag##_, __LINE__)[(condition) ? 1 : -1]

OH_STATIC_ASSERT(sizeof(oh_u64) == 8 && sizeof(oh_u32) == 4 && sizeof(oh_u16) == 2, widths);
OH_STATIC_ASSERT(sizeof(oh_unit) == OH_UNIT_BYTES, unit);

#endif
