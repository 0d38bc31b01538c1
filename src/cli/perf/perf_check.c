/* Inputs, the scalar reference and the comparison.
 *
 * Inputs are random real numbers, different on each rank, with infinities, NaNs, signed zeros and
 * largest values among them: a few where they are timed, many and subnormals where they are only
 * checked. Beside a foreign library, which may sum in any order, they are integers so small that
 * every order gives the same bits. The reference knows nothing of the
 * library: fp32 sum in rank order starting from rank 0's value, one rounding, canonical NaN. */
#include "cli/perf/perf_check.h"
#include "cli/perf/perf_numbers.h"

#include <string.h>

enum {
    POISON = 0xA5,
    STAGING_BYTES = 1 << 18
};

/* A good mixer of 64 bits: two rounds of multiply and xor-shift. */
static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 31) * 0x9FB21C651E98DF25ull;
    x = (x ^ x >> 29) * 0xD6E8FEB86659FD93ull;
    return x ^ x >> 32;
}

typedef struct format {
    int fraction_bits, exponent_bits, bias;
} format;

static format format_of(onehop_dtype dtype) {
    switch (dtype) {
    case ONEHOP_FLOAT16:
        return (format){10, 5, 15};
    case ONEHOP_BFLOAT16:
        return (format){7, 8, 127};
    default:
        return (format){23, 8, 127};
    }
}

/* One of: -0, infinities, NaNs with payloads, all bits set, the largest finite values. */
static uint32_t special_bits(format f, uint64_t random) {
    uint32_t sign = 1u << (f.fraction_bits + f.exponent_bits);
    uint32_t infinity = ((1u << f.exponent_bits) - 1) << f.fraction_bits;
    switch (random & 7) {
    case 0:
        return sign;
    case 1:
        return infinity;
    case 2:
        return sign | infinity;
    case 3:
        return infinity | 1;
    case 4:
        return sign | infinity | ((1u << f.fraction_bits) - 1);
    case 5:
        return infinity - 1;
    case 6:
        return sign | (infinity - 1);
    default:
        return 0;
    }
}

/* Bits of element `index` of rank `rank`'s input area. */
static uint32_t input_bits(const perf_worker *worker, int rank, uint64_t index) {
    onehop_dtype dtype = worker->plan->dtype;
    uint64_t random = mix(index * ONEHOP_MAX_RANKS + (uint64_t)rank + 1);
    if (worker->data == DATA_INTEGERS) {
        uint32_t bits = 0;
        perf_encode(dtype, (float)((int)(random % 15) - 7), &bits);
        return bits;
    }
    format f = format_of(dtype);
    uint64_t lot = random >> 52;
    if (lot == 0 || (worker->data == DATA_MIXED && lot % 32 == 1)) return special_bits(f, random);
    uint32_t fraction = (uint32_t)random & ((1u << f.fraction_bits) - 1);
    uint32_t exponent = (uint32_t)(f.bias - 4) + (uint32_t)(random >> 40 & 7);
    /* Often on all ranks at once, so that sums are subnormal too. */
    if (worker->data == DATA_MIXED && index % 16 < 2) exponent = 0;
    uint32_t sign = (uint32_t)(random >> 48 & 1);
    return ((sign << f.exponent_bits | exponent) << f.fraction_bits) | fraction;
}

static void store_bits(onehop_dtype dtype, void *element, uint32_t bits) {
    uint16_t half = (uint16_t)bits;
    if (dtype == ONEHOP_FLOAT32)
        memcpy(element, &bits, sizeof bits);
    else
        memcpy(element, &half, sizeof half);
}

static uint32_t load_bits(onehop_dtype dtype, const void *element) {
    uint32_t bits;
    uint16_t half;
    if (dtype == ONEHOP_FLOAT32) {
        memcpy(&bits, element, sizeof bits);
        return bits;
    }
    memcpy(&half, element, sizeof half);
    return half;
}

