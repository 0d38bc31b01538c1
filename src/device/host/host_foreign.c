/* Host memory that somebody else allocated. A peer can map it if it is a file in memory (a memfd, a
 * file of a tmpfs), mapped shared for reading and writing, and the program still has a descriptor
 * of it that is open for both. onehop_mem_alloc makes such memory.
 *
 * /proc/self/maps says which mapping an address lies in, of which file and from where in it;
 * /proc/self/fd says which descriptor is of that file. Both are read once for a whole list of
 * ranges, which comes in order of address, as the mappings do.
 *
 * The file need not be sealed, since it is not ours: who truncates memory that is in use faults
 * first. But it must be the file that was described, and long enough when it is mapped. */
#include "base/descriptor.h"
#include "device/foreign.h"
#include "device/host/host_device.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

/* What oh_mem_handle.data carries for OH_HANDLE_FD. */
typedef struct file_part {
    char magic[16];
    uint64_t device, inode;
    uint64_t offset;
    int64_t fd; /* in the process that owns the memory */
} file_part;

_Static_assert(sizeof(file_part) <= 64, "fits into oh_mem_handle.data");

static const char magic[16] = "onehop file 1";

/* ---- which mapping --------------------------------------------------------------------------- */

typedef struct mapping_line {
    unsigned long long start, end, offset, inode;
    unsigned int major, minor;
    char rights[5];
} mapping_line;

/* Reads on until `line` ends after `at`; beyond the last mapping it is an empty one at the end. */
typedef struct cursor {
    FILE *maps;
    mapping_line line;
} cursor;

/* Lines may be longer than `text`: paths are of no interest. */
static bool next_line(cursor *c) {
    char text[160];
    mapping_line *l = &c->line;
    if (!fgets(text, sizeof text, c->maps)) return false;
    for (int byte = 0; !strchr(text, '\n') && byte != '\n' && byte != EOF;) byte = getc(c->maps);
    return sscanf(text, "%llx-%llx %4s %llx %x:%x %llu", &l->start, &l->end, l->rights, &l->offset,
                  &l->major, &l->minor, &l->inode) == 7;
}

static void advance(cursor *c, uint64_t at) {
    const mapping_line none = {UINT64_MAX, UINT64_MAX, 0, 0, 0, 0, ""};
    while (c->line.end <= at)
        if (!next_line(c)) c->line = none;
}

