/* Property: the cache of kernels built at run time gives back what was put there to the last byte,
 * and nothing else: what is cut, changed, longer, of another key, of another user, a link or
 * writable by others is not there. It leaves no other file behind, whatever fails, and any number
 * of processes may use it. */
/* labels: quick */
#include "harness.h"

#include "jit/jit_cache.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>

#define IMAGE_BYTES  50000
#define HEADER_BYTES 88

static char root[] = "/tmp/onehop-test-cache-XXXXXX", directory[64], file[128];
static unsigned char content[IMAGE_BYTES];
static const oh_jit_image image = {content, sizeof content};
static int log_lines;
static char log_line[600];

static void count_lines(void *user, onehop_log_level level, const char *line) {
    (void)user;
    (void)level;
    log_lines++;
    snprintf(log_line, sizeof log_line, "%s", line);
}

static oh_digest key_of(unsigned number) {
    oh_sha256 hash;
    oh_sha256_begin(&hash);
    oh_sha256_add(&hash, &number, sizeof number);
    return oh_sha256_end(&hash);
}

static bool reads(const oh_digest *key) {
    oh_jit_image found;
    if (!oh_jit_cache_read(key, &found)) return false;
    CHECK_INT(sizeof content, found.size);
    CHECK_BYTES(content, found.bytes, sizeof content);
    free(found.bytes);
    return true;
}

static int entries(void) {
    DIR *d = opendir(directory);
    int count = 0;
    if (!d) return 0;
    for (struct dirent *e; (e = readdir(d));)
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, "..")) {
            count++;
            snprintf(file, sizeof file, "%s/%.60s", directory, e->d_name);
        }
    closedir(d);
    return count;
}

/* A fresh entry under key 1, whose path is `file`. */
static oh_digest fresh(void) {
    const oh_digest key = key_of(1);
    oh_jit_cache_write(&key, &image);
    CHECK_INT(1, entries());
    CHECK(reads(&key));
    return key;
}

/* It is not there any more; writing mends it. */
static void expect_rebuilt(const oh_digest *key, const char *what) {
    if (reads(key)) FAIL("%s: the entry was trusted", what);
    oh_jit_cache_write(key, &image);
    if (!reads(key)) FAIL("%s: writing did not mend the entry", what);
    CHECK_INT(1, entries());
}

static void hash_is_sha256(void) {
    static const unsigned char of_abc[] = {0xba, 0x78, 0x16, 0xbf, 0x8f, 0x01, 0xcf, 0xea};
    oh_sha256 hash;
    oh_sha256_begin(&hash);
    oh_sha256_add(&hash, "a", 1);
    oh_sha256_add(&hash, "bc", 2);
    const oh_digest digest = oh_sha256_end(&hash);
    CHECK_BYTES(of_abc, digest.bytes, sizeof of_abc);
}

static void kept_privately(void) {
    struct stat s;
    const oh_digest key = key_of(1), other = key_of(2);
    CHECK(!reads(&key));
    CHECK(access(directory, F_OK)); /* reading makes nothing */
    (void)fresh();
    CHECK(!reads(&other));
    CHECK_INT(0, stat(directory, &s));
    CHECK_INT(0700, s.st_mode & 0777);
    CHECK_INT(0, stat(file, &s));
    CHECK_INT(0600, s.st_mode & 0777);
    CHECK_INT(HEADER_BYTES + IMAGE_BYTES, s.st_size);
}

static void change_byte(long at) {
    FILE *f = fopen(file, "r+b");
    CHECK(f != NULL);
    fseek(f, at, SEEK_SET);
    const int byte = fgetc(f);
    fseek(f, at, SEEK_SET);
    fputc(byte ^ 1, f);
    fclose(f);
}

