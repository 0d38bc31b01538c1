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
 * Written as steps that a rank does alone with exchanges between them, so that ranks in processes,
 * in threads and all in one thread take one path:
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
#include <unistd.h>

/* Descriptors of each rank in flight at once; 16 ranks of them stay well below the usual limit of
 * 1024 open files. */
#define FDS_PER_ROUND 16

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

/* One rank's view of a capture. Tables over ranks are [rank][max_pieces] and
 * [rank][registrations]. */
typedef struct view {
    onehop_context *ctx;
    size_t registrations;
    size_t *calls; /* index of the call of each registration */
    oh_mem_handle *own_pieces;
    addresses *own;
    uint64_t counts[ONEHOP_MAX_RANKS]; /* pieces of each rank */
    size_t max_pieces;
    oh_mem_handle *pieces;
    addresses *all;
    mapped *places;
    span *spans;
    oh_mem *span_memory; /* goes to the batch */
    size_t span_count;
    unsigned char *direct; /* [rank][registration]: that rank reaches the memory of all */
    oh_registration *values;
    uint32_t *numbers; /* of the registrations */
} view;

static void drop_view(view *v) {
    free(v->calls);
    free(v->own_pieces);
    free(v->own);
    free(v->pieces);
    free(v->all);
    free(v->places);
    free(v->spans);
    free(v->direct);
    free(v->values);
    free(v->numbers);
}

/* Ends the capture: the batch takes over the mappings. */
static void close_view(view *v) {
    oh_batch_close(v->ctx, v->span_memory, v->span_memory ? v->span_count : 0);
    drop_view(v);
}

static bool same_process(const onehop_context *ctx, int rank) {
    return !ctx->group || oh_rendezvous_same_process(ctx->group, rank);
}

/* 2shot_pull stores to the peers' outputs. */
static bool shares_output(const view *v, size_t registration) {
    return v->ctx->captured[v->calls[registration]].algorithm == ONEHOP_2SHOT_PULL;
}

static uint64_t bytes_of(const view *v, size_t registration) {
    return v->ctx->captured_memory[v->calls[registration]].bytes;
}

/* ---- look ------------------------------------------------------------------------------------ */

static int by_base(const void *a, const void *b) {
    const oh_range *x = a, *y = b;
    return x->base < y->base ? -1 : x->base > y->base;
}

static size_t list_ranges(const view *v, oh_range *ranges) {
    size_t count = 0;
    for (size_t i = 0; i < v->registrations; i++) {
        const addresses *a = &v->own[i];
        if (!a->in) continue;
        ranges[count++] = (oh_range){a->in, bytes_of(v, i)};
        if (shares_output(v, i) && a->out != a->in)
            ranges[count++] = (oh_range){a->out, bytes_of(v, i)};
    }
    qsort(ranges, count, sizeof *ranges, by_base);
    return count;
}

static onehop_result find_pieces(view *v) {
    onehop_context *ctx = v->ctx;
    size_t count = 0;
    oh_range *ranges = malloc(2 * v->registrations * sizeof *ranges);
    if (!ranges) return oh_error(ONEHOP_ERR_MEMORY, "capture: no memory");
    const size_t range_count = list_ranges(v, ranges);
    onehop_result result = ONEHOP_OK;
    if (range_count)
        result = ctx->device->ops->foreign_find(ctx->device, ranges, range_count,
                                                ctx->handle_kinds | OH_HANDLE_IPC, &v->own_pieces,
                                                &count);
    free(ranges);
    v->counts[ctx->rank] = count;
    return result;
}

/* If the pieces cannot be found nobody reaches an address: all is staged. */
static onehop_result look(view *v, onehop_context *ctx) {
    memset(v, 0, sizeof *v);
    v->ctx = ctx;
    v->calls = malloc(ctx->captured_count * sizeof *v->calls);
    if (!v->calls) return oh_error(ONEHOP_ERR_MEMORY, "capture: no memory");
    for (size_t i = 0; i < ctx->captured_count; i++)
        if (oh_takes_registration(&ctx->captured[i])) v->calls[v->registrations++] = i;
    v->own = calloc(v->registrations, sizeof *v->own);
    if (!v->own) return oh_error(ONEHOP_ERR_MEMORY, "capture: no memory");
    for (size_t i = 0; i < v->registrations; i++) {
        const oh_captured_memory *m = &ctx->captured_memory[v->calls[i]];
        const uint64_t in = (uintptr_t)m->in, out = (uintptr_t)m->out;
        if ((in | out) % OH_UNIT_BYTES) continue;
        v->own[i] = (addresses){in, out};
    }
    const onehop_result result = find_pieces(v);
    return result == ONEHOP_ERR_MEMORY ? result : ONEHOP_OK;
}

