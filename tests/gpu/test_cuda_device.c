/* Property: memory of the CUDA device that one process exports and another imports holds the same
 * bytes for both, on a real GPU. Sharing within a process, plain memory and host memory work too;
 * errors say what was wrong, and nothing is left behind.
 *
 * The second process is forked before CUDA is used, as a driver that was initialised does not
 * survive a fork. It imports onto the last GPU there is, so with two GPUs the mapping goes over the
 * link. */
#include "gpu_test.h"

#include <dirent.h>
#include <sys/socket.h>
#include <sys/wait.h>

enum {
    SHARED_BYTES = 5 << 20
}; /* no multiple of the granularity */

/* ---- a message with a descriptor ------------------------------------------------------------- */

static void send_handle(int socket, const oh_mem_handle *handle, int fd) {
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {{0}};
    oh_mem_handle copy = *handle;
    struct iovec piece = {&copy, sizeof copy};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
    if (fd >= 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof control.bytes;
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        head->cmsg_level = SOL_SOCKET;
        head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(head), &fd, sizeof fd);
    }
    CHECK(sendmsg(socket, &message, 0) == (ssize_t)sizeof copy);
}

/* False if the other side has gone away. */
static bool receive_handle(int socket, oh_mem_handle *handle, int *fd_out) {
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec piece = {handle, sizeof *handle};
    struct msghdr message = {.msg_iov = &piece,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof control.bytes};
    *fd_out = -1;
    if (recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_WAITALL) != (ssize_t)sizeof *handle)
        return false;
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    if (head != NULL) memcpy(fd_out, CMSG_DATA(head), sizeof *fd_out);
    return true;
}

static void say(int socket, char word) {
    CHECK(write(socket, &word, 1) == 1);
}
static void hear(int socket, char word) {
    char heard = 0;
    CHECK(read(socket, &heard, 1) == 1 && heard == word);
}

/* ---- the other process ----------------------------------------------------------------------- */

static void refuse_bad_handles(oh_device *device, const oh_mem_handle *good, int fd) {
    oh_mem none = {NULL, 0, NULL};
    oh_mem_handle bad = *good;
    bad.kind = 8;
    EXPECT(ONEHOP_ERR_UNSUPPORTED, device->ops->mem_import(device, &bad, fd, &none));
    bad.kind = OH_HANDLE_IPC; /* foreign_map's business */
    EXPECT(ONEHOP_ERR_UNSUPPORTED, device->ops->mem_import(device, &bad, fd, &none));
    bad = *good;
    bad.bytes = 0;
    EXPECT(ONEHOP_ERR_ARGUMENT, device->ops->mem_import(device, &bad, fd, &none));
    if (good->kind == OH_HANDLE_FD) {
        int pipes[2];
        EXPECT(ONEHOP_ERR_ARGUMENT, device->ops->mem_import(device, good, -1, &none));
        CHECK(pipe(pipes) == 0); /* a descriptor, but not of memory */
        EXPECT(ONEHOP_ERR_DRIVER, device->ops->mem_import(device, good, pipes[0], &none));
        close(pipes[0]);
        close(pipes[1]);
    }
    CHECK(none.ptr == NULL && none.owner == NULL);
}

static int other_process(int socket) {
    oh_mem_handle handle;
    oh_mem mem = {NULL, 0, NULL};
    oh_device *device;
    int fd, rounds = 0;
    while (receive_handle(socket, &handle, &fd)) {
        if (rounds++ == 0) gpu_begin();
        OK(oh_cuda_device_open(oh_cuda_device_count() - 1, &device));
        refuse_bad_handles(device, &handle, fd);
        OK(device->ops->mem_import(device, &handle, fd, &mem));
        if (fd >= 0) close(fd);
        CHECK(mem.bytes == handle.bytes);
        CHECK(gpu_all(device, mem.ptr, SHARED_BYTES, 0xA5));
        OK(device->ops->fill(device, mem.ptr, 0x5A, SHARED_BYTES));
        say(socket, 'w');
        hear(socket, 'r'); /* the owner has released: our mapping must still hold the memory */
        CHECK(gpu_all(device, mem.ptr, SHARED_BYTES, 0x5A));
        device->ops->mem_release(device, &mem);
        CHECK(mem.ptr == NULL);
        device->ops->close(device);
        say(socket, 'd');
    }
    return 0;
}

