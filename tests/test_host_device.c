/* Property: the host device is opened as its config and environment say. Memory that it shares has
 * one mapping within a process, holds the same bytes for a process that imports it, and leaves
 * nothing behind; what cannot be shared is refused. A kernel runs in the calling thread. */
/* labels: quick */
#include "device/device.h"

#include "harness.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

static oh_device *host; /* opened by main */

/* ---- opening --------------------------------------------------------------------------------- */

static void test_open(void) {
    onehop_device automatic = {ONEHOP_DEVICE_AUTO, 0}, strange = {(onehop_device_kind)9, 0};
    oh_device *device = NULL;
    CHECK(setenv("ONEHOP_DEVICE", "host", 1) == 0);
    CHECK_OK(oh_device_open(automatic, 0, &device));
    CHECK(device->ops->kind == ONEHOP_DEVICE_HOST);
    device->ops->close(device);
    CHECK(setenv("ONEHOP_DEVICE", "gpu", 1) == 0);
    CHECK_RESULT(ONEHOP_ERR_ENVIRONMENT, oh_device_open(automatic, 0, &device));
    if (oh_cuda_device_count() == 0) {
        CHECK(setenv("ONEHOP_DEVICE", "cuda", 1) == 0);
        CHECK_RESULT(ONEHOP_ERR_NO_DEVICE, oh_device_open(automatic, 0, &device));
        CHECK(strstr(onehop_last_error(), "ONEHOP_DEVICE") != NULL);
        CHECK(setenv("ONEHOP_DEVICE", "auto", 1) == 0);
        CHECK_OK(oh_device_open(automatic, 0, &device));
        CHECK(device->ops->kind == ONEHOP_DEVICE_HOST);
    }
    CHECK(unsetenv("ONEHOP_DEVICE") == 0);
    CHECK_RESULT(ONEHOP_ERR_ARGUMENT, oh_device_open(strange, 0, &device));
    CHECK(setenv("ONEHOP_ISA", "sse9", 1) == 0);
    CHECK_RESULT(ONEHOP_ERR_ENVIRONMENT,
                 oh_device_open((onehop_device){ONEHOP_DEVICE_HOST, 0}, 0, &device));
    CHECK(unsetenv("ONEHOP_ISA") == 0);
}

