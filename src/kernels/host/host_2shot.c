/* host_2shot: reduce-scatter and all-gather; the host device's path for long messages between many
 * ranks.
 *
 * Per chunk: give every peer its shard of the own input, by mailbox; wait until all have; sum the
 * own shard into the own box, which nobody's mail needs; wait until all have; copy every rank's
 * shard to the output. Shards are whole cache lines, balanced.
 *
 * Steps of a rank, S scatter, R reduce, G gather: S0 R0 S1 G0 R1 S2 G1 R2 ...; progress counts S
 * and R, so "chunk c is scattered" is 2c+1 and "is reduced" is 2c+2.
 *   A mailbox of chunk c+1 is the one that this rank has read in R(c), in the other direction. Two
 *   results take turns: that of chunk c is written again by R(c+2), which waits until all have done
 *   S(c+2), and each does that after its G(c).
 *
 *   S (W-1)/W bytes written and read by mail, S/W written for all and S (W-1)/W read; hops on the
 *   critical path 2 */
#include "kernels/host/host_path.h"
#include "kernels/kernels.h"

#define LINE 128

typedef struct span {
    size_t at, bytes; /* within a chunk */
} span;

/* Balanced shards: of n lines each rank has n/W, the first n mod W one more. */
static span shard_of(size_t bytes, oh_u32 rank, oh_u32 world) {
    const size_t lines = (bytes + LINE - 1) / LINE, each = lines / world, more = lines % world;
    const size_t first = rank * each + (rank < more ? rank : more);
    const size_t last = first + each + (rank < more);
    const size_t end = last * LINE < bytes ? last * LINE : bytes;
    span s = {first * LINE, 0};
    if (s.at < end) s.bytes = end - s.at;
    return s;
}

static char *reduced(const oh_host_call *c, oh_u32 rank, size_t chunk) {
    return oh_box(c, rank, rank) + chunk % 2 * oh_round_down(c->box / 2, LINE);
}

static void scatter(const oh_host_call *c, size_t chunk) {
    const oh_args *a = c->a;
    for (oh_u32 step = 1; step < a->world; step++) {
        const oh_u32 to = (a->rank + step) % a->world;
        const span s = shard_of(oh_chunk_length(c, chunk), to, a->world);
        c->vector->copy(oh_mailbox(c, a->rank, to, chunk),
                        OH_AT(char, a->in) + chunk * a->chunk_bytes + s.at, s.bytes);
    }
    oh_publish_progress(c, (oh_u32)(2 * chunk + 1));
    if (chunk == 0) oh_publish_signature(c);
}

static bool reduce(const oh_host_call *c, size_t chunk) {
    const oh_args *a = c->a;
    const span s = shard_of(oh_chunk_length(c, chunk), a->rank, a->world);
    const void *in[OH_MAX_RANKS];
    if (!oh_await_all(c, (oh_u32)(2 * chunk + 1))) return false;
    for (oh_u32 r = 0; r < a->world; r++) in[r] = oh_mailbox(c, r, a->rank, chunk);
    in[a->rank] = OH_AT(char, a->in) + chunk * a->chunk_bytes + s.at;
    c->vector->reduce[a->dtype](reduced(c, a->rank, chunk), in, (int)a->world,
                                s.bytes / c->element);
    oh_publish_progress(c, (oh_u32)(2 * chunk + 2));
    return true;
}

static bool gather(const oh_host_call *c, size_t chunk) {
    const oh_args *a = c->a;
    char *out = OH_AT(char, a->out) + chunk * a->chunk_bytes;
    /* Own shard first, then the next rank's: ranks read different memory at a time. */
    for (oh_u32 step = 0; step < a->world; step++) {
        const oh_u32 r = (a->rank + step) % a->world;
        const span s = shard_of(oh_chunk_length(c, chunk), r, a->world);
        if (r != a->rank && !oh_await_progress(c, r, (oh_u32)(2 * chunk + 2))) return false;
        c->vector->copy(out + s.at, reduced(c, r, chunk), s.bytes);
    }
    return true;
}

static void all_chunks(const oh_host_call *c) {
    scatter(c, 0);
    for (size_t chunk = 0; chunk < c->a->chunks; chunk++) {
        if (!reduce(c, chunk)) return;
        if (chunk + 1 < c->a->chunks) scatter(c, chunk + 1);
        if (!gather(c, chunk)) return;
    }
}

void oh_host_2shot(const void *args, oh_grid grid) {
    oh_host_call c;
    (void)grid;
    if (!oh_host_begin(&c, args, OH_SITE_HOST_2SHOT)) return;
    all_chunks(&c);
    oh_host_end(&c);
}
