/* The real NCCL: found at the first call, opened by its full path, so that the loader does not take
 * the shim for it, and with RTLD_DEEPBIND, so that its own calls stay within it. */
#include "nccl_shim/shim.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* By this name one shim knows another; the only exported name that is not NCCL's. */
OH_EXPORT extern const int ncclOnehopShim;
const int ncclOnehopShim = ONEHOP_VERSION;

static const char *const names[] = {
#define NCCL_FUNCTION(name, since, class) #name,
#include "nccl_shim/functions.def"
#undef NCCL_FUNCTION
};

__attribute__((visibility("hidden"))) void *oh_shim_targets[OH_SHIM_FUNCTIONS];
__thread int oh_shim_depth;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
OH_RESET_IN_CHILD(lock)

static void *library; /* under `lock` */
static bool told;     /* that there is none */
static uintptr_t text_low,
    text_high; /* where it lies; written once, before its functions are used */

/* ---- places ---------------------------------------------------------------------------------- */

#define MAX_PATHS 96

typedef struct paths {
    char *path[MAX_PATHS];
    int count;
} paths;

static void add_path(paths *to, const char *head, size_t head_size, const char *tail) {
    char text[4096];
    if (to->count == MAX_PATHS || head_size + strlen(tail) >= sizeof text) return;
    snprintf(text, sizeof text, "%.*s%s", (int)head_size, head, tail);
    for (int i = 0; i < to->count; i++)
        if (!strcmp(to->path[i], text)) return;
    char *copy = strdup(text);
    if (copy) to->path[to->count++] = copy;
}

static void free_paths(paths *p) {
    while (p->count) free(p->path[--p->count]);
}

static int add_mapped(struct dl_phdr_info *info, size_t size, void *to) {
    (void)size;
    const char *name = info->dlpi_name, *last = strrchr(name, '/');
    if (last && !strncmp(last + 1, "libnccl.so", 10)) add_path(to, name, strlen(name), "");
    return 0;
}

/* The wheel of NCCL lies beside that of PyTorch, and beside whatever else Python has mapped. */
static int add_wheels(struct dl_phdr_info *info, size_t size, void *to) {
    (void)size;
    static const char *const marks[] = {"/torch/lib/libtorch", "/site-packages/",
                                        "/dist-packages/"};
    static const char wheel[] = "/nvidia/nccl/lib/libnccl.so.2";
    for (size_t i = 0; i < OH_LENGTH(marks); i++) {
        const char *at = strstr(info->dlpi_name, marks[i]);
        if (!at) continue;
        const size_t kept = (size_t)(at - info->dlpi_name) + (i ? strlen(marks[i]) - 1 : 0);
        add_path(to, info->dlpi_name, kept, wheel);
    }
    return 0;
}

/* The folders that the loader searches. It is not asked by name: it would answer with the shim. */
static void add_loader(paths *to) {
    static const char *const usual[] = {
#if defined(__x86_64__)
        "/usr/lib/x86_64-linux-gnu",
        "/lib/x86_64-linux-gnu",
#else
        "/usr/lib/aarch64-linux-gnu",
        "/lib/aarch64-linux-gnu",
#endif
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/lib",
        "/usr/local/cuda/lib64",
        "/usr/local/nccl/lib"};
    void *self = dlopen(NULL, RTLD_NOW);
    Dl_serinfo head, *all = NULL;
    if (self && !dlinfo(self, RTLD_DI_SERINFOSIZE, &head)) all = calloc(1, head.dls_size);
    if (all) {
        all->dls_size = head.dls_size;
        all->dls_cnt = head.dls_cnt;
        if (!dlinfo(self, RTLD_DI_SERINFO, all))
            for (unsigned i = 0; i < all->dls_cnt; i++)
                add_path(to, all->dls_serpath[i].dls_name, strlen(all->dls_serpath[i].dls_name),
                         "/libnccl.so.2");
        free(all);
    }
    if (self) dlclose(self);
    for (size_t i = 0; i < OH_LENGTH(usual); i++)
        add_path(to, usual[i], strlen(usual[i]), "/libnccl.so.2");
}

/* ---- opening --------------------------------------------------------------------------------- */

/* Is malloc the C library's? A program may have loaded one of its own first; then the real library
 * must take that too, for it frees what the C library has allocated. */
