/* See build.h. */
#include "context/build.h"

#include "base/wait.h"
#include "jit/function.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BUILDERS 8 /* threads at most; each needs some 100 MB while it compiles */

/* ---- all of a rank --------------------------------------------------------------------------- */

/* What several threads build together, since a compiler takes half a second for a kernel. */
typedef struct work {
    oh_device *device;
    oh_build *build;
    uint32_t cross, share, shares;
    atomic_size_t taken, ended; /* kernels begun, builders at their end */
    atomic_bool stop;
    pthread_mutex_t lock; /* guards the two below */
    onehop_result result; /* the first failure, with its sentence */
    char sentence[512];
} work;

static void work_failed(work *w, onehop_result result) {
    pthread_mutex_lock(&w->lock);
    if (!w->result) {
        w->result = result;
        snprintf(w->sentence, sizeof w->sentence, "%s", onehop_last_error());
    }
    pthread_mutex_unlock(&w->lock);
}

static void *run_builder(void *argument) {
    work *w = argument;
    oh_build *b = w->build;
    onehop_result result = ONEHOP_OK;
    while (!result && !atomic_load(&w->stop)) {
        const size_t i = w->share + w->shares * atomic_fetch_add(&w->taken, 1);
        if (i >= b->count) break;
        if (b->functions[i].handle) continue;
        result = oh_jit_kernel(w->device, w->cross, b->kernels[i], b->op, &b->functions[i]);
    }
    if (result) work_failed(w, result);
    atomic_fetch_add(&w->ended, 1);
    return NULL;
}

/* A compiler cannot be stopped: once the hook ends the wait no further kernel is begun. */
static void await_builders(work *w, size_t started) {
    for (const uint64_t begun = oh_clock_ns(); atomic_load(&w->ended) < started;) {
        oh_sleep_us(oh_wait_rest_us(oh_clock_ns() - begun));
        if (!oh_wait_interrupted()) continue;
        atomic_store(&w->stop, true);
        work_failed(w, oh_wait_ended("building kernels"));
    }
}

/* ONEHOP_JIT_ARCH; 0: not set. */
static onehop_result cross_target(uint32_t *arch_out) {
    int64_t arch = 0;
    onehop_result result = oh_env_integer(OH_ENV_JIT_ARCH, 80, 999, 0, &arch);
    if (!result) *arch_out = (uint32_t)arch;
    return result;
}

/* Every `shares`-th kernel, beginning with number `share`, that is not there yet. The caller is one
 * of the builders: without a second thread it takes longer, no more. Where it has a wait hook it
 * waits for the builders instead. */
static onehop_result build_share(onehop_context *ctx, oh_build *b, uint32_t share,
                                 uint32_t shares) {
    pthread_t threads[BUILDERS];
    const size_t callers = !oh_wait_has_hook();
    size_t left = 0, started = 0;
    work w = {.device = ctx->device, .build = b, .share = share, .shares = shares};
    pthread_mutex_init(&w.lock, NULL);
    if (ctx->info.device.kind == ONEHOP_DEVICE_HOST) {
        const onehop_result result = cross_target(&w.cross);
        if (result || !w.cross) return result;
    }
    for (size_t i = share; i < b->count; i += shares) left += !b->functions[i].handle;
    while (started + callers < BUILDERS && started + callers < left &&
           !pthread_create(&threads[started], NULL, run_builder, &w))
        started++;
    if (callers || !started)
        run_builder(&w);
    else
        await_builders(&w, started);
    for (size_t t = 0; t < started; t++) pthread_join(threads[t], NULL);
    return w.result ? oh_error(w.result, "%s", w.sentence) : ONEHOP_OK;
}

/* ---- all ranks ------------------------------------------------------------------------------- */

typedef struct request {
    uint64_t identity;
    uint32_t capability, unused;
} request;

typedef struct building {
    const oh_members *members;
    const char *what;
    oh_build *builds; /* of the ranks here */
    request all[ONEHOP_MAX_RANKS];
} building;

static oh_build *build_of(const building *b, const onehop_context *ctx) {
    return &b->builds[ctx->rank - b->members->first];
}

static onehop_result check_context(onehop_context *ctx, void *state) {
    building *b = state;
    if (ctx->capturing)
        return oh_error(ONEHOP_ERR_STATE, "%s: not between onehop_capture_begin and _end", b->what);
    b->all[ctx->rank] = (request){build_of(b, ctx)->identity, ctx->info.capability, 0};
    return oh_comm_check(ctx->comm);
}

static onehop_result compare(const building *b) {
    for (int r = 1; r < b->members->world; r++)
        if (b->all[r].identity != b->all[0].identity)
            return oh_error(ONEHOP_ERR_DISAGREEMENT,
                            "%s: the config of rank %d differs from that of rank 0", b->what, r);
    return ONEHOP_OK;
}

/* The part of this rank among those that want the same. */
static onehop_result build_first(onehop_context *ctx, void *state) {
    const building *b = state;
    uint32_t share = 0, shares = 0;
    for (int r = 0; r < ctx->world; r++) {
        if (b->all[r].capability != ctx->info.capability) continue;
        if (r < ctx->rank) share++;
        shares++;
    }
    return build_share(ctx, build_of(b, ctx), share, shares);
}

static onehop_result build_rest(onehop_context *ctx, void *state) {
    oh_build *b = build_of(state, ctx);
    onehop_result result = build_share(ctx, b, 0, 1);
    for (size_t i = 0; i < b->count && !result && b->functions[i].handle; i++)
        result =
            oh_comm_check_fit(ctx->comm, b->kernels[i], &b->functions[i], ctx->ranks_per_device);
    return result;
}

onehop_result oh_build_run(const oh_members *m, const char *what, oh_build *builds,
                           onehop_result mine) {
    building b = {.members = m, .what = what, .builds = builds};
    if (!m->group && m->count < m->world)
        return oh_error(
            ONEHOP_ERR_STATE,
            "%s: this context was made by onehop_create_all; all ranks are served by %s_all", what,
            what);
    if (!mine) mine = oh_members_run(m, check_context, &b);
    onehop_result result = oh_members_agree(m, mine);
    if (!result) result = oh_members_share(m, b.all, sizeof b.all[0]);
    if (!result) result = compare(&b);
    /* One thread would build the parts one after another, and no faster. */
    if (!result && m->group) result = oh_members_each(m, build_first, &b);
    return result ? result : oh_members_each(m, build_rest, &b);
}
