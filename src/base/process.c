/* Which process this is: a random number, remade in every forked child. */
#include "base/base.h"

#include <pthread.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static oh_id128 process_id;
static pid_t process_pid; /* owner of process_id; catches a fork that ran no handlers (raw clone) */

static void before_fork(void) {
    pthread_mutex_lock(&lock);
}

static void after_fork(void) {
    pthread_mutex_unlock(&lock);
}

static void in_child(void) {
    process_pid = 0;
    pthread_mutex_unlock(&lock);
}

static void watch_forks(void) {
    pthread_atfork(before_fork, after_fork, in_child);
}

onehop_result oh_process_id(oh_id128 *id_out) {
    onehop_result result = ONEHOP_OK;
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&lock);
    if (process_pid != getpid()) {
        result = oh_random(&process_id, sizeof process_id);
        if (!result) process_pid = getpid();
    }
    if (!result) *id_out = process_id;
    pthread_mutex_unlock(&lock);
    return result;
}
