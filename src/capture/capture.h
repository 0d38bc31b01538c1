/* Noting the calls of a capture (capture.c), for those who launch them. */
#ifndef OH_CAPTURE_H
#define OH_CAPTURE_H

#include "context/context.h"

/* Before the launch of a call that is being captured: room to note it, and its registration if it
 * takes one. */
onehop_result oh_capture_prepare(onehop_context *ctx, const oh_plan *plan,
                                 const oh_stream_info *info, oh_request *request);
/* After it: remembers the call. */
void oh_capture_note(onehop_context *ctx, const oh_request *request, const oh_plan *plan);

#endif
