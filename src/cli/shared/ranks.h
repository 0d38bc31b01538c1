/* Starting ranks as forked processes or threads, and the watch that ends the whole group when one
 * rank dies. */
#ifndef OH_CLI_RANKS_H
#define OH_CLI_RANKS_H

#include "cli/shared/board.h"

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
