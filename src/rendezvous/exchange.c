/* One collective exchange over the mesh: every rank sends every peer one frame and receives one.
 *
 * Driven by poll, reading and writing whatever moves, so blobs larger than a socket's buffer cannot
 * deadlock however the ranks are timed. A peer may already have sent its next frame: only the bytes
 * of this one are read. A peer that sent its frame and left is no failure of this exchange; one
 * whose frame can no longer come is. A rank whose exchange fails says why, in a notice between two
 * frames, before it returns; the first such word that a peer reads is its own failure too. Bytes:
 * W-1 frames of 40 + `bytes` out and in; one hop. */
#include "rendezvous/exchange.h"

#include "base/wait.h"

#include "base/descriptor.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

typedef union oh_fd_message {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(sizeof(int) * OH_MAX_FDS)];
} oh_fd_message;

/* ---- sending --------------------------------------------------------------------------------- */

static void attach_fds(const oh_run *run, struct msghdr *message, oh_fd_message *control) {
    int given[OH_MAX_FDS], count = 0;
    for (int i = 0; i < run->what->count; i++)
        if (run->out.fd_mask >> i & 1) given[count++] = run->what->fds[i];
    memset(control, 0, sizeof *control);
    message->msg_control = control;
    message->msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)count);
    struct cmsghdr *header = CMSG_FIRSTHDR(message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)count);
    memcpy(CMSG_DATA(header), given, sizeof(int) * (size_t)count);
}

