/* Kernels that are built at run time, on all ranks or none: those of a context (prepare.c), and
 * those with a caller's expression (custom_op.c).
 *
 * Ranks with GPUs of one kind want the same kernels. So building takes two rounds: in the first
 * each builds its share, in the second all that is left, which by then lies in the cache, or in
 * this process. Where there is no cache that all can use, each compiles all: slower, not wrong. */
#ifndef OH_BUILD_H
#define OH_BUILD_H

#include "context/context.h"
#include "jit/program.h"

#define OH_BUILD_MAX 64

typedef struct oh_build {
    const onehop_expression_config *op; /* NULL: kernels as they are */
    uint64_t identity;                  /* of what all ranks must ask for alike */
    size_t count;
    int kernels[OH_BUILD_MAX];
    oh_function functions[OH_BUILD_MAX]; /* without a handle: not built yet */
} oh_build;

/* Builds on all ranks. `what`: the public function, for messages; `builds`: of the ranks here;
 * `mine`: what happened here before, and if that failed `builds` may be NULL. After a failure of
 * any rank the functions are not to be used. */
onehop_result oh_build_run(const oh_members *m, const char *what, oh_build *builds,
                           onehop_result mine);

/* custom_op.c, for calls. */

onehop_result oh_custom_check(const onehop_expression *op, const onehop_context *ctx,
                              const onehop_expression_values *values);
onehop_dtype oh_custom_dtype(const onehop_expression *op);
/* What all ranks must have alike in a call. */
uint64_t oh_custom_identity(const onehop_expression *op, const onehop_expression_values *values);
/* Makes a launch of `args` one of the kernel with the expression; `extended` lives until it is
 * done. */
void oh_custom_extend(const onehop_expression *op, const onehop_expression_values *values,
                      const oh_args *args, const oh_plan *plan, oh_epilogue_args *extended,
                      oh_launch *launch);

#endif