/* The sum of all ranks' elements number first[rank] + index, as the library promises it. */
static uint32_t reference_bits(const perf_worker *worker, const uint64_t *first, uint64_t index) {
    onehop_dtype dtype = worker->plan->dtype;
    int world_size = worker->plan->world_size;
    uint32_t bits = input_bits(worker, 0, first[0] + index);
    if (world_size == 1) return bits; /* a copy */
    unsigned char element[4];
    store_bits(dtype, element, bits);
    float sum = perf_decode(dtype, element);
    for (int rank = 1; rank < world_size; rank++) {
        store_bits(dtype, element, input_bits(worker, rank, first[rank] + index));
        sum += perf_decode(dtype, element);
    }
    perf_encode(dtype, sum, element);
    return load_bits(dtype, element);
}

/* Element `index` of the output: of a gather, that of the rank whose part it is in. */
static uint32_t expected_bits(const perf_worker *worker, const uint64_t *first, uint64_t index,
                              uint64_t part) {
    const int rank = (int)(index / part);
    if (worker->plan->collective != ONEHOP_ALL_GATHER) return reference_bits(worker, first, index);
    return input_bits(worker, rank, first[rank] + index);
}

onehop_result perf_fill_inputs(perf_worker *worker) {
    size_t element = onehop_dtype_bytes(worker->plan->dtype);
    for (int i = 0; i < worker->ranks; i++) {
        perf_rank *rank = &worker->rank[i];
        for (size_t at = 0; at < worker->area_bytes; at += worker->staging_bytes) {
            size_t bytes = worker->area_bytes - at;
            if (bytes > worker->staging_bytes) bytes = worker->staging_bytes;
            for (size_t j = 0; j < bytes; j += element)
                store_bits(worker->plan->dtype, worker->staging + j,
                           input_bits(worker, rank->rank, (at + j) / element));
            onehop_result result = worker->backend->write(
                &rank->processor, (char *)rank->areas->in + at, worker->staging, bytes);
            if (result != ONEHOP_OK) return result;
        }
    }
    return ONEHOP_OK;
}

onehop_result perf_poison(perf_worker *worker, perf_slices slices) {
    size_t bytes = PERF_GUARD + slices.stride * slices.count;
    if (slices.element) bytes += PERF_GUARD;
    for (int i = 0; i < worker->ranks; i++) {
        perf_rank *rank = &worker->rank[i];
        onehop_result result =
            worker->backend->fill(&rank->processor, rank->areas->out, POISON, bytes);
        if (result != ONEHOP_OK) return result;
    }
    return ONEHOP_OK;
}

/* What a comparison found on one rank. Elements of `from` .. `to` - 1 are held against the
 * reference; the hash is of all. */
typedef struct findings {
    uint64_t from, to;
    uint64_t part; /* elements of one rank's part */
    uint64_t wrong, outside, hash;
} findings;

/* `block` holds output bytes from `at` on of a slice whose first input elements have the numbers
 * `first`. */
static void compare_block(const perf_worker *worker, const unsigned char *block, size_t at,
                          size_t bytes, const uint64_t *first, findings *found) {
    onehop_dtype dtype = worker->plan->dtype;
    size_t element = onehop_dtype_bytes(dtype);
    for (size_t j = 0; j < bytes; j += element) {
        uint32_t bits = load_bits(dtype, block + j);
        found->hash = mix(found->hash ^ bits);
        uint64_t index = (at + j) / element;
        if (index < found->from || index >= found->to) continue;
        found->wrong += bits != expected_bits(worker, first, index, found->part);
    }
}

static bool is_to_be_corrupted(perf_worker *worker, const perf_rank *rank) {
    return rank->rank == worker->plan->world_size - 1 &&
           ++worker->compared == worker->plan->corrupt;
}

static onehop_result compare_slice(perf_worker *worker, perf_rank *rank, perf_slices slices,
                                   uint64_t call, findings *found) {
    char *out = perf_slice_out(rank, slices, call);
    uint64_t first[ONEHOP_MAX_RANKS];
    for (int r = 0; r < worker->plan->world_size; r++)
        first[r] = perf_slice_offset(slices, call, r) / onehop_dtype_bytes(worker->plan->dtype);
    for (size_t at = 0; at < slices.bytes; at += worker->staging_bytes) {
        size_t bytes = slices.bytes - at;
        if (bytes > worker->staging_bytes) bytes = worker->staging_bytes;
        onehop_result result =
            worker->backend->read(&rank->processor, worker->staging, out + at, bytes);
        if (result != ONEHOP_OK) return result;
        if (at == 0 && is_to_be_corrupted(worker, rank)) worker->staging[0] ^= 1;
        compare_block(worker, worker->staging, at, bytes, first, found);
    }
    return ONEHOP_OK;
}

