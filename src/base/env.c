/* Environment variables: the only getenv of the library, and strict readers on top of it. What is
 * not understood is refused by name: a misspelt setting that is silently ignored costs a day. */
#include "base/base.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const oh_env_row rows[OH_ENV_COUNT] = {
#define OH_ENV_ROW(id, name, type, default_text, meaning) {name, type, default_text, meaning},
    OH_ENV_TABLE(OH_ENV_ROW)
#undef OH_ENV_ROW
};

const oh_env_row *oh_env_describe(oh_env id) {
    return &rows[id];
}

const char *oh_env_text(oh_env id) {
    const char *text = getenv(rows[id].name);
    return text && *text ? text : NULL;
}

/* Decimal digits with an optional minus, nothing else; false also for what int64_t cannot hold. */
static bool parse_decimal(const char *text, int64_t *value_out) {
    bool minus = *text == '-';
    const char *digit = text + minus;
    if (!*digit) return false;
    int64_t value = 0;
    for (; *digit; digit++) {
        if (*digit < '0' || *digit > '9') return false;
        int step = minus ? '0' - *digit : *digit - '0';
        if (__builtin_mul_overflow(value, 10, &value) ||
            __builtin_add_overflow(value, step, &value))
            return false;
    }
    *value_out = value;
    return true;
}

onehop_result oh_env_integer(oh_env id, int64_t low, int64_t high, int64_t fallback,
                             int64_t *value_out) {
    const char *text = oh_env_text(id);
    int64_t value = fallback;
    if (text && (!parse_decimal(text, &value) || value < low || value > high))
        return oh_error(
            ONEHOP_ERR_ENVIRONMENT,
            "environment variable %s is \"%.64s\": expected an integer from %lld to %lld",
            rows[id].name, text, (long long)low, (long long)high);
    *value_out = value;
    return ONEHOP_OK;
}

onehop_result oh_env_word(oh_env id, const char *const *words, int fallback, int *index_out) {
    const char *text = oh_env_text(id);
    if (!text) {
        *index_out = fallback;
        return ONEHOP_OK;
    }
    char list[160] = "";
    for (int i = 0; words[i]; i++) {
        if (!strcmp(text, words[i])) {
            *index_out = i;
            return ONEHOP_OK;
        }
        size_t used = strlen(list);
        snprintf(list + used, sizeof list - used, "%s%s", i ? ", " : "", words[i]);
    }
    return oh_error(ONEHOP_ERR_ENVIRONMENT,
                    "environment variable %s is \"%.64s\": expected one of %s", rows[id].name, text,
                    list);
}

/* The ranges and words of whoever reads the variable. Paths are judged where they are opened, LOG
 * by oh_log_check, and what a launcher sets only where it is needed. */
onehop_result oh_env_check(void) {
    static const char *const devices[] = {"auto", "cuda", "host", NULL};
    static const char *const isas[] = {"auto", "baseline", "avx2", "avx512", "neon", NULL};
    static const char *const switches[] = {"off", "on", NULL};
    static const struct {
        oh_env id;
        int64_t low, high;
        const char *const *words;
    } rules[] = {
        {OH_ENV_TIMEOUT_MS, 1, INT32_MAX, NULL},
        {OH_ENV_INIT_TIMEOUT_MS, 1, (int64_t)1 << 31, NULL},
        {OH_ENV_DEVICE, 0, 0, devices},
        {OH_ENV_ISA, 0, 0, isas},
        {OH_ENV_NCCL, 0, 1, NULL},
        {OH_ENV_NCCL_GROUPS, 0, 1, NULL},
        {OH_ENV_NCCL_MAX_BYTES, 0, (int64_t)1 << 40, NULL},
        {OH_ENV_NCCL_STATS, 0, 1, NULL},
        {OH_ENV_MULTICAST, 0, 1, NULL},
        {OH_ENV_JIT, 0, 0, switches},
        {OH_ENV_JIT_ARCH, 80, 999, NULL},
    };
    onehop_result result = ONEHOP_OK;
    for (size_t i = 0; i < OH_LENGTH(rules) && !result; i++) {
        int word;
        int64_t number;
        result = rules[i].words
                     ? oh_env_word(rules[i].id, rules[i].words, 0, &word)
                     : oh_env_integer(rules[i].id, rules[i].low, rules[i].high, 0, &number);
    }
    return result;
}

/* Foreign switches are not ours to judge as errors: what their owners do not document as allowing
 * multicast forbids it. (NCCL itself reads a word as 0.) */
const char *oh_multicast_refusal(void) {
    const char *on = oh_env_text(OH_ENV_MULTICAST), *nvls = oh_env_text(OH_ENV_NVLS),
               *off = oh_env_text(OH_ENV_NO_MULTICAST);
    if (!on || strcmp(on, "1")) return "ONEHOP_MULTICAST is not 1";
    if (nvls && strcmp(nvls, "1") && strcmp(nvls, "2"))
        return "NCCL_NVLS_ENABLE is neither 1 nor 2";
    if (off && strcmp(off, "0")) return "TORCH_SYMM_MEM_DISABLE_MULTICAST is not 0";
    return NULL;
}
