/* algorithms.def as a table, indexed by onehop_algorithm. */
#ifndef OH_ALGORITHMS_H
#define OH_ALGORITHMS_H

#include "base/base.h"

/* Algorithms are numbers below this; 0 is AUTO. */
enum {
    OH_ALGORITHMS = 1
#define OH_ALGORITHM(name, constant, number, collective, family, device, blocks) +1
#include "protocol/algorithms.def"
#undef OH_ALGORITHM
};

typedef enum oh_family {
    OH_FAMILY_NONE, /* of AUTO */
    OH_FAMILY_PUSH,
    OH_FAMILY_PULL,
    OH_FAMILY_PARTS,
    OH_FAMILY_HOST,
    OH_FAMILY_NCCL,
    OH_FAMILY_COPY,
} oh_family;

/* Devices on which an algorithm runs, as bits. */
enum {
    OH_RUNS_CUDA = 1u << ONEHOP_DEVICE_CUDA,
    OH_RUNS_HOST = 1u << ONEHOP_DEVICE_HOST,
    OH_RUNS_ANY = OH_RUNS_CUDA | OH_RUNS_HOST,
};

typedef struct oh_algorithm {
    const char *name;
    onehop_collective collective;
    oh_family family;
    uint32_t devices, min_blocks;
} oh_algorithm;

/* The last entry stands for every number that is no algorithm. */
extern const oh_algorithm oh_algorithms[OH_ALGORITHMS + 1];

static inline const oh_algorithm *oh_algorithm_of(onehop_algorithm a) {
    return &oh_algorithms[(unsigned)a < OH_ALGORITHMS ? (unsigned)a : OH_ALGORITHMS];
}

static inline bool oh_is_push(onehop_algorithm a) {
    return oh_algorithm_of(a)->family == OH_FAMILY_PUSH;
}

static inline bool oh_is_pull(onehop_algorithm a) {
    return oh_algorithm_of(a)->family == OH_FAMILY_PULL;
}

static inline bool oh_is_host_path(onehop_algorithm a) {
    return oh_algorithm_of(a)->family == OH_FAMILY_HOST;
}

/* What an algorithm serves. LOCAL_COPY serves all; it counts as an all-reduce. */
static inline onehop_collective oh_collective_of(onehop_algorithm a) {
    return oh_algorithm_of(a)->collective;
}

/* All-reduces by the bodies that are written once for both devices: they apply an expression. */
static inline bool oh_takes_expression(onehop_algorithm a) {
    return oh_collective_of(a) == ONEHOP_ALL_REDUCE && (oh_is_push(a) || oh_is_pull(a));
}

/* The algorithm of that name, AUTO if there is none. */
onehop_algorithm oh_algorithm_named(const char *name);

/* The names of the algorithms 1 << a in `wanted`, with ", " between; returns `text`. */
char *oh_algorithm_list(uint32_t wanted, char *text, size_t size);

/* What a call does: a collective and no more, or in the same launch what a fused operation adds to
 * an all-reduce. */
typedef enum oh_operation {
    OH_PLAIN,
    OH_NORM,
    OH_QKNORM,
    OH_OPERATIONS
} oh_operation;

/* "all_reduce_norm"; "plain"; "unknown" for any other number. */
const char *oh_operation_name(oh_operation operation);

#endif
