/* Property: the base layer refuses by name what it does not understand (environment, config
 * structs), gives each thread its own last-error sentence, keeps errno, and sends the log where it
 * was told. */
/* labels: quick */
#include "harness.h"

#include "base/base.h"

#include <errno.h>
#include <limits.h>
#include <sys/resource.h>

static void results_have_names(void) {
    CHECK_TEXT("ONEHOP_OK", onehop_result_name(ONEHOP_OK));
    CHECK_TEXT("ONEHOP_ERR_TIMEOUT", onehop_result_name(ONEHOP_ERR_TIMEOUT));
    CHECK_TEXT("a peer did not arrive within the deadline", onehop_result_text(ONEHOP_ERR_TIMEOUT));
    CHECK_TEXT("unknown result", onehop_result_name((onehop_result)-999));
    CHECK_TEXT("unknown result", onehop_result_text((onehop_result)1));
    CHECK_INT(-301, ONEHOP_ERR_TIMEOUT);
}

static void enums_have_names(void) {
    CHECK_INT(ONEHOP_VERSION, onehop_version());
    CHECK_TEXT("1shot_push", onehop_algorithm_name(ONEHOP_1SHOT_PUSH));
    CHECK_TEXT("unknown", onehop_algorithm_name((onehop_algorithm)99));
    CHECK_TEXT("graph", onehop_source_name(ONEHOP_SOURCE_GRAPH));
    CHECK_TEXT("bfloat16", onehop_dtype_name(ONEHOP_BFLOAT16));
    CHECK_TEXT("unknown", onehop_dtype_name((onehop_dtype)0));
    CHECK_TEXT("sum", onehop_op_name(ONEHOP_SUM));
    CHECK_INT(4, onehop_dtype_bytes(ONEHOP_FLOAT32));
    CHECK_INT(2, onehop_dtype_bytes(ONEHOP_FLOAT16));
    CHECK_INT(0, onehop_dtype_bytes((onehop_dtype)17));
}

static void *other_thread(void *argument) {
    (void)argument;
    CHECK_TEXT("", onehop_last_error());
    oh_error(ONEHOP_ERR_RANK, "other");
    return NULL;
}

static void sentences(void) {
    pthread_t thread;
    errno = EBUSY;
    CHECK_RESULT(ONEHOP_ERR_NULL, oh_error(ONEHOP_ERR_NULL, "first %d", 1));
    CHECK_INT(EBUSY, errno);
    CHECK_INT(0, pthread_create(&thread, NULL, other_thread, NULL));
    pthread_join(thread, NULL);
    CHECK_TEXT("first 1", onehop_last_error());
    oh_error(ONEHOP_ERR_NULL, "rank 2: %s", onehop_last_error());
    CHECK_TEXT("rank 2: first 1", onehop_last_error());
    oh_error_errno(ONEHOP_ERR_SYSTEM, ENOENT, "opening");
    CHECK_TEXT("opening: No such file or directory", onehop_last_error());
    char longer[2000];
    memset(longer, 'x', sizeof longer - 1);
    longer[sizeof longer - 1] = 0;
    oh_error(ONEHOP_ERR_NULL, "%s", longer);
    CHECK_INT(511, strlen(onehop_last_error()));
}

static onehop_result read_timeout(const char *text, int64_t *value_out) {
    setenv("ONEHOP_TIMEOUT_MS", text, 1);
    return oh_env_integer(OH_ENV_TIMEOUT_MS, -5, INT64_MAX, 7, value_out);
}

