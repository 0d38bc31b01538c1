/* NCCL, opened at run time: for the hand-over of long messages, and for tools that time it. What is
 * declared here is its published interface, version 2. The environment it reads is not touched. */
#ifndef OH_NCCL_H
#define OH_NCCL_H

#include "device/device.h"

typedef struct oh_nccl_id {
    char bytes[128];
} oh_nccl_id;

/* X(exported name, parameters); all return 0 for success. */
#define OH_NCCL_FUNCTIONS(X)                                                                       \
    X(ncclGetVersion, (int *))                                                                     \
    X(ncclGetUniqueId, (oh_nccl_id *))                                                             \
    X(ncclCommInitRank, (void **, int, oh_nccl_id, int))                                           \
    X(ncclAllReduce, (const void *, void *, size_t, int, int, void *, onehop_stream))              \
    X(ncclReduceScatter, (const void *, void *, size_t, int, int, void *, onehop_stream))          \
    X(ncclAllGather, (const void *, void *, size_t, int, void *, onehop_stream))                   \
    X(ncclCommDestroy, (void *))                                                                   \
    X(ncclCommAbort, (void *))

/* Of 2.27 and later. */
#define OH_NCCL_WINDOW_FUNCTIONS(X)                                                                \
    X(ncclMemAlloc, (void **, size_t))                                                             \
    X(ncclMemFree, (void *))                                                                       \
    X(ncclCommWindowRegister, (void *, void *, size_t, void **, int))                              \
    X(ncclCommWindowDeregister, (void *, void *))

typedef struct oh_nccl_table {
#define OH_NCCL_MEMBER(name, parameters) int(*name) parameters;
    OH_NCCL_FUNCTIONS(OH_NCCL_MEMBER)
    OH_NCCL_WINDOW_FUNCTIONS(OH_NCCL_MEMBER)
#undef OH_NCCL_MEMBER
    const char *(*ncclGetErrorString)(int);
    bool windows;     /* it has all functions of windows */
    char version[32]; /* "2.28.9" */
} oh_nccl_table;

/* Valid once oh_nccl_open has succeeded. */
extern oh_nccl_table oh_nccl;

/* Opens the library, once per process: `path`, else ONEHOP_NCCL_LIB, else libnccl.so.2. Later calls
 * take the one that is open, whatever they name. UNSUPPORTED, with the reason. */
onehop_result oh_nccl_open(const char *path);

/* OK for 0, else DRIVER with NCCL's own text. */
onehop_result oh_nccl_check(int result, const char *call);

enum {
    OH_NCCL_SUM = 0
};

/* NCCL's number for a data type. */
int oh_nccl_type(onehop_dtype dtype);

/* A communicator on a CUDA device. Collective: returns when all ranks have called it, and NCCL
 * alone decides how long that may take. */
onehop_result oh_nccl_connect(oh_device *device, const oh_nccl_id *id, int rank, int world,
                              void **comm_out);
/* With `dead` at once; else NCCL may wait for the peers to do the same. */
void oh_nccl_disconnect(oh_device *device, void *comm, bool dead);

/* A sum in stream order; may be captured. */
onehop_result oh_nccl_all_reduce(oh_device *device, void *comm, const void *in, void *out,
                                 size_t count, onehop_dtype dtype, onehop_stream stream);

#endif