static void damaged(void) {
    static const long changed[] = {0,
                                   15,
                                   16,
                                   47,
                                   48,
                                   79,
                                   80,
                                   87,
                                   HEADER_BYTES,
                                   HEADER_BYTES + 31337,
                                   HEADER_BYTES + IMAGE_BYTES - 1};
    static const long cut[] = {
        0, 1, 50, HEADER_BYTES, HEADER_BYTES + 1, HEADER_BYTES + IMAGE_BYTES - 1};
    const oh_digest key = fresh();
    char what[60];
    for (size_t i = 0; i < OH_LENGTH(changed); i++) {
        snprintf(what, sizeof what, "byte %ld changed", changed[i]);
        change_byte(changed[i]);
        expect_rebuilt(&key, what);
    }
    for (size_t i = 0; i < OH_LENGTH(cut); i++) {
        snprintf(what, sizeof what, "cut at %ld", cut[i]);
        CHECK_INT(0, truncate(file, cut[i]));
        expect_rebuilt(&key, what);
    }
    CHECK_INT(0, truncate(file, HEADER_BYTES + IMAGE_BYTES + 1));
    expect_rebuilt(&key, "longer");
}

/* A whole file, but of something else. */
static void of_another_key(void) {
    const oh_digest key = fresh(), other = key_of(2);
    char mine[sizeof file], theirs[sizeof file];
    memcpy(mine, file, sizeof file);
    CHECK_INT(0, unlink(file));
    oh_jit_cache_write(&other, &image);
    CHECK_INT(1, entries());
    memcpy(theirs, file, sizeof file);
    CHECK_INT(0, rename(theirs, mine));
    expect_rebuilt(&key, "of another key");
}

static void foreign(void) {
    const oh_digest key = fresh();
    char away[80];
    struct stat s;
    CHECK_INT(0, chmod(file, 0620));
    expect_rebuilt(&key, "the group can write");
    CHECK_INT(0, chmod(file, 0602));
    expect_rebuilt(&key, "others can write");
    snprintf(away, sizeof away, "%s/away", root);
    CHECK_INT(0, rename(file, away));
    CHECK_INT(0, symlink(away, file));
    expect_rebuilt(&key, "a symbolic link");
    CHECK_INT(0, lstat(file, &s));
    CHECK(S_ISREG(s.st_mode));
    CHECK_INT(0, unlink(file));
    CHECK_INT(0, mkfifo(file, 0600));
    expect_rebuilt(&key, "a pipe");
    if (geteuid() == 0) {
        CHECK_INT(0, chown(file, 12345, 12345));
        expect_rebuilt(&key, "of another user");
    }
}

/* Root's files serve others, as its libraries do; nobody else's. */
static void of_root(int rank, int world_size, void *argument) {
    const oh_digest key = *(oh_digest *)argument;
    (void)rank;
    (void)world_size;
    CHECK_INT(0, setuid(12345));
    CHECK(reads(&key));
    log_lines = 0;
    const oh_digest other = key_of(3);
    oh_jit_cache_write(&other, &image);
    CHECK_INT(1, log_lines); /* it cannot be written */
    oh_jit_cache_write(&other, &image);
    CHECK_INT(1, log_lines);
    CHECK(!reads(&other));
}

static void served_by_root(void) {
    oh_digest key = fresh();
    if (geteuid() != 0) return;
    char deep[80];
    snprintf(deep, sizeof deep, "%s/deep", root);
    /* Readable for others, which it is not when made. */
    CHECK_INT(0,
              chmod(root, 0755) + chmod(deep, 0755) + chmod(directory, 0755) + chmod(file, 0644));
    CHECK_INT(0, wait_rank(start_rank(of_root, 0, 1, &key)));
    CHECK_INT(0, chmod(directory, 0700));
}

/* One line, however often; the first reason. */
static void expect_without(void (*prepare)(void), const char *reason) {
    const pid_t child = fork();
    if (child == 0) {
        const oh_digest key = key_of(1);
        prepare();
        log_lines = 0;
        CHECK(!reads(&key));
        oh_jit_cache_write(&key, &image);
        oh_jit_cache_write(&key, &image);
        CHECK(!reads(&key));
        CHECK_INT(1, log_lines);
        CHECK_CONTAINS(reason, log_line);
        _exit(0);
    }
    CHECK_INT(0, wait_rank(child));
}

