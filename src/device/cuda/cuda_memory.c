/* Memory that peers can map, through the driver's virtual memory calls: a piece of physical memory,
 * a range of addresses, a mapping, and access rights per GPU.
 *
 * Why not cuMemAlloc with classic IPC: a descriptor can be sent over a socket, access is given to
 * the GPUs that need it and to no other, and the mapping of a process that died stays valid until
 * we unmap it.
 *
 * In one process there is one mapping of a piece, shared by all ranks: a record counts them, and
 * the last release frees, whichever device it comes from. An import of what this very process
 * exported finds the record and shares it, so the layers above need not know who lives where. The
 * record retains the primary context of the device that made it, so the memory outlives the
 * oh_device of its first owner. */
#include "device/cuda/cuda_device.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct memory {
    oh_cuda_owner head;
    int references;      /* guarded by `own.lock` */
    struct memory *next; /* among `own`, if this process created it; guarded by `own.lock` */
    /* What a handle to it carries: 16 random bytes beside a descriptor, or the fabric handle
     * itself, once exported. Nobody else's handle can be equal by chance. */
    unsigned char tag[16];
    unsigned char fabric[64]; /* guarded by `own.lock` */
    bool fabric_known;        /* the same */
    /* GPUs that have access, one bit per ordinal. Only saves a driver call: a bit is set after the
     * access was given, and giving it twice is harmless; release/acquire so that who reads the bit
     * may use it. */
    _Atomic uint64_t reachable;
    int ordinal;    /* of the GPU that created or imported it */
    uint32_t kinds; /* oh_handle_kind bits it can be exported as */
    oh_cu_device device;
    size_t bytes;
    /* What teardown undoes, in reverse; zero: not acquired. */
    bool retained;
    bool allocated;
    oh_cu_allocation allocation;
    oh_cu_ptr address;
    bool mapped;
} memory;

static struct {
    pthread_mutex_t lock;
    memory *first;
} own = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* The recommended granularity, not the minimum: it lets the driver use its largest pages, and a
 * peer that reads tens of megabytes over the link pays for every page. The minimum would only save
 * bytes in small pieces, of which there are few. */
static onehop_result granularity_of(const oh_cuda_device *device, const oh_cu_memory_kind *kind,
                                    size_t *out) {
    oh_cu_result result =
        oh_cu.cuMemGetAllocationGranularity(out, kind, OH_CU_GRANULARITY_RECOMMENDED);
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error(result, "cuMemGetAllocationGranularity", "allocating on GPU %d",
                             device->ordinal);
    return ONEHOP_OK;
}

/* ---- one record: acquire and tear down ------------------------------------------------------- */

/* Within a scope. Accepts any prefix. */
static void tear_down(memory *m) {
    if (m->mapped) oh_cu.cuMemUnmap(m->address, m->bytes);
    if (m->allocated) oh_cu.cuMemRelease(m->allocation);
    if (m->address != 0) oh_cu.cuMemAddressFree(m->address, m->bytes);
    if (m->retained) oh_cu.cuDevicePrimaryCtxRelease_v2(m->device);
    free(m);
}

static onehop_result new_record(const oh_cuda_device *device, size_t bytes, memory **out) {
    oh_cu_context same = NULL;
    memory *m = calloc(1, sizeof *m);
    if (m == NULL) return oh_error(ONEHOP_ERR_MEMORY, "no memory for the record of an allocation");
    oh_cu_result result = oh_cu.cuDevicePrimaryCtxRetain(&same, device->device);
    if (result != OH_CU_SUCCESS) {
        free(m);
        return oh_cuda_error(result, "cuDevicePrimaryCtxRetain", "allocating on GPU %d",
                             device->ordinal);
    }
    m->retained = true;
    m->references = 1;
    m->ordinal = device->ordinal;
    m->device = device->device;
    m->bytes = bytes;
    *out = m;
    return ONEHOP_OK;
}

/* Rights are additive: only the named GPU's change. Two ranks of one GPU may ask at the same time,
 * and the driver refuses the second of two such calls in flight (CUDA_ERROR_ALREADY_MAPPED): one at
 * a time. */
