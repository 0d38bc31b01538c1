/* Property: memory that somebody else allocated is shared rightly, or the kind of memory is named
 * in the error. A pointer into the middle of an allocation of cuMemAlloc, or of chunks of virtual
 * memory side by side, is mapped by another process; each process sees the other's bytes. An
 * address that is used again gives the new bytes, ranks of one process share the pointer, and
 * nothing is left behind.
 *
 * The second process is forked before CUDA is used and opens onto the last GPU there is, so with
 * two GPUs the mapping goes over the link. It obeys orders from a socket. */
#include "gpu_test.h"

#include <dirent.h>
#include <sys/socket.h>
#include <sys/wait.h>

enum {
    WHOLE = 5 << 20,
    OFFSET = (1 << 20) + 256,
    PART = 3 << 20,
    CYCLES = 100
};

/* ---- orders to the other process ------------------------------------------------------------- */

enum {
    SLOTS = 4
};
typedef enum order_kind {
    MAP,    /* the piece into the slot's span */
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
    oh_mem_handle piece;
    uint64_t span_bytes, at; /* of the span, and of the piece in it */
    uint64_t offset, bytes;  /* of the part in the span */
} order;

typedef union fd_message {
    struct cmsghdr header;
    char bytes[CMSG_SPACE(sizeof(int))];
} fd_message;

static struct msghdr message_of(struct iovec *part, fd_message *control) {
    struct msghdr message;
    memset(&message, 0, sizeof message);
    message.msg_iov = part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof *control;
    return message;
}

/* With a descriptor, unless fd is -1. */
static uint64_t give_order_with(int socket, const order *o, int fd) {
    uint64_t answer = 0;
    fd_message control;
    struct iovec part = {(void *)(uintptr_t)o, sizeof *o};
    struct msghdr message = message_of(&part, &control);
    memset(&control, 0, sizeof control);
    if (fd < 0) {
        message.msg_control = NULL;
        message.msg_controllen = 0;
    } else {
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(header), &fd, sizeof fd);
    }
    CHECK(sendmsg(socket, &message, 0) == (ssize_t)sizeof *o);
    CHECK(read(socket, &answer, sizeof answer) == (ssize_t)sizeof answer);
    return answer;
}

static uint64_t give_order(int socket, const order *o) {
    return give_order_with(socket, o, -1);
}

/* False at the end of the orders. */
static bool take_order(int socket, order *o, int *fd_out) {
    fd_message control;
    struct iovec part = {o, sizeof *o};
    struct msghdr message = message_of(&part, &control);
    if (recvmsg(socket, &message, MSG_CMSG_CLOEXEC) != (ssize_t)sizeof *o) return false;
    const struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    *fd_out = -1;
    if (header != NULL) memcpy(fd_out, CMSG_DATA(header), sizeof *fd_out);
    return true;
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
    EXPECT(ONEHOP_ERR_ARGUMENT, device->ops->foreign_map(device, &bad, -1, WHOLE, 0, &none));
    bad = *good;
    bad.base = 0;
    EXPECT(ONEHOP_ERR_ARGUMENT, device->ops->foreign_map(device, &bad, -1, WHOLE, 0, &none));
    bad = *good;
    memset(&bad.process, 0, sizeof bad.process);
    EXPECT(ONEHOP_ERR_ARGUMENT, device->ops->foreign_map(device, &bad, -1, WHOLE, 0, &none));
    bad = *good;
    bad.kind = OH_HANDLE_FD;
    EXPECT(ONEHOP_ERR_ARGUMENT, device->ops->foreign_map(device, &bad, -1, WHOLE, 0, &none));
    EXPECT(ONEHOP_ERR_ARGUMENT, device->ops->foreign_map(device, good, -1, 2 * WHOLE, 0, &none));
    EXPECT(ONEHOP_ERR_ARGUMENT, device->ops->foreign_map(device, good, -1, WHOLE, 4096, &none));
    bad = *good;
    bad.kind = OH_HANDLE_NONE;
    EXPECT(ONEHOP_ERR_UNSUPPORTED, device->ops->foreign_map(device, &bad, -1, WHOLE, 0, &none));
    bad = *good;
    memset(bad.data, 0, sizeof bad.data);
    CHECK(device->ops->foreign_map(device, &bad, -1, WHOLE, 0, &none) != ONEHOP_OK);
    CHECK(strstr(onehop_last_error(), "cuIpcOpenMemHandle") != NULL);
    CHECK(none.ptr == NULL && none.owner == NULL);
}

