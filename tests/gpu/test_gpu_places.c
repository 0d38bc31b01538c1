/* Property: sums are right wherever ranks live (C17), and where processes are denied pidfds and
 * each other's memory (C20). Numbers are those of docs/cases.md.
 *
 * GPUs renumbered by CUDA_VISIBLE_DEVICES, one GPU visible to each process, different views in
 * different processes, two processes with two threads each, a thread for each GPU; two groups that
 * differ only in name. Where there is one GPU every list of GPUs is "0", and all ranks share it. */
/* labels: timeout=120 */
#include "gpu_batch.h"

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/syscall.h>

static gpu_data *data, *data_of_groups[2];

#define ROOM ((size_t)64 << 10)

typedef struct place {
    const char *what;
    const char
        *visible[2]; /* of each process, as indices into what is visible now; NULL: as it is */
    int ordinals[4];
    int world, threads; /* per process */
    bool denied;
    const char *name;
    gpu_data *data;
} place;

static void calls(gpu_rank *ranks, int here, void *argument) {
    const place *p = argument;
    const gpu_how eager = {.what = p->what}, graph = {.what = p->what, .graph = true};
    gpu_call list[40] = {{0}};
    for (size_t i = 0; i < 40; i++)
        list[i] = (gpu_call){.count = 1 + i * 331,
                             .first = i * 8,
                             .shift = i % 3 ? (unsigned)i % 15 + 1 : 0,
                             .in_place = i % 2};
    for (int d = ONEHOP_FLOAT32; d <= ONEHOP_BFLOAT16; d++) {
        gpu_batch_once(ranks, here, p->data, INPUT_MIXED, (uint64_t)d, (onehop_dtype)d, list, 40,
                       &eager);
        gpu_batch_once(ranks, here, p->data, INPUT_MIXED, (uint64_t)d, (onehop_dtype)d, list, 40,
                       &graph);
    }
}

/* The variable for GPUs "1,0" of those that are visible now; they may have been chosen by the
 * variable already. */
static void show_only(const char *indices) {
    const char *now = getenv("CUDA_VISIBLE_DEVICES");
    char list[256] = "", words[8][64] = {"0", "1"}, copy[512];
    int found = 0;
    snprintf(copy, sizeof copy, "%s", now && *now ? now : "0,1");
    for (char *word = strtok(copy, ","); word && found < 8; word = strtok(NULL, ","))
        snprintf(words[found++], sizeof words[0], "%s", word);
    for (const char *c = indices; *c; c++) {
        const size_t used = strlen(list);
        if (*c != ',')
            snprintf(list + used, sizeof list - used, "%s%s", used ? "," : "", words[*c - '0']);
    }
    setenv("CUDA_VISIBLE_DEVICES", list, 1);
}

typedef struct seat {
    const place *place;
    int rank;
} seat;

static void *rank_of_process(void *argument) {
    const seat *s = argument;
    const place *p = s->place;
    onehop_config config = ONEHOP_CONFIG_INIT(onehop_config);
    const gpu_setup setup = {
        .world = p->world, .ordinals = p->ordinals, .config = &config, .name = p->name};
    config.push_bytes = 65536;
    config.pull_bytes = 4096;
    gpu_run_here(&setup, s->rank, NULL, calls, (void *)(uintptr_t)p);
    return NULL;
}

static void deny_calls(void) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
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
    CHECK_INT(0, prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
    CHECK(syscall(434, getpid(), 0) < 0 && errno == EPERM);
}

static void process(int number, int processes, void *argument) {
    const place *p = argument;
    pthread_t threads[4];
    seat seats[4];
    (void)processes;
    if (p->visible[number]) show_only(gpu_is_shared() ? "0" : p->visible[number]);
    /* A client of MPS gets fewer queues than a process by itself. */
    if (gpu_is_shared()) setenv("CUDA_DEVICE_MAX_CONNECTIONS", "16", 1);
    if (p->denied) deny_calls();
    for (int t = 0; t < p->threads; t++) {
        seats[t] = (seat){p, number * p->threads + t};
        if (pthread_create(&threads[t], NULL, rank_of_process, &seats[t]))
            FAIL("pthread_create failed");
    }
    for (int t = 0; t < p->threads; t++) pthread_join(threads[t], NULL);
}

static void share(place *p) {
    for (int r = 0; r < p->world && gpu_is_shared(); r++) p->ordinals[r] = 0;
}

static void run(place p) {
    char name[160];
    const double start = seconds_now();
    share(&p);
    snprintf(name, sizeof name, "%s", own_name(p.what));
    p.name = name;
    p.data = data;
    run_ranks(p.world / p.threads, process, &p);
    printf("%s, %s%s: %.1f s\n", p.denied ? "C20" : "C17", p.what,
           gpu_is_shared() ? " (all on one GPU)" : "", seconds_now() - start);
}

/* Two groups at once over the same two GPUs would be time-sliced between processes; so each is on a
 * GPU, as threads; on the only one if there are no more. */
static void group_of_threads(int number, int groups, void *argument) {
    place p = {.what = number ? "second group" : "first group",
               .world = 2,
               .threads = 2,
               .ordinals = {number, number}};
    char name[160];
    (void)groups, (void)argument;
    share(&p);
    snprintf(name, sizeof name, "%s", own_name(p.what));
    p.name = name;
    p.data = data_of_groups[number];
    process(0, 1, &p);
}

/* A thread per GPU in one process that found each other by name, not as a local group. */
static void thread_per_gpu(void *argument) {
    place *p = argument;
    process(0, 1, p);
}

int main(void) {
    gpu_main(100, 1);
    data = gpu_data_make(ROOM, 4);
    for (int g = 0; g < 2; g++) data_of_groups[g] = gpu_data_make(ROOM, 2);
    run((place){.what = "GPUs renumbered in both processes",
                .visible = {"1,0", "1,0"},
                .ordinals = {0, 1},
                .world = 2,
                .threads = 1});
    run((place){.what = "one GPU visible per process",
                .visible = {"0", "1"},
                .ordinals = {0, 0},
                .world = 2,
                .threads = 1});
    run((place){.what = "the other GPU visible per process",
                .visible = {"1", "0"},
                .ordinals = {0, 0},
                .world = 2,
                .threads = 1});
    run((place){.what = "different views",
                .visible = {NULL, "1"},
                .ordinals = {0, 0},
                .world = 2,
                .threads = 1});
    run((place){.what = "renumbered in one process",
                .visible = {"1,0", NULL},
                .ordinals = {0, 0},
                .world = 2,
                .threads = 1});
    run((place){.what = "two processes with two threads",
                .visible = {"0", "1"},
                .ordinals = {0, 0, 0, 0},
                .world = 4,
                .threads = 2});
    run((place){.what = "two processes with two threads, both GPUs visible",
                .ordinals = {0, 0, 1, 1},
                .world = 4,
                .threads = 2});

    run((place){
        .what = "pidfds denied", .ordinals = {0, 1}, .world = 2, .threads = 1, .denied = true});

    place apart = {.what = "thread per GPU, by name",
                   .ordinals = {0, 1},
                   .world = 2,
                   .threads = 2,
                   .data = data};
    char name[160];
    share(&apart);
    snprintf(name, sizeof name, "%s", own_name(apart.what));
    apart.name = name;
    gpu_apart(thread_per_gpu, &apart);
    printf("C17, %s\n", apart.what);

    run_ranks(2, group_of_threads, NULL);
    printf("C17, two groups at once that differ in name\n");
    return 0;
}
