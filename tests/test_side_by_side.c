/* Property: groups leave nothing behind and do not disturb each other: two jobs at once, all ranks
 * killed, contexts made and destroyed many times. They also work on machines that deny pidfds,
 * ptrace and root, or claim handles that they cannot make. */
#include "fault_kit.h"
#include "device/device.h"
#include "rendezvous/opening.h"

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>

#define MAX 4

/* ---- two jobs that differ only in their names ------------------------------------------------ */

#define JOBS      2
#define JOB_CALLS 10000

typedef struct job {
    int number;
} job;

static void run_job(int rank, int world_size, void *argument) {
    const job *j = argument;
    char name[32];
    const kit_way small = {"small", 40, ONEHOP_ALGORITHM_AUTO};
    kit_buffers *m = kit_buffers_make();
    snprintf(name, sizeof name, "%d", 29500 + j->number); /* as two values of MASTER_PORT */
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    setenv("MASTER_PORT", name, 1);
    setenv("TORCHELASTIC_RUN_ID", kit_own_name("jobs").text, 1);
    onehop_context *ctx = kit_open(rank, world_size, NULL, KIT_PATIENCE_MS);
    /* Job 1's numbers are other ones. */
    const unsigned first = 17u * (unsigned)j->number;
    for (unsigned i = first; i < first + JOB_CALLS; i++)
        CHECK_OK(kit_call(ctx, i % 64 ? &small : &kit_ways[2], m, i));
    onehop_destroy(ctx);
    free(m);
}

static void two_jobs(void) {
    static job jobs[JOBS] = {{0}, {1}};
    pid_t pids[JOBS * 2];
    for (int r = 0; r < 2; r++)
        for (int j = 0; j < JOBS; j++) pids[2 * j + r] = start_rank(run_job, r, 2, &jobs[j]);
    for (int i = 0; i < JOBS * 2; i++) CHECK_INT(0, wait_rank(pids[i]));
}

/* ---- nothing is left behind ------------------------------------------------------------------ */

static int entries(const char *path) {
    int count = 0;
    DIR *directory = opendir(path);
    if (!directory) return -1;
    for (struct dirent *e; (e = readdir(directory));)
        if (strstr(e->d_name, "onehop") || strstr(e->d_name, "memfd")) count++;
    closedir(directory);
    return count;
}

/* Is a socket of this group bound? */
static bool listed(const char *name, int rank) {
    onehop_group_config config = ONEHOP_CONFIG_INIT(onehop_group_config);
    oh_group_plan plan;
    struct sockaddr_un now, before;
    char line[512];
    bool found = false;
    config.world_size = 2;
    const kit_name own = kit_own_name(name);
    config.name = own.text;
    CHECK_OK(oh_group_plan_make(&config, &plan));
    const oh_mesh_plan mesh = {
        .rank = rank, .world_size = 2, .name = plan.name, .replayed = plan.secret};
    const uint64_t slot = oh_mesh_slot(&mesh);
    oh_mesh_address(&mesh, rank, slot, &now);
    oh_mesh_address(&mesh, rank, slot - 1, &before);
    FILE *file = fopen("/proc/net/unix", "re");
    CHECK(file != NULL);
    while (!found && fgets(line, sizeof line, file))
        found = strstr(line, now.sun_path + 1) || strstr(line, before.sun_path + 1);
    fclose(file);
    return found;
}

typedef struct run {
    char name[32];
    uint32_t calls[MAX]; /* atomic */
} run;

static void call_for_ever(int rank, int world_size, void *argument) {
    run *now = argument;
    kit_buffers *m = kit_buffers_make();
    onehop_context *ctx = kit_open(rank, world_size, now->name, KIT_PATIENCE_MS);
    for (unsigned i = 0;; i++) {
        CHECK_OK(kit_call(ctx, &kit_ways[i % KIT_WAYS], m, i));
        __atomic_add_fetch(&now->calls[rank], 1, __ATOMIC_RELAXED);
    }
}

/* Rank 0 waits for a rank 1 that never comes: its name must be seen while it does, and not
 * after. */
static void proof_of_listed(void) {
    run *now = shared_memory(sizeof *now);
    snprintf(now->name, sizeof now->name, "listed");
    pid_t pid = start_rank(call_for_ever, 0, 2, now);
    while (!listed(now->name, 0)) sleep_ms(1);
    kill(pid, SIGKILL);
    CHECK_INT(128 + SIGKILL, wait_rank(pid));
    CHECK(!listed(now->name, 0));
}

