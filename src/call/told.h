/* The debug log's line about a call: which rule chose, once for each kind of call. */
#ifndef OH_TOLD_H
#define OH_TOLD_H

#include "communicator/comm.h"

/* Only where comm->told is there, which it is at level debug. */
void oh_told(const onehop_comm *comm, const oh_question *q, const oh_plan *plan);

#endif
