/* Property: ranks that give one name, or share a process, become a group whose exchanges deliver
 * every rank's bytes and descriptors to all; names are free again at once; nothing is left
 * behind. */
/* labels: quick waits */
#include "harness.h"

#include "rendezvous/opening.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>

static onehop_group *open_named(int rank, int world_size, const char *name, uint32_t timeout_ms) {
    onehop_group_config config = ONEHOP_CONFIG_INIT(onehop_group_config);
    config.rank = rank;
    config.world_size = world_size;
    config.name = own_name(name);
    config.timeout_ms = timeout_ms;
    onehop_group *group = NULL;
    CHECK_OK(onehop_group_open(&config, &group));
    CHECK_INT(rank, onehop_group_rank(group));
    CHECK_INT(world_size, onehop_group_size(group));
    CHECK_INT(timeout_ms, group->timeout_ms);
    return group;
}

/* ---- exchanges, on any open group ------------------------------------------------------------ */

/* By blocks, each with its offset in front: quick also where every byte's access is
 * instrumented. */
static void fill(unsigned char *bytes, size_t size, int rank, int round) {
    uint64_t block[64], state = (uint64_t)rank * 1000 + (uint64_t)round;
    for (int i = 0; i < 64; i++) block[i] = random_next(&state);
    for (size_t at = 0; at < size; at += sizeof block) {
        block[0] = state ^ at;
        memcpy(bytes + at, block, size - at < sizeof block ? size - at : sizeof block);
    }
}

static void gather(onehop_group *group, size_t bytes, int round) {
    int rank = onehop_group_rank(group), world_size = onehop_group_size(group);
    unsigned char *all = malloc(bytes * (size_t)world_size + 1), *mine = malloc(bytes + 1);
    unsigned char *want = malloc(bytes + 1);
    CHECK(all && mine && want);
    memset(all, 0xee, bytes * (size_t)world_size + 1);
    fill(mine, bytes, rank, round);
    if (round & 1) memcpy(all + bytes * (size_t)rank, mine, bytes); /* in place */
    CHECK_OK(
        onehop_group_allgather(group, round & 1 ? all + bytes * (size_t)rank : mine, all, bytes));
    for (int i = 0; i < world_size; i++) {
        fill(want, bytes, i, round);
        CHECK_BYTES(want, all + bytes * (size_t)i, bytes);
    }
    CHECK_INT(0xee, all[bytes * (size_t)world_size]);
    free(all);
    free(mine);
    free(want);
}

/* Rank i gives `count` files of i * 100 + k bytes, every third place empty. */
static void pass_files(onehop_group *group, int count) {
    int rank = onehop_group_rank(group), world_size = onehop_group_size(group);
    int fds[64], got[64 * ONEHOP_MAX_RANKS];
    for (int k = 0; k < count; k++) {
        fds[k] = k % 3 == 2 ? -1 : memfd_create("test", MFD_CLOEXEC);
        if (fds[k] >= 0) CHECK_INT(0, ftruncate(fds[k], rank * 100 + k));
    }
    CHECK_OK(oh_rendezvous_pass_fds(group, fds, count, got));
    for (int i = 0; i < world_size * count; i++) {
        struct stat info;
        bool given = i / count != rank && i % count % 3 != 2;
        CHECK_INT(given, got[i] >= 0);
        if (!given) continue;
        CHECK_INT(0, fstat(got[i], &info));
        CHECK_INT(i / count * 100 + i % count, info.st_size);
        CHECK_INT(FD_CLOEXEC, fcntl(got[i], F_GETFD));
        close(got[i]);
    }
    for (int k = 0; k < count; k++)
        if (fds[k] >= 0) close(fds[k]);
}

static void agree(onehop_group *group) {
    int rank = onehop_group_rank(group), world_size = onehop_group_size(group);
    CHECK_OK(oh_rendezvous_agree(group, ONEHOP_OK));
    if (world_size < 2) return;
    onehop_result mine = ONEHOP_OK;
    if (rank == world_size - 1) mine = oh_error(ONEHOP_ERR_MEMORY, "of the last");
    if (rank == 1) mine = oh_error(ONEHOP_ERR_DRIVER, "of rank one");
    CHECK_RESULT(ONEHOP_ERR_DRIVER, oh_rendezvous_agree(group, mine));
    CHECK_TEXT(rank == 1 ? "of rank one" : "rank 1: of rank one", onehop_last_error());
    /* A bad descriptor on one rank is an error on all, and the group stays good. */
    int bad = 9999, got[ONEHOP_MAX_RANKS];
    if (rank) bad = 1;
    CHECK_RESULT(ONEHOP_ERR_ARGUMENT, oh_rendezvous_pass_fds(group, &bad, 1, got));
    CHECK_CONTAINS("9999", onehop_last_error());
    for (int i = 0; i < world_size; i++) CHECK_INT(-1, got[i]);
    CHECK_OK(onehop_group_barrier(group));
}

