/* Seeing that a peer is gone, and who is to blame.
 *
 * A socket shows its peer's end when the last copy of the peer's descriptor is closed, so a forked
 * child that keeps one hides the death of its parent. A pidfd shows the end of the process itself.
 * Where it is refused (old kernel, sandbox, other pid namespace) the socket must do.
 *
 * The kernel closes the sockets of a process that is killed one by one, its pidfd shows later
 * still. So a peer may have seen the death, and have left for it, before this rank can see it.
 * That peer said why (a notice), and its word is taken. */
#include "rendezvous/mesh.h"

#include "base/descriptor.h"

#include <errno.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Linux 6.5; absent from older headers */
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434 /* Linux 5.3, the same number on every architecture */
#endif

/* Unread bytes that are searched for a last word. A peer can be one exchange ahead, seldom two;
 * those that fit here are all but the lists of captured calls. */
#define OH_LAST_BYTES 4096

int oh_pidfd_of_peer(int socket) {
    int pidfd = -1;
    socklen_t size = sizeof pidfd;
    /* Names the peer's process without the pid, which may have been given to another by now. */
    if (!getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &size) && pidfd >= 0)
        return oh_fd_high(pidfd);
    struct ucred peer;
    size = sizeof peer;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) || peer.pid <= 0) return -1;
    return oh_fd_high((int)syscall(SYS_pidfd_open, peer.pid, 0));
}

int oh_mesh_poll(struct pollfd *polls, int count, int timeout_ms) {
    struct pollfd used[OH_MAX_POLLS];
    int places[OH_MAX_POLLS], n = 0;
    for (int i = 0; i < count; i++) {
        polls[i].revents = 0;
        if (polls[i].fd < 0) continue;
        places[n] = i;
        used[n++] = polls[i];
    }
    int events = poll(used, (nfds_t)n, timeout_ms);
    for (int i = 0; events > 0 && i < n; i++) polls[places[i]].revents = used[i].revents;
    return events;
}

onehop_result oh_mesh_system_error(int errno_value, int world_size, const char *what) {
    struct rlimit limit;
    bool full = errno_value == EMFILE || errno_value == EINVAL; /* EINVAL: poll's word for it */
    if (!full || getrlimit(RLIMIT_NOFILE, &limit))
        return oh_error_errno(ONEHOP_ERR_SYSTEM, errno_value, "cannot %s", what);
    /* A socket and a pidfd per peer, the listeners of two slots, one that knocks. */
    return oh_error_errno(ONEHOP_ERR_SYSTEM, errno_value,
                          "cannot %s: opening a group of %d ranks needs %d descriptors beside the "
                          "open ones, the limit (ulimit -n) is %llu",
                          what, world_size, 2 * world_size + 1, (unsigned long long)limit.rlim_cur);
}

/* ---- words ----------------------------------------------------------------------------------- */

static ssize_t peek(int fd, void *buffer, size_t size) {
    for (;;) {
        ssize_t got = recv(fd, buffer, size, MSG_PEEK | MSG_DONTWAIT);
        if (got >= 0 || errno != EINTR) return got;
    }
}

static ssize_t send_now(int fd, const oh_notice *notice) {
    for (;;) {
        ssize_t sent = send(fd, notice, sizeof *notice, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent >= 0 || errno != EINTR) return sent;
    }
}

bool oh_mesh_last_words(int fd, oh_notice *notice_out) {
    char unread[OH_LAST_BYTES];
    if (fd < 0) return false;
    ssize_t got = peek(fd, unread, sizeof unread);
    if (got < (ssize_t)sizeof *notice_out) return false;
    memcpy(notice_out, unread + got - sizeof *notice_out, sizeof *notice_out);
    notice_out->text[sizeof notice_out->text - 1] = 0;
    return notice_out->magic == OH_NOTICE_MAGIC;
}

onehop_result oh_mesh_adopt(const oh_notice *notice) {
    const onehop_result result = (onehop_result)notice->result;
    const bool about_another = result == ONEHOP_ERR_PEER_LOST || result == ONEHOP_ERR_PEER_FAILED ||
                               result == ONEHOP_ERR_MISSING_PEER;
    if (about_another) return oh_error(result, "%.487s", notice->text);
    return oh_error(result, "rank %d: %.480s", notice->origin, notice->text);
}

bool oh_mesh_send_notice(oh_mesh *mesh, int rank, const oh_notice *notice) {
    bool done = true;
    pthread_mutex_lock(&mesh->send_lock);
    /* Whole or not at all: a stream socket of this family takes so little in one piece. */
    if (mesh->sockets[rank] >= 0 && !(mesh->cut >> rank & 1))
        done = send_now(mesh->sockets[rank], notice) > 0 || errno == EPIPE || errno == ECONNRESET;
    pthread_mutex_unlock(&mesh->send_lock);
    return done;
}