static void test_info(void) {
    oh_device_info info;
    CHECK_OK(host->ops->info(host, &info));
    CHECK(info.device.kind == ONEHOP_DEVICE_HOST && info.name[0] != '\0');
    CHECK(info.multiprocessors >= 1 && info.handle_kinds == OH_HANDLE_FD);
    CHECK(info.memory_bytes > 1 << 20);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static void test_create(void) {
    oh_mem memory = {NULL, 0, NULL}, copy;
    oh_mem_handle handle;
    int fd = -1;
    CHECK_RESULT(ONEHOP_ERR_ARGUMENT, host->ops->mem_create(host, 0, 0, &memory));
    CHECK_RESULT(ONEHOP_ERR_MEMORY, host->ops->mem_create(host, SIZE_MAX, 0, &memory));
    CHECK_RESULT(ONEHOP_ERR_MEMORY, host->ops->mem_create(host, SIZE_MAX / 4, 0, &memory));
    CHECK_RESULT(ONEHOP_ERR_UNSUPPORTED, host->ops->mem_create(host, 1, OH_HANDLE_FABRIC, &memory));
    CHECK(memory.ptr == NULL);
    CHECK_OK(host->ops->mem_create(host, 5000, OH_HANDLE_FD, &memory));
    CHECK(memory.bytes == 8192 && (uintptr_t)memory.ptr % 4096 == 0);
    for (size_t i = 0; i < memory.bytes; i++) CHECK(((char *)memory.ptr)[i] == 0);

    CHECK_OK(host->ops->mem_export(host, &memory, &handle, &fd));
    CHECK(handle.kind == OH_HANDLE_FD && handle.bytes == 8192);
    CHECK((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
    CHECK(ftruncate(fd, 4096) != 0 && ftruncate(fd, 16384) != 0);
    CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE) != 0);

    /* One process, one mapping; it lives as long as its last user. */
    CHECK_OK(host->ops->mem_import(host, &handle, fd, &copy));
    CHECK(copy.ptr == memory.ptr && copy.bytes == memory.bytes);
    close(fd);
    host->ops->mem_release(host, &memory);
    CHECK(memory.ptr == NULL && memory.owner == NULL);
    memset(copy.ptr, 7, copy.bytes);
    host->ops->mem_release(host, &copy);
    host->ops->mem_release(host, &copy); /* zeroed: nothing to do */
}

static void refuse(const oh_mem_handle *handle, int fd, onehop_result expected) {
    oh_mem memory = {NULL, 0, NULL};
    CHECK(host->ops->mem_import(host, handle, fd, &memory) == expected);
    CHECK(memory.ptr == NULL && onehop_last_error()[0] != '\0');
}

/* Whatever a peer may send: an error, never a mapping that faults. */
static void test_bad_imports(void) {
    oh_mem memory, other, again;
    oh_mem_handle good, bad;
    int fd = -1, other_fd = -1, pipe_fds[2];
    CHECK_OK(host->ops->mem_create(host, 8192, 0, &memory));
    CHECK_OK(host->ops->mem_create(host, 8192, 0, &other));
    CHECK_OK(host->ops->mem_export(host, &memory, &good, &fd));
    CHECK_OK(host->ops->mem_export(host, &other, &bad, &other_fd));
    refuse(&good, other_fd, ONEHOP_ERR_ARGUMENT); /* of the right size, but the wrong memory */
    refuse(&good, -1, ONEHOP_ERR_SYSTEM);
    bad = good;
    bad.kind = OH_HANDLE_FABRIC;
    refuse(&bad, fd, ONEHOP_ERR_ARGUMENT);
    static const uint64_t sizes[] = {0,     4096,       8191,       8193,
                                     16384, 1ull << 40, UINT64_MAX, 1ull << 63};
    for (size_t i = 0; i < OH_LENGTH(sizes); i++) {
        bad = good;
        bad.bytes = sizes[i];
        refuse(&bad, fd, ONEHOP_ERR_ARGUMENT);
    }
    for (size_t i = 0; i < 32; i++) {
        bad = good;
        bad.data[i] ^= 0x10;
        refuse(&bad, fd, ONEHOP_ERR_ARGUMENT);
    }
    int unsealed = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(unsealed >= 0 && ftruncate(unsealed, 8192) == 0);
    /* Its own name and size, so that only the seals are missing. */
    struct stat status;
    CHECK(fstat(unsealed, &status) == 0);
    const uint64_t names[2] = {status.st_dev, status.st_ino};
    bad = good;
    memcpy(bad.data + 16, names, sizeof names);
    refuse(&bad, unsealed, ONEHOP_ERR_ARGUMENT);
    CHECK(fcntl(unsealed, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    refuse(&bad, unsealed, ONEHOP_ERR_ARGUMENT);
    CHECK(fcntl(unsealed, F_ADD_SEALS, F_SEAL_GROW) == 0);
    CHECK_OK(host->ops->mem_import(host, &bad, unsealed, &again));
    host->ops->mem_release(host, &again);
    CHECK(pipe(pipe_fds) == 0);
    refuse(&good, pipe_fds[0], ONEHOP_ERR_ARGUMENT);
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    refuse(&good, null, ONEHOP_ERR_ARGUMENT);
    int fds[] = {fd, other_fd, unsealed, pipe_fds[0], pipe_fds[1], null};
    for (size_t i = 0; i < OH_LENGTH(fds); i++) close(fds[i]);
    host->ops->mem_release(host, &memory);
    host->ops->mem_release(host, &other);
}

typedef union fd_message {
    struct cmsghdr header;
    char bytes[CMSG_SPACE(sizeof(int))];
} fd_message;

static void send_bytes(int socket, const void *bytes, size_t size, int fd) {
    fd_message control = {.bytes = {0}};
    struct iovec part = {(void *)(uintptr_t)bytes, size};
    struct msghdr message = {0};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = &control;
    message.msg_controllen = sizeof control;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    CHECK(sendmsg(socket, &message, 0) == (ssize_t)size);
}

static int receive_bytes(int socket, void *bytes, size_t size) {
    fd_message control;
    struct iovec part = {bytes, size};
    struct msghdr message = {0};
    int fd = -1;
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = &control;
    message.msg_controllen = sizeof control;
    CHECK(recvmsg(socket, &message, MSG_CMSG_CLOEXEC) == (ssize_t)size);
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    CHECK(header != NULL && header->cmsg_type == SCM_RIGHTS);
    memcpy(&fd, CMSG_DATA(header), sizeof fd);
    return fd;
}

/* The child maps what the parent made after the fork, and each sees what the other wrote. */
static void read_and_answer(int rank, int world_size, void *argument) {
    int socket = *(int *)argument;
    oh_mem memory;
    oh_mem_handle handle, again;
    char byte = 1;
    (void)rank;
    (void)world_size;
    int fd = receive_bytes(socket, &handle, sizeof handle);
    CHECK_OK(host->ops->mem_import(host, &handle, fd, &memory));
    close(fd);
    CHECK_RESULT(ONEHOP_ERR_ARGUMENT, host->ops->mem_export(host, &memory, &again, &fd));
    CHECK(memory.bytes == 1 << 20 && strcmp(memory.ptr, "from the parent") == 0);
    strcpy((char *)memory.ptr + (1 << 19), "from the child");
    CHECK(write(socket, &byte, 1) == 1);
    host->ops->mem_release(host, &memory);
}

static void test_other_process(void) {
    int sockets[2], fd = -1;
    char byte;
    oh_mem memory;
    oh_mem_handle handle;
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) == 0);
    pid_t process = start_rank(read_and_answer, 1, 2, &sockets[1]);
    close(sockets[1]);
    CHECK_OK(host->ops->mem_create(host, 1 << 20, 0, &memory));
    strcpy(memory.ptr, "from the parent");
    CHECK_OK(host->ops->mem_export(host, &memory, &handle, &fd));
    send_bytes(sockets[0], &handle, sizeof handle, fd);
    close(fd);
    CHECK(read(sockets[0], &byte, 1) == 1);
    CHECK(strcmp((char *)memory.ptr + (1 << 19), "from the child") == 0);
    CHECK_INT(0, wait_rank(process));
    close(sockets[0]);
    host->ops->mem_release(host, &memory);
}

/* Mappings whose line contains `text`. */
static int count_lines_with(const char *text) {
    char line[512];
    int count = 0;
    FILE *file = fopen("/proc/self/maps", "re");
    CHECK(file != NULL);
    while (fgets(line, sizeof line, file) != NULL) count += strstr(line, text) != NULL;
    fclose(file);
    return count;
}

/* Mappings of our memfds. */
static int count_mappings(void) {
    return count_lines_with("memfd:onehop");
}

/* Mappings of anybody's memfds. */
static int count_lines(void) {
    return count_lines_with("/memfd:");
}

static void test_no_leaks(void) {
    int descriptors = count_fds();
    CHECK(count_mappings() == 0);
    for (int i = 0; i < 1000; i++) {
        oh_mem memory, copies[3];
        oh_mem_handle handle;
        int fd = -1;
        CHECK_OK(host->ops->mem_create(host, 4096 * (size_t)(1 + i % 7), 0, &memory));
        CHECK_OK(host->ops->mem_export(host, &memory, &handle, &fd));
        for (int c = 0; c < 3; c++) CHECK_OK(host->ops->mem_import(host, &handle, fd, &copies[c]));
        CHECK(count_mappings() == 1);
        close(fd);
        host->ops->mem_release(host, &memory);
        for (int c = 0; c < 3; c++) host->ops->mem_release(host, &copies[c]);
    }
    CHECK(count_mappings() == 0 && count_fds() == descriptors);
}

typedef struct exported {
    oh_mem_handle handle;
    int fd;
    void *ptr;
} exported;

static void import_often(int rank, int world_size, void *argument) {
    const exported *shared = argument;
    (void)rank;
    (void)world_size;
    for (int i = 0; i < 200; i++) {
        oh_mem memory;
        CHECK_OK(host->ops->mem_import(host, &shared->handle, shared->fd, &memory));
        CHECK(memory.ptr == shared->ptr);
        __atomic_add_fetch((int *)memory.ptr, 1, __ATOMIC_RELAXED);
        host->ops->mem_release(host, &memory);
    }
}

/* Ranks that are threads: the memory stays where it is while others come and go. */
static void test_threads(void) {
    exported shared;
    oh_mem memory;
    CHECK_OK(host->ops->mem_create(host, 4096, 0, &memory));
    CHECK_OK(host->ops->mem_export(host, &memory, &shared.handle, &shared.fd));
    shared.ptr = memory.ptr;
    run_threads(4, import_often, &shared);
    CHECK(*(int *)memory.ptr == 800 && count_mappings() == 1);
    close(shared.fd);
    host->ops->mem_release(host, &memory);
}

static void test_plain_memory(void) {
    void *local = NULL, *here = NULL, *there = NULL;
    char byte = 0;
    CHECK_RESULT(ONEHOP_ERR_ARGUMENT, host->ops->local_alloc(host, 0, &local));
    CHECK(host->ops->local_alloc(host, 10000, &local) == ONEHOP_OK && (uintptr_t)local % 4096 == 0);
    CHECK(host->ops->host_alloc(host, 256, &here, &there) == ONEHOP_OK && here == there);
    for (int i = 0; i < 10000; i++) CHECK(((char *)local)[i] == 0);
    CHECK_OK(host->ops->fill(host, local, 0xff, 10000));
    CHECK(host->ops->copy(host, &byte, (char *)local + 9999, 1) == ONEHOP_OK && byte == (char)0xff);
    host->ops->local_free(host, local);
    host->ops->host_free(host, here);
}

static void test_public_memory(void) {
    onehop_device device = {ONEHOP_DEVICE_HOST, 0};
    void *ptr = NULL, *second = NULL;
    CHECK_RESULT(ONEHOP_ERR_NULL, onehop_mem_alloc(device, 100, NULL));
    CHECK(onehop_mem_alloc(device, 0, &ptr) == ONEHOP_ERR_ARGUMENT && ptr == NULL);
    CHECK_OK(onehop_mem_alloc(device, 10000, &ptr));
    CHECK_OK(onehop_mem_alloc(device, 100, &second));
    CHECK(count_mappings() == 2);
    onehop_mem_free(ptr);
    CHECK(count_mappings() == 1);
    onehop_mem_free(second);
    onehop_mem_free(NULL);
    CHECK(count_mappings() == 0);
}

/* ---- memory that somebody else allocated ----------------------------------------------------- */

enum {
    PAGE = 4096,
    FILES = 3, /* of several files side by side */
    ALL_KINDS = OH_HANDLE_FD | OH_HANDLE_FABRIC | OH_HANDLE_IPC
};

static oh_mem_handle *find_pieces(const oh_range *ranges, size_t range_count, uint32_t kinds,
                                  size_t expected) {
    oh_mem_handle *pieces = NULL;
    size_t count = 0;
    CHECK_OK(host->ops->foreign_find(host, ranges, range_count, kinds, &pieces, &count));
    CHECK_INT(expected, count);
    return pieces;
}

static oh_range range_at(const void *ptr, size_t bytes) {
    const oh_range range = {(uintptr_t)ptr, bytes};
    return range;
}

/* `pages` of a file from its second page on, at `at`; *fd_out is the file's. */
static void map_file_at(char *at, size_t pages, int *fd_out) {
    const int flags = MAP_SHARED | MAP_FIXED;
    *fd_out = memfd_create("test\nwith a strange name", MFD_CLOEXEC);
    CHECK(*fd_out >= 0 && ftruncate(*fd_out, (off_t)((pages + 1) * PAGE)) == 0);
    CHECK(mmap(at, pages * PAGE, PROT_READ | PROT_WRITE, flags, *fd_out, PAGE) == at);
}

/* FILES files side by side, pages 1, 2, 3 long, with a page of nothing before and after. */
static char *make_files(int *fds) {
    char *at = mmap(NULL, 8 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    char *start = at + PAGE;
    for (size_t i = 0, page = 0; i < FILES; page += ++i)
        map_file_at(start + page * PAGE, i + 1, &fds[i]);
    return start;
}

static void drop_files(char *start, const int *fds) {
    CHECK(munmap(start - PAGE, 8 * PAGE) == 0);
    for (size_t i = 0; i < FILES; i++) close(fds[i]);
}

/* Pieces come in order and once, whatever the ranges; a range may begin and end anywhere. */
static void test_foreign_find(void) {
    int fds[FILES];
    char *start = make_files(fds), *heap = malloc(100);
    const oh_range ranges[] = {
        range_at(start + 8, 16),           range_at(start + 8, 16),
        range_at(start + 100, 2 * PAGE),   range_at(start + 3000, 8),
        range_at(start + 3 * PAGE + 5, 1), range_at(start + 6 * PAGE - 1, 1)};
    oh_mem_handle *pieces = find_pieces(ranges, OH_LENGTH(ranges), ALL_KINDS, FILES);
    for (size_t i = 0, page = 0; i < FILES; page += ++i) {
        CHECK(pieces[i].kind == OH_HANDLE_FD && pieces[i].bytes == (i + 1) * PAGE);
        CHECK(pieces[i].base == (uintptr_t)start + page * PAGE);
        CHECK(i == 0 || oh_foreign_joins(&pieces[i - 1], &pieces[i]));
        CHECK(!oh_foreign_joins(&pieces[i], &pieces[i]));
    }
    free(pieces);

    /* What cannot be mapped by others is told apart, and says what it is. */
    const oh_range part[] = {range_at(start + 5 * PAGE, 2 * PAGE)};
    pieces = find_pieces(part, 1, ALL_KINDS, 2);
    CHECK(pieces[0].kind == OH_HANDLE_FD && pieces[1].kind == OH_HANDLE_NONE);
    CHECK_CONTAINS("private", (char *)pieces[1].data);
    CHECK(!oh_foreign_joins(&pieces[0], &pieces[1]));
    free(pieces);
    const oh_range elsewhere[] = {range_at((void *)(uintptr_t)PAGE, 10), range_at(heap, 100)};
    pieces = find_pieces(&elsewhere[0], 1, ALL_KINDS, 1);
    CHECK_CONTAINS("not mapped", (char *)pieces[0].data);
    CHECK(pieces[0].base == PAGE && pieces[0].bytes == 10);
    free(pieces);
    pieces = find_pieces(&elsewhere[1], 1, ALL_KINDS, 1);
    CHECK(pieces[0].kind == OH_HANDLE_NONE && pieces[0].base <= (uintptr_t)heap);
    free(pieces);
    pieces = find_pieces(ranges, 1, OH_HANDLE_FABRIC, 1);
    CHECK_CONTAINS("descriptors cannot be passed", (char *)pieces[0].data);
    free(pieces);
    CHECK(mprotect(start, PAGE, PROT_READ) == 0);
    pieces = find_pieces(ranges, 1, ALL_KINDS, 1);
    CHECK_CONTAINS("reading and writing", (char *)pieces[0].data);
    free(pieces);
    CHECK(mprotect(start, PAGE, PROT_READ | PROT_WRITE) == 0);

    /* The descriptor must be there when it is wanted, and be the one of this file. */
    int fd = -1;
    pieces = find_pieces(ranges, 1, ALL_KINDS, 1);
    CHECK_OK(host->ops->foreign_descriptor(host, pieces, &fd));
    CHECK((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
    close(fd);
    CHECK(dup2(fds[1], fds[0]) == fds[0]);
    CHECK_RESULT(ONEHOP_ERR_SYSTEM, host->ops->foreign_descriptor(host, pieces, &fd));
    free(pieces);
    pieces = find_pieces(ranges, 1, ALL_KINDS, 1);
    CHECK_CONTAINS("without an open descriptor", (char *)pieces[0].data);
    free(pieces);
    free(heap);
    drop_files(start, fds);
}

/* What a peer sends of its memory. */
typedef struct parcel {
    oh_mem_handle piece;
    uint64_t span_bytes, offset;
} parcel;

static void refuse_map(const parcel *p, int fd, onehop_result expected) {
    oh_mem span = {NULL, 0, NULL};
    CHECK_RESULT(expected,
                 host->ops->foreign_map(host, &p->piece, fd, p->span_bytes, p->offset, &span));
    CHECK(span.ptr == NULL);
}

static void refuse_damaged(const parcel *good, int fd) {
    parcel bad = *good;
    int other = memfd_create("other", MFD_CLOEXEC);
    CHECK(other >= 0 && ftruncate(other, 16 * PAGE) == 0);
    refuse_map(good, other, ONEHOP_ERR_ARGUMENT);
    refuse_map(good, -1, ONEHOP_ERR_ARGUMENT);
    close(other);
    bad.piece.kind = OH_HANDLE_NONE;
    refuse_map(&bad, fd, ONEHOP_ERR_UNSUPPORTED);
    bad.piece = good->piece;
    bad.piece.data[0] ^= 1;
    refuse_map(&bad, fd, ONEHOP_ERR_ARGUMENT);
    bad.piece = good->piece;
    bad.piece.bytes = bad.span_bytes = 64 * PAGE; /* longer than the file */
    refuse_map(&bad, fd, ONEHOP_ERR_ARGUMENT);
    bad.span_bytes = good->piece.bytes;
    refuse_map(&bad, fd, ONEHOP_ERR_ARGUMENT);
    bad = *good;
    bad.offset = UINT64_MAX;
    refuse_map(&bad, fd, ONEHOP_ERR_ARGUMENT);
}

/* The child lays the pieces side by side, reads across their borders and answers there. */
static void map_and_answer(int rank, int world_size, void *argument) {
    const int socket = *(int *)argument;
    const int before = count_fds(), mappings_before = count_lines();
    oh_mem span = {NULL, 0, NULL};
    char byte = 1;
    (void)rank;
    (void)world_size;
    for (size_t i = 0; i < FILES; i++) {
        parcel p;
        int fd = receive_bytes(socket, &p, sizeof p);
        if (i == 0) refuse_damaged(&p, fd);
        CHECK_OK(host->ops->foreign_map(host, &p.piece, fd, p.span_bytes, p.offset, &span));
        close(fd);
    }
    CHECK(span.bytes == 6 * PAGE);
    for (size_t i = 0; i < 6 * PAGE; i++) CHECK(((char *)span.ptr)[i] == (char)(i * 7 / 5));
    for (size_t i = 0; i < 6 * PAGE; i++) ((char *)span.ptr)[i] = (char)(i * 3 / 2);
    CHECK(write(socket, &byte, 1) == 1);
    host->ops->mem_release(host, &span);
    CHECK(span.ptr == NULL && count_fds() == before && count_lines() == mappings_before);
}

static void test_foreign_map(void) {
    int sockets[2], fds[FILES];
    char byte, *start = make_files(fds);
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) == 0);
    const oh_range range = range_at(start, 6 * PAGE);
    oh_mem_handle *pieces = find_pieces(&range, 1, ALL_KINDS, FILES);
    pid_t process = start_rank(map_and_answer, 1, 2, &sockets[1]);
    close(sockets[1]);
    for (size_t i = 0; i < 6 * PAGE; i++) start[i] = (char)(i * 7 / 5);
    for (size_t i = 0; i < FILES; i++) {
        const parcel p = {pieces[i], 6 * PAGE, pieces[i].base - (uintptr_t)start};
        int fd = -1;
        CHECK_OK(host->ops->foreign_descriptor(host, &pieces[i], &fd));
        send_bytes(sockets[0], &p, sizeof p, fd);
        close(fd);
    }
    CHECK(read(sockets[0], &byte, 1) == 1);
    for (size_t i = 0; i < 6 * PAGE; i++) CHECK(start[i] == (char)(i * 3 / 2));
    CHECK_INT(0, wait_rank(process));
    close(sockets[0]);
    free(pieces);
    drop_files(start, fds);
}

/* Ranks of one process share the pointer, whatever memory it is; a fork ends that. */
static void refuse_after_fork(int rank, int world_size, void *argument) {
    const parcel p = {*(const oh_mem_handle *)argument, PAGE, 0};
    (void)rank;
    (void)world_size;
    refuse_map(&p, -1, ONEHOP_ERR_ARGUMENT);
}

static void test_foreign_in_process(void) {
    char stack[64], *ptr = NULL;
    onehop_device device = {ONEHOP_DEVICE_HOST, 0};
    CHECK_OK(onehop_mem_alloc(device, PAGE, (void **)&ptr));
    const oh_range ranges[2] = {range_at(ptr + 100, 64), range_at(stack, sizeof stack)};
    for (size_t i = 0; i < 2; i++) {
        oh_mem span = {NULL, 0, NULL};
        oh_mem_handle *piece = find_pieces(&ranges[i], 1, ALL_KINDS, 1);
        CHECK(piece->kind == (i == 0 ? OH_HANDLE_FD : OH_HANDLE_NONE));
        CHECK_OK(host->ops->foreign_map(host, piece, -1, piece->bytes, 0, &span));
        CHECK((uintptr_t)span.ptr == piece->base && span.owner == NULL);
        host->ops->mem_release(host, &span);
        if (i == 0) CHECK_INT(0, wait_rank(start_rank(refuse_after_fork, 1, 2, piece)));
        free(piece);
    }
    onehop_mem_free(ptr);
    CHECK(count_mappings() == 0);
}

/* ---- running --------------------------------------------------------------------------------- */

static uint32_t order[8], ran;

static void note_block(const void *args, oh_grid grid) {
    CHECK(*(const int *)args == 42 && grid.blocks == 8 && grid.thread == 0 && grid.threads == 1);
    order[ran++] = grid.block;
#if defined(__x86_64__)
    CHECK((_mm_getcsr() & ~0x3fu) == 0x1f80u);
#endif
}

static void test_run_worker(void) {
    const int args = 42;
#if defined(__x86_64__)
    uint32_t before = _mm_getcsr(), odd = 0x1f80u | 0xe040u; /* flush, subnormals are zero, chop */
    _mm_setcsr(odd);
#endif
    for (uint32_t lanes = 1; lanes <= 9; lanes++) {
        uint32_t seen = 0;
        for (uint32_t lane = 0; lane < lanes; lane++) {
            ran = 0;
            oh_host_run_worker(note_block, &args, 8, lane, lanes);
            for (uint32_t i = 0; i < ran; i++, seen++) {
                CHECK(order[i] % lanes == lane);
                CHECK(i == 0 || order[i] == order[i - 1] - lanes);
            }
            if (lane == 7 % lanes) CHECK(order[0] == 7);
        }
        CHECK(seen == 8);
    }
#if defined(__x86_64__)
    CHECK((_mm_getcsr() & ~0x3fu) == (odd & ~0x3fu));
    _mm_setcsr(before);
#endif
}

int main(void) {
    watchdog(60);
    CHECK_OK(oh_host_device_open(&host));
    test_open();
    test_info();
    test_create();
    test_bad_imports();
    test_other_process();
    test_no_leaks();
    test_threads();
    test_plain_memory();
    test_public_memory();
    test_foreign_find();
    test_foreign_map();
    test_foreign_in_process();
    test_run_worker();
    host->ops->close(host);
    return 0;
}
