/* What the host could do at best: one way of a flag between two cores, and one memcpy of the
 * message, both measured at start with buffers that stay in cache where they fit. An all-reduce has
 * to do at least that much: the peer must be told, and the result written. */
#include "cli/perf/perf_floor.h"

#include "base/base.h"

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

enum {
    ROUNDS = 50, /* of a batch: short, so that some batch runs without an interruption */
    BATCHES = 2000,
    LIMIT_MS = 2000,     /* where other programs take the cores, what was found by then must do */
    COPY_CAP = 16 << 20, /* larger copies are taken as so many of these */
    COPY_BATCH_US = 200,
    COPY_BATCHES = 5,
};

typedef struct court {
    uint32_t ball __attribute__((aligned(128)));
    uint32_t over __attribute__((aligned(128)));
    uint64_t end_ns;
} court;

/* Waits for the ball to be `wanted`; yields now and then, for machines with one core. False: the
 * game is over. */
static bool await_ball(court *place, uint32_t wanted) {
    for (uint32_t polls = 1; __atomic_load_n(&place->ball, __ATOMIC_ACQUIRE) != wanted; polls++) {
        if (polls % 4096) continue;
        if (__atomic_load_n(&place->over, __ATOMIC_RELAXED) || oh_clock_ns() > place->end_ns)
            return false;
        sched_yield();
    }
    return true;
}

static void *return_balls(void *argument) {
    court *place = argument;
    for (uint32_t ball = 1; await_ball(place, ball); ball += 2)
        __atomic_store_n(&place->ball, ball + 1, __ATOMIC_RELEASE);
    return NULL;
}

/* Best batch: other programs run at times. INFINITY if none was finished. */
static double play(court *place) {
    double best = INFINITY;
    uint32_t ball = 1;
    for (int batch = 0; batch < BATCHES; batch++) {
        uint64_t start = oh_clock_ns();
        if (start > place->end_ns) break;
        for (int round = 0; round < ROUNDS; round++, ball += 2) {
            __atomic_store_n(&place->ball, ball, __ATOMIC_RELEASE);
            if (!await_ball(place, ball + 1)) return best;
        }
        best = fmin(best, (double)(oh_clock_ns() - start) / 1000 / ROUNDS / 2);
    }
    return best;
}

static void pin(pthread_t thread, int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(thread, sizeof set, &set);
}

/* Between two processors of this process. Pinned, for a busy machine may keep both threads on
 * one. */
static double between(int here, int there) {
    court place = {0, 0, oh_clock_ns() + LIMIT_MS * 1000000ull};
    pthread_t other;
    if (pthread_create(&other, NULL, return_balls, &place) != 0) return INFINITY;
    pin(other, there);
    pin(pthread_self(), here);
    double best = play(&place);
    __atomic_store_n(&place.over, 1, __ATOMIC_RELAXED);
    pthread_join(other, NULL);
    return best;
}

/* From the first processor to the last, and to one in the middle, which may be on the same socket.
 * Neither is the first one's sibling in the usual ways of numbering hardware threads. */
static double one_way_us(void) {
    cpu_set_t allowed;
    int cpus[CPU_SETSIZE], count = 0;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return INFINITY;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &allowed)) cpus[count++] = cpu;
    if (count < 2) return INFINITY;
    double best = between(cpus[0], cpus[count - 1]);
    if (count >= 8) best = fmin(best, between(cpus[0], cpus[count / 2 - 1]));
    pthread_setaffinity_np(pthread_self(), sizeof allowed, &allowed);
    return best;
}

/* Time of `times` copies; the barrier keeps the compiler from dropping all but the last. */
static double copies_us(void *to, const void *from, size_t bytes, uint64_t times) {
    uint64_t start = oh_clock_ns();
    for (uint64_t i = 0; i < times; i++) {
        memcpy(to, from, bytes);
        __asm__ volatile("" ::"r"(to), "r"(from) : "memory");
    }
    return (double)(oh_clock_ns() - start) / 1000;
}

static double copy_us(void *to, const void *from, uint64_t bytes) {
    size_t piece = bytes < COPY_CAP ? bytes : COPY_CAP;
    double once = fmax(copies_us(to, from, piece, 1), 0.01), best = INFINITY;
    uint64_t times = 1 + (uint64_t)(COPY_BATCH_US / once);
    for (int batch = 0; batch < COPY_BATCHES; batch++)
        best = fmin(best, copies_us(to, from, piece, times) / (double)times);
    return best * (double)bytes / (double)piece;
}

void perf_measure_floor(const uint64_t *bytes, size_t count, perf_floor *out) {
    size_t largest = bytes[count - 1] < COPY_CAP ? bytes[count - 1] : COPY_CAP;
    /* Aligned alike: memcpy by string instructions is 20 times slower between pages that are 16
     * bytes out of step (4 KB on an AMD EPYC guest, 2026-11-29), and malloc's large blocks start
     * there. */
    size_t room = oh_round_up(largest, 4096);
    char *from = aligned_alloc(4096, room), *to = aligned_alloc(4096, room);
    if (from && to) {
        memset(from, 1, largest); /* pages of their own, not the shared zero page */
        memset(to, 2, largest);
        for (size_t i = 0; i < count; i++) out->copy_us[i] = copy_us(to, from, bytes[i]);
        out->latency_us = one_way_us();
        out->known = out->latency_us < INFINITY;
    }
    free(from);
    free(to);
}