/* ---- make room ------------------------------------------------------------------------------- */

static onehop_result make_room(view *v) {
    const size_t world = (size_t)v->ctx->world;
    for (size_t r = 0; r < world; r++)
        if (v->counts[r] > v->max_pieces) v->max_pieces = v->counts[r];
    if (v->max_pieces > MAX_BLOB / sizeof *v->pieces) { /* never seen; then all is staged */
        memset(v->counts, 0, sizeof v->counts);
        v->max_pieces = 0;
    }
    const size_t pieces = world * v->max_pieces + 1; /* none is no failure */
    v->pieces = calloc(pieces, sizeof *v->pieces);
    v->places = calloc(pieces, sizeof *v->places);
    v->spans = calloc(pieces, sizeof *v->spans);
    v->span_memory = calloc(pieces, sizeof *v->span_memory);
    v->all = calloc(world * v->registrations, sizeof *v->all);
    v->direct = calloc(world * v->registrations, sizeof *v->direct);
    v->values = calloc(v->registrations, sizeof *v->values);
    v->numbers = calloc(v->registrations, sizeof *v->numbers);
    if (!v->pieces || !v->places || !v->spans || !v->span_memory || !v->all || !v->direct ||
        !v->values || !v->numbers)
        return oh_error(ONEHOP_ERR_MEMORY, "capture: no memory for %zu registrations in %zu pieces",
                        v->registrations, v->max_pieces);
    return ONEHOP_OK;
}

/* This rank's part of the tables, as a view has it: its own or another's. */
static void put(view *to, const view *from) {
    const size_t r = (size_t)from->ctx->rank;
    if (from->counts[r])
        memcpy(to->pieces + r * to->max_pieces, from->own_pieces,
               from->counts[r] * sizeof *to->pieces);
    memcpy(to->all + r * to->registrations, from->own, from->registrations * sizeof *to->all);
}

/* ---- map ------------------------------------------------------------------------------------- */

static void plan_spans(view *v) {
    for (size_t r = 0; r < (size_t)v->ctx->world; r++)
        for (size_t i = 0; i < v->counts[r]; i++) {
            const size_t at = r * v->max_pieces + i;
            const oh_mem_handle *piece = &v->pieces[at];
            if (i == 0 || !oh_foreign_joins(piece - 1, piece))
                v->spans[v->span_count++] = (span){piece->base, 0};
            v->places[at].span = v->span_count - 1;
            v->spans[v->span_count - 1].bytes += piece->bytes;
        }
}

/* A failure is for the one who wonders why a call is staged. oh_error logs it at debug level. */
static void map_piece(view *v, int rank, size_t at, int fd) {
    const oh_device_ops *ops = v->ctx->device->ops;
    const oh_mem_handle *piece = &v->pieces[at];
    mapped *m = &v->places[at];
    const span *s = &v->spans[m->span];
    oh_mem *memory = &v->span_memory[m->span];
    /* A peer elsewhere has no say in what its memory would be here. */
    if (oh_foreign_is_own(piece) && !same_process(v->ctx, rank)) return;
    m->reached =
        !ops->foreign_map(v->ctx->device, piece, fd, s->bytes, piece->base - s->base, memory);
    if (m->reached) m->shift = (uintptr_t)memory->ptr - s->base;
}

/* In another process, and by descriptor. */
static bool needs_fd(const view *v, int rank, const oh_mem_handle *piece) {
    return piece->kind == OH_HANDLE_FD && !same_process(v->ctx, rank);
}

static void map_without_fds(view *v) {
    plan_spans(v);
    for (int r = 0; r < v->ctx->world; r++)
        for (size_t i = 0; i < v->counts[r]; i++) {
            const size_t at = (size_t)r * v->max_pieces + i;
            if (r == v->ctx->rank)
                v->places[at].reached = true;
            else if (!needs_fd(v, r, &v->pieces[at]))
                map_piece(v, r, at, -1);
        }
}

static bool all_in_one_process(const view *v) {
    for (int r = 0; r < v->ctx->world; r++)
        if (!same_process(v->ctx, r)) return false;
    return true;
}

