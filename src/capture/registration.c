/* Registration of captured memory: how the registrations of a capture come to hold every rank's
 * addresses.
 *
 * Each rank finds the pieces in which the memory of its calls lies, each once however many calls
 * lie in it, and all ranks send each other their pieces and the addresses of their calls. Each maps
 * what it can of the peers' pieces, neighbours side by side, and says of every call whether it
 * reaches the memory of all ranks. A call that all ranks reach on all ranks gets its addresses; any
 * other goes over the workspace, on all ranks, and that is no error: memory may be of a kind that
 * cannot be shared, unaligned, or a mapping may fail here and succeed there.
 *
 * Written as steps over oh_members, so that ranks in processes, in threads and all in one thread
 * take one path:
 *   look      own addresses and pieces             -> number of pieces to all
 *   make room for what will come                   -> pieces and addresses to all
 *   map       (descriptors in rounds)              -> which calls are in reach, to all
 *   fill      the registrations
 * Only lack of memory, a failing device and a broken group are errors, and end on all ranks
 * alike. */
#include "capture/registration.h"

#include "capture/reach.h"
#include "context/batch.h"

#include <stdlib.h>
#include <string.h>

#define MAX_BLOB ((size_t)16 << 20) /* of one exchange */

static void drop_tables(oh_capture_tables *t) {
    free(t->calls);
    free(t->pieces);
    free(t->addresses);
    free(t->direct);
}

/* Ends the capture: the batch takes over the mappings. */
static void close_view(oh_capture_view *v) {
    oh_batch_close(v->ctx, v->span_memory, v->span_memory ? v->span_count : 0);
    free(v->own_pieces);
    free(v->places);
    free(v->spans);
    free(v->values);
    free(v->numbers);
}

/* ---- look ------------------------------------------------------------------------------------ */

static int by_base(const void *a, const void *b) {
    const oh_range *x = a, *y = b;
    return x->base < y->base ? -1 : x->base > y->base;
}

static size_t list_ranges(const oh_capture_view *v, oh_range *ranges) {
    size_t count = 0;
    for (size_t i = 0; i < v->tables->registrations; i++) {
        const oh_addresses *a = &oh_capture_addresses_of(v->tables, v->ctx->rank)[i];
        if (!a->in) continue;
        ranges[count++] = (oh_range){a->in, oh_capture_bytes_of(v, i)};
        if (oh_capture_shares_output(v, i) && a->out != a->in)
            ranges[count++] = (oh_range){a->out, oh_capture_bytes_of(v, i)};
    }
    qsort(ranges, count, sizeof *ranges, by_base);
    return count;
}

static onehop_result find_pieces(oh_capture_view *v, uint64_t *count_out) {
    onehop_context *ctx = v->ctx;
    size_t count = 0;
    oh_range *ranges = malloc(2 * v->tables->registrations * sizeof *ranges);
    if (!ranges) return oh_error(ONEHOP_ERR_MEMORY, "capture: no memory");
    const size_t range_count = list_ranges(v, ranges);
    onehop_result result = ONEHOP_OK;
    if (range_count)
        result = ctx->device->ops->foreign_find(ctx->device, ranges, range_count,
                                                ctx->handle_kinds | OH_HANDLE_IPC, &v->own_pieces,
                                                &count);
    free(ranges);
    *count_out = count;
    return result;
}

/* If the pieces cannot be found nobody reaches an address: all is staged. */
static onehop_result look(onehop_context *ctx, void *state) {
    oh_capture_tables *t = state;
    oh_addresses *own = oh_capture_addresses_of(t, ctx->rank);
    for (size_t i = 0; i < t->registrations; i++) {
        const oh_captured_memory *m = &ctx->captured_memory[t->calls[i]];
        const uint64_t in = (uintptr_t)m->in, out = (uintptr_t)m->out;
        if (!((in | out) % OH_UNIT_BYTES)) own[i] = (oh_addresses){in, out};
    }
    const onehop_result result = find_pieces(oh_capture_view_of(t, ctx), &t->counts[ctx->rank]);
    return result == ONEHOP_ERR_MEMORY ? result : ONEHOP_OK;
}

/* The captured calls are alike, so those of any rank tell the registrations. */
static onehop_result open_tables(oh_capture_tables *t) {
    const onehop_context *ctx = t->members->contexts[0];
    const size_t world = (size_t)ctx->world;
    t->calls = malloc(ctx->captured_count * sizeof *t->calls);
    for (size_t i = 0; i < ctx->captured_count && t->calls; i++)
        if (oh_takes_registration(&ctx->captured[i])) t->calls[t->registrations++] = i;
    t->addresses = calloc(world * t->registrations, sizeof *t->addresses);
    t->direct = calloc(world * t->registrations, sizeof *t->direct);
    if (!t->calls || !t->addresses || !t->direct)
        return oh_error(ONEHOP_ERR_MEMORY, "capture: no memory");
    return ONEHOP_OK;
}

/* ---- make room ------------------------------------------------------------------------------- */

