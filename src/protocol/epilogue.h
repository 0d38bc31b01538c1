/* What a kernel with a caller's expression is given: the call, and the values of the expression's
 * names. The expression itself is put around the sums by program.c. */
#ifndef OH_EPILOGUE_H
#define OH_EPILOGUE_H

#include "protocol/args.h"

#define OH_EPILOGUE_NAMES 8 /* ONEHOP_OP_NAMES */

typedef struct oh_epilogue_args {
    oh_args call; /* first: bodies know of this alone */
    oh_u64 arrays[OH_EPILOGUE_NAMES];
    float scalars[OH_EPILOGUE_NAMES];
} oh_epilogue_args;

OH_STATIC_ASSERT(sizeof(oh_epilogue_args) == sizeof(oh_args) + 12 * OH_EPILOGUE_NAMES, epilogue);

#endif
