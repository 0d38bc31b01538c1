/* All-reduce, reduce-scatter and all-gather by NCCL's names. */
#include "nccl_shim/shim.h"

static int submit(const oh_shim_call *call, const void *caller) {
    if (oh_shim_inside(caller)) return oh_shim_forward(call);
    const oh_shim_reason reason = oh_shim_judge(call);
    if (oh_shim_grouped()) return oh_shim_group_add(call, reason);
    if (reason == OH_SHIM_TAKEN) return oh_shim_run(call);
    oh_shim_count_forwarded(reason);
    return oh_shim_forward(call);
}

/* ---- NCCL's names ---------------------------------------------------------------------------- */

OH_EXPORT int ncclAllReduce(const void *in, void *out, size_t count, int dtype, int op,
                            oh_nccl_comm comm, onehop_stream stream);
OH_EXPORT int ncclReduceScatter(const void *in, void *out, size_t count, int dtype, int op,
                                oh_nccl_comm comm, onehop_stream stream);
OH_EXPORT int ncclAllGather(const void *in, void *out, size_t count, int dtype, oh_nccl_comm comm,
                            onehop_stream stream);

int ncclAllReduce(const void *in, void *out, size_t count, int dtype, int op, oh_nccl_comm comm,
                  onehop_stream stream) {
    const oh_shim_call call = {ONEHOP_ALL_REDUCE, in, out, count, dtype, op, comm, stream};
    return submit(&call, __builtin_return_address(0));
}
OH_PNCCL(ncclAllReduce);

int ncclReduceScatter(const void *in, void *out, size_t count, int dtype, int op, oh_nccl_comm comm,
                      onehop_stream stream) {
    const oh_shim_call call = {ONEHOP_REDUCE_SCATTER, in, out, count, dtype, op, comm, stream};
    return submit(&call, __builtin_return_address(0));
}
OH_PNCCL(ncclReduceScatter);

int ncclAllGather(const void *in, void *out, size_t count, int dtype, oh_nccl_comm comm,
                  onehop_stream stream) {
    const oh_shim_call call = {ONEHOP_ALL_GATHER, in, out, count, dtype, 0, comm, stream};
    return submit(&call, __builtin_return_address(0));
}
OH_PNCCL(ncclAllGather);
