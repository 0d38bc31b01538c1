/* Kernels as text for a compiler at run time: the sources as they were when the library was built,
 * one instance of their list, and a caller's expression if there is one. */
#ifndef OH_PROGRAM_H
#define OH_PROGRAM_H

#include "protocol/epilogue.h"
#include "kernels/kernels.h"

/* What a compiler is given at run time: the text of one kernel, and those that it may include, by
 * their names. */
typedef struct oh_source {
    const char *name, *text;
} oh_source;

#define OH_PROGRAM_SOURCES 64

typedef struct oh_program {
    oh_source sources[OH_PROGRAM_SOURCES];
    size_t count;
    char *text;      /* of the program itself; oh_program_free */
    bool expression; /* a caller's expression is in it, so the compiler's errors are the caller's */
    bool quick;      /* only to see that it compiles: it will not run */
} oh_program;

/* ARGUMENT, with what is wrong: a name, or a text that is no single expression. It is to keep
 * accidents from reaching the compiler as something else than was meant; code it is all the
 * same. */
onehop_result oh_expression_check(const onehop_expression_config *op);

#define OH_EVERY_KERNEL (-1)

/* Of one kernel, or of every one. `op`, which has been checked, may be NULL. Free the program in
 * any case. */
onehop_result oh_program_make(int kernel, const onehop_expression_config *op,
                              oh_program *program_out);
void oh_program_free(oh_program *program);

#endif
