/* See jit_cache.h. All is done below a descriptor of the directory, which has been looked at. */
#include "jit/jit_cache.h"
#include "base/descriptor.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_BYTES  ((uint64_t)64 << 20)
#define NAME_BYTES 40

typedef struct header {
    char magic[16];
    oh_digest key;
    oh_digest digest; /* of the image, which follows */
    uint64_t size;
} header;

static const char magic[16] = "onehop image 1";

_Static_assert(sizeof(header) == 88, "a header has no holes");

/* The first reason, once: a cache that cannot be used is no error. */
static void complain(const char *path, const char *why) {
    static int said;
    if (!__atomic_exchange_n(&said, 1, __ATOMIC_RELAXED))
        oh_log(ONEHOP_LOG_WARN,
               "kernels built at run time are not kept: %s: %s (%s names the directory)", path, why,
               oh_env_describe(OH_ENV_CACHE_DIR)->name);
}

/* ---- where and whose ------------------------------------------------------------------------- */

static bool find_path(char *path, size_t size) {
    const char *own = oh_env_text(OH_ENV_CACHE_DIR), *xdg = oh_env_text(OH_ENV_XDG_CACHE_HOME),
               *home = oh_env_text(OH_ENV_HOME);
    int length = -1;
    if (own)
        length = snprintf(path, size, "%s", own);
    else if (xdg && *xdg == '/') /* a relative one is to be ignored, says its specification */
        length = snprintf(path, size, "%s/onehop", xdg);
    else if (home)
        length = snprintf(path, size, "%s/.cache/onehop", home);
    else
        complain("no directory", "HOME is not set");
    return length > 0 && (size_t)length < size;
}

/* Why what others may have written must not be run; NULL if they cannot have. */
static const char *distrust(const struct stat *s, mode_t type) {
    if ((s->st_mode & S_IFMT) != type) return "it is of another kind";
    if (s->st_uid != geteuid() && s->st_uid != 0) return "it belongs to another user";
    if (s->st_mode & (S_IWGRP | S_IWOTH)) return "others can write to it";
    return NULL;
}

static void make_directories(char *path) {
    for (char *at = path + 1; *at; at++) {
        if (*at != '/') continue;
        *at = '\0';
        (void)mkdir(path, 0700); /* the last one tells */
        *at = '/';
    }
    (void)mkdir(path, 0700);
}

/* A descriptor, or -1. That there is no directory is no cause for a complaint when reading. */
static int open_directory(bool writing) {
    char path[4096];
    struct stat s;
    if (!find_path(path, sizeof path)) return -1;
    if (writing) make_directories(path);
    const int directory = oh_fd_high(open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (directory < 0) {
        if (writing || errno != ENOENT) complain(path, strerror(errno));
        return -1;
    }
    const char *reason = fstat(directory, &s) ? strerror(errno) : distrust(&s, S_IFDIR);
    if (!reason) return directory;
    complain(path, reason);
    close(directory);
    return -1;
}

static void name_of(const oh_digest *key, char name[NAME_BYTES]) {
    for (int i = 0; i < 16; i++) snprintf(name + 2 * i, 3, "%02x", key->bytes[i]);
    memcpy(name + 32, ".cubin", 7);
}

static oh_digest digest_of(const oh_jit_image *image) {
    oh_sha256 hash;
    oh_sha256_begin(&hash);
    oh_sha256_add(&hash, image->bytes, image->size);
    return oh_sha256_end(&hash);
}

/* ---- reading --------------------------------------------------------------------------------- */

static bool read_all(int file, void *to, size_t size) {
    char *at = to;
    while (size) {
        const ssize_t got = read(file, at, size);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        at += got;
        size -= (size_t)got;
    }
    return true;
}

/* NULL, with an image, or what is wrong. */
static const char *read_file(int file, const oh_digest *key, oh_jit_image *image_out) {
    struct stat s;
    header h;
    if (fstat(file, &s)) return strerror(errno);
    const char *reason = distrust(&s, S_IFREG);
    if (reason) return reason;
    if (!read_all(file, &h, sizeof h) || memcmp(h.magic, magic, sizeof magic)) return "no header";
    if (memcmp(&h.key, key, sizeof *key)) return "it is of something else";
    if (h.size == 0 || h.size > MAX_BYTES || (uint64_t)s.st_size != sizeof h + h.size)
        return "its size is wrong";
    oh_jit_image image = {malloc(h.size), h.size};
    if (!image.bytes) return "no memory";
    const oh_digest seen = read_all(file, image.bytes, image.size) ? digest_of(&image) : *key;
    if (memcmp(&seen, &h.digest, sizeof seen)) {
        free(image.bytes);
        return "it is damaged";
    }
    *image_out = image;
    return NULL;
}

bool oh_jit_cache_read(const oh_digest *key, oh_jit_image *image_out) {
    char name[NAME_BYTES];
    const int directory = open_directory(false);
    if (directory < 0) return false;
    name_of(key, name);
    /* Not blocking: what lies there may be a pipe. */
    const int file =
        oh_fd_high(openat(directory, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
    const char *reason = file < 0 ? strerror(errno) : read_file(file, key, image_out);
    if (reason && (file >= 0 || errno != ENOENT))
        oh_log(ONEHOP_LOG_INFO, "%s of the cache is built anew: %s", name, reason);
    if (file >= 0) close(file);
    close(directory);
    return !reason;
}

/* ---- writing --------------------------------------------------------------------------------- */

static bool write_all(int file, const void *from, size_t size) {
    const char *at = from;
    while (size) {
        const ssize_t put = write(file, at, size);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) return false;
        at += put;
        size -= (size_t)put;
    }
    return true;
}

/* NULL, or what failed; then nothing is left. */
static const char *write_file(int directory, const oh_digest *key, const oh_jit_image *image) {
    char name[NAME_BYTES], temporary[NAME_BYTES];
    uint64_t random;
    header h = {{0}, *key, digest_of(image), image->size};
    memcpy(h.magic, magic, sizeof magic);
    if (sizeof h + image->size > oh_file_limit()) return "it would exceed RLIMIT_FSIZE (ulimit -f)";
    if (oh_random(&random, sizeof random)) return "no random number";
    snprintf(temporary, sizeof temporary, ".%016llx", (unsigned long long)random);
    name_of(key, name);
    const int file = oh_fd_high(
        openat(directory, temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (file < 0) return strerror(errno);
    bool done = write_all(file, &h, sizeof h) && write_all(file, image->bytes, image->size);
    done = !close(file) && done;
    if (done && !renameat(directory, temporary, directory, name)) return NULL;
    const char *reason = strerror(errno);
    (void)unlinkat(directory, temporary, 0);
    return reason;
}

void oh_jit_cache_write(const oh_digest *key, const oh_jit_image *image) {
    char path[4096];
    if (image->size == 0 || image->size > MAX_BYTES) return;
    const int directory = open_directory(true);
    if (directory < 0) return;
    const char *reason = write_file(directory, key, image);
    if (reason && find_path(path, sizeof path)) complain(path, reason);
    close(directory);
}
