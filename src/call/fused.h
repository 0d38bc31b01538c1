/* What the fused operations share: checks of matrices and of what a caller names. */
#ifndef OH_FUSED_H
#define OH_FUSED_H

#include "call/ops.h"

/* Rows of elements in the caller's memory; `at` 0: not given. */
typedef struct oh_matrix {
    const char *name;
    uintptr_t at;
    size_t rows, width, stride; /* bytes */
    size_t element;
} oh_matrix;

/* `stride` and `width` in elements; stride 0: the width. */
oh_matrix oh_matrix_of(const char *name, const void *at, size_t rows, size_t width, size_t stride,
                       size_t element);

/* Aligned to its element, no row on the next one. Errors: ALIGNMENT, ARGUMENT. */
onehop_result oh_matrix_check(const char *operation, const oh_matrix *m);

/* Rows of two matrices may lie between each other's. `may_be_equal`: or be the same. Errors:
 * OVERLAP. */
onehop_result oh_matrix_check_apart(const char *operation, const oh_matrix *a, const oh_matrix *b,
                                    bool may_be_equal);

/* All rows begin at multiples of `bytes`. */
bool oh_matrix_is_aligned(const oh_matrix *m, size_t bytes);

/* Whether the object can make fused calls. Errors: STATE (a forked child's), WORLD_SIZE (one
 * rank). */
onehop_result oh_fused_check(const char *operation, const onehop_comm *comm,
                             const onehop_context *ctx);

/* The algorithm and grid that a caller names, copied. Source and row must be 0. Errors: ALGORITHM,
 * STRUCT_SIZE. */
onehop_result oh_fused_copy_call(const char *operation, const onehop_call *call, onehop_call *out);

/* Makes the call of what has been checked and filled in; `named` is what the caller names. */
onehop_result oh_fused_run(onehop_comm *comm, onehop_context *ctx, const oh_fused *fused,
                           onehop_dtype dtype, const onehop_call *named, onehop_stream stream);

#endif