static uint64_t lesser(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

static onehop_result locate(void *context, uint64_t at, uint64_t limit, oh_mem_handle *out) {
    cursor *c = context;
    const mapping_line *l = &c->line;
    advance(c, at);
    if (l->start > at) {
        oh_foreign_private(out, at, lesser(limit, l->start) - at, "not mapped");
    } else if (l->inode == 0 || l->rights[3] != 's') {
        oh_foreign_private(out, l->start, l->end - l->start,
                           "private memory (malloc and the like)");
    } else if (l->rights[0] != 'r' || l->rights[1] != 'w') {
        oh_foreign_private(out, l->start, l->end - l->start, "not mapped for reading and writing");
    } else {
        file_part part = {{0}, makedev(l->major, l->minor), l->inode, l->offset, -1};
        memcpy(part.magic, magic, sizeof magic);
        out->kind = OH_HANDLE_FD;
        out->base = l->start;
        out->bytes = l->end - l->start;
        memcpy(out->data, &part, sizeof part);
    }
    return ONEHOP_OK;
}

/* ---- which descriptor ------------------------------------------------------------------------ */

typedef struct open_file {
    uint64_t device, inode;
    int fd;
} open_file;

/* A file in memory, open for reading and writing. */
static bool look_at(int fd, open_file *out) {
    struct stat status;
    if ((fcntl(fd, F_GETFL) & (O_ACCMODE | O_PATH)) != O_RDWR || fcntl(fd, F_GET_SEALS) < 0 ||
        fstat(fd, &status) != 0)
        return false;
    const open_file file = {(uint64_t)status.st_dev, (uint64_t)status.st_ino, fd};
    *out = file;
    return true;
}

static int by_identity(const void *a, const void *b) {
    const open_file *x = a, *y = b;
    if (x->device != y->device) return x->device < y->device ? -1 : 1;
    return x->inode < y->inode ? -1 : x->inode > y->inode;
}

/* All of them, in order of identity. An incomplete list only makes memory private. */
static open_file *list_files(size_t *count_out) {
    size_t room = 0;
    open_file *files = NULL;
    const int here = oh_fd_high(open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    DIR *directory = here < 0 ? NULL : fdopendir(here);
    *count_out = 0;
    if (!directory && here >= 0) close(here);
    if (!directory) return NULL;
    for (const struct dirent *entry; (entry = readdir(directory)) != NULL;) {
        char *end;
        const long fd = strtol(entry->d_name, &end, 10);
        if (*end || end == entry->d_name) continue;
        if (*count_out == room) {
            room = room ? 2 * room : 64;
            open_file *grown = realloc(files, room * sizeof *grown);
            if (!grown) break;
            files = grown;
        }
        if (look_at((int)fd, &files[*count_out])) ++*count_out;
    }
    closedir(directory);
    if (files) qsort(files, *count_out, sizeof *files, by_identity);
    return files;
}

static void name_descriptor(oh_mem_handle *piece, const open_file *files, size_t count) {
    file_part part;
    memcpy(&part, piece->data, sizeof part);
    const open_file wanted = {part.device, part.inode, -1};
    const open_file *found =
        count ? bsearch(&wanted, files, count, sizeof *files, by_identity) : NULL;
    if (!found) {
        oh_foreign_private(piece, piece->base, piece->bytes, "a file without an open descriptor");
        return;
    }
    part.fd = found->fd;
    memcpy(piece->data, &part, sizeof part);
}

static void name_descriptors(oh_mem_handle *pieces, size_t count) {
    open_file *files = NULL;
    size_t file_count = 0;
    bool listed = false;
    for (size_t i = 0; i < count; i++) {
        if (pieces[i].kind != OH_HANDLE_FD) continue;
        if (!listed) files = list_files(&file_count);
        listed = true;
        name_descriptor(&pieces[i], files, file_count);
    }
    free(files);
}

/* ---- find, describe -------------------------------------------------------------------------- */

onehop_result oh_host_foreign_find(oh_device *device, const oh_range *ranges, size_t count,
                                   uint32_t kinds, oh_mem_handle **pieces_out, size_t *count_out) {
    cursor c;
    (void)device;
    memset(&c, 0, sizeof c);
    c.maps = oh_fd_read_file("/proc/self/maps");
    if (!c.maps) return oh_error_errno(ONEHOP_ERR_SYSTEM, errno, "opening /proc/self/maps");
    onehop_result result = oh_foreign_walk(ranges, count, locate, &c, pieces_out, count_out);
    fclose(c.maps);
    if (result) return result;
    if (kinds & OH_HANDLE_FD) {
        name_descriptors(*pieces_out, *count_out);
        return ONEHOP_OK;
    }
    for (size_t i = 0; i < *count_out; i++) {
        oh_mem_handle *piece = &(*pieces_out)[i];
        if (piece->kind == OH_HANDLE_FD)
            oh_foreign_private(piece, piece->base, piece->bytes,
                               "a file, and descriptors cannot be passed");
    }
    return ONEHOP_OK;
}

static bool is_file(int fd, const file_part *part) {
    open_file file;
    return look_at(fd, &file) && file.device == part->device && file.inode == part->inode;
}

/* The number was found a while ago and may mean another file by now. */
onehop_result oh_host_foreign_descriptor(oh_device *device, const oh_mem_handle *piece,
                                         int *fd_out) {
    file_part part;
    (void)device;
    memcpy(&part, piece->data, sizeof part);
    const int fd = oh_fd_copy((int)part.fd);
    if (fd < 0)
        return oh_error_errno(ONEHOP_ERR_SYSTEM, errno,
                              "duplicating descriptor %d of shared host memory", (int)part.fd);
    if (!is_file(fd, &part)) {
        close(fd);
        return oh_error(ONEHOP_ERR_SYSTEM,
                        "descriptor %d of shared host memory was closed meanwhile", (int)part.fd);
    }
    *fd_out = fd;
    return ONEHOP_OK;
}

/* ---- map ------------------------------------------------------------------------------------- */

static onehop_result check_file(const oh_mem_handle *piece, int fd, const file_part *part) {
    struct stat status;
    if (memcmp(part->magic, magic, sizeof magic) != 0)
        return oh_error(ONEHOP_ERR_ARGUMENT, "a peer's memory handle does not describe a file");
    if (!is_file(fd, part) || fstat(fd, &status) != 0)
        return oh_error(ONEHOP_ERR_ARGUMENT,
                        "descriptor %d is other memory than a peer's handle describes", fd);
    const uint64_t size = (uint64_t)status.st_size;
    if (part->offset > size || piece->bytes > size - part->offset)
        return oh_error(ONEHOP_ERR_ARGUMENT,
                        "a peer's handle names %llu bytes at %llu of a file of %llu",
                        (unsigned long long)piece->bytes, (unsigned long long)part->offset,
                        (unsigned long long)size);
    return ONEHOP_OK;
}

/* Addresses for the whole, to be mapped over. */
static onehop_result reserve(size_t bytes, oh_mem *span) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *ptr = mmap(NULL, bytes, PROT_NONE, flags, -1, 0);
    if (ptr == MAP_FAILED)
        return oh_error_errno(ONEHOP_ERR_MEMORY, errno, "reserving %zu bytes of addresses", bytes);
    onehop_result result = oh_host_mem_adopt(ptr, bytes, span);
    if (result) munmap(ptr, bytes);
    return result;
}

/* In two steps: a mapping that fails at a fixed place may leave a hole there, which somebody else's
 * memory could fill before the span is unmapped as a whole. */
static onehop_result map_at(void *at, size_t bytes, int fd, off_t offset) {
    void *ptr = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, offset);
    void *moved = MAP_FAILED;
    if (ptr != MAP_FAILED) moved = mremap(ptr, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, at);
    if (moved != MAP_FAILED) return ONEHOP_OK;
    onehop_result result = oh_error_errno(errno == ENOMEM ? ONEHOP_ERR_MEMORY : ONEHOP_ERR_SYSTEM,
                                          errno, "mapping %zu bytes of a peer's memory", bytes);
    if (ptr != MAP_FAILED) munmap(ptr, bytes);
    return result;
}

onehop_result oh_host_foreign_map(oh_device *device, const oh_mem_handle *piece, int fd,
                                  uint64_t span_bytes, uint64_t offset, oh_mem *span) {
    file_part part;
    (void)device;
    onehop_result result = oh_foreign_check(piece, span_bytes, offset);
    if (result) return result;
    if (oh_foreign_is_own(piece)) {
        if (!span->ptr) oh_foreign_span_in_place(piece, span_bytes, offset, span);
        return ONEHOP_OK;
    }
    if (piece->kind != OH_HANDLE_FD) return oh_foreign_refuse(piece);
    memcpy(&part, piece->data, sizeof part);
    result = check_file(piece, fd, &part);
    if (!result && !span->ptr) result = reserve((size_t)span_bytes, span);
    if (result) return result;
    return map_at((char *)span->ptr + offset, (size_t)piece->bytes, fd, (off_t)part.offset);
}
