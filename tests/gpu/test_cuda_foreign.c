/* Memory that somebody else allocated, shared by classic IPC on a real GPU: a pointer into the
 * middle of an allocation of cuMemAlloc is opened by another process, which sees our bytes and we
 * see its; every kind of memory that cannot be shared so is refused by name; an address that is
 * used again gives the new bytes; ranks of one process share the pointer; nothing is left behind.
 *
 * The second process is forked before CUDA is used and opens onto the last GPU there is, so with
 * two GPUs the mapping goes over the link. It obeys orders from a socket. */
#include "gpu_test.h"

#include "device/mem_registry.h"

#include <dirent.h>
#include <sys/socket.h>
#include <sys/wait.h>

enum {
    WHOLE = 5 << 20,
    OFFSET = (1 << 20) + 256,
    PART = 3 << 20,
    CYCLES = 100
};

/* ---- orders to the other process
 * ----------------------------------------------------------------- */

enum {
    SLOTS = 4
};
typedef enum order_kind {
    OPEN,   /* into a slot that is free */
    LOOK,   /* the part at offset holds `byte` everywhere */
    WRITE,  /* `byte` into the part */
    CLOSE,  /* the slot */
    SAME,   /* slots `slot` and `other` are one mapping */
    REFUSE, /* a damaged handle */
    LEFT,   /* answers with the free bytes of its GPU */
} order_kind;

typedef struct order {
    order_kind kind;
    int slot, other;
    unsigned char byte;
    oh_mem_handle handle;
    uint64_t offset, bytes;
} order;

static uint64_t give_order(int socket, const order *o) {
    uint64_t answer = 0;
    CHECK(write(socket, o, sizeof *o) == (ssize_t)sizeof *o);
    CHECK(read(socket, &answer, sizeof answer) == (ssize_t)sizeof answer);
    return answer;
}

static uint64_t tell(int socket, order_kind kind, int slot, const order *exported,
                     unsigned char byte) {
    order o = *exported;
    o.kind = kind;
    o.slot = slot;
    o.byte = byte;
    return give_order(socket, &o);
}

static size_t free_bytes(oh_device *device) {
    size_t left = 0, total = 0;
    oh_cuda_scope scope;
    CHECK(oh_cuda_enter(oh_cuda_of(device), &scope) == ONEHOP_OK);
    DRIVER(gpu.cuMemGetInfo_v2(&left, &total));
    oh_cuda_leave(&scope);
    return left;
}

static void refuse_damaged(oh_device *device, const oh_mem_handle *good) {
    oh_mem none = {NULL, 0, NULL};
    oh_mem_handle bad = *good;
    bad.bytes = 0;
    EXPECT(ONEHOP_ERR_ARGUMENT, device->ops->mem_import(device, &bad, -1, &none));
    bad = *good;
    bad.base = 0;
    EXPECT(ONEHOP_ERR_ARGUMENT, device->ops->mem_import(device, &bad, -1, &none));
    bad = *good;
    memset(bad.tag, 0, sizeof bad.tag);
    EXPECT(ONEHOP_ERR_ARGUMENT, device->ops->mem_import(device, &bad, -1, &none));
    bad = *good;
    memset(bad.data, 0, sizeof bad.data);
    CHECK(device->ops->mem_import(device, &bad, -1, &none) != ONEHOP_OK);
    CHECK(strstr(onehop_last_error(), "cuIpcOpenMemHandle") != NULL);
    CHECK(none.ptr == NULL && none.owner == NULL);
}

static uint64_t obey(oh_device *device, const order *o, oh_mem *slots) {
    oh_mem *slot = &slots[o->slot];
    char *part = (char *)slot->ptr + o->offset;
    switch (o->kind) {
    case OPEN:
        CHECK(slot->ptr == NULL);
        OK(device->ops->mem_import(device, &o->handle, -1, slot));
        CHECK(slot->ptr != NULL && slot->bytes == o->handle.bytes);
        break;
    case LOOK:
        CHECK(gpu_all(device, part, o->bytes, o->byte));
        break;
    case WRITE:
        OK(device->ops->fill(device, part, o->byte, o->bytes));
        break;
    case CLOSE:
        device->ops->mem_release(device, slot);
        CHECK(slot->ptr == NULL && slot->owner == NULL);
        break;
    case SAME:
        return slot->ptr == slots[o->other].ptr;
    case REFUSE:
        refuse_damaged(device, &o->handle);
        break;
    case LEFT:
        return free_bytes(device);
    }
    return 0;
}

