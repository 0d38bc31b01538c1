/* Helpers of the JSON files. */
#include "cli/shared/json.h"
#include "cli/shared/backend.h"

#include <string.h>
#include <sys/utsname.h>
#include <time.h>

/* Bytes of the UTF-8 character that begins at `at`, or 0: JSON holds no other text. */
static int utf8_length(const unsigned char *at) {
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    const int length = *at < 0x80       ? 1
                       : *at >> 5 == 6  ? 2
                       : *at >> 4 == 14 ? 3
                       : *at >> 3 == 30 ? 4
                                        : 0;
    uint32_t point = length > 1 ? *at & (0x7Fu >> length) : *at;
    for (int i = 1; i < length; i++) {
        if (at[i] >> 6 != 2) return 0;
        point = point << 6 | (at[i] & 0x3F);
    }
    const bool surrogate = point >= 0xD800 && point < 0xE000;
    return length && point >= least[length] && point <= 0x10FFFF && !surrogate ? length : 0;
}

void json_string(FILE *file, const char *value) {
    fputc('"', file);
    for (const unsigned char *at = (const unsigned char *)value; *at;) {
        const int length = utf8_length(at);
        if (length == 0)
            fprintf(file, "\\ufffd");
        else if (*at == '"' || *at == '\\')
            fprintf(file, "\\%c", *at);
        else if (*at < 0x20)
            fprintf(file, "\\u%04x", *at);
        else
            fwrite(at, 1, (size_t)length, file);
        at += length ? length : 1;
    }
    fputc('"', file);
}

void json_text(FILE *file, const char *key, const char *value, const char *end) {
    fprintf(file, "  \"%s\": ", key);
    json_string(file, value);
    fprintf(file, "%s\n", end);
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
