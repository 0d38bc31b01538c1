/* Time. Monotonic everywhere: deadlines must survive somebody setting the date. */
#include "base/base.h"

#include <errno.h>
#include <time.h>

uint64_t oh_clock_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void oh_sleep_us(unsigned us) {
    OH_NO_CANCEL;
    int saved = errno;
    struct timespec left = {(time_t)(us / 1000000), (long)(us % 1000000) * 1000};
    while (nanosleep(&left, &left) && errno == EINTR) {
    }
    errno = saved;
}
