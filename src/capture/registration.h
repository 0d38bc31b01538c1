/* Captured inputs: what is kept for graphs, and how ranks come to read each other's memory. */
#ifndef OH_REGISTRATION_H
#define OH_REGISTRATION_H

#include "context/context.h"

/* batch.c */

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

/* registration.c */

/* Collective, after the captured calls were found to be alike: finds the memory of all ranks'
 * calls, maps what can be mapped, agrees which calls read it, fills the registrations and closes
 * the batch. */
onehop_result oh_register(const oh_members *m);

static inline bool oh_takes_registration(const oh_captured *c) {
    return c->source == ONEHOP_SOURCE_GRAPH;
}

#endif
