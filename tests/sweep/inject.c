/* The plan, the counts, and what the library has of the heap; see inject.h. */
#include "inject.h"

#include <errno.h>
#include <link.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static bool counting;
static inject_plan plan;
static uint32_t *counts;
static uintptr_t code_begin, code_end; /* of libonehop */

/* ---- names ----------------------------------------------------------------------------------- */

static const struct {
    const char *name, *words;
} functions[IN_COUNT] = {
#define INJECT_ROW(name, words) {#name, words},
    INJECT_FUNCTIONS(INJECT_ROW)
#undef INJECT_ROW
};

static const struct {
    const char *name;
    int value;
} actions[] = {
#define E(name) {#name, name}
    E(EINTR),
    E(EAGAIN),
    E(ECONNABORTED),
    E(EMFILE),
    E(ENOMEM),
    E(EACCES),
    E(EADDRINUSE),
    E(EIO),
    E(ECONNREFUSED),
    E(ENOENT),
    E(EPERM),
    E(EFBIG),
    E(ENOSYS),
    E(EINVAL),
    E(ENOPROTOOPT),
    E(EPIPE),
    E(ECONNRESET),
    E(ENOBUFS),
    E(ETOOMANYREFS),
    E(ENOTCONN),
    E(ENOSPC),
    E(EOPNOTSUPP),
#undef E
    {"SHORT", DO_SHORT},
    {"LOST", DO_LOST},
    {"WAKE", DO_WAKE},
    {"KILL", DO_KILL},
    {"STOP", DO_STOP},
};

const char *inject_name(int function) {
    return functions[function].name;
}

const char *inject_words(int function) {
    return functions[function].words;
}

const char *inject_action_name(int action) {
    for (size_t i = 0; i < sizeof actions / sizeof *actions; i++)
        if (actions[i].value == action) return actions[i].name;
    return "none";
}

int inject_action(const char *word) {
    for (size_t i = 0; i < sizeof actions / sizeof *actions; i++)
        if (!strcmp(actions[i].name, word)) return actions[i].value;
    return -1;
}

/* ---- the heap of the library ----------------------------------------------------------------- */

#define BLOCKS 1024
static void *blocks[BLOCKS];
static int lock_word;

static void lock(void) {
    while (__atomic_exchange_n(&lock_word, 1, __ATOMIC_ACQUIRE)) {
    }
}

static void unlock(void) {
    __atomic_store_n(&lock_word, 0, __ATOMIC_RELEASE);
}

/* In place of `old` (NULL: any free place) stands `new`. */
void inject_exchange_block(void *old, void *new) {
    if (!counting || old == new) return;
    lock();
    for (int i = 0; i < BLOCKS; i++) {
        if (blocks[i] != old) continue;
        blocks[i] = new;
        break;
    }
    unlock();
}

/* ---- counting -------------------------------------------------------------------------------- */

static int find_code(struct dl_phdr_info *info, size_t size, void *unused) {
    (void)size, (void)unused;
    if (!strstr(info->dlpi_name, "libonehop.so")) return 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        if (part->p_type != PT_LOAD || !(part->p_flags & PF_X)) continue;
        code_begin = info->dlpi_addr + part->p_vaddr;
        code_end = code_begin + part->p_memsz;
    }
    return 1;
}

void inject_begin(const inject_plan *new_plan, uint32_t *new_counts) {
    dl_iterate_phdr(find_code, NULL);
    if (!code_begin) {
        fprintf(stderr, "sweep: libonehop.so is not loaded\n");
        _exit(2);
    }
    plan = *new_plan;
    counts = new_counts;
    counting = true;
}

int inject_end(void) {
    int left = 0;
    counting = false;
    for (int i = 0; i < BLOCKS; i++) left += blocks[i] != NULL;
    return left;
}

bool inject_of_library(void *from) {
    return counting && (uintptr_t)from - code_begin < code_end - code_begin;
}

int inject_take(inject_function function, void *from) {
    if (!inject_of_library(from)) return DO_NOTHING;
    const uint32_t nth = __atomic_add_fetch(&counts[function], 1, __ATOMIC_RELAXED);
    if ((int)function != plan.function || nth != plan.nth) return DO_NOTHING;
    if (plan.action == DO_KILL) kill(getpid(), SIGKILL);
    if (plan.action == DO_STOP) kill(getpid(), SIGSTOP);
    if (plan.action < DO_SHORT) errno = plan.action;
    return plan.action;
}