static int other_process(int socket) {
    oh_mem slots[SLOTS] = {{NULL, 0, NULL}};
    oh_device *device = NULL;
    order o;
    while (read(socket, &o, sizeof o) == (ssize_t)sizeof o) {
        if (device == NULL) {
            gpu_begin();
            OK(oh_cuda_device_open(oh_cuda_device_count() - 1, &device));
        }
        const uint64_t answer = obey(device, &o, slots);
        CHECK(write(socket, &answer, sizeof answer) == (ssize_t)sizeof answer);
    }
    if (device == NULL) return 0; /* the first process has skipped */
    CHECK(oh_cuda_of(device)->opened == NULL);
    device->ops->close(device);
    return 0;
}

/* ---- exports
 * ------------------------------------------------------------------------------------- */

static void export_at(oh_device *device, const void *ptr, size_t bytes, order *out) {
    int fd = 7;
    memset(out, 0, sizeof *out);
    out->bytes = bytes;
    OK(device->ops->foreign_export(device, ptr, bytes, &out->handle, &out->offset, &fd));
    CHECK(out->handle.kind == OH_HANDLE_IPC && fd == -1);
    CHECK(out->handle.base + out->offset == (uintptr_t)ptr);
    CHECK(out->offset + bytes <= out->handle.bytes);
}

/* Our bytes there, its bytes here, and not one beside the part. */
static void both_ways(oh_device *device, int socket) {
    char *memory;
    order o;
    OK(device->ops->local_alloc(device, WHOLE, (void **)&memory));
    OK(device->ops->fill(device, memory, 0x11, WHOLE));
    OK(device->ops->fill(device, memory + OFFSET, 0xA5, PART));
    export_at(device, memory + OFFSET, PART, &o);
    CHECK(o.offset == OFFSET && o.handle.bytes == WHOLE);
    tell(socket, REFUSE, 0, &o, 0);
    tell(socket, OPEN, 0, &o, 0);
    tell(socket, LOOK, 0, &o, 0xA5);
    tell(socket, WRITE, 0, &o, 0x5A);
    CHECK(gpu_all(device, memory + OFFSET, PART, 0x5A));
    CHECK(gpu_all(device, memory, OFFSET, 0x11));
    CHECK(gpu_all(device, memory + OFFSET + PART, WHOLE - OFFSET - PART, 0x11));
    tell(socket, CLOSE, 0, &o, 0);
    CHECK(gpu_all(device, memory + OFFSET, PART, 0x5A)); /* closing is not freeing */
    device->ops->local_free(device, memory);
}

/* Two tensors of one allocation are one mapping, which lives until the last is closed. Two small
 * allocations, which the driver cuts from one block, are two. */
static void counted(oh_device *device, int socket) {
    char *memory, *small[2];
    order first, second, s[2];
    OK(device->ops->local_alloc(device, WHOLE, (void **)&memory));
    OK(device->ops->fill(device, memory, 0x33, WHOLE));
    export_at(device, memory, 4096, &first);
    export_at(device, memory + OFFSET, 4096, &second);
    tell(socket, OPEN, 0, &first, 0);
    tell(socket, OPEN, 1, &second, 0);
    first.other = 1;
    CHECK(tell(socket, SAME, 0, &first, 0) == 1);
    tell(socket, CLOSE, 0, &first, 0);
    tell(socket, LOOK, 1, &second, 0x33);
    tell(socket, OPEN, 0, &first, 0);
    tell(socket, CLOSE, 1, &second, 0);
    tell(socket, LOOK, 0, &first, 0x33);
    tell(socket, CLOSE, 0, &first, 0);
    device->ops->local_free(device, memory);

    for (int i = 0; i < 2; i++) {
        OK(device->ops->local_alloc(device, 1024, (void **)&small[i]));
        OK(device->ops->fill(device, small[i], 0x40 + i, 1024));
        export_at(device, small[i] + 512, 512, &s[i]);
        tell(socket, OPEN, i, &s[i], 0);
    }
    for (int i = 0; i < 2; i++) tell(socket, LOOK, i, &s[i], (unsigned char)(0x40 + i));
    tell(socket, CLOSE, 0, &s[0], 0);
    tell(socket, LOOK, 1, &s[1], 0x41);
    tell(socket, CLOSE, 1, &s[1], 0);
    for (int i = 0; i < 2; i++) device->ops->local_free(device, small[i]);
}

