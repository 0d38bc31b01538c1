/* Capture on a context: between begin and end, captured calls are noted; end compares them across
 * the ranks, call by call, so that graphs that could only hang are found before they run. Then the
 * registrations of those that take one are filled, see registration.c. */
#include "capture/capture.h"
#include "capture/registration.h"
#include "context/batch.h"

#include <stdlib.h>
#include <string.h>

static onehop_result make_room(onehop_context *ctx) {
    const size_t room = ctx->captured_room ? 2 * ctx->captured_room : 64;
    oh_captured *calls = realloc(ctx->captured, room * sizeof *calls);
    if (calls) ctx->captured = calls;
    oh_captured_memory *memory = realloc(ctx->captured_memory, room * sizeof *memory);
    if (memory) ctx->captured_memory = memory;
    if (!calls || !memory)
        return oh_error(ONEHOP_ERR_MEMORY, "capture: no memory for %zu calls", room);
    ctx->captured_room = room;
    return ONEHOP_OK;
}

onehop_result oh_capture_prepare(onehop_context *ctx, const oh_plan *plan,
                                 const oh_stream_info *info, oh_request *q) {
    onehop_result result = ONEHOP_OK;
    if (ctx->captured_count == ctx->captured_room) result = make_room(ctx);
    q->registration = OH_NO_REGISTRATION;
    if (!result && plan->choice.source == ONEHOP_SOURCE_GRAPH)
        result = oh_batch_take_registration(ctx, q->stream, info->capture, &q->registration);
    return result;
}

void oh_capture_note(onehop_context *ctx, const oh_request *q, const oh_plan *plan) {
    oh_captured *c = &ctx->captured[ctx->captured_count];
    memset(c, 0, sizeof *c);
    c->count = q->count;
    c->dtype = (uint32_t)q->dtype;
    c->algorithm = (uint32_t)plan->choice.algorithm;
    c->source = (uint32_t)plan->choice.source;
    c->blocks = plan->choice.blocks;
    c->threads = plan->choice.threads;
    c->in_place = oh_request_in_place(q);
    if (q->fused) c->identity = (uint32_t)(q->fused->identity >> 32);
    ctx->captured_memory[ctx->captured_count++] =
        (oh_captured_memory){q->in, q->out, oh_request_bytes(q), q->registration};
}

static void begin(onehop_context *ctx) {
    oh_batch_recycle(ctx);
    ctx->capturing = true;
    ctx->captured_count = 0;
    if (ctx->comm) ctx->comm->captured_id = 0;
}

onehop_result onehop_capture_begin(onehop_context *context) {
    OH_NO_CANCEL;
    onehop_result result = oh_context_check(context, "onehop_capture_begin");
    if (!result && context->capturing)
        result = oh_error(ONEHOP_ERR_STATE, "onehop_capture_begin: already capturing");
    if (!result) begin(context);
    return result;
}

static const char *type_of(const oh_captured *c) {
    return c->dtype ? onehop_dtype_name((onehop_dtype)c->dtype) : "bytes";
}

/* What ranks tell each other of a capture. */
typedef struct summary {
    uint64_t count;
    uint64_t numbered;
} summary;

typedef struct lists {
    summary of[ONEHOP_MAX_RANKS];
    oh_captured *calls; /* [rank][count] */
} lists;

/* The calls get numbers from one that no rank has used. */
static onehop_result compare_summaries(onehop_context *ctx, void *state) {
    const summary *of = ((lists *)state)->of;
    for (int r = 0; r < ctx->world; r++)
        if (of[r].numbered > ctx->numbered) ctx->numbered = (uint32_t)of[r].numbered;
    for (int r = 1; r < ctx->world; r++)
        if (of[r].count != of[0].count)
            return oh_error(ONEHOP_ERR_MISMATCH, "rank %d captured %zu calls, rank 0 %zu", r,
                            (size_t)of[r].count, (size_t)of[0].count);
    return ONEHOP_OK;
}

