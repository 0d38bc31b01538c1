/* See descriptor.h. */
#include "base/descriptor.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

int oh_fd_high(int fd) {
    if (fd < 0 || fd > STDERR_FILENO) return fd;
    const int high = oh_fd_copy(fd), saved = errno;
    close(fd);
    errno = saved;
    return high;
}

int oh_fd_copy(int fd) {
    return fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
}

FILE *oh_fd_read_file(const char *path) {
    struct stat s;
    const int fd = oh_fd_high(open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
    const bool regular = fd >= 0 && !fstat(fd, &s) && S_ISREG(s.st_mode);
    FILE *file = regular ? fdopen(fd, "r") : NULL;
    if (!file && fd >= 0) {
        const int saved = regular ? errno : EINVAL;
        close(fd);
        errno = saved;
    }
    return file;
}

uint64_t oh_file_limit(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) || limit.rlim_cur == RLIM_INFINITY) return UINT64_MAX;
    return limit.rlim_cur;
}
