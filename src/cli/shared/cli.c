/* See cli.h. */
#include "cli/shared/cli.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

const char *cli_command = "";

int cli_fail(const char *command, int code, const char *format, ...) {
    va_list args;
    char text[1024];
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    cli_flush();
    fprintf(stderr, "onehop %s: %s\n", command, text);
    return code;
}

static int output_errno;

void cli_flush(void) {
    errno = 0;
    if (fflush(stdout) != 0 && !output_errno) output_errno = errno;
}

const char *cli_close_output(void) {
    cli_flush();
    if (output_errno || ferror(stdout)) return strerror(output_errno ? output_errno : EIO);
    return close(STDOUT_FILENO) == 0 || errno == EBADF ? NULL : strerror(errno);
}

const char *cli_version(void) {
    static char text[32];
    int version = onehop_version();
    snprintf(text, sizeof text, "%d.%d.%d", version / 10000, version / 100 % 100, version % 100);
    return text;
}

int cli_exit_for(onehop_result result) {
    switch (result) {
    case ONEHOP_OK:
        return CLI_OK;
    case ONEHOP_ERR_ENVIRONMENT:
    case ONEHOP_ERR_DUPLICATE_RANK:
        return CLI_USAGE;
    case ONEHOP_ERR_MISSING_PEER:
    case ONEHOP_ERR_PEER_FAILED:
        return CLI_LOST_PEER;
    default:
        return result <= -300 && result > -400 ? CLI_LOST_PEER : CLI_UNSUPPORTED;
    }
}
