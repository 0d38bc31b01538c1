/* Where this process is. */
#ifndef OH_IDENTITY_H
#define OH_IDENTITY_H

#include "base/base.h"

/* Number of the calling thread's network namespace, as `lsns -t net` prints it; 0 if unknown. The
 * first namespace has the same number on every host. */
uint64_t oh_identity_netns(void);

/* Random number of this boot of this kernel; all zero if unknown. */
oh_id128 oh_identity_boot(void);

#endif
