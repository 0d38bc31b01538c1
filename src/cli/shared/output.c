/* See output.h. */
#include "cli/shared/output.h"
#include "cli/shared/options.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define TEMPORARY_BYTES 40

static const char *name_of(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* The number in /dev/stdout, /dev/stderr, /dev/fd/N and /proc/self/fd/N; -1 for any other path.
 * These are links, or lead through one, and to whatever is open: a copy of the descriptor avoids
 * opening a file anew, which would truncate or overwrite it. */
static int own_descriptor(const char *path) {
    static const char *const folders[] = {"/dev/fd/", "/proc/self/fd/"};
    int64_t number;
    if (strcmp(path, "/dev/stdout") == 0) return STDOUT_FILENO;
    if (strcmp(path, "/dev/stderr") == 0) return STDERR_FILENO;
    for (size_t i = 0; i < OH_LENGTH(folders); i++) {
        size_t length = strlen(folders[i]);
        if (strncmp(path, folders[i], length) == 0 &&
            options_number(path + length, 0, &number) == 0 && number < 1 << 20)
            return (int)number;
    }
    return -1;
}

static const char *open_own(output *o, int number) {
    int flags = fcntl(number, F_GETFL);
    if (flags < 0) return strerror(errno);
    if ((flags & O_ACCMODE) == O_RDONLY) return "it is not open for writing";
    o->into = fcntl(number, F_DUPFD_CLOEXEC, 3);
    return o->into < 0 ? strerror(errno) : NULL;
}

/* Opened at once and held: a FIFO whose only writer leaves has ended for its reader. */
static const char *open_special(output *o, const struct stat *seen) {
    struct stat s;
    int flags = O_WRONLY | O_NONBLOCK | O_NOFOLLOW | O_NOCTTY | O_CLOEXEC;
    o->into = openat(o->directory, name_of(o->path), flags);
    if (o->into < 0)
        return errno == ENXIO && S_ISFIFO(seen->st_mode) ? "nobody reads this FIFO"
                                                         : strerror(errno);
    if (fstat(o->into, &s) != 0) return strerror(errno);
    if (s.st_dev != seen->st_dev || s.st_ino != seen->st_ino) return "it changes";
    return fcntl(o->into, F_SETFL, 0) == 0 ? NULL : strerror(errno);
}

static int create_beside(const output *o, char temporary[TEMPORARY_BYTES]) {
    uint64_t random;
    if (oh_random(&random, sizeof random) != ONEHOP_OK) return -1;
    snprintf(temporary, TEMPORARY_BYTES, ".onehop-%016llx", (unsigned long long)random);
    return openat(o->directory, temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                  0666);
}

/* Only an attempt tells whether a directory can be written: for root, access() always says yes. */
static const char *try_directory(const output *o) {
    char temporary[TEMPORARY_BYTES];
    int file = create_beside(o, temporary);
    if (file < 0) return strerror(errno);
    close(file);
    return unlinkat(o->directory, temporary, 0) == 0 ? NULL : strerror(errno);
}

/* Would renaming over this file be refused, or do what its permissions do not allow? */
static const char *try_replacing(const output *o, const struct stat *file) {
    struct stat directory;
    if (faccessat(o->directory, name_of(o->path), W_OK, AT_EACCESS) != 0) return strerror(errno);
    if (fstat(o->directory, &directory) != 0) return strerror(errno);
    bool sticky = directory.st_mode & S_ISVTX, ours = file->st_uid == geteuid();
    if (sticky && !ours && directory.st_uid != geteuid() && geteuid() != 0)
        return "it belongs to another user";
    return NULL;
}

static const char *open_there(output *o) {
    struct stat s;
    if (fstatat(o->directory, name_of(o->path), &s, AT_SYMLINK_NOFOLLOW) != 0)
        return errno == ENOENT ? try_directory(o) : strerror(errno);
    if (S_ISREG(s.st_mode)) {
        const char *reason = try_replacing(o, &s);
        return reason ? reason : try_directory(o);
    }
    if (S_ISFIFO(s.st_mode) || S_ISCHR(s.st_mode)) return open_special(o, &s);
    return S_ISLNK(s.st_mode) ? "it is a symbolic link; name the file itself"
                              : "it is neither a file, a FIFO nor a character device";
}

static const char *open_path(output *o) {
    char directory[4096] = ".";
    const char *name = name_of(o->path);
    size_t length = (size_t)(name - o->path);
    int number = own_descriptor(o->path);
    if (number >= 0) return open_own(o, number);
    if (!*name || strcmp(name, ".") == 0 || strcmp(name, "..") == 0) return "it names no file";
    if (length >= sizeof directory) return strerror(ENAMETOOLONG);
    if (length) snprintf(directory, sizeof directory, "%.*s", (int)length, o->path);
    o->directory = open(directory, O_PATH | O_DIRECTORY | O_CLOEXEC);
    return o->directory < 0 ? strerror(errno) : open_there(o);
}

int output_open(output *o, const char *flag, const char *path) {
    *o = (output){path, -1, -1};
    const char *reason = path ? open_path(o) : NULL;
    if (!reason) return CLI_OK;
    return cli_fail(cli_command, CLI_USAGE, "%s '%s' cannot be written: %s", flag, path, reason);
}

onehop_result output_fill(int file, const char *path, void (*body)(FILE *, void *), void *user) {
    FILE *stream = fdopen(file, "w");
    if (!stream) {
        int cause = errno;
        close(file);
        return oh_error_errno(ONEHOP_ERR_SYSTEM, cause, "%s", path);
    }
    body(stream, user);
    /* What did not fit into the buffer may have failed earlier, for a reason that is gone. */
    int cause = ferror(stream) ? EIO : 0;
    errno = 0;
    if (fflush(stream) != 0 && errno) cause = errno;
    errno = 0;
    if (fclose(stream) != 0 && !cause) cause = errno ? errno : EIO;
    if (!cause) return ONEHOP_OK;
    return oh_error_errno(ONEHOP_ERR_SYSTEM, cause, "%s could not be written", path);
}

/* The work took its time: what stands at the name now? A file of this user hands on its mode. */
static onehop_result look_again(const output *o, int file) {
    struct stat s;
    if (fstatat(o->directory, name_of(o->path), &s, AT_SYMLINK_NOFOLLOW) != 0) return ONEHOP_OK;
    if (!S_ISREG(s.st_mode))
        return oh_error(ONEHOP_ERR_SYSTEM, "%s is no longer a regular file", o->path);
    if (s.st_uid == geteuid()) (void)fchmod(file, s.st_mode & 0777);
    return ONEHOP_OK;
}

onehop_result output_write(const output *o, void (*body)(FILE *, void *), void *user) {
    char temporary[TEMPORARY_BYTES];
    if (!o->path) return ONEHOP_OK;
    if (o->into >= 0) {
        cli_flush(); /* which may be the same file */
        return output_fill(o->into, o->path, body, user);
    }
    int file = create_beside(o, temporary);
    if (file < 0) return oh_error_errno(ONEHOP_ERR_SYSTEM, errno, "%s", o->path);
    onehop_result result = look_again(o, file);
    if (result != ONEHOP_OK)
        close(file);
    else
        result = output_fill(file, o->path, body, user);
    if (result == ONEHOP_OK &&
        renameat(o->directory, temporary, o->directory, name_of(o->path)) != 0)
        result = oh_error_errno(ONEHOP_ERR_SYSTEM, errno, "%s could not be written", o->path);
    if (result != ONEHOP_OK) (void)unlinkat(o->directory, temporary, 0);
    return result;
}