static oh_cu_result set_access(const oh_cuda_device *device, oh_cu_ptr at, size_t bytes) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    const oh_cu_access access = {{OH_CU_LOCATION_DEVICE, device->ordinal}, OH_CU_ACCESS_READWRITE};
    pthread_mutex_lock(&lock);
    oh_cu_result result = oh_cu.cuMemSetAccess(at, bytes, &access, 1);
    pthread_mutex_unlock(&lock);
    return result;
}

onehop_result oh_cuda_give_access(const oh_cuda_device *device, oh_cu_ptr at, size_t bytes) {
    const oh_cu_result result = set_access(device, at, bytes);
    if (result == OH_CU_INVALID_DEVICE || result == OH_CU_NOT_SUPPORTED ||
        result == OH_CU_PEER_UNSUPPORTED)
        return oh_cuda_error_as(
            ONEHOP_ERR_UNSUPPORTED, result, "cuMemSetAccess",
            "giving GPU %d access to memory of a peer: there is no peer-to-peer "
            "path between the two",
            device->ordinal);
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error(result, "cuMemSetAccess", "giving GPU %d access to %zu bytes",
                             device->ordinal, bytes);
    return ONEHOP_OK;
}

/* The bit only saves the call. */
static onehop_result give_access(const oh_cuda_device *device, memory *m) {
    uint64_t bit = device->ordinal < 64 ? (uint64_t)1 << device->ordinal : 0;
    if (atomic_load_explicit(&m->reachable, memory_order_acquire) & bit) return ONEHOP_OK;
    onehop_result error = oh_cuda_give_access(device, m->address, m->bytes);
    if (error == ONEHOP_OK) atomic_fetch_or_explicit(&m->reachable, bit, memory_order_release);
    return error;
}

/* Addresses for the piece in m->allocation, reachable by `device`. */
static onehop_result map_piece(const oh_cuda_device *device, memory *m, size_t unit) {
    oh_cu_result result = oh_cu.cuMemAddressReserve(&m->address, m->bytes, unit, 0, 0);
    if (result != OH_CU_SUCCESS) {
        m->address = 0;
        return oh_cuda_error(result, "cuMemAddressReserve", "reserving addresses for %zu bytes",
                             m->bytes);
    }
    result = oh_cu.cuMemMap(m->address, m->bytes, 0, m->allocation, 0);
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error(result, "cuMemMap", "mapping %zu bytes for GPU %d", m->bytes,
                             device->ordinal);
    m->mapped = true;
    return give_access(device, m);
}

/* ---- the list of what this process created --------------------------------------------------- */

static void list(memory *m) {
    pthread_mutex_lock(&own.lock);
    m->next = own.first;
    own.first = m;
    pthread_mutex_unlock(&own.lock);
}

static bool handle_names(const oh_mem_handle *handle, const memory *m) {
    if (handle->bytes != m->bytes) return false;
    if (handle->kind == OH_HANDLE_FD) return memcmp(handle->data, m->tag, sizeof m->tag) == 0;
    return m->fabric_known && memcmp(handle->data, m->fabric, sizeof m->fabric) == 0;
}

/* The record of an own piece with one reference more, or NULL. */
static memory *find_own(const oh_mem_handle *handle) {
    pthread_mutex_lock(&own.lock);
    memory *m = own.first;
    while (m != NULL && !handle_names(handle, m)) m = m->next;
    if (m != NULL) m->references++;
    pthread_mutex_unlock(&own.lock);
    return m;
}

/* True if that was the last reference; the record is then off the list. */
static bool drop_reference(memory *m) {
    pthread_mutex_lock(&own.lock);
    bool last = --m->references == 0;
    memory **link = &own.first;
    while (last && *link != NULL && *link != m) link = &(*link)->next;
    if (last && *link != NULL) *link = m->next; /* imported records are on no list */
    pthread_mutex_unlock(&own.lock);
    return last;
}

static void describe(memory *m, oh_mem *out) {
    out->ptr = (void *)(uintptr_t)m->address;
    out->bytes = m->bytes;
    out->owner = m;
}

/* ---- create and export ----------------------------------------------------------------------- */