static ssize_t send_some(oh_run *run, oh_flow *flow) {
    oh_fd_message control;
    struct iovec parts[2];
    struct msghdr message = {.msg_iov = parts};
    if (flow->sent < sizeof run->out)
        parts[message.msg_iovlen++] =
            (struct iovec){(char *)&run->out + flow->sent, sizeof run->out - flow->sent};
    size_t blob_sent = flow->sent < sizeof run->out ? 0 : flow->sent - sizeof run->out;
    if (blob_sent < run->what->bytes)
        parts[message.msg_iovlen++] =
            (struct iovec){(char *)run->what->send + blob_sent, run->what->bytes - blob_sent};
    if (!flow->sent && run->out.fd_mask) attach_fds(run, &message, &control);
    return sendmsg(run->mesh->sockets[flow->peer], &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static onehop_result push_locked(oh_run *run, oh_flow *flow) {
    flow->throttled = false;
    while (flow->sent < run->total) {
        ssize_t moved = send_some(run, flow);
        if (moved >= 0) {
            flow->sent += (size_t)moved;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            break;
        } else if (errno == ETOOMANYREFS || errno == ENOBUFS || errno == ENOMEM) {
            flow->throttled = true;
            break;
        } else if (errno == EPIPE || errno == ECONNRESET) {
            flow->sent = run->total; /* it left; whether that matters shows when reading */
        } else if (errno != EINTR) {
            return oh_error_errno(ONEHOP_ERR_SYSTEM, errno, "sending to rank %d failed",
                                  flow->peer);
        }
    }
    return ONEHOP_OK;
}

onehop_result oh_flow_push(oh_run *run, oh_flow *flow) {
    const uint32_t bit = 1u << flow->peer;
    if (flow->sent == run->total) return ONEHOP_OK;
    pthread_mutex_lock(&run->mesh->send_lock);
    onehop_result result = push_locked(run, flow);
    run->mesh->cut &= ~bit;
    if (flow->sent && flow->sent < run->total) run->mesh->cut |= bit;
    pthread_mutex_unlock(&run->mesh->send_lock);
    return result;
}

/* ---- receiving ------------------------------------------------------------------------------- */

static void take_fds(oh_run *run, oh_flow *flow, struct msghdr *message) {
    bool lacking = message->msg_flags & MSG_CTRUNC;
    for (struct cmsghdr *header = CMSG_FIRSTHDR(message); header;
         header = CMSG_NXTHDR(message, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
        size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(header) + i * sizeof fd, sizeof fd);
            fd = oh_fd_high(fd);
            lacking = lacking || fd < 0;
            if (flow->fd_count < OH_MAX_FDS)
                flow->fds[flow->fd_count++] = fd;
            else
                close(fd);
        }
    }
    if (lacking && run->what->mine_out)
        *run->what->mine_out = oh_error(ONEHOP_ERR_SYSTEM,
                                        "not all descriptors of rank %d could be received: is the "
                                        "limit of open files (ulimit -n) reached?",
                                        flow->peer);
}

static ssize_t receive_head(oh_run *run, oh_flow *flow) {
    oh_fd_message control;
    struct iovec part = {(char *)&flow->in + flow->received, sizeof flow->in - flow->received};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = &control,
                             .msg_controllen = sizeof control};
    ssize_t moved =
        recvmsg(run->mesh->sockets[flow->peer], &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (moved > 0) take_fds(run, flow, &message);
    return moved;
}

static ssize_t receive_blob(oh_run *run, oh_flow *flow) {
    size_t done = flow->received - sizeof flow->in;
    char *to = (char *)run->what->recv + (size_t)flow->peer * run->what->bytes + done;
    return recv(run->mesh->sockets[flow->peer], to, run->what->bytes - done, MSG_DONTWAIT);
}

/* Both sides word it alike. */
static onehop_result differ(const oh_run *run, const oh_flow *flow) {
    const oh_frame *low = &run->out, *high = &flow->in;
    const int own = run->mesh->rank, peer = flow->peer;
    if (peer < own) low = &flow->in, high = &run->out;
    return oh_error(ONEHOP_ERR_DISAGREEMENT,
                    "rank %d exchanges %llu bytes and %u descriptors, rank %d %llu and %u",
                    peer < own ? peer : own, (unsigned long long)low->bytes, low->fd_count,
                    peer < own ? own : peer, (unsigned long long)high->bytes, high->fd_count);
}

/* The frame's head is complete: does it answer ours? */
static onehop_result check_head(oh_run *run, oh_flow *flow) {
    const oh_frame *in = &flow->in, *out = &run->out;
    if (in->magic != OH_FRAME_MAGIC)
        return oh_error(ONEHOP_ERR_INTERNAL, "rank %d sent something that is not onehop",
                        flow->peer);
    if (in->sequence != out->sequence)
        return oh_error(ONEHOP_ERR_INTERNAL, "rank %d is at exchange %llu, this rank %d at %llu",
                        flow->peer, (unsigned long long)in->sequence, run->mesh->rank,
                        (unsigned long long)out->sequence);
    if (in->bytes != out->bytes || in->fd_count != out->fd_count) return differ(run, flow);
    int used = 0;
    for (uint32_t i = 0; i < in->fd_count; i++)
        if (in->fd_mask >> i & 1 && used < flow->fd_count)
            run->what->fds_out[(uint32_t)flow->peer * in->fd_count + i] = flow->fds[used++];
    /* Fewer than announced: take_fds has said so. More: nobody asked for them. */
    while (flow->fd_count > used) close(flow->fds[--flow->fd_count]);
    flow->fd_count = 0;
    return ONEHOP_OK;
}

static onehop_result take_head(oh_run *run, oh_flow *flow) {
    return flow->in.magic == OH_NOTICE_MAGIC ? oh_run_hear(run, flow) : check_head(run, flow);
}

static onehop_result pull(oh_run *run, oh_flow *flow, bool peer_ended) {
    while (flow->received < run->total) {
        bool head = flow->received < sizeof flow->in;
        ssize_t moved = head ? receive_head(run, flow) : receive_blob(run, flow);
        if (moved > 0) {
            flow->received += (size_t)moved;
            if (!head || flow->received < sizeof flow->in) continue;
            onehop_result result = take_head(run, flow);
            if (result) return result;
        } else if (moved == 0 || errno == ECONNRESET) {
            return oh_run_lost(run, flow);
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            return peer_ended ? oh_run_lost(run, flow) : ONEHOP_OK;
        } else if (errno != EINTR) {
            return oh_error_errno(ONEHOP_ERR_SYSTEM, errno, "receiving from rank %d failed",
                                  flow->peer);
        }
    }
    return ONEHOP_OK;
}

/* ---- the loop -------------------------------------------------------------------------------- */

/* Fills polls[0..2W-1]: sockets, then pidfds. Returns false if there is nothing left to do. */
static bool prepare_polls(const oh_run *run, struct pollfd *polls, bool *throttled_out) {
    int world_size = run->mesh->world_size;
    bool busy = false;
    *throttled_out = false;
    for (int i = 0; i < world_size; i++) {
        const oh_flow *flow = &run->flows[i];
        bool reads = flow->received < run->total, writes = flow->sent < run->total;
        short events = (short)((reads ? POLLIN : 0) | (writes && !flow->throttled ? POLLOUT : 0));
        /* A peer that is only owed a throttled frame may hang up; do not spin on that. */
        polls[i] = (struct pollfd){.fd = events ? run->mesh->sockets[i] : -1, .events = events};
        polls[world_size + i] =
            (struct pollfd){.fd = reads ? run->mesh->pidfds[i] : -1, .events = POLLIN};
        busy = busy || reads || writes;
        *throttled_out = *throttled_out || flow->throttled;
    }
    return busy;
}

static onehop_result move(oh_run *run, const struct pollfd *polls) {
    int world_size = run->mesh->world_size;
    for (int i = 0; i < world_size; i++) {
        oh_flow *flow = &run->flows[i];
        onehop_result result = ONEHOP_OK;
        if (polls[i].revents & (POLLOUT | POLLHUP | POLLERR) || flow->throttled)
            result = oh_flow_push(run, flow);
        if (!result && polls[i].revents & (POLLIN | POLLHUP | POLLERR | POLLNVAL))
            result = pull(run, flow, false);
        /* Ended, and all it ever sent is in the socket. */
        if (!result && polls[world_size + i].revents) result = pull(run, flow, true);
        if (result) return result;
    }
    return ONEHOP_OK;
}

static onehop_result run_to_end(oh_run *run) {
    struct pollfd polls[2 * ONEHOP_MAX_RANKS];
    uint64_t looked = oh_clock_ns();
    uint64_t deadline = looked + (uint64_t)run->what->timeout_ms * 1000000u;
    bool throttled;
    while (prepare_polls(run, polls, &throttled)) {
        uint64_t now = oh_clock_ns();
        deadline += oh_wait_pause_ns(&looked, now);
        bool late = now >= deadline;
        int wait_ms = oh_wait_poll_ms(late ? 0 : deadline - now);
        if (throttled && wait_ms > 1) wait_ms = 1;
        int events = oh_mesh_poll(polls, 2 * run->mesh->world_size, wait_ms);
        if (events < 0 && errno != EINTR)
            return oh_mesh_system_error(errno, run->mesh->world_size, "poll");
        if (events < 0) continue;
        onehop_result result = move(run, polls);
        if (result) return result;
        if (!events) oh_run_answer(run);
        if (late && !prepare_polls(run, polls, &throttled)) return ONEHOP_OK;
        if (late && !oh_run_ask(run)) return oh_run_missing(run);
        if (late) deadline = oh_clock_ns() + OH_ANSWER_MS * 1000000ull;
        if (oh_wait_interrupted()) return oh_wait_ended("an exchange with all ranks");
    }
    return ONEHOP_OK;
}

onehop_result oh_mesh_exchange(oh_mesh *mesh, const oh_exchange *what) {
    oh_run run = {
        .mesh = mesh, .what = what, .total = sizeof(oh_frame) + what->bytes, .culprit = -1};
    atomic_store_explicit(&mesh->answered, 0, memory_order_relaxed);
    run.out = (oh_frame){.magic = OH_FRAME_MAGIC,
                         .sequence = ++mesh->sequence,
                         .bytes = what->bytes,
                         .fd_count = (uint32_t)what->count};
    for (int i = 0; i < what->count; i++)
        if (what->fds[i] >= 0) run.out.fd_mask |= (uint64_t)1 << i;
    for (int i = 0; i < mesh->world_size; i++) run.flows[i].peer = i;
    run.flows[mesh->rank].sent = run.flows[mesh->rank].received = run.total;
    if (what->bytes) {
        char *own = (char *)what->recv + (size_t)mesh->rank * what->bytes;
        if (own != what->send) memmove(own, what->send, what->bytes);
    }
    onehop_result result = ONEHOP_OK;
    for (int i = 0; !result && i < mesh->world_size; i++)
        result = oh_flow_push(&run, &run.flows[i]);
    if (!result) result = run_to_end(&run);
    if (result) oh_run_say_last(&run, result);
    for (int i = 0; i < mesh->world_size; i++)
        while (run.flows[i].fd_count) close(run.flows[i].fds[--run.flows[i].fd_count]);
    return result;
}
