/* The debug log's line about a call: which rule chose, once for each kind of call. */
#ifndef OH_TOLD_H
#define OH_TOLD_H

#include "communicator/comm.h"

/* Kinds of calls that were told, by hash; a kind may be told again once another has taken its
 * place. */
#define OH_TOLD 256

/* Only where comm->told is there, which it is at level debug. */
void oh_told(const onehop_comm *comm, const oh_question *q, const oh_plan *plan);

/* `choice` with the place of the plan's rule. */
onehop_choice oh_told_choice(const oh_plan *plan);

#endif
