/* The device interface: all that the layers above know of a processor. Two implementations, cuda/
 * and host/, behind one table of functions. A device knows memory, streams and launches; it knows
 * nothing of ranks, protocols or algorithms.
 *
 * An oh_device belongs to one rank. Functions may be called by any thread; on CUDA each pushes the
 * primary context of its device if that is not current and pops it on every path. */
#ifndef OH_DEVICE_H
#define OH_DEVICE_H

#include "base/base.h"
#include "base/sha256.h"

typedef struct oh_device oh_device;

/* How a piece of memory can be given to another process. Decided by trying, never by asking
 * alone. */
typedef enum oh_handle_kind {
    OH_HANDLE_NONE = 0,   /* foreign memory that no other process can map */
    OH_HANDLE_FD = 1,     /* a descriptor: memfd, or a cuMem allocation */
    OH_HANDLE_FABRIC = 2, /* CUmemFabricHandle */
    OH_HANDLE_IPC = 4,    /* classic CUDA IPC of memory that somebody else allocated */
} oh_handle_kind;         /* bits, so that sets can be intersected over ranks */

/* What travels to the peers besides the descriptor. */
typedef struct oh_mem_handle {
    uint32_t kind;
    uint32_t device; /* ordinal */
    uint64_t bytes;
    /* Of OH_HANDLE_NONE: what memory it is, as text. */
    unsigned char data[64];
    /* Foreign memory only: where it lies in the process that owns it, and which process that is. */
    uint64_t base;
    oh_id128 process;
} oh_mem_handle;

/* A stretch of a process's own addresses. */
typedef struct oh_range {
    uint64_t base, bytes;
} oh_range;

/* Memory of a device mapped into this process. `owner` is private to the device; NULL: nothing to
 * release. */
typedef struct oh_mem {
    void *ptr;
    size_t bytes;
    void *owner;
} oh_mem;

/* One address for the same place in the memory of all ranks, where each has a device of its own:
 * what is stored there goes to all, what is loaded is the sum. Zeroed: none. */
typedef struct oh_multicast {
    uint64_t address; /* for kernels; 0 until it is mapped */
    void *owner;      /* private to the device */
} oh_multicast;

/* Host device, which emulates it: what the address is that of. */
typedef struct oh_multicast_buffers {
    uint32_t count, unused;
    uint64_t buffers[ONEHOP_MAX_RANKS];
} oh_multicast_buffers;

typedef struct oh_device_info {
    onehop_device device;
    char name[96];
    char bus_id[32];          /* PCI bus id, or "" */
    uint32_t multiprocessors; /* SMs; on the host the cores this process may use */
    uint32_t capability;      /* compute capability * 10: 90 for sm_90; 0 on the host */
    uint32_t driver_version;  /* 13000 for CUDA 13.0; 0 on the host */
    uint32_t handle_kinds;    /* oh_handle_kind bits that worked in a trial on this device */
    uint64_t memory_bytes;
    bool multicast; /* the driver reports it; the host emulates it */
} oh_device_info;

/* A function a device can run: the body compiled for the host, or a function of the loaded
 * image. */
typedef struct oh_grid oh_grid;
typedef void (*oh_host_kernel)(const void *args, oh_grid grid);

typedef struct oh_kernel {
    const char *name;     /* extern "C" name, the same in the image */
    oh_host_kernel host;  /* host device: the compiled body; run once per (block, worker) */
    uint32_t max_threads; /* launch bound */
} oh_kernel;

/* A kernel made ready on a device. cuda: CUfunction. host: the oh_host_kernel. */
typedef struct oh_function {
    void *handle;
    uint32_t registers;
    uint32_t
        blocks_per_multiprocessor; /* occupancy at max_threads; see device_occupancy for others */
    bool pdl;                      /* loaded code understands programmatic dependent launch */
    bool exact;                    /* it was compiled for exactly this device's architecture */
} oh_function;

typedef struct oh_launch {
    const oh_function *function;
    const void *args; /* copied before the call returns */
    size_t args_bytes;
    uint32_t blocks;
    uint32_t threads;
    onehop_stream stream;
} oh_launch;

