/* host_1shot and host_scatter: all-reduce and reduce-scatter in one hop. Each rank gives every peer
 * what that sums, by mailbox (host_path.h): the whole message, or the peer's part; and sums in rank
 * order what it has got, its own term from the input itself. The host device's paths for small
 * messages, for any message between two ranks, and for reduce-scatter.
 *
 * Chunks take turns in two sub-slots of a mailbox, one chunk ahead. Chunk k lies where k-2 was in
 * the other direction; this rank has taken that.
 *
 *   S bytes of the message or of a part: (W-1) S written, (W-1) S read from peers; hops on the
 *   critical path 1
 *
 * In place: a scatter stores its sums over the own part, which is given to nobody and read in the
 * same sum. An all-reduce stores sums of a chunk that all have been given. */
#include "kernels/host/host_path.h"
#include "kernels/kernels.h"

typedef struct sum_call {
    oh_host_call c;
    size_t stride; /* between the parts for two ranks in the input; 0 if all get the same */
} sum_call;

static const char *input_for(const sum_call *s, oh_u32 rank, size_t chunk) {
    return OH_AT(char, s->c.a->in) + rank * s->stride + chunk * s->c.a->chunk_bytes;
}

static char *place_of(const sum_call *s, oh_u32 from, oh_u32 to, size_t chunk) {
    return oh_mailbox(&s->c, from, to, chunk / 2) + chunk % 2 * s->c.a->chunk_bytes;
}

static void give(const void *call, size_t chunk) {
    const sum_call *s = call;
    const oh_u32 world = s->c.a->world, rank = s->c.a->rank;
    for (oh_u32 step = 1; step < world; step++) {
        const oh_u32 to = (rank + step) % world;
        s->c.vector->copy(place_of(s, rank, to, chunk), input_for(s, to, chunk),
                          oh_chunk_length(&s->c, chunk));
    }
}

static void sum(const void *call, size_t chunk) {
    const sum_call *s = call;
    const oh_args *a = s->c.a;
    const void *in[OH_MAX_RANKS];
    for (oh_u32 r = 0; r < a->world; r++) in[r] = place_of(s, r, a->rank, chunk);
    in[a->rank] = input_for(s, a->rank, chunk);
    s->c.vector->reduce[a->dtype](OH_AT(char, a->out) + chunk * a->chunk_bytes, in, (int)a->world,
                                  oh_chunk_length(&s->c, chunk) / s->c.element);
}

void oh_host_1shot(const void *args, oh_grid grid) {
    const oh_args *a = args;
    sum_call s = {.stride = 0};
    (void)grid;
    if (!oh_host_begin(&s.c, a, OH_SITE_HOST_1SHOT)) return;
    oh_host_chunks(&s.c, a->chunks, give, sum, &s);
    oh_host_end(&s.c);
}

void oh_host_scatter(const void *args, oh_grid grid) {
    const oh_args *a = args;
    sum_call s;
    (void)grid;
    if (!oh_host_begin(&s.c, a, OH_SITE_HOST_PARTS)) return;
    s.stride = s.c.bytes;
    oh_host_chunks(&s.c, a->chunks, give, sum, &s);
    oh_host_end(&s.c);
}
