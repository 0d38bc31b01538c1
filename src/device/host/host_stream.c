/* Host streams: a bounded ring of work and one thread that does it in order.
 *
 * Tickets: the n-th item put on a stream has ticket n; `issued` and `completed` are the last ones
 * given out and done. "All that the stream holds now" is the ticket in `issued`, so order between
 * two streams is an item on the later one that waits for a ticket of the earlier one. Tickets refer
 * only to the past, hence waits cannot form a circle. A wait that is put on a stream under capture
 * becomes part of the graph, where it is met at once when its ticket has passed; work recorded by a
 * capture is not held by the stream and nobody waits for it.
 *
 * Counters are written under the lock, with release, and polled without it, with acquire: whoever
 * sees the count also sees the ring entry (issued) or what the kernel wrote (completed). Who has
 * polled long enough sleeps on a condition; the lock makes sure that no wake-up is lost.
 *
 * Handles are looked up in a list, never followed blindly: a stranger's pointer or a destroyed
 * stream is answered with an error. A forked child has the streams of its parent but not their
 * threads: no use of one is accepted there, and destroying one only frees the child's copy. Its
 * locks and conditions are left alone then, for threads that are not there may hold or wait for
 * them. */
#include "device/host/host_stream.h"
#include "base/wait.h"
#include "device/host/vector.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#define RING_ENTRIES 1024
#define CACHE_LINE   64

/* Polls before sleeping: bare ones for a processor of one's own, then yields for a shared one.
 * Together about 10 us, the price of one sleep and wake-up. */
#define POLLS_BARE  64
#define POLLS_YIELD 32

typedef struct ring_entry {
    _Alignas(CACHE_LINE) unsigned char args[OH_HOST_ARGS_MAX];
    oh_host_work work;
} ring_entry;

struct oh_host_stream {
    oh_host_stream *next; /* guarded by registry_lock */
    uint64_t process;     /* that made it */
    uint64_t id;
    uint32_t users; /* the handle, and every OH_HOST_WAIT that names the stream */
    pthread_t worker;
    pthread_mutex_t lock;
    pthread_cond_t work_came, work_went;
    uint32_t sleepers;          /* threads in work_went; guarded by lock */
    bool worker_sleeps;         /* guarded by lock */
    bool stop;                  /* guarded by lock */
    onehop_host_graph *capture; /* guarded by lock */
    _Alignas(CACHE_LINE) uint64_t issued;
    _Alignas(CACHE_LINE) uint64_t completed;
    ring_entry ring[RING_ENTRIES]; /* entry of ticket n: (n - 1) % RING_ENTRIES; not zeroed */
};

static pthread_mutex_t registry_lock = PTHREAD_MUTEX_INITIALIZER;
OH_RESET_IN_CHILD(registry_lock)
static oh_host_stream *registry; /* guarded by registry_lock, as is last_id */
static uint64_t last_id;

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Polls until *counter >= ticket; false if that takes too long. Acquire: see the head of the
 * file. */
static bool poll_counter(const uint64_t *counter, uint64_t ticket) {
    for (int i = 0; i < POLLS_BARE + POLLS_YIELD; i++) {
        if (__atomic_load_n(counter, __ATOMIC_ACQUIRE) >= ticket) return true;
        if (i < POLLS_BARE)
            relax();
        else
            sched_yield();
    }
    return false;
}

/* ---- the worker ------------------------------------------------------------------------------ */

/* Waits for the item after `done`; false if the stream is at its end. */
static bool await_work(oh_host_stream *stream, uint64_t done) {
    if (poll_counter(&stream->issued, done + 1)) return true;
    pthread_mutex_lock(&stream->lock);
    stream->worker_sleeps = true;
    while (stream->issued == done && !stream->stop)
        pthread_cond_wait(&stream->work_came, &stream->lock);
    stream->worker_sleeps = false;
    bool more = stream->issued != done;
    pthread_mutex_unlock(&stream->lock);
    return more;
}

static void *run_worker(void *argument) {
    oh_host_stream *stream = argument;
    for (uint64_t done = 0; await_work(stream, done);) {
        /* The entry is ours until `completed` counts it. */
        const ring_entry *entry = &stream->ring[done % RING_ENTRIES];
        oh_host_work_run(&entry->work, entry->args);
        oh_host_work_release(&entry->work);
        pthread_mutex_lock(&stream->lock);
        __atomic_store_n(&stream->completed, ++done, __ATOMIC_RELEASE);
        if (stream->sleepers > 0) pthread_cond_broadcast(&stream->work_went);
        pthread_mutex_unlock(&stream->lock);
    }
    return NULL;
}

