/* Seeing that a peer is gone.
 *
 * A socket shows its peer's end when the last copy of the peer's descriptor is closed, so a forked
 * child that keeps one hides the death of its parent. A pidfd shows the end of the process itself.
 * Where it is refused (old kernel, sandbox, other pid namespace) the socket must do. */
#include "rendezvous/mesh.h"

#include "base/descriptor.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Linux 6.5; absent from older headers */
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434 /* Linux 5.3, the same number on every architecture */
#endif

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

int oh_mesh_lost_peer(const oh_mesh *mesh) {
    struct pollfd polls[2 * ONEHOP_MAX_RANKS];
    int world_size = mesh->world_size;
    /* Processes first, then sockets: the lowest index found is then the one to name. */
    for (int i = 0; i < world_size; i++) {
        polls[i] = (struct pollfd){.fd = mesh->pidfds[i], .events = POLLIN};
        polls[world_size + i] = (struct pollfd){.fd = mesh->sockets[i], .events = POLLRDHUP};
    }
    if (poll(polls, (nfds_t)(2 * world_size), 0) <= 0) return -1;
    for (int i = 0; i < 2 * world_size; i++)
        if (polls[i].revents) return i % world_size;
    return -1;
}

void oh_mesh_close(oh_mesh *mesh, bool owner) {
    for (int i = 0; i < mesh->world_size; i++) {
        /* Shut down first: copies of the socket in forked children must not keep it alive. */
        if (mesh->sockets[i] >= 0) {
            if (owner) shutdown(mesh->sockets[i], SHUT_RDWR);
            close(mesh->sockets[i]);
        }
        if (mesh->pidfds[i] >= 0) close(mesh->pidfds[i]);
        mesh->sockets[i] = mesh->pidfds[i] = -1;
    }
}
