/* Addresses of ranks in the abstract socket namespace, and taking one's own.
 *
 * An address that is taken belongs either to an earlier open of the same name that is just ending in
 * another process or thread (it will be gone in a moment), or to a second process with our rank. To
 * tell them apart we knock: an open that is alive answers a hello with its own. */
#include "base/sha256.h"
#include "rendezvous/opening.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define OH_BIND_PATIENCE_MS 2000 /* for an address whose holder does not answer */
#define OH_KNOCK_MS         100
#define OH_QUEUE            4096 /* connections that wait; the kernel takes net.core.somaxconn */

/* The wall clock is the same for all processes, whatever namespaces they are in. */
uint64_t oh_mesh_slot(const oh_mesh_plan *plan) {
    struct timespec now;
    if (!plan->replayed || clock_gettime(CLOCK_REALTIME, &now)) return 0;
    return (uint64_t)now.tv_sec * (1000 / OH_SLOT_MS) +
           (uint64_t)now.tv_nsec / 1000000 / OH_SLOT_MS;
}

socklen_t oh_mesh_address(const oh_mesh_plan *plan, int rank, uint64_t slot,
                          struct sockaddr_un *address_out) {
    const uint64_t what[4] = {plan->name.word[0], plan->name.word[1], slot, (uint64_t)rank};
    oh_sha256 hash;
    uint64_t word[4];
    oh_sha256_begin(&hash);
    oh_sha256_add(&hash, what, sizeof what);
    const oh_digest digest = oh_sha256_end(&hash);
    memcpy(word, digest.bytes, sizeof word);
    memset(address_out, 0, sizeof *address_out);
    address_out->sun_family = AF_UNIX;
    /* Byte 0 stays zero: the abstract namespace. */
    int length =
        snprintf(address_out->sun_path + 1, sizeof address_out->sun_path - 1,
                 "onehop-%016llx%016llx", (unsigned long long)word[0], (unsigned long long)word[1]);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

int oh_mesh_socket(void) {
    return socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
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
        else if (got == 0 || errno != EINTR)
            return OH_READ_ENDED;
    }
    return OH_READ_COMPLETE;
}

