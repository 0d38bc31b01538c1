/* What a context keeps for graphs: registrations and mappings of a capture, until its graphs are
 * gone. */
#ifndef OH_BATCH_H
#define OH_BATCH_H

#include "context/context.h"

/* A registration for a call that is being captured; what it comes to hold stays until its graph is
 * gone. */
onehop_result oh_batch_take_registration(onehop_context *ctx, onehop_stream stream,
                                         uint64_t capture, uint32_t *registration_out);
/* The capture has ended: its registrations and these mappings wait for the end of its graphs. */
void oh_batch_close(onehop_context *ctx, oh_mem *spans, size_t span_count);
/* Gives back what belongs to graphs that are gone. */
void oh_batch_recycle(onehop_context *ctx);
/* Everything, whatever the graphs do: they must not run any more. */
void oh_batch_drop_all(onehop_context *ctx);

#endif
