/* Captured inputs: how ranks come to read each other's memory. */
#ifndef OH_REGISTRATION_H
#define OH_REGISTRATION_H

#include "context/context.h"
#include "context/members.h"

/* Collective, after the captured calls were found to be alike: finds the memory of all ranks'
 * calls, maps what can be mapped, agrees which calls read it, fills the registrations and closes
 * the batch. */
onehop_result oh_register(const oh_members *m);

static inline bool oh_takes_registration(const oh_captured *c) {
    return c->source == ONEHOP_SOURCE_GRAPH;
}

#endif