static void use(onehop_group *group) {
    static const size_t sizes[] = {1, 8, 511, 4096, 65536};
    for (size_t i = 0; i < 5; i++) gather(group, sizes[i], (int)i);
    CHECK_OK(onehop_group_barrier(group));
    CHECK(oh_rendezvous_can_pass_fds(group));
    CHECK(oh_rendezvous_same_process(group, onehop_group_rank(group)));
    pass_files(group, 1);
    pass_files(group, 7);
    agree(group);
    CHECK_INT(-1, oh_rendezvous_lost_peer(group));
    char byte = 0;
    CHECK_RESULT(ONEHOP_ERR_ARGUMENT, onehop_group_allgather(group, &byte, &byte, (16u << 20) + 1));
    CHECK_RESULT(ONEHOP_ERR_NULL, onehop_group_allgather(group, NULL, &byte, 1));
    CHECK_OK(onehop_group_barrier(group));
}

/* ---- layouts --------------------------------------------------------------------------------- */

static void named_process(int rank, int world_size, void *name) {
    int before = count_fds();
    onehop_group *group = open_named(rank, world_size, name, 20000);
    for (int i = 0; i < world_size; i++) CHECK_INT(i == rank, oh_rendezvous_same_process(group, i));
    use(group);
    onehop_group_close(group);
    CHECK_INT(before, count_fds());
}

static void named_thread(int rank, int world_size, void *name) {
    onehop_group *group = open_named(rank, world_size, name, 20000);
    for (int i = 0; i < world_size; i++) CHECK(oh_rendezvous_same_process(group, i));
    use(group);
    onehop_group_close(group);
}

static void local_thread(int rank, int world_size, void *groups) {
    onehop_group *group = ((onehop_group **)groups)[rank];
    CHECK_INT(rank, onehop_group_rank(group));
    for (int i = 0; i < world_size; i++) CHECK(oh_rendezvous_same_process(group, i));
    use(group);
    for (int i = 0; i < 500; i++) gather(group, 64, i);
    gather(group, 1 << 20, 1);
    CHECK_OK(onehop_group_barrier(group));
    onehop_group_close(group);
}

static void all_layouts(void) {
    static const int sizes[] = {1, 2, 3, 8, 16};
    for (size_t i = 0; i < 5; i++) {
        onehop_group *groups[ONEHOP_MAX_RANKS];
        int before = count_fds();
        run_ranks(sizes[i], named_process, "layouts");
        run_threads(sizes[i], named_thread, "layouts");
        CHECK_OK(onehop_group_open_local(sizes[i], groups));
        run_threads(sizes[i], local_thread, groups);
        CHECK_INT(before, count_fds());
    }
}

/* ---- more of one thing ----------------------------------------------------------------------- */

static void reuse_process(int rank, int world_size, void *argument) {
    int times = HARNESS_SANITIZED ? 50 : 200;
    (void)argument;
    for (int i = 0; i < times; i++) {
        onehop_group *group = open_named(rank, world_size, "again", 20000);
        gather(group, 16, i);
        onehop_group_close(group);
    }
}

static void two_names(int rank, int world_size, void *argument) {
    (void)argument;
    onehop_group *first = open_named(rank, world_size, "name n", 20000);
    onehop_group *second = open_named(world_size - 1 - rank, world_size, "name m", 20000);
    gather(second, 100, 0);
    gather(first, 100, 1);
    onehop_group_close(first);
    gather(second, 100, 2);
    onehop_group_close(second);
}

static void big_blobs(int rank, int world_size, void *argument) {
    (void)argument;
    onehop_group *group = open_named(rank, world_size, "big", 60000);
    gather(group, 4 << 20, 0);
    gather(group, 4 << 20, 1);
    onehop_group_close(group);
}

/* Without privileges the kernel limits a user's descriptors in flight to his limit of open files;
 * what 8 ranks send each other exceeds it. */
static void unprivileged(int rank, int world_size, void *argument) {
    const struct rlimit limit = {600, 600};
    (void)argument;
    CHECK_INT(0, setrlimit(RLIMIT_NOFILE, &limit));
    CHECK_INT(0, setgid(65534));
    CHECK_INT(0, setuid(65534));
    int before = count_fds();
    onehop_group *group = open_named(rank, world_size, "nobody", 20000);
    use(group);
    for (int i = 0; i < 3; i++) pass_files(group, 64);
    onehop_group_close(group);
    CHECK_INT(before, count_fds());
}

