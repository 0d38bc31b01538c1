/* See residency.h. One list for the process; each entry is a communicator on a GPU. */
#include "communicator/residency.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define FEWEST 2 /* blocks of a grid: the signature's and one more */
#define MAX    1024

struct oh_residency {
    oh_residency *next;
    oh_claim claim; /* blocks: those held */
    uint32_t users; /* ranks that share it */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static oh_residency *all;

bool oh_residency_fits(const oh_grids *there, uint32_t multiprocessors, uint32_t ranks,
                       uint32_t blocks) {
    const uint32_t largest = blocks > there->largest ? blocks : there->largest;
    return there->blocks + (uint64_t)ranks * blocks - largest < multiprocessors;
}

static uint32_t between(uint64_t low, uint64_t value, uint64_t high) {
    return (uint32_t)(value < low ? low : value > high ? high : value);
}

uint32_t oh_residency_share(const oh_grids *there, uint32_t multiprocessors, uint32_t ranks) {
    const uint32_t whole = between(FEWEST, multiprocessors / ranks, MAX);
    const uint64_t taken = there->blocks - there->largest + 1;
    const uint64_t room = multiprocessors > taken ? multiprocessors - taken : 0;
    const uint32_t half = between(FEWEST, room / 2 / ranks, whole);
    if (oh_residency_fits(there, multiprocessors, ranks, whole)) return whole;
    return oh_residency_fits(there, multiprocessors, ranks, half) ? half : 0;
}

/* Of the communicators on a GPU. */
static oh_grids add_up(int gpu, uint32_t *communicators_out) {
    oh_grids grids = {0, 0};
    *communicators_out = 0;
    for (const oh_residency *r = all; r; r = r->next) {
        if (r->claim.gpu != gpu) continue;
        grids.blocks += (uint64_t)r->claim.ranks * r->claim.blocks;
        if (r->claim.blocks > grids.largest) grids.largest = r->claim.blocks;
        ++*communicators_out;
    }
    return grids;
}

static onehop_result refuse(const oh_claim *c, const oh_grids *there, uint32_t communicators) {
    char wanted[24];
    snprintf(wanted, sizeof wanted, "%u", c->blocks);
    return oh_error(
        c->blocks ? ONEHOP_ERR_ARGUMENT : ONEHOP_ERR_UNSUPPORTED,
        "GPU %d: no room for grids of %s blocks of %u rank%s. %u other communicators of this "
        "process "
        "have grids of %llu blocks there, and all grids but the largest (now of %u) must together "
        "have fewer than its %u multiprocessors. Lower max_blocks in their configs, or give those "
        "whose calls never run beside others' ONEHOP_FLAG_ORDERED",
        c->gpu, c->blocks ? wanted : "2 or more", c->ranks, c->ranks == 1 ? "" : "s", communicators,
        (unsigned long long)there->blocks, there->largest, c->multiprocessors);
}

static oh_residency *find(const oh_claim *c) {
    oh_residency *r = c->communicator ? all : NULL;
    while (r && (r->claim.communicator != c->communicator || r->claim.gpu != c->gpu)) r = r->next;
    return r;
}

static onehop_result add(const oh_claim *c, oh_residency **out) {
    uint32_t communicators;
    const oh_grids there = add_up(c->gpu, &communicators);
    const uint32_t blocks =
        c->blocks ? c->blocks : oh_residency_share(&there, c->multiprocessors, c->ranks);
    if (!blocks || !oh_residency_fits(&there, c->multiprocessors, c->ranks, blocks))
        return refuse(c, &there, communicators);
    oh_residency *r = calloc(1, sizeof *r);
    if (!r) return oh_error(ONEHOP_ERR_MEMORY, "communicator: no memory");
    r->claim = *c;
    r->claim.blocks = blocks;
    r->next = all;
    all = r;
    *out = r;
    return ONEHOP_OK;
}

onehop_result oh_residency_claim(const oh_claim *claim, oh_residency **out) {
    pthread_mutex_lock(&lock);
    oh_residency *r = find(claim);
    onehop_result result = r ? ONEHOP_OK : add(claim, &r);
    if (!result) r->users++;
    pthread_mutex_unlock(&lock);
    if (!result) *out = r;
    return result;
}

uint32_t oh_residency_blocks(const oh_residency *r) {
    pthread_mutex_lock(&lock);
    const uint32_t blocks = r->claim.blocks;
    pthread_mutex_unlock(&lock);
    return blocks;
}

void oh_residency_shrink(oh_residency *r, uint32_t blocks) {
    pthread_mutex_lock(&lock);
    if (blocks < r->claim.blocks) r->claim.blocks = blocks;
    pthread_mutex_unlock(&lock);
}

void oh_residency_release(oh_residency *r) {
    if (!r) return;
    pthread_mutex_lock(&lock);
    oh_residency **at = &all;
    while (*at != r) at = &(*at)->next;
    const bool last = --r->users == 0;
    if (last) *at = r->next;
    pthread_mutex_unlock(&lock);
    if (last) free(r);
}
