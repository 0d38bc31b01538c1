/* Descriptors of the library's own. 0 to 2 belong to the program, also while they are closed: a
 * symmetric buffer or a socket that got such a number would receive whatever anybody prints. So
 * every call that makes a descriptor goes through here; tools/check_layers.py sees to that. */
#ifndef OH_DESCRIPTOR_H
#define OH_DESCRIPTOR_H

#include <stdint.h>
#include <stdio.h>

/* The same file, close-on-exec, under a number above 2; `fd` is closed if that is another one. -1
 * and errno: `fd` was -1, or no number is free. */
int oh_fd_high(int fd);

/* Another descriptor of the same file. -1 and errno on failure. */
int oh_fd_copy(int fd);

/* A regular file, for reading; opening a pipe or reading a terminal would wait for somebody. NULL
 * and errno on failure, EINVAL for what is no regular file. */
FILE *oh_fd_read_file(const char *path);

/* How long a file may become (RLIMIT_FSIZE), files in memory included. Whoever exceeds it is ended
 * by SIGXFSZ, so it is asked first. */
uint64_t oh_file_limit(void);

#endif