static void export_import(oh_device *device, uint32_t kinds, int socket) {
    oh_mem mem;
    oh_mem_handle handle;
    int fd = -1;
    OK(device->ops->mem_create(device, SHARED_BYTES, kinds, &mem));
    CHECK(mem.bytes >= SHARED_BYTES && mem.ptr != NULL);
    CHECK(gpu_all(device, mem.ptr, mem.bytes, 0));
    OK(device->ops->fill(device, mem.ptr, 0xA5, SHARED_BYTES));
    OK(device->ops->mem_export(device, &mem, &handle, &fd));
    CHECK(handle.bytes == mem.bytes && (handle.kind & kinds) != 0);
    CHECK((handle.kind == OH_HANDLE_FD) == (fd >= 0));
    send_handle(socket, &handle, fd);
    if (fd >= 0) close(fd);
    hear(socket, 'w');
    CHECK(gpu_all(device, mem.ptr, SHARED_BYTES, 0x5A));
    device->ops->mem_release(device, &mem);
    say(socket, 'r');
    hear(socket, 'd');
}

/* ---- within this process --------------------------------------------------------------------- */

/* By handle, as a peer would: that finds the one mapping there is. */
static void share_within_process(oh_device *owner) {
    oh_device *reader;
    oh_mem mem, shared;
    oh_mem_handle handle;
    int fd = -1;
    OK(oh_cuda_device_open(oh_cuda_device_count() - 1, &reader));
    OK(owner->ops->mem_create(owner, SHARED_BYTES, 0, &mem));
    OK(owner->ops->fill(owner, mem.ptr, 0x11, mem.bytes));
    OK(owner->ops->mem_export(owner, &mem, &handle, &fd));
    OK(reader->ops->mem_import(reader, &handle, fd, &shared));
    CHECK(shared.ptr == mem.ptr && shared.bytes == mem.bytes);
    OK(reader->ops->fill(reader, shared.ptr, 0x22, shared.bytes));
    CHECK(gpu_all(owner, mem.ptr, mem.bytes, 0x22));
    owner->ops->mem_release(owner, &mem);
    CHECK(gpu_all(reader, shared.ptr, shared.bytes, 0x22)); /* one reference is left */
    reader->ops->mem_release(reader, &shared);
    reader->ops->mem_release(reader, &shared); /* zeroed: nothing to do */
    if (fd >=
        0) { /* the record is gone, but the descriptor still holds the memory: a real import */
        OK(reader->ops->mem_import(reader, &handle, fd, &shared));
        CHECK(gpu_all(reader, shared.ptr, SHARED_BYTES, 0x22));
        reader->ops->mem_release(reader, &shared);
        close(fd);
    }
    reader->ops->close(reader);
}

/* Refused, unless this GPU reads pageable memory by itself. */
static void unpinned_memory(oh_device *device, void *memory) {
    const oh_cu_device_attribute pageable_access = 88;
    void *address = NULL;
    int reads = 0;
    DRIVER(oh_cu.cuDeviceGetAttribute(&reads, pageable_access, oh_cuda_of(device)->device));
    onehop_result result = device->ops->host_address(device, memory, &address);
    CHECK(result == ONEHOP_ERR_ARGUMENT || (result == ONEHOP_OK && reads != 0));
}

static void local_and_host_memory(oh_device *device) {
    void *local, *host, *mapped, *again;
    unsigned char stack[4096];
    OK(device->ops->local_alloc(device, 1 << 20, &local));
    CHECK(gpu_all(device, local, 1 << 20, 0));
    OK(device->ops->host_alloc(device, 8192, &host, &mapped));
    for (int i = 0; i < 8192; i++) CHECK(((unsigned char *)host)[i] == 0);
    CHECK(mapped == host); /* unified addresses */
    OK(device->ops->host_address(device, (char *)host + 64, &again));
    CHECK(again == (char *)mapped + 64);
    unpinned_memory(device, stack);
    OK(device->ops->fill(device, mapped, 0x77, 8192)); /* the device writes, the host reads */
    CHECK(((volatile unsigned char *)host)[8191] == 0x77);
    memset(stack, 0x33, sizeof stack); /* pageable to device and back */
    OK(device->ops->copy(device, local, stack, sizeof stack));
    CHECK(gpu_all(device, local, sizeof stack, 0x33));
    OK(device->ops->copy(device, local, stack, 0));
    device->ops->host_free(device, host);
    device->ops->local_free(device, local);
    device->ops->host_free(device, NULL);
    device->ops->local_free(device, NULL);
}

