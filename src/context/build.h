/* Kernels that are built at run time, on all ranks or none: those of a context (prepare.c), and
 * those with a caller's expression (expression.c).
 *
 * Ranks with GPUs of one kind want the same kernels. So building takes two rounds: in the first
 * each builds its share, in the second all that is left, which by then lies in the cache, or in
 * this process. Where there is no cache that all can use, each compiles all: slower, not wrong. */
#ifndef OH_BUILD_H
#define OH_BUILD_H

#include "context/context.h"
#include "context/members.h"

#define OH_BUILD_MAX 64

typedef struct oh_build {
    const onehop_expression_config *op; /* NULL: kernels as they are */
    uint64_t identity;                  /* of what all ranks must ask for alike */
    size_t count;
    int kernels[OH_BUILD_MAX];
    oh_function functions[OH_BUILD_MAX]; /* without a handle: not built yet */
} oh_build;

/* Builds on all ranks. `what`: the public function, for messages; `builds`: of the ranks here;
 * `mine`: what happened here before, and if that failed `builds` may be NULL. After a failure of
 * any rank the functions are not to be used. */
onehop_result oh_build_run(const oh_members *m, const char *what, oh_build *builds,
                           onehop_result mine);

#endif
