/* Streams: what a stream is, order between two, and whether one is idle.
 *
 * The questions here are asked so that a capture, ours or another's, is never broken: calls that
 * the driver punishes by invalidating a capture (a query, an event on the legacy stream) are made
 * only after asking whether a capture is on. */
#include "device/cuda/cuda_device.h"

/* NULL and the legacy handle are one stream. */
static bool is_legacy(onehop_stream stream) {
    return stream == NULL || stream == OH_CU_STREAM_LEGACY;
}

static onehop_result implicit_capture(void) {
    return oh_error(ONEHOP_ERR_STREAM,
                    "the legacy default stream cannot be used while a blocking stream of the same "
                    "context is being captured; use the captured stream, or create that one "
                    "non-blocking");
}

/* ---- whose stream ---------------------------------------------------------------------------- */

/* The GPU of a context, -1 if it cannot be told. */
static int ordinal_of(oh_cu_context context) {
    oh_cu_device device = -1;
    if (oh_cu.cuCtxPushCurrent_v2(context) != OH_CU_SUCCESS) return -1;
    if (oh_cu.cuCtxGetDevice(&device) != OH_CU_SUCCESS) device = -1;
    oh_cuda_pop(true);
    return device;
}

static onehop_result refuse_foreign(const oh_cuda_device *device, oh_cu_context context) {
    int ordinal = ordinal_of(context);
    if (ordinal == device->ordinal)
        return oh_error(ONEHOP_ERR_STREAM,
                        "the stream belongs to context %p of GPU %d, which is not the primary "
                        "context %p of that GPU; only the primary context is served",
                        (void *)context, ordinal, (void *)device->context);
    return oh_error(ONEHOP_ERR_STREAM,
                    "the stream belongs to context %p of GPU %d, but this rank runs on GPU %d "
                    "(context %p)",
                    (void *)context, ordinal, device->ordinal, (void *)device->context);
}

static onehop_result check_owner(oh_cuda_device *device, onehop_stream stream) {
    oh_cu_context context = NULL;
    oh_cu_result result = oh_cu.cuStreamGetCtx(stream, &context);
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error_as(ONEHOP_ERR_STREAM, result, "cuStreamGetCtx",
                                "asking which context stream %p belongs to", (void *)stream);
    return context == device->context ? ONEHOP_OK : refuse_foreign(device, context);
}

/* Id 0 stands for the legacy stream and for an empty entry of the known ones; the driver's own ids
 * of other streams are never 0. The owner is asked once per stream: afterwards its id is known. */
static onehop_result identify(oh_cuda_device *device, onehop_stream stream, uint64_t *id_out) {
    unsigned long long id = 0;
    if (is_legacy(stream)) {
        *id_out = 0;
        return ONEHOP_OK;
    }
    oh_cu_result result = oh_cu.cuStreamGetId(stream, &id);
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error_as(ONEHOP_ERR_STREAM, result, "cuStreamGetId",
                                "asking about stream %p", (void *)stream);
    *id_out = id;
    if (atomic_load_explicit(&device->known_streams[id % OH_CUDA_KNOWN_STREAMS],
                             memory_order_relaxed) == id &&
        id != 0)
        return ONEHOP_OK;
    onehop_result error = check_owner(device, stream);
    if (error == ONEHOP_OK)
        atomic_store_explicit(&device->known_streams[id % OH_CUDA_KNOWN_STREAMS], id,
                              memory_order_relaxed);
    return error;
}

/* The driver tells no id of a stream that is being captured; its handle serves, since it lives at
 * least as long as the capture. The top bit keeps it apart from ids. */
static onehop_result identify_captured(oh_cuda_device *device, onehop_stream stream,
                                       uint64_t *id_out) {
    *id_out = (uint64_t)(uintptr_t)stream | 1ull << 63;
    return check_owner(device, stream);
}

/* ---- capture --------------------------------------------------------------------------------- */

static onehop_result is_capturing(onehop_stream stream, bool *out) {
    oh_cu_capture_status status = OH_CU_CAPTURE_NONE;
    oh_cu_result result = oh_cu.cuStreamIsCapturing(stream, &status);
    if (result == OH_CU_CAPTURE_IMPLICIT) return implicit_capture();
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error(result, "cuStreamIsCapturing", "asking about stream %p",
                             (void *)stream);
    if (status == OH_CU_CAPTURE_INVALIDATED)
        return oh_error(
            ONEHOP_ERR_STREAM,
            "the capture of stream %p was invalidated by an earlier error; end it before "
            "the stream is used again",
            (void *)stream);
    *out = status == OH_CU_CAPTURE_ACTIVE;
    return ONEHOP_OK;
}

/* The capture a stream takes part in, 0: none, and its graph. */
static onehop_result capture_of(onehop_stream stream, uint64_t *out, oh_cu_graph *graph_out) {
    oh_cu_capture_status status = OH_CU_CAPTURE_NONE;
    uint64_t id = 0;
    oh_cu_result result =
        oh_cu.cuStreamGetCaptureInfo_v3(stream, &status, &id, graph_out, NULL, NULL, NULL);
    if (result == OH_CU_CAPTURE_IMPLICIT) return implicit_capture();
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error(result, "cuStreamGetCaptureInfo", "asking about stream %p",
                             (void *)stream);
    *out = status == OH_CU_CAPTURE_ACTIVE ? id : 0;
    return ONEHOP_OK;
}

