/* Names of ranks in the abstract socket namespace, and taking one's own.
 *
 * A name that is taken belongs either to an earlier open of the same name that is just failing in
 * another process or thread (it will be gone in a moment), or to a second process with our rank. To
 * tell them apart we knock: an open that is alive answers a hello with its own. */
#include "rendezvous/opening.h"

#include "base/descriptor.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define OH_BIND_PATIENCE_MS 2000 /* for a name whose holder does not answer */
#define OH_KNOCK_MS         100

socklen_t oh_mesh_address(const oh_mesh_plan *plan, int rank, struct sockaddr_un *address_out) {
    memset(address_out, 0, sizeof *address_out);
    address_out->sun_family = AF_UNIX;
    /* Byte 0 stays zero: the abstract namespace. */
    int length = snprintf(address_out->sun_path + 1, sizeof address_out->sun_path - 1,
                          "onehop-%lu-%016llx%016llx-%d", (unsigned long)geteuid(),
                          (unsigned long long)plan->name.word[0],
                          (unsigned long long)plan->name.word[1], rank);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

int oh_mesh_socket(void) {
    return oh_fd_high(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

/* Is the other end of our effective user? For a socket we connected that is who called listen. */
bool oh_mesh_same_user(int fd, long *user_out, long *pid_out) {
    struct ucred peer = {0, (uid_t)-1, (gid_t)-1};
    socklen_t size = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size)) return false;
    *user_out = (long)peer.uid;
    *pid_out = (long)peer.pid;
    return peer.uid == geteuid();
}

oh_read oh_mesh_read(int fd, void *buffer, size_t size, size_t *fill) {
    while (*fill < size) {
        ssize_t got = recv(fd, (char *)buffer + *fill, size - *fill, MSG_DONTWAIT);
        if (got > 0)
            *fill += (size_t)got;
        else if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return OH_READ_PARTIAL;
        else if (got == 0 || errno == ECONNRESET)
            return OH_READ_ENDED;
        else if (errno != EINTR)
            return OH_READ_FAILED;
    }
    return OH_READ_COMPLETE;
}

bool oh_mesh_write(int fd, const void *bytes, size_t size) {
    /* The few hundred bytes of an opening fit into an empty socket; but the kernel may be short of
     * memory for a moment. */
    const uint64_t patience = oh_clock_ns() + 1000000000u;
    for (size_t done = 0; done < size;) {
        ssize_t sent =
            send(fd, (const char *)bytes + done, size - done, MSG_NOSIGNAL | MSG_DONTWAIT);
        bool passes = errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ||
                      errno == ENOBUFS || errno == ENOMEM;
        if (sent >= 0)
            done += (size_t)sent;
        else if (!passes || oh_clock_ns() >= patience)
            return false;
        else if (errno != EINTR)
            oh_sleep_us(500);
    }
    return true;
}

bool oh_mesh_valid_hello(const oh_opening *opening, const oh_hello *hello) {
    return hello->magic == OH_HELLO_MAGIC && oh_id128_equal(hello->name, opening->plan->name);
}

typedef enum oh_knock {
    OH_KNOCK_FREE,
    OH_KNOCK_SILENT,
    OH_KNOCK_ANSWERED,
    OH_KNOCK_FOREIGN
} oh_knock;

/* Connects to our own name. `holder_out`: the process there, or the user if FOREIGN. */
static oh_knock knock(const oh_opening *opening, long *holder_out) {
    struct sockaddr_un address;
    socklen_t size = oh_mesh_address(opening->plan, opening->plan->rank, &address);
    oh_knock answer = OH_KNOCK_FREE;
    oh_hello hello;
    size_t fill = 0;
    long user = -1, pid = 0;
    int fd = oh_mesh_socket();
    if (fd < 0) return OH_KNOCK_SILENT;
    if (!connect(fd, (const struct sockaddr *)&address, size)) {
        if (!oh_mesh_same_user(fd, &user, &pid)) {
            *holder_out = user;
            answer = OH_KNOCK_FOREIGN;
        } else if (oh_mesh_write(fd, &opening->hello, sizeof opening->hello)) {
            struct pollfd wait = {.fd = fd, .events = POLLIN};
            *holder_out = pid;
            answer = poll(&wait, 1, OH_KNOCK_MS) == 0 ? OH_KNOCK_SILENT : OH_KNOCK_FREE;
            if (oh_mesh_read(fd, &hello, sizeof hello, &fill) == OH_READ_COMPLETE &&
                oh_mesh_valid_hello(opening, &hello))
                answer = OH_KNOCK_ANSWERED;
        }
    } else if (errno == EAGAIN) {
        answer = OH_KNOCK_SILENT; /* its queue is full */
    }
    close(fd);
    return answer;
}

static onehop_result taken(const oh_opening *opening, oh_knock answer, long holder) {
    const oh_mesh_plan *plan = opening->plan;
    if (answer == OH_KNOCK_FOREIGN)
        return oh_error(
            ONEHOP_ERR_DUPLICATE_RANK,
            "the socket name of rank %d of group \"%s\" is held by a process of user %ld",
            plan->rank, plan->label, holder);
    return oh_error(ONEHOP_ERR_DUPLICATE_RANK,
                    "rank %d of group \"%s\" is already taken by process %ld%s", plan->rank,
                    plan->label, holder,
                    answer == OH_KNOCK_ANSWERED ? "" : ", which does not answer");
}

static onehop_result bind_name(const oh_opening *opening, int fd) {
    struct sockaddr_un address;
    socklen_t size = oh_mesh_address(opening->plan, opening->plan->rank, &address);
    uint64_t patience = oh_clock_ns() + OH_BIND_PATIENCE_MS * 1000000ull;
    if (patience > opening->deadline_ns) patience = opening->deadline_ns;
    while (bind(fd, (const struct sockaddr *)&address, size)) {
        long holder = 0;
        if (errno != EADDRINUSE)
            return oh_error_errno(ONEHOP_ERR_SYSTEM, errno, "cannot bind the socket of rank %d",
                                  opening->plan->rank);
        oh_knock answer = knock(opening, &holder);
        if (answer == OH_KNOCK_ANSWERED || oh_clock_ns() >= patience)
            return taken(opening, answer, holder);
        oh_sleep_us(2000);
    }
    return ONEHOP_OK;
}

onehop_result oh_mesh_listen(oh_opening *opening) {
    int fd = oh_mesh_socket();
    if (fd < 0) return oh_mesh_system_error(errno, opening->plan->world_size, "make a socket");
    onehop_result result = bind_name(opening, fd);
    if (!result && listen(fd, 128))
        result = oh_error_errno(ONEHOP_ERR_SYSTEM, errno, "cannot listen on the socket of rank %d",
                                opening->plan->rank);
    if (result)
        close(fd);
    else
        opening->listener = fd;
    return result;
}
