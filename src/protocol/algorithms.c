/* See algorithms.h. */
#include "protocol/algorithms.h"

#include <stdio.h>
#include <string.h>

const oh_algorithm oh_algorithms[OH_ALGORITHMS + 1] = {
    {"auto", ONEHOP_ALL_REDUCE, OH_FAMILY_NONE, 0, 0},
#define OH_ALGORITHM(name, constant, number, collective, family, device, blocks)                   \
    [constant] = {#name, ONEHOP_##collective, OH_FAMILY_##family, OH_RUNS_##device, blocks},
#include "protocol/algorithms.def"
#undef OH_ALGORITHM
    [OH_ALGORITHMS] = {"unknown", ONEHOP_ALL_REDUCE, OH_FAMILY_NONE, 0, 0},
};

/* The header's numbers are those of the list, and no number is left out. */
#define OH_ALGORITHM(name, constant, number, collective, family, device, blocks)                   \
    _Static_assert(constant == number && number < OH_ALGORITHMS, #name);
#include "protocol/algorithms.def"
#undef OH_ALGORITHM
_Static_assert(OH_ALGORITHMS <= sizeof((onehop_stats *)0)->calls_by / sizeof(uint64_t),
               "onehop_stats counts every algorithm");

const char *onehop_algorithm_name(onehop_algorithm algorithm) {
    return oh_algorithm_of(algorithm)->name;
}

onehop_algorithm oh_algorithm_named(const char *name) {
    for (int a = 1; a < OH_ALGORITHMS; a++)
        if (!strcmp(name, oh_algorithms[a].name)) return (onehop_algorithm)a;
    return ONEHOP_ALGORITHM_AUTO;
}

char *oh_algorithm_list(uint32_t wanted, char *text, size_t size) {
    size_t used = 0;
    text[0] = '\0';
    for (int a = 1; a < OH_ALGORITHMS && used < size; a++)
        if (wanted >> a & 1)
            used += (size_t)snprintf(text + used, size - used, "%s%s", used ? ", " : "",
                                     oh_algorithms[a].name);
    return text;
}

const char *oh_operation_name(oh_operation operation) {
    static const char *const names[OH_OPERATIONS] = {"plain", "all_reduce_norm", "tp_qknorm"};
    return (unsigned)operation < OH_OPERATIONS ? names[operation] : "unknown";
}
