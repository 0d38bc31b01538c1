/* The log: one line at a time to the caller's function or to stderr.
 *
 * A read-write lock rather than a mutex: lines of several threads may be in the function at once,
 * and onehop_set_log, the writer, returns only when nobody is inside the old one. */
#include "base/base.h"

#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define OH_LINE_BYTES   1024
#define OH_LEVEL_UNREAD (-1)

static const char *const level_words[] = {"off", "error", "warn", "info", "debug", NULL};

static pthread_rwlock_t log_lock = PTHREAD_RWLOCK_INITIALIZER;
static void log_in_child(void) {
    pthread_rwlock_init(&log_lock, NULL);
}
__attribute__((constructor)) static void log_at_start(void) {
    oh_process_add_reset(log_in_child);
}

static onehop_log_fn log_function;
static void *log_user;
static atomic_int log_level = OH_LEVEL_UNREAD;

void onehop_set_log(onehop_log_fn log, void *user) {
    pthread_rwlock_wrlock(&log_lock);
    log_function = log;
    log_user = user;
    pthread_rwlock_unlock(&log_lock);
}

onehop_result oh_log_check(void) {
    int level = ONEHOP_LOG_WARN;
    onehop_result result = oh_env_word(OH_ENV_LOG, level_words, level, &level);
    atomic_store_explicit(&log_level, level, memory_order_relaxed); /* a number, orders nothing */
    return result;
}

/* The level in force. Must not report an error: it runs inside oh_error. */
static int level_now(void) {
    int level = atomic_load_explicit(&log_level, memory_order_relaxed);
    if (level != OH_LEVEL_UNREAD) return level;
    level = ONEHOP_LOG_WARN;
    const char *text = oh_env_text(OH_ENV_LOG);
    for (int i = 0; text && level_words[i]; i++)
        if (!strcmp(text, level_words[i])) level = i;
    atomic_store_explicit(&log_level, level, memory_order_relaxed);
    return level;
}

static void emit(onehop_log_level level, const char *line) {
    OH_NO_CANCEL;
    pthread_rwlock_rdlock(&log_lock);
    if (log_function)
        log_function(log_user, level, line);
    else /* one call, so that lines of several processes do not mix */
        dprintf(STDERR_FILENO, "onehop: %s: %s\n", level_words[level], line);
    pthread_rwlock_unlock(&log_lock);
}

bool oh_log_wants(onehop_log_level level) {
    return (int)level <= level_now();
}

void oh_log(onehop_log_level level, const char *format, ...) {
    if (!oh_log_wants(level)) return;
    int saved = errno;
    char line[OH_LINE_BYTES] = "";
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    emit(level, line);
    errno = saved;
}
