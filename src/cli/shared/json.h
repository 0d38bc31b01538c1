/* What the JSON files of the tool share. */
#ifndef OH_CLI_JSON_H
#define OH_CLI_JSON_H

#include "cli/shared/cli.h"

#include <stdio.h>

/* "value". Bytes that are no UTF-8 become U+FFFD. */
void json_string(FILE *file, const char *value);

/* "key": "value" and `end`, on a line of its own. */
void json_text(FILE *file, const char *key, const char *value, const char *end);

/* "key": value and `end`. null for what is not known: JSON has neither inf nor nan. */
void json_number(FILE *file, const char *key, double value, const char *end);

/* Machine, processor, time, version, commit; `driver` and `clocks` may be "". */
void json_machine(FILE *file, const char *driver, const char *clocks);

#endif
