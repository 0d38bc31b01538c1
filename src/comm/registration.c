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
#include "comm/registration.h"

#include "device/foreign.h"

#include <stdlib.h>
#include <string.h>

/* Descriptors of each rank in flight at once; 16 ranks of them stay well below the usual limit of
 * 1024 open files. */
#define FDS_PER_ROUND OH_MEMBERS_FDS

#define MAX_BLOB ((size_t)16 << 20) /* of one exchange */

/* Of a call on one rank. 0: it must be staged. */
typedef struct addresses {
    uint64_t in, out;
} addresses;

/* What became of a peer's piece here. */
typedef struct mapped {
    size_t span;
    uint64_t shift; /* from its address there to that here */
    bool reached;
} mapped;

/* Pieces of a peer that lie side by side. */
typedef struct span {
    uint64_t base, bytes;
} span;

/* What one rank has of its own. */
typedef struct view {
    onehop_context *ctx;
    const struct tables *tables;
    oh_mem_handle *own_pieces;
    mapped *places; /* [rank][max_pieces] */
    span *spans;
    oh_mem *span_memory; /* goes to the batch */
    size_t span_count;
    oh_registration *values;
    uint32_t *numbers; /* of the registrations */
} view;

/* A capture. What ranks tell each other is [rank][max_pieces] and [rank][registrations]. */
typedef struct tables {
    const oh_members *members;
    size_t registrations;
    size_t *calls;                     /* index of the call of each registration, the same on all
                                        * ranks */
    uint64_t counts[ONEHOP_MAX_RANKS]; /* pieces of each rank */
    size_t max_pieces;
    oh_mem_handle *pieces;
    addresses *addresses;
    unsigned char *direct;        /* that rank reaches the memory of all */
    view views[ONEHOP_MAX_RANKS]; /* of the ranks here, at their place */
} tables;

static view *view_of(tables *t, const onehop_context *ctx) {
    return &t->views[ctx->rank];
}

static addresses *addresses_of(const tables *t, int rank) {
    return t->addresses + (size_t)rank * t->registrations;
}

static oh_mem_handle *pieces_of(const tables *t, int rank) {
    return t->pieces + (size_t)rank * t->max_pieces;
}

static void drop_tables(tables *t) {
    free(t->calls);
    free(t->pieces);
    free(t->addresses);
    free(t->direct);
}

/* Ends the capture: the batch takes over the mappings. */
static void close_view(view *v) {
    oh_batch_close(v->ctx, v->span_memory, v->span_memory ? v->span_count : 0);
    free(v->own_pieces);
    free(v->places);
    free(v->spans);
    free(v->values);
    free(v->numbers);
}

/* In the process of this rank? */
static bool same_process(const view *v, int rank) {
    return oh_members_share_process(v->tables->members, v->ctx->rank, rank);
}

/* 2shot_pull stores to the peers' outputs. */
static bool shares_output(const view *v, size_t registration) {
    return v->ctx->captured[v->tables->calls[registration]].algorithm == ONEHOP_2SHOT_PULL;
}

static uint64_t bytes_of(const view *v, size_t registration) {
    return v->ctx->captured_memory[v->tables->calls[registration]].bytes;
}

/* ---- look ------------------------------------------------------------------------------------ */

static int by_base(const void *a, const void *b) {
    const oh_range *x = a, *y = b;
    return x->base < y->base ? -1 : x->base > y->base;
}

static size_t list_ranges(const view *v, oh_range *ranges) {
    size_t count = 0;
    for (size_t i = 0; i < v->tables->registrations; i++) {
        const addresses *a = &addresses_of(v->tables, v->ctx->rank)[i];
        if (!a->in) continue;
        ranges[count++] = (oh_range){a->in, bytes_of(v, i)};
        if (shares_output(v, i) && a->out != a->in)
            ranges[count++] = (oh_range){a->out, bytes_of(v, i)};
    }
    qsort(ranges, count, sizeof *ranges, by_base);
    return count;
}

static onehop_result find_pieces(view *v, uint64_t *count_out) {
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
    tables *t = state;
    addresses *own = addresses_of(t, ctx->rank);
    for (size_t i = 0; i < t->registrations; i++) {
        const oh_captured_memory *m = &ctx->captured_memory[t->calls[i]];
        const uint64_t in = (uintptr_t)m->in, out = (uintptr_t)m->out;
        if (!((in | out) % OH_UNIT_BYTES)) own[i] = (addresses){in, out};
    }
    const onehop_result result = find_pieces(view_of(t, ctx), &t->counts[ctx->rank]);
    return result == ONEHOP_ERR_MEMORY ? result : ONEHOP_OK;
}

