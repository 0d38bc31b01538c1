/* See chunks.h. */
#include "plan/chunks.h"
#include "protocol/args.h"

#define K ((size_t)1 << 10)
#define M ((size_t)1 << 20)

static size_t min_size(size_t a, size_t b) {
    return a < b ? a : b;
}

/* Equal pieces of whole lines, as few as fit `most`: what is left for the last one keeps all ranks
 * busy. */
static size_t equal_pieces(size_t bytes, size_t max) {
    const size_t pieces = (bytes + max - 1) / max;
    return oh_round_up((bytes + pieces - 1) / pieces, 128);
}

/* A message that fits a half of the pull buffer goes whole. Longer ones: 2shot_pull uses one place
 * again and again, 1shot_pull two in turn. Bytes of a chunk are counted in 32 bits. */
static size_t pull_chunk_bytes(const oh_dispatch *d, onehop_algorithm a, size_t bytes) {
    const size_t whole = d->regions.pull_bytes < 2048 * M ? d->regions.pull_bytes : 2048 * M;
    const size_t padded = oh_round_up(bytes, OH_UNIT_BYTES);
    if (padded <= whole) return padded;
    return equal_pieces(bytes, oh_round_down(a == ONEHOP_1SHOT_PULL ? whole / 2 : whole, 128));
}

/* A message whose shards fit half a slot each goes whole; else its shards take a quarter at
 * most. */
static size_t push_2shot_chunk_bytes(const oh_dispatch *d, size_t bytes) {
    const size_t whole = (size_t)d->world * (d->regions.slot_bytes / 2);
    const size_t padded = oh_round_up(bytes, OH_UNIT_BYTES);
    return padded <= whole ? padded : equal_pieces(bytes, whole / 2);
}

/* Parts of W ranks in a half of the pull buffer, in four sub-slots in turn: one chunk ahead. On
 * GPUs a part goes whole only where it is short, so that copying overlaps with the link. */
static size_t gather_chunk_bytes(const oh_dispatch *d, size_t bytes) {
    const size_t grain = d->regions.pull_bytes / (4 * (size_t)d->world) < 128 ? OH_UNIT_BYTES : 128;
    const size_t max = oh_round_down(d->regions.pull_bytes / (4 * (size_t)d->world), grain);
    const size_t pieces = (bytes + max - 1) / max;
    const size_t even = oh_round_up((bytes + pieces - 1) / pieces, grain);
    return even < max ? even : max;
}

/* The host paths' (host_path.h). What fits a mailbox goes whole, if short, else pieces take
 * turns in the halves of it; host_2shot has a shard in a mailbox, and two results in a box. What is
 * published for all takes turns in the quarters of the own half. */
static size_t host_chunk_bytes(const oh_dispatch *d, onehop_algorithm a, size_t bytes) {
    const size_t padded = oh_round_up(bytes, OH_UNIT_BYTES), half = d->regions.pull_bytes;
    const size_t box = OH_BOX_BYTES(half, (size_t)d->world), for_all = a == ONEHOP_HOST_GATHER;
    if (a == ONEHOP_HOST_2SHOT)
        return min_size(128 * K, (size_t)d->world * oh_round_down(box / 2, 128));
    if (padded <= (for_all ? min_size(64 * K, half) : min_size(256 * K, box))) return padded;
    return for_all ? min_size(128 * K, half / 4) : min_size(64 * K, box / 2);
}

size_t oh_chunk_bytes(const oh_dispatch *d, onehop_algorithm a, size_t bytes) {
    const size_t padded = oh_round_up(bytes, OH_UNIT_BYTES);
    if (oh_is_pull(a)) return pull_chunk_bytes(d, a, bytes);
    if (a == ONEHOP_2SHOT_PUSH) return push_2shot_chunk_bytes(d, bytes);
    if (a == ONEHOP_GATHER_LL) return padded;
    if (a == ONEHOP_GATHER_PUSH) return gather_chunk_bytes(d, bytes);
    if (oh_is_host_path(a)) return host_chunk_bytes(d, a, bytes);
    return padded <= d->regions.slot_bytes ? padded : oh_round_down(d->regions.slot_bytes / 2, 128);
}

/* ---- rows ------------------------------------------------------------------------------------ */

static size_t box_bytes(const oh_dispatch *d) {
    return OH_BOX_BYTES(d->regions.pull_bytes, (size_t)d->world);
}

static size_t shard_rows(const oh_dispatch *d, const oh_rows *rows) {
    return (rows->count + (size_t)d->world - 1) / (size_t)d->world;
}

const char *oh_rows_lack(const oh_dispatch *d, onehop_algorithm a, const oh_rows *rows) {
    const size_t slot = d->regions.slot_bytes, bytes = rows->bytes;
    if (oh_is_host_path(a))
        return bytes <= box_bytes(d) / 2 ? NULL : "a row is longer than half a mailbox";
    if (bytes > slot / 2) return "a row is longer than half a push slot";
    if (a != ONEHOP_2SHOT_PUSH) return NULL;
    if (rows->count < (size_t)d->world) return "there are fewer rows than ranks";
    return shard_rows(d, rows) * bytes <= slot / 2 || bytes <= slot / 4
               ? NULL
               : "a row is longer than a quarter of a push slot";
}

/* What fits its slot or mailbox goes whole, else rows take turns in the halves of it. Of two shots
 * the same of a shard in half a slot. */
uint32_t oh_chunk_rows(const oh_dispatch *d, onehop_algorithm a, const oh_rows *rows) {
    const size_t slot = d->regions.slot_bytes, world = (size_t)d->world, bytes = rows->bytes;
    size_t max = rows->count, grain = 1;
    if (oh_is_host_path(a)) {
        /* Half a mailbox holds a row: at most 32 KiB. */
        if (max * bytes > min_size(box_bytes(d), 64 * K))
            max = min_size(box_bytes(d) / 2, 64 * K) / bytes;
    } else if (a == ONEHOP_2SHOT_PUSH) {
        grain = world;
        max = shard_rows(d, rows) * world;
        if (shard_rows(d, rows) * bytes > slot / 2) max = slot / 4 / bytes * world;
    } else if (max * bytes > slot) {
        max = slot / 2 / bytes;
    }
    const size_t pieces = (rows->count + max - 1) / max;
    return (uint32_t)oh_round_up((rows->count + pieces - 1) / pieces, grain);
}