/* A worker with all signals blocked: handlers are for the program's own threads. */
static int start_worker(oh_host_stream *stream) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&stream->worker, NULL, run_worker, stream);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error == 0) pthread_setname_np(stream->worker, "onehop-stream");
    return error;
}

/* ---- waiting and queueing -------------------------------------------------------------------- */

/* With the lock held, save while the hook runs. False: the hook has ended the wait. */
static bool sleep_until(oh_host_stream *stream, uint64_t ticket) {
    OH_NO_CANCEL;
    bool ended = false;
    stream->sleepers++;
    while (stream->completed < ticket && !ended) {
        oh_wait_rest_on(&stream->work_went, &stream->lock, UINT64_MAX);
        ended = stream->completed < ticket && oh_wait_interrupted_with(&stream->lock);
    }
    stream->sleepers--;
    return !ended;
}

onehop_result oh_host_stream_wait(oh_host_stream *stream, uint64_t ticket) {
    if (poll_counter(&stream->completed, ticket)) return ONEHOP_OK;
    pthread_mutex_lock(&stream->lock);
    const bool met = sleep_until(stream, ticket);
    pthread_mutex_unlock(&stream->lock);
    return met ? ONEHOP_OK : oh_wait_ended("waiting for a host stream");
}

/* With the lock held. Others may queue while we sleep, so the room is looked for again. False: the
 * hook has ended the wait for room. */
static bool enqueue(oh_host_stream *stream, const oh_host_work *work, const void *args) {
    while (stream->issued - stream->completed >= RING_ENTRIES)
        if (!sleep_until(stream, stream->issued - RING_ENTRIES + 1)) return false;
    ring_entry *entry = &stream->ring[stream->issued % RING_ENTRIES];
    entry->work = *work;
    if (work->args_bytes > 0) memcpy(entry->args, args, work->args_bytes);
    __atomic_store_n(&stream->issued, stream->issued + 1, __ATOMIC_RELEASE);
    if (stream->worker_sleeps) pthread_cond_signal(&stream->work_came);
    return true;
}

onehop_result oh_host_stream_put(oh_host_stream *stream, const oh_host_work *work,
                                 const void *args) {
    onehop_result result = ONEHOP_OK;
    pthread_mutex_lock(&stream->lock);
    if (stream->capture != NULL)
        result = oh_host_graph_record(stream->capture, work, args);
    else if (!enqueue(stream, work, args))
        result = oh_wait_ended("waiting for room in the queue of a host stream");
    pthread_mutex_unlock(&stream->lock);
    return result;
}

/* ---- handles --------------------------------------------------------------------------------- */

/* Of any process. */
static oh_host_stream *look_up(onehop_stream handle) {
    pthread_mutex_lock(&registry_lock);
    oh_host_stream *stream = registry;
    while (stream != NULL && (void *)stream != (void *)handle) stream = stream->next;
    pthread_mutex_unlock(&registry_lock);
    return stream;
}

oh_host_stream *oh_host_stream_find(onehop_stream handle) {
    oh_host_stream *stream = look_up(handle);
    return stream != NULL && oh_process_is(stream->process) ? stream : NULL;
}

onehop_result oh_host_stream_unknown(onehop_stream handle) {
    if (look_up(handle) != NULL) return oh_process_refuse("host stream");
    return oh_error(
        ONEHOP_ERR_STREAM,
        "stream %p is not a live stream of onehop_host_stream_create, which the host device "
        "expects",
        (void *)handle);
}

static void register_stream(oh_host_stream *stream) {
    pthread_mutex_lock(&registry_lock);
    stream->id = ++last_id;
    stream->next = registry;
    registry = stream;
    pthread_mutex_unlock(&registry_lock);
}

/* Takes the stream off the list; NULL if it is not there. */
static oh_host_stream *unregister_stream(onehop_stream handle) {
    pthread_mutex_lock(&registry_lock);
    oh_host_stream **link = &registry;
    while (*link != NULL && (void *)*link != (void *)handle) link = &(*link)->next;
    oh_host_stream *stream = *link;
    if (stream != NULL) *link = stream->next;
    pthread_mutex_unlock(&registry_lock);
    return stream;
}