/* ---- the operations -------------------------------------------------------------------------- */

onehop_result oh_cuda_stream_info(oh_device *base, onehop_stream stream, oh_stream_info *out) {
    oh_cuda_device *device = oh_cuda_of(base);
    oh_stream_info info = {0, false, 0};
    bool pushed;
    onehop_result error = oh_cuda_push(device, &pushed); /* the special handles mean its streams */
    if (error != ONEHOP_OK) return error;
    error = is_capturing(stream, &info.capturing);
    if (error == ONEHOP_OK)
        error = info.capturing ? identify_captured(device, stream, &info.id)
                               : identify(device, stream, &info.id);
    if (error == ONEHOP_OK && info.capturing) error = capture_of(stream, &info.capture, NULL);
    oh_cuda_pop(pushed);
    if (error == ONEHOP_OK) *out = info;
    return error;
}

static onehop_result record_and_wait(const oh_cuda_device *device, onehop_stream earlier,
                                     onehop_stream later) {
    const char *call = "cuEventRecord";
    oh_cu_result result = oh_cu.cuEventRecord(device->event, earlier);
    if (result == OH_CU_SUCCESS) {
        call = "cuStreamWaitEvent";
        result = oh_cu.cuStreamWaitEvent(later, device->event, 0);
    }
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error(result, call, "ordering stream %p after stream %p", (void *)later,
                             (void *)earlier);
    return ONEHOP_OK;
}

/* Two streams that are both live, or that take part in one capture, are ordered by an event (in a
 * capture it becomes an edge of the graph). Otherwise nothing is done, because nothing can be done:
 * work that is only being recorded has no place in time yet. Order among replays and eager calls is
 * the caller's. */
onehop_result oh_cuda_stream_order(oh_device *base, onehop_stream earlier, onehop_stream later) {
    oh_cuda_device *device = oh_cuda_of(base);
    uint64_t earlier_capture = 0, later_capture = 0;
    bool pushed;
    if (earlier == later || (is_legacy(earlier) && is_legacy(later))) return ONEHOP_OK;
    onehop_result error = oh_cuda_push(device, &pushed);
    if (error != ONEHOP_OK) return error;
    error = capture_of(earlier, &earlier_capture, NULL);
    if (error == ONEHOP_OK) error = capture_of(later, &later_capture, NULL);
    if (error == ONEHOP_OK && earlier_capture == later_capture)
        error = record_and_wait(device, earlier, later);
    oh_cuda_pop(pushed);
    return error;
}

/* The relaxed scope is for captures of other streams; the stream itself must not be captured, since
 * a query would invalidate that. */
onehop_result oh_cuda_stream_idle(oh_device *base, onehop_stream stream, bool *idle_out) {
    oh_cuda_device *device = oh_cuda_of(base);
    oh_cuda_scope scope;
    bool capturing = false;
    oh_cu_result result = OH_CU_SUCCESS;
    onehop_result error = oh_cuda_enter(device, &scope);
    if (error != ONEHOP_OK) return error;
    error = is_capturing(stream, &capturing);
    if (error == ONEHOP_OK && !capturing) result = oh_cu.cuStreamQuery(stream);
    oh_cuda_leave(&scope);
    if (error != ONEHOP_OK) return error;
    if (capturing)
        return oh_error(ONEHOP_ERR_STREAM,
                        "stream %p is being captured, so it runs nothing that could be waited for",
                        (void *)stream);
    if (result != OH_CU_SUCCESS && result != OH_CU_NOT_READY)
        return oh_cuda_error(result, "cuStreamQuery", "asking whether stream %p on GPU %d is idle",
                             (void *)stream, device->ordinal);
    *idle_out = result == OH_CU_SUCCESS;
    return ONEHOP_OK;
}

static onehop_result retain(onehop_stream stream, oh_cu_user_object object) {
    oh_cu_graph graph = NULL;
    uint64_t id = 0;
    onehop_result error = capture_of(stream, &id, &graph);
    if (error != ONEHOP_OK) return error;
    if (id == 0)
        return oh_error(ONEHOP_ERR_STREAM, "stream %p is not being captured", (void *)stream);
    oh_cu_result result = oh_cu.cuGraphRetainUserObject(graph, object, 1, OH_CU_USER_OBJECT_MOVE);
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error(result, "cuGraphRetainUserObject", "tying inputs to a captured graph");
    return ONEHOP_OK;
}

/* The graph and every executable made from it hold the object; the driver calls when the last one
 * is gone, from a thread of its own, in which it allows no call of it. */
onehop_result oh_cuda_graph_retain(oh_device *base, onehop_stream stream, void (*gone)(void *),
                                   void *argument) {
    oh_cu_user_object object = NULL;
    bool pushed;
    onehop_result error = oh_cuda_push(oh_cuda_of(base), &pushed);
    if (error != ONEHOP_OK) {
        gone(argument);
        return error;
    }
    oh_cu_result result =
        oh_cu.cuUserObjectCreate(&object, argument, gone, 1, OH_CU_USER_OBJECT_NO_SYNC);
    if (result == OH_CU_SUCCESS) {
        error = retain(stream, object);
        if (error != ONEHOP_OK) oh_cu.cuUserObjectRelease(object, 1); /* calls gone */
    } else {
        error = oh_cuda_error(result, "cuUserObjectCreate", "tying inputs to a captured graph");
        gone(argument);
    }
    oh_cuda_pop(pushed);
    return error;
}
