/* See descriptor.h. */
#include "base/descriptor.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/resource.h>
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
    const int fd = oh_fd_high(open(path, O_RDONLY | O_CLOEXEC));
    FILE *file = fd < 0 ? NULL : fdopen(fd, "r");
    if (!file && fd >= 0) {
        const int saved = errno;
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