/* ---- again and again
 * ----------------------------------------------------------------------------- */

static int open_descriptors(void) {
    int count = 0;
    DIR *directory = opendir("/proc/self/fd");
    CHECK(directory != NULL);
    while (readdir(directory) != NULL) count++;
    closedir(directory);
    return count;
}

/* Allocated, shared, freed: the next allocation mostly gets the same address, and must not be taken
 * for the one before. Returns where it lay. */
static void *one_cycle(oh_device *device, int socket, unsigned char byte) {
    char *memory;
    order o;
    OK(device->ops->local_alloc(device, WHOLE, (void **)&memory));
    OK(device->ops->fill(device, memory, byte, WHOLE));
    export_at(device, memory + OFFSET, 65536, &o);
    tell(socket, OPEN, 0, &o, 0);
    tell(socket, LOOK, 0, &o, byte);
    tell(socket, WRITE, 0, &o, (unsigned char)~byte);
    CHECK(gpu_all(device, memory + OFFSET, 65536, (unsigned char)~byte));
    tell(socket, CLOSE, 0, &o, 0);
    device->ops->local_free(device, memory);
    return memory;
}

static void no_leak(oh_device *device, int socket) {
    order o = {.kind = LEFT};
    int reused = 0;
    void *last = one_cycle(device, socket, 0);
    const size_t before = free_bytes(device), there = (size_t)give_order(socket, &o);
    const int descriptors = open_descriptors();
    for (int i = 1; i <= CYCLES; i++) {
        void *now = one_cycle(device, socket, (unsigned char)i);
        reused += now == last;
        last = now;
    }
    CHECK(open_descriptors() == descriptors);
    CHECK(free_bytes(device) + (32u << 20) > before); /* a leak of every cycle would be 500 MB */
    CHECK(give_order(socket, &o) + (32u << 20) > there);
    printf("%d cycles, %d at the address of the one before%s\n", CYCLES, reused,
           reused > 0 ? "" : ": WARNING: reuse of an address was not tested");
}

/* ---- refusals
 * ------------------------------------------------------------------------------------ */

static void refused(oh_device *device, const void *ptr, size_t bytes, onehop_result expected,
                    const char *sentence) {
    oh_mem_handle handle = {.kind = 99};
    uint64_t offset = 99;
    int fd = 99;
    EXPECT(expected, device->ops->foreign_export(device, ptr, bytes, &handle, &offset, &fd));
    if (strstr(onehop_last_error(), sentence) == NULL)
        gpu_fail(__FILE__, __LINE__, sentence); /* prints what was said instead */
    CHECK(handle.kind == 99 && offset == 99 && fd == 99);
}

static void refuse_ranges(oh_device *device) {
    char *memory;
    OK(device->ops->local_alloc(device, WHOLE, (void **)&memory));
    refused(device, memory, WHOLE + 1, ONEHOP_ERR_ARGUMENT, "not inside");
    refused(device, memory + OFFSET, WHOLE, ONEHOP_ERR_ARGUMENT, "not inside");
    refused(device, memory + OFFSET, SIZE_MAX, ONEHOP_ERR_ARGUMENT, "not inside");
    refused(device, memory, 0, ONEHOP_ERR_ARGUMENT, "not inside");
    device->ops->local_free(device, memory);
}

static void refuse_host_memory(oh_device *device) {
    char stack[64];
    void *plain = malloc(1 << 20), *host, *mapped;
    CHECK(plain != NULL);
    refused(device, stack, sizeof stack, ONEHOP_ERR_UNSUPPORTED, "plain host memory");
    refused(device, plain, 1 << 20, ONEHOP_ERR_UNSUPPORTED, "plain host memory");
    refused(device, NULL, 16, ONEHOP_ERR_UNSUPPORTED, "plain host memory");
    free(plain);
    OK(device->ops->host_alloc(device, 8192, &host, &mapped));
    refused(device, mapped, 8192, ONEHOP_ERR_UNSUPPORTED, "pinned host memory");
    device->ops->host_free(device, host);
}

