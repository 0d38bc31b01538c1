/* Which process this is, and what a fork does to the library.
 *
 * A forked child holds copies of its parent's objects, but the group, the shared pages and the work
 * in flight are still the parent's. So every object keeps the number of the process that made it
 * and compares it, in each call, with one word. The word lies in a page that the kernel wipes in a
 * forked child (MADV_WIPEONFORK, Linux 4.14); that costs a load per call, where getpid would cost a
 * system call. It serves after a raw clone() too, which runs no handlers. Older kernels wipe
 * nothing: there the handler of pthread_atfork does.
 *
 * The handler also makes the library's locks anew: they may have been held by a thread that the
 * child does not have. What they guard are lists that grow at their heads, so a change that was cut
 * off leaves them whole. */
#include "base/base.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_RESETS 16

static uint64_t plain_word; /* where there is no page that a fork wipes */
uint64_t *oh_process_word = &plain_word;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static uint64_t
    last_number; /* a child counts on where its parent was, so no ancestor's is reused */

static void (*resets[MAX_RESETS])(void);
static unsigned reset_count;

void oh_process_add_reset(void (*reset)(void)) {
    if (reset_count < MAX_RESETS) resets[reset_count++] = reset;
}

static void in_child(void) {
    __atomic_store_n(oh_process_word, 0, __ATOMIC_RELAXED);
    for (unsigned i = 0; i < reset_count; i++) resets[i]();
}

static void begin(void) {
    const size_t size = (size_t)sysconf(_SC_PAGESIZE);
    void *page = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page != MAP_FAILED && madvise(page, size, MADV_WIPEONFORK) == 0)
        oh_process_word = page;
    else if (page != MAP_FAILED)
        munmap(page, size);
    pthread_atfork(NULL, NULL, in_child);
}

uint64_t oh_process(void) {
    uint64_t none = 0;
    pthread_once(&once, begin);
    /* Relaxed: the numbers stand for themselves. */
    const uint64_t known = __atomic_load_n(oh_process_word, __ATOMIC_RELAXED);
    if (known) return known;
    const uint64_t next = __atomic_add_fetch(&last_number, 1, __ATOMIC_RELAXED);
    __atomic_compare_exchange_n(oh_process_word, &none, next, false, __ATOMIC_RELAXED,
                                __ATOMIC_RELAXED);
    return __atomic_load_n(oh_process_word, __ATOMIC_RELAXED);
}

onehop_result oh_process_refuse(const char *what) {
    return oh_error(ONEHOP_ERR_STATE,
                    "this %s was made before this process was forked and belongs to its parent; a "
                    "forked child may only destroy its copy, and make objects of its own",
                    what);
}

/* ---- the random number ----------------------------------------------------------------------- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static oh_id128 process_id; /* guarded by lock, as is id_process */
static uint64_t id_process; /* the process that process_id was made in; 0: none yet */

OH_RESET_IN_CHILD(lock)

onehop_result oh_process_id(oh_id128 *id_out) {
    onehop_result result = ONEHOP_OK;
    const uint64_t here = oh_process();
    pthread_mutex_lock(&lock);
    if (id_process != here) {
        result = oh_random(&process_id, sizeof process_id);
        if (!result) id_process = here;
    }
    if (!result) *id_out = process_id;
    pthread_mutex_unlock(&lock);
    return result;
}
