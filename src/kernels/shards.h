/* How the two-shot algorithms of GPUs cut a message: shard d is reduced by rank d.
 *
 * Shards are cut from the length of a whole chunk, also in a shorter last one, where some end early
 * or are empty: so a place in a shard belongs to the same thread in every chunk, and no shard grows
 * from chunk to chunk. Of n grains each rank has n / W, the first n mod W one more: with at least W
 * units no shard of a whole chunk is empty. */
#ifndef OH_SHARDS_H
#define OH_SHARDS_H

#include "kernels/prim/prim.h"
#include "protocol/args.h"

typedef struct oh_shards {
    oh_u32 each, more;
    oh_u32 grain; /* units: one; a line of 128 bytes where that hardly disturbs the balance; so many
                     that grains are counted in 32 bits */
} oh_shards;

OH_FN oh_shards oh_shards_of(oh_u64 units, oh_u32 world) {
    oh_shards s;
    oh_u32 grains;
    s.grain = units < 64 * world ? 1 : units >> 32 ? 4096 : 8;
    grains = (oh_u32)((units + s.grain - 1) / s.grain);
    s.each = grains / world;
    s.more = grains % world;
    return s;
}

/* Grains before a rank's shard. */
OH_FN oh_u32 oh_shard_grains(oh_shards s, oh_u32 rank) {
    return rank * s.each + (rank < s.more ? rank : s.more);
}

/* Units before a rank's shard of a chunk, whose units are counted in 32 bits. */
OH_FN oh_u32 oh_shard_begin(oh_shards s, oh_u32 rank) {
    return oh_shard_grains(s, rank) * s.grain;
}

/* At most `limit`, the units of a shorter chunk. */
OH_FN oh_u32 oh_shard_end(oh_shards s, oh_u32 rank, oh_u32 limit) {
    const oh_u32 end = oh_shard_begin(s, rank + 1);
    return end < limit ? end : limit;
}

/* Units of the longest shard. */
OH_FN oh_u32 oh_shard_max(oh_shards s) {
    return (s.each + (s.more != 0)) * s.grain;
}

#endif
