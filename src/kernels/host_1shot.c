/* host_1shot: each rank publishes its data once, every rank reads and sums all. The host device's
 * path for small messages, and for any message between two or three ranks.
 *
 * One chunk: copy the input into the own area; store the signature, with release: it is the flag;
 * wait for all peers' signatures; sum in rank order into the output.
 *
 * More chunks take turns in 4 sub-slots. A rank publishes chunk k, then reads chunk k-1, so that
 * peers rarely wait: publish 0, publish 1, read 0, publish 2, read 1, ... Sub-slot k mod 4 still
 * holds chunk k-4: before it publishes k this rank has read k-2 of every peer, which that peer
 * published after it had read k-4.
 *
 *   copied per rank S in, (W-1) S read from peers; hops on the critical path 1 */
#include "kernels/host_path.h"
#include "kernels/kernels.h"

#define SUB_SLOTS 4

typedef struct chunks {
    size_t bytes; /* of a full chunk */
    size_t count;
} chunks;

static size_t chunk_length(const oh_host_call *c, chunks k, size_t index) {
    const size_t left = c->bytes - index * k.bytes;
    return left < k.bytes ? left : k.bytes;
}

static size_t sub_slot(chunks k, size_t index) {
    return index % SUB_SLOTS * k.bytes;
}

/* Sums one chunk of all ranks into the output; own data comes from the input itself. */
static void sum_chunk(const oh_host_call *c, chunks k, size_t index) {
    const oh_args *a = c->a;
    const size_t at = index * k.bytes;
    const void *in[OH_MAX_RANKS];
    for (oh_u32 r = 0; r < a->world; r++) in[r] = oh_area_of(c, r) + sub_slot(k, index);
    in[a->rank] = OH_AT(char, a->in) + at;
    c->vector->reduce[a->dtype](OH_AT(char, a->out) + at, in, (int)a->world,
                                chunk_length(c, k, index) / c->element);
}

static void copy_in(const oh_host_call *c, chunks k, size_t index) {
    c->vector->copy(oh_area_of(c, c->a->rank) + sub_slot(k, index),
                    OH_AT(char, c->a->in) + index * k.bytes, chunk_length(c, k, index));
}

static void one_chunk(const oh_host_call *c, chunks k) {
    copy_in(c, k, 0);
    oh_publish_signature(c);
    for (oh_u32 r = 0; r < c->a->world; r++)
        if (r != c->a->rank && !oh_await_signature(c, r)) return;
    sum_chunk(c, k, 0);
}

static void many_chunks(const oh_host_call *c, chunks k) {
    oh_publish_signature(c);
    for (size_t i = 0; i <= k.count; i++) {
        if (i < k.count) {
            copy_in(c, k, i);
            oh_publish_progress(c, (oh_u32)i + 1);
        }
        if (i == 0) continue;
        if (!oh_await_all(c, (oh_u32)i)) return;
        sum_chunk(c, k, i - 1);
    }
}

void oh_host_1shot(const void *args, oh_grid grid) {
    const oh_args *a = args;
    oh_host_call c;
    (void)grid;
    if (!oh_host_begin(&c, a, OH_SITE_HOST_1SHOT)) return;
    chunks k = {a->chunk_bytes, 0};
    k.count = (c.bytes + k.bytes - 1) / k.bytes;
    if (k.count == 1)
        one_chunk(&c, k);
    else
        many_chunks(&c, k);
    oh_host_end(&c);
}