static uint64_t obey(oh_device *device, const order *o, int fd, oh_mem *slots) {
    oh_mem *slot = &slots[o->slot];
    char *part = (char *)slot->ptr + o->offset;
    switch (o->kind) {
    case MAP:
        CHECK(slot->ptr == NULL || o->at > 0);
        OK(device->ops->foreign_map(device, &o->piece, fd, o->span_bytes, o->at, slot));
        CHECK(slot->ptr != NULL && slot->bytes == o->span_bytes);
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
        refuse_damaged(device, &o->piece);
        break;
    case LEFT:
        return free_bytes(device);
    }
    return 0;
}

static int open_descriptors(void) {
    int count = 0;
    DIR *directory = opendir("/proc/self/fd");
    CHECK(directory != NULL);
    while (readdir(directory) != NULL) count++;
    closedir(directory);
    return count;
}

static int other_process(int socket) {
    oh_mem slots[SLOTS] = {{NULL, 0, NULL}};
    oh_device *device = NULL;
    order o;
    int fd, descriptors = 0;
    while (take_order(socket, &o, &fd)) {
        if (device == NULL) {
            gpu_begin();
            OK(oh_cuda_device_open(oh_cuda_device_count() - 1, &device));
        }
        const uint64_t answer = obey(device, &o, fd, slots);
        if (fd >= 0) close(fd);
        if (o.kind == LEFT && descriptors == 0) descriptors = open_descriptors();
        CHECK(write(socket, &answer, sizeof answer) == (ssize_t)sizeof answer);
    }
    if (device == NULL) return 0; /* the first process has skipped */
    CHECK(oh_cuda_of(device)->opened == NULL);
    CHECK(open_descriptors() == descriptors);
    device->ops->close(device);
    return 0;
}

/* ---- exports --------------------------------------------------------------------------------- */

static oh_mem_handle *find_pieces(oh_device *device, const void *ptr, size_t bytes, size_t *count) {
    const oh_range range = {(uintptr_t)ptr, bytes};
    oh_mem_handle *pieces = NULL;
    OK(device->ops->foreign_find(device, &range, 1,
                                 oh_cuda_of(device)->handle_kinds | OH_HANDLE_IPC, &pieces, count));
    return pieces;
}

/* Memory of one allocation. */
static void export_at(oh_device *device, const void *ptr, size_t bytes, order *out) {
    size_t count = 0;
    oh_mem_handle *piece = find_pieces(device, ptr, bytes, &count);
    memset(out, 0, sizeof *out);
    CHECK(count == 1 && piece->kind == OH_HANDLE_IPC);
    out->piece = *piece;
    out->span_bytes = piece->bytes;
    out->bytes = bytes;
    out->offset = (uintptr_t)ptr - piece->base;
    CHECK(out->offset + bytes <= piece->bytes);
    free(piece);
}

/* Our bytes there, its bytes here, and not one beside the part. */
static void both_ways(oh_device *device, int socket) {
    char *memory;
    order o;
    OK(device->ops->local_alloc(device, WHOLE, (void **)&memory));
    OK(device->ops->fill(device, memory, 0x11, WHOLE));
    OK(device->ops->fill(device, memory + OFFSET, 0xA5, PART));
    export_at(device, memory + OFFSET, PART, &o);
    CHECK(o.offset == OFFSET && o.piece.bytes == WHOLE);
    tell(socket, REFUSE, 0, &o, 0);
    tell(socket, MAP, 0, &o, 0);
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
    tell(socket, MAP, 0, &first, 0);
    tell(socket, MAP, 1, &second, 0);
    first.other = 1;
    CHECK(tell(socket, SAME, 0, &first, 0) == 1);
    tell(socket, CLOSE, 0, &first, 0);
    tell(socket, LOOK, 1, &second, 0x33);
    tell(socket, MAP, 0, &first, 0);
    tell(socket, CLOSE, 1, &second, 0);
    tell(socket, LOOK, 0, &first, 0x33);
    tell(socket, CLOSE, 0, &first, 0);
    device->ops->local_free(device, memory);

    for (int i = 0; i < 2; i++) {
        OK(device->ops->local_alloc(device, 1024, (void **)&small[i]));
        OK(device->ops->fill(device, small[i], 0x40 + i, 1024));
        export_at(device, small[i] + 512, 512, &s[i]);
        tell(socket, MAP, i, &s[i], 0);
    }
    for (int i = 0; i < 2; i++) tell(socket, LOOK, i, &s[i], (unsigned char)(0x40 + i));
    tell(socket, CLOSE, 0, &s[0], 0);
    tell(socket, LOOK, 1, &s[1], 0x41);
    tell(socket, CLOSE, 1, &s[1], 0);
    for (int i = 0; i < 2; i++) device->ops->local_free(device, small[i]);
}

