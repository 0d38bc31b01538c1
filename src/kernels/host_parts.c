/* host_scatter and host_gather: reduce-scatter and all-gather of the host device, through published
 * memory (host_path.h). Ranks have parts: the calling rank publishes what peers need, each peer takes
 * its own.
 *
 *   host_scatter  publish the other ranks' shards; sum the own shard of all ranks, in rank order, from
 *                 their memory; the own term comes from the input itself
 *   host_gather   publish the input; copy every rank's from its memory
 *
 * One chunk: publish; store the signature, with release: it is the flag; wait for all peers'; take.
 * More chunks go as in host_1shot.c: publish 0, publish 1, take 0, publish 2, take 1, ... in 4 sub-slots. Sub-slot
 * k mod 4 still holds chunk k-4: before it publishes k this rank has taken k-2 of every peer, which
 * that peer published after it had taken k-4.
 *
 *   scatter: copied (W-1) S, (W-1) S read from peers; gather: S copied in, W S out; S bytes of a part
 *   hops on the critical path 1
 *
 * In place: a scatter stores its sums over the own shard, which is published to nobody and read in the same
 * sum; a gather stores no part but its peers'. */
#include "kernels/host_path.h"
#include "kernels/kernels.h"

#define PART_SUB_SLOTS 4

typedef struct parts_call {
    oh_host_call c;
    bool scatter;
    size_t chunk, count; /* bytes of a full chunk of a part, chunks */
} parts_call;

static size_t part_length(const parts_call *p, size_t index) {
    const size_t left = p->c.bytes - index * p->chunk;
    return left < p->chunk ? left : p->chunk;
}

/* Where a chunk of a rank's part `part` lies in the area of rank `from`; a gather has one part. */
static char *place_of(const parts_call *p, oh_u32 from, oh_u32 part, size_t index) {
    const size_t parts = p->scatter ? p->c.a->world : 1;
    return oh_area_of(&p->c, from) + (index % PART_SUB_SLOTS * parts + part) * p->chunk;
}

static void publish(const parts_call *p, size_t index) {
    const oh_args *a = p->c.a;
    const char *in = OH_AT(char, a->in) + index * p->chunk;
    const size_t length = part_length(p, index);
    if (!p->scatter) p->c.vector->copy(place_of(p, a->rank, 0, index), in, length);
    for (oh_u32 r = 0; r < a->world && p->scatter; r++)
        if (r != a->rank)
            p->c.vector->copy(place_of(p, a->rank, r, index), in + r * p->c.bytes, length);
}

static void take_sum(const parts_call *p, size_t index) {
    const oh_args *a = p->c.a;
    const size_t at = index * p->chunk;
    const void *in[OH_MAX_RANKS];
    for (oh_u32 r = 0; r < a->world; r++) in[r] = place_of(p, r, a->rank, index);
    in[a->rank] = OH_AT(char, a->in) + a->rank * p->c.bytes + at;
    p->c.vector->reduce[a->dtype](OH_AT(char, a->out) + at, in, (int)a->world,
                                  part_length(p, index) / p->c.element);
}

/* Own part first, then the next rank's: ranks read different memory at a time. */
static void take_all(const parts_call *p, size_t index) {
    const oh_args *a = p->c.a;
    char *out = OH_AT(char, a->out) + index * p->chunk;
    const char *in = OH_AT(char, a->in) + index * p->chunk;
    if (out + a->rank * p->c.bytes != in)
        p->c.vector->copy(out + a->rank * p->c.bytes, in, part_length(p, index));
    for (oh_u32 step = 1; step < a->world; step++) {
        const oh_u32 r = (a->rank + step) % a->world;
        p->c.vector->copy(out + r * p->c.bytes, place_of(p, r, 0, index), part_length(p, index));
    }
}

static void take(const parts_call *p, size_t index) {
    if (p->scatter)
        take_sum(p, index);
    else
        take_all(p, index);
}

static void one_part(const parts_call *p) {
    publish(p, 0);
    oh_publish_signature(&p->c);
    for (oh_u32 r = 0; r < p->c.a->world; r++)
        if (r != p->c.a->rank && !oh_await_signature(&p->c, r)) return;
    take(p, 0);
}

static void many_parts(const parts_call *p) {
    oh_publish_signature(&p->c);
    for (size_t i = 0; i <= p->count; i++) {
        if (i < p->count) {
            publish(p, i);
            oh_publish_progress(&p->c, (oh_u32)i + 1);
        }
        if (i == 0) continue;
        if (!oh_await_all(&p->c, (oh_u32)i)) return;
        take(p, i - 1);
    }
}

static void run_parts(const oh_args *a, bool scatter) {
    parts_call p;
    p.scatter = scatter;
    if (!oh_host_begin(&p.c, a, OH_SITE_HOST_PARTS)) return;
    p.chunk = a->chunk_bytes;
    p.count = (p.c.bytes + p.chunk - 1) / p.chunk;
    if (p.count == 1)
        one_part(&p);
    else
        many_parts(&p);
    oh_host_end(&p.c);
}

void oh_host_scatter(const void *args, oh_grid grid) {
    (void)grid;
    run_parts(args, true);
}

void oh_host_gather(const void *args, oh_grid grid) {
    (void)grid;
    run_parts(args, false);
}
