/* See reach.h. */
#include "capture/reach.h"

#include "device/foreign.h"

/* Descriptors of each rank in flight at once; 16 ranks of them stay well below the usual limit of
 * 1024 open files. */
#define FDS_PER_ROUND OH_MEMBERS_FDS

/* In the process of this rank? */
static bool same_process(const oh_capture_view *v, int rank) {
    return oh_members_share_process(v->tables->members, v->ctx->rank, rank);
}

static void plan_spans(oh_capture_view *v) {
    const oh_capture_tables *t = v->tables;
    for (size_t r = 0; r < (size_t)v->ctx->world; r++)
        for (size_t i = 0; i < t->counts[r]; i++) {
            const size_t at = r * t->max_pieces + i;
            const oh_mem_handle *piece = &t->pieces[at];
            if (i == 0 || !oh_foreign_joins(piece - 1, piece))
                v->spans[v->span_count++] = (oh_span){piece->base, 0};
            v->places[at].span = v->span_count - 1;
            v->spans[v->span_count - 1].bytes += piece->bytes;
        }
}

/* A failure is for the one who wonders why a call is staged. oh_error logs it at debug level. */
static void map_piece(oh_capture_view *v, int rank, size_t at, int fd) {
    const oh_device_ops *ops = v->ctx->device->ops;
    const oh_mem_handle *piece = &v->tables->pieces[at];
    oh_mapped *m = &v->places[at];
    const oh_span *s = &v->spans[m->span];
    oh_mem *memory = &v->span_memory[m->span];
    /* A peer elsewhere has no say in what its memory would be here. */
    if (oh_foreign_is_own(piece) && !same_process(v, rank)) return;
    m->reached =
        !ops->foreign_map(v->ctx->device, piece, fd, s->bytes, piece->base - s->base, memory);
    if (m->reached) m->shift = (uintptr_t)memory->ptr - s->base;
}

/* In another process, and by descriptor. */
static bool needs_fd(const oh_capture_view *v, int rank, const oh_mem_handle *piece) {
    return piece->kind == OH_HANDLE_FD && !same_process(v, rank);
}

static void map_without_fds(oh_capture_view *v) {
    const oh_capture_tables *t = v->tables;
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

static bool all_in_one_process(const oh_capture_view *v) {
    for (int r = 0; r < v->ctx->world; r++)
        if (!same_process(v, r)) return false;
    return true;
}

/* Index of a rank's next piece by descriptor, from `from` on; its number of pieces if there is
 * none. */
static size_t next_by_fd(const oh_capture_tables *t, int rank, size_t from) {
    const oh_mem_handle *pieces = oh_capture_pieces_of(t, rank);
    while (from < t->counts[rank] && pieces[from].kind != OH_HANDLE_FD) from++;
    return from;
}

static size_t rounds_needed(const oh_capture_tables *t) {
    size_t max = 0;
    for (int r = 0; r < t->members->world; r++) {
        size_t count = 0;
        for (size_t i = next_by_fd(t, r, 0); i < t->counts[r]; i = next_by_fd(t, r, i + 1)) count++;
        if (count > max) max = count;
    }
    return (max + FDS_PER_ROUND - 1) / FDS_PER_ROUND;
}

/* Descriptors of the own pieces from *from on; -1 where there are no more, or one is refused. */
static void open_round(const oh_capture_view *v, int *fds, size_t *from) {
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

static void map_round(oh_capture_view *v, const int *fds, size_t *from) {
    const oh_capture_tables *t = v->tables;
    for (int r = 0; r < v->ctx->world; r++)
        for (int k = 0; k < FDS_PER_ROUND; k++) {
            const size_t i = next_by_fd(t, r, from[r]);
            const int fd = fds[r * FDS_PER_ROUND + k];
            if (fd >= 0 && needs_fd(v, r, &oh_capture_pieces_of(t, r)[i]))
                map_piece(v, r, (size_t)r * t->max_pieces + i, fd);
            from[r] = i + 1;
        }
}

/* Only ranks elsewhere need descriptors, and then one rank is here. A round that fails leaves its
 * pieces out of reach, and the next exchange tells whether the group still stands. */
static void map_by_fds(oh_capture_view *v) {
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

void oh_reach_map(oh_capture_view *v) {
    map_without_fds(v);
    map_by_fds(v);
}

/* ---- what is in reach ------------------------------------------------------------------------ */

/* The piece of a rank that holds an address: index in the tables; false if none does. */
static bool find_piece(const oh_capture_tables *t, int rank, uint64_t address, size_t *at_out) {
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
static uint64_t reach(const oh_capture_view *v, int rank, uint64_t address, uint64_t bytes) {
    const oh_capture_tables *t = v->tables;
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

bool oh_reach_registration(oh_capture_view *v, size_t registration) {
    oh_registration *value = &v->values[registration];
    for (int r = 0; r < v->ctx->world; r++) {
        const oh_addresses *a = &oh_capture_addresses_of(v->tables, r)[registration];
        if (r == v->ctx->rank) {
            value->in[r] = a->in;
            value->out[r] = a->out;
        } else {
            value->in[r] = reach(v, r, a->in, oh_capture_bytes_of(v, registration));
            if (oh_capture_shares_output(v, registration))
                value->out[r] = reach(v, r, a->out, oh_capture_bytes_of(v, registration));
        }
        if (!value->in[r] || (!value->out[r] && oh_capture_shares_output(v, registration)))
            return false;
    }
    return true;
}
