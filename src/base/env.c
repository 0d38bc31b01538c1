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

/* Foreign switches are not ours to judge: what is not clearly harmless forbids. */
const char *oh_multicast_refusal(void) {
    const char *on = oh_env_text(OH_ENV_MULTICAST), *nvls = oh_env_text(OH_ENV_NVLS),
               *off = oh_env_text(OH_ENV_NO_MULTICAST);
    if (!on || strcmp(on, "1")) return "ONEHOP_MULTICAST is not 1";
    if (nvls && nvls[strspn(nvls, " +-0")] == '\0') return "NCCL_NVLS_ENABLE is 0";
    if (off && strcmp(off, "0")) return "TORCH_SYMM_MEM_DISABLE_MULTICAST is set";
    return NULL;
}
