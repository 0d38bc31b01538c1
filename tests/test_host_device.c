/* labels: quick
 * The host device: which device is opened, shareable memory (one mapping within a process, import
 * by another one, what is refused, nothing left behind) and the running of a kernel in the calling
 * thread. */
#include "device/mem_registry.h"

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

static void send_memory(int socket, const oh_mem_handle *handle, int fd) {
    fd_message control = {.bytes = {0}};
    struct iovec part = {(void *)(uintptr_t)handle, sizeof *handle};
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
    CHECK(sendmsg(socket, &message, 0) == (ssize_t)sizeof *handle);
}

static int receive_memory(int socket, oh_mem_handle *handle) {
    fd_message control;
    struct iovec part = {handle, sizeof *handle};
    struct msghdr message = {0};
    int fd = -1;
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = &control;
    message.msg_controllen = sizeof control;
    CHECK(recvmsg(socket, &message, MSG_CMSG_CLOEXEC) == (ssize_t)sizeof *handle);
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
    int fd = receive_memory(socket, &handle);
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
    send_memory(sockets[0], &handle, fd);
    close(fd);
    CHECK(read(sockets[0], &byte, 1) == 1);
    CHECK(strcmp((char *)memory.ptr + (1 << 19), "from the child") == 0);
    CHECK_INT(0, wait_rank(process));
    close(sockets[0]);
    host->ops->mem_release(host, &memory);
}

/* Mappings of memfds: the only ones that are ours. */
static int count_mappings(void) {
    char line[512];
    int count = 0;
    FILE *file = fopen("/proc/self/maps", "re");
    CHECK(file != NULL);
    while (fgets(line, sizeof line, file) != NULL) count += strstr(line, "memfd:onehop") != NULL;
    fclose(file);
    return count;
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
    oh_device *owner = NULL;
    CHECK_RESULT(ONEHOP_ERR_NULL, onehop_mem_alloc(device, 100, NULL));
    CHECK(onehop_mem_alloc(device, 0, &ptr) == ONEHOP_ERR_ARGUMENT && ptr == NULL);
    CHECK_OK(onehop_mem_alloc(device, 10000, &ptr));
    CHECK_OK(onehop_mem_alloc(device, 100, &second));
    const oh_mem *found = oh_mem_find((char *)ptr + 5000, 5000, &owner);
    CHECK(found != NULL && found->ptr == ptr && owner->ops->kind == ONEHOP_DEVICE_HOST);
    CHECK(oh_mem_find(ptr, 12288, NULL) == found); /* the rounded size */
    CHECK(oh_mem_find(ptr, 12289, NULL) == NULL);
    CHECK(oh_mem_find((char *)ptr + 5000, SIZE_MAX, NULL) == NULL);
    CHECK(oh_mem_find((char *)ptr - 1, 2, NULL) == NULL && oh_mem_find(&device, 1, NULL) == NULL);
    onehop_mem_free(ptr);
    CHECK(oh_mem_find(ptr, 1, NULL) == NULL && oh_mem_find(second, 1, NULL) != NULL);
    onehop_mem_free(second);
    onehop_mem_free(NULL);
    CHECK(count_mappings() == 0);
}

/* Memory of onehop_mem_alloc can be given away, from any pointer into it; nothing else can. */
static void test_foreign(void) {
    onehop_device device = {ONEHOP_DEVICE_HOST, 0};
    oh_mem_handle handle = {.kind = 99};
    oh_mem shared;
    uint64_t offset = 99;
    int fd = -1;
    char *ptr = NULL, stack[64];
    CHECK_OK(onehop_mem_alloc(device, 10000, (void **)&ptr));
    static const size_t bad[] = {0, 12288 - 5000 + 1, SIZE_MAX};
    for (size_t i = 0; i < OH_LENGTH(bad); i++)
        CHECK_RESULT(ONEHOP_ERR_ARGUMENT,
                     host->ops->foreign_export(host, ptr + 5000, bad[i], &handle, &offset, &fd));
    CHECK_RESULT(ONEHOP_ERR_UNSUPPORTED,
                 host->ops->foreign_export(host, stack, sizeof stack, &handle, &offset, &fd));
    CHECK_CONTAINS("onehop_mem_alloc", onehop_last_error());
    CHECK(handle.kind == 99 && offset == 99 && fd == -1);
    CHECK_OK(host->ops->foreign_export(host, ptr + 5000, 5000, &handle, &offset, &fd));
    CHECK(handle.kind == OH_HANDLE_FD && handle.bytes == 12288 && offset == 5000);
    CHECK_OK(host->ops->mem_import(host, &handle, fd, &shared));
    CHECK(shared.ptr == ptr);
    close(fd);
    onehop_mem_free(ptr); /* whoever has it mapped keeps it */
    memset(shared.ptr, 7, shared.bytes);
    host->ops->mem_release(host, &shared);
    CHECK_RESULT(ONEHOP_ERR_UNSUPPORTED,
                 host->ops->foreign_export(host, ptr, 1, &handle, &offset, &fd));
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

static void test_run_lane(void) {
    const int args = 42;
#if defined(__x86_64__)
    uint32_t before = _mm_getcsr(), odd = 0x1f80u | 0xe040u; /* flush, subnormals are zero, chop */
    _mm_setcsr(odd);
#endif
    for (uint32_t lanes = 1; lanes <= 9; lanes++) {
        uint32_t seen = 0;
        for (uint32_t lane = 0; lane < lanes; lane++) {
            ran = 0;
            oh_host_run_lane(note_block, &args, 8, lane, lanes);
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
    test_foreign();
    test_run_lane();
    host->ops->close(host);
    return 0;
}
