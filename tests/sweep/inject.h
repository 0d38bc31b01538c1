/* Faults at the n-th call that libonehop makes of a system function.
 *
 * The program defines these functions itself, so that the shared library's calls come here first. A
 * call is counted, and may fail, only if its return address lies in libonehop; all others pass.
 * Each rank is a process of its own, so plan and counts are plain globals of that process. */
#ifndef OH_SWEEP_INJECT_H
#define OH_SWEEP_INJECT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* X(function, words): how the function may fail, by name of errno; further words:
 *   SHORT   moves one byte only            LOST  descriptors that came are lost (MSG_CTRUNC)
 *   WAKE    returns 0 without waiting      -     never fails; a rank may die or stop there
 *   ~ called as often as a wait takes turns: of its calls only the 1st, 2nd, 4th, ... are taken */
#define INJECT_FUNCTIONS(X)                                                                        \
    X(accept4, "EINTR ECONNABORTED EMFILE ENOMEM")                                                 \
    X(access, "EACCES")                                                                            \
    X(aligned_alloc, "ENOMEM")                                                                     \
    X(bind, "EADDRINUSE ENOMEM")                                                                   \
    X(calloc, "ENOMEM")                                                                            \
    X(clock_gettime, "- ~")                                                                        \
    X(clock_nanosleep, "EINTR ~")                                                                  \
    X(close, "EINTR EIO")                                                                          \
    X(connect, "EINTR EAGAIN ECONNREFUSED ENOMEM")                                                 \
    X(dlopen, "ENOENT")                                                                            \
    X(fallocate, "EINTR ENOSPC EOPNOTSUPP")                                                        \
    X(dup, "EMFILE")                                                                               \
    X(fcntl, "EMFILE EINTR EPERM")                                                                 \
    X(fgets, "EIO ~")                                                                              \
    X(fopen, "EMFILE ENOMEM ENOENT")                                                               \
    X(fread, "EIO")                                                                                \
    X(fstat, "EIO")                                                                                \
    X(ftruncate, "EINTR ENOMEM EFBIG")                                                             \
    X(getrandom, "EINTR ENOSYS SHORT")                                                             \
    X(getsockopt, "ENOPROTOOPT ENOMEM")                                                            \
    X(listen, "EADDRINUSE")                                                                        \
    X(malloc, "ENOMEM")                                                                            \
    X(memfd_create, "EMFILE ENOMEM ENOSYS")                                                        \
    X(mkdir, "EACCES")                                                                             \
    X(mmap, "ENOMEM EAGAIN")                                                                       \
    X(mremap, "ENOMEM")                                                                            \
    X(munmap, "ENOMEM")                                                                            \
    X(nanosleep, "EINTR ~")                                                                        \
    X(open, "EINTR EMFILE ENOENT")                                                                 \
    X(openat, "EINTR EMFILE ENOENT")                                                               \
    X(open_memstream, "ENOMEM")                                                                    \
    X(opendir, "EMFILE ENOMEM")                                                                    \
    X(poll, "EINTR ENOMEM")                                                                        \
    X(posix_fallocate, "EINTR ENOSPC")                                                             \
    X(ppoll, "EINTR ENOMEM")                                                                       \
    X(posix_memalign, "ENOMEM")                                                                    \
    X(pthread_cond_init, "ENOMEM")                                                                 \
    X(pthread_cond_timedwait, "WAKE ~")                                                            \
    X(pthread_cond_wait, "WAKE ~")                                                                 \
    X(pthread_create, "EAGAIN")                                                                    \
    X(pthread_mutex_init, "ENOMEM")                                                                \
    X(read, "EINTR EIO SHORT")                                                                     \
    X(readdir, "EIO ~")                                                                            \
    X(realloc, "ENOMEM")                                                                           \
    X(recv, "EINTR EAGAIN ECONNRESET ENOMEM SHORT")                                                \
    X(recvmsg, "EINTR EAGAIN ECONNRESET ENOMEM SHORT LOST")                                        \
    X(renameat, "EACCES")                                                                          \
    X(sched_getaffinity, "EINVAL")                                                                 \
    X(sched_yield, "- ~")                                                                          \
    X(send, "EINTR EAGAIN ENOBUFS EPIPE SHORT")                                                    \
    X(sendmsg, "EINTR EAGAIN ENOBUFS ETOOMANYREFS EPIPE SHORT")                                    \
    X(shutdown, "ENOTCONN")                                                                        \
    X(socket, "EMFILE ENOBUFS")                                                                    \
    X(stat, "EACCES")                                                                              \
    X(syscall, "ENOSYS EMFILE")                                                                    \
    X(sysconf, "EINVAL")                                                                           \
    X(unlinkat, "EACCES")                                                                          \
    X(write, "EINTR EPIPE SHORT")

typedef enum inject_function {
#define INJECT_ENUM(name, words) IN_##name,
    INJECT_FUNCTIONS(INJECT_ENUM)
#undef INJECT_ENUM
    IN_COUNT
} inject_function;

/* What happens at the planned call: an errno, or one of these. */
enum {
    DO_NOTHING = 0,
    DO_SHORT = 1001,
    DO_LOST,
    DO_WAKE,
    DO_KILL, /* SIGKILL */
    DO_STOP  /* SIGSTOP, for good */
};

typedef struct inject_plan {
    int function; /* inject_function; -1: none */
    uint32_t nth; /* from 1 */
    int action;
} inject_plan;

/* Begins counting, and carries out the plan. From here on counts[IN_COUNT] lives in the caller's
 * memory, which outlives the process. */
void inject_begin(const inject_plan *plan, uint32_t *counts);

/* Ends it: calls pass. Returns blocks of the heap that the library got since the begin and has not
 * freed. */
int inject_end(void);

/* For wrap.c. Counts a call from the address `from`; what is to become of it: DO_NOTHING, DO_SHORT
 * and the like, or an errno, which is set. */
int inject_take(inject_function function, void *from);
bool inject_of_library(void *from);
void inject_exchange_block(void *old_block, void *new_block); /* of the heap; NULL: none */

const char *inject_name(int function);
const char *inject_words(int function);
const char *inject_action_name(int action);
int inject_action(const char *word); /* -1: unknown */

#endif