/* The captured calls are alike, so those of any rank tell the registrations. */
static onehop_result open_tables(tables *t) {
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

static onehop_result no_room(const tables *t) {
    return oh_error(ONEHOP_ERR_MEMORY, "capture: no memory for %zu registrations in %zu pieces",
                    t->registrations, t->max_pieces);
}

/* Places of all pieces; one more, for no memory at all is no failure. */
static size_t places_of(const tables *t) {
    return (size_t)t->members->world * t->max_pieces + 1;
}

static onehop_result grow_tables(tables *t) {
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
    tables *t = state;
    view *v = view_of(t, ctx);
    const size_t pieces = places_of(t);
    v->places = calloc(pieces, sizeof *v->places);
    v->spans = calloc(pieces, sizeof *v->spans);
    v->span_memory = calloc(pieces, sizeof *v->span_memory);
    v->values = calloc(t->registrations, sizeof *v->values);
    v->numbers = calloc(t->registrations, sizeof *v->numbers);
    if (!v->places || !v->spans || !v->span_memory || !v->values || !v->numbers) return no_room(t);
    if (t->counts[ctx->rank])
        memcpy(pieces_of(t, ctx->rank), v->own_pieces,
               t->counts[ctx->rank] * sizeof *v->own_pieces);
    return ONEHOP_OK;
}

/* ---- map ------------------------------------------------------------------------------------- */

static void plan_spans(view *v) {
    const tables *t = v->tables;
    for (size_t r = 0; r < (size_t)v->ctx->world; r++)
        for (size_t i = 0; i < t->counts[r]; i++) {
            const size_t at = r * t->max_pieces + i;
            const oh_mem_handle *piece = &t->pieces[at];
            if (i == 0 || !oh_foreign_joins(piece - 1, piece))
                v->spans[v->span_count++] = (span){piece->base, 0};
            v->places[at].span = v->span_count - 1;
            v->spans[v->span_count - 1].bytes += piece->bytes;
        }
}

/* A failure is for the one who wonders why a call is staged. oh_error logs it at debug level. */
static void map_piece(view *v, int rank, size_t at, int fd) {
    const oh_device_ops *ops = v->ctx->device->ops;
    const oh_mem_handle *piece = &v->tables->pieces[at];
    mapped *m = &v->places[at];
    const span *s = &v->spans[m->span];
    oh_mem *memory = &v->span_memory[m->span];
    /* A peer elsewhere has no say in what its memory would be here. */
    if (oh_foreign_is_own(piece) && !same_process(v, rank)) return;
    m->reached =
        !ops->foreign_map(v->ctx->device, piece, fd, s->bytes, piece->base - s->base, memory);
    if (m->reached) m->shift = (uintptr_t)memory->ptr - s->base;
}

/* In another process, and by descriptor. */
static bool needs_fd(const view *v, int rank, const oh_mem_handle *piece) {
    return piece->kind == OH_HANDLE_FD && !same_process(v, rank);
}

static void map_without_fds(view *v) {
    const tables *t = v->tables;
    plan_spans(v);
    for (int r = 0; r < v->ctx->world; r++)
        for (size_t i = 0; i < t->counts[r]; i++) {
            const size_t at = (size_t)r * t->max_pieces + i;
            if (r == v->ctx->rank)
                v->places[at].reached = true;
            else if (!needs_fd(v, r, &t->pieces[at]))
                map_piece(v, r, at, -1);
        }
}

static bool all_in_one_process(const view *v) {
    for (int r = 0; r < v->ctx->world; r++)
        if (!same_process(v, r)) return false;
    return true;
}

/* Index of a rank's next piece by descriptor, from `from` on; its number of pieces if there is
 * none. */
static size_t next_by_fd(const tables *t, int rank, size_t from) {
    const oh_mem_handle *pieces = pieces_of(t, rank);
    while (from < t->counts[rank] && pieces[from].kind != OH_HANDLE_FD) from++;
    return from;
}

static size_t rounds_needed(const tables *t) {
    size_t max = 0;
    for (int r = 0; r < t->members->world; r++) {
        size_t count = 0;
        for (size_t i = next_by_fd(t, r, 0); i < t->counts[r]; i = next_by_fd(t, r, i + 1)) count++;
        if (count > max) max = count;
    }
    return (max + FDS_PER_ROUND - 1) / FDS_PER_ROUND;
}

/* Descriptors of the own pieces from *from on; -1 where there are no more, or one is refused. */
static void open_round(const view *v, int *fds, size_t *from) {
    const int rank = v->ctx->rank;
    oh_device *device = v->ctx->device;
    for (int k = 0; k < FDS_PER_ROUND; k++) {
        const size_t i = next_by_fd(v->tables, rank, *from);
        int *fd = &fds[rank * FDS_PER_ROUND + k];
        if (i < v->tables->counts[rank] &&
            device->ops->foreign_descriptor(device, &v->own_pieces[i], fd))
            *fd = -1;
        *from = i + 1;
    }
}

static void map_round(view *v, const int *fds, size_t *from) {
    const tables *t = v->tables;
    for (int r = 0; r < v->ctx->world; r++)
        for (int k = 0; k < FDS_PER_ROUND; k++) {
            const size_t i = next_by_fd(t, r, from[r]);
            const int fd = fds[r * FDS_PER_ROUND + k];
            if (fd >= 0 && needs_fd(v, r, &pieces_of(t, r)[i]))
                map_piece(v, r, (size_t)r * t->max_pieces + i, fd);
            from[r] = i + 1;
        }
}

/* Only ranks elsewhere need descriptors, and then one rank is here. A round that fails leaves its
 * pieces out of reach, and the next exchange tells whether the group still stands. */
static void map_by_fds(view *v) {
    const oh_members *members = v->tables->members;
    int fds[FDS_PER_ROUND * ONEHOP_MAX_RANKS];
    size_t opened = 0, used[ONEHOP_MAX_RANKS] = {0};
    if (all_in_one_process(v)) return;
    for (size_t round = rounds_needed(v->tables); round > 0; round--) {
        oh_members_no_fds(members, fds, FDS_PER_ROUND);
        open_round(v, fds, &opened);
        (void)oh_members_pass_fds(members, fds, FDS_PER_ROUND);
        map_round(v, fds, used);
        oh_members_close_fds(members, fds, FDS_PER_ROUND);
    }
}

/* ---- what is in reach ------------------------------------------------------------------------ */

/* The piece of a rank that holds an address: index in the tables; false if none does. */
static bool find_piece(const tables *t, int rank, uint64_t address, size_t *at_out) {
    const size_t first = (size_t)rank * t->max_pieces;
    size_t low = first, high = first + t->counts[rank];
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (t->pieces[middle].base <= address)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == first) return false;
    *at_out = low - 1;
    return address - t->pieces[low - 1].base < t->pieces[low - 1].bytes;
}