/* What a stream is, asked once per call. */
typedef struct oh_stream_info {
    uint64_t id;      /* unique while the stream lives; 0 for NULL */
    bool capturing;   /* work given to it now is recorded, not run */
    uint64_t capture; /* then: number of the capture, and so of the graph, never used twice */
} oh_stream_info;

typedef struct oh_device_ops {
    onehop_device_kind kind;
    void (*close)(oh_device *);
    onehop_result (*info)(oh_device *, oh_device_info *out);

    /* Zeroed memory that peers can map, exportable as the kinds of `kinds` that work here; 0: as
     * all that work. UNSUPPORTED if none does. */
    onehop_result (*mem_create)(oh_device *, size_t bytes, uint32_t kinds, oh_mem *out);
    /* Describes memory from mem_create for other processes; *fd_out is a descriptor the caller
     * closes, or -1. */
    onehop_result (*mem_export)(oh_device *, const oh_mem *, oh_mem_handle *out, int *fd_out);
    /* Maps a peer's memory. `fd` stays the caller's. Memory that this process made is not mapped
     * again: its one mapping is shared and counted. */
    onehop_result (*mem_import)(oh_device *, const oh_mem_handle *, int fd, oh_mem *out);
    /* Unmaps, and frees if this process created it. A zeroed oh_mem is a no-op. */
    void (*mem_release)(oh_device *, oh_mem *);

    /* Multicast, in four steps, each taken once all ranks have done the one before: rank 0 creates
     * an object for `ranks` devices, to be handed on as mem_export does, by `kind`; all others join
     * it; each binds its own memory; each maps it. `release` undoes what was done and accepts any
     * prefix. All refuse, with UNSUPPORTED, while oh_multicast_refusal() has a reason. */
    onehop_result (*multicast_create)(oh_device *, size_t bytes, int ranks, uint32_t kind,
                                      oh_multicast *, oh_mem_handle *handle_out, int *fd_out);
    onehop_result (*multicast_join)(oh_device *, const oh_mem_handle *, int fd, oh_multicast *);
    onehop_result (*multicast_bind)(oh_device *, const oh_mem *own, oh_multicast *);
    onehop_result (*multicast_map)(oh_device *, const oh_mem *buffers, int ranks, oh_multicast *);
    void (*multicast_release)(oh_device *, oh_multicast *);

    /* Foreign memory: somebody else allocated it, and nothing is known but addresses. It is shared
     * in pieces, as it was made: whole allocations, chunks of virtual memory, mappings of files.
     *
     * The pieces in which `count` ranges lie, in order of address, each once; the ranges come in
     * order of their base. A piece is one of `kinds` that serves it (descriptors where they do), or
     * OH_HANDLE_NONE. The list is the caller's to free(). No descriptor is open after it. */
    onehop_result (*foreign_find)(oh_device *, const oh_range *ranges, size_t count, uint32_t kinds,
                                  oh_mem_handle **pieces_out, size_t *count_out);
    /* A new descriptor of an own piece of kind OH_HANDLE_FD. */
    onehop_result (*foreign_descriptor)(oh_device *, const oh_mem_handle *piece, int *fd_out);
    /* Maps a peer's piece (`fd` stays the caller's) at `offset` of a span, the addresses that
     * pieces with oh_foreign_joins share side by side; a zeroed span is first made, of span_bytes.
     * In the process of the piece nothing is mapped: the span lies where the memory lies, and this
     * device is given access. mem_release, through this device, undoes all of a span, also of one
     * that is not complete. The owner keeps the memory until then. UNSUPPORTED if it cannot be
     * reached. */
    onehop_result (*foreign_map)(oh_device *, const oh_mem_handle *piece, int fd,
                                 uint64_t span_bytes, uint64_t offset, oh_mem *span);

    /* Zeroed memory of this device alone; not shareable. */
    onehop_result (*local_alloc)(oh_device *, size_t bytes, void **out);
    void (*local_free)(oh_device *, void *);
    /* Zeroed host memory that the device can access at *device_out and the host at *host_out. */
    onehop_result (*host_alloc)(oh_device *, size_t bytes, void **host_out, void **device_out);
    void (*host_free)(oh_device *, void *host);
    /* Address by which the device reaches host memory that the caller pinned; the same pointer on
     * the host device. */
    onehop_result (*host_address)(oh_device *, void *host, void **device_out);

    /* Synchronous, on an internal stream; never the legacy stream, legal during anyone's
     * capture. */
    onehop_result (*fill)(oh_device *, void *ptr, int byte, size_t bytes);
    onehop_result (*copy)(oh_device *, void *to, const void *from, size_t bytes);

    /* In stream order; `to` and `from` are memory of this device, disjoint. */
    onehop_result (*copy_on_stream)(oh_device *, void *to, const void *from, size_t bytes,
                                    onehop_stream);

    /* Makes functions out of kernels; on CUDA loads the image on first use and each function at
     * once. */
    onehop_result (*load)(oh_device *, const oh_kernel *kernels, size_t count, oh_function *out);
    /* The same for one kernel of an image that was compiled at run time (jit.h), for exactly this
     * device. It stays loaded under its key. Without an image only what is loaded is found, else
     * the function has no handle. NULL on the host. */
    onehop_result (*load_built)(oh_device *, const oh_digest *key, const void *image,
                                const oh_kernel *, oh_function *out);
    /* Blocks of `threads` that fit on the device at once. */
    onehop_result (*resident_blocks)(oh_device *, const oh_function *, uint32_t threads,
                                     uint32_t *out);

    /* STREAM if the stream cannot be used on this device. */
    onehop_result (*stream_info)(oh_device *, onehop_stream, oh_stream_info *out);
    onehop_result (*launch)(oh_device *, const oh_launch *);
    /* Work given to `later` after this call waits for what `earlier` holds now. */
    onehop_result (*stream_order)(oh_device *, onehop_stream earlier, onehop_stream later);
    /* *idle_out: all work given to the stream so far is done. Never blocks. STREAM while it is
     * captured. */
    onehop_result (*stream_idle)(oh_device *, onehop_stream, bool *idle_out);
    /* Calls gone(argument) exactly once: when the graph that is being captured on the stream, and
     * all that was made from it, is gone, or when this fails. It may be called by any thread and
     * must not use a device. STREAM if there is no capture. */
    onehop_result (*graph_retain)(oh_device *, onehop_stream, void (*gone)(void *), void *argument);
} oh_device_ops;

