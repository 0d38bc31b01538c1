/* The agreement of a communicator's ranks. Each tells all where it is and how it is set; all read
 * the same records, and so come to the same verdict. If onehop may serve, they make a context, and
 * tell each other whether they could: one that failed leaves all with NCCL. Every rank of a
 * blocking communicator takes part, also one that is switched off, for the others cannot know
 * before. */
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

static onehop_result create(const oh_shim_exchange *e, uint32_t blocks, onehop_context **out) {
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
static onehop_context *make_context(const oh_shim_exchange *e) {
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

static const char *take(oh_shim_exchange *e, oh_shim_state *state) {
    onehop_context *context = state ? make_context(e) : NULL;
    e->own.failed = !context;
    bool failed = oh_shim_exchange_run(e, 1);
    for (int i = 0; i < e->ranks; i++) failed |= e->all[i].failed;
    if (!failed) {
        __atomic_store_n(&state->context, context, __ATOMIC_SEQ_CST);
        return NULL;
    }
    onehop_destroy(context);
    return "a rank could not make its context";
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

void oh_shim_set_aside(oh_nccl_comm comm, bool blocking, const char *why) {
    oh_shim_state *state = oh_shim_add(comm);
    if (state) state->blocking = blocking;
    tell(comm, -1, -1, why);
}

static int ask(oh_shim_exchange *e) {
    int result;
    OH_REAL_CALL(result, oh_nccl_comm_int_fn, ncclCommCount, e->comm, &e->ranks);
    if (!result) OH_REAL_CALL(result, oh_nccl_comm_int_fn, ncclCommUserRank, e->comm, &e->rank);
    if (!result) OH_REAL_CALL(result, oh_nccl_comm_int_fn, ncclCommCuDevice, e->comm, &e->device);
    return result;
}

/* Why a communicator is not even asked about: equal on all its ranks. */
static const char *out_of_question(const oh_shim_new *made, const oh_shim_exchange *e, int asked) {
    if (asked) return "NCCL does not tell its ranks";
    if (!made->blocking) return "it is non-blocking";
    if (e->ranks < 2) return "it has one rank";
    return e->ranks > ONEHOP_MAX_RANKS ? "it has more ranks than onehop serves" : NULL;
}

/* Those that are asked about come first in `exchanges`; returns their number. */
static int choose(const oh_shim_new *made, int count, oh_shim_exchange *exchanges) {
    int asked = 0;
    for (int i = 0; i < count; i++) {
        oh_shim_exchange *e = &exchanges[asked];
        memset(e, 0, sizeof *e);
        e->comm = made[i].comm;
        const char *why = out_of_question(&made[i], e, ask(e));
        if (why)
            oh_shim_set_aside(e->comm, made[i].blocking, why);
        else
            asked++;
    }
    return asked;
}

static void settle(oh_shim_exchange *e, int failure) {
    oh_shim_state *state = oh_shim_add(e->comm);
    const char *why = failure ? "the exchange of the ranks failed" : refusal(e->all, e->ranks);
    if (state) {
        state->rank = e->rank;
        state->ranks = e->ranks;
        state->blocking = true;
    }
    if (!why) why = take(e, state);
    tell(e->comm, e->rank, e->ranks, why);
}

void oh_shim_set_up(const oh_shim_new *made, int count) {
    oh_shim_exchange *exchanges = calloc((size_t)count, sizeof *exchanges);
    const int asked = exchanges ? choose(made, count, exchanges) : 0;
    for (int i = 0; i < asked; i++)
        if (!fill_record(&exchanges[i].own, exchanges[i].device, asked > 1))
            exchanges[i].own.failed = 1;
    const int failure = asked ? oh_shim_exchange_run(exchanges, asked) : 0;
    if (failure)
        oh_log(ONEHOP_LOG_WARN, "NCCL shim: the exchange of the ranks failed with %d", failure);
    for (int i = 0; i < asked; i++) settle(&exchanges[i], failure);
    free(exchanges);
}