/* Calls of rank `rank` against rank 0's. */
static onehop_result compare_calls(const lists *l, int rank) {
    const size_t count = l->of[0].count;
    const oh_captured *a = l->calls + (size_t)rank * count, *b = l->calls;
    for (size_t i = 0; i < count; i++) {
        if (!memcmp(&a[i], &b[i], sizeof a[i])) continue;
        return oh_error(ONEHOP_ERR_MISMATCH,
                        "captured call %zu is %llu x %s by %s on %ux%u threads%s on rank %d, but "
                        "%llu x %s by %s on "
                        "%ux%u threads%s on rank 0",
                        i, (unsigned long long)a[i].count, type_of(&a[i]),
                        onehop_algorithm_name((onehop_algorithm)a[i].algorithm), a[i].blocks,
                        a[i].threads, a[i].in_place ? " in place" : "", rank,
                        (unsigned long long)b[i].count, type_of(&b[i]),
                        onehop_algorithm_name((onehop_algorithm)b[i].algorithm), b[i].blocks,
                        b[i].threads, b[i].in_place ? " in place" : "");
    }
    return ONEHOP_OK;
}

static onehop_result exchange_calls(const oh_members *m, lists *l) {
    const size_t count = l->of[0].count, bytes = count * sizeof *l->calls;
    l->calls = malloc(bytes * (size_t)m->world);
    onehop_result result =
        l->calls ? ONEHOP_OK : oh_error(ONEHOP_ERR_MEMORY, "capture: no memory to compare");
    result = oh_members_agree(m, result);
    for (int i = 0; i < m->count && !result; i++)
        memcpy(l->calls + (size_t)(m->first + i) * count, m->contexts[i]->captured, bytes);
    return result ? result : oh_members_share(m, l->calls, bytes);
}

/* All ranks' calls against rank 0's. The captures are over. */
static onehop_result compare(const oh_members *m) {
    lists l = {.calls = NULL};
    for (int i = 0; i < m->count; i++) {
        onehop_context *ctx = m->contexts[i];
        ctx->capturing = false;
        l.of[ctx->rank] = (summary){ctx->captured_count, ctx->numbered};
    }
    onehop_result result = oh_members_share(m, l.of, sizeof l.of[0]);
    if (!result) result = oh_members_run(m, compare_summaries, &l);
    if (result || !l.of[0].count) return result;
    result = exchange_calls(m, &l);
    for (int r = 1; r < m->world && !result; r++) result = compare_calls(&l, r);
    free(l.calls);
    return result;
}

static size_t count_rows(const onehop_context *ctx) {
    size_t registrations = 0;
    for (size_t i = 0; i < ctx->captured_count; i++)
        registrations += oh_takes_registration(&ctx->captured[i]);
    return registrations;
}

static onehop_result check_end(const onehop_context *ctx, const char *call) {
    onehop_result result = oh_context_check(ctx, call);
    if (!result && !ctx->capturing) result = oh_error(ONEHOP_ERR_STATE, "%s: not capturing", call);
    return result;
}

/* One rank ends its capture. */
static onehop_result check_end_alone(const onehop_context *ctx, const char *call) {
    onehop_result result = check_end(ctx, call);
    if (!result && ctx->world > 1 && !ctx->group)
        result = oh_error(ONEHOP_ERR_STATE,
                          "%s: this context was made by onehop_create_all; end all ranks' captures "
                          "with onehop_capture_end_all",
                          call);
    return result;
}

static onehop_result end(const oh_members *m) {
    onehop_result result = compare(m);
    if (!result && count_rows(m->contexts[0])) return oh_register(m);
    for (int i = 0; i < m->count; i++) oh_batch_close(m->contexts[i], NULL, 0);
    return result;
}

onehop_result onehop_capture_end(onehop_context *context) {
    OH_NO_CANCEL;
    onehop_result result = check_end_alone(context, "onehop_capture_end");
    if (result) return result;
    const oh_members m = oh_members_one(&context);
    return end(&m);
}

