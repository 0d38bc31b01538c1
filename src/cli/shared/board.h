/* What ranks share: barriers and results. */
#ifndef OH_CLI_BOARD_H
#define OH_CLI_BOARD_H

#include "cli/shared/cli.h"

/* What a rank tells the others. Each rank writes only its own row; readers are behind a barrier. */
typedef struct board_row {
    double value[3];  /* of the exchange under way */
    uint64_t hash;    /* of the last checked output */
    uint64_t wrong;   /* elements that differ from the reference */
    uint64_t outside; /* guard bytes that changed */
    int32_t pid;
    int32_t code;     /* exit code, if the rank failed */
    char text[480];   /* and why */
    char device[160]; /* line of the header */
} board_row;

/* In memory that all ranks share. All zero is its initial state. */
typedef struct perf_board {
    uint32_t arrived __attribute__((aligned(64)));
    uint32_t generation __attribute__((aligned(64)));
    uint32_t failed __attribute__((aligned(64))); /* rank + 1 of the first that failed, or 0 */
    unsigned char unique_id[128];                 /* of the foreign library's communicator */
    board_row row[ONEHOP_MAX_RANKS];
} perf_board;

/* Memory for a board that forked children share; NULL if there is none. */
perf_board *board_create(void);
void board_destroy(perf_board *board);

/* Records that `rank` failed, first one wins; the others leave their barriers. */
void board_fail(perf_board *board, int rank, int code, const char *text);

/* Returns when `parties` have called it. OK, PEER_FAILED when a rank failed meanwhile, what
 * `alive(user)` says, which is asked every 10 ms of waiting, or TIMEOUT after limit_ms. */
onehop_result board_barrier(perf_board *board, uint32_t parties, uint32_t limit_ms,
                            onehop_result (*alive)(void *), void *user);

#endif
