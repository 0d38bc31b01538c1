/* The user's secret: 16 random bytes in the kernel's keyring of this user (keyrings(7)).
 *
 * It must be found by all processes of a user whatever their environment, working directory and
 * view of the file system, and by nobody else, and another user must not be able to prevent it. No
 * directory has all these properties: /tmp can be taken first, $XDG_RUNTIME_DIR and $HOME are not
 * set everywhere. A key lies in memory until the machine restarts, and counts against this user's
 * quota alone.
 *
 * Who finds none makes one in the keyring of its thread and moves it over, which fails if another
 * process has done so meanwhile: all agree on the first. That needs Linux 5.3. Docker's default
 * profile refuses these system calls. */
#include "base/base.h"

#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>

/* <linux/keyctl.h>, which is newer than 5.3 only on newer systems. */
enum {
    SET_PERMISSIONS = 5, /* KEYCTL_SETPERM */
    SEARCH = 10,
    READ = 11,
    MOVE = 30,
    MOVE_EXCLUSIVE = 1,
    OF_THREAD = -1,          /* KEY_SPEC_THREAD_KEYRING */
    OF_USER = -4,            /* KEY_SPEC_USER_KEYRING */
    PERMISSIONS = 0x3f0b0000 /* its possessor: all; its user: view, read, search; others: nothing */
};

static const char type[] = "user", description[] = "onehop";

static long find(void) {
    return syscall(SYS_keyctl, SEARCH, OF_USER, type, description, 0);
}

static void make(void) {
    oh_id128 fresh;
    if (oh_random(&fresh, sizeof fresh)) return;
    const long key = syscall(SYS_add_key, type, description, &fresh, sizeof fresh, OF_THREAD);
    if (key < 0) return;
    syscall(SYS_keyctl, SET_PERMISSIONS, key, PERMISSIONS);
    syscall(SYS_keyctl, MOVE, key, OF_THREAD, OF_USER, MOVE_EXCLUSIVE);
}

bool oh_user_secret(oh_id128 *secret_out) {
    const int saved = errno;
    oh_id128 secret;
    long key = find();
    if (key < 0) {
        make();
        key = find();
    }
    const bool found =
        key >= 0 && syscall(SYS_keyctl, READ, key, &secret, sizeof secret) == (long)sizeof secret;
    if (found) *secret_out = secret;
    errno = saved;
    return found;
}