struct oh_device {
    const oh_device_ops *ops;
};

/* Two pieces of one process, `second` next in order of address, that lie side by side and are
 * mapped so. */
bool oh_foreign_joins(const oh_mem_handle *first, const oh_mem_handle *second);

/* Opens a device for one rank. AUTO: ONEHOP_DEVICE, else CUDA if a GPU can be used, else the host;
 * the GPU is then LOCAL_RANK, else `rank`, modulo their number. */
onehop_result oh_device_open(onehop_device which, int rank, oh_device **out);

onehop_result oh_cuda_device_open(int ordinal, oh_device **out);
onehop_result oh_host_device_open(oh_device **out);

/* Number of GPUs that can be used; 0 without a driver. Never fails: the reason is logged at
 * info. */
int oh_cuda_device_count(void);

/* Why CUDA cannot be used ("libcuda.so.1 was not found" ...), or NULL. */
const char *oh_cuda_absent_reason(void);

#define OH_CUDA_IMAGES 16

/* The images that have all kernels, at most OH_CUDA_IMAGES and ended by NULL; none in a build
 * without nvcc. Handed to the cuda device by the layer that owns them, before the first load; the
 * list and the images stay. */
void oh_cuda_set_images(const void *const *images);

/* Where a block stands. On the host a block has one thread, so block_sync is nothing. */
struct oh_grid {
    uint32_t block, blocks;
    uint32_t thread, threads;
};

/* Host device: runs a kernel's blocks worker, worker + workers, ... of `blocks`, the last block
 * first (it carries the signature and waits for nothing but the peers' last block). What a launch
 * does with one worker; tests call it from several threads per rank. */
void oh_host_run_worker(oh_host_kernel kernel, const void *args, uint32_t blocks, uint32_t worker,
                        uint32_t workers);

#endif
