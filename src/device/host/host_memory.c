/* Shareable host memory: a sealed memfd, mapped shared.
 *
 * Sealed against shrinking and growing: a peer that could truncate the file could make us die of
 * SIGBUS. An importer therefore looks at seals and size before it maps, and at the file's identity,
 * so that a descriptor handed over for the wrong memory is refused and not read.
 *
 * All pages are reserved when the file is made, by the thread that makes it and so on its NUMA
 * node: a page that is missing when it is touched would end the process, or a peer, by SIGBUS.
 *
 * Within one process every user of a file shares one mapping, counted: with two mappings of one
 * file a race detector sees two unrelated addresses, and the last user, whichever rank it is,
 * unmaps. A forked child inherits table and mappings alike; releasing its copy unmaps them
 * there. */
#include "base/descriptor.h"
#include "device/host/host_device.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define PAGE  4096
#define PIECE ((size_t)256 << 10) /* reserved at once: a signal undoes the piece in hand */
#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW)

/* What oh_mem_handle.data carries. */
typedef struct file_identity {
    char magic[16];
    uint64_t device, inode;
} file_identity;

static const char magic[16] = "onehop memfd 1";

typedef struct mapping {
    struct mapping *next;
    file_identity file;
    void *ptr;
    size_t bytes;
    int fd; /* -1 if the memory came from another process */
    size_t users;
} mapping;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
OH_RESET_IN_CHILD(lock)
static mapping *mappings; /* guarded by lock, as is `users` of each */

static file_identity identity_of(const struct stat *status) {
    file_identity file = {{0}, (uint64_t)status->st_dev, (uint64_t)status->st_ino};
    memcpy(file.magic, magic, sizeof magic);
    return file;
}

static void drop(mapping *m) {
    if (m->ptr != NULL) munmap(m->ptr, m->bytes);
    if (m->fd >= 0) close(m->fd);
    free(m);
}

