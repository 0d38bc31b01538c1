/* Property: a receive that fails in a rank while a group opens, for a reason of its own (no
 * memory), is what the rank reports, and its peers name that rank; nobody takes it for the end of a
 * peer. Every receive of either rank fails once. recv is defined here and stands between onehop and
 * the kernel. */
/* All ranks are processes, of which ThreadSanitizer sees one at a time. */
/* labels: quick tsan-off timeout=60 */
#include "harness.h"

#include <errno.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#define MAX 40

static int calls, failing; /* which call fails; 0: none */

ssize_t recv(int fd, void *buffer, size_t size, int flags) {
    if (++calls != failing) return syscall(SYS_recvfrom, fd, buffer, size, flags, NULL, NULL);
    errno = ENOMEM;
    return -1;
}

typedef struct fault {
    int rank, nth;
    bool came;
} fault;

static void open_once(int rank, int world_size, void *argument) {
    fault *planned = argument;
    const bool here = rank == planned->rank;
    onehop_group_config config = ONEHOP_CONFIG_INIT(onehop_group_config);
    onehop_group *group;
    char name[64];
    snprintf(name, sizeof name, "receive %d %d", planned->rank, planned->nth);
    config.rank = rank;
    config.world_size = world_size;
    config.name = own_name(name);
    config.timeout_ms = 10000;
    calls = 0;
    failing = here ? planned->nth : 0;
    double start = seconds_now();
    const onehop_result result = onehop_group_open(&config, &group);
    CHECK(seconds_now() - start < 2);
    if (here) planned->came = calls >= planned->nth;
    if (!result) {
        failing = 0;
        onehop_group_close(group);
        return;
    }
    CHECK_INT(ONEHOP_ERR_SYSTEM, result);
    CHECK_CONTAINS("cannot receive from", onehop_last_error());
    CHECK_CONTAINS(strerror(ENOMEM), onehop_last_error());
    if (here) return;
    char who[16];
    snprintf(who, sizeof who, "rank %d: ", planned->rank);
    CHECK(!strncmp(who, onehop_last_error(), strlen(who)));
}

int main(void) {
    fault *planned = shared_memory(sizeof *planned);
    watchdog(50);
    for (int rank = 0; rank < 2; rank++) {
        int nth = 0;
        do {
            *planned = (fault){.rank = rank, .nth = ++nth};
            run_ranks(2, open_once, planned);
        } while (planned->came && nth < MAX);
        printf("rank %d: %d receives\n", rank, nth - 1);
        CHECK(nth > 1 && nth < MAX);
    }
    return 0;
}