/* Within a scope. */
static onehop_result create_here(const oh_cuda_device *device, size_t bytes, uint32_t kinds,
                                 oh_mem *out) {
    oh_cu_memory_kind kind = oh_cuda_memory_kind(device, kinds);
    size_t unit = 0;
    memory *m = NULL;
    onehop_result error = granularity_of(device, &kind, &unit);
    if (error == ONEHOP_OK) error = new_record(device, oh_round_up(bytes, unit), &m);
    if (error != ONEHOP_OK) return error;
    m->kinds = kinds;
    error = oh_random(m->tag, sizeof m->tag);
    if (error != ONEHOP_OK) {
        tear_down(m);
        return error;
    }
    oh_cu_result result = oh_cu.cuMemCreate(&m->allocation, m->bytes, &kind, 0);
    m->allocated = result == OH_CU_SUCCESS;
    if (!m->allocated)
        error = oh_cuda_error(result, "cuMemCreate", "allocating %zu bytes on GPU %d", m->bytes,
                              device->ordinal);
    if (error == ONEHOP_OK) error = map_piece(device, m, unit);
    if (error == ONEHOP_OK) error = oh_cuda_fill_here(device, m->address, 0, m->bytes);
    if (error != ONEHOP_OK) {
        tear_down(m);
        return error;
    }
    list(m);
    describe(m, out);
    return ONEHOP_OK;
}

/* `kinds` 0 means: every kind that works here. */
onehop_result oh_cuda_mem_create(oh_device *base, size_t bytes, uint32_t kinds, oh_mem *out) {
    oh_cuda_device *device = oh_cuda_of(base);
    uint32_t usable = kinds == 0 ? device->handle_kinds : kinds & device->handle_kinds;
    oh_cuda_scope scope;
    if (bytes == 0 || bytes > SIZE_MAX / 2)
        return oh_error(ONEHOP_ERR_ARGUMENT, "%zu bytes cannot be allocated", bytes);
    if (usable == 0)
        return oh_error(ONEHOP_ERR_UNSUPPORTED,
                        "GPU %d cannot give its memory to other processes as asked: kinds 0x%x are "
                        "wanted, 0x%x worked in a trial (1 descriptor, 2 fabric)",
                        device->ordinal, kinds, device->handle_kinds);
    onehop_result error = oh_cuda_enter(device, &scope);
    if (error != ONEHOP_OK) return error;
    error = create_here(device, bytes, usable, out);
    oh_cuda_leave(&scope);
    return error;
}

static void fill_handle(memory *m, uint32_t kind, const oh_cuda_handle_bytes *bytes,
                        oh_mem_handle *out) {
    memset(out, 0, sizeof *out);
    out->kind = kind;
    out->device = (uint32_t)m->ordinal;
    out->bytes = m->bytes;
    if (kind == OH_HANDLE_FD) {
        memcpy(out->data, m->tag, sizeof m->tag);
        return;
    }
    memcpy(out->data, bytes->fabric, sizeof bytes->fabric);
    pthread_mutex_lock(&own.lock);
    memcpy(m->fabric, bytes->fabric, sizeof m->fabric);
    m->fabric_known = true;
    pthread_mutex_unlock(&own.lock);
}

/* A descriptor where the memory allows it: it is the kind that needs no set-up by an
 * administrator. */
onehop_result oh_cuda_mem_export(oh_device *base, const oh_mem *mem, oh_mem_handle *out,
                                 int *fd_out) {
    oh_cuda_device *device = oh_cuda_of(base);
    memory *m = mem->owner;
    oh_cuda_handle_bytes bytes;
    oh_cuda_scope scope;
    if (m == NULL || m->head.foreign || m->kinds == 0)
        return oh_error(ONEHOP_ERR_ARGUMENT, "only memory that this process created is exported");
    uint32_t kind = m->kinds & OH_HANDLE_FD ? OH_HANDLE_FD : OH_HANDLE_FABRIC;
    onehop_result error = oh_cuda_enter(device, &scope);
    if (error != ONEHOP_OK) return error;
    oh_cu_result result = oh_cuda_export_bytes(m->allocation, kind, &bytes);
    oh_cuda_leave(&scope);
    if (result != OH_CU_SUCCESS)
        return oh_cuda_error(result, "cuMemExportToShareableHandle",
                             "exporting %zu bytes of GPU %d", m->bytes, m->ordinal);
    fill_handle(m, kind, &bytes, out);
    *fd_out = kind == OH_HANDLE_FD ? bytes.fd : -1;
    return ONEHOP_OK;
}