static onehop_result check_guard(perf_worker *worker, perf_rank *rank, const void *guard,
                                 size_t bytes, findings *found) {
    onehop_result result = worker->backend->read(&rank->processor, worker->staging, guard, bytes);
    if (result != ONEHOP_OK) return result;
    for (size_t i = 0; i < bytes; i++) found->outside += worker->staging[i] != POISON;
    return ONEHOP_OK;
}

static onehop_result inspect(perf_worker *worker, perf_rank *rank, perf_slices slices,
                             uint64_t call, findings *found) {
    const char *out = perf_slice_out(rank, slices, call);
    onehop_result result = compare_slice(worker, rank, slices, call, found);
    if (result == ONEHOP_OK)
        result = check_guard(worker, rank, out - PERF_GUARD, PERF_GUARD, found);
    if (result == ONEHOP_OK)
        result = check_guard(worker, rank, out + slices.bytes, slices.stride - slices.bytes, found);
    return result;
}

/* Compares the slices of `calls` calls, each rank all elements or its share of them, and tells the
 * others. */
static onehop_result compare(perf_worker *worker, perf_slices slices, uint64_t first,
                             uint64_t calls, bool share) {
    uint64_t count = slices.bytes / onehop_dtype_bytes(worker->plan->dtype);
    uint64_t world_size = (uint64_t)worker->plan->world_size;
    worker->compared = worker->verified;
    for (int i = 0; i < worker->ranks; i++) {
        perf_rank *rank = &worker->rank[i];
        const bool shard = worker->plan->collective == ONEHOP_REDUCE_SCATTER;
        findings found = {.to = count, .part = count / perf_parts(worker->plan)};
        if (share || shard) {
            found.from = count * (uint64_t)rank->rank / world_size;
            found.to = count * (uint64_t)(rank->rank + 1) / world_size;
        }
        for (uint64_t call = first; call < first + calls; call++) {
            onehop_result result = inspect(worker, rank, slices, call, &found);
            if (result != ONEHOP_OK) return result;
        }
        board_row *row = &worker->board->row[rank->rank];
        row->hash = shard ? 0 : found.hash; /* of a scatter nothing is equal */
        row->wrong = found.wrong;
        row->outside = found.outside;
    }
    return perf_barrier(worker);
}

static bool all_alike_and_right(const perf_worker *worker) {
    const board_row *rows = worker->board->row;
    for (int rank = 0; rank < worker->plan->world_size; rank++)
        if (rows[rank].wrong || rows[rank].hash != rows[0].hash) return false;
    return true;
}

/* Each rank holds its share against the reference; equal hashes carry that over to all ranks. If
 * anything differs, each rank compares everything, to count what is wrong. */
onehop_result perf_verify(perf_worker *worker, perf_slices slices, uint64_t first, uint64_t calls,
                          int64_t *wrong, uint64_t *outside) {
    onehop_result result = compare(worker, slices, first, calls, true);
    if (result == ONEHOP_OK && !all_alike_and_right(worker)) {
        result = perf_barrier(worker); /* before anyone writes again */
        if (result == ONEHOP_OK) result = compare(worker, slices, first, calls, false);
    }
    worker->verified = worker->compared;
    if (result != ONEHOP_OK) return result;
    const board_row *rows = worker->board->row;
    for (int rank = 0; rank < worker->plan->world_size; rank++) {
        /* A rank that differs from rank 0 is wrong even if the reference were. */
        bool differs = rows[rank].hash != rows[0].hash && rows[rank].wrong == 0;
        *wrong += (int64_t)rows[rank].wrong + differs;
        *outside += rows[rank].outside;
    }
    return perf_barrier(worker);
}