static void late_rank(int rank, int world_size, void *argument) {
    (void)argument;
    if (rank == 0) sleep_ms(2000);
    double start = seconds_now();
    onehop_group *group = open_named(rank, world_size, "late", 20000);
    CHECK(rank > 0 || seconds_now() - start < 1);
    use(group);
    if (rank == 2) sleep_ms(500);
    CHECK_OK(onehop_group_barrier(group));
    onehop_group_close(group);
}

/* Names of any length, different only at their end. */
static void long_names(int rank, int world_size, void *argument) {
    onehop_group_config config = ONEHOP_CONFIG_INIT(onehop_group_config);
    onehop_group *group = NULL;
    char longer[5000];
    memset(longer, 'n', sizeof longer);
    snprintf(longer, 128, "%s", own_name("long"));
    longer[strlen(longer)] = 'n';
    longer[sizeof longer - 1] = 0;
    longer[sizeof longer - 2] = argument ? 'a' : 'b';
    config.rank = rank;
    config.world_size = world_size;
    config.name = longer;
    CHECK_OK(onehop_group_open(&config, &group));
    gather(group, 100, 0);
    onehop_group_close(group);
}

static void two_long_names(int rank, int world_size, void *argument) {
    (void)argument;
    long_names(rank % 2, world_size / 2, rank < 2 ? "a" : NULL);
}

/* Once the group is open on one rank, the names of all ranks can be taken. */
static void names_are_free(int rank, int world_size, void *argument) {
    onehop_group_config config = ONEHOP_CONFIG_INIT(onehop_group_config);
    oh_group_plan plan;
    (void)argument;
    for (int i = 0; i < 20; i++) {
        onehop_group *group = open_named(rank, world_size, "free", 20000);
        config.world_size = world_size;
        config.name = own_name("free");
        CHECK_OK(oh_group_plan_make(&config, &plan));
        const oh_mesh_plan names = {
            .world_size = world_size, .name = plan.name, .replayed = plan.secret};
        for (int r = 0; r < world_size && rank == 0; r++) {
            struct sockaddr_un address;
            socklen_t size = oh_mesh_address(&names, r, oh_mesh_slot(&names), &address);
            int fd = oh_mesh_socket();
            if (bind(fd, (const struct sockaddr *)&address, size)) FAIL("rank %d's is taken", r);
            close(fd);
        }
        CHECK_OK(onehop_group_barrier(group));
        onehop_group_close(group);
    }
}

static void from_environment(int rank, int world_size, void *argument) {
    char text[16];
    (void)argument;
    onehop_group_config config = ONEHOP_CONFIG_INIT(onehop_group_config);
    onehop_group *group = NULL;
    snprintf(text, sizeof text, "%d", rank);
    setenv("RANK", text, 1);
    snprintf(text, sizeof text, "%d", world_size);
    setenv("WORLD_SIZE", text, 1);
    setenv("MASTER_ADDR", "localhost", 1);
    setenv("MASTER_PORT", "29500", 1);
    setenv("TORCHELASTIC_RUN_ID", own_name("run"), 1);
    setenv("ONEHOP_INIT_TIMEOUT_MS", "20000", 1);
    CHECK_OK(onehop_group_open(&config, &group));
    CHECK_INT(rank, onehop_group_rank(group));
    CHECK_INT(20000, group->timeout_ms);
    gather(group, 10, 0);
    onehop_group_close(group);
}

/* A child with its own copy of everything may close it; the parent's group does not notice. */
static void fork_closes(int rank, int world_size, void *argument) {
    (void)argument;
    onehop_group *group = open_named(rank, world_size, "fork", 20000);
    pid_t child = fork();
    if (!child) {
        CHECK_RESULT(ONEHOP_ERR_STATE, onehop_group_barrier(group));
        onehop_group_close(group);
        _exit(0);
    }
    CHECK_INT(0, wait_rank(child));
    CHECK_INT(-1, oh_rendezvous_lost_peer(group));
    gather(group, 1000, 0);
    onehop_group_close(group);
}

int main(void) {
    watchdog(100);
    all_layouts();
    run_ranks(4, reuse_process, NULL);
    run_ranks(4, two_names, NULL);
    run_ranks(4, two_long_names, NULL);
    run_ranks(8, names_are_free, NULL);
    run_ranks(8, big_blobs, NULL);
    if (geteuid() == 0) run_ranks(8, unprivileged, NULL);
    run_ranks(3, late_rank, NULL);
    run_ranks(3, from_environment, NULL);
    run_ranks(3, fork_closes, NULL);
    return 0;
}
