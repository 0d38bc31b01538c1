/* Addresses of ranks in the abstract socket namespace, and taking one's own.
 *
 * An address that is taken belongs either to an earlier open of the same name that is just ending
 * in another process or thread (it will be gone in a moment), or to a second process with our rank.
 * To tell them apart we knock: an open that is alive answers a hello with its own. */
#include "rendezvous/opening.h"

#include "base/descriptor.h"
#include "base/sha256.h"

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
    return oh_fd_high(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

/* The peer may not have moved to the address of this slot yet. */
bool oh_mesh_reach(const oh_mesh_plan *plan, int rank, int fd) {
    const uint64_t slot = oh_mesh_slot(plan);
    for (unsigned back = 0; back < 2; back++) {
        struct sockaddr_un address;
        socklen_t size = oh_mesh_address(plan, rank, slot - back, &address);
        if (!connect(fd, (const struct sockaddr *)&address, size)) return true;
        if (errno != ECONNREFUSED || !plan->replayed) return false;
    }
    return false;
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

bool oh_mesh_is_end(int error) {
    return error == EPIPE || error == ECONNRESET;
}

bool oh_mesh_is_absence(int error) {
    return error == ECONNREFUSED || error == EAGAIN || error == EINTR || oh_mesh_is_end(error);
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

/* Our own address in a slot, after an attempt to take it. */
typedef struct oh_claim {
    struct sockaddr_un address;
    socklen_t size;
    int fd;          /* listens there; -1: somebody has it */
    oh_knock answer; /* of who has it */
    long holder;     /* the process there, or the user if FOREIGN */
} oh_claim;

/* The holder is of our user. False with errno: a call failed, and not by the holder's end. */
static bool greet_holder(const oh_opening *opening, oh_claim *claim, int fd) {
    oh_hello hello;
    size_t fill = 0;
    struct pollfd wait = {.fd = fd, .events = POLLIN};
    if (!oh_mesh_write(fd, &opening->hello, sizeof opening->hello)) return oh_mesh_is_end(errno);
    if (poll(&wait, 1, OH_KNOCK_MS) == 0) claim->answer = OH_KNOCK_SILENT;
    oh_read got = oh_mesh_read(fd, &hello, sizeof hello, &fill);
    if (got == OH_READ_COMPLETE && oh_mesh_valid_hello(opening, &hello))
        claim->answer = OH_KNOCK_ANSWERED;
    return got != OH_READ_FAILED;
}

static onehop_result knock(const oh_opening *opening, oh_claim *claim) {
    long user = -1, pid = 0;
    bool done = true;
    int fd = oh_mesh_socket();
    if (fd < 0) return oh_mesh_system_error(errno, opening->plan->world_size, "make a socket");
    claim->answer = OH_KNOCK_FREE;
    if (connect(fd, (const struct sockaddr *)&claim->address, claim->size)) {
        done = oh_mesh_is_absence(errno);
        if (errno == EAGAIN) claim->answer = OH_KNOCK_SILENT; /* its queue is full */
    } else if (!oh_mesh_same_user(fd, &user, &pid)) {
        claim->holder = user;
        claim->answer = OH_KNOCK_FOREIGN;
    } else {
        claim->holder = pid;
        done = greet_holder(opening, claim, fd);
    }
    onehop_result result = done ? ONEHOP_OK
                                : oh_error_errno(ONEHOP_ERR_SYSTEM, errno,
                                                 "cannot ask who holds the socket name of rank %d",
                                                 opening->plan->rank);
    close(fd);
    return result;
}

/* One attempt. */
static onehop_result try_listen(const oh_opening *opening, uint64_t slot, oh_claim *claim) {
    const oh_mesh_plan *plan = opening->plan;
    *claim = (oh_claim){.fd = -1};
    claim->size = oh_mesh_address(plan, plan->rank, slot, &claim->address);
    onehop_result result = ONEHOP_OK;
    const int fd = oh_mesh_socket();
    if (fd < 0) return oh_mesh_system_error(errno, plan->world_size, "make a socket");
    if (!bind(fd, (const struct sockaddr *)&claim->address, claim->size)) {
        if (!listen(fd, OH_QUEUE))
            claim->fd = fd;
        else
            result = oh_error_errno(ONEHOP_ERR_SYSTEM, errno,
                                    "cannot listen on the socket of rank %d", plan->rank);
    } else if (errno != EADDRINUSE) {
        result = oh_error_errno(ONEHOP_ERR_SYSTEM, errno, "cannot bind the socket of rank %d",
                                plan->rank);
    }
    if (claim->fd >= 0) return ONEHOP_OK;
    close(fd);
    return result ? result : knock(opening, claim);
}

/* Both twins word it alike. */
onehop_result oh_mesh_duplicate(const oh_opening *opening, long other) {
    const long own = (long)getpid();
    return oh_error(
        ONEHOP_ERR_DUPLICATE_RANK,
        "processes %ld and %ld both claim rank %d of group \"%s\": does another job use "
        "this name?",
        own < other ? own : other, own < other ? other : own, opening->plan->rank,
        opening->plan->label);
}

static onehop_result taken(const oh_opening *opening, const oh_claim *claim) {
    const oh_mesh_plan *plan = opening->plan;
    if (claim->answer == OH_KNOCK_ANSWERED) return oh_mesh_duplicate(opening, claim->holder);
    if (claim->answer == OH_KNOCK_FOREIGN)
        return oh_error(
            ONEHOP_ERR_DUPLICATE_RANK,
            "the socket name of rank %d of group \"%s\" is held by a process of user %ld",
            plan->rank, plan->label, claim->holder);
    return oh_error(
        ONEHOP_ERR_DUPLICATE_RANK,
        "rank %d of group \"%s\" is already taken by process %ld, which does not answer",
        plan->rank, plan->label, claim->holder);
}

onehop_result oh_mesh_listen(oh_opening *opening) {
    uint64_t patience = oh_clock_ns() + OH_BIND_PATIENCE_MS * 1000000ull;
    if (patience > opening->deadline_ns) patience = opening->deadline_ns;
    for (;;) {
        oh_claim claim;
        opening->slot = oh_mesh_slot(opening->plan);
        onehop_result result = try_listen(opening, opening->slot, &claim);
        opening->listeners[0] = claim.fd;
        if (result || claim.fd >= 0) return result;
        if (claim.answer == OH_KNOCK_FOREIGN) oh_mesh_note_foreigner(opening, claim.holder);
        if (claim.answer == OH_KNOCK_ANSWERED || oh_clock_ns() >= patience)
            return taken(opening, &claim);
        oh_sleep_us(2000);
    }
}

/* Takes the address of `slot` as well; that of the last slot stays, for peers may have read the
 * clock before us. A holder that is just going or of another user: try again. */
static void move_to(oh_opening *opening, uint64_t slot) {
    oh_claim claim;
    oh_guests_close_listener(opening, 1);
    onehop_result result = try_listen(opening, slot, &claim);
    if (result) {
        oh_opening_fail_here(opening, result);
    } else if (claim.fd >= 0) {
        opening->listeners[1] = opening->listeners[0];
        opening->listeners[0] = claim.fd;
        opening->slot = slot;
    } else if (claim.answer == OH_KNOCK_ANSWERED || claim.answer == OH_KNOCK_SILENT) {
        oh_opening_fail_here(opening, taken(opening, &claim));
    } else if (claim.answer == OH_KNOCK_FOREIGN) {
        oh_mesh_note_foreigner(opening, claim.holder);
    }
}

bool oh_mesh_holds_address(const oh_opening *opening) {
    return opening->slot == oh_mesh_slot(opening->plan);
}

uint64_t oh_mesh_move(oh_opening *opening) {
    if (!opening->plan->replayed || opening->listeners[0] < 0) return UINT64_MAX;
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
