/* Command-line flags as a table. Every value is checked; what is not understood is refused with the
 * flag and the value in the sentence. */
#ifndef OH_CLI_OPTIONS_H
#define OH_CLI_OPTIONS_H

#include <stddef.h>
#include <stdint.h>

typedef enum option_kind {
    OPTION_SWITCH,  /* no value; stores 1 */
    OPTION_INTEGER, /* decimal digits */
    OPTION_SIZE,    /* decimal digits and an optional K, M or G (1024, 1024^2, 1024^3) */
    OPTION_WORD,    /* one of `words`; stores its index modulo `high`, if high > 0 */
    OPTION_WORDS,   /* some of `words` between commas; stores a bit for each, by index */
    OPTION_TEXT,    /* stores a const char * */
} option_kind;

/* `offset` is the place in the struct given to options_read: of a const char * for OPTION_TEXT,
 * else of an int64_t. */
typedef struct option_row {
    char letter;      /* -b, or 0 */
    const char *name; /* --minbytes, without the dashes */
    option_kind kind;
    size_t offset;
    int64_t low, high;        /* accepted range of integers and sizes */
    const char *const *words; /* ends with NULL */
    const char *value;        /* name of the value in the help */
    const char *help;         /* NULL: not in the help */
} option_row;

enum {
    OPTIONS_GO_ON = -1
};

/* Fills `into` from argv[1..argc-1]; argv[0] is the command's name. Accepts "-b 1K", "-b1K",
 * "--name 1K" and "--name=1K". OPTIONS_GO_ON, or the command's exit code: of -h and --help, which
 * print `usage` and the flags, or of a flag that is refused, with the sentence printed. */
int options_read(const option_row *rows, size_t count, const char *usage, int argc, char **argv,
                 void *into);

/* The whole of `text` as a number; `suffixes`: K, M, G are allowed. Returns 0, or -1. */
int options_number(const char *text, int suffixes, int64_t *value_out);

#endif
