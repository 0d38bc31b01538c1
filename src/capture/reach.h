/* Inside registration: the tables of a capture (registration.c), and what a rank reaches of the
 * memory in them (reach.c). */
#ifndef OH_REACH_H
#define OH_REACH_H

#include "context/context.h"
#include "context/members.h"

/* Of a call on one rank. 0: it must be staged. */
typedef struct oh_addresses {
    uint64_t in, out;
} oh_addresses;

/* What became of a peer's piece here. */
typedef struct oh_mapped {
    size_t span;
    uint64_t shift; /* from its address there to that here */
    bool reached;
} oh_mapped;

/* Pieces of a peer that lie side by side. */
typedef struct oh_span {
    uint64_t base, bytes;
} oh_span;

/* What one rank has of its own. */
typedef struct oh_capture_view {
    onehop_context *ctx;
    const struct oh_capture_tables *tables;
    oh_mem_handle *own_pieces;
    oh_mapped *places; /* [rank][max_pieces] */
    oh_span *spans;
    oh_mem *span_memory; /* goes to the batch */
    size_t span_count;
    oh_registration *values;
    uint32_t *numbers; /* of the registrations */
} oh_capture_view;

/* A capture. What ranks tell each other is [rank][max_pieces] and [rank][registrations]. */
typedef struct oh_capture_tables {
    const oh_members *members;
    size_t registrations;
    size_t *calls; /* index of the call of each registration, the same on all ranks */
    uint64_t counts[ONEHOP_MAX_RANKS]; /* pieces of each rank */
    size_t max_pieces;
    oh_mem_handle *pieces;
    oh_addresses *addresses;
    unsigned char *direct;                   /* that rank reaches the memory of all */
    oh_capture_view views[ONEHOP_MAX_RANKS]; /* of the ranks here, at their place */
} oh_capture_tables;

static inline oh_capture_view *oh_capture_view_of(oh_capture_tables *t, const onehop_context *ctx) {
    return &t->views[ctx->rank];
}

static inline oh_addresses *oh_capture_addresses_of(const oh_capture_tables *t, int rank) {
    return t->addresses + (size_t)rank * t->registrations;
}

static inline oh_mem_handle *oh_capture_pieces_of(const oh_capture_tables *t, int rank) {
    return t->pieces + (size_t)rank * t->max_pieces;
}

/* 2shot_pull stores to the peers' outputs. */
static inline bool oh_capture_shares_output(const oh_capture_view *v, size_t registration) {
    return v->ctx->captured[v->tables->calls[registration]].algorithm == ONEHOP_2SHOT_PULL;
}

static inline uint64_t oh_capture_bytes_of(const oh_capture_view *v, size_t registration) {
    return v->ctx->captured_memory[v->tables->calls[registration]].bytes;
}

/* Maps what can be mapped of the peers' pieces. Collective where ranks are in several processes. */
void oh_reach_map(oh_capture_view *v);
/* The addresses of a registration as this rank sees them; false if one is out of reach. */
bool oh_reach_registration(oh_capture_view *v, size_t registration);

#endif
