/* Starting ranks and keeping them together: forked processes or threads, a shared board for
 * barriers and results, and the watch that ends the whole group when one rank dies. */
#ifndef OH_CLI_RANKS_H
#define OH_CLI_RANKS_H

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

/* Work of one rank; returns an exit code, and has called board_fail if that tells of a failure. */
typedef int (*rank_body)(void *user, int rank);

/* Runs ranks as forked processes. No child outlives the call, nor this process: Ctrl-C, SIGTERM and
 * SIGHUP end the children first and then this process. If a child dies or fails, the others have
 * 100 ms to end, then they are killed. Prints why on stderr; returns the exit code of the run. */
int ranks_run_processes(perf_board *board, int count, rank_body body, void *user);

/* The same with threads of this process. */
int ranks_run_threads(perf_board *board, int count, rank_body body, void *user);

/* Prints the recorded failure, if any; returns its exit code, or `code`. */
int ranks_report(const perf_board *board, int code);

/* Runs body(user) in a forked child and returns what it wrote into `out` [bytes]; false if it died.
 * Keeps the driver out of this process, so that it may fork ranks later. */
bool ranks_ask_child(void (*body)(void *out), void *out, size_t bytes);

#endif
