/* What the fused operations share: checks of matrices, and the way from a checked call to its
 * launch. */
#ifndef OH_FUSED_H
#define OH_FUSED_H

#include "comm/context.h"

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

/* The communicator of a context, and whether this call on `stream` can be made. Errors: WORLD_SIZE
 * (one rank), STREAM; those of a dead communicator. */
onehop_result oh_fused_begin(const char *operation, onehop_comm *comm, const onehop_context *ctx,
                             onehop_stream stream, oh_stream_info *info_out);

/* Launches; the context, if there is one, notes captured calls. */
onehop_result oh_fused_run(onehop_comm *comm, onehop_context *ctx, const oh_fused_call *call,
                           const oh_stream_info *info);

/* The algorithm and grid that a caller names, copied. Source and row must be 0. Errors: ALGORITHM,
 * STRUCT_SIZE. */
onehop_result oh_fused_copy_call(const char *operation, const onehop_call *call, onehop_call *out);

/* Equal pieces of at most `most` rows, a multiple of `grain`: the rows of one. */
uint32_t oh_fused_cut(size_t rows, size_t max, uint32_t grain, uint32_t *chunks_out);

/* Blocks of a grid for `rows` rows at once, or those that the caller names. Errors: ALGORITHM. */
onehop_result oh_fused_grid(const char *operation, const onehop_comm *comm, const onehop_call *call,
                            size_t rows, uint32_t lanes, onehop_choice *choice);

#endif
