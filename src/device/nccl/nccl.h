/* NCCL, opened at run time: all that the layers above need of it to hand long messages over. The
 * environment that it reads is not touched. */
#ifndef OH_NCCL_H
#define OH_NCCL_H

#include "device/device.h"

/* Made by one rank, equal on all. */
typedef struct oh_nccl_id {
    char bytes[128];
} oh_nccl_id;

/* Opens the library, once per process: `path`, else ONEHOP_NCCL_LIB, else libnccl.so.2. Later calls
 * take the one that is open, whatever they name. UNSUPPORTED, with the reason. */
onehop_result oh_nccl_open(const char *path);

/* After oh_nccl_open. */
onehop_result oh_nccl_make_id(oh_nccl_id *out);

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
