/* Protocol bodies under adverse scheduling: ranks of L lanes (threads) each, over plain memory,
 * with threads held back at random before the stores that peers wait for, between the words of a
 * 16-byte store, before a block begins, and around the host paths' copies and sums.
 *
 * This header compiles the bodies into the test itself, with those hooks in place; the library's
 * own are not used. A rank's lanes meet at a barrier between calls, which stands for the boundary
 * between two kernels; ranks meet nowhere. After each call a rank compares its output with the
 * reference and requires that all words of this call's parity of its slots are armed again: peers
 * write there only after this rank's next call.
 *
 * The first thing found wrong is printed and ends the program. */
#ifndef OH_TEST_LANES_H
#define OH_TEST_LANES_H

#include "harness.h"
#include "reference.h"

/* ---- hooks ----------------------------------------------------------------------------------- */
typedef struct chaos {
    uint64_t state;
    uint32_t mask;    /* a store is held back if these bits of a random number are zero */
    uint32_t left;    /* so many more times in this call */
    uint32_t long_us; /* at most; 0: no chaos at all */
} chaos;

static _Thread_local chaos chaos_here;
static _Thread_local void (*chaos_watch)(void); /* called at each of those places, if set */

static inline void chaos_hold(uint64_t random) {
    if (random >> 63)
        usleep((useconds_t)(random % chaos_here.long_us));
    else
        sched_yield();
}

/* Before each store that another rank can see, and each ordinary one or load of 16 bytes. */
static inline void chaos_store(void) {
    chaos *c = &chaos_here;
    if (chaos_watch) chaos_watch();
    if (!c->left) return;
    c->state ^= c->state << 13, c->state ^= c->state >> 7, c->state ^= c->state << 17;
    if (c->state & c->mask) return;
    c->left--;
    chaos_hold(c->state * 0x9e3779b97f4a7c15ull);
}

/* Before a block, a copy, a sum: one time in four. */
static inline void chaos_step(void) {
    chaos *c = &chaos_here;
    uint64_t random;
    if (!c->long_us) return;
    random = random_next(&c->state);
    if (!c->state) c->state = 1;
    if (!(random & 3)) chaos_hold(random);
}

#define OH_CHAOS() chaos_store()

/* The host paths' loops, with a halt before and in the middle of each. */
#include "device/host/vector.h"

static void chaos_copy(void *to, const void *from, size_t bytes) {
    const size_t half = bytes / 2;
    chaos_step();
    oh_vector_table()->copy(to, from, half);
    chaos_step();
    oh_vector_table()->copy((char *)to + half, (const char *)from + half, bytes - half);
}

static void chaos_reduce(void *out, const void *const *in, int sources, size_t count,
                         onehop_dtype dtype) {
    const size_t half = count / 2, at = half * reference_element_bytes(dtype);
    const void *rest[ONEHOP_MAX_RANKS + 1];
    for (int s = 0; s < sources; s++) rest[s] = (const char *)in[s] + at;
    chaos_step();
    oh_vector_table()->reduce[dtype](out, in, sources, half);
    chaos_step();
    oh_vector_table()->reduce[dtype]((char *)out + at, rest, sources, count - half);
}

static void chaos_fp32(void *out, const void *const *in, int sources, size_t count) {
    chaos_reduce(out, in, sources, count, ONEHOP_FLOAT32);
}
static void chaos_fp16(void *out, const void *const *in, int sources, size_t count) {
    chaos_reduce(out, in, sources, count, ONEHOP_FLOAT16);
}
static void chaos_bf16(void *out, const void *const *in, int sources, size_t count) {
    chaos_reduce(out, in, sources, count, ONEHOP_BFLOAT16);
}

static const oh_vector chaos_vector = {
    "chaos", chaos_copy, {NULL, chaos_fp32, chaos_fp16, chaos_bf16}};
static inline const oh_vector *chaos_vector_table(void) {
    return &chaos_vector;
}

/* ---- the bodies, compiled here --------------------------------------------------------------- */
#include "protocol/fused_args.h"
#include "kernels/prim/prim.h"

/* A lane is a thread here. */
__attribute__((unused)) static _Thread_local _Alignas(64) char lanes_scratch[OH_SCRATCH_BYTES];
#undef OH_SCRATCH
#define OH_SCRATCH(a) ((uintptr_t)lanes_scratch)

/* 1: all units of a chunk are pushed before any is polled, as the host device does. 0: unit by
 * unit, as a GPU does. */