static void errors(oh_device *device) {
    oh_mem mem = {NULL, 0, NULL};
    oh_mem_handle handle;
    oh_device *none;
    int fd;
    EXPECT(ONEHOP_ERR_NO_DEVICE, oh_cuda_device_open(-1, &none));
    EXPECT(ONEHOP_ERR_NO_DEVICE, oh_cuda_device_open(oh_cuda_device_count(), &none));
    EXPECT(ONEHOP_ERR_ARGUMENT, device->ops->mem_create(device, 0, 0, &mem));
    EXPECT(ONEHOP_ERR_MEMORY, device->ops->mem_create(device, (size_t)1 << 40, 0, &mem));
    EXPECT(ONEHOP_ERR_UNSUPPORTED, device->ops->mem_create(device, 4096, OH_HANDLE_IPC, &mem));
    EXPECT(ONEHOP_ERR_ARGUMENT, device->ops->mem_export(device, &mem, &handle, &fd));
    CHECK(mem.ptr == NULL);
}

static int open_descriptors(void) {
    int count = 0;
    DIR *directory = opendir("/proc/self/fd");
    CHECK(directory != NULL);
    while (readdir(directory) != NULL) count++;
    closedir(directory);
    return count;
}

static size_t free_bytes(oh_device *device) {
    size_t left = 0, total = 0;
    DRIVER(gpu.cuCtxSetCurrent(oh_cuda_of(device)->context));
    DRIVER(gpu.cuMemGetInfo_v2(&left, &total));
    DRIVER(gpu.cuCtxSetCurrent(NULL));
    return left;
}

static void one_cycle(oh_device *device) {
    oh_mem mem, shared;
    oh_mem_handle handle;
    oh_device *second;
    void *local, *host, *mapped;
    int fd;
    OK(oh_cuda_device_open(0, &second));
    OK(device->ops->mem_create(device, 8 << 20, 0, &mem));
    OK(device->ops->mem_export(device, &mem, &handle, &fd));
    OK(second->ops->mem_import(second, &handle, fd, &shared));
    if (fd >= 0) close(fd);
    OK(device->ops->local_alloc(device, 1 << 20, &local));
    OK(device->ops->host_alloc(device, 4096, &host, &mapped));
    device->ops->mem_release(device, &mem);
    second->ops->mem_release(second, &shared);
    device->ops->local_free(device, local);
    device->ops->host_free(device, host);
    second->ops->close(second);
}

static void no_leak(oh_device *device) {
    one_cycle(device);
    size_t before = free_bytes(device);
    int descriptors = open_descriptors();
    for (int i = 0; i < 200; i++) one_cycle(device);
    size_t after = free_bytes(device);
    CHECK(open_descriptors() == descriptors);
    CHECK(after + (32u << 20) > before); /* a leak of every cycle would be 1.8 GB */
}

static void show(oh_device *device) {
    oh_device_info info;
    OK(device->ops->info(device, &info));
    CHECK(info.multiprocessors > 0 && info.capability >= 50 && info.memory_bytes > 0);
    CHECK(info.driver_version >= OH_CU_MIN_VERSION && info.name[0] != '\0' &&
          info.bus_id[0] != '\0');
    printf("%s (%s) sm_%u, %u SMs, handle kinds 0x%x\n", info.name, info.bus_id, info.capability,
           info.multiprocessors, info.handle_kinds);
}

int main(void) {
    int pair[2], status;
    oh_device *device;
    oh_device_info info;
    alarm(120);
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    close(pair[child == 0 ? 0 : 1]);
    if (child == 0) {
        alarm(120);
        _exit(other_process(pair[1]));
    }
    gpu_begin();
    OK(oh_cuda_device_open(0, &device));
    OK(device->ops->info(device, &info));
    show(device);
    CHECK(info.handle_kinds & OH_HANDLE_FD);
    export_import(device, OH_HANDLE_FD, pair[0]);
    if (info.handle_kinds & OH_HANDLE_FABRIC) export_import(device, OH_HANDLE_FABRIC, pair[0]);
    share_within_process(device);
    local_and_host_memory(device);
    errors(device);
    no_leak(device);
    device->ops->close(device);
    close(pair[0]);
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    printf("ok\n");
    return 0;
}
