/* Helpers of the JSON files. */
#include "cli/json.h"
#include "cli/backend.h"

#include <errno.h>
#include <libgen.h>
#include <string.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

void json_text(FILE *file, const char *key, const char *value, const char *end) {
    fprintf(file, "  \"%s\": \"", key);
    for (const unsigned char *at = (const unsigned char *)value; *at; at++) {
        if (*at == '"' || *at == '\\')
            fprintf(file, "\\%c", *at);
        else if (*at < 0x20)
            fprintf(file, "\\u%04x", *at);
        else
            fputc(*at, file);
    }
    fprintf(file, "\"%s\n", end);
}

void json_number(FILE *file, const char *key, double value, const char *end) {
    if (value >= 0 && value < 1e300)
        fprintf(file, "\"%s\": %.6g%s", key, value, end);
    else
        fprintf(file, "\"%s\": null%s", key, end);
}

void json_machine(FILE *file, const char *driver, const char *clocks) {
    struct utsname name;
    char line[256];
    time_t now = time(NULL);
    struct tm broken_down;
    uname(&name);
    snprintf(line, sizeof line, "%.64s, %.64s %.64s", name.nodename, name.sysname, name.release);
    json_text(file, "machine", line, ",");
    backend_host.describe(NULL, line, sizeof line);
    json_text(file, "cpu", line, ",");
    json_text(file, "driver", driver, ",");
    json_text(file, "clocks", clocks, ",");
    strftime(line, sizeof line, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &broken_down));
    json_text(file, "time", line, ",");
    json_text(file, "version", cli_version(), ",");
    json_text(file, "commit", ONEHOP_COMMIT, ",");
}

int json_refuse_path(const char *path) {
    char copy[4096];
    if (!path) return CLI_OK;
    snprintf(copy, sizeof copy, "%s", path);
    if (path[0] && access(dirname(copy), W_OK) == 0) return CLI_OK;
    return cli_fail(cli_command, CLI_USAGE, "-J '%s': its directory cannot be written", path);
}

onehop_result json_write(const char *path, void (*body)(FILE *, void *), void *user) {
    char temporary[4096];
    int length = snprintf(temporary, sizeof temporary, "%s.%d", path, (int)getpid());
    if (length >= (int)sizeof temporary)
        return oh_error(ONEHOP_ERR_SYSTEM, "%s: the path is too long", path);
    FILE *file = fopen(temporary, "we");
    if (!file) return oh_error_errno(ONEHOP_ERR_SYSTEM, errno, "%s", path);
    body(file, user);
    bool failed = ferror(file) != 0;
    failed |= fclose(file) != 0;
    if (!failed && rename(temporary, path) == 0) return ONEHOP_OK;
    int cause = errno;
    unlink(temporary);
    return oh_error_errno(ONEHOP_ERR_SYSTEM, cause, "%s could not be written", path);
}
