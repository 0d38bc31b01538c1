/* What the operations share: from checked arguments to a launch. */
#ifndef OH_OPS_H
#define OH_OPS_H

#include "context/context.h"

/* Of a call, all ranks' parts together. */
#define OH_MAX_BYTES ((size_t)1 << 40)

onehop_result oh_op_check_type(onehop_collective collective, onehop_dtype dtype, onehop_op op);
onehop_result oh_op_check_call(const onehop_call *call, onehop_call *known);

/* Whether a call can be made on `stream`, and what that is. Errors: STREAM; those of a dead
 * communicator. */
onehop_result oh_op_begin(const char *operation, onehop_comm *comm, const onehop_context *ctx,
                          onehop_stream stream, oh_stream_info *info_out);

/* Chooses and launches a call whose memory is in order; the context, if there is one, notes
 * captured calls. */
onehop_result oh_op_run(onehop_comm *comm, onehop_context *ctx, oh_request *q);

/* The same in a group of one rank. */
onehop_result oh_op_copy_alone(onehop_context *ctx, const oh_request *q);

#endif