bool oh_mesh_write(int fd, const void *bytes, size_t size) {
    /* The few hundred bytes of an opening always fit into an empty socket. */
    return send(fd, bytes, size, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)size;
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

/* Connects to our own address. `holder_out`: the process there, or the user if FOREIGN. */
static oh_knock knock(const oh_opening *opening, const struct sockaddr_un *address, socklen_t size,
                      long *holder_out) {
    oh_knock answer = OH_KNOCK_FREE;
    oh_hello hello;
    size_t fill = 0;
    long user = -1, pid = 0;
    int fd = oh_mesh_socket();
    if (fd < 0) return OH_KNOCK_SILENT;
    if (!connect(fd, (const struct sockaddr *)address, size)) {
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

onehop_result oh_mesh_duplicate(const oh_opening *opening, long other) {
    const long own = (long)getpid();
    return oh_error(
        ONEHOP_ERR_DUPLICATE_RANK,
        "processes %ld and %ld both claim rank %d of group \"%s\": does another job use "
        "this name?",
        own < other ? own : other, own < other ? other : own, opening->plan->rank,
        opening->plan->label);
}

static onehop_result taken(const oh_opening *opening, oh_knock answer, long holder) {
    const oh_mesh_plan *plan = opening->plan;
    if (answer == OH_KNOCK_ANSWERED) return oh_mesh_duplicate(opening, holder);
    if (answer == OH_KNOCK_FOREIGN)
        return oh_error(
            ONEHOP_ERR_DUPLICATE_RANK,
            "the socket name of rank %d of group \"%s\" is held by a process of user %ld",
            plan->rank, plan->label, holder);
    return oh_error(
        ONEHOP_ERR_DUPLICATE_RANK,
        "rank %d of group \"%s\" is already taken by process %ld, which does not answer",
        plan->rank, plan->label, holder);
}

/* One attempt. The socket that listens now, -1 if somebody has the address (`answer_out`,
 * `holder_out`), -2 with an error. */
static int try_listen(const oh_opening *opening, uint64_t slot, oh_knock *answer_out,
                      long *holder_out) {
    struct sockaddr_un address;
    const int rank = opening->plan->rank;
    const socklen_t size = oh_mesh_address(opening->plan, rank, slot, &address);
    const int fd = oh_mesh_socket();
    if (fd < 0) return oh_error_errno(ONEHOP_ERR_SYSTEM, errno, "cannot make a socket"), -2;
    if (!bind(fd, (const struct sockaddr *)&address, size)) {
        if (!listen(fd, OH_QUEUE)) return fd;
        oh_error_errno(ONEHOP_ERR_SYSTEM, errno, "cannot listen on the socket of rank %d", rank);
    } else if (errno != EADDRINUSE) {
        oh_error_errno(ONEHOP_ERR_SYSTEM, errno, "cannot bind the socket of rank %d", rank);
    } else {
        close(fd);
        *answer_out = knock(opening, &address, size, holder_out);
        return -1;
    }
    close(fd);
    return -2;
}

onehop_result oh_mesh_listen(oh_opening *opening) {
    uint64_t patience = oh_clock_ns() + OH_BIND_PATIENCE_MS * 1000000ull;
    if (patience > opening->deadline_ns) patience = opening->deadline_ns;
    for (;;) {
        oh_knock answer = OH_KNOCK_FREE;
        long holder = 0;
        opening->slot = oh_mesh_slot(opening->plan);
        const int fd = try_listen(opening, opening->slot, &answer, &holder);
        if (fd == -2) return ONEHOP_ERR_SYSTEM;
        if (fd >= 0) {
            opening->listeners[0] = fd;
            return ONEHOP_OK;
        }
        if (answer == OH_KNOCK_FOREIGN) oh_mesh_note_foreigner(opening, holder);
        if (answer == OH_KNOCK_ANSWERED || oh_clock_ns() >= patience)
            return taken(opening, answer, holder);
        oh_sleep_us(2000);
    }
}

/* Takes the address of `slot` as well. A holder that is just going or of another user: try again. */
static void move_to(oh_opening *opening, uint64_t slot) {
    oh_knock answer = OH_KNOCK_FREE;
    long holder = 0;
    const int fd = try_listen(opening, slot, &answer, &holder);
    if (fd >= 0) {
        /* That of the last slot stays: peers may have read the clock before us. */
        oh_guests_close_listener(opening, 1);
        opening->listeners[1] = opening->listeners[0];
        opening->listeners[0] = fd;
        opening->slot = slot;
    } else if (fd == -2) {
        oh_opening_fail(opening, opening->plan->rank, ONEHOP_ERR_SYSTEM, onehop_last_error());
    } else if (answer == OH_KNOCK_ANSWERED) {
        opening->has_twin = true;
        opening->twin = holder;
    } else if (answer == OH_KNOCK_SILENT) {
        const onehop_result result = taken(opening, answer, holder);
        oh_opening_fail(opening, opening->plan->rank, result, onehop_last_error());
    } else if (answer == OH_KNOCK_FOREIGN) {
        oh_mesh_note_foreigner(opening, holder);
    }
}

bool oh_mesh_holds_address(const oh_opening *opening) {
    return opening->slot == oh_mesh_slot(opening->plan);
}

uint64_t oh_mesh_move(oh_opening *opening) {
    if (!opening->plan->replayed || opening->state != OH_GATHERING) return UINT64_MAX;
    const uint64_t slot = oh_mesh_slot(opening->plan);
    if (slot != opening->slot) move_to(opening, slot);
    return oh_clock_ns() + (slot == opening->slot ? OH_SLOT_MS / 4 : 2) * 1000000ull;
}

void oh_mesh_note_foreigner(oh_opening *opening, long user) {
    if (!opening->foreign_calls++)
        oh_log(ONEHOP_LOG_WARN,
               "rank %d of group \"%s\": user %ld reaches for its sockets and is refused",
               opening->plan->rank, opening->plan->label, user);
    opening->foreign_user = user;
}
