/* Where this process is; see identity.h. */
#include "rendezvous/identity.h"

#include "base/descriptor.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef SO_NETNS_COOKIE
#define SO_NETNS_COOKIE 71 /* Linux 5.14; absent from older headers */
#endif

/* Without /proc: a number of the same meaning from a throw-away socket. */
static uint64_t netns_cookie(void) {
    uint64_t cookie = 0;
    socklen_t size = sizeof cookie;
    int fd = oh_fd_high(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (fd < 0) return 0;
    if (getsockopt(fd, SOL_SOCKET, SO_NETNS_COOKIE, &cookie, &size)) cookie = 0;
    close(fd);
    return cookie;
}

uint64_t oh_identity_netns(void) {
    int saved = errno;
    struct stat info;
    uint64_t number = stat("/proc/thread-self/ns/net", &info) ? netns_cookie() : info.st_ino;
    errno = saved;
    return number;
}

oh_id128 oh_identity_boot(void) {
    int saved = errno;
    oh_id128 id = {{0, 0}};
    char text[40] = ""; /* 8-4-4-4-12 hexadecimal digits */
    int fd = oh_fd_high(open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
    ssize_t got = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    for (ssize_t i = 0, digits = 0; i < got && digits < 32; i++) {
        char digit[2] = {text[i], 0};
        if (!strchr("0123456789abcdef", text[i])) continue;
        uint64_t *word = &id.word[digits++ / 16];
        *word = *word << 4 | strtoull(digit, NULL, 16);
    }
    errno = saved;
    return id;
}