static oh_u32 lanes_push_whole_chunk = 1;
#undef OH_PUSH_WHOLE_CHUNK
#define OH_PUSH_WHOLE_CHUNK lanes_push_whole_chunk

#include "kernels/pull/pull_1shot.h"
#include "kernels/pull/pull_2shot.h"
#include "kernels/multicast/pull_multicast.h"
#include "kernels/push/push_1shot.h"
#include "kernels/push/push_2shot.h"

OH_KERNEL(lanes_push_f32_w2, 0, oh_push_1shot(a, g, OH_F32, 2u))
OH_KERNEL(lanes_push_f32_w3, 0, oh_push_1shot(a, g, OH_F32, 3u))
OH_KERNEL(lanes_push_f32_any, 0, oh_push_1shot(a, g, OH_F32, 0u))
OH_KERNEL(lanes_push_f16_w3, 0, oh_push_1shot(a, g, OH_F16, 3u))
OH_KERNEL(lanes_push_bf16_w2, 0, oh_push_1shot(a, g, OH_BF16, 2u))
OH_KERNEL(lanes_push_bf16_w3, 0, oh_push_1shot(a, g, OH_BF16, 3u))
OH_KERNEL(lanes_push_bf16_w4, 0, oh_push_1shot(a, g, OH_BF16, 4u))
OH_KERNEL(lanes_push_bf16_any, 0, oh_push_1shot(a, g, OH_BF16, 0u))

/* Some fifty bodies, only in a test that asks for them: they take most of its time to compile.
 * LANES_FEW_BODIES, for programs that are compiled often: bfloat16 alone, for two, three and any
 * number of ranks. */
