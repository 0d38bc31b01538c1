/* The board: a barrier, a place for results and a record of the first failure, in shared memory. */
#include "cli/shared/board.h"

#include "base/wait.h"

#include <sched.h>
#include <stdio.h>
#include <sys/mman.h>

enum {
    SPINS = 200, /* about as long as a wake-up takes; then others may have the core */
    YIELD_NS = 2 * 1000 * 1000, /* then sleep, so that waiting ranks do not disturb a measurement */
    ALIVE_NS = 10 * 1000 * 1000,
};

perf_board *board_create(void) {
    void *memory =
        mmap(NULL, sizeof(perf_board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

void board_destroy(perf_board *board) {
    munmap(board, sizeof *board);
}

void board_fail(perf_board *board, int rank, int code, const char *text) {
    board_row *row = &board->row[rank];
    uint32_t none = 0;
    snprintf(row->text, sizeof row->text, "%s", text);
    row->code = code;
    /* Release: whoever sees the number sees code and text. */
    __atomic_compare_exchange_n(&board->failed, &none, (uint32_t)rank + 1, false, __ATOMIC_RELEASE,
                                __ATOMIC_RELAXED);
}

static void relax(uint64_t waited_ns, uint32_t round) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
    if (round < SPINS) return;
    if (waited_ns < YIELD_NS)
        sched_yield();
    else
        oh_sleep_us(100);
}

typedef struct barrier_wait {
    perf_board *board;
    uint32_t old; /* generation that is to end */
    uint64_t begun, looked, asked, limit_ns;
    onehop_result (*alive)(void *);
    void *user;
} barrier_wait;

static bool passed(const barrier_wait *w) {
    /* Pairs with the release of the last arrival: rows written before the barrier are seen. */
    return __atomic_load_n(&w->board->generation, __ATOMIC_ACQUIRE) != w->old;
}

/* What ends the wait before the barrier does. */
static onehop_result look(barrier_wait *w, uint64_t now) {
    const uint32_t failed = __atomic_load_n(&w->board->failed, __ATOMIC_ACQUIRE);
    onehop_result result = ONEHOP_OK;
    if (failed) return oh_error(ONEHOP_ERR_PEER_FAILED, "rank %u failed", failed - 1);
    w->begun += oh_wait_pause_ns(&w->looked, now);
    if (now - w->begun > w->limit_ns)
        result = oh_error(ONEHOP_ERR_TIMEOUT, "not all ranks came to a barrier within %u s",
                          (unsigned)(w->limit_ns / 1000000000u));
    if (!result && w->alive && now - w->asked >= ALIVE_NS) {
        w->asked = now;
        result = w->alive(w->user);
    }
    /* A peer that passed the barrier may be gone already. */
    return passed(w) ? ONEHOP_OK : result;
}

static onehop_result wait_for_generation(barrier_wait *w) {
    onehop_result result = ONEHOP_OK;
    for (uint32_t round = 0; !result && !passed(w); round += round < SPINS) {
        const uint64_t now = round < SPINS ? 0 : oh_clock_ns();
        if (now && !w->begun) w->begun = w->looked = w->asked = now;
        relax(now - w->begun, round);
        if (now) result = look(w, now);
    }
    return result;
}

onehop_result board_barrier(perf_board *board, uint32_t parties, uint32_t limit_ms,
                            onehop_result (*alive)(void *), void *user) {
    barrier_wait w = {.board = board,
                      .old = __atomic_load_n(&board->generation, __ATOMIC_RELAXED),
                      .limit_ns = limit_ms * 1000000ull,
                      .alive = alive,
                      .user = user};
    /* Acquire and release: the last arrival has seen every row and hands all of them on. */
    if (__atomic_add_fetch(&board->arrived, 1, __ATOMIC_ACQ_REL) < parties)
        return wait_for_generation(&w);
    __atomic_store_n(&board->arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&board->generation, w.old + 1, __ATOMIC_RELEASE);
    return ONEHOP_OK;
}