static onehop_result map_file(mapping *m, int fd) {
    void *ptr = mmap(NULL, m->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (ptr == MAP_FAILED)
        return oh_error_errno(errno == ENOMEM ? ONEHOP_ERR_MEMORY : ONEHOP_ERR_SYSTEM, errno,
                              "mapping %zu bytes of shared host memory", m->bytes);
    m->ptr = ptr;
    return ONEHOP_OK;
}

/* What a line "KEY: N kB" of /proc/meminfo says, in bytes; 0 if there is none. */
static uint64_t meminfo(const char *text, const char *key) {
    const char *line = strstr(text, key);
    return line != NULL ? strtoull(line + strlen(key), NULL, 10) << 10 : 0;
}

/* Reserving more than there is would not fail: the kernel would first end other processes. So what
 * cannot be had by far is refused before: more than the machine has left, or than the container may
 * ever have. */
static onehop_result check_room(size_t bytes) {
    char text[2048] = "", max[32] = "";
    FILE *file = oh_fd_read_file("/proc/meminfo");
    if (file != NULL) text[fread(text, 1, sizeof text - 1, file)] = '\0';
    if (file != NULL) fclose(file);
    const uint64_t free_bytes = meminfo(text, "MemAvailable:") + meminfo(text, "SwapFree:");
    if (free_bytes != 0 && bytes > free_bytes)
        return oh_error(ONEHOP_ERR_MEMORY,
                        "%zu bytes of shared host memory: the machine has %llu left (MemAvailable "
                        "and SwapFree in /proc/meminfo)",
                        bytes, (unsigned long long)free_bytes);
    file = oh_fd_read_file("/sys/fs/cgroup/memory.max");
    if (file != NULL && fgets(max, sizeof max, file) == NULL) max[0] = '\0';
    if (file != NULL) fclose(file);
    if (max[0] >= '0' && max[0] <= '9' && bytes > strtoull(max, NULL, 10))
        return oh_error(ONEHOP_ERR_MEMORY,
                        "%zu bytes of shared host memory: the container may have %llu (memory.max "
                        "of the cgroup)",
                        bytes, strtoull(max, NULL, 10));
    return ONEHOP_OK;
}

/* The kernel says ENOMEM or ENOSPC, and not of what. */
static onehop_result no_room(const mapping *m, size_t reserved, int error) {
    char mode[4] = "";
    FILE *file = oh_fd_read_file("/proc/sys/vm/overcommit_memory");
    if (file != NULL && fgets(mode, sizeof mode, file) == NULL) mode[0] = '\0';
    if (file != NULL) fclose(file);
    return oh_error_errno(
        ONEHOP_ERR_MEMORY, error,
        "%zu bytes of shared host memory: the limit is reached after %zu (%s)", m->bytes, reserved,
        mode[0] == '2' ? "vm.overcommit_memory is 2: CommitLimit in /proc/meminfo"
                       : "memory of the machine, or of its container: memory.max of the cgroup");
}

/* Where a sandbox has no fallocate the file has its length, and no pages yet. */
static onehop_result reserve_file(const mapping *m) {
    const uint64_t limit = oh_file_limit();
    if (m->bytes > limit)
        return oh_error(ONEHOP_ERR_MEMORY,
                        "%zu bytes of shared host memory: files of this process may have %llu "
                        "(RLIMIT_FSIZE, ulimit -f)",
                        m->bytes, (unsigned long long)limit);
    onehop_result result = check_room(m->bytes);
    if (result != ONEHOP_OK) return result;
    for (size_t at = 0; at < m->bytes;) {
        const size_t left = m->bytes - at, piece = left < PIECE ? left : PIECE;
        if (fallocate(m->fd, 0, (off_t)at, (off_t)piece) == 0)
            at += piece;
        else if (errno == ENOSPC || errno == ENOMEM)
            return no_room(m, at, errno);
        else if (errno != EINTR)
            break;
    }
    if (ftruncate(m->fd, (off_t)m->bytes) == 0) return ONEHOP_OK;
    return oh_error_errno(ONEHOP_ERR_MEMORY, errno, "%zu bytes of shared host memory", m->bytes);
}

/* A new sealed file of m->bytes in m->fd, its identity in m->file. */
static onehop_result make_file(mapping *m) {
    struct stat status;
    m->fd = oh_fd_high(memfd_create("onehop", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (m->fd < 0)
        return oh_error_errno(errno == ENOMEM   ? ONEHOP_ERR_MEMORY
                              : errno == ENOSYS ? ONEHOP_ERR_UNSUPPORTED
                                                : ONEHOP_ERR_SYSTEM,
                              errno, "memfd_create for %zu bytes of shared host memory", m->bytes);
    onehop_result result = reserve_file(m);
    if (result != ONEHOP_OK) return result;
    if (fcntl(m->fd, F_ADD_SEALS, SEALS | F_SEAL_SEAL) != 0 || fstat(m->fd, &status) != 0)
        return oh_error_errno(ONEHOP_ERR_SYSTEM, errno, "sealing shared host memory");
    m->file = identity_of(&status);
    return ONEHOP_OK;
}

static void publish(mapping *m, oh_mem *out) {
    oh_mem memory = {m->ptr, m->bytes, m};
    *out = memory;
}

onehop_result oh_host_mem_create(oh_device *device, size_t bytes, uint32_t kinds, oh_mem *out) {
    (void)device;
    if (bytes == 0) return oh_error(ONEHOP_ERR_ARGUMENT, "shared host memory of 0 bytes");
    if (bytes > (size_t)PTRDIFF_MAX - PAGE)
        return oh_error(ONEHOP_ERR_MEMORY, "%zu bytes of shared host memory are more than exist",
                        bytes);
    if (kinds != 0 && (kinds & OH_HANDLE_FD) == 0)
        return oh_error(
            ONEHOP_ERR_UNSUPPORTED,
            "host memory is shared by descriptor only; handle kinds 0x%x were asked for", kinds);
    mapping *m = calloc(1, sizeof *m);
    if (m == NULL) return oh_error(ONEHOP_ERR_MEMORY, "out of memory");
    m->bytes = oh_round_up(bytes, PAGE);
    m->users = 1;
    onehop_result result = make_file(m);
    if (result == ONEHOP_OK) result = map_file(m, m->fd);
    if (result != ONEHOP_OK) {
        drop(m);
        return result;
    }
    pthread_mutex_lock(&lock);
    m->next = mappings;
    mappings = m;
    pthread_mutex_unlock(&lock);
    publish(m, out);
    return ONEHOP_OK;
}

onehop_result oh_host_mem_export(oh_device *device, const oh_mem *memory, oh_mem_handle *out,
                                 int *fd_out) {
    (void)device;
    const mapping *m = memory->owner;
    oh_mem_handle handle = {.kind = OH_HANDLE_FD};
    if (m == NULL || m->fd < 0)
        return oh_error(ONEHOP_ERR_ARGUMENT, "only memory made in this process can be exported");
    int fd = oh_fd_copy(m->fd);
    if (fd < 0)
        return oh_error_errno(ONEHOP_ERR_SYSTEM, errno,
                              "duplicating the descriptor of host memory");
    handle.bytes = m->bytes;
    memcpy(handle.data, &m->file, sizeof m->file);
    *out = handle;
    *fd_out = fd;
    return ONEHOP_OK;
}

/* Everything that makes mapping `fd` safe. */
static onehop_result check_import(const oh_mem_handle *handle, int fd, file_identity *file_out) {
    file_identity file;
    struct stat status;
    memcpy(&file, handle->data, sizeof file);
    if (handle->kind != OH_HANDLE_FD || memcmp(file.magic, magic, sizeof magic) != 0)
        return oh_error(ONEHOP_ERR_ARGUMENT, "handle of kind %u does not describe host memory",
                        handle->kind);
    if (handle->bytes == 0 || handle->bytes % PAGE != 0 || handle->bytes > (uint64_t)PTRDIFF_MAX)
        return oh_error(ONEHOP_ERR_ARGUMENT, "handle of host memory says %llu bytes",
                        (unsigned long long)handle->bytes);
    if (fstat(fd, &status) != 0)
        return oh_error_errno(ONEHOP_ERR_SYSTEM, errno, "descriptor %d of host memory", fd);
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & SEALS) != SEALS)
        return oh_error(ONEHOP_ERR_ARGUMENT, "descriptor %d is not sealed memory of onehop", fd);
    file_identity real = identity_of(&status);
    if (status.st_size < 0 || (uint64_t)status.st_size != handle->bytes ||
        memcmp(&real, &file, sizeof file) != 0)
        return oh_error(
            ONEHOP_ERR_ARGUMENT,
            "descriptor %d is other memory than the handle describes: %lld bytes, expected "
            "%llu",
            fd, (long long)status.st_size, (unsigned long long)handle->bytes);
    *file_out = file;
    return ONEHOP_OK;
}

/* The mapping of `file`, made now if there is none, with one more user. Called with the lock
 * held. */
static onehop_result map_once(const file_identity *file, size_t bytes, int fd, mapping **out) {
    mapping *m = mappings;
    while (m != NULL && memcmp(&m->file, file, sizeof *file) != 0) m = m->next;
    if (m == NULL) {
        m = calloc(1, sizeof *m);
        if (m == NULL) return oh_error(ONEHOP_ERR_MEMORY, "out of memory");
        m->file = *file;
        m->bytes = bytes;
        m->fd = -1;
        onehop_result result = map_file(m, fd);
        if (result != ONEHOP_OK) {
            drop(m);
            return result;
        }
        m->next = mappings;
        mappings = m;
    }
    m->users++;
    *out = m;
    return ONEHOP_OK;
}

onehop_result oh_host_mem_import(oh_device *device, const oh_mem_handle *handle, int fd,
                                 oh_mem *out) {
    (void)device;
    file_identity file;
    mapping *m = NULL;
    onehop_result result = check_import(handle, fd, &file);
    if (result != ONEHOP_OK) return result;
    pthread_mutex_lock(&lock);
    result = map_once(&file, (size_t)handle->bytes, fd, &m);
    pthread_mutex_unlock(&lock);
    if (result == ONEHOP_OK) publish(m, out);
    return result;
}

onehop_result oh_host_mem_adopt(void *ptr, size_t bytes, oh_mem *out) {
    mapping *m = calloc(1, sizeof *m);
    if (m == NULL) return oh_error(ONEHOP_ERR_MEMORY, "out of memory");
    m->ptr = ptr;
    m->bytes = bytes;
    m->fd = -1;
    m->users = 1;
    publish(m, out);
    return ONEHOP_OK;
}

void oh_host_mem_release(oh_device *device, oh_mem *memory) {
    (void)device;
    mapping *m = memory->owner;
    if (m == NULL) return;
    pthread_mutex_lock(&lock);
    bool last = --m->users == 0;
    if (last) {
        mapping **link = &mappings;
        while (*link != NULL && *link != m) link = &(*link)->next;
        if (*link != NULL) *link = m->next; /* what was adopted is on no list */
    }
    pthread_mutex_unlock(&lock);
    if (last) drop(m);
    memset(memory, 0, sizeof *memory);
}
