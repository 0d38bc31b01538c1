/* host_gather: all-gather of the host device. Each rank publishes its part, every rank copies all.
 *
 * Chunks take turns in 4 sub-slots of the own half, one chunk ahead (host_path.h). Sub-slot k mod 4
 * still holds chunk k-4: before it publishes k this rank has taken k-2 of every peer, which that
 * peer published after it had taken k-4.
 *
 *   S bytes of a part copied in, W S out, (W-1) S of them from peers; hops on the critical path 1
 *
 * In place: no rank stores its own part. */
#include "kernels/host/host_path.h"
#include "kernels/kernels.h"

#define SUB_SLOTS 4

static char *place_of(const oh_host_call *c, oh_u32 from, size_t chunk) {
    return oh_area_of(c, from) + chunk % SUB_SLOTS * c->a->chunk_bytes;
}

static void publish(const void *call, size_t chunk) {
    const oh_host_call *c = call;
    c->vector->copy(place_of(c, c->a->rank, chunk),
                    OH_AT(char, c->a->in) + chunk * c->a->chunk_bytes, oh_chunk_length(c, chunk));
}

/* Own part first, then the next rank's: ranks read different memory at a time. */
static void copy_all(const void *call, size_t chunk) {
    const oh_host_call *c = call;
    const oh_args *a = c->a;
    char *out = OH_AT(char, a->out) + chunk * a->chunk_bytes;
    const char *in = OH_AT(char, a->in) + chunk * a->chunk_bytes;
    if (out + a->rank * c->bytes != in)
        c->vector->copy(out + a->rank * c->bytes, in, oh_chunk_length(c, chunk));
    for (oh_u32 step = 1; step < a->world; step++) {
        const oh_u32 r = (a->rank + step) % a->world;
        c->vector->copy(out + r * c->bytes, place_of(c, r, chunk), oh_chunk_length(c, chunk));
    }
}

void oh_host_gather(const void *args, oh_grid grid) {
    const oh_args *a = args;
    oh_host_call c;
    (void)grid;
    if (!oh_host_begin(&c, a, OH_SITE_HOST_PARTS)) return;
    oh_host_chunks(&c, a->chunks, publish, copy_all, &c);
    oh_host_end(&c);
}