static bool has_plain_malloc(void) {
    Dl_info of_malloc, of_libc;
    return dladdr(dlsym(RTLD_DEFAULT, "malloc"), &of_malloc) &&
           dladdr(dlsym(RTLD_DEFAULT, "gnu_get_libc_version"), &of_libc) &&
           of_malloc.dli_fbase == of_libc.dli_fbase;
}

/* With its own names first, so that what it calls of itself does not come here; where that cannot
 * be, the guard by the caller's address tells (oh_shim_inside). */
static void *open_one(const char *path, char *why, size_t size) {
    const int own_first = has_plain_malloc() ? RTLD_DEEPBIND : 0;
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL | own_first);
    if (!handle) {
        snprintf(why, size, "%s", dlerror());
        return NULL;
    }
    const bool shim = dlsym(handle, "ncclOnehopShim"), nccl = dlsym(handle, "ncclGetVersion");
    if (!shim && nccl) return handle;
    snprintf(why, size, "%s is %s", path, shim ? "onehop's own shim" : "no NCCL");
    dlclose(handle);
    return NULL;
}

static int note_range(struct dl_phdr_info *info, size_t size, void *inside) {
    (void)size;
    uintptr_t low = UINTPTR_MAX, high = 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const uintptr_t at = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
        if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
        if (at < low) low = at;
        if (at + info->dlpi_phdr[i].p_memsz > high) high = at + info->dlpi_phdr[i].p_memsz;
    }
    if ((uintptr_t)inside < low || (uintptr_t)inside >= high) return 0;
    text_low = low;
    text_high = high;
    return 1;
}

static void *open_any(paths *places, char *why, size_t size, const char **path_out) {
    void *handle = NULL;
    for (int i = 0; i < places->count && !handle; i++) {
        handle = open_one(places->path[i], why, size);
        if (handle) *path_out = places->path[i];
    }
    return handle;
}

/* Under `lock`. */
static void find_library(void) {
    char why[512] = "";
    const char *path = oh_env_text(OH_ENV_NCCL_REAL);
    const bool named = path;
    paths places = {{NULL}, 0};
    if (named) {
        library = open_one(path, why, sizeof why);
    } else {
        dl_iterate_phdr(add_mapped, &places);
        dl_iterate_phdr(add_wheels, &places);
        add_loader(&places);
        library = open_any(&places, why, sizeof why, &path);
    }
    if (library) {
        dl_iterate_phdr(note_range, dlsym(library, "ncclGetVersion"));
        oh_log(ONEHOP_LOG_INFO, "NCCL shim: the real library is %s", path);
    } else if (!told) {
        told = true;
        oh_log(
            ONEHOP_LOG_ERROR,
            "NCCL shim: found no NCCL to hand calls on to (%s): set ONEHOP_NCCL_REAL to the full "
            "path of the real libnccl.so.2",
            named ? why : "neither mapped, nor beside PyTorch, nor where the loader looks");
    }
    free_paths(&places);
}

/* ---- functions ------------------------------------------------------------------------------- */

static __thread int pending_answer;

static int answer_pending(void) {
    return pending_answer;
}
static int answer_missing(void) {
    return OH_NCCL_USAGE;
}

void *oh_shim_answer(int result) {
    pending_answer = result;
    return (void *)answer_pending;
}

void *oh_shim_real(oh_shim_function index) {
    void *target = __atomic_load_n(&oh_shim_targets[index], __ATOMIC_ACQUIRE);
    if (target) return target;
    pthread_mutex_lock(&lock);
    if (!library) find_library();
    if (library) {
        target = dlsym(library, names[index]);
        if (!target) {
            oh_log(ONEHOP_LOG_WARN, "NCCL shim: the real library has no %s", names[index]);
            target = (void *)answer_missing;
        }
        __atomic_store_n(&oh_shim_targets[index], target, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&lock);
    return target ? target : oh_shim_answer(OH_NCCL_SYSTEM);
}

bool oh_shim_has(oh_shim_function index) {
    const void *target = oh_shim_real(index);
    return target != (void *)answer_missing && target != (void *)answer_pending;
}

bool oh_shim_inside(const void *caller) {
    const uintptr_t at = (uintptr_t)caller;
    return oh_shim_depth > 0 || (at >= text_low && at < text_high);
}