/* Index of a rank's next piece by descriptor, from `from` on; its number of pieces if there is
 * none. */
static size_t next_by_fd(const view *v, int rank, size_t from) {
    const oh_mem_handle *pieces = &v->pieces[(size_t)rank * v->max_pieces];
    while (from < v->counts[rank] && pieces[from].kind != OH_HANDLE_FD) from++;
    return from;
}

static size_t rounds_needed(const view *v) {
    size_t max = 0;
    for (int r = 0; r < v->ctx->world; r++) {
        size_t count = 0;
        for (size_t i = next_by_fd(v, r, 0); i < v->counts[r]; i = next_by_fd(v, r, i + 1)) count++;
        if (count > max) max = count;
    }
    return (max + FDS_PER_ROUND - 1) / FDS_PER_ROUND;
}

/* Descriptors of the own pieces from *from on; -1 where there are no more, or one is refused. */
static void open_round(const view *v, int *fds, size_t *from) {
    oh_device *device = v->ctx->device;
    for (int k = 0; k < FDS_PER_ROUND; k++) {
        const size_t i = next_by_fd(v, v->ctx->rank, *from);
        fds[k] = -1;
        if (i < v->counts[v->ctx->rank] &&
            device->ops->foreign_descriptor(device, &v->own_pieces[i], &fds[k]))
            fds[k] = -1;
        *from = i + 1;
    }
}

static void map_round(view *v, const int *fds, size_t *from) {
    for (int r = 0; r < v->ctx->world; r++)
        for (int k = 0; k < FDS_PER_ROUND; k++) {
            const size_t i = next_by_fd(v, r, from[r]);
            const int fd = fds[r * FDS_PER_ROUND + k];
            if (fd >= 0 && needs_fd(v, r, &v->pieces[(size_t)r * v->max_pieces + i]))
                map_piece(v, r, (size_t)r * v->max_pieces + i, fd);
            from[r] = i + 1;
        }
}

static void close_fds(const int *fds, int count) {
    for (int i = 0; i < count; i++)
        if (fds[i] >= 0) close(fds[i]);
}

/* A round that fails leaves its pieces out of reach, and the next exchange tells whether the group
 * still stands. */
static void map_by_fds(view *v) {
    int own[FDS_PER_ROUND], fds[FDS_PER_ROUND * ONEHOP_MAX_RANKS];
    size_t opened = 0, used[ONEHOP_MAX_RANKS] = {0};
    if (all_in_one_process(v)) return;
    for (size_t round = rounds_needed(v); round > 0; round--) {
        open_round(v, own, &opened);
        for (size_t i = 0; i < OH_LENGTH(fds); i++) fds[i] = -1;
        (void)oh_rendezvous_pass_fds(v->ctx->group, own, FDS_PER_ROUND, fds);
        close_fds(own, FDS_PER_ROUND);
        map_round(v, fds, used);
        close_fds(fds, FDS_PER_ROUND * v->ctx->world);
    }
}

/* ---- what is in reach ------------------------------------------------------------------------ */

/* The piece of a rank that holds an address: index in the tables; false if none does. */
static bool find_piece(const view *v, int rank, uint64_t address, size_t *at_out) {
    const size_t first = (size_t)rank * v->max_pieces;
    size_t low = first, high = first + v->counts[rank];
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (v->pieces[middle].base <= address)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == first) return false;
    *at_out = low - 1;
    return address - v->pieces[low - 1].base < v->pieces[low - 1].bytes;
}

/* Where this rank reaches all of address .. address + bytes of another; 0: nowhere. */
static uint64_t reach(const view *v, int rank, uint64_t address, uint64_t bytes) {
    const size_t end = (size_t)rank * v->max_pieces + v->counts[rank];
    size_t at;
    if (!address || !find_piece(v, rank, address, &at)) return 0;
    const uint64_t shift = v->places[at].shift;
    uint64_t covered = v->pieces[at].base;
    for (; at < end && v->pieces[at].base == covered; at++) {
        if (!v->places[at].reached || v->places[at].shift != shift) return 0;
        covered += v->pieces[at].bytes;
        if (covered - address >= bytes) return address + shift;
    }
    return 0;
}

