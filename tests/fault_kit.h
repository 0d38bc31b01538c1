/* What the tests of misuse and faults share: small contexts, calls whose right result is known,
 * what each rank saw of a failure. Inputs are small integers, so that float sums are exact; they
 * name rank, call and element. */
#ifndef OH_FAULT_KIT_H
#define OH_FAULT_KIT_H

#include "harness.h"

#define KIT_TIMEOUT_MS  1000u  /* deadline of calls where a test waits for it */
#define KIT_PATIENCE_MS 60000u /* where the deadline must not come */

/* Small memory: a slot of 4 KiB, halves of a pull buffer of 64 KiB, so that chunks are many and
 * set-up is fast. */
static inline onehop_config kit_config(uint32_t timeout_ms) {
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    config.device.kind = ONEHOP_DEVICE_HOST;
    config.push_bytes = 4096;
    config.pull_bytes = 65536;
    config.timeout_ms = timeout_ms;
    config.init_timeout_ms = 20000;
    return config;
}

/* Names of groups are shared by all programs of a user: ours carry the pid of the test. */
static pid_t kit_session;
__attribute__((constructor)) static void kit_begin(void) {
    kit_session = getpid();
}

typedef struct kit_name {
    char text[128];
} kit_name;

static inline kit_name kit_own_name(const char *name) {
    kit_name own;
    snprintf(own.text, sizeof own.text, "%s, test %d", name, (int)kit_session);
    return own;
}

static inline onehop_context *kit_open(int rank, int world_size, const char *name,
                                       uint32_t timeout_ms) {
    onehop_config config = kit_config(timeout_ms);
    onehop_context *context = NULL;
    const kit_name own = kit_own_name(name ? name : "");
    config.rank = rank;
    config.world_size = world_size;
    config.name = name ? own.text : NULL;
    CHECK_OK(onehop_create(&config, &context));
    return context;
}

/* On a group that the caller keeps: threads. */
static inline onehop_context *kit_open_on(onehop_group *group, uint32_t timeout_ms) {
    onehop_config config = kit_config(timeout_ms);
    onehop_context *context = NULL;
    config.group = group;
    CHECK_OK(onehop_create(&config, &context));
    return context;
}

/* ---- calls ----------------------------------------------------------------------------------- */

/* The ways of the host device; sizes from which the table chooses each. */
typedef struct kit_way {
    const char *name;
    size_t count; /* float32 */
    onehop_algorithm forced;
} kit_way;

#define KIT_WAYS 6
#define KIT_MAX  80000 /* largest count */

static const kit_way kit_ways[KIT_WAYS] = {
    {"auto small", 256, ONEHOP_ALGORITHM_AUTO},
    {"auto large", 80000, ONEHOP_ALGORITHM_AUTO}, /* 312 KiB: many chunks */
    {"1shot_push", 3000, ONEHOP_1SHOT_PUSH},      /* three slots: chunks again */
    {"1shot_pull", 30000, ONEHOP_1SHOT_PULL},     /* two halves of the pull buffer: four chunks */
    {"2shot_pull", 30000, ONEHOP_2SHOT_PULL},     /* two chunks */
    {"2shot_push", 9000, ONEHOP_2SHOT_PUSH},      /* chunks */
};

static inline float kit_value(int rank, unsigned call, size_t i) {
    return (float)((rank + 1) * (1 + (int)(call % 251) + (int)(i % 509)));
}

static inline void kit_fill(float *in, size_t count, int rank, unsigned call) {
    for (size_t i = 0; i < count; i++) in[i] = kit_value(rank, call, i);
}

static inline void kit_check(const float *out, size_t count, int world_size, unsigned call) {
    const float ranks = (float)(world_size * (world_size + 1) / 2);
    for (size_t i = 0; i < count; i++) {
        const float want = ranks * kit_value(0, call, i);
        if (out[i] != want)
            FAIL("call %u, element %zu of %zu: expected %g, found %g", call, i, count, (double)want,
                 (double)out[i]);
    }
}

static inline onehop_result kit_run(onehop_context *context, const kit_way *way, const float *in,
                                    float *out, onehop_stream stream) {
    onehop_call call = ONEHOP_CONFIG_INIT(onehop_call);
    call.algorithm = way->forced;
    return onehop_all_reduce(context, in, out, way->count, ONEHOP_FLOAT32, ONEHOP_SUM, &call,
                             stream);
}

typedef struct kit_buffers {
    float in[KIT_MAX], out[KIT_MAX];
} kit_buffers;

static inline kit_buffers *kit_buffers_make(void) {
    kit_buffers *buffers = malloc(sizeof *buffers);
    CHECK(buffers != NULL);
    return buffers;
}

/* One checked call. */
static inline onehop_result kit_call(onehop_context *context, const kit_way *way,
                                     kit_buffers *buffers, unsigned call) {
    kit_fill(buffers->in, way->count, onehop_rank(context), call);
    memset(buffers->out, 0xEE, way->count * sizeof(float));
    onehop_result result = kit_run(context, way, buffers->in, buffers->out, NULL);
    if (!result) kit_check(buffers->out, way->count, onehop_world_size(context), call);
    return result;
}

static inline void kit_good_calls(onehop_context *context, kit_buffers *buffers, unsigned from,
                                  unsigned count) {
    for (unsigned i = from; i < from + count; i++)
        CHECK_OK(kit_call(context, &kit_ways[i % KIT_WAYS], buffers, i));
}

/* ---- what a rank saw ------------------------------------------------------------------------- */

typedef struct kit_sight {
    int seen; /* atomic; set last */
    onehop_result result;
    int peer;
    double at;
    char text[512];
} kit_sight;

/* To be called right after the failing call. */
static inline void kit_note(onehop_context *context, onehop_result result, kit_sight *sight) {
    onehop_failure failure;
    sight->at = seconds_now();
    snprintf(sight->text, sizeof sight->text, "%s", onehop_last_error());
    sight->result = result;
    if (onehop_status(context, &failure) != result)
        FAIL("status differs from the call: %s", onehop_last_error());
    CHECK_INT(result, failure.result);
    sight->peer = failure.peer;
    __atomic_store_n(&sight->seen, 1, __ATOMIC_RELEASE);
}

static inline void kit_expect(const kit_sight *sight, onehop_result result, int peer,
                              const char *where) {
    char rank[16];
    snprintf(rank, sizeof rank, "rank %d", peer);
    if (!__atomic_load_n(&sight->seen, __ATOMIC_ACQUIRE))
        FAIL("%s: a rank has seen no error", where);
    if (sight->result != result || sight->peer != peer || (peer >= 0 && !strstr(sight->text, rank)))
        FAIL("%s: expected %s naming rank %d, found %s naming %d: %s", where,
             onehop_result_name(result), peer, onehop_result_name(sight->result), sight->peer,
             sight->text);
}

/* How late a sleeper may wake on this machine just now: added to limits, so that a loaded machine
 * fails no test. */
static inline double kit_slack(void) {
    double worst = 0;
    for (int i = 0; i < 20; i++) {
        double begun = seconds_now();
        sleep_ms(1);
        double late = seconds_now() - begun - 0.001;
        if (late > worst) worst = late;
    }
    return 10 * worst + (HARNESS_SANITIZED ? 1.0 : 0.0);
}

#endif