static void integers(void) {
    static const char *const bad[] = {" 1",
                                      "1 ",
                                      "+1",
                                      "0x10",
                                      "1e3",
                                      "1.0",
                                      "-",
                                      "--1",
                                      "-6",
                                      "1s",
                                      "9223372036854775808",
                                      "99999999999999999999999"};
    int64_t value = 0;
    CHECK_OK(read_timeout("", &value));
    CHECK_INT(7, value);
    CHECK_OK(read_timeout("9223372036854775807", &value));
    CHECK_INT(INT64_MAX, value);
    CHECK_OK(read_timeout("-5", &value));
    CHECK_INT(-5, value);
    CHECK_OK(read_timeout("010", &value));
    CHECK_INT(10, value);
    for (size_t i = 0; i < OH_LENGTH(bad); i++) {
        CHECK_RESULT(ONEHOP_ERR_ENVIRONMENT, read_timeout(bad[i], &value));
        CHECK_CONTAINS("ONEHOP_TIMEOUT_MS", onehop_last_error());
        CHECK_CONTAINS(bad[i], onehop_last_error());
        CHECK_INT(10, value);
    }
    unsetenv("ONEHOP_TIMEOUT_MS");
}

static void words(void) {
    static const char *const devices[] = {"auto", "cuda", "host", NULL};
    int index = 9;
    CHECK_OK(oh_env_word(OH_ENV_DEVICE, devices, 0, &index));
    CHECK_INT(0, index);
    setenv("ONEHOP_DEVICE", "host", 1);
    CHECK_OK(oh_env_word(OH_ENV_DEVICE, devices, 0, &index));
    CHECK_INT(2, index);
    setenv("ONEHOP_DEVICE", "Host", 1);
    CHECK_RESULT(ONEHOP_ERR_ENVIRONMENT, oh_env_word(OH_ENV_DEVICE, devices, 0, &index));
    CHECK_TEXT("environment variable ONEHOP_DEVICE is \"Host\": expected one of auto, cuda, host",
               onehop_last_error());
    unsetenv("ONEHOP_DEVICE");
    for (int id = 0; id < OH_ENV_COUNT; id++) CHECK(oh_env_describe((oh_env)id)->name);
    CHECK_TEXT("ONEHOP_NAME", oh_env_describe(OH_ENV_NAME)->name);
}

typedef struct old_config {
    size_t struct_size;
    int a, b;
} old_config;

typedef struct new_config {
    size_t struct_size;
    int a, b;
    size_t c;
} new_config;

static void configs(void) {
    old_config old = {sizeof old, 1, 2}, old_copy;
    new_config new = {sizeof new, 3, 4, 0}, new_copy = {9, 9, 9, 9};
    CHECK_OK(oh_config_copy(&new_copy, sizeof new_copy, &old, "thing"));
    CHECK_INT(sizeof new_copy, new_copy.struct_size);
    CHECK_INT(2, new_copy.b);
    CHECK_INT(0, new_copy.c);
    CHECK_OK(oh_config_copy(&old_copy, sizeof old_copy, &new, "thing"));
    CHECK_INT(4, old_copy.b);
    new.c = 1;
    CHECK_RESULT(ONEHOP_ERR_STRUCT_SIZE, oh_config_copy(&old_copy, sizeof old_copy, &new, "thing"));
    CHECK_CONTAINS("thing", onehop_last_error());
    CHECK_RESULT(ONEHOP_ERR_NULL, oh_config_copy(&old_copy, sizeof old_copy, NULL, "thing"));
    static const size_t wrong[] = {0, 4, 8, 13, 65544, SIZE_MAX};
    for (size_t i = 0; i < OH_LENGTH(wrong); i++) {
        old.struct_size = wrong[i];
        CHECK_RESULT(ONEHOP_ERR_STRUCT_SIZE, oh_config_copy(&new, sizeof new, &old, "thing"));
    }
}

static void memlock(void) {
    char text[OH_MEMLOCK_BYTES];
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_MEMLOCK, &limit) == 0);
    if (limit.rlim_cur == RLIM_INFINITY) CHECK_TEXT("", oh_memlock_hint(text));
    limit.rlim_cur = 4096;
    CHECK(setrlimit(RLIMIT_MEMLOCK, &limit) == 0);
    CHECK_CONTAINS("RLIMIT_MEMLOCK (ulimit -l), is 4096 bytes", oh_memlock_hint(text));
}

