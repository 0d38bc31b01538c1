/* What the subcommands of the executable share. The tool is written on the public header; it
 * reaches into base/ and device/ only for what a program that uses onehop would take from
 * elsewhere: GPU memory, streams, events and graphs, and for what `info` reports. */
#ifndef OH_CLI_H
#define OH_CLI_H

#include "base/base.h"

#ifndef ONEHOP_COMMIT
#define ONEHOP_COMMIT "unknown"
#endif

/* Exit codes, part of the tool's interface (docs/cli.md). */
enum cli_exit {
    CLI_OK = 0,
    CLI_WRONG_DATA = 1,
    CLI_USAGE = 2,
    CLI_UNSUPPORTED = 3,
    CLI_LOST_PEER = 4,
    CLI_NOISE = 5,
};

/* argv[0] is the subcommand's name. Each returns an exit code. */
int cli_perf(int argc, char **argv);
int cli_check(int argc, char **argv);
int cli_tune(int argc, char **argv);
int cli_info(int argc, char **argv);
int cli_which(int argc, char **argv);
int cli_run(int argc, char **argv);

/* The exit code that tells of an error. */
int cli_exit_for(onehop_result result);

/* Name of the subcommand that runs. */
extern const char *cli_command;

/* "onehop <command>: <text>" on stderr; returns `code`. */
int cli_fail(const char *command, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Flushes standard output; why that failed first is kept for cli_close_output, since the stream
 * forgets it. */
void cli_flush(void);

/* Flushes and closes standard output. NULL, or why not all that was printed has arrived. */
const char *cli_close_output(void);

/* "major.minor.patch" of the library that is linked. */
const char *cli_version(void);

#endif
