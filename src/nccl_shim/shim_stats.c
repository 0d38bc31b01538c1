/* Settings, counts, and the last error. */
#include "nccl_shim/shim.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ---- settings -------------------------------------------------------------------------------- */

/* From there on the tables that are compiled in begin to name NCCL (3 GPUs, eager). */
#define MAX_BYTES ((int64_t)16 << 20)

static oh_shim_settings settings;
static pthread_once_t settings_once = PTHREAD_ONCE_INIT;

static void read_blocking(void) {
    const char *text = oh_env_text(OH_ENV_NCCL_BLOCKING);
    settings.blocking_known = text && (!strcmp(text, "0") || !strcmp(text, "1"));
    settings.blocking = settings.blocking_known && *text == '1';
}

static void read_settings(void) {
    int64_t on = 1, groups = 1, stats = 0, max_bytes = MAX_BYTES;
    static char fault[256];
    onehop_result result = oh_env_integer(OH_ENV_NCCL, 0, 1, 1, &on);
    if (!result) result = oh_env_integer(OH_ENV_NCCL_GROUPS, 0, 1, 1, &groups);
    if (!result) result = oh_env_integer(OH_ENV_NCCL_STATS, 0, 1, 0, &stats);
    if (!result)
        result = oh_env_integer(OH_ENV_NCCL_MAX_BYTES, 0, (int64_t)1 << 40, MAX_BYTES, &max_bytes);
    if (result) {
        snprintf(fault, sizeof fault, "%s", onehop_last_error());
        settings.fault = fault;
        oh_log(ONEHOP_LOG_WARN, "NCCL shim: %s; all goes to NCCL", fault);
    }
    const char *device = oh_env_text(OH_ENV_DEVICE);
    settings.host = device && !strcmp(device, "host");
    settings.on = on && !result;
    settings.groups = groups;
    settings.stats = stats;
    settings.max_bytes = (uint64_t)max_bytes;
    read_blocking();
}

const oh_shim_settings *oh_shim_settings_get(void) {
    pthread_once(&settings_once, read_settings);
    return &settings;
}

/* ---- counts ---------------------------------------------------------------------------------- */

/* Relaxed: they are read at the end of the process. */
static uint64_t taken[ONEHOP_ALL_GATHER + 1], forwarded[OH_SHIM_REASON_COUNT], comms[2];

void oh_shim_count_taken(onehop_collective collective) {
    __atomic_fetch_add(&taken[collective], 1, __ATOMIC_RELAXED);
}
void oh_shim_count_forwarded(oh_shim_reason reason) {
    __atomic_fetch_add(&forwarded[reason], 1, __ATOMIC_RELAXED);
}
void oh_shim_count_comm(bool is_taken) {
    __atomic_fetch_add(&comms[is_taken], 1, __ATOMIC_RELAXED);
}

static void append(char *text, size_t size, const char *name, uint64_t count) {
    const size_t used = strlen(text);
    if (count)
        snprintf(text + used, size - used, "%s%s %llu", used ? ", " : "", name,
                 (unsigned long long)count);
}

static uint64_t sum_of(const uint64_t *counts, size_t n) {
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++) sum += counts[i];
    return sum;
}

/* In a forked child the counts are the parent's until it makes communicators of its own. */
static pid_t process;
__attribute__((constructor)) static void note_process(void) {
    process = getpid();
}

__attribute__((destructor)) static void print_counts(void) {
    static const char *const reasons[] = {
#define OH_SHIM_REASON(name, text) text,
        OH_SHIM_REASONS(OH_SHIM_REASON)
#undef OH_SHIM_REASON
    };
    char ours[160] = "", theirs[320] = "";
    const uint64_t all = sum_of(taken, OH_LENGTH(taken)) + sum_of(forwarded, OH_LENGTH(forwarded)) +
                         comms[0] + comms[1];
    if (!all || process != getpid() || !oh_shim_settings_get()->stats) return;
    for (int c = 0; c <= ONEHOP_ALL_GATHER; c++)
        append(ours, sizeof ours, onehop_collective_name((onehop_collective)c), taken[c]);
    for (int r = 0; r < OH_SHIM_REASON_COUNT; r++)
        append(theirs, sizeof theirs, reasons[r], forwarded[r]);
    fprintf(
        stderr,
        "onehop NCCL shim, process %d: communicators %llu taken, %llu not; calls %llu taken%s%s%s,"
        " %llu to NCCL%s%s%s\n",
        (int)getpid(), (unsigned long long)comms[1], (unsigned long long)comms[0],
        (unsigned long long)sum_of(taken, OH_LENGTH(taken)), *ours ? " (" : "", ours,
        *ours ? ")" : "", (unsigned long long)sum_of(forwarded, OH_LENGTH(forwarded)),
        *theirs ? " (" : "", theirs, *theirs ? ")" : "");
}

/* ---- errors ---------------------------------------------------------------------------------- */

/* As NCCL's: of the process, whichever thread failed. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
OH_RESET_IN_CHILD(lock)
static char sentence[512];
static bool is_ours;

static void keep_sentence(void) {
    pthread_mutex_lock(&lock);
    snprintf(sentence, sizeof sentence, "onehop: %s", onehop_last_error());
    pthread_mutex_unlock(&lock);
    __atomic_store_n(&is_ours, true, __ATOMIC_RELEASE);
}

int oh_shim_fail(onehop_result result) {
    if (!result) return OH_NCCL_SUCCESS;
    keep_sentence();
    if (result > -200) return OH_NCCL_ARGUMENT;
    if (result > -300) return result == ONEHOP_ERR_DRIVER ? OH_NCCL_CUDA : OH_NCCL_SYSTEM;
    if (result > -400) return OH_NCCL_REMOTE;
    return OH_NCCL_INTERNAL;
}

const char *oh_shim_last_error(void) {
    static __thread char copy[sizeof sentence];
    if (!__atomic_load_n(&is_ours, __ATOMIC_ACQUIRE)) return NULL;
    pthread_mutex_lock(&lock);
    memcpy(copy, sentence, sizeof copy);
    pthread_mutex_unlock(&lock);
    return copy;
}

int oh_shim_answered(int result) {
    if (result) __atomic_store_n(&is_ours, false, __ATOMIC_RELAXED);
    return result;
}
