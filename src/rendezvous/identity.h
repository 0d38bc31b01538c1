/* Who and where this process is. */
#ifndef OH_IDENTITY_H
#define OH_IDENTITY_H

#include "base/base.h"

typedef struct oh_id128 {
    uint64_t word[2];
} oh_id128;

static inline bool oh_id128_equal(oh_id128 a, oh_id128 b) {
    return a.word[0] == b.word[0] && a.word[1] == b.word[1];
}

/* Random, made once per process; a forked child gets its own. A pid would not do: ranks in
 * different pid namespaces may share one. */
onehop_result oh_identity_process(oh_id128 *id_out);

/* Number of the calling thread's network namespace, as `lsns -t net` prints it; 0 if unknown. The
 * first namespace has the same number on every host. */
uint64_t oh_identity_netns(void);

/* Random number of this boot of this kernel; all zero if unknown. */
oh_id128 oh_identity_boot(void);

#endif
