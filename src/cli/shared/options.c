/* Table-driven flags. Own code instead of getopt_long because a refusal must name flag and value,
 * and because abbreviations are not wanted. */
#include "cli/shared/options.h"
#include "cli/shared/cli.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

typedef enum options_result {
    OPTIONS_OK,
    OPTIONS_HELP,
    OPTIONS_REFUSED
} options_result;

static int suffix_shift(char suffix) {
    switch (suffix) {
    case 'k':
    case 'K':
        return 10;
    case 'm':
    case 'M':
        return 20;
    case 'g':
    case 'G':
        return 30;
    default:
        return 0;
    }
}

int options_number(const char *text, int suffixes, int64_t *value_out) {
    int64_t value = 0;
    const char *at = text;
    if (!isdigit((unsigned char)*at)) return -1;
    for (; isdigit((unsigned char)*at); at++)
        if (__builtin_mul_overflow(value, 10, &value) ||
            __builtin_add_overflow(value, *at - '0', &value))
            return -1;
    int shift = suffixes ? suffix_shift(*at) : 0;
    if (shift) {
        if (__builtin_mul_overflow(value, (int64_t)1 << shift, &value)) return -1;
        at++;
    }
    if (*at) return -1;
    *value_out = value;
    return 0;
}

/* How the user spelled a flag, for messages. */
typedef struct spelling {
    const char *text;
    int length;
} spelling;

static options_result refuse_number(const char *command, const option_row *row, spelling flag,
                                    const char *value) {
    cli_fail(command, 0, "%.*s '%s': expected an integer from %lld to %lld%s", flag.length,
             flag.text, value, (long long)row->low, (long long)row->high,
             row->kind == OPTION_SIZE ? ", with an optional K, M or G" : "");
    return OPTIONS_REFUSED;
}

static options_result refuse_word(const char *command, const option_row *row, spelling flag,
                                  const char *value) {
    char list[512];
    size_t used = 0;
    for (size_t i = 0; row->words[i] && used < sizeof list - 1; i++)
        used +=
            (size_t)snprintf(list + used, sizeof list - used, "%s%s", i ? ", " : "", row->words[i]);
    cli_fail(command, 0, "%.*s '%s': expected one of %s", flag.length, flag.text, value, list);
    return OPTIONS_REFUSED;
}

static options_result store_word(const char *command, const option_row *row, spelling flag,
                                 const char *value, int64_t *place) {
    for (int64_t i = 0; row->words[i]; i++) {
        if (strcmp(row->words[i], value) != 0) continue;
        *place = row->high > 0 ? i % row->high : i;
        return OPTIONS_OK;
    }
    return refuse_word(command, row, flag, value);
}

static options_result store_words(const char *command, const option_row *row, spelling flag,
                                  const char *value, int64_t *place) {
    int64_t bits = 0, index;
    for (const char *at = value;;) {
        char word[64];
        size_t length = strcspn(at, ",");
        snprintf(word, sizeof word, "%.*s", (int)length, at);
        options_result result = store_word(command, row, flag, word, &index);
        if (result != OPTIONS_OK) return result;
        bits |= (int64_t)1 << index;
        if (!at[length]) break;
        at += length + 1;
    }
    *place = bits;
    return OPTIONS_OK;
}

static options_result store(const char *command, const option_row *row, spelling flag,
                            const char *value, void *into) {
    void *field = (char *)into + row->offset;
    int64_t number = 1;
    switch (row->kind) {
    case OPTION_TEXT:
        *(const char **)field = value;
        return OPTIONS_OK;
    case OPTION_WORD:
        return store_word(command, row, flag, value, field);
    case OPTION_WORDS:
        return store_words(command, row, flag, value, field);
    case OPTION_SWITCH:
        break;
    case OPTION_INTEGER:
    case OPTION_SIZE:
        if (options_number(value, row->kind == OPTION_SIZE, &number) || number < row->low ||
            number > row->high)
            return refuse_number(command, row, flag, value);
        break;
    }
    *(int64_t *)field = number;
    return OPTIONS_OK;
}

/* Splits an argument into its row, its spelling and the value that hangs on it ("-b1K",
 * "--name=1K"). */
static const option_row *match(const option_row *rows, size_t count, const char *argument,
                               spelling *flag_out, const char **value_out) {
    bool named = argument[1] == '-';
    const char *name = argument + 2;
    size_t length = named ? strcspn(name, "=") : 0;
    *flag_out = (spelling){argument, named ? (int)length + 2 : 2};
    *value_out = NULL;
    for (size_t i = 0; i < count; i++) {
        const option_row *row = &rows[i];
        if (named && (strlen(row->name) != length || strncmp(row->name, name, length) != 0))
            continue;
        if (!named && (!row->letter || row->letter != argument[1])) continue;
        if (named && name[length] == '=') *value_out = name + length + 1;
        if (!named && argument[2]) *value_out = argument + 2;
        return row;
    }
    return NULL;
}

static options_result parse_one(const option_row *rows, size_t count, char **argv, int *index,
                                void *into) {
    const char *command = argv[0], *argument = argv[*index], *value;
    spelling flag;
    if (strcmp(argument, "-h") == 0 || strcmp(argument, "--help") == 0) return OPTIONS_HELP;
    const option_row *row = NULL;
    if (argument[0] == '-' && argument[1]) row = match(rows, count, argument, &flag, &value);
    if (!row) {
        cli_fail(command, 0, "unknown %s '%s'; see onehop %s --help",
                 argument[0] == '-' ? "flag" : "argument", argument, command);
        return OPTIONS_REFUSED;
    }
    if (row->kind == OPTION_SWITCH) {
        if (!value) return store(command, row, flag, NULL, into);
        cli_fail(command, 0, "'%s': %.*s takes no value", argument, flag.length, flag.text);
        return OPTIONS_REFUSED;
    }
    if (!value) value = argv[*index + 1] ? argv[++*index] : NULL;
    if (value) return store(command, row, flag, value, into);
    cli_fail(command, 0, "%.*s needs a value (%s)", flag.length, flag.text, row->value);
    return OPTIONS_REFUSED;
}

static options_result parse(const option_row *rows, size_t count, int argc, char **argv,
                            void *into) {
    for (int i = 1; i < argc; i++) {
        options_result result = parse_one(rows, count, argv, &i, into);
        if (result != OPTIONS_OK) return result;
    }
    return OPTIONS_OK;
}

static void print_help(const option_row *rows, size_t count) {
    for (size_t i = 0; i < count; i++) {
        const option_row *row = &rows[i];
        char flag[64], letter[8] = "    ";
        if (!row->help) continue;
        if (row->letter) snprintf(letter, sizeof letter, "-%c, ", row->letter);
        snprintf(flag, sizeof flag, "%s--%s%s%s", letter, row->name, row->value ? " " : "",
                 row->value ? row->value : "");
        printf("  %-32s %s\n", flag, row->help);
    }
}

int options_read(const option_row *rows, size_t count, const char *usage, int argc, char **argv,
                 void *into) {
    const options_result result = parse(rows, count, argc, argv, into);
    if (result == OPTIONS_OK) return OPTIONS_GO_ON;
    if (result == OPTIONS_REFUSED) return CLI_USAGE;
    printf("usage: onehop %s", usage); /* which ends with an empty line */
    print_help(rows, count);
    return CLI_OK;
}