#ifdef LANES_ALL_BODIES
#define LANES_BODY(body, dtype, world)                                                             \
    OH_KERNEL(lanes_##body##_##dtype##_w##world, 0, oh_##body(a, g, OH_##dtype, world##u))
#define LANES_BODIES(body, dtype)                                                                  \
    LANES_BODY(body, dtype, 0)                                                                     \
    LANES_BODY(body, dtype, 2)                                                                     \
    LANES_BODY(body, dtype, 3)                                                                     \
    LANES_BODY(body, dtype, 4)                                                                     \
    LANES_BODY(body, dtype, 7)
#ifdef LANES_FEW_BODIES
#define LANES_FEW(body)                                                                            \
    LANES_BODY(body, BF16, 0)                                                                      \
    LANES_BODY(body, BF16, 2)                                                                      \
    LANES_BODY(body, BF16, 3)
LANES_FEW(pull_1shot)
LANES_FEW(pull_2shot)
LANES_FEW(push_2shot)
#define LANES_TYPES_OF(body)                                                                       \
    {                                                                                              \
        {0}, {0}, {0}, {                                                                           \
            lanes_##body##_BF16_w0, lanes_##body##_BF16_w2, lanes_##body##_BF16_w3,                \
                lanes_##body##_BF16_w0, lanes_##body##_BF16_w0                                     \
        }                                                                                          \
    }
#else
LANES_BODIES(pull_1shot, F32)
LANES_BODIES(pull_1shot, F16)
LANES_BODIES(pull_1shot, BF16)
LANES_BODIES(pull_2shot, F32)
LANES_BODIES(pull_2shot, F16)
LANES_BODIES(pull_2shot, BF16)
LANES_BODIES(push_2shot, F32)
LANES_BODIES(push_2shot, F16)
LANES_BODIES(push_2shot, BF16)

#define LANES_BODIES_OF(body, dtype)                                                               \
    {lanes_##body##_##dtype##_w0, lanes_##body##_##dtype##_w2, lanes_##body##_##dtype##_w3,        \
     lanes_##body##_##dtype##_w4, lanes_##body##_##dtype##_w7}
#define LANES_TYPES_OF(body)                                                                       \
    {{0}, LANES_BODIES_OF(body, F32), LANES_BODIES_OF(body, F16), LANES_BODIES_OF(body, BF16)}
#endif
/* [algorithm - LANES_PULL_1SHOT][type][any, 2, 3, 4, 7 ranks] */
static const oh_host_kernel lanes_bodies[3][4][5] = {
    LANES_TYPES_OF(pull_1shot), LANES_TYPES_OF(pull_2shot), LANES_TYPES_OF(push_2shot)};

#define LANES_MULTICAST_BODY(shots, dtype)                                                         \
    OH_KERNEL(lanes_multicast_##shots##_##dtype, 0, oh_multicast_##shots(a, g, OH_##dtype))
LANES_MULTICAST_BODY(1shot, F32)
LANES_MULTICAST_BODY(1shot, F16)
LANES_MULTICAST_BODY(1shot, BF16)
LANES_MULTICAST_BODY(2shot, F32)
LANES_MULTICAST_BODY(2shot, F16)
LANES_MULTICAST_BODY(2shot, BF16)
/* [algorithm - LANES_MULTICAST_1SHOT][type] */
static const oh_host_kernel lanes_multicast_bodies[2][4] = {
    {0, lanes_multicast_1shot_F32, lanes_multicast_1shot_F16, lanes_multicast_1shot_BF16},
    {0, lanes_multicast_2shot_F32, lanes_multicast_2shot_F16, lanes_multicast_2shot_BF16}};
#else
static const oh_host_kernel lanes_bodies[3][4][5];
static const oh_host_kernel lanes_multicast_bodies[2][4];
#endif

/* The host paths come along in a test that asks for them, with their names: they are whole
 * files. */
#ifdef LANES_HOST_PATHS
#define oh_vector_table chaos_vector_table
#define oh_host_1shot   lanes_host_1shot
#define oh_host_2shot   lanes_host_2shot
#define oh_host_scatter lanes_host_scatter
#define oh_host_gather  lanes_host_gather
#include "kernels/host/host_1shot.c"
#include "kernels/host/host_2shot.c"
#define place_of place_of_gather
#include "kernels/host/host_gather.c"
#undef place_of
#undef oh_host_gather
#undef oh_host_scatter
#undef oh_host_2shot
#undef oh_host_1shot
#undef oh_vector_table
#else
#define lanes_host_1shot ((oh_host_kernel)0)
#define lanes_host_2shot ((oh_host_kernel)0)
#endif

/* Reduce-scatter and all-gather, in a test that asks for them: bodies for two, four and any number
 * of ranks. */
#ifdef LANES_PARTS
#include "kernels/gather/gather_ll.h"
#include "kernels/gather/gather_push.h"
#include "kernels/push/push_scatter.h"
OH_KERNEL(lanes_scatter_f32_w2, 0, oh_push_scatter(a, g, OH_F32, 2u))
OH_KERNEL(lanes_scatter_f32_any, 0, oh_push_scatter(a, g, OH_F32, 0u))
OH_KERNEL(lanes_scatter_bf16_w2, 0, oh_push_scatter(a, g, OH_BF16, 2u))
OH_KERNEL(lanes_scatter_bf16_w4, 0, oh_push_scatter(a, g, OH_BF16, 4u))
OH_KERNEL(lanes_scatter_bf16_any, 0, oh_push_scatter(a, g, OH_BF16, 0u))
OH_KERNEL(lanes_ll_w2, 0, oh_gather_ll(a, g, 2u))
OH_KERNEL(lanes_ll_w4, 0, oh_gather_ll(a, g, 4u))
OH_KERNEL(lanes_ll_any, 0, oh_gather_ll(a, g, 0u))
OH_KERNEL(lanes_gather_push, 0, oh_gather_push(a, g))
/* [algorithm - LANES_SCATTER][float32 or not][any, 2, 4 ranks] */
static const oh_host_kernel lanes_parts_bodies[5][2][3] = {
    {{lanes_scatter_bf16_any, lanes_scatter_bf16_w2, lanes_scatter_bf16_w4},
     {lanes_scatter_f32_any, lanes_scatter_f32_w2, lanes_scatter_f32_any}},
    {{lanes_ll_any, lanes_ll_w2, lanes_ll_w4}},
    {{lanes_gather_push, lanes_gather_push, lanes_gather_push}},
    {{lanes_host_scatter, lanes_host_scatter, lanes_host_scatter},
     {lanes_host_scatter, lanes_host_scatter, lanes_host_scatter}},
    {{lanes_host_gather, lanes_host_gather, lanes_host_gather}}};
#else
static const oh_host_kernel lanes_parts_bodies[5][2][3];
#endif

/* ---- a group --------------------------------------------------------------------------------- */
typedef enum lanes_algorithm {
    LANES_PUSH,
    LANES_HOST_1SHOT,
    LANES_HOST_2SHOT,
    LANES_PULL_1SHOT,
    LANES_PULL_2SHOT,
    LANES_PUSH_2SHOT, /* at least a unit per rank */
    LANES_MULTICAST_1SHOT,
    LANES_MULTICAST_2SHOT,
    LANES_SCATTER, /* from here on `count` is of one rank's part */
    LANES_GATHER_LL,
    LANES_GATHER_PUSH,
    LANES_HOST_SCATTER,
    LANES_HOST_GATHER,
} lanes_algorithm;

static inline bool lanes_is_host_path(lanes_algorithm a) {
    return a == LANES_HOST_1SHOT || a == LANES_HOST_2SHOT || a >= LANES_HOST_SCATTER;
}
static inline bool lanes_is_scatter(lanes_algorithm a) {
    return a == LANES_SCATTER || a == LANES_HOST_SCATTER;
}
/* Moves bytes: the dtype of such a call is 0. */
static inline bool lanes_is_gather(lanes_algorithm a) {
    return a >= LANES_SCATTER && !lanes_is_scatter(a);
}

typedef struct lanes_call {
    lanes_algorithm algorithm;
    onehop_dtype dtype;
    size_t count;
    uint32_t blocks;
    bool in_place;
    input_kind kind;
    int held_rank, held_lane; /* held back much more than the others; -1: none */
    uint32_t hash;            /* 0: made from the fields above */
} lanes_call;

#define LANES_MAX_BYTES 65536
#define LANES_LL_BYTES  2048
#define LANES_MAX_LANES 4

typedef struct lanes_group lanes_group;

typedef struct lanes_rank {
    lanes_group *group;
    int rank;
    void *buffer;
    oh_local *local;
    oh_host_page page;
    guarded in, out;
    unsigned char *expected;
    pthread_barrier_t boundary;
    oh_args args;                 /* of the call at hand */
    oh_registration registration; /* and its registration */
    pthread_t threads[LANES_MAX_LANES];
} lanes_rank;

struct lanes_group {
    int world, lanes;
    const char *what;
    oh_regions regions;
    const lanes_call *calls;
    size_t count;
    uint32_t first_sequence;  /* of the first call */
    uint32_t holds, long_us;  /* per lane and call: stores held back, and for how long at most */
    bool expect_mismatch;     /* of the last call */
    bool expect_registration; /* the last call fails: the last rank's registration is
                                       * another call's */
    bool registrations; /* pull calls have a registration: two in three go by its addresses, one is
                         * staged */
    oh_multicast_buffers multicast;
    lanes_rank ranks[ONEHOP_MAX_RANKS];
};

typedef struct lanes_thread {
    lanes_rank *rank;
    int lane;
} lanes_thread;

static void *lanes_memory(size_t bytes, int byte) {
    void *p = aligned_alloc(4096, oh_round_up(bytes, 4096));
    if (!p) FAIL("no memory");
    memset(p, byte, bytes);
    return p;
}

/* Small regions, so that a few kilobytes are many chunks. */
static void lanes_open(lanes_group *g, int world, int lanes, unsigned deadline_ms) {
    memset(g, 0, sizeof *g);
    g->holds = 4;
    g->long_us = 300;
    g->world = world;
    g->multicast.count = (uint32_t)world;
    g->lanes = lanes;
    oh_regions *p = &g->regions;
    p->slot_bytes = 4096;
    p->pull_bytes = 8192;
    p->max_blocks = 16;
    p->ll = 2 * (oh_u64)world * p->slot_bytes;
    p->ll_bytes = LANES_LL_BYTES;
    p->pull = p->ll + 2 * (oh_u64)world * p->ll_bytes;
    p->signals = p->pull + 2 * p->pull_bytes;
    p->control = p->signals + oh_round_up(p->max_blocks * OH_SIGNAL_BLOCK_BYTES, 4096);
    for (int r = 0; r < world; r++) {
        lanes_rank *own = &g->ranks[r];
        own->group = g;
        own->rank = r;
        own->buffer = lanes_memory(p->control + sizeof(oh_control), 0);
        memset(own->buffer, 0xFF, p->ll);
        g->multicast.buffers[r] = (uintptr_t)own->buffer;
        own->local = lanes_memory(OH_LOCAL_SEQUENCES + 8 * p->max_blocks, 0);
        own->local->deadline_ns = deadline_ms * 1000000ull;
        own->in = guarded_make(LANES_MAX_BYTES);
        own->out = guarded_make(LANES_MAX_BYTES);
        own->expected = lanes_memory(LANES_MAX_BYTES, 0);
        pthread_barrier_init(&own->boundary, NULL, (unsigned)lanes);
    }
}

static void lanes_close(lanes_group *g) {
    for (int r = 0; r < g->world; r++) {
        lanes_rank *own = &g->ranks[r];
        free(own->buffer);
        free(own->local);
        free(own->expected);
        guarded_free(&own->in);
        guarded_free(&own->out);
        pthread_barrier_destroy(&own->boundary);
    }
}

/* As if the call before the first had been number first_sequence - 1. */
static inline void lanes_preset(lanes_group *g, uint32_t first_sequence) {
    g->first_sequence = first_sequence;
    for (int r = 0; r < g->world; r++) {
        oh_u64 *words = (oh_u64 *)((char *)g->ranks[r].local + OH_LOCAL_SEQUENCES);
        for (uint32_t b = 0; b < g->regions.max_blocks; b++) words[b] = first_sequence - 1;
    }
}

static oh_host_kernel lanes_kernel(const lanes_group *g, const lanes_call *c) {
    if (c->algorithm >= LANES_SCATTER)
        return lanes_parts_bodies[c->algorithm - LANES_SCATTER][c->dtype == ONEHOP_FLOAT32]
                                 [g->world == 2   ? 1
                                  : g->world == 4 ? 2
                                                  : 0];
    if (c->algorithm == LANES_HOST_1SHOT) return lanes_host_1shot;
    if (c->algorithm == LANES_HOST_2SHOT) return lanes_host_2shot;
    if (c->algorithm >= LANES_MULTICAST_1SHOT)
        return lanes_multicast_bodies[c->algorithm - LANES_MULTICAST_1SHOT][c->dtype];
    if (c->algorithm >= LANES_PULL_1SHOT) {
        const int at = g->world == 7 ? 4 : g->world <= 4 ? g->world - 1 : 0;
        return lanes_bodies[c->algorithm - LANES_PULL_1SHOT][c->dtype][at];
    }
    if (c->dtype == ONEHOP_FLOAT16) return g->world == 3 ? lanes_push_f16_w3 : NULL;
    if (c->dtype == ONEHOP_FLOAT32)
        return g->world == 2   ? lanes_push_f32_w2
               : g->world == 3 ? lanes_push_f32_w3
                               : lanes_push_f32_any;
    return g->world == 2   ? lanes_push_bf16_w2
           : g->world == 3 ? lanes_push_bf16_w3
           : g->world == 4 ? lanes_push_bf16_w4
                           : lanes_push_bf16_any;
}

static _Thread_local oh_host_kernel lanes_kernel_here;

static void lanes_body(const void *args, oh_grid grid) {
    chaos_step();
    lanes_kernel_here(args, grid);
}

static size_t lanes_chunk(const lanes_group *g, const lanes_call *c, size_t bytes) {
    const size_t padded = oh_round_up(bytes, OH_UNIT_BYTES);
    const size_t box = OH_BOX_BYTES(g->regions.pull_bytes, (size_t)g->world);
    if (c->algorithm == LANES_GATHER_LL) return padded;
    if (c->algorithm == LANES_HOST_1SHOT || c->algorithm == LANES_HOST_SCATTER)
        return padded <= box ? padded : box / 2;
    if (c->algorithm == LANES_HOST_2SHOT) return (size_t)g->world * oh_round_down(box / 2, 128);
    if (c->algorithm == LANES_GATHER_PUSH || c->algorithm == LANES_SCATTER ||
        c->algorithm == LANES_HOST_GATHER) {
        const size_t parts = c->algorithm == LANES_HOST_GATHER ? 1 : (size_t)g->world;
        const size_t room = c->algorithm == LANES_SCATTER ? 2 * g->regions.slot_bytes
                                                          : g->regions.pull_bytes / parts;
        const size_t max = oh_round_down(room / 4, OH_UNIT_BYTES);
        return padded < max ? padded : max;
    }
    if (c->algorithm == LANES_PUSH_2SHOT) {
        const size_t whole = (size_t)g->world * g->regions.slot_bytes / 2;
        return padded <= whole ? padded : whole / 2;
    }
    if (c->algorithm >= LANES_PULL_1SHOT)
        return padded <= g->regions.pull_bytes ? padded : g->regions.pull_bytes / 2;
    return padded <= g->regions.slot_bytes ? padded : g->regions.slot_bytes / 2;
}

/* What does not change from call to call; the library's is in communicator/comm_open.c. */
static void lanes_addresses(lanes_rank *own) {
    const lanes_group *g = own->group;
    const oh_u64 slot = g->regions.slot_bytes;
    oh_args *a = &own->args;
    for (int r = 0; r < g->world; r++) a->buffers[r] = (uintptr_t)g->ranks[r].buffer;
    a->local = (uintptr_t)own->local;
    a->host = (uintptr_t)&own->page;
    a->regions = g->regions;
    a->multicast = (uintptr_t)&g->multicast;
    a->parity_bytes = slot * (oh_u64)g->world;
    for (int k = 0; k + 1 < g->world; k++) {
        const int next = (own->rank + 1 + k) % g->world, source = k + (k >= own->rank);
        a->peers[k].there = a->buffers[next] + slot * (oh_u64)own->rank;
        a->peers[k].from = a->buffers[own->rank] + slot * (oh_u64)source;
    }
    a->rank = (oh_u32)own->rank;
    a->world = (oh_u32)g->world;
}

/* The registration of the call at hand. Data lies at one place in all ranks' buffers. */
static void lanes_fill_registration(lanes_rank *own, bool direct, bool in_place) {
    const lanes_group *g = own->group;
    const ptrdiff_t at = own->out.data - own->out.memory;
    memset(&own->registration, 0, sizeof own->registration);
    own->registration.tag = own->args.tag;
    if (g->expect_registration && own->rank == g->world - 1 && own->args.tag == g->count)
        own->registration.tag++;
    own->registration.mode = direct ? OH_REGISTRATION_DIRECT : OH_REGISTRATION_STAGED;
    own->registration.identity = OH_REGISTRATION_IDENTITY(own->args.tag);
    for (int r = 0; r < g->world && direct; r++) {
        own->registration.out[r] = (uintptr_t)(g->ranks[r].out.memory + at);
        own->registration.in[r] =
            in_place ? own->registration.out[r] : (oh_u64)(uintptr_t)(g->ranks[r].in.memory + at);
    }
}

/* Byte `i` of a rank's part of an all-gather: runs of bits that look like sentinels, zeros,
 * anything. */
static inline unsigned char lanes_byte(size_t seed, int rank, size_t i) {
    uint64_t random = seed * 1000003u + (uint64_t)rank * 8191u + i / 24;
    const uint64_t lot = random_next(&random);
    if (lot % 4 == 0) return 0xFF;
    return lot % 4 == 1 ? 0 : (unsigned char)(lot >> i % 24);
}

/* Places and fills the buffers of a call in which ranks have parts. */
static void lanes_prepare_parts(lanes_rank *own, size_t index, size_t bytes, size_t off) {
    const lanes_call *c = &own->group->calls[index];
    const size_t all = bytes * (size_t)own->group->world, mine = bytes * (size_t)own->rank;
    const bool scatter = lanes_is_scatter(c->algorithm);
    oh_args *a = &own->args;
    unsigned char *in, *out = guarded_place(&own->out, scatter && !c->in_place ? bytes : all, off);
    if (c->in_place)
        in = scatter ? out : out + mine;
    else
        in = guarded_place(&own->in, scatter ? all : bytes, off);
    if (scatter)
        input_fill(in, c->kind, index + 1, own->rank, 0, c->count * (size_t)own->group->world,
                   c->dtype);
    else
        for (size_t i = 0; i < bytes; i++) in[i] = lanes_byte(index + 1, own->rank, i);
    a->in = (uintptr_t)in;
    a->out = (uintptr_t)(scatter && c->in_place ? out + mine : out);
}

/* What is expected of such a call, of all that lies in the output's buffer. */
static void lanes_verify_parts(lanes_rank *own, size_t index, const char *what) {
    const lanes_call *c = &own->group->calls[index];
    const size_t size = reference_element_bytes(c->dtype), world = (size_t)own->group->world;
    if (lanes_is_scatter(c->algorithm)) {
        const size_t first = c->count * (size_t)own->rank;
        unsigned char *out = (unsigned char *)(uintptr_t)own->args.out;
        if (c->in_place) {
            input_fill(own->expected, c->kind, index + 1, own->rank, 0, c->count * world, c->dtype);
            reference_of_inputs(own->expected + first * size, c->kind, index + 1, (int)world, first,
                                c->count, c->dtype);
            expect_equal(own->expected, out - first * size, c->count * world, c->dtype, what);
            return;
        }
        reference_of_inputs(own->expected, c->kind, index + 1, (int)world, first, c->count,
                            c->dtype);
        expect_equal(own->expected, out, c->count, c->dtype, what);
        return;
    }
    const unsigned char *out = (const unsigned char *)(uintptr_t)own->args.out;
    for (size_t i = 0; i < world * c->count; i++) {
        const unsigned char byte = lanes_byte(index + 1, (int)(i / c->count), i % c->count);
        if (out[i] != byte)
            FAIL("%s: byte %zu of part %zu: expected 0x%02x, found 0x%02x", what, i % c->count,
                 i / c->count, byte, out[i]);
    }
}

/* Lane 0, before the others start. The input is overwritten here, which the call before must have
 * made sure nobody reads any more; and the output. */
static void lanes_prepare(lanes_rank *own, size_t index) {
    lanes_group *g = own->group;
    const lanes_call *c = &g->calls[index];
    const bool registration =
        g->registrations && (c->algorithm == LANES_PULL_1SHOT || c->algorithm == LANES_PULL_2SHOT);
    const bool direct = registration && index % 3;
    const bool in_place = c->in_place && !(direct && c->algorithm == LANES_PULL_1SHOT);
    const size_t size = lanes_is_gather(c->algorithm) ? 1 : reference_element_bytes(c->dtype);
    const size_t bytes = c->count * size;
    const size_t off = (index * 3 + (size_t)own->rank) % (16 / size) * size * (index % 3 == 0);
    const oh_u64 step = c->algorithm >= LANES_SCATTER ? bytes : 0;
    oh_args *a = &own->args;
    guarded_place(&own->in, 0, 0);
    memset(a, 0, sizeof *a);
    if (step) {
        lanes_prepare_parts(own, index, bytes, off);
    } else {
        void *in = guarded_place(in_place ? &own->out : &own->in, bytes, off);
        input_fill(in, c->kind, index + 1, own->rank, 0, c->count, c->dtype);
        a->in = (uintptr_t)in;
        a->out = in_place ? a->in : (uintptr_t)guarded_place(&own->out, bytes, off);
    }
    if (registration) {
        a->registration = (uintptr_t)&own->registration;
        a->tag = (oh_u32)index + 1;
        lanes_fill_registration(own, direct, in_place);
    }
    a->count = c->count;
    lanes_addresses(own);
    a->chunk_bytes = lanes_chunk(g, c, bytes);
    a->chunks = (oh_u32)((bytes + a->chunk_bytes - 1) / a->chunk_bytes);
    const size_t piece = bytes < a->chunk_bytes ? bytes : a->chunk_bytes;
    a->units = (oh_u32)((piece + OH_UNIT_BYTES - 1) / OH_UNIT_BYTES);
    a->whole = (a->in | a->out | step) % OH_UNIT_BYTES ? 0 : (oh_u32)(piece / OH_UNIT_BYTES);
    a->dtype = (oh_u32)c->dtype;
    a->hash = c->hash
                  ? c->hash
                  : (oh_u32)(c->count * 2654435761u + c->blocks * 97u + (oh_u32)c->algorithm + 1u);
    if (g->expect_mismatch && index + 1 == g->count && own->rank == g->world - 1)
        a->hash ^= 0x10000u;
}

static void lanes_expect_armed(const lanes_rank *own, uint32_t parity, size_t index) {
    const oh_regions *p = &own->group->regions;
    const size_t words = (size_t)own->group->world * p->slot_bytes / 4;
    oh_u32 *word = (oh_u32 *)((char *)own->buffer + p->push + parity * words * 4);
    for (size_t i = 0; i < words; i++)
        if (__atomic_load_n(&word[i], __ATOMIC_RELAXED) != OH_SENTINEL)
            FAIL("%s: call %zu, rank %d: word %zu of phase %u is not armed after the call",
                 own->group->what, index, own->rank, i, parity);
}

/* What a test whose bodies do more than add makes of the sums. */
#ifndef LANES_EXPECT
#define LANES_EXPECT(sums, call) (void)(sums)
#endif

/* Lane 0, after all have ended. */
static void lanes_verify(lanes_rank *own, size_t index) {
    lanes_group *g = own->group;
    const lanes_call *c = &g->calls[index];
    const oh_u64 word = *(oh_u64 *)((char *)own->local + OH_LOCAL_SEQUENCES);
    char what[160];
    snprintf(what, sizeof what, "%s: call %zu, rank %d, %u blocks", g->what, index, own->rank,
             c->blocks);
    const oh_u32 kind = __atomic_load_n(&own->page.record.kind, __ATOMIC_ACQUIRE) & 0xffu;
    if (g->expect_mismatch && index + 1 == g->count) {
        if (kind != OH_FAIL_MISMATCH || own->page.record.peer != g->world - 1)
            FAIL("%s: expected a mismatch of rank %d, found kind %u, peer %d", what, g->world - 1,
                 kind, own->page.record.peer);
        return;
    }
    if (g->expect_registration && index + 1 == g->count) {
        if (kind != OH_FAIL_REGISTRATION || own->page.record.peer != g->world - 1)
            FAIL("%s: expected a wrong registration of rank %d, found kind %u, peer %d", what,
                 g->world - 1, kind, own->page.record.peer);
        return;
    }
    if (kind || word >> 32)
        FAIL("%s: the call failed: kind %u, site %u, peer %d, sequence number %u", what, kind,
             own->page.record.site, own->page.record.peer, own->page.record.sequence);
    if (c->algorithm >= LANES_SCATTER) {
        lanes_verify_parts(own, index, what);
    } else {
        reference_of_inputs(own->expected, c->kind, index + 1, g->world, 0, c->count, c->dtype);
        LANES_EXPECT(own->expected, c);
        expect_equal(own->expected, (void *)(uintptr_t)own->args.out, c->count, c->dtype, what);
    }
    guarded_check(&own->out, what);
    lanes_expect_armed(own, (oh_u32)word & 1u, index);
}

/* Holds are spread over the stores of the call; a lane that is held back has many more. */
static void lanes_set_chaos(const lanes_group *g, const lanes_call *c, bool held) {
    const size_t words = (c->count * reference_element_bytes(c->dtype) + 15) / 4;
    const size_t stores = lanes_is_host_path(c->algorithm) ? 4
                          : c->algorithm == LANES_PUSH
                              ? 2 * words * (size_t)(g->world - 1) / (size_t)g->lanes
                          : lanes_is_gather(c->algorithm)
                              ? (c->count + 15) / 16 * (size_t)(g->world + 1) / (size_t)g->lanes
                              : words / 4 * (size_t)(g->world + 3) / (size_t)g->lanes;
    chaos_here.left = held ? 6 * g->holds : g->holds;
    chaos_here.mask = 0;
    while (2 * (size_t)(chaos_here.mask + 1) * chaos_here.left <= stores)
        chaos_here.mask = 2 * chaos_here.mask + 1;
    chaos_here.long_us = g->long_us;
}

static void *lanes_main(void *argument) {
    const lanes_thread t = *(lanes_thread *)argument;
    lanes_rank *own = t.rank;
    lanes_group *g = own->group;
    chaos_here.state = (uint64_t)(own->rank * 16 + t.lane + 1) * 0x2545f4914f6cdd1dull;
    for (size_t i = 0; i < g->count; i++) {
        const lanes_call *c = &g->calls[i];
        const bool host_path = lanes_is_host_path(c->algorithm);
        const bool held = c->held_rank == own->rank && c->held_lane == t.lane;
        if (t.lane == 0) lanes_prepare(own, i);
        pthread_barrier_wait(&own->boundary);
        lanes_kernel_here = lanes_kernel(g, c);
        lanes_set_chaos(g, c, held);
        if (!host_path || t.lane == 0)
            oh_host_run_worker(lanes_body, &own->args, host_path ? 1 : c->blocks, (uint32_t)t.lane,
                               host_path ? 1 : (uint32_t)g->lanes);
        chaos_here.left = chaos_here.long_us = 0;
        pthread_barrier_wait(&own->boundary);
        if (t.lane == 0) lanes_verify(own, i);
    }
    return NULL;
}

/* Runs the calls on all ranks and requires that everything is armed at the end. */
static inline void lanes_run(lanes_group *g, const char *what, const lanes_call *calls,
                             size_t count) {
    lanes_thread starts[ONEHOP_MAX_RANKS][LANES_MAX_LANES];
    g->what = what;
    g->calls = calls;
    g->count = count;
    for (int r = 0; r < g->world; r++)
        for (int lane = 0; lane < g->lanes; lane++) {
            starts[r][lane] = (lanes_thread){&g->ranks[r], lane};
            if (pthread_create(&g->ranks[r].threads[lane], NULL, lanes_main, &starts[r][lane]))
                FAIL("pthread_create failed");
        }
    for (int r = 0; r < g->world; r++)
        for (int lane = 0; lane < g->lanes; lane++) pthread_join(g->ranks[r].threads[lane], NULL);
    if (!g->expect_mismatch && !g->expect_registration)
        for (int r = 0; r < g->world; r++)
            for (uint32_t parity = 0; parity < 2; parity++)
                lanes_expect_armed(&g->ranks[r], parity, count);
}

#endif