/* Bit per rank. */
typedef struct oh_gone {
    uint32_t ended;  /* its process has */
    uint32_t closed; /* its socket shows the end */
} oh_gone;

static oh_gone look(const oh_mesh *mesh) {
    struct pollfd polls[2 * ONEHOP_MAX_RANKS];
    int world_size = mesh->world_size;
    oh_gone gone = {0, 0};
    for (int i = 0; i < world_size; i++) {
        polls[i] = (struct pollfd){.fd = mesh->pidfds[i], .events = POLLIN};
        polls[world_size + i] = (struct pollfd){.fd = mesh->sockets[i], .events = POLLRDHUP};
    }
    if (oh_mesh_poll(polls, 2 * world_size, 0) <= 0) return gone;
    for (int i = 0; i < world_size; i++) {
        if (polls[i].revents) gone.ended |= 1u << i;
        if (polls[world_size + i].revents) gone.closed |= 1u << i;
    }
    return gone;
}

void oh_mesh_note(oh_mesh *mesh, int rank, const oh_notice *word) {
    int culprit = word->culprit;
    /* What failed by itself is its own cause; who missed another is not. */
    if (word->kind == OH_NOTICE_FAIL && culprit < 0 && word->result != ONEHOP_ERR_MISSING_PEER)
        culprit = word->origin;
    if (word->kind == OH_NOTICE_LEFT)
        atomic_fetch_or_explicit(&mesh->left, 1u << rank, memory_order_relaxed);
    else if (culprit >= 0 && culprit < mesh->world_size && culprit != mesh->rank)
        atomic_fetch_or_explicit(&mesh->named, 1u << culprit, memory_order_relaxed);
}

/* Words are noted when an exchange reads them; here those that lie unread. The masks stand for
 * themselves, hence relaxed. */
static void note_last_words(oh_mesh *mesh) {
    oh_notice last;
    for (int i = 0; i < mesh->world_size; i++)
        if (oh_mesh_last_words(mesh->sockets[i], &last)) oh_mesh_note(mesh, i, &last);
}

/* Whom the others name; else who went without a word; else who took leave. */
static int choose(oh_mesh *mesh, oh_gone gone) {
    note_last_words(mesh);
    const uint32_t named = atomic_load_explicit(&mesh->named, memory_order_relaxed);
    const uint32_t left = atomic_load_explicit(&mesh->left, memory_order_relaxed);
    const uint32_t ended = gone.ended & ~left, closed = gone.closed & ~left;
    const uint32_t any = gone.ended | gone.closed;
    const uint32_t from = named ? named : ended ? ended : closed ? closed : any;
    return from ? __builtin_ctz(from) : -1;
}

int oh_mesh_lost_peer(oh_mesh *mesh) {
    const oh_gone gone = look(mesh);
    return gone.ended | gone.closed ? choose(mesh, gone) : -1;
}

int oh_mesh_culprit(oh_mesh *mesh, int peer, bool *sure_out) {
    const oh_gone gone = look(mesh);
    const int first = choose(mesh, gone);
    const uint32_t named = atomic_load_explicit(&mesh->named, memory_order_relaxed);
    const uint32_t left = atomic_load_explicit(&mesh->left, memory_order_relaxed);
    *sure_out = named || gone.ended >> peer & 1;
    return first >= 0 && (named || left >> peer & 1) ? first : peer;
}

void oh_mesh_hint(oh_mesh *mesh, int culprit) {
    const oh_notice hint = {
        .magic = OH_NOTICE_MAGIC, .kind = OH_NOTICE_LOST, .origin = mesh->rank, .culprit = culprit};
    const oh_gone gone = look(mesh);
    if (culprit < 0 || culprit >= mesh->world_size) return;
    /* It may have left a communicator and still be in the group. */
    if (!((gone.ended | gone.closed) >> culprit & 1)) return;
    mesh->spoken = true;
    for (int i = 0; i < mesh->world_size; i++)
        if (i != culprit) oh_mesh_send_notice(mesh, i, &hint);
}

void oh_mesh_close(oh_mesh *mesh, bool owner) {
    const oh_notice leave = {
        .magic = OH_NOTICE_MAGIC, .kind = OH_NOTICE_LEFT, .origin = mesh->rank, .culprit = -1};
    for (int i = 0; i < mesh->world_size; i++) {
        /* Shut down first: copies of the socket in forked children must not keep it alive. */
        if (owner && !mesh->spoken) oh_mesh_send_notice(mesh, i, &leave);
        if (mesh->sockets[i] >= 0) {
            if (owner) shutdown(mesh->sockets[i], SHUT_RDWR);
            close(mesh->sockets[i]);
        }
        if (mesh->pidfds[i] >= 0) close(mesh->pidfds[i]);
        mesh->sockets[i] = mesh->pidfds[i] = -1;
    }
    if (owner) pthread_mutex_destroy(&mesh->send_lock);
}
