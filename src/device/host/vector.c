/* Choice of the instruction set. The tables come from vector_kernels.c, compiled once per set; this
 * file is the only one that asks the processor what it has. */
#include "device/host/vector.h"

#include <pthread.h>
#include <string.h>

#define TABLES_MAX 4

extern const oh_vector oh_vector_baseline;
#if defined(__x86_64__)
extern const oh_vector oh_vector_avx2, oh_vector_avx512;
#elif defined(__aarch64__)
extern const oh_vector oh_vector_neon;
#endif

#if defined(__x86_64__)
#include <cpuid.h>

/* GCC before 11 and some clang know no "f16c". The bit counts only with AVX enabled by the system,
 * which __builtin_cpu_supports("avx2") has checked. */
static bool has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 29)) != 0;
}

static bool has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

static bool has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

static const oh_vector *tables[TABLES_MAX];
static pthread_once_t tables_once = PTHREAD_ONCE_INIT;

static void list_tables(void) {
    size_t count = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (has_avx512()) tables[count++] = &oh_vector_avx512;
    if (has_avx2()) tables[count++] = &oh_vector_avx2;
#elif defined(__aarch64__)
    tables[count++] = &oh_vector_neon;
#endif
    tables[count++] = &oh_vector_baseline;
    tables[count] = NULL;
}

const oh_vector *const *oh_vector_tables(void) {
    pthread_once(&tables_once, list_tables);
    return tables;
}

static onehop_result choose(const oh_vector **out) {
    static const char *const words[] = {"auto", "baseline", "avx2", "avx512", "neon", NULL};
    const oh_vector *const *list = oh_vector_tables();
    int word = 0;
    onehop_result result = oh_env_word(OH_ENV_ISA, words, 0, &word);
    if (result != ONEHOP_OK) return result;
    for (; *list != NULL; list++) {
        if (word == 0 || strcmp((*list)->isa, words[word]) == 0) {
            *out = *list;
            return ONEHOP_OK;
        }
    }
    return oh_error(
        ONEHOP_ERR_UNSUPPORTED,
        "ONEHOP_ISA is %s, which this processor or this build lacks; the best it has is %s",
        words[word], oh_vector_tables()[0]->isa);
}

onehop_result oh_vector_check(void) {
    const oh_vector *table = NULL;
    return choose(&table);
}

const oh_vector *oh_vector_table(void) {
    static const oh_vector *chosen;
    /* Relaxed: the tables are constants; every thread that chooses chooses the same. */
    const oh_vector *table = __atomic_load_n(&chosen, __ATOMIC_RELAXED);
    if (__builtin_expect(table == NULL, 0)) {
        table = oh_vector_tables()[0];
        (void)choose(&table);
        __atomic_store_n(&chosen, table, __ATOMIC_RELAXED);
    }
    return table;
}