onehop_result onehop_capture_inputs(const onehop_context *context,
                                    onehop_captured_input *inputs_out, size_t room,
                                    size_t *count_out) {
    onehop_result result = check_end(context, "onehop_capture_inputs");
    if (result) return result;
    if (!count_out || (room && !inputs_out))
        return oh_error(ONEHOP_ERR_NULL, "onehop_capture_inputs: a pointer is NULL");
    size_t count = 0;
    for (size_t i = 0; i < context->captured_count; i++) {
        const oh_captured_memory *m = &context->captured_memory[i];
        if (!oh_takes_registration(&context->captured[i])) continue;
        if (count < room) inputs_out[count] = (onehop_captured_input){m->in, m->out, m->bytes};
        count++;
    }
    *count_out = count;
    return ONEHOP_OK;
}

static onehop_result check_mapped(const onehop_context *ctx, const void *const *in,
                                  void *const *out, size_t count) {
    static const char call[] = "onehop_capture_end_mapped";
    const size_t registrations = count_rows(ctx);
    if (count && (!in || !out))
        return oh_error(ONEHOP_ERR_NULL, "%s: %s is NULL", call, in ? "out" : "in");
    if (count != registrations)
        return oh_error(ONEHOP_ERR_ARGUMENT,
                        "%s: count is %zu, but %zu captured calls take addresses", call, count,
                        registrations);
    for (size_t i = 0; i < count * (size_t)ctx->world; i++) {
        if (!in[i] || !out[i])
            return oh_error(ONEHOP_ERR_NULL, "%s: %s of call %zu on rank %zu is NULL", call,
                            in[i] ? "out" : "in", i / (size_t)ctx->world, i % (size_t)ctx->world);
        if (((uintptr_t)in[i] | (uintptr_t)out[i]) % OH_UNIT_BYTES)
            return oh_error(ONEHOP_ERR_ALIGNMENT,
                            "%s: in at %p, out at %p of call %zu on rank %zu, expected addresses "
                            "aligned to %d",
                            call, in[i], out[i], i / (size_t)ctx->world, i % (size_t)ctx->world,
                            OH_UNIT_BYTES);
    }
    return ONEHOP_OK;
}

/* [registration][rank] */
static onehop_result fill_mapped(onehop_context *ctx, const void *const *in, void *const *out) {
    onehop_result result = ONEHOP_OK;
    for (size_t i = 0; i < ctx->captured_count && !result; i++) {
        if (!oh_takes_registration(&ctx->captured[i])) continue;
        result = oh_comm_registration_fill(ctx->comm, ctx->captured_memory[i].registration,
                                           ctx->numbered++, in, out);
        in += ctx->world;
        out += ctx->world;
    }
    return result;
}

/* Wrong arguments of one rank leave all of them capturing. */
onehop_result onehop_capture_end_mapped(onehop_context *context, const void *const *in,
                                        void *const *out, size_t count) {
    OH_NO_CANCEL;
    onehop_result result = check_end_alone(context, "onehop_capture_end_mapped");
    if (result) return result;
    const oh_members m = oh_members_one(&context);
    result = oh_members_agree(&m, check_mapped(context, in, out, count));
    if (result) return result;
    result = compare(&m);
    if (!result && count) result = oh_members_agree(&m, fill_mapped(context, in, out));
    oh_batch_close(context, NULL, 0);
    return result;
}

onehop_result onehop_capture_begin_all(onehop_context *const *contexts, int n) {
    OH_NO_CANCEL;
    onehop_result result = oh_check_all(contexts, n, "onehop_capture_begin_all");
    for (int r = 0; r < n && !result; r++)
        if (contexts[r]->capturing)
            result = oh_error(ONEHOP_ERR_STATE,
                              "onehop_capture_begin_all: rank %d is already capturing", r);
    for (int r = 0; r < n && !result; r++) begin(contexts[r]);
    return result;
}

onehop_result onehop_capture_end_all(onehop_context *const *contexts, int n) {
    OH_NO_CANCEL;
    onehop_result result = oh_check_all(contexts, n, "onehop_capture_end_all");
    for (int r = 0; r < n && !result; r++)
        result = check_end(contexts[r], "onehop_capture_end_all");
    if (result) return result;
    const oh_members m = oh_members_all(contexts, n);
    return end(&m);
}