typedef struct lines {
    int count;
    onehop_log_level level;
    char last[256];
} lines;

static void collect(void *user, onehop_log_level level, const char *line) {
    lines *all = user;
    all->count++;
    all->level = level;
    snprintf(all->last, sizeof all->last, "%s", line);
}

static void logs(void) {
    lines all = {0};
    onehop_set_log(collect, &all);
    setenv("ONEHOP_LOG", "info", 1);
    CHECK_OK(oh_log_check());
    oh_log(ONEHOP_LOG_DEBUG, "not made");
    CHECK_INT(0, all.count);
    oh_log(ONEHOP_LOG_INFO, "made %d", 1);
    CHECK_INT(1, all.count);
    CHECK_INT(ONEHOP_LOG_INFO, all.level);
    CHECK_TEXT("made 1", all.last);
    setenv("ONEHOP_LOG", "debug", 1);
    CHECK_OK(oh_log_check());
    oh_error(ONEHOP_ERR_RANK, "why");
    CHECK_TEXT("ONEHOP_ERR_RANK: why", all.last);
    setenv("ONEHOP_LOG", "loud", 1);
    all.count = 0;
    CHECK_RESULT(ONEHOP_ERR_ENVIRONMENT, oh_log_check());
    oh_log(ONEHOP_LOG_INFO, "the default is warn");
    onehop_group *groups[2];
    CHECK_RESULT(ONEHOP_ERR_ENVIRONMENT, onehop_group_open_local(2, groups));
    setenv("ONEHOP_LOG", "off", 1);
    CHECK_OK(oh_log_check());
    all.count = 0;
    oh_log(ONEHOP_LOG_ERROR, "off");
    CHECK_INT(0, all.count);
    unsetenv("ONEHOP_LOG");
    CHECK_OK(oh_log_check());
    onehop_set_log(NULL, NULL);
}

static void *log_much(void *argument) {
    (void)argument;
    for (int i = 0; i < 2000; i++) oh_log(ONEHOP_LOG_WARN, "line %d", i);
    return NULL;
}

static void count_line(void *user, onehop_log_level level, const char *line) {
    (void)level, (void)line;
    __atomic_fetch_add((int *)user, 1, __ATOMIC_RELAXED);
}

/* After set_log returns nobody is inside the old function: its counter may be on the stack. */
static void log_is_handed_over(void) {
    pthread_t threads[2];
    int counters[2] = {0, 0};
    onehop_set_log(count_line, &counters[0]);
    for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, log_much, NULL);
    for (int i = 0; i < 200; i++) {
        int now = i & 1;
        onehop_set_log(count_line, &counters[now]);
        int before = __atomic_load_n(&counters[!now], __ATOMIC_RELAXED);
        sleep_ms(0);
        CHECK_INT(before, __atomic_load_n(&counters[!now], __ATOMIC_RELAXED));
    }
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    onehop_set_log(NULL, NULL);
    CHECK_INT(4000, counters[0] + counters[1]);
}

static void helpers(void) {
    CHECK_INT((int64_t)0xaf63dc4c8601ec8cull, (int64_t)oh_hash(OH_HASH_START, "a", 1));
    uint64_t a[4] = {0}, b[4] = {0};
    CHECK_OK(oh_random(a, sizeof a));
    CHECK_OK(oh_random(b, sizeof b));
    CHECK(memcmp(a, b, sizeof a) != 0);
    uint64_t start = oh_clock_ns();
    oh_sleep_us(2000);
    CHECK(oh_clock_ns() - start >= 2000000);
    CHECK_INT(4096, oh_round_up(1, 4096));
    CHECK_INT(4096, oh_round_down(8191, 4096));
}

int main(void) {
    watchdog(60);
    results_have_names();
    enums_have_names();
    sentences();
    integers();
    words();
    configs();
    logs();
    log_is_handed_over();
    helpers();
    memlock();
    return 0;
}
