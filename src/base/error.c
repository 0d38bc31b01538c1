/* Results as words, and the last-error sentence of each thread.
 *
 * The sentence is formatted into a scratch buffer first, so that an error may quote the one
 * before. */
#include "base/base.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define OH_SENTENCE_BYTES 512

static _Thread_local char sentence[OH_SENTENCE_BYTES];

const char *onehop_result_name(onehop_result result) {
    switch ((int)result) {
#define OH_NAME_CASE(name, value, text)                                                            \
    case value:                                                                                    \
        return #name;
        ONEHOP_RESULTS(OH_NAME_CASE)
#undef OH_NAME_CASE
    default:
        return "unknown result";
    }
}

const char *onehop_result_text(onehop_result result) {
    switch ((int)result) {
#define OH_TEXT_CASE(name, value, text)                                                            \
    case value:                                                                                    \
        return text;
        ONEHOP_RESULTS(OH_TEXT_CASE)
#undef OH_TEXT_CASE
    default:
        return "unknown result";
    }
}

const char *onehop_last_error(void) {
    return sentence;
}

static onehop_result keep(onehop_result result, const char *text) {
    memcpy(sentence, text, OH_SENTENCE_BYTES);
    oh_log(ONEHOP_LOG_DEBUG, "%s: %s", onehop_result_name(result), sentence);
    return result;
}

onehop_result oh_error(onehop_result result, const char *format, ...) {
    int saved = errno;
    char scratch[OH_SENTENCE_BYTES] = "";
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(scratch, sizeof scratch, format, arguments);
    va_end(arguments);
    keep(result, scratch);
    errno = saved;
    return result;
}

/* strerror is not safe with threads, and of strerror_r there are two: glibc's, which may or may not
 * use the buffer, and that of POSIX. */
__attribute__((unused)) static const char *reason_of_gnu(const char *text, const char *buffer) {
    (void)buffer;
    return text;
}

__attribute__((unused)) static const char *reason_of_posix(int failed, const char *buffer) {
    return failed ? "unknown error" : buffer;
}

#define OH_REASON(value, buffer)                                                                   \
    _Generic(strerror_r(value, buffer, sizeof buffer),                                             \
        int: reason_of_posix,                                                                      \
        default: reason_of_gnu)(strerror_r(value, buffer, sizeof buffer), buffer)

onehop_result oh_error_errno(onehop_result result, int errno_value, const char *format, ...) {
    int saved = errno;
    char scratch[OH_SENTENCE_BYTES] = "";
    char reason[96];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(scratch, sizeof scratch, format, arguments);
    va_end(arguments);
    size_t used = strlen(scratch);
    snprintf(scratch + used, sizeof scratch - used, ": %s", OH_REASON(errno_value, reason));
    keep(result, scratch);
    errno = saved;
    return result;
}
