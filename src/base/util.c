/* Small helpers that belong to no layer: versioned config structs, a hash, random bytes. */
#include "base/base.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>

#define OH_LARGEST_CONFIG 65536 /* above this struct_size is not a size but garbage */

onehop_result oh_config_copy(void *to, size_t known, const void *from, const char *type_name) {
    if (!from) return oh_error(ONEHOP_ERR_NULL, "the %s is NULL", type_name);
    size_t size;
    memcpy(&size, from, sizeof size);
    if (size < 2 * sizeof size || size % sizeof size || size > OH_LARGEST_CONFIG)
        return oh_error(ONEHOP_ERR_STRUCT_SIZE,
                        "struct_size of the %s is %zu, this version's size is %zu; set it with "
                        "ONEHOP_CONFIG_INIT",
                        type_name, size, known);
    const unsigned char *bytes = from;
    for (size_t i = known; i < size; i++)
        if (bytes[i])
            return oh_error(ONEHOP_ERR_STRUCT_SIZE,
                            "the %s of %zu bytes sets a field at byte %zu that this version, which "
                            "knows %zu bytes, does not have",
                            type_name, size, i, known);
    memset(to, 0, known);
    memcpy(to, from, size < known ? size : known);
    memcpy(to, &known, sizeof known);
    return ONEHOP_OK;
}

int oh_cancel_forbid(void) {
    int state = PTHREAD_CANCEL_ENABLE;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
    return state;
}

void oh_cancel_restore(const int *state) {
    int unused;
    pthread_setcancelstate(*state, &unused);
}

uint64_t oh_hash(uint64_t hash, const void *bytes, size_t size) {
    const unsigned char *at = bytes;
    for (size_t i = 0; i < size; i++) hash = (hash ^ at[i]) * 0x100000001b3ull;
    return hash;
}

const char *oh_memlock_hint(char text[OH_MEMLOCK_BYTES]) {
    struct rlimit limit;
    text[0] = '\0';
    if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
        snprintf(text, OH_MEMLOCK_BYTES,
                 "; the limit of locked memory, RLIMIT_MEMLOCK (ulimit -l), is %llu bytes",
                 (unsigned long long)limit.rlim_cur);
    return text;
}

onehop_result oh_random(void *bytes, size_t size) {
    unsigned char *at = bytes;
    while (size) {
        ssize_t got = getrandom(at, size, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return oh_error_errno(ONEHOP_ERR_SYSTEM, errno, "getrandom failed");
        at += got;
        size -= (size_t)got;
    }
    return ONEHOP_OK;
}
