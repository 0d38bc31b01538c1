/* Inside the CUDA device: what its files share. The layers above see device.h.
 *
 * Manners towards the program we live in:
 *   - The primary context is pushed only if it is not current, and popped on every path, errors
 * included.
 *   - Everything but a launch and the stream questions runs with this thread's capture mode
 * RELAXED, so that it neither fails in, nor breaks, a capture of anyone.
 *   - Internal work runs on our own non-blocking stream; the legacy stream is touched only if the
 * caller names it. */
#ifndef OH_CUDA_DEVICE_H
#define OH_CUDA_DEVICE_H

#include "device/device.h"
#include "device/cuda/driver_api.h"

#include <stdatomic.h>

/* ---- the driver ------------------------------------------------------------------------------ */

/* Opens libcuda.so.1 and initialises it, once per process. NO_DEVICE, with the reason, if that
 * failed. */
onehop_result oh_cuda_driver(void);

/* Turns the failure of a driver call into a result and a sentence: "<call> failed with <name>
 * (<text>) while <format...>". OUT_OF_MEMORY gives MEMORY, everything else DRIVER. */
onehop_result oh_cuda_error(oh_cu_result failure, const char *call, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* The same with the result chosen by the caller, who understands this failure better. */
onehop_result oh_cuda_error_as(onehop_result result, oh_cu_result failure, const char *call,
                               const char *format, ...) __attribute__((format(printf, 4, 5)));

/* ---- the device ------------------------------------------------------------------------------ */

#define OH_CUDA_KNOWN_STREAMS 16 /* a power of two */

typedef struct oh_cuda_device {
    oh_device base;
    uint64_t process; /* that opened it; in a forked child nothing of it is used or given back */
    int ordinal;
    oh_cu_device device;
    oh_cu_context context; /* primary; retained while this object lives */
    oh_cu_stream stream;   /* non-blocking, for fill and copy */
    oh_cu_event event;     /* for stream_order */
    uint32_t multiprocessors;
    uint32_t capability;           /* 90 for sm_90 */
    uint32_t handle_kinds;         /* what worked in the trial */
    bool multicast;                /* the driver reports it */
    struct oh_cuda_opened *opened; /* handles of classic IPC; cuda_span.c guards them */
    oh_cu_launch_attribute pdl;
    /* Ids of streams found to belong to `context`. An id is never used twice in the life of a
     * process, so an entry is never wrong; entries are single words that are overwritten at will,
     * and nothing is read on the strength of one: relaxed. */
    _Atomic uint64_t known_streams[OH_CUDA_KNOWN_STREAMS];
} oh_cuda_device;

static inline oh_cuda_device *oh_cuda_of(oh_device *device) {
    return (oh_cuda_device *)device;
}

/* A stretch of driver calls on a device: the primary context current, the capture mode relaxed.
 * Enter and leave come in pairs in one function; a failed enter needs no leave. */
typedef struct oh_cuda_scope {
    bool pushed;
    oh_cu_capture_mode mode; /* the thread's own, given back by leave */
} oh_cuda_scope;

onehop_result oh_cuda_enter(const oh_cuda_device *, oh_cuda_scope *);
void oh_cuda_leave(const oh_cuda_scope *);

/* The context alone, for calls that may be captured. *pushed_out says whether to pop. */
onehop_result oh_cuda_push(const oh_cuda_device *, bool *pushed_out);
void oh_cuda_pop(bool pushed);

/* Fill and wait, within a scope. */
onehop_result oh_cuda_fill_here(const oh_cuda_device *, oh_cu_ptr, int byte, size_t bytes);

/* ---- operations, one file each --------------------------------------------------------------- */

/* cuda_handles.c */
typedef union oh_cuda_handle_bytes { /* of an exported handle: a descriptor, or a
                                      * CUmemFabricHandle */
    int fd;
    unsigned char fabric[64];
} oh_cuda_handle_bytes;

/* Memory of this device, exportable as `kinds` (oh_handle_kind bits). */
oh_cu_memory_kind oh_cuda_memory_kind(const oh_cuda_device *, uint32_t kinds);
oh_cu_handle_type oh_cuda_handle_type(uint32_t kind);
oh_cu_result oh_cuda_import_bytes(oh_cuda_handle_bytes *, uint32_t kind, oh_cu_allocation *out);
/* A descriptor is close-on-exec: a program that the caller starts must not keep memory alive. */
oh_cu_result oh_cuda_export_bytes(oh_cu_allocation, uint32_t kind, oh_cuda_handle_bytes *out);
uint32_t oh_cuda_try_handle_kinds(const oh_cuda_device *); /* within a scope */

/* How every record begins that oh_mem.owner points to. */
typedef struct oh_cuda_owner {
    bool foreign; /* a record of cuda_span.c, else of cuda_memory.c */
} oh_cuda_owner;

/* cuda_memory.c */
onehop_result oh_cuda_mem_create(oh_device *, size_t bytes, uint32_t kinds, oh_mem *out);
onehop_result oh_cuda_mem_export(oh_device *, const oh_mem *, oh_mem_handle *out, int *fd_out);
onehop_result oh_cuda_mem_import(oh_device *, const oh_mem_handle *, int fd, oh_mem *out);
void oh_cuda_mem_release(oh_device *, oh_mem *);

/* Lets the device read and write mapped virtual memory, whoever mapped it. Within a scope. */
onehop_result oh_cuda_give_access(const oh_cuda_device *, oh_cu_ptr, size_t bytes);

/* cuda_multicast.c */
onehop_result oh_cuda_multicast_create(oh_device *, size_t bytes, int ranks, uint32_t kind,
                                       oh_multicast *, oh_mem_handle *handle_out, int *fd_out);
onehop_result oh_cuda_multicast_join(oh_device *, const oh_mem_handle *, int fd, oh_multicast *);
onehop_result oh_cuda_multicast_bind(oh_device *, const oh_mem *own, oh_multicast *);
onehop_result oh_cuda_multicast_map(oh_device *, const oh_mem *buffers, int ranks, oh_multicast *);
void oh_cuda_multicast_release(oh_device *, oh_multicast *);

/* cuda_foreign.c */
onehop_result oh_cuda_foreign_find(oh_device *, const oh_range *, size_t count, uint32_t kinds,
                                   oh_mem_handle **pieces_out, size_t *count_out);
onehop_result oh_cuda_foreign_descriptor(oh_device *, const oh_mem_handle *, int *fd_out);

/* cuda_span.c; mem_release comes here for foreign memory. */
onehop_result oh_cuda_foreign_map(oh_device *, const oh_mem_handle *, int fd, uint64_t span_bytes,
                                  uint64_t offset, oh_mem *span);
void oh_cuda_foreign_release(oh_device *, void *owner);

/* cuda_launch.c */
onehop_result oh_cuda_load(oh_device *, const oh_kernel *, size_t count, oh_function *out);
/* A kernel of a library that is loaded. */
onehop_result oh_cuda_take_kernel(oh_device *, oh_cu_library, const oh_kernel *, oh_function *out);
/* An image that the caller keeps no longer than this call. */
onehop_result oh_cuda_load_library(oh_device *, const void *image, oh_cu_library *out);
onehop_result oh_cuda_resident_blocks(oh_device *, const oh_function *, uint32_t threads,
                                      uint32_t *out);
onehop_result oh_cuda_launch(oh_device *, const oh_launch *);

/* cuda_built.c */
onehop_result oh_cuda_load_built(oh_device *, const oh_digest *, const void *image,
                                 const oh_kernel *, oh_function *out);

/* cuda_stream.c */
onehop_result oh_cuda_stream_info(oh_device *, onehop_stream, oh_stream_info *out);
onehop_result oh_cuda_stream_order(oh_device *, onehop_stream earlier, onehop_stream later);
onehop_result oh_cuda_stream_idle(oh_device *, onehop_stream, bool *idle_out);
onehop_result oh_cuda_graph_retain(oh_device *, onehop_stream, void (*gone)(void *),
                                   void *argument);

#endif