/* One piece of mem_create, and two pieces side by side, as an allocator with growing segments has
 * them. */
static void refuse_virtual_memory(oh_device *device) {
    const oh_cu_memory_kind kind = oh_cuda_memory_kind(oh_cuda_of(device), OH_HANDLE_FD);
    const oh_cu_access access = {{OH_CU_LOCATION_DEVICE, oh_cuda_of(device)->ordinal},
                                 OH_CU_ACCESS_READWRITE};
    oh_cu_allocation pieces[2];
    oh_cu_ptr start = 0;
    oh_cuda_scope scope;
    size_t unit = 0;
    oh_mem mem;
    OK(device->ops->mem_create(device, WHOLE, 0, &mem));
    refused(device, (char *)mem.ptr + 4096, PART, ONEHOP_ERR_UNSUPPORTED, "virtual memory");
    device->ops->mem_release(device, &mem);

    CHECK(oh_cuda_enter(oh_cuda_of(device), &scope) == ONEHOP_OK);
    DRIVER(oh_cu.cuMemGetAllocationGranularity(&unit, &kind, OH_CU_GRANULARITY_RECOMMENDED));
    DRIVER(oh_cu.cuMemAddressReserve(&start, 2 * unit, unit, 0, 0));
    for (size_t i = 0; i < 2; i++) {
        DRIVER(oh_cu.cuMemCreate(&pieces[i], unit, &kind, 0));
        DRIVER(oh_cu.cuMemMap(start + i * unit, unit, 0, pieces[i], 0));
    }
    DRIVER(oh_cu.cuMemSetAccess(start, 2 * unit, &access, 1));
    refused(device, (void *)(uintptr_t)(start + unit / 2), unit, ONEHOP_ERR_UNSUPPORTED,
            "in several pieces");
    refused(device, (void *)(uintptr_t)(start + unit), unit, ONEHOP_ERR_UNSUPPORTED,
            "virtual memory");
    for (size_t i = 0; i < 2; i++) {
        DRIVER(oh_cu.cuMemUnmap(start + i * unit, unit));
        DRIVER(oh_cu.cuMemRelease(pieces[i]));
    }
    DRIVER(oh_cu.cuMemAddressFree(start, 2 * unit));
    oh_cuda_leave(&scope);
}

/* A driver function that only this test needs. */
static void take(const char *name, void *function) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    void *address = library != NULL ? dlsym(library, name) : NULL;
    CHECK(address != NULL);
    memcpy(function, &address, sizeof address);
}

static void refuse_pool_and_managed_memory(oh_device *device) {
    const unsigned int attach_global = 1;
    oh_cu_result (*alloc_async)(oh_cu_ptr *, size_t, oh_cu_stream);
    oh_cu_result (*free_async)(oh_cu_ptr, oh_cu_stream);
    oh_cu_result (*alloc_managed)(oh_cu_ptr *, size_t, unsigned int);
    const oh_cu_stream stream = oh_cuda_of(device)->stream;
    oh_cu_ptr address = 0;
    oh_cuda_scope scope;
    take("cuMemAllocAsync", &alloc_async);
    take("cuMemFreeAsync", &free_async);
    take("cuMemAllocManaged", &alloc_managed);
    CHECK(oh_cuda_enter(oh_cuda_of(device), &scope) == ONEHOP_OK);
    if (alloc_async(&address, WHOLE, stream) == OH_CU_SUCCESS) {
        DRIVER(oh_cu.cuStreamSynchronize(stream));
        refused(device, (void *)(uintptr_t)address, WHOLE, ONEHOP_ERR_UNSUPPORTED, "memory pool");
        DRIVER(free_async(address, stream));
        DRIVER(oh_cu.cuStreamSynchronize(stream));
    } else {
        printf("no memory pools here\n");
    }
    if (alloc_managed(&address, WHOLE, attach_global) == OH_CU_SUCCESS) {
        refused(device, (void *)(uintptr_t)address, WHOLE, ONEHOP_ERR_UNSUPPORTED,
                "managed memory");
        DRIVER(oh_cu.cuMemFree_v2(address));
    } else {
        printf("no managed memory here\n");
    }
    oh_cuda_leave(&scope);
}

