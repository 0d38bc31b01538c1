/* Helpers of the JSON files. */
#include "cli/shared/json.h"
#include "cli/shared/backend.h"

#include <string.h>
#include <sys/utsname.h>
#include <time.h>

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