/* Some die while they open the group, most in the middle of calls. */
static void all_killed(void) {
    const int shm = entries("/dev/shm"), tmp = entries("/tmp"), here = entries(".");
    run *now = shared_memory(sizeof *now);
    uint64_t random = 4;
    for (int round = 0; round < 100; round++) {
        pid_t pids[2];
        memset(now, 0, sizeof *now);
        snprintf(now->name, sizeof now->name, "killed %d",
                 round / 2); /* a name is used again at once */
        for (int r = 0; r < 2; r++) pids[r] = start_rank(call_for_ever, r, 2, now);
        while (round % 4 && __atomic_load_n(&now->calls[0], __ATOMIC_RELAXED) < 3) sleep_ms(1);
        sleep_ms((unsigned)(random_next(&random) % 4));
        for (int r = 0; r < 2; r++) kill(pids[r], SIGKILL);
        for (int r = 0; r < 2; r++) CHECK_INT(128 + SIGKILL, wait_rank(pids[r]));
    }
    for (int i = 0; i < 50; i++) {
        snprintf(now->name, sizeof now->name, "killed %d", i);
        for (int r = 0; r < 2; r++)
            if (listed(now->name, r))
                FAIL("the socket of rank %d of \"%s\" is still there", r, now->name);
    }
    CHECK_INT(shm, entries("/dev/shm"));
    CHECK_INT(tmp, entries("/tmp"));
    CHECK_INT(here, entries("."));
}

static int mappings(void) {
    char line[512];
    int count = 0;
    FILE *file = fopen("/proc/self/maps", "re");
    CHECK(file != NULL);
    while (fgets(line, sizeof line, file)) count++;
    fclose(file);
    return count;
}

