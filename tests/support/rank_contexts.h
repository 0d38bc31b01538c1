/* Ranks with a context each, as processes or as threads, and what only a test may look at inside
 * one. */
#ifndef OH_TEST_RANK_CONTEXTS_H
#define OH_TEST_RANK_CONTEXTS_H

#include <onehop.h>

typedef enum ranks_layout {
    RANKS_AS_THREADS,
    RANKS_AS_PROCESSES,
    RANKS_IN_PAIRS /* processes of two threads each; an even world size */
} ranks_layout;

typedef void (*ranks_fn)(onehop_context *context, int rank, int world_size, void *argument);

/* Runs `fn` on every rank of a new group on the host device; `base` (may be NULL) carries sizes and
 * limits. Checks at the end that the group is idle. */
void ranks_run(ranks_layout layout, int world_size, const onehop_config *base, ranks_fn fn,
               void *argument);

/* Collective: waits for all ranks, then fails unless every word of both parities of all push slots
 * is armed. */
void ranks_expect_idle(onehop_context *context);

/* Collective. */
void ranks_barrier(onehop_context *context);

/* A call with a named algorithm; ALGORITHM_AUTO takes the plain one. */
onehop_result ranks_all_reduce(onehop_context *context, const void *in, void *out, size_t count,
                               onehop_dtype dtype, onehop_algorithm algorithm,
                               onehop_stream stream);

#endif