/* Where this rank reaches all of address .. address + bytes of another; 0: nowhere. */
static uint64_t reach(const view *v, int rank, uint64_t address, uint64_t bytes) {
    const tables *t = v->tables;
    const size_t end = (size_t)rank * t->max_pieces + t->counts[rank];
    size_t at;
    if (!address || !find_piece(t, rank, address, &at)) return 0;
    const uint64_t shift = v->places[at].shift;
    uint64_t covered = t->pieces[at].base;
    for (; at < end && t->pieces[at].base == covered; at++) {
        if (!v->places[at].reached || v->places[at].shift != shift) return 0;
        covered += t->pieces[at].bytes;
        if (covered - address >= bytes) return address + shift;
    }
    return 0;
}

/* The addresses of a registration as this rank sees them; false if one is out of reach. */
static bool see_rule(view *v, size_t registration) {
    oh_registration *value = &v->values[registration];
    for (int r = 0; r < v->ctx->world; r++) {
        const addresses *a = &addresses_of(v->tables, r)[registration];
        if (r == v->ctx->rank) {
            value->in[r] = a->in;
            value->out[r] = a->out;
        } else {
            value->in[r] = reach(v, r, a->in, bytes_of(v, registration));
            if (shares_output(v, registration))
                value->out[r] = reach(v, r, a->out, bytes_of(v, registration));
        }
        if (!value->in[r] || (!value->out[r] && shares_output(v, registration))) return false;
    }
    return true;
}

static onehop_result map_and_judge(onehop_context *ctx, void *state) {
    tables *t = state;
    view *v = view_of(t, ctx);
    map_without_fds(v);
    map_by_fds(v);
    for (size_t i = 0; i < t->registrations; i++)
        t->direct[(size_t)ctx->rank * t->registrations + i] = see_rule(v, i);
    return ONEHOP_OK;
}

/* ---- fill ------------------------------------------------------------------------------------ */

static bool all_reach(const tables *t, size_t registration) {
    for (size_t r = 0; r < (size_t)t->members->world; r++)
        if (!t->direct[r * t->registrations + registration]) return false;
    return true;
}

static onehop_result fill(onehop_context *ctx, void *state) {
    tables *t = state;
    view *v = view_of(t, ctx);
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

static onehop_result exchange(const oh_members *m, tables *t) {
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
    tables t;
    memset(&t, 0, sizeof t);
    t.members = m;
    for (int i = 0; i < m->count; i++) {
        view *v = view_of(&t, m->contexts[i]);
        v->ctx = m->contexts[i];
        v->tables = &t;
    }
    onehop_result result = open_tables(&t);
    if (!result) result = oh_members_run(m, look, &t);
    result = oh_members_agree(m, result);
    if (!result) result = exchange(m, &t);
    if (!result) result = oh_members_each(m, fill, &t);
    for (int i = 0; i < m->count; i++) close_view(view_of(&t, m->contexts[i]));
    drop_tables(&t);
    return result;
}