static void name_a_file(void) {
    setenv("ONEHOP_CACHE_DIR", "/dev/null", 1);
}
static void name_what_cannot_be_made(void) {
    setenv("ONEHOP_CACHE_DIR", "/proc/onehop/cache", 1);
}
static void name_nothing(void) {
    unsetenv("ONEHOP_CACHE_DIR");
    unsetenv("XDG_CACHE_HOME");
    unsetenv("HOME");
}
static void open_it_to_others(void) {
    (void)fresh();
    chmod(directory, 0777);
}
static void link_it(void) {
    char link[80];
    (void)fresh();
    snprintf(link, sizeof link, "%s/link", root);
    CHECK_INT(0, symlink(directory, link));
    setenv("ONEHOP_CACHE_DIR", link, 1);
}

static void without_directory(void) {
    expect_without(name_a_file, "/dev/null");
    expect_without(name_what_cannot_be_made, "/proc/onehop/cache");
    expect_without(name_nothing, "HOME is not set");
    expect_without(open_it_to_others, "others can write");
    CHECK_INT(0, chmod(directory, 0700));
    expect_without(link_it, "/link");
}

/* The disk is full: no part of a file stays. */
static void full(void) {
    const pid_t child = fork();
    if (child == 0) {
        const struct rlimit limit = {IMAGE_BYTES / 2, IMAGE_BYTES / 2};
        const oh_digest key = key_of(7);
        const int before = entries();
        CHECK_INT(0, setrlimit(RLIMIT_FSIZE, &limit)); /* SIGXFSZ would end the process */
        oh_jit_cache_write(&key, &image);
        CHECK_INT(1, log_lines);
        CHECK_CONTAINS("RLIMIT_FSIZE", log_line);
        CHECK(!reads(&key));
        CHECK_INT(before, entries());
        _exit(0);
    }
    CHECK_INT(0, wait_rank(child));
}

/* Writers and readers at a time: whoever finds it finds it whole. */
static void one_of_many(int rank, int world_size, void *argument) {
    int found = 0;
    (void)world_size;
    (void)argument;
    for (unsigned n = 0; n < 200 || !found; n++) {
        const oh_digest key = key_of(100 + n % 4);
        if (rank % 2) oh_jit_cache_write(&key, &image);
        found += reads(&key);
    }
}

static void at_a_time(void) {
    for (int n = entries(); n > 0; n = entries()) CHECK_INT(0, unlink(file));
    run_ranks(6, one_of_many, NULL);
    CHECK_INT(4, entries());
    CHECK_INT(0, log_lines);
}

static void found_by_variables(void) {
    char path[128];
    const oh_digest key = key_of(1);
    unsetenv("ONEHOP_CACHE_DIR");
    setenv("HOME", root, 1);
    CHECK_INT(0, chdir(root));
    setenv("XDG_CACHE_HOME", "relative/is/ignored", 1);
    oh_jit_cache_write(&key, &image);
    snprintf(path, sizeof path, "%s/.cache/onehop", root);
    CHECK_INT(0, access(path, X_OK));
    CHECK(access("relative", F_OK) != 0);
    snprintf(path, sizeof path, "%s/xdg", root);
    setenv("XDG_CACHE_HOME", path, 1);
    CHECK(!reads(&key));
    oh_jit_cache_write(&key, &image);
    CHECK(reads(&key));
    snprintf(path, sizeof path, "%s/xdg/onehop", root);
    CHECK_INT(0, access(path, X_OK));
}

int main(void) {
    watchdog(60);
    CHECK(mkdtemp(root) != NULL);
    snprintf(directory, sizeof directory, "%s/deep/cache", root);
    setenv("ONEHOP_CACHE_DIR", directory, 1);
    for (size_t i = 0; i < sizeof content; i++) content[i] = (unsigned char)(i * 7 + i / 256);
    onehop_set_log(count_lines, NULL);
    hash_is_sha256();
    kept_privately();
    damaged();
    of_another_key();
    foreign();
    served_by_root();
    without_directory();
    full();
    at_a_time();
    found_by_variables();
    char command[80];
    snprintf(command, sizeof command, "rm -rf %s", root);
    return system(command) != 0;
}