void oh_host_stream_drop(oh_host_stream *stream) {
    /* Acquire and release: the last user frees after all others have let go. */
    if (__atomic_sub_fetch(&stream->users, 1, __ATOMIC_ACQ_REL) > 0) return;
    if (oh_process_is(stream->process)) {
        pthread_cond_destroy(&stream->work_went);
        pthread_cond_destroy(&stream->work_came);
        pthread_mutex_destroy(&stream->lock);
    }
    free(stream);
}

onehop_result onehop_host_stream_create(onehop_stream *stream_out) {
    OH_NO_CANCEL;
    if (stream_out == NULL)
        return oh_error(ONEHOP_ERR_NULL, "onehop_host_stream_create: stream_out is NULL");
    oh_host_stream *stream = aligned_alloc(CACHE_LINE, sizeof *stream);
    if (stream == NULL) return oh_error(ONEHOP_ERR_MEMORY, "out of memory for a host stream");
    memset(stream, 0, offsetof(oh_host_stream, ring));
    stream->process = oh_process();
    stream->users = 1;
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->work_came, NULL);
    oh_wait_condition_init(&stream->work_went);
    int error = start_worker(stream);
    if (error != 0) {
        oh_host_stream_drop(stream);
        return oh_error_errno(ONEHOP_ERR_SYSTEM, error, "starting the thread of a host stream");
    }
    register_stream(stream);
    *stream_out = (onehop_stream)stream;
    return ONEHOP_OK;
}

static void end_worker(oh_host_stream *stream) {
    pthread_mutex_lock(&stream->lock);
    stream->stop = true;
    pthread_cond_signal(&stream->work_came);
    pthread_mutex_unlock(&stream->lock);
    pthread_join(stream->worker, NULL);
}

void onehop_host_stream_destroy(onehop_stream handle) {
    OH_NO_CANCEL;
    if (handle == NULL) return;
    oh_host_stream *stream = unregister_stream(handle);
    if (stream == NULL) {
        oh_log(ONEHOP_LOG_ERROR,
               "onehop_host_stream_destroy: %p is not a live host stream; ignored", (void *)handle);
        return;
    }
    if (oh_process_is(stream->process)) end_worker(stream);
    if (stream->capture != NULL) oh_host_graph_drop(stream->capture);
    oh_host_stream_drop(stream);
}

onehop_result onehop_host_stream_synchronize(onehop_stream handle) {
    if (handle == NULL)
        return oh_error(ONEHOP_ERR_NULL, "onehop_host_stream_synchronize: stream is NULL");
    oh_host_stream *stream = oh_host_stream_find(handle);
    if (stream == NULL) return oh_host_stream_unknown(handle);
    if (oh_host_stream_capturing(stream))
        return oh_error(ONEHOP_ERR_STATE,
                        "a host stream cannot be synchronized while it is captured");
    return oh_host_stream_wait(stream, __atomic_load_n(&stream->issued, __ATOMIC_ACQUIRE));
}

/* ---- capture --------------------------------------------------------------------------------- */

bool oh_host_stream_capturing(oh_host_stream *stream) {
    pthread_mutex_lock(&stream->lock);
    bool capturing = stream->capture != NULL;
    pthread_mutex_unlock(&stream->lock);
    return capturing;
}

onehop_result oh_host_stream_capture(oh_host_stream *stream, bool expect_capturing,
                                     onehop_host_graph *graph, onehop_host_graph **old_out) {
    pthread_mutex_lock(&stream->lock);
    bool fits = (stream->capture != NULL) == expect_capturing;
    if (fits) {
        *old_out = stream->capture;
        stream->capture = graph;
    }
    pthread_mutex_unlock(&stream->lock);
    if (fits) return ONEHOP_OK;
    return oh_error(ONEHOP_ERR_STATE, expect_capturing
                                          ? "the host stream is not being captured"
                                          : "the host stream is already being captured");
}

/* ---- rows of the device ---------------------------------------------------------------------- */

onehop_result oh_host_stream_info(oh_device *device, onehop_stream handle, oh_stream_info *out) {
    (void)device;
    oh_stream_info info = {0, false, 0};
    if (handle != NULL) {
        oh_host_stream *stream = oh_host_stream_find(handle);
        if (stream == NULL) return oh_host_stream_unknown(handle);
        info.id = stream->id;
        pthread_mutex_lock(&stream->lock);
        info.capturing = stream->capture != NULL;
        if (info.capturing) info.capture = oh_host_graph_id(stream->capture);
        pthread_mutex_unlock(&stream->lock);
    }
    *out = info;
    return ONEHOP_OK;
}

