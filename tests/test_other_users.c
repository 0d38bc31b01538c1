/* Property: another user of the machine, who sees every socket name that is bound, takes what he
 * can and connects to the rest, neither stops a job nor slows it much, fills no log, and has none
 * of its secret. As root only: it plays other users. */
/* All ranks are processes, of which ThreadSanitizer sees one at a time. */
/* labels: quick waits tsan-off */
#include "harness.h"

#include "rendezvous/opening.h"

#include <errno.h>
#include <sys/syscall.h>

#define STRANGER 65534
#define OPENINGS 20
#define KNOWN    4096

static void become(uid_t user) {
    CHECK_INT(0, setresgid(user, user, user));
    CHECK_INT(0, setresuid(user, user, user));
}

/* ---- the secret ------------------------------------------------------------------------------ */

/* The first processes of a user agree on one, however they meet. */
static void find_secret(int rank, int world_size, void *argument) {
    oh_id128 *secrets = argument;
    (void)world_size;
    become((uid_t)(100000 + harness_main_pid));
    CHECK(oh_user_secret(&secrets[rank]));
}

static void cannot_read(int rank, int world_size, void *argument) {
    const oh_id128 *own = argument;
    oh_id128 theirs = {{0, 0}};
    (void)rank, (void)world_size;
    const long key = syscall(SYS_keyctl, 10 /* search */, -4, "user", "onehop", 0);
    CHECK(key > 0);
    become(STRANGER);
    CHECK(syscall(SYS_keyctl, 11 /* read */, key, &theirs, sizeof theirs) < 0 && errno == EACCES);
    CHECK(oh_user_secret(&theirs) && !oh_id128_equal(theirs, *own));
}

static void secrets(void) {
    oh_id128 *found = shared_memory(8 * sizeof *found), own;
    CHECK(oh_user_secret(&own));
    run_ranks(8, find_secret, found);
    for (int i = 1; i < 8; i++) CHECK(oh_id128_equal(found[0], found[i]));
    CHECK(!oh_id128_equal(found[0], own));
    run_ranks(1, cannot_read, &own);
}

/* ---- a hostile user -------------------------------------------------------------------------- */

typedef struct attack {
    uint32_t taken, connections; /* atomic: that it does what it is here for */
} attack;

/* Keeps whatever address of ours it ever sees, as soon as it is free. */
static void take(attack *now, char names[][64], int *count) {
    char line[512];
    FILE *file = fopen("/proc/net/unix", "re");
    while (file && fgets(line, sizeof line, file)) {
        const char *name = strstr(line, "@onehop-");
        int i = 0;
        if (!name) continue;
        line[strcspn(line, "\n")] = 0;
        while (i < *count && strcmp(names[i], name + 1)) i++;
        if (i == *count && *count < KNOWN) snprintf(names[(*count)++], 64, "%.60s", name + 1);
    }
    if (file) fclose(file);
    for (int i = *count > 40 ? *count - 40 : 0; i < *count; i++) {
        struct sockaddr_un address = {.sun_family = AF_UNIX};
        const size_t length = strlen(names[i]);
        memcpy(address.sun_path + 1, names[i], length);
        const socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length);
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        if (fd < 0) continue;
        if (!connect(fd, (const struct sockaddr *)&address, size)) {
            __atomic_add_fetch(&now->connections, 1, __ATOMIC_RELAXED);
            close(fd);
        } else if (!bind(fd, (const struct sockaddr *)&address, size) && !listen(fd, 1)) {
            __atomic_add_fetch(&now->taken, 1, __ATOMIC_RELAXED);
        } else {
            close(fd);
        }
    }
}

static void be_hostile(int rank, int world_size, void *argument) {
    static char names[KNOWN][64];
    int count = 0;
    (void)rank, (void)world_size;
    become(STRANGER);
    for (;;) take(argument, names, &count);
}

static int lines;

static void count_line(void *user, onehop_log_level level, const char *line) {
    (void)user, (void)level, (void)line;
    lines++;
}

static void be_rank(int rank, int world_size, void *argument) {
    onehop_group_config config = ONEHOP_CONFIG_INIT(onehop_group_config);
    (void)argument;
    config.rank = rank;
    config.world_size = world_size;
    config.name = own_name("attacked");
    config.timeout_ms = 20000;
    onehop_set_log(count_line, NULL);
    double worst = 0;
    for (int i = 0; i < OPENINGS; i++) {
        onehop_group *group;
        double begun = seconds_now();
        CHECK_OK(onehop_group_open(&config, &group));
        CHECK_OK(onehop_group_barrier(group));
        if (seconds_now() - begun > worst) worst = seconds_now() - begun;
        CHECK_OK(onehop_group_barrier(group));
        onehop_group_close(group);
    }
    if (lines > 2 * OPENINGS) FAIL("%d lines in the log for %d openings", lines, OPENINGS);
    printf("rank %d: %.0f ms at worst, %d lines\n", rank, 1e3 * worst, lines);
    if (worst > 2) FAIL("an opening took %.1f s", worst);
}

int main(void) {
    oh_id128 own;
    watchdog(100);
    if (geteuid() != 0 || !oh_user_secret(&own)) return HARNESS_SKIP;
    secrets();
    attack *now = shared_memory(sizeof *now);
    pid_t hostile = start_rank(be_hostile, 0, 1, now);
    run_ranks(3, be_rank, NULL);
    kill(hostile, SIGKILL);
    CHECK_INT(128 + SIGKILL, wait_rank(hostile));
    printf("%u addresses taken, %u connections\n", now->taken, now->connections);
    CHECK(now->taken > 0 && now->connections > 0);
    return 0;
}