/* The addresses of a registration as this rank sees them; false if one is out of reach. */
static bool see_rule(view *v, size_t registration) {
    oh_registration *value = &v->values[registration];
    for (int r = 0; r < v->ctx->world; r++) {
        const addresses *a = &v->all[(size_t)r * v->registrations + registration];
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

static void judge(view *v) {
    unsigned char *mine = v->direct + (size_t)v->ctx->rank * v->registrations;
    for (size_t i = 0; i < v->registrations; i++) mine[i] = see_rule(v, i);
}

/* ---- fill ------------------------------------------------------------------------------------ */

static bool all_reach(const view *v, size_t registration) {
    for (size_t r = 0; r < (size_t)v->ctx->world; r++)
        if (!v->direct[r * v->registrations + registration]) return false;
    return true;
}

static onehop_result fill(view *v) {
    onehop_context *ctx = v->ctx;
    size_t staged = 0;
    for (size_t i = 0; i < v->registrations; i++) {
        oh_registration *value = &v->values[i];
        v->numbers[i] = ctx->captured_memory[v->calls[i]].registration;
        if (!all_reach(v, i)) {
            memset(value, 0, sizeof *value);
            staged++;
        }
        value->mode = all_reach(v, i) ? OH_REGISTRATION_DIRECT : OH_REGISTRATION_STAGED;
        value->identity = OH_REGISTRATION_IDENTITY(ctx->numbered++);
    }
    if (staged)
        oh_log(ONEHOP_LOG_INFO, "rank %d: %zu of %zu captured calls go over the workspace",
               ctx->rank, staged, v->registrations);
    return oh_comm_registrations_fill(ctx->comm, v->numbers, v->values, v->registrations);
}

/* ---- through the group, and all in one thread ------------------------------------------------ */

static onehop_result exchange(view *v) {
    onehop_group *group = v->ctx->group;
    const size_t rank = (size_t)v->ctx->rank;
    uint64_t own_count = v->counts[rank];
    onehop_result result = oh_rendezvous_allgather(group, &own_count, v->counts, sizeof own_count);
    if (!result) result = oh_rendezvous_agree(group, make_room(v));
    if (result) return result;
    put(v, v);
    const addresses *addresses_here = v->all + rank * v->registrations;
    const oh_mem_handle *pieces_here = v->pieces + rank * v->max_pieces;
    result =
        oh_rendezvous_allgather(group, addresses_here, v->all, v->registrations * sizeof *v->all);
    if (!result)
        result = oh_rendezvous_allgather(group, pieces_here, v->pieces,
                                         v->max_pieces * sizeof *v->pieces);
    if (result) return result;
    map_without_fds(v);
    map_by_fds(v);
    judge(v);
    return oh_rendezvous_allgather(group, v->direct + rank * v->registrations, v->direct,
                                   v->registrations);
}

onehop_result oh_register_by_group(onehop_context *ctx) {
    view v;
    onehop_result result = oh_rendezvous_agree(ctx->group, look(&v, ctx));
    if (!result) result = exchange(&v);
    if (!result) result = oh_rendezvous_agree(ctx->group, fill(&v));
    close_view(&v);
    return result;
}

/* What an exchange would do. */
static onehop_result share(view *views, int n) {
    onehop_result result = ONEHOP_OK;
    for (int r = 0; r < n; r++)
        for (int s = 0; s < n; s++) views[r].counts[s] = views[s].counts[s];
    for (int r = 0; r < n && !result; r++) result = make_room(&views[r]);
    for (int r = 0; r < n && !result; r++) {
        for (int s = 0; s < n; s++) put(&views[r], &views[s]);
        map_without_fds(&views[r]);
        judge(&views[r]);
    }
    for (int r = 0; r < n && !result; r++)
        for (int s = 0; s < n; s++) {
            const size_t at = (size_t)s * views[r].registrations;
            memcpy(views[r].direct + at, views[s].direct + at, views[r].registrations);
        }
    return result;
}

onehop_result oh_register_all(onehop_context *const *contexts, int n) {
    view views[ONEHOP_MAX_RANKS];
    onehop_result result = ONEHOP_OK;
    memset(views, 0, sizeof views);
    for (int r = 0; r < n; r++) {
        const onehop_result looked = look(&views[r], contexts[r]);
        if (!result) result = looked;
    }
    if (!result) result = share(views, n);
    for (int r = 0; r < n && !result; r++) result = fill(&views[r]);
    for (int r = 0; r < n; r++) close_view(&views[r]);
    return result;
}