onehop_result oh_host_launch(oh_device *device, const oh_launch *launch) {
    (void)device;
    oh_host_kernel kernel = (oh_host_kernel)(uintptr_t)launch->function->handle;
    if (launch->stream == NULL) {
        oh_host_run_worker(kernel, launch->args, launch->blocks, 0, 1);
        return ONEHOP_OK;
    }
    oh_host_stream *stream = oh_host_stream_find(launch->stream);
    if (stream == NULL) return oh_host_stream_unknown(launch->stream);
    if (launch->args_bytes > OH_HOST_ARGS_MAX)
        return oh_error(ONEHOP_ERR_TOO_LARGE, "kernel arguments of %zu bytes, at most %d fit",
                        launch->args_bytes, OH_HOST_ARGS_MAX);
    oh_host_work work = {OH_HOST_KERNEL, launch->blocks, kernel, launch->args_bytes, NULL, NULL, 0};
    return oh_host_stream_put(stream, &work, launch->args);
}

typedef struct copy_args {
    void *to;
    const void *from;
    size_t bytes;
} copy_args;

static void run_copy(const void *args, oh_grid grid) {
    const copy_args *copy = args;
    (void)grid;
    oh_vector_table()->copy(copy->to, copy->from, copy->bytes);
}

onehop_result oh_host_copy_on_stream(oh_device *device, void *to, const void *from, size_t bytes,
                                     onehop_stream stream) {
    copy_args args = {to, from, bytes};
    oh_function function = {(void *)(uintptr_t)run_copy, 0, 1, false, true};
    oh_launch launch = {&function, &args, sizeof args, 1, 1, stream};
    return oh_host_launch(device, &launch);
}

/* NULL runs at once: as the earlier one it holds nothing, as the later one it is the caller who
 * waits. */
onehop_result oh_host_stream_order(oh_device *device, onehop_stream earlier, onehop_stream later) {
    (void)device;
    oh_host_stream *first = earlier == NULL ? NULL : oh_host_stream_find(earlier);
    oh_host_stream *second = later == NULL ? NULL : oh_host_stream_find(later);
    if (earlier != NULL && first == NULL) return oh_host_stream_unknown(earlier);
    if (later != NULL && second == NULL) return oh_host_stream_unknown(later);
    if (first == NULL || first == second) return ONEHOP_OK;

    uint64_t ticket = __atomic_load_n(&first->issued, __ATOMIC_ACQUIRE);
    if (second == NULL) return oh_host_stream_wait(first, ticket);
    /* Also when the ticket has passed: the item hands on what the earlier work wrote. */
    oh_host_work work = {OH_HOST_WAIT, 0, NULL, 0, NULL, first, ticket};
    /* Relaxed: the caller's use of the handle keeps the stream alive. */
    __atomic_add_fetch(&first->users, 1, __ATOMIC_RELAXED);
    onehop_result result = oh_host_stream_put(second, &work, NULL);
    if (result != ONEHOP_OK) oh_host_stream_drop(first);
    return result;
}

onehop_result oh_host_stream_idle(oh_device *device, onehop_stream handle, bool *idle_out) {
    (void)device;
    bool idle = true;
    if (handle != NULL) {
        oh_host_stream *stream = oh_host_stream_find(handle);
        if (stream == NULL) return oh_host_stream_unknown(handle);
        uint64_t issued = __atomic_load_n(&stream->issued, __ATOMIC_ACQUIRE);
        idle = __atomic_load_n(&stream->completed, __ATOMIC_ACQUIRE) >= issued;
    }
    *idle_out = idle;
    return ONEHOP_OK;
}

static onehop_result keep_capture(oh_host_stream *stream, void (*gone)(void *), void *argument) {
    pthread_mutex_lock(&stream->lock);
    onehop_result result =
        stream->capture != NULL
            ? oh_host_graph_keep(stream->capture, gone, argument)
            : oh_error(ONEHOP_ERR_STREAM, "the host stream is not being captured");
    pthread_mutex_unlock(&stream->lock);
    return result;
}

onehop_result oh_host_graph_retain(oh_device *device, onehop_stream handle, void (*gone)(void *),
                                   void *argument) {
    (void)device;
    oh_host_stream *stream = handle == NULL ? NULL : oh_host_stream_find(handle);
    onehop_result result =
        stream == NULL ? oh_host_stream_unknown(handle) : keep_capture(stream, gone, argument);
    if (result != ONEHOP_OK) gone(argument);
    return result;
}
