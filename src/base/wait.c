/* See wait.h. */
#include "base/wait.h"

#include <errno.h>
#include <time.h>

/* A little less than a rest, so that every rest of OH_LOOK_MS ends in a call of the hook. */
#define HOOK_NS (OH_LOOK_MS * 1000000ull * 4 / 5)

#define REST_MIN_US 20
#define REST_MAX_US 1000

static _Thread_local struct {
    onehop_wait_fn hook;
    void *user;
    uint64_t called_ns;
} waiter;

void onehop_set_wait_hook(onehop_wait_fn hook, void *user) {
    waiter.hook = hook;
    waiter.user = user;
}

bool oh_wait_has_hook(void) {
    return waiter.hook != NULL;
}

bool oh_wait_interrupted(void) {
    if (!waiter.hook) return false;
    int saved = errno;
    const uint64_t now = oh_clock_ns();
    bool ends = false;
    if (now - waiter.called_ns >= HOOK_NS) {
        waiter.called_ns = now;
        ends = waiter.hook(waiter.user) != 0;
    }
    errno = saved;
    return ends;
}

bool oh_wait_interrupted_with(pthread_mutex_t *held) {
    if (!waiter.hook) return false;
    pthread_mutex_unlock(held);
    const bool ends = oh_wait_interrupted();
    pthread_mutex_lock(held);
    return ends;
}

void oh_wait_condition_init(pthread_cond_t *condition) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

void oh_wait_rest_on(pthread_cond_t *condition, pthread_mutex_t *held, uint64_t end_ns) {
    const uint64_t look = oh_clock_ns() + OH_LOOK_MS * 1000000ull;
    const uint64_t end = look < end_ns ? look : end_ns;
    const struct timespec until = {(time_t)(end / 1000000000u), (long)(end % 1000000000u)};
    pthread_cond_timedwait(condition, held, &until);
}

onehop_result oh_wait_ended(const char *what) {
    return oh_error(ONEHOP_ERR_INTERRUPTED, "%s: the wait was ended by this thread's wait hook",
                    what);
}

uint64_t oh_wait_pause_ns(uint64_t *looked_ns, uint64_t now_ns) {
    const uint64_t passed = now_ns - *looked_ns;
    *looked_ns = now_ns;
    return passed > OH_MAX_LOOK_NS ? passed - OH_MAX_LOOK_NS : 0;
}

int oh_wait_poll_ms(uint64_t left_ns) {
    return left_ns > OH_LOOK_MS * 1000000ull ? OH_LOOK_MS : (int)((left_ns + 999999) / 1000000);
}

unsigned oh_wait_rest_us(uint64_t waited_ns) {
    const uint64_t us = waited_ns / 1000 / 128;
    return us < REST_MIN_US ? REST_MIN_US : us > REST_MAX_US ? REST_MAX_US : (unsigned)us;
}
