/* The one way in which the tool writes a file that the user names.
 *
 * A regular file is written under a random name in the same directory and renamed: readers see a
 * whole file or the old one, and a link or a file that somebody has put there is never written
 * through. What is no file (a FIFO with a reader, a character device such as /dev/null, an open
 * descriptor as /dev/stdout or /dev/fd/N) is opened before the work and written into. Anything else
 * is refused, before the work: a symbolic link, a directory, a socket, a block device.
 *
 * A new file has mode 0666 less the umask. A file of this user that is replaced keeps its
 * permission bits. Descriptors are held until the process ends, and forked ranks inherit them. */
#ifndef OH_CLI_OUTPUT_H
#define OH_CLI_OUTPUT_H

#include "cli/shared/cli.h"

#include <stdio.h>

typedef struct output {
    const char *path; /* NULL: nothing is to be written */
    int directory;    /* of a regular file */
    int into;         /* what is no file; -1 */
} output;

/* To be called before the work. An exit code, after a message that names the flag. `path` may be
 * NULL. */
int output_open(output *o, const char *flag, const char *path);

/* Is it a regular file, which may be written again and again? What is no file takes one writing. */
static inline bool output_is_file(const output *o) {
    return o->path && o->into < 0;
}

/* Writes. Not if `path` is NULL. */
onehop_result output_write(const output *o, void (*body)(FILE *, void *), void *user);

/* Fills and closes a stream over `file`, which is closed too. */
onehop_result output_fill(int file, const char *path, void (*body)(FILE *, void *), void *user);

#endif
