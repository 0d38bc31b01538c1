/* The table and its reading. Each row: up to this many bytes, this algorithm and grid. Provenance
 * in the comment of each table; rows of one (device, world size) are sorted by bytes, the last
 * holds for all longer messages. */
#include "comm/dispatch.h"

#include "kernels/kernels.h"

#include <string.h>

#define ANY SIZE_MAX
#define K   ((size_t)1 << 10)
#define M   ((size_t)1 << 20)

typedef struct row {
    onehop_device_kind kind;
    int world_low, world_high;
    size_t up_to; /* bytes */
    onehop_algorithm algorithm;
    uint32_t blocks, threads; /* data blocks; the block of the signature is added */
} row;

static const row table[] = {
    /* Two H200 over NVLink, bf16, graphs, 2026-11-29: best grid of a sweep, W=2; other W taken from
     * it. */
    {ONEHOP_DEVICE_CUDA, 2, 16, 1 * K, ONEHOP_1SHOT_PUSH, 2, 64},
    {ONEHOP_DEVICE_CUDA, 2, 16, 4 * K, ONEHOP_1SHOT_PUSH, 2, 128},
    {ONEHOP_DEVICE_CUDA, 2, 16, 16 * K, ONEHOP_1SHOT_PUSH, 8, 128},
    {ONEHOP_DEVICE_CUDA, 2, 16, 64 * K, ONEHOP_1SHOT_PUSH, 32, 128},
    {ONEHOP_DEVICE_CUDA, 2, 16, 256 * K, ONEHOP_1SHOT_PUSH, 64, 256},
    {ONEHOP_DEVICE_CUDA, 2, 16, 1 * M, ONEHOP_1SHOT_PUSH, 128, 512},
    {ONEHOP_DEVICE_CUDA, 2, 16, ANY, ONEHOP_1SHOT_PUSH, 131, 1024},
    /* Between two ranks one shot moves the same bytes as two and waits once per chunk. */
    {ONEHOP_DEVICE_HOST, 2, 2, ANY, ONEHOP_HOST_1SHOT, 0, 1},
    {ONEHOP_DEVICE_HOST, 3, 16, 64 * K, ONEHOP_HOST_1SHOT, 0, 1},
    {ONEHOP_DEVICE_HOST, 3, 16, ANY, ONEHOP_HOST_2SHOT, 0, 1},
};

/* GPU-shaped bodies on the host device, forced by name: few blocks, one thread each. */
#define HOST_GPU_SHAPED_BLOCKS 3

static const row *row_for(const oh_dispatch *d, size_t bytes) {
    for (size_t i = 0; i < OH_LENGTH(table); i++) {
        const row *r = &table[i];
        if (r->kind == d->kind && d->world >= r->world_low && d->world <= r->world_high &&
            bytes <= r->up_to)
            return r;
    }
    return NULL;
}

static bool is_host_path(onehop_algorithm a) {
    return a == ONEHOP_HOST_1SHOT || a == ONEHOP_HOST_2SHOT;
}

static bool is_pull(onehop_algorithm a) {
    return a == ONEHOP_1SHOT_PULL || a == ONEHOP_2SHOT_PULL;
}

/* Equal pieces of whole lines, as few as fit `most`: what is left for the last one keeps all ranks
 * busy. */
static size_t equal_pieces(size_t bytes, size_t most) {
    const size_t pieces = (bytes + most - 1) / most;
    return oh_round_up((bytes + pieces - 1) / pieces, 128);
}

/* A message that fits a half of the pull buffer goes whole. Longer ones: 2shot_pull uses one place
 * again and again, 1shot_pull two in turn. Bytes of a chunk are counted in 32 bits. */
static size_t pull_chunk_bytes(const oh_dispatch *d, onehop_algorithm a, size_t bytes) {
    const size_t whole = d->planes.pull_bytes < 2048 * M ? d->planes.pull_bytes : 2048 * M;
    const size_t padded = oh_round_up(bytes, OH_UNIT_BYTES);
    if (padded <= whole) return padded;
    return equal_pieces(bytes, oh_round_down(a == ONEHOP_1SHOT_PULL ? whole / 2 : whole, 128));
}

/* A message whose shards fit half a slot each goes whole; else its shards take a quarter at most. */
static size_t push_2shot_chunk_bytes(const oh_dispatch *d, size_t bytes) {
    const size_t whole = (size_t)d->world * (d->planes.slot_bytes / 2);
    const size_t padded = oh_round_up(bytes, OH_UNIT_BYTES);
    return padded <= whole ? padded : equal_pieces(bytes, whole / 2);
}

/* Pieces: a message that fits its slot goes whole; else in halves of a push slot, or in quarters of
 * the area that a rank publishes in. */
static size_t chunk_bytes_for(const oh_dispatch *d, onehop_algorithm a, size_t bytes) {
    const size_t padded = oh_round_up(bytes, OH_UNIT_BYTES);
    if (is_pull(a)) return pull_chunk_bytes(d, a, bytes);
    if (a == ONEHOP_2SHOT_PUSH) return push_2shot_chunk_bytes(d, bytes);
    if (a == ONEHOP_HOST_1SHOT && padded <= 64 * K && padded <= d->planes.pull_bytes) return padded;
    if (is_host_path(a)) {
        const size_t quarter = oh_round_down(d->planes.pull_bytes / 4, 128);
        return quarter < 128 * K ? quarter : 128 * K;
    }
    return padded <= d->planes.slot_bytes ? padded : oh_round_down(d->planes.slot_bytes / 2, 128);
}

