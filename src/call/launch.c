/* From a validated request to a launch. The fast path of the library: no allocation, lock, log or
 * system call beyond the launch. */
#include "context/expression.h"
#include "device/nccl/nccl.h"

#include <string.h>

/* Mixes one value into a hash; the finaliser of MurmurHash3 (public domain) on 64 bits. */
static uint64_t mix(uint64_t hash, uint64_t value) {
    hash ^= value + 0x9e3779b97f4a7c15ull;
    hash ^= hash >> 33;
    hash *= 0xff51afd7ed558ccdull;
    hash ^= hash >> 33;
    hash *= 0xc4ceb9fe1a85ec53ull;
    return hash ^ hash >> 33;
}

/* Everything that must be equal on all ranks in a call. */
static uint32_t hash_of(const oh_request *q, const oh_plan *plan) {
    const onehop_choice *c = &plan->choice;
    uint64_t h = q->fused ? q->fused->identity : mix(0, q->count);
    h = mix(h, (uint64_t)q->dtype << 32 | (uint64_t)q->op << 24 | (uint64_t)c->algorithm << 8 |
                   (uint64_t)c->source);
    h = mix(h, (uint64_t)c->blocks << 32 | c->threads);
    h = mix(h, plan->chunk_bytes);
    if (c->source == ONEHOP_SOURCE_GRAPH) h = mix(h, oh_request_in_place(q));
    if (q->custom) h = mix(h, oh_custom_identity(q->custom, q->values));
    return (uint32_t)(h >> 32);
}

/* Calls of one communicator run in the order they were made, also when they change streams.
 * Captured calls are ordered within their capture; order among replays and eager calls is the
 * caller's. */
static onehop_result order_streams(onehop_comm *comm, onehop_stream stream,
                                   const oh_stream_info *info) {
    onehop_stream *last = info->capturing ? &comm->captured_stream : &comm->eager_stream;
    uint64_t *last_id = info->capturing ? &comm->captured_id : &comm->eager_id;
    onehop_result result = ONEHOP_OK;
    if (*last_id == info->id + 1) return ONEHOP_OK;
    if (*last_id) result = comm->device->ops->stream_order(comm->device, *last, stream);
    if (result) return result;
    *last = stream;
    *last_id = info->id + 1;
    return ONEHOP_OK;
}

static void count_call(onehop_comm *comm, onehop_algorithm algorithm, size_t bytes) {
    comm->stats.calls++;
    comm->stats.bytes += bytes;
    comm->stats.calls_by[algorithm]++;
}

/* A host call on no stream has run to its end by now, and has failed only if it has left a record:
 * that a peer was seen to leave just after it, from another thread, is for the next call. */
static onehop_result check_ended(onehop_comm *comm, onehop_stream stream) {
    if (stream || !__atomic_load_n(&comm->page->record.kind, __ATOMIC_ACQUIRE)) return ONEHOP_OK;
    return oh_comm_check(comm);
}

/* A communicator of one rank. */
static onehop_result copy_alone(onehop_comm *comm, const oh_request *q, const oh_plan *plan) {
    const size_t bytes = oh_request_bytes(q);
    onehop_result result = ONEHOP_OK;
    if (q->in != q->out)
        result = comm->device->ops->copy_on_stream(comm->device, q->out, q->in, bytes, q->stream);
    if (!result) count_call(comm, plan->choice.algorithm, bytes);
    return result;
}

/* In the same stream, so ordered with our calls; without our signature, and no call of ours for the
 * sequence numbers. */
static onehop_result hand_over(onehop_comm *comm, const oh_request *q, const oh_plan *plan) {
    onehop_result result =
        oh_nccl_all_reduce(comm->device, comm->nccl, q->in, q->out, q->count, q->dtype, q->stream);
    if (!result) count_call(comm, plan->choice.algorithm, oh_request_bytes(q));
    return result;
}

/* What an L2 takes in beside a call: of more, a call and the reading after it became slower, by 7 %
 * at 16 MiB and 20 % at 32 (docs/notes/tuning-log.md). */
#define PREFETCH_MAX ((oh_u64)8 << 20)

/* Blocks to launch for a grid of `blocks`: on a GPU as many more as are left, if there is something
 * that they could prefetch. */
static uint32_t launched_blocks(const onehop_comm *comm, const onehop_call *call, uint32_t blocks,
                                oh_args *args) {
    args->blocks = blocks;
    if (!call || !call->prefetch_bytes || comm->dispatch.kind != ONEHOP_DEVICE_CUDA) return blocks;
    args->prefetch = (uintptr_t)call->prefetch;
    args->prefetch_bytes =
        call->prefetch_bytes < PREFETCH_MAX ? call->prefetch_bytes : PREFETCH_MAX;
    return blocks > args->regions.max_blocks ? blocks : args->regions.max_blocks;
}

/* Of a call that is not fused. */
static void fill_plain(const onehop_comm *comm, const oh_request *q, const oh_plan *plan,
                       oh_args *args) {
    const size_t bytes = oh_request_bytes(q);
    const size_t first = bytes < plan->chunk_bytes ? bytes : plan->chunk_bytes;
    const oh_u64 step = q->collective == ONEHOP_ALL_REDUCE ? 0 : bytes; /* between parts */
    *args = comm->args;
    args->in = (uintptr_t)q->in;
    args->out = (uintptr_t)q->out;
    args->count = q->count;
    args->units = (uint32_t)((first + OH_UNIT_BYTES - 1) / OH_UNIT_BYTES);
    args->whole =
        (args->in | args->out | step) % OH_UNIT_BYTES ? 0 : (uint32_t)(first / OH_UNIT_BYTES);
    if (plan->choice.source != ONEHOP_SOURCE_GRAPH) return;
    args->registration = comm->args.local + comm->args.regions.registrations +
                         q->registration * sizeof(oh_registration);
    args->tag = comm->registration_tags[q->registration];
}

onehop_result oh_comm_launch(onehop_comm *comm, const oh_request *q, const oh_plan *plan,
                             const oh_stream_info *info) {
    const onehop_choice *c = &plan->choice;
    if (c->algorithm == ONEHOP_LOCAL_COPY) return copy_alone(comm, q, plan);
    onehop_result result = order_streams(comm, q->stream, info);
    if (result) return result;
    if (c->algorithm == ONEHOP_NCCL) return hand_over(comm, q, plan);
    oh_args plain, *const args = q->fused ? q->fused->args : &plain;
    if (q->fused)
        *q->fused->chunk_rows = plan->chunk_rows;
    else
        fill_plain(comm, q, plan, args);
    args->chunk_bytes = plan->chunk_bytes;
    args->chunks = c->chunks;
    args->hash = hash_of(q, plan);
    args->dtype = (uint32_t)q->dtype;
    args->called = OH_CALLED(c->algorithm, c->source, q->dtype,
                             q->fused ? q->fused->rows.operation : OH_PLAIN);
    args->threads = c->threads;
    const uint32_t blocks = launched_blocks(comm, q->call, c->blocks, args);
    oh_launch launch = {&comm->functions[plan->kernel],
                        args,
                        q->fused ? q->fused->args_bytes : sizeof plain,
                        blocks,
                        c->threads,
                        q->stream};
    oh_epilogue_args extended;
    if (q->custom) oh_custom_extend(q->custom, q->values, args, plan, &extended, &launch);
    result = comm->device->ops->launch(comm->device, &launch);
    if (result) return result;
    count_call(comm, c->algorithm, oh_request_bytes(q));
    return check_ended(comm, q->stream);
}