/* ---- import, share, release ------------------------------------------------------------------ */

static onehop_result check_handle(const oh_mem_handle *handle, int fd) {
    if (handle->kind != OH_HANDLE_FD && handle->kind != OH_HANDLE_FABRIC)
        return oh_error(ONEHOP_ERR_UNSUPPORTED,
                        "a peer sent a memory handle of kind %u, which cannot be mapped here",
                        handle->kind);
    if (handle->kind == OH_HANDLE_FD && fd < 0)
        return oh_error(ONEHOP_ERR_ARGUMENT, "a peer's memory came without its descriptor");
    if (handle->bytes == 0 || handle->bytes > SIZE_MAX / 2)
        return oh_error(ONEHOP_ERR_ARGUMENT, "a peer's memory handle names %llu bytes",
                        (unsigned long long)handle->bytes);
    return ONEHOP_OK;
}

/* Within a scope. */
static onehop_result import_here(const oh_cuda_device *device, const oh_mem_handle *handle, int fd,
                                 oh_mem *out) {
    oh_cu_memory_kind kind = oh_cuda_memory_kind(device, handle->kind);
    oh_cuda_handle_bytes bytes;
    size_t unit = 0;
    memory *m = NULL;
    onehop_result error = granularity_of(device, &kind, &unit);
    if (error == ONEHOP_OK) error = new_record(device, (size_t)handle->bytes, &m);
    if (error != ONEHOP_OK) return error;
    memset(&bytes, 0, sizeof bytes);
    if (handle->kind == OH_HANDLE_FD)
        bytes.fd = fd;
    else
        memcpy(bytes.fabric, handle->data, sizeof bytes.fabric);
    oh_cu_result result = oh_cuda_import_bytes(&bytes, handle->kind, &m->allocation);
    m->allocated = result == OH_CU_SUCCESS;
    if (!m->allocated)
        error = oh_cuda_error(result, "cuMemImportFromShareableHandle",
                              "importing %zu bytes of a peer's GPU %u for GPU %d", m->bytes,
                              handle->device, device->ordinal);
    if (error == ONEHOP_OK) error = map_piece(device, m, unit);
    if (error != ONEHOP_OK) {
        tear_down(m);
        return error;
    }
    describe(m, out);
    return ONEHOP_OK;
}

/* Gives the device access; on failure the reference taken for it is given back. */
static onehop_result share_here(const oh_cuda_device *device, memory *m, oh_mem *out) {
    onehop_result error = give_access(device, m);
    if (error == ONEHOP_OK)
        describe(m, out);
    else if (drop_reference(m))
        tear_down(m);
    return error;
}

onehop_result oh_cuda_mem_import(oh_device *base, const oh_mem_handle *handle, int fd,
                                 oh_mem *out) {
    oh_cuda_device *device = oh_cuda_of(base);
    oh_cuda_scope scope;
    onehop_result error = check_handle(handle, fd);
    if (error == ONEHOP_OK) error = oh_cuda_enter(device, &scope);
    if (error != ONEHOP_OK) return error;
    memory *mine = find_own(handle);
    error = mine != NULL ? share_here(device, mine, out) : import_here(device, handle, fd, out);
    oh_cuda_leave(&scope);
    return error;
}

void oh_cuda_mem_release(oh_device *base, oh_mem *mem) {
    oh_cuda_scope scope;
    memory *m = mem->owner;
    memset(mem, 0, sizeof *mem);
    if (!oh_process_is(oh_cuda_of(base)->process)) return;
    if (m != NULL && m->head.foreign) {
        oh_cuda_foreign_release(base, m);
        return;
    }
    if (m == NULL || !drop_reference(m)) return;
    /* These calls belong to no context, so they are made even if ours can no longer be entered. */
    bool entered = oh_cuda_enter(oh_cuda_of(base), &scope) == ONEHOP_OK;
    tear_down(m);
    if (entered) oh_cuda_leave(&scope);
}