/* ---- again and again ------------------------------------------------------------------------- */

/* Allocated, shared, freed: the next allocation mostly gets the same address, and must not be taken
 * for the one before. Returns where it lay. */
static void *one_cycle(oh_device *device, int socket, unsigned char byte) {
    char *memory;
    order o;
    OK(device->ops->local_alloc(device, WHOLE, (void **)&memory));
    OK(device->ops->fill(device, memory, byte, WHOLE));
    export_at(device, memory + OFFSET, 65536, &o);
    tell(socket, MAP, 0, &o, 0);
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

/* ---- chunks side by side --------------------------------------------------------------------- */

enum {
    CHUNKS = 3
};

/* As an allocator with growing segments has them; the last is made without a handle if so
 * wanted. */
typedef struct segment {
    oh_cu_allocation chunks[CHUNKS];
    oh_cu_ptr start;
    size_t unit;
} segment;

static segment make_segment(oh_device *device, bool last_private) {
    const oh_cu_memory_kind kind = oh_cuda_memory_kind(oh_cuda_of(device), OH_HANDLE_FD);
    const oh_cu_memory_kind unshared = oh_cuda_memory_kind(oh_cuda_of(device), 0);
    const oh_cu_access access = {{OH_CU_LOCATION_DEVICE, oh_cuda_of(device)->ordinal},
                                 OH_CU_ACCESS_READWRITE};
    oh_cuda_scope scope;
    segment s;
    CHECK(oh_cuda_enter(oh_cuda_of(device), &scope) == ONEHOP_OK);
    DRIVER(oh_cu.cuMemGetAllocationGranularity(&s.unit, &kind, OH_CU_GRANULARITY_RECOMMENDED));
    DRIVER(oh_cu.cuMemAddressReserve(&s.start, CHUNKS * s.unit, s.unit, 0, 0));
    for (size_t i = 0; i < CHUNKS; i++) {
        const oh_cu_memory_kind *this = last_private && i == CHUNKS - 1 ? &unshared : &kind;
        DRIVER(oh_cu.cuMemCreate(&s.chunks[i], s.unit, this, 0));
        DRIVER(oh_cu.cuMemMap(s.start + i * s.unit, s.unit, 0, s.chunks[i], 0));
    }
    DRIVER(oh_cu.cuMemSetAccess(s.start, CHUNKS * s.unit, &access, 1));
    oh_cuda_leave(&scope);
    return s;
}

static void drop_segment(oh_device *device, const segment *s) {
    oh_cuda_scope scope;
    CHECK(oh_cuda_enter(oh_cuda_of(device), &scope) == ONEHOP_OK);
    for (size_t i = 0; i < CHUNKS; i++) {
        DRIVER(oh_cu.cuMemUnmap(s->start + i * s->unit, s->unit));
        DRIVER(oh_cu.cuMemRelease(s->chunks[i]));
    }
    DRIVER(oh_cu.cuMemAddressFree(s->start, CHUNKS * s->unit));
    oh_cuda_leave(&scope);
}

/* From the middle of the first chunk to that of the last; there the chunks lie side by side too. */
static void chunks_both_ways(oh_device *device, int socket) {
    const segment s = make_segment(device, false);
    char *start = (char *)(uintptr_t)s.start, *part = start + s.unit / 2;
    const size_t bytes = 2 * s.unit;
    size_t count = 0;
    order o;
    OK(device->ops->fill(device, start, 0x11, CHUNKS * s.unit));
    OK(device->ops->fill(device, part, 0xA5, bytes));
    oh_mem_handle *pieces = find_pieces(device, part, bytes, &count);
    CHECK(count == CHUNKS);
    memset(&o, 0, sizeof o);
    o.kind = MAP;
    o.span_bytes = CHUNKS * s.unit;
    o.offset = s.unit / 2;
    o.bytes = bytes;
    for (size_t i = 0; i < CHUNKS; i++) {
        int fd = -1;
        CHECK(pieces[i].kind == OH_HANDLE_FD && pieces[i].bytes == s.unit);
        CHECK(pieces[i].base == s.start + i * s.unit);
        CHECK(i == 0 || oh_foreign_joins(&pieces[i - 1], &pieces[i]));
        OK(device->ops->foreign_descriptor(device, &pieces[i], &fd));
        o.piece = pieces[i];
        o.at = i * s.unit;
        give_order_with(socket, &o, fd);
        close(fd);
    }
    tell(socket, LOOK, 0, &o, 0xA5);
    tell(socket, WRITE, 0, &o, 0x5A);
    CHECK(gpu_all(device, part, bytes, 0x5A));
    CHECK(gpu_all(device, start, s.unit / 2, 0x11));
    CHECK(gpu_all(device, part + bytes, s.unit / 2, 0x11));
    tell(socket, CLOSE, 0, &o, 0);
    /* A span that is not complete is released as well. */
    int fd = -1;
    OK(device->ops->foreign_descriptor(device, &pieces[0], &fd));
    o.piece = pieces[0];
    o.kind = MAP;
    o.at = 0;
    give_order_with(socket, &o, fd);
    close(fd);
    tell(socket, CLOSE, 0, &o, 0);
    CHECK(gpu_all(device, part, bytes, 0x5A)); /* unmapping there is not freeing */
    free(pieces);
    drop_segment(device, &s);
}

/* ---- memory that is not shared --------------------------------------------------------------- */

/* The piece in which ptr lies says what it is. */
static void unshared(oh_device *device, const void *ptr, size_t bytes, const char *sentence) {
    size_t count = 0;
    oh_mem_handle *pieces = find_pieces(device, ptr, bytes, &count);
    oh_mem span = {NULL, 0, NULL};
    CHECK(count == 1);
    CHECK(pieces[0].kind == OH_HANDLE_NONE && pieces[0].base <= (uintptr_t)ptr);
    CHECK(pieces[0].base + pieces[0].bytes >= (uintptr_t)ptr + bytes);
    if (strstr((char *)pieces[0].data, sentence) == NULL) {
        fprintf(stderr, "it says: %s\n", (char *)pieces[0].data);
        gpu_fail(__FILE__, __LINE__, sentence);
    }
    pieces[0].process.word[0] ^= 1; /* of another process, then */
    EXPECT(ONEHOP_ERR_UNSUPPORTED,
           device->ops->foreign_map(device, pieces, -1, pieces[0].bytes, 0, &span));
    CHECK(strstr(onehop_last_error(), sentence) != NULL && span.ptr == NULL);
    free(pieces);
}

/* Beyond the end of an allocation lies something else. */
static void walk_over_the_end(oh_device *device) {
    char *memory;
    size_t count = 0;
    OK(device->ops->local_alloc(device, WHOLE, (void **)&memory));
    oh_mem_handle *pieces = find_pieces(device, memory + OFFSET, 2 * WHOLE, &count);
    CHECK(count >= 2 && pieces[0].base == (uintptr_t)memory && pieces[0].bytes == WHOLE);
    for (size_t i = 1; i < count; i++) CHECK(!oh_foreign_joins(&pieces[i - 1], &pieces[i]));
    free(pieces);
    device->ops->local_free(device, memory);
}

static void host_memory(oh_device *device) {
    char stack[64];
    void *plain = malloc(1 << 20), *host, *mapped;
    CHECK(plain != NULL);
    unshared(device, stack, sizeof stack, "plain host memory");
    unshared(device, plain, 1 << 20, "plain host memory");
    free(plain);
    OK(device->ops->host_alloc(device, 8192, &host, &mapped));
    unshared(device, mapped, 8192, "pinned host memory");
    device->ops->host_free(device, host);
}

static void chunk_without_handle(oh_device *device) {
    const segment s = make_segment(device, true);
    size_t count = 0;
    oh_mem_handle *pieces =
        find_pieces(device, (void *)(uintptr_t)s.start, CHUNKS * s.unit, &count);
    CHECK(count == CHUNKS && pieces[0].kind == OH_HANDLE_FD && pieces[1].kind == OH_HANDLE_FD);
    CHECK(!oh_foreign_joins(&pieces[1], &pieces[2]));
    free(pieces);
    unshared(device, (void *)(uintptr_t)(s.start + 2 * s.unit), s.unit, "without a handle");
    drop_segment(device, &s);
}

/* A driver function that only this test needs. */
static void take(const char *name, void *function) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    void *address = library != NULL ? dlsym(library, name) : NULL;
    CHECK(address != NULL);
    memcpy(function, &address, sizeof address);
}