static void refuse_memory_of_another_gpu(oh_device *device) {
    oh_device *far;
    void *memory;
    if (oh_cuda_device_count() < 2) return;
    OK(oh_cuda_device_open(1, &far));
    OK(far->ops->local_alloc(far, WHOLE, &memory));
    refused(device, memory, WHOLE, ONEHOP_ERR_UNSUPPORTED, "lies on GPU 1");
    far->ops->local_free(far, memory);
    far->ops->close(far);
}

/* ---- within this process, and our own allocations
 * ------------------------------------------------ */

static void share_within_process(oh_device *owner) {
    oh_device *reader;
    char *memory;
    oh_mem shared;
    order o;
    OK(oh_cuda_device_open(oh_cuda_device_count() - 1, &reader));
    OK(owner->ops->local_alloc(owner, WHOLE, (void **)&memory));
    OK(owner->ops->fill(owner, memory, 0x61, WHOLE));
    export_at(owner, memory + OFFSET, PART, &o);
    for (int i = 0; i < 2; i++) {
        oh_mem_handle unused;
        int fd;
        OK(reader->ops->mem_import(reader, &o.handle, -1, &shared));
        CHECK(shared.ptr == memory && shared.bytes == WHOLE);
        EXPECT(ONEHOP_ERR_ARGUMENT, reader->ops->mem_export(reader, &shared, &unused, &fd));
        CHECK(gpu_all(reader, (char *)shared.ptr + o.offset, PART, (unsigned char)(0x61 + i)));
        OK(reader->ops->fill(reader, (char *)shared.ptr + o.offset, 0x62 + i, PART));
        CHECK(gpu_all(owner, memory + OFFSET, PART, (unsigned char)(0x62 + i)));
        reader->ops->mem_release(reader, &shared);
        CHECK(shared.ptr == NULL);
    }
    owner->ops->local_free(owner, memory);
    EXPECT(ONEHOP_ERR_ARGUMENT, reader->ops->mem_import(reader, &o.handle, -1, &shared));
    CHECK(strstr(onehop_last_error(), "was freed") != NULL);
    reader->ops->close(reader);
}

/* Memory of onehop_mem_alloc goes by its own handle, as a whole, wherever in it the pointer lies.
 */
static void registered_memory(oh_device *device) {
    const onehop_device which = {ONEHOP_DEVICE_CUDA, 0};
    oh_mem_handle handle;
    oh_mem shared;
    uint64_t offset = 0;
    void *memory;
    int fd = -1;
    OK(onehop_mem_alloc(which, WHOLE, &memory));
    OK(device->ops->foreign_export(device, (char *)memory + OFFSET, PART, &handle, &offset, &fd));
    CHECK(handle.kind != OH_HANDLE_IPC && handle.bytes >= WHOLE && offset == OFFSET);
    CHECK((handle.kind == OH_HANDLE_FD) == (fd >= 0));
    OK(device->ops->mem_import(device, &handle, fd, &shared));
    CHECK(shared.ptr == memory);
    device->ops->mem_release(device, &shared);
    if (fd >= 0) close(fd);
    refused(device, memory, (size_t)handle.bytes + 1, ONEHOP_ERR_ARGUMENT, "not inside");
    onehop_mem_free(memory);
}

int main(void) {
    int pair[2], status;
    oh_device *device;
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
    printf("GPU 0 to GPU %d\n", oh_cuda_device_count() - 1);
    both_ways(device, pair[0]);
    counted(device, pair[0]);
    no_leak(device, pair[0]);
    refuse_ranges(device);
    refuse_host_memory(device);
    refuse_virtual_memory(device);
    refuse_pool_and_managed_memory(device);
    refuse_memory_of_another_gpu(device);
    share_within_process(device);
    registered_memory(device);
    device->ops->close(device);
    close(pair[0]);
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    printf("ok\n");
    return 0;
}