static long resident_kib(void) {
    long pages = 0, unused = 0;
    FILE *file = fopen("/proc/self/statm", "re");
    CHECK(file != NULL && fscanf(file, "%ld %ld", &unused, &pages) == 2);
    fclose(file);
    return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

/* Made, used and destroyed, by name and on a group that stays, with captured memory that the peers
 * map. */
static void again_and_again(int rank, int world_size, void *argument) {
    const onehop_device device = {ONEHOP_DEVICE_HOST, 0};
    kit_buffers *m;
    int fds = 0, maps = 0;
    long memory = 0;
    (void)argument;
    onehop_group_config group_config = ONEHOP_CONFIG_INIT(onehop_group_config);
    onehop_group *group;
    const kit_name own = kit_own_name("stays");
    group_config.rank = rank;
    group_config.world_size = world_size;
    group_config.name = own.text;
    CHECK_OK(onehop_group_open(&group_config, &group));
    CHECK_OK(onehop_mem_alloc(device, sizeof *m, (void **)&m));
    for (int i = 0; i < 1000; i++) {
        char name[32];
        snprintf(name, sizeof name, "again %d", i % 3);
        onehop_context *ctx = i % 4 ? kit_open_on(group, KIT_PATIENCE_MS)
                                    : kit_open(rank, world_size, name, KIT_PATIENCE_MS);
        onehop_stream stream;
        onehop_host_graph *graph;
        const kit_way way = {"captured", 500, i % 2 ? ONEHOP_1SHOT_PULL : ONEHOP_2SHOT_PULL};
        if (i % 8 == 0) kit_good_calls(ctx, m, (unsigned)i / 8, 3);
        CHECK_OK(onehop_host_stream_create(&stream));
        CHECK_OK(onehop_capture_begin(ctx));
        CHECK_OK(onehop_host_stream_capture_begin(stream));
        CHECK_OK(kit_run(ctx, &way, m->in, m->out, stream));
        CHECK_OK(onehop_host_stream_capture_end(stream, &graph));
        CHECK_OK(onehop_capture_end(ctx));
        kit_fill(m->in, way.count, rank, (unsigned)i);
        CHECK_OK(onehop_host_graph_launch(graph, stream));
        CHECK_OK(onehop_synchronize(ctx, stream));
        kit_check(m->out, way.count, world_size, (unsigned)i);
        onehop_host_graph_destroy(graph);
        onehop_destroy(ctx);
        onehop_host_stream_destroy(stream);
        if (i == 20) {
            fds = count_fds();
            maps = mappings();
            memory = resident_kib();
        }
    }
    CHECK_INT(fds, count_fds());
    /* Address sanitizer keeps freed memory back. */
    if (!HARNESS_SANITIZED && mappings() > maps + 2)
        FAIL("%d mappings, %d after the first rounds", mappings(), maps);
    if (!HARNESS_SANITIZED && resident_kib() > memory + 1024)
        FAIL("%ld KiB resident, %ld after the first rounds", resident_kib(), memory);
    onehop_mem_free(m);
    onehop_group_close(group);
}

/* Failed set-ups leave nothing either. */
static void failed_set_ups(int rank, int world_size, void *argument) {
    int fds = 0, maps = 0;
    (void)argument;
    for (int i = 0; i < 60; i++) {
        char name[32];
        onehop_config config = kit_config(0);
        onehop_context *ctx = NULL;
        snprintf(name, sizeof name, "failed %d", i);
        config.rank = rank;
        config.world_size = world_size;
        const kit_name own = kit_own_name(name);
        config.name = own.text;
        if (i % 3 == 0 && rank) config.max_registrations = 9;
        if (i % 3 == 1) config.push_bytes = 5;
        if (i % 3 == 2 && rank)
            config.timeout_ms = UINT32_MAX; /* found last, when all memory is there */
        CHECK_RESULT(i % 3 ? ONEHOP_ERR_ARGUMENT : ONEHOP_ERR_DISAGREEMENT,
                     onehop_create(&config, &ctx));
        if (i == 5) fds = count_fds(), maps = mappings();
    }
    CHECK_INT(fds, count_fds());
    if (!HARNESS_SANITIZED && mappings() > maps + 1)
        FAIL("%d mappings, %d after the first rounds", mappings(), maps);
}

/* ---- a narrow sandbox ------------------------------------------------------------------------ */

static void deny_calls(void) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_keyctl, 7, 0), /* and with it the user's secret */
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_add_key, 6, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 434 /* pidfd_open */, 5, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 438 /* pidfd_getfd */, 4, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_ptrace, 3, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_writev, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    CHECK_INT(0, prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    CHECK_INT(0, prctl(PR_SET_DUMPABLE, 0, 0, 0, 0));
    CHECK_INT(0, prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
    CHECK(syscall(434, getpid(), 0) < 0 && errno == EPERM);
    oh_id128 secret;
    CHECK(!oh_user_secret(&secret));
}

static void in_sandbox(int rank, int world_size, void *argument) {
    const int *victim = argument;
    if (geteuid() == 0) {
        CHECK_INT(0, setresgid(65534, 65534, 65534));
        CHECK_INT(0, setresuid(65534, 65534, 65534));
    }
    deny_calls();
    kit_buffers *m = kit_buffers_make();
    onehop_context *ctx = kit_open(rank, world_size, "sandbox", KIT_PATIENCE_MS);
    kit_good_calls(ctx, m, 0, 12);
    if (rank == *victim) _exit(0);
    if (*victim >= 0) { /* without pidfds the sockets tell */
        kit_sight sight;
        onehop_result result = ONEHOP_OK;
        memset(&sight, 0, sizeof sight);
        const double begun = seconds_now();
        for (unsigned i = 12; !result; i++) result = kit_call(ctx, &kit_ways[i % KIT_WAYS], m, i);
        CHECK(seconds_now() - begun < 1 + kit_slack());
        kit_note(ctx, result, &sight);
        kit_expect(&sight, ONEHOP_ERR_PEER_LOST, *victim, "sandbox");
    }
    onehop_destroy(ctx);
    _exit(0); /* a leak checker needs ptrace */
}

/* ---- handles that are claimed and refused ---------------------------------------------------- */

static const oh_device_ops *honest;
static int refused; /* creations of fabric memory */

static onehop_result claim_fabric(oh_device *device, oh_device_info *info_out) {
    const onehop_result result = honest->info(device, info_out);
    if (!result) info_out->handle_kinds |= OH_HANDLE_FABRIC;
    return result;
}

static onehop_result refuse_fabric(oh_device *device, size_t bytes, uint32_t kinds,
                                   oh_mem *mem_out) {
    refused += kinds == OH_HANDLE_FABRIC;
    return honest->mem_create(device, bytes, kinds, mem_out);
}

/* On one rank or on all: all ranks take descriptors. */
static void with_claims(int rank, int world_size, void *argument) {
    static oh_device_ops claiming;
    const int who = *(const int *)argument;
    oh_device *host;
    CHECK_OK(oh_host_device_open(&host));
    honest = host->ops;
    claiming = *honest;
    claiming.info = claim_fabric;
    claiming.mem_create = refuse_fabric;
    if (who < 0 || who == rank) host->ops = &claiming;
    kit_buffers *m = kit_buffers_make();
    onehop_context *ctx = kit_open(rank, world_size, "claims", KIT_PATIENCE_MS);
    kit_good_calls(ctx, m, 0, KIT_WAYS);
    CHECK_INT(0, refused);
    onehop_destroy(ctx);
    free(m);
}

int main(void) {
    int victim = -1;
    watchdog(110);
    run_ranks(3, in_sandbox, &victim);
    victim = 1;
    run_ranks(3, in_sandbox, &victim);
    for (int who = -1; who < 3; who++) run_ranks(3, with_claims, &who);
    run_ranks(2, again_and_again, NULL);
    run_ranks(2, failed_set_ups, NULL);
    proof_of_listed();
    all_killed();
    two_jobs();
    return 0;
}
