/* The functions that stand between libonehop and the C library; see inject.h. */
#include "inject.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <sys/syscall.h>
#include <unistd.h>

/* glibc's own entries: dlsym, by which the others are found, allocates. */
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t),
    *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

#define TAKE(name) const int action = inject_take(IN_##name, __builtin_return_address(0))

static void *find_next(void **slot, const char *name) {
    void *found = __atomic_load_n(slot, __ATOMIC_RELAXED);
    if (!found) {
        found = dlsym(RTLD_NEXT, name);
        __atomic_store_n(slot, found, __ATOMIC_RELAXED);
    }
    return found;
}

/* The C library's own. */
#define NEXT(name)                                                                                 \
    static void *next_##name;                                                                      \
    const union {                                                                                  \
        void *found;                                                                               \
        __typeof__(name) *call;                                                                    \
    } real = {find_next(&next_##name, #name)}

/* A function that returns `failed` and sets errno. */
#define WRAP(type, name, failed, parameters, arguments)                                            \
    type name parameters {                                                                         \
        NEXT(name);                                                                                \
        TAKE(name);                                                                                \
        return action ? (failed) : real.call arguments;                                            \
    }

/* One that returns the number of the error. */
#define WRAP_NUMBER(name, parameters, arguments)                                                   \
    int name parameters {                                                                          \
        NEXT(name);                                                                                \
        TAKE(name);                                                                                \
        return action == DO_WAKE ? 0 : action ? action : real.call arguments;                      \
    }

/* One that moves `size` bytes. */
#define WRAP_MOVE(name, parameters, arguments)                                                     \
    ssize_t name parameters {                                                                      \
        NEXT(name);                                                                                \
        TAKE(name);                                                                                \
        if (action == DO_SHORT && size > 1) size = 1;                                              \
        return action && action != DO_SHORT ? -1 : real.call arguments;                            \
    }

/* The same over a socket; see break_connection. */
#define WRAP_SOCKET(name, parameters, arguments)                                                   \
    ssize_t name parameters {                                                                      \
        NEXT(name);                                                                                \
        TAKE(name);                                                                                \
        break_connection(fd, action);                                                              \
        if (action == DO_SHORT && size > 1) size = 1;                                              \
        return action && action != DO_SHORT ? -1 : real.call arguments;                            \
    }

/* ---- files and descriptors ------------------------------------------------------------------- */

WRAP(int, access, -1, (const char *path, int mode), (path, mode))
WRAP(FILE *, fopen, NULL, (const char *path, const char *mode), (path, mode))
WRAP(char *, fgets, NULL, (char *line, int size, FILE *file), (line, size, file))
WRAP(size_t, fread, 0, (void *to, size_t size, size_t count, FILE *file), (to, size, count, file))
WRAP(int, fstat, -1, (int fd, struct stat *status), (fd, status))
WRAP(int, stat, -1, (const char *path, struct stat *status), (path, status))
WRAP(int, ftruncate, -1, (int fd, off_t size), (fd, size))
WRAP(int, dup, -1, (int fd), (fd))
WRAP(int, fallocate, -1, (int fd, int mode, off_t from, off_t size), (fd, mode, from, size))
WRAP_NUMBER(posix_fallocate, (int fd, off_t from, off_t size), (fd, from, size))
WRAP(int, memfd_create, -1, (const char *name, unsigned flags), (name, flags))
WRAP(int, mkdir, -1, (const char *path, mode_t mode), (path, mode))
WRAP(FILE *, open_memstream, NULL, (char **text, size_t *size), (text, size))
WRAP(DIR *, opendir, NULL, (const char *path), (path))
WRAP(struct dirent *, readdir, NULL, (DIR * directory), (directory))
WRAP(int, renameat, -1, (int from_at, const char *from, int to_at, const char *to),
     (from_at, from, to_at, to))
WRAP(int, unlinkat, -1, (int at, const char *path, int flags), (at, path, flags))
WRAP_MOVE(read, (int fd, void *to, size_t size), (fd, to, size))
WRAP_MOVE(write, (int fd, const void *from, size_t size), (fd, from, size))
WRAP_MOVE(getrandom, (void *to, size_t size, unsigned flags), (to, size, flags))

/* As on Linux: a descriptor is closed whatever close returns. */
int close(int fd) {
    NEXT(close);
    TAKE(close);
    const int result = real.call(fd);
    if (!action) return result;
    errno = action;
    return -1;
}

/* An argument more than was passed is harmless in the calling conventions of both architectures. */
int open(const char *path, int flags, ...) {
    NEXT(open);
    TAKE(open);
    va_list list;
    va_start(list, flags);
    const unsigned mode = va_arg(list, unsigned);
    va_end(list);
    return action ? -1 : real.call(path, flags, mode);
}

int openat(int at, const char *path, int flags, ...) {
    NEXT(openat);
    TAKE(openat);
    va_list list;
    va_start(list, flags);
    const unsigned mode = va_arg(list, unsigned);
    va_end(list);
    return action ? -1 : real.call(at, path, flags, mode);
}

int fcntl(int fd, int command, ...) {
    NEXT(fcntl);
    TAKE(fcntl);
    va_list list;
    va_start(list, command);
    void *argument = va_arg(list, void *);
    va_end(list);
    return action ? -1 : real.call(fd, command, argument);
}

/* pidfd_open alone: a rank that cannot read its user's secret (keyctl) has other addresses, and is
 * never met, as if it were in another network namespace. */
long syscall(long number, ...) {
    NEXT(syscall);
    long a[6];
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
    va_end(list);
    if (number != SYS_pidfd_open) return real.call(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    TAKE(syscall);
    return action ? -1 : real.call(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

/* A connection that fails in this way is broken at both ends. */
static void break_connection(int fd, int action) {
    if (action == EPIPE || action == ECONNRESET) shutdown(fd, SHUT_RDWR);
    if (action && action < DO_SHORT) errno = action;
}

/* ---- sockets --------------------------------------------------------------------------------- */

WRAP(int, accept4, -1, (int fd, struct sockaddr *address, socklen_t *size, int flags),
     (fd, address, size, flags))
WRAP(int, bind, -1, (int fd, const struct sockaddr *address, socklen_t size), (fd, address, size))
WRAP(int, connect, -1, (int fd, const struct sockaddr *address, socklen_t size),
     (fd, address, size))
WRAP(int, getsockopt, -1, (int fd, int level, int option, void *value, socklen_t *size),
     (fd, level, option, value, size))
WRAP(int, listen, -1, (int fd, int backlog), (fd, backlog))
WRAP(int, poll, -1, (struct pollfd * polls, nfds_t count, int timeout), (polls, count, timeout))
WRAP(int, ppoll, -1,
     (struct pollfd * polls, nfds_t count, const struct timespec *timeout, const sigset_t *mask),
     (polls, count, timeout, mask))
WRAP(int, shutdown, -1, (int fd, int how), (fd, how))
WRAP(int, socket, -1, (int domain, int type, int protocol), (domain, type, protocol))
WRAP_SOCKET(recv, (int fd, void *to, size_t size, int flags), (fd, to, size, flags))
WRAP_SOCKET(send, (int fd, const void *from, size_t size, int flags), (fd, from, size, flags))

static struct msghdr one_byte(const struct msghdr *message, struct iovec *part) {
    struct msghdr less = *message;
    if (!less.msg_iovlen || !less.msg_iov[0].iov_len) return less;
    *part = (struct iovec){less.msg_iov[0].iov_base, 1};
    less.msg_iov = part;
    less.msg_iovlen = 1;
    return less;
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    NEXT(sendmsg);
    TAKE(sendmsg);
    break_connection(fd, action);
    struct iovec part;
    const struct msghdr less = one_byte(message, &part);
    if (action == DO_SHORT) return real.call(fd, &less, flags);
    return action ? -1 : real.call(fd, message, flags);
}

/* What the kernel does where no descriptor is free. */
static void lose_descriptors(struct msghdr *message) {
    for (struct cmsghdr *head = CMSG_FIRSTHDR(message); head; head = CMSG_NXTHDR(message, head)) {
        const size_t count = (head->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(head) + i * sizeof fd, sizeof fd);
            close(fd);
        }
        message->msg_flags |= MSG_CTRUNC;
    }
    message->msg_controllen = 0;
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
    NEXT(recvmsg);
    TAKE(recvmsg);
    break_connection(fd, action);
    struct iovec part;
    if (action == DO_SHORT) {
        struct msghdr less = one_byte(message, &part);
        const ssize_t moved = real.call(fd, &less, flags);
        message->msg_controllen = less.msg_controllen;
        message->msg_flags = less.msg_flags;
        return moved;
    }
    if (action && action != DO_LOST) return -1;
    const ssize_t moved = real.call(fd, message, flags);
    if (action == DO_LOST && moved > 0) lose_descriptors(message);
    return moved;
}

/* ---- memory ---------------------------------------------------------------------------------- */

WRAP(void *, mmap, MAP_FAILED,
     (void *at, size_t bytes, int protection, int flags, int fd, off_t offset),
     (at, bytes, protection, flags, fd, offset))
WRAP(int, munmap, -1, (void *at, size_t bytes), (at, bytes))

void *mremap(void *at, size_t old_bytes, size_t bytes, int flags, ...) {
    NEXT(mremap);
    TAKE(mremap);
    va_list list;
    va_start(list, flags);
    void *to = va_arg(list, void *);
    va_end(list);
    return action ? MAP_FAILED : real.call(at, old_bytes, bytes, flags, to);
}

void *malloc(size_t bytes) {
    TAKE(malloc);
    void *block = action ? NULL : __libc_malloc(bytes);
    if (inject_of_library(__builtin_return_address(0))) inject_exchange_block(NULL, block);
    return block;
}

void *calloc(size_t count, size_t bytes) {
    TAKE(calloc);
    void *block = action ? NULL : __libc_calloc(count, bytes);
    if (inject_of_library(__builtin_return_address(0))) inject_exchange_block(NULL, block);
    return block;
}

void *realloc(void *old, size_t bytes) {
    TAKE(realloc);
    void *block = action ? NULL : __libc_realloc(old, bytes);
    if (block && inject_of_library(__builtin_return_address(0))) inject_exchange_block(old, block);
    return block;
}

void *aligned_alloc(size_t alignment, size_t bytes) {
    TAKE(aligned_alloc);
    void *block = action ? NULL : __libc_memalign(alignment, bytes);
    if (inject_of_library(__builtin_return_address(0))) inject_exchange_block(NULL, block);
    return block;
}

int posix_memalign(void **out, size_t alignment, size_t bytes) {
    TAKE(posix_memalign);
    void *block = action ? NULL : __libc_memalign(alignment, bytes);
    if (!block) return ENOMEM;
    if (inject_of_library(__builtin_return_address(0))) inject_exchange_block(NULL, block);
    *out = block;
    return 0;
}

/* Whoever frees it: the address may be the tail call of a public function. */
void free(void *block) {
    if (block) inject_exchange_block(block, NULL);
    __libc_free(block);
}

/* ---- threads, time, the machine -------------------------------------------------------------- */

WRAP_NUMBER(pthread_cond_init, (pthread_cond_t * c, const pthread_condattr_t *a), (c, a))
WRAP_NUMBER(pthread_cond_wait, (pthread_cond_t * c, pthread_mutex_t *m), (c, m))
WRAP_NUMBER(pthread_cond_timedwait,
            (pthread_cond_t * c, pthread_mutex_t *m, const struct timespec *until), (c, m, until))
WRAP_NUMBER(pthread_mutex_init, (pthread_mutex_t * m, const pthread_mutexattr_t *a), (m, a))
WRAP_NUMBER(pthread_create,
            (pthread_t * thread, const pthread_attr_t *a, void *(*run)(void *), void *argument),
            (thread, a, run, argument))
WRAP(int, clock_gettime, -1, (clockid_t clock, struct timespec *now), (clock, now))
WRAP_NUMBER(clock_nanosleep,
            (clockid_t clock, int flags, const struct timespec *wanted, struct timespec *left),
            (clock, flags, wanted, left))
WRAP(int, nanosleep, -1, (const struct timespec *wanted, struct timespec *left), (wanted, left))
WRAP(int, sched_getaffinity, -1, (pid_t pid, size_t size, cpu_set_t *set), (pid, size, set))
WRAP(int, sched_yield, -1, (void), ())
WRAP(long, sysconf, -1, (int name), (name))
WRAP(void *, dlopen, NULL, (const char *name, int flags), (name, flags))
