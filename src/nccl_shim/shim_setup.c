/* The agreement of a communicator's ranks. Each tells all where it is and how it is set; all read
 * the same records, and so come to the same verdict. If onehop may serve, they make a context,
 * which succeeds on all of them or on none. Every rank of a blocking communicator takes part, also
 * one that is switched off, for the others cannot know before. */
#include "nccl_shim/shim.h"

#include "base/descriptor.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAGIC 0x314d495f48454e4full

/* What the table's longest pieces are cut to: several communicators share a GPU with an engine's
 * own memory, and longer messages go in chunks. */
#define PIECE_BYTES ((size_t)8 << 20)
/* Blocks of all ranks on a GPU together, of 132 multiprocessors on an H200: NCCL's own kernels run
 * beside ours and wait for their peers, too. Two such communicators leave it a few. */
#define BLOCKS 64
/* As long as nobody sets ONEHOP_TIMEOUT_MS: NCCL has no deadline, PyTorch's is 10 minutes. */
#define TIMEOUT_MS      1800000
#define INIT_TIMEOUT_MS 60000

/* ---- where this rank is ---------------------------------------------------------------------- */

static uint64_t inode_of(const char *path) {
    struct stat info;
    return stat(path, &info) ? 0 : info.st_ino;
}

/* Not what NCCL_HOSTID says: that may be set to make NCCL believe in several hosts. */
static void read_boot(oh_id128 *boot_out) {
    char text[40] = "";
    int fd = oh_fd_high(open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
    const ssize_t got = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    boot_out->word[0] = oh_hash(OH_HASH_START, text, got > 0 ? (size_t)got : 0);
    boot_out->word[1] = got > 0;
}

/* What one rank needs for a communicator. */
typedef struct asked {
    oh_shim_new *made;
    oh_shim_state *state;
    int rank, ranks, device;
    oh_shim_record own, all[ONEHOP_MAX_RANKS];
} asked;

static bool fill_record(oh_shim_record *r, int device, bool several) {
    const oh_shim_settings *s = oh_shim_settings_get();
    memset(r, 0, sizeof *r);
    r->magic = MAGIC;
    r->size = sizeof *r;
    r->version = ONEHOP_VERSION;
    read_boot(&r->boot);
    r->netns = inode_of("/proc/self/ns/net");
    r->userns = inode_of("/proc/self/ns/user");
    r->user = geteuid();
    r->on = s->on;
    r->groups = s->groups;
    r->host = s->host;
    r->max_bytes = s->max_bytes;
    r->several = several;
    oh_shim_gpu_id(device, r->gpu);
    return !oh_process_id(&r->process) && !oh_random(&r->name, sizeof r->name);
}

/* ---- verdict --------------------------------------------------------------------------------- */

static bool same_host(const oh_shim_record *a, const oh_shim_record *b) {
    return a->boot.word[1] && oh_id128_equal(a->boot, b->boot) && a->netns == b->netns &&
           a->userns == b->userns && a->user == b->user;
}

static bool same_settings(const oh_shim_record *a, const oh_shim_record *b) {
    return a->groups == b->groups && a->host == b->host && a->max_bytes == b->max_bytes;
}

/* Two ranks of one process: a thread of one may be held up by the other. */
static bool same_process(const oh_shim_record *r, int ranks) {
    for (int i = 0; i < ranks; i++)
        for (int k = 0; k < i; k++)
            if (oh_id128_equal(r[i].process, r[k].process)) return true;
    return false;
}

/* NULL: onehop may serve. By the records of all alone, which are equal on all ranks. */
static const char *refusal(const oh_shim_record *r, int ranks) {
    for (int i = 0; i < ranks; i++)
        if (r[i].magic != MAGIC || r[i].size != sizeof *r || r[i].version != r->version)
            return "ranks have different versions of the shim";
    for (int i = 0; i < ranks; i++)
        if (!r[i].on) return "a rank is switched off (ONEHOP_NCCL=0)";
    for (int i = 0; i < ranks; i++)
        if (r[i].failed) return "a rank could not tell where it is";
    for (int i = 0; i < ranks; i++)
        if (r[i].several) return "a thread made several communicators in one group";
    for (int i = 0; i < ranks; i++)
        if (!same_host(&r[i], r))
            return "the ranks lie on several hosts, or in different namespaces, or belong to "
                   "different users";
    for (int i = 0; i < ranks; i++)
        if (!same_settings(&r[i], r)) return "ranks are set differently (ONEHOP_ variables)";
    return same_process(r, ranks) ? "several ranks are in one process" : NULL;
}

static int ranks_per_gpu(const oh_shim_record *r, int ranks) {
    int most = 1;
    for (int i = 0; i < ranks; i++) {
        int same = 0;
        for (int k = 0; k < ranks; k++) same += !memcmp(r[i].gpu, r[k].gpu, sizeof r->gpu);
        if (same > most) most = same;
    }
    return most;
}

/* ---- context --------------------------------------------------------------------------------- */

static onehop_result create(const asked *e, uint32_t blocks, onehop_context **out) {
    char name[64];
    const oh_shim_record *first = &e->all[0];
    const int sharing = first->host ? 1 : ranks_per_gpu(e->all, e->ranks);
    snprintf(name, sizeof name, "nccl-%016llx%016llx", (unsigned long long)first->name.word[0],
             (unsigned long long)first->name.word[1]);
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    config.rank = e->rank;
    config.world_size = e->ranks;
    config.name = name;
    config.device.kind = first->host ? ONEHOP_DEVICE_HOST : ONEHOP_DEVICE_CUDA;
    config.device.ordinal = first->host ? 0 : e->device;
    config.flags = sharing > 1 ? ONEHOP_FLAG_SHARE_GPU : 0;
    config.timeout_ms = oh_env_text(OH_ENV_TIMEOUT_MS) ? 0 : TIMEOUT_MS;
    config.init_timeout_ms = oh_env_text(OH_ENV_INIT_TIMEOUT_MS) ? 0 : INIT_TIMEOUT_MS;
    if (!first->host) {
        config.max_bytes = PIECE_BYTES;
        config.max_blocks = blocks / (uint32_t)sharing;
    }
    oh_shim_depth++;
    const onehop_result result = onehop_create(&config, out);
    oh_shim_depth--;
    return result;
}

/* A process with several communicators on a GPU may have no room for grids of the usual size: the
 * library then says which size there is. Both steps fail or succeed on all ranks alike. */
static onehop_context *make_context(const asked *e) {
    onehop_context *context = NULL;
    onehop_result result = create(e, BLOCKS, &context);
    if (result == ONEHOP_ERR_ARGUMENT && !e->all[0].host) result = create(e, 0, &context);
    if (!result) return context;
    static int told; /* one line is enough where no communicator of a process can have one */
    oh_log(__atomic_fetch_add(&told, 1, __ATOMIC_RELAXED) ? ONEHOP_LOG_INFO : ONEHOP_LOG_WARN,
           "NCCL shim: rank %d: no context, calls stay with NCCL: %s", e->rank,
           onehop_last_error());
    return NULL;
}

/* ---- all of it ------------------------------------------------------------------------------- */

static void tell(oh_nccl_comm comm, int rank, int ranks, const char *why) {
    oh_shim_count_comm(!why);
    if (!why)
        oh_log(ONEHOP_LOG_INFO, "NCCL shim: communicator %p, rank %d of %d: onehop takes calls",
               (void *)comm, rank, ranks);
    else
        oh_log(ONEHOP_LOG_INFO, "NCCL shim: communicator %p, rank %d of %d: all goes to NCCL: %s",
               (void *)comm, rank, ranks, why);
}

oh_shim_state *oh_shim_set_aside(oh_nccl_comm comm, bool blocking, const char *why) {
    oh_shim_state *state = oh_shim_add(comm);
    if (state) state->blocking = blocking;
    tell(comm, -1, -1, why);
    return state;
}

static int ask(asked *e) {
    const oh_nccl_comm comm = e->made->comm;
    int result;
    OH_REAL_CALL(result, oh_nccl_comm_int_fn, ncclCommCount, comm, &e->ranks);
    if (!result) OH_REAL_CALL(result, oh_nccl_comm_int_fn, ncclCommUserRank, comm, &e->rank);
    if (!result) OH_REAL_CALL(result, oh_nccl_comm_int_fn, ncclCommCuDevice, comm, &e->device);
    return result;
}

/* Why a communicator is not even asked about: equal on all its ranks, but for the first, of which
 * the others hear. */
static const char *out_of_question(asked *e) {
    if (ask(e)) return "NCCL does not tell its ranks";
    if (!e->made->blocking) return "it is non-blocking";
    if (e->ranks < 2) return "it has one rank";
    if (e->ranks > ONEHOP_MAX_RANKS) return "it has more ranks than onehop serves";
    return oh_shim_roll_complete(&e->made->roll, e->ranks)
               ? NULL
               : "not all ranks are here with the shim, on this host and blocking";
}

/* Tells the others, if there is something to decide. */
static void begin(asked *e, oh_shim_new *made, bool several) {
    e->made = made;
    const char *why = out_of_question(e);
    if (why) {
        oh_shim_roll_refuse(&made->roll);
        e->ranks = 0;
        e->state = oh_shim_set_aside(made->comm, made->blocking, why);
    } else {
        e->state = oh_shim_add(made->comm);
        if (!fill_record(&e->own, e->device, several) || !e->state) e->own.failed = 1;
        e->own.rank = (uint32_t)e->rank;
        oh_shim_roll_tell(&made->roll, &e->own);
    }
    if (e->state) e->state->key = made->roll.key;
}

/* Hears them, and does what all have decided alike. */
static void settle(asked *e) {
    if (!e->ranks) return;
    const bool heard = oh_shim_roll_hear(&e->made->roll, e->ranks, e->all);
    oh_shim_roll_leave(&e->made->roll);
    const char *why = heard ? refusal(e->all, e->ranks) : "a rank has not answered";
    if (e->state) {
        e->state->rank = e->rank;
        e->state->ranks = e->ranks;
        e->state->blocking = true;
    }
    onehop_context *context = why ? NULL : make_context(e);
    if (context) __atomic_store_n(&e->state->context, context, __ATOMIC_SEQ_CST);
    if (!why && !context) why = "no context could be made";
    tell(e->made->comm, e->rank, e->ranks, why);
}

void oh_shim_set_up(oh_shim_new *made, int count) {
    asked *all = calloc((size_t)count, sizeof *all);
    for (int i = 0; i < count && !all; i++) oh_shim_roll_refuse(&made[i].roll);
    /* All are told of before the first is waited for: others may have them in another order. */
    for (int i = 0; i < count && all; i++) begin(&all[i], &made[i], count > 1);
    for (int i = 0; i < count && all; i++) settle(&all[i]);
    free(all);
}