static void pool_and_managed_memory(oh_device *device) {
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
        unshared(device, (void *)(uintptr_t)address, WHOLE, "memory pool");
        DRIVER(free_async(address, stream));
        DRIVER(oh_cu.cuStreamSynchronize(stream));
    } else {
        printf("no memory pools here\n");
    }
    if (alloc_managed(&address, WHOLE, attach_global) == OH_CU_SUCCESS) {
        unshared(device, (void *)(uintptr_t)address, WHOLE, "managed memory");
        DRIVER(oh_cu.cuMemFree_v2(address));
    } else {
        printf("no managed memory here\n");
    }
    oh_cuda_leave(&scope);
}

static void memory_of_another_gpu(oh_device *device) {
    oh_device *far;
    void *memory;
    if (oh_cuda_device_count() < 2) return;
    OK(oh_cuda_device_open(1, &far));
    OK(far->ops->local_alloc(far, WHOLE, &memory));
    unshared(device, memory, WHOLE, "another GPU");
    far->ops->local_free(far, memory);
    far->ops->close(far);
}

/* ---- within this process, and our own allocations -------------------------------------------- */

static void share_pieces(oh_device *owner, oh_device *reader, char *memory, size_t bytes,
                         size_t expected) {
    size_t count = 0;
    oh_mem shared = {NULL, 0, NULL};
    OK(owner->ops->fill(owner, memory, 0x61, bytes));
    oh_mem_handle *pieces = find_pieces(owner, memory, bytes, &count);
    CHECK(count == expected);
    const oh_mem_handle *last = &pieces[count - 1];
    const uint64_t span_bytes = last->base + last->bytes - pieces[0].base;
    for (int round = 0; round < 2; round++) {
        for (size_t i = 0; i < count; i++)
            OK(reader->ops->foreign_map(reader, &pieces[i], -1, span_bytes,
                                        pieces[i].base - pieces[0].base, &shared));
        CHECK((uintptr_t)shared.ptr == pieces[0].base && shared.owner == NULL);
        CHECK(gpu_all(reader, memory, bytes, (unsigned char)(0x61 + round)));
        OK(reader->ops->fill(reader, memory, 0x62 + round, bytes));
        CHECK(gpu_all(owner, memory, bytes, (unsigned char)(0x62 + round)));
        reader->ops->mem_release(reader, &shared);
        CHECK(shared.ptr == NULL);
    }
    free(pieces);
}

static void share_within_process(oh_device *owner) {
    const onehop_device which = {ONEHOP_DEVICE_CUDA, 0};
    oh_device *reader;
    char *memory;
    OK(oh_cuda_device_open(oh_cuda_device_count() - 1, &reader));
    OK(owner->ops->local_alloc(owner, WHOLE, (void **)&memory));
    share_pieces(owner, reader, memory + OFFSET, PART, 1);
    owner->ops->local_free(owner, memory);
    const segment s = make_segment(owner, false);
    share_pieces(owner, reader, (char *)(uintptr_t)s.start + 256, CHUNKS * s.unit - 256, CHUNKS);
    drop_segment(owner, &s);
    OK(onehop_mem_alloc(which, WHOLE, (void **)&memory));
    share_pieces(owner, reader, memory + OFFSET, PART, 1);
    onehop_mem_free(memory);
    reader->ops->close(reader);
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
    chunks_both_ways(device, pair[0]);
    no_leak(device, pair[0]);
    walk_over_the_end(device);
    host_memory(device);
    chunk_without_handle(device);
    pool_and_managed_memory(device);
    memory_of_another_gpu(device);
    share_within_process(device);
    device->ops->close(device);
    close(pair[0]);
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    printf("ok\n");
    return 0;
}
