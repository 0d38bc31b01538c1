/* The foreign library beside us. */
#ifndef OH_CLI_PERF_NCCL_H
#define OH_CLI_PERF_NCCL_H

#include "cli/perf/perf_worker.h"

extern const perf_target perf_target_peer[PEERS];

/* Opens the library and for each rank a communicator and, for PEER_NCCL_SYMM, windows.
 * Collective. */
onehop_result perf_nccl_open(perf_worker *worker);
void perf_nccl_close(perf_worker *worker);
const char *perf_nccl_version(void);

#endif
