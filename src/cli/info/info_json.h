/* `onehop info --json`. */
#ifndef OH_CLI_INFO_JSON_H
#define OH_CLI_INFO_JSON_H

#include "cli/shared/backend.h"

/* Returns an exit code. */
int info_print_json(const cuda_census *census);

#endif
