/* Shared by host_stream.c and host_graph.c: what waits in a queue or is recorded in a graph. */
#ifndef OH_HOST_STREAM_H
#define OH_HOST_STREAM_H

#include "device/host/host_device.h"

typedef struct oh_host_stream oh_host_stream;

typedef enum oh_host_work_kind {
    OH_HOST_KERNEL,
    OH_HOST_GRAPH,
    OH_HOST_WAIT,
} oh_host_work_kind;

/* A graph or a stream that is named here is counted as a user of it until oh_host_work_release. */
typedef struct oh_host_work {
    oh_host_work_kind kind;
    uint32_t blocks;
    oh_host_kernel kernel;
    size_t args_bytes;
    onehop_host_graph *graph;
    oh_host_stream *earlier; /* WAIT: until `earlier` has completed `ticket` items */
    uint64_t ticket;
} oh_host_work;

/* host_graph.c */
void oh_host_work_run(const oh_host_work *work, const void *args);
void oh_host_work_release(const oh_host_work *work);
onehop_host_graph *oh_host_graph_create(void);
void oh_host_graph_use(onehop_host_graph *graph);
void oh_host_graph_drop(onehop_host_graph *graph);
uint64_t oh_host_graph_id(const onehop_host_graph *graph);
/* gone(argument) is called when the graph ends; on failure it is not. */
onehop_result oh_host_graph_keep(onehop_host_graph *graph, void (*gone)(void *), void *argument);
/* Adds a copy of `work` and its arguments; takes over its counted user on success. */
onehop_result oh_host_graph_record(onehop_host_graph *graph, const oh_host_work *work,
                                   const void *args);

/* host_stream.c */
/* The stream behind a handle, or NULL if it is not one of ours and of this process. */
oh_host_stream *oh_host_stream_find(onehop_stream stream);
/* Why not: STREAM, or STATE in a forked child. */
onehop_result oh_host_stream_unknown(onehop_stream stream);
void oh_host_stream_drop(oh_host_stream *stream);
/* Waits until the stream has completed `ticket` items, or INTERRUPTED. */
onehop_result oh_host_stream_wait(oh_host_stream *stream, uint64_t ticket);
/* Queues a copy of `work`, or records it if the stream is being captured; waits while the queue is
 * full, or INTERRUPTED. Takes over the counted user on success. */
onehop_result oh_host_stream_put(oh_host_stream *stream, const oh_host_work *work,
                                 const void *args);
/* Swaps the graph that records the stream's work, NULL for none, if the present one is, or is not,
 * NULL as `expect_capturing` says; else STATE. */
onehop_result oh_host_stream_capture(oh_host_stream *stream, bool expect_capturing,
                                     onehop_host_graph *graph, onehop_host_graph **old_out);
bool oh_host_stream_capturing(oh_host_stream *stream);

#endif