static onehop_result choose_grid(const oh_dispatch *d, const onehop_call *call, const row *r,
                                 uint32_t bound, onehop_choice *choice) {
    if (is_host_path(choice->algorithm)) {
        choice->blocks = choice->threads = 1;
    } else if (d->kind == ONEHOP_DEVICE_HOST) {
        choice->blocks = HOST_GPU_SHAPED_BLOCKS;
        choice->threads = 1;
    } else {
        choice->blocks = r->blocks + 1;
        choice->threads = r->threads < bound ? r->threads : bound;
    }
    if (choice->blocks > d->planes.max_blocks) choice->blocks = d->planes.max_blocks;
    if (!call || (!call->blocks && !call->threads)) return ONEHOP_OK;
    const bool fixed = is_host_path(choice->algorithm);
    const uint32_t low = fixed ? 1 : 2, high = fixed ? 1 : d->planes.max_blocks;
    if (call->blocks && (call->blocks < low || call->blocks > high))
        return oh_error(ONEHOP_ERR_ALGORITHM, "%s takes %u..%u blocks here, found %u",
                        onehop_algorithm_name(choice->algorithm), low, high, call->blocks);
    const uint32_t fewest = d->kind == ONEHOP_DEVICE_HOST ? 1 : 32;
    const uint32_t most = d->kind == ONEHOP_DEVICE_HOST ? 1 : bound;
    if (call->threads && (call->threads < fewest || call->threads > most || call->threads % fewest))
        return oh_error(ONEHOP_ERR_ALGORITHM,
                        "%s takes %u..%u threads a block here, in multiples of %u, found %u",
                        onehop_algorithm_name(choice->algorithm), fewest, most, fewest,
                        call->threads);
    if (call->blocks) choice->blocks = call->blocks;
    if (call->threads) choice->threads = call->threads;
    return ONEHOP_OK;
}

/* A caller may name the source that the algorithm has here anyway. */
static onehop_result check_source(const onehop_choice *choice, const onehop_call *call) {
    if (!call || call->source == ONEHOP_SOURCE_NONE || call->source == choice->source)
        return ONEHOP_OK;
    if (!is_pull(choice->algorithm))
        return oh_error(ONEHOP_ERR_ALGORITHM, "source %s belongs to pull algorithms; %s has none",
                        onehop_source_name(call->source), onehop_algorithm_name(choice->algorithm));
    return oh_error(ONEHOP_ERR_ALGORITHM,
                    "source %s (%d) is not available; %s reads the workspace in this version",
                    onehop_source_name(call->source), (int)call->source,
                    onehop_algorithm_name(choice->algorithm));
}

void oh_dispatch_init(oh_dispatch *d, onehop_device_kind kind, int world, const oh_planes *planes) {
    size_t count;
    const oh_kernel *list = oh_kernel_list(&count);
    memset(d, 0, sizeof *d);
    d->kind = kind;
    d->world = world;
    d->planes = *planes;
    for (int a = 0; a <= ONEHOP_LOCAL_COPY; a++)
        for (int t = 0; t <= ONEHOP_BFLOAT16; t++) {
            const int k = oh_kernel_find(kind, (onehop_algorithm)a, (onehop_dtype)t, world);
            d->kernels[a][t] = (int16_t)k;
            d->bounds[a][t] = k < 0 ? 0 : list[k].max_threads;
        }
}

onehop_result oh_dispatch_choose(const oh_dispatch *d, size_t bytes, onehop_dtype dtype,
                                 const onehop_call *call, oh_plan *plan_out) {
    oh_plan plan = {{ONEHOP_LOCAL_COPY, ONEHOP_SOURCE_NONE, 0, 0, 1, {0}}, -1, bytes};
    const onehop_algorithm forced = call ? call->algorithm : ONEHOP_ALGORITHM_AUTO;
    onehop_result result = ONEHOP_OK;
    if (d->world == 1) {
        if (forced != ONEHOP_ALGORITHM_AUTO && forced != ONEHOP_LOCAL_COPY)
            return oh_error(ONEHOP_ERR_ALGORITHM, "a group of one rank copies; %s was asked for",
                            onehop_algorithm_name(forced));
        result = check_source(&plan.choice, call);
        if (!result) *plan_out = plan;
        return result;
    }
    const row *r = row_for(d, bytes);
    plan.choice.algorithm = forced == ONEHOP_ALGORITHM_AUTO ? r->algorithm : forced;
    /* Shards of no unit: some rank would own none. */
    if (plan.choice.algorithm == ONEHOP_2SHOT_PUSH &&
        oh_round_up(bytes, OH_UNIT_BYTES) < (size_t)d->world * OH_UNIT_BYTES)
        plan.choice.algorithm = ONEHOP_1SHOT_PUSH;
    const bool known = (unsigned)plan.choice.algorithm <= ONEHOP_LOCAL_COPY;
    plan.kernel = known ? d->kernels[plan.choice.algorithm][dtype] : -1;
    if (plan.kernel < 0)
        return oh_error(
            ONEHOP_ERR_ALGORITHM, "%s (%d) is not available on the %s device for %s, world size %d",
            onehop_algorithm_name(forced), (int)forced,
            d->kind == ONEHOP_DEVICE_CUDA ? "cuda" : "host", onehop_dtype_name(dtype), d->world);
    if (is_pull(plan.choice.algorithm)) plan.choice.source = ONEHOP_SOURCE_WORKSPACE;
    result = check_source(&plan.choice, call);
    if (result) return result;
    const uint32_t bound = d->bounds[plan.choice.algorithm][dtype];
    result = choose_grid(d, call, r, bound, &plan.choice);
    if (result) return result;
    plan.chunk_bytes = chunk_bytes_for(d, plan.choice.algorithm, bytes);
    plan.choice.chunks = (uint32_t)((bytes + plan.chunk_bytes - 1) / plan.chunk_bytes);
    *plan_out = plan;
    return ONEHOP_OK;
}
