/* What a call with a caller's expression needs of it. */
#ifndef OH_EXPRESSION_H
#define OH_EXPRESSION_H

#include "context/context.h"
#include "protocol/epilogue.h"

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
