/* Host graphs: the list of work that a stream recorded under capture, and how one piece of work is
 * run.
 *
 * A graph is counted: by its handle and by every launch of it that has not run. So it may be
 * destroyed while it is queued, although the header promises less. */
#include "device/host/host_stream.h"

#include <stdlib.h>
#include <string.h>

typedef struct graph_node {
    _Alignas(64) oh_host_work work;
    struct graph_node *next;
    _Alignas(64) unsigned char args[];
} graph_node;

/* Something that wants to know of the graph's end. */
typedef struct keeper {
    struct keeper *next;
    void (*gone)(void *argument);
    void *argument;
} keeper;

struct onehop_host_graph {
    uint64_t process; /* that made it */
    uint64_t id;
    uint32_t users;
    keeper *keepers;
    graph_node *first;
    graph_node **end;
};

static void run_graph(const onehop_host_graph *graph);

void oh_host_work_run(const oh_host_work *work, const void *args) {
    switch (work->kind) {
    case OH_HOST_KERNEL:
        oh_host_run_worker(work->kernel, args, work->blocks, 0, 1);
        break;
    case OH_HOST_GRAPH:
        run_graph(work->graph);
        break;
    case OH_HOST_WAIT:
        /* What follows in the graph rests on it: a wait hook hears, but cannot end this wait. */
        while (oh_host_stream_wait(work->earlier, work->ticket) != ONEHOP_OK) {
        }
        break;
    }
}

/* Recursion ends here: a graph never holds a graph. */
static void run_graph(const onehop_host_graph *graph) {
    for (const graph_node *node = graph->first; node != NULL; node = node->next)
        oh_host_work_run(&node->work, node->args);
}

void oh_host_work_release(const oh_host_work *work) {
    if (work->graph != NULL) oh_host_graph_drop(work->graph);
    if (work->earlier != NULL) oh_host_stream_drop(work->earlier);
}

onehop_host_graph *oh_host_graph_create(void) {
    static uint64_t last_id;
    onehop_host_graph *graph = calloc(1, sizeof *graph);
    if (graph == NULL) return NULL;
    graph->id = __atomic_add_fetch(&last_id, 1, __ATOMIC_RELAXED);
    graph->process = oh_process();
    graph->users = 1;
    graph->end = &graph->first;
    return graph;
}

/* Relaxed: whoever adds a user is one already. */
void oh_host_graph_use(onehop_host_graph *graph) {
    __atomic_add_fetch(&graph->users, 1, __ATOMIC_RELAXED);
}

void oh_host_graph_drop(onehop_host_graph *graph) {
    /* Acquire and release: the last user frees after all others have let go. */
    if (__atomic_sub_fetch(&graph->users, 1, __ATOMIC_ACQ_REL) > 0) return;
    for (graph_node *node = graph->first, *next; node != NULL; node = next) {
        next = node->next;
        oh_host_work_release(&node->work);
        free(node);
    }
    for (keeper *k = graph->keepers, *next; k != NULL; k = next) {
        next = k->next;
        k->gone(k->argument);
        free(k);
    }
    free(graph);
}

uint64_t oh_host_graph_id(const onehop_host_graph *graph) {
    return graph->id;
}

onehop_result oh_host_graph_keep(onehop_host_graph *graph, void (*gone)(void *), void *argument) {
    keeper *k = malloc(sizeof *k);
    if (k == NULL) return oh_error(ONEHOP_ERR_MEMORY, "out of memory for a captured call");
    const keeper made = {graph->keepers, gone, argument};
    *k = made;
    graph->keepers = k;
    return ONEHOP_OK;
}

onehop_result oh_host_graph_record(onehop_host_graph *graph, const oh_host_work *work,
                                   const void *args) {
    graph_node *node =
        aligned_alloc(64, oh_round_up(offsetof(graph_node, args) + work->args_bytes, 64));
    if (node == NULL) return oh_error(ONEHOP_ERR_MEMORY, "out of memory for a captured call");
    node->work = *work;
    node->next = NULL;
    if (work->args_bytes > 0) memcpy(node->args, args, work->args_bytes);
    *graph->end = node;
    graph->end = &node->next;
    return ONEHOP_OK;
}

/* ---- public ---------------------------------------------------------------------------------- */

onehop_result onehop_host_stream_capture_begin(onehop_stream handle) {
    if (handle == NULL)
        return oh_error(ONEHOP_ERR_NULL, "onehop_host_stream_capture_begin: stream is NULL");
    oh_host_stream *stream = oh_host_stream_find(handle);
    if (stream == NULL) return oh_host_stream_unknown(handle);
    onehop_host_graph *graph = oh_host_graph_create(), *none = NULL;
    if (graph == NULL) return oh_error(ONEHOP_ERR_MEMORY, "out of memory for a host graph");
    onehop_result result = oh_host_stream_capture(stream, false, graph, &none);
    if (result != ONEHOP_OK) oh_host_graph_drop(graph);
    return result;
}

onehop_result onehop_host_stream_capture_end(onehop_stream handle, onehop_host_graph **graph_out) {
    if (handle == NULL || graph_out == NULL)
        return oh_error(ONEHOP_ERR_NULL, "onehop_host_stream_capture_end: %s is NULL",
                        handle == NULL ? "stream" : "graph_out");
    oh_host_stream *stream = oh_host_stream_find(handle);
    if (stream == NULL) return oh_host_stream_unknown(handle);
    return oh_host_stream_capture(stream, true, NULL, graph_out);
}

onehop_result onehop_host_graph_launch(onehop_host_graph *graph, onehop_stream handle) {
    if (graph == NULL) return oh_error(ONEHOP_ERR_NULL, "onehop_host_graph_launch: graph is NULL");
    if (!oh_process_is(graph->process)) return oh_process_refuse("host graph");
    if (handle == NULL) { /* run it now, in the calling thread */
        run_graph(graph);
        return ONEHOP_OK;
    }
    oh_host_stream *stream = oh_host_stream_find(handle);
    if (stream == NULL) return oh_host_stream_unknown(handle);
    if (oh_host_stream_capturing(stream))
        return oh_error(ONEHOP_ERR_STATE, "a host graph cannot be launched into a capture");
    oh_host_work work = {OH_HOST_GRAPH, 0, NULL, 0, graph, NULL, 0};
    oh_host_graph_use(graph);
    onehop_result result = oh_host_stream_put(stream, &work, NULL);
    if (result != ONEHOP_OK) oh_host_graph_drop(graph);
    return result;
}

void onehop_host_graph_destroy(onehop_host_graph *graph) {
    if (graph != NULL) oh_host_graph_drop(graph);
}