static onehop_result no_room(const oh_capture_tables *t) {
    return oh_error(ONEHOP_ERR_MEMORY, "capture: no memory for %zu registrations in %zu pieces",
                    t->registrations, t->max_pieces);
}

/* Places of all pieces; one more, for no memory at all is no failure. */
static size_t places_of(const oh_capture_tables *t) {
    return (size_t)t->members->world * t->max_pieces + 1;
}

static onehop_result grow_tables(oh_capture_tables *t) {
    for (int r = 0; r < t->members->world; r++)
        if (t->counts[r] > t->max_pieces) t->max_pieces = t->counts[r];
    if (t->max_pieces > MAX_BLOB / sizeof *t->pieces) { /* never seen; then all is staged */
        memset(t->counts, 0, sizeof t->counts);
        t->max_pieces = 0;
    }
    t->pieces = calloc(places_of(t), sizeof *t->pieces);
    return t->pieces ? ONEHOP_OK : no_room(t);
}

static onehop_result make_room(onehop_context *ctx, void *state) {
    oh_capture_tables *t = state;
    oh_capture_view *v = oh_capture_view_of(t, ctx);
    const size_t pieces = places_of(t);
    v->places = calloc(pieces, sizeof *v->places);
    v->spans = calloc(pieces, sizeof *v->spans);
    v->span_memory = calloc(pieces, sizeof *v->span_memory);
    v->values = calloc(t->registrations, sizeof *v->values);
    v->numbers = calloc(t->registrations, sizeof *v->numbers);
    if (!v->places || !v->spans || !v->span_memory || !v->values || !v->numbers) return no_room(t);
    if (t->counts[ctx->rank])
        memcpy(oh_capture_pieces_of(t, ctx->rank), v->own_pieces,
               t->counts[ctx->rank] * sizeof *v->own_pieces);
    return ONEHOP_OK;
}

static onehop_result map_and_judge(onehop_context *ctx, void *state) {
    oh_capture_tables *t = state;
    oh_capture_view *v = oh_capture_view_of(t, ctx);
    oh_reach_map(v);
    for (size_t i = 0; i < t->registrations; i++)
        t->direct[(size_t)ctx->rank * t->registrations + i] = oh_reach_registration(v, i);
    return ONEHOP_OK;
}

/* ---- fill ------------------------------------------------------------------------------------ */

static bool all_reach(const oh_capture_tables *t, size_t registration) {
    for (size_t r = 0; r < (size_t)t->members->world; r++)
        if (!t->direct[r * t->registrations + registration]) return false;
    return true;
}

static onehop_result fill(onehop_context *ctx, void *state) {
    oh_capture_tables *t = state;
    oh_capture_view *v = oh_capture_view_of(t, ctx);
    size_t staged = 0;
    for (size_t i = 0; i < t->registrations; i++) {
        oh_registration *value = &v->values[i];
        const bool direct = all_reach(t, i);
        if (!direct) memset(value, 0, sizeof *value);
        staged += !direct;
        v->numbers[i] = ctx->captured_memory[t->calls[i]].registration;
        value->mode = direct ? OH_REGISTRATION_DIRECT : OH_REGISTRATION_STAGED;
        value->identity = OH_REGISTRATION_IDENTITY(ctx->numbered++);
    }
    if (staged)
        oh_log(ONEHOP_LOG_INFO, "rank %d: %zu of %zu captured calls go over the workspace",
               ctx->rank, staged, t->registrations);
    return oh_comm_registrations_fill(ctx->comm, v->numbers, v->values, t->registrations);
}

/* ---- all steps ------------------------------------------------------------------------------- */

static onehop_result exchange(const oh_members *m, oh_capture_tables *t) {
    onehop_result result = oh_members_share(m, t->counts, sizeof t->counts[0]);
    if (result) return result;
    result = grow_tables(t);
    if (!result) result = oh_members_run(m, make_room, t);
    result = oh_members_agree(m, result);
    if (!result)
        result = oh_members_share(m, t->addresses, t->registrations * sizeof *t->addresses);
    if (!result) result = oh_members_share(m, t->pieces, t->max_pieces * sizeof *t->pieces);
    if (!result) result = oh_members_run(m, map_and_judge, t);
    return result ? result : oh_members_share(m, t->direct, t->registrations);
}

onehop_result oh_register(const oh_members *m) {
    oh_capture_tables t;
    memset(&t, 0, sizeof t);
    t.members = m;
    for (int i = 0; i < m->count; i++) {
        oh_capture_view *v = oh_capture_view_of(&t, m->contexts[i]);
        v->ctx = m->contexts[i];
        v->tables = &t;
    }
    onehop_result result = open_tables(&t);
    if (!result) result = oh_members_run(m, look, &t);
    result = oh_members_agree(m, result);
    if (!result) result = exchange(m, &t);
    if (!result) result = oh_members_each(m, fill, &t);
    for (int i = 0; i < m->count; i++) close_view(oh_capture_view_of(&t, m->contexts[i]));
    drop_tables(&t);
    return result;
}
