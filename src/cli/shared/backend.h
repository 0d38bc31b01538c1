/* What perf needs of a processor besides all-reduces: memory, streams, graphs, time stamps. Two
 * back ends, so that the timing loop has no case distinctions. Functions set onehop_last_error. */
#ifndef OH_CLI_BACKEND_H
#define OH_CLI_BACKEND_H

#include "cli/shared/cli.h"

/* One rank's processor. */
typedef struct backend_rank {
    onehop_device device;
    onehop_stream stream; /* NULL: calls run inline (host only) */
    void *state;
} backend_rank;

typedef struct perf_backend {
    bool events; /* streams take time stamps; else the clock of the calling thread is used */
    onehop_result (*open)(backend_rank *, onehop_device, bool with_stream);
    void (*close)(backend_rank *);
    /* Makes the device current in this thread, for libraries that expect that. */
    onehop_result (*enter)(backend_rank *);

    onehop_result (*alloc)(backend_rank *, size_t bytes, void **out);
    void (*free)(backend_rank *, void *memory, size_t bytes);
    /* Done on return. No call may be in flight on the stream. */
    onehop_result (*write)(backend_rank *, void *to, const void *from_host, size_t bytes);
    onehop_result (*read)(backend_rank *, void *to_host, const void *from, size_t bytes);
    onehop_result (*fill)(backend_rank *, void *to, int byte, size_t bytes);
    /* Between two buffers of the rank; in stream order if `events`, else done on return. */
    onehop_result (*copy)(backend_rank *, void *to, const void *from, size_t bytes);

    onehop_result (*wait)(backend_rank *);
    onehop_result (*capture_begin)(backend_rank *);
    onehop_result (*capture_end)(backend_rank *, void **graph_out);
    onehop_result (*graph_launch)(backend_rank *, void *graph);
    void (*graph_destroy)(backend_rank *, void *graph);
    /* Time stamps by number; `elapsed` after the stream was waited for. */
    onehop_result (*event_record)(backend_rank *, size_t index);
    onehop_result (*event_elapsed)(backend_rank *, size_t from, size_t to, double *us_out);

    /* Bytes of the largest cache in front of the rank's memory. */
    size_t (*cache_bytes)(backend_rank *);
    /* "device  0 [0000:18:00.0] NVIDIA H200" */
    void (*describe)(backend_rank *, char *line, size_t size);
    /* For the JSON file; "" if not known. */
    void (*driver)(backend_rank *, char *line, size_t size);
    void (*clocks)(backend_rank *, char *line, size_t size);
} perf_backend;

extern const perf_backend backend_host;
extern const perf_backend backend_cuda;

/* GPUs of this machine and why there are none. Loads the driver: ask from a child before
 * forking. */
typedef struct cuda_census {
    int count;
    bool mps; /* contexts are made through the driver's MPS daemon */
    char reason[200];
} cuda_census;
void cuda_take_census(void *census_out);

/* "NVLink", "PCIe" and so on between two GPUs, for info. */
void cuda_describe_link(int from, int to, char *line, size_t size);

#endif
