/* Host half of prim.h: the same vocabulary in __atomic builtins. A block has one thread here; a
 * rank runs its blocks on one or more lanes (operating-system threads), see oh_host_run_worker. */
#ifndef OH_PRIM_HOST_H
#define OH_PRIM_HOST_H

#include "base/wait.h"
#include "device/device.h"

#include <sched.h>
#include <string.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#define OH_FN      static inline __attribute__((always_inline, unused))
#define OH_SLOW_FN static __attribute__((noinline, unused))
#define OH_UNROLL
#define OH_NO_UNROLL

#define OH_UNLIKELY(condition) __builtin_expect(!!(condition), 0)
#define OH_LIKELY(condition)   __builtin_expect(!!(condition), 1)

/* After this many polls a wait yields the core: tests run 16 ranks on two cores. */
#define OH_POLLS 64

#define OH_PEERS(k, g, world) for ((k) = (g).thread + 1; (k) < (world); (k) += (g).threads)

/* How long ranks that give up wait for each other's failure rows: a rank may have to wait for a
 * core first. */
#define OH_WAITS_TOLD_NS 50000000ull

/* Lanes are few: all units of a chunk are pushed before any is polled, else each unit costs a round
 * trip. */
#define OH_PUSH_WHOLE_CHUNK 1

/* Whose control page holds the word that `from` writes for `to`: the writer's. Caches make one
 * store and W-1 reads cheaper than W-1 stores. */
#define OH_SIGNATURE_HOME(from, to) ((void)(to), (from))

/* A GPU orders the kernels of a stream; the credit rule of the bodies rests on it. Here a fence on
 * either side does: what earlier calls read and re-armed comes before what this call tells its
 * peers, and what this call heard from them before what later calls write. (Free on x86; the host
 * paths have release and acquire of their own.) */
#define OH_KERNEL_OF(type, name, bound, statement)                                                 \
    void name(const void *args, oh_grid g);                                                        \
    void name(const void *args, oh_grid g) {                                                       \
        const type *a = (const type *)args;                                                        \
        oh_fence_acq_rel_sys();                                                                    \
        statement;                                                                                 \
        oh_fence_acq_rel_sys();                                                                    \
    }
#define OH_KERNEL(name, bound, statement) OH_KERNEL_OF(oh_args, name, bound, statement)

#define OH_MULTICAST_KERNEL(name, bound, statement) OH_KERNEL(name, bound, statement)

#define OH_AT(type, p) ((type *)(uintptr_t)(p))

/* Tests hold a thread back, or tear a 16-byte store, here; empty otherwise. */
#ifndef OH_CHAOS
#define OH_CHAOS() ((void)0)
#endif

/* ---- ordinary accesses: inputs, outputs, staged data; any alignment -------------------------- */
OH_FN oh_unit oh_ld_unit(oh_u64 p) {
    oh_unit v;
    OH_CHAOS();
    memcpy(&v, OH_AT(const void, p), sizeof v);
    return v;
}
OH_FN void oh_st_unit(oh_u64 p, oh_unit v) {
    OH_CHAOS();
    memcpy(OH_AT(void, p), &v, sizeof v);
}
OH_FN oh_u8 oh_ld_u8(oh_u64 p) {
    return *OH_AT(const oh_u8, p);
}
OH_FN void oh_st_u8(oh_u64 p, oh_u8 v) {
    *OH_AT(oh_u8, p) = v;
}
OH_FN oh_u16 oh_ld_u16(oh_u64 p) {
    oh_u16 v;
    memcpy(&v, OH_AT(const void, p), sizeof v);
    return v;
}
OH_FN void oh_st_u16(oh_u64 p, oh_u16 v) {
    memcpy(OH_AT(void, p), &v, sizeof v);
}
OH_FN oh_u32 oh_ld_u32(oh_u64 p) {
    oh_u32 v;
    memcpy(&v, OH_AT(const void, p), sizeof v);
    return v;
}
OH_FN void oh_st_u32(oh_u64 p, oh_u32 v) {
    memcpy(OH_AT(void, p), &v, sizeof v);
}
OH_FN oh_u64 oh_ld_u64(oh_u64 p) {
    oh_u64 v;
    memcpy(&v, OH_AT(const void, p), sizeof v);
    return v;
}
OH_FN void oh_st_u64(oh_u64 p, oh_u64 v) {
    memcpy(OH_AT(void, p), &v, sizeof v);
}

/* ---- ordered accesses: slots, signatures, control -------------------------------------------- */
OH_FN oh_u32 oh_ld_relaxed_sys_u32(oh_u64 p) {
    return __atomic_load_n(OH_AT(oh_u32, p), __ATOMIC_RELAXED);
}
OH_FN void oh_st_relaxed_sys_u32(oh_u64 p, oh_u32 v) {
    OH_CHAOS();
    __atomic_store_n(OH_AT(oh_u32, p), v, __ATOMIC_RELAXED);
}
OH_FN oh_unit oh_ld_relaxed_sys_unit(oh_u64 p) {
    oh_unit v;
    for (int i = 0; i < 4; i++) v.w[i] = oh_ld_relaxed_sys_u32(p + 4u * (oh_u32)i);
    return v;
}
OH_FN void oh_st_relaxed_sys_unit(oh_u64 p, oh_unit v) {
    for (int i = 0; i < 4; i++) oh_st_relaxed_sys_u32(p + 4u * (oh_u32)i, v.w[i]);
}
OH_FN oh_u64 oh_ld_relaxed_sys_u64(oh_u64 p) {
    return __atomic_load_n(OH_AT(oh_u64, p), __ATOMIC_RELAXED);
}
OH_FN void oh_st_relaxed_sys_u64(oh_u64 p, oh_u64 v) {
    OH_CHAOS();
    __atomic_store_n(OH_AT(oh_u64, p), v, __ATOMIC_RELAXED);
}
OH_FN oh_pair oh_ld_relaxed_sys_pair(oh_u64 p) {
    oh_pair v;
    for (int i = 0; i < 2; i++) v.w[i] = oh_ld_relaxed_sys_u64(p + 8u * (oh_u32)i);
    return v;
}
OH_FN void oh_st_relaxed_sys_pair(oh_u64 p, oh_pair v) {
    for (int i = 0; i < 2; i++) oh_st_relaxed_sys_u64(p + 8u * (oh_u32)i, v.w[i]);
}
OH_FN oh_u64 oh_ld_acquire_sys_u64(oh_u64 p) {
    return __atomic_load_n(OH_AT(oh_u64, p), __ATOMIC_ACQUIRE);
}
OH_FN void oh_st_release_sys_u64(oh_u64 p, oh_u64 v) {
    OH_CHAOS();
    __atomic_store_n(OH_AT(oh_u64, p), v, __ATOMIC_RELEASE);
}
OH_FN void oh_st_release_sys_u32(oh_u64 p, oh_u32 v) {
    __atomic_store_n(OH_AT(oh_u32, p), v, __ATOMIC_RELEASE);
}
OH_FN oh_u32 oh_cas_relaxed_gpu_u32(oh_u64 p, oh_u32 expected, oh_u32 desired) {
    __atomic_compare_exchange_n(OH_AT(oh_u32, p), &expected, desired, 0, __ATOMIC_RELAXED,
                                __ATOMIC_RELAXED);
    return expected;
}
OH_FN oh_u32 oh_exchange_relaxed_gpu_u32(oh_u64 p, oh_u32 v) {
    return __atomic_exchange_n(OH_AT(oh_u32, p), v, __ATOMIC_RELAXED);
}
OH_FN oh_u32 oh_exchange_acquire_gpu_u32(oh_u64 p, oh_u32 v) {
    return __atomic_exchange_n(OH_AT(oh_u32, p), v, __ATOMIC_ACQUIRE);
}
OH_FN oh_u32 oh_ld_relaxed_gpu_u32(oh_u64 p) {
    return oh_ld_relaxed_sys_u32(p);
}
OH_FN void oh_st_relaxed_gpu_u32(oh_u64 p, oh_u32 v) {
    __atomic_store_n(OH_AT(oh_u32, p), v, __ATOMIC_RELAXED);
}
OH_FN oh_u64 oh_ld_relaxed_gpu_u64(oh_u64 p) {
    return oh_ld_relaxed_sys_u64(p);
}
/* ThreadSanitizer does not understand stand-alone fences (gcc refuses them): there the fence is a
 * read-modify-write of a dummy word, which orders no less on any machine it runs on. */
OH_FN void oh_fence_acq_rel_sys(void) {
#if defined(__SANITIZE_THREAD__)
    static oh_u32 dummy;
    __atomic_fetch_add(&dummy, 1, __ATOMIC_ACQ_REL);
#else
    __atomic_thread_fence(__ATOMIC_ACQ_REL);
#endif
}

/* For what a GPU orders by the boundary between two kernels. */
OH_FN void oh_boundary_fence(void) {
    oh_fence_acq_rel_sys();
}
/* 2shot_pull looks whether a peer has given up before it stores a unit to it. */
#define OH_LOOKS_BEFORE_STORES 1

/* ---- group, time, launch chain --------------------------------------------------------------- */
OH_FN void oh_block_sync(void) {
}
OH_FN oh_u32 oh_block_any(oh_u32 v) {
    return v;
}
OH_FN oh_u64 oh_ld_host_u64(oh_u64 p) {
    return oh_ld_relaxed_gpu_u64(p);
}
OH_FN void oh_prefetch(oh_u64 p) {
    (void)p;
}
OH_FN void oh_prefetch_share(oh_u64 at, oh_u64 bytes, oh_grid g) {
    (void)at, (void)bytes, (void)g;
}
OH_FN void oh_pdl_wait(void) {
}
OH_FN void oh_pdl_trigger(void) {
}
OH_FN oh_u64 oh_now_ns(void) {
    return oh_clock_ns();
}
OH_FN void oh_rest(void) {
    oh_sleep_us(100);
}
/* Gives the core away: by a yield at first, since most waits are short; then by sleeping, since a
 * yield keeps the core busy and gives nothing to a thread of lower priority. `poll`, if set, is an
 * oh_host_poll that returns the lowest rank whose process is gone (plus OH_GONE_FOR_LONG, if so),
 * or -1. */
#define OH_YIELD_NS 1000000ull
typedef int (*oh_host_poll)(void *argument);
OH_FN oh_i32 oh_host_wait(oh_u64 poll, oh_u64 argument, oh_u64 waited_ns) {
    if (waited_ns < OH_YIELD_NS)
        sched_yield();
    else
        oh_sleep_us(oh_wait_rest_us(waited_ns));
    return poll ? ((oh_host_poll)(uintptr_t)poll)(OH_AT(void, argument)) : -1;
}

/* ---- numbers: the GPU's results bit for bit -------------------------------------------------- */
OH_FN float oh_f32_of_bits(oh_u32 v) {
    float f;
    memcpy(&f, &v, sizeof f);
    return f;
}
OH_FN oh_u32 oh_bits_of_f32(float f) {
    oh_u32 v;
    memcpy(&v, &f, sizeof v);
    return v;
}
OH_FN float oh_f32_of_f16(oh_u32 bits) {
    const oh_u32 sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
    if (magnitude >= 0x7c00u)
        return oh_f32_of_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    /* 2^112 moves the exponent's bias from 15 to 127 and makes subnormals normal, exactly. */
    const float f = oh_f32_of_bits(magnitude << 13) * 0x1p112f;
    return oh_f32_of_bits(sign | oh_bits_of_f32(f));
}
OH_FN oh_u32 oh_bf16_of_f32(float f) {
    const oh_u32 v = oh_bits_of_f32(f);
    if (f != f) return 0x7fffu;
    return (v + 0x7fffu + (v >> 16 & 1u)) >> 16;
}
OH_FN oh_u32 oh_f16_of_f32(float f) {
    const oh_u32 v = oh_bits_of_f32(f), sign = v >> 16 & 0x8000u, magnitude = v & 0x7fffffffu;
    if (f != f) return 0x7fffu;
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u; /* 65520 and more round to infinity */
    if (magnitude < 0x38800000u) { /* below 2^-14: let the adder round at 2^-24 */
        const float shifted = oh_f32_of_bits(magnitude) + 0.5f;
        return sign | (oh_bits_of_f32(shifted) - 0x3f000000u);
    }
    const oh_u32 rebiased = magnitude - 0x38000000u;
    return sign | (rebiased + 0xfffu + (rebiased >> 13 & 1u)) >> 13;
}
OH_FN oh_u32 oh_bf16x2_of_f32(float low, float high) {
    return oh_bf16_of_f32(low) | oh_bf16_of_f32(high) << 16;
}
OH_FN oh_u32 oh_f16x2_of_f32(float low, float high) {
    return oh_f16_of_f32(low) | oh_f16_of_f32(high) << 16;
}
OH_FN oh_u32 oh_canonical_f32(float f) {
    return f != f ? 0x7fffffffu : oh_bits_of_f32(f);
}

OH_FN oh_u32 oh_here_u32(oh_u32 v) {
    return v;
}
OH_FN float oh_div_f32(float a, float b) {
    return a / b;
}
OH_FN float oh_reciprocal_f32(float f) {
    return 1.0f / f;
}
OH_FN float oh_sqrt_f32(float f) {
#if defined(__x86_64__)
    return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(f)));
#else
    float root;
    __asm__("fsqrt %s0, %s1" : "=w"(root) : "w"(f));
    return root;
#endif
}
/* The larger, or the one that is no NaN. */
OH_FN float oh_max_f32(float a, float b) {
    return a > b || b != b ? a : b;
}
#define oh_e4m3x2_of_f32 oh_e4m3x2_by_bits

/* ---- rows: what the lanes of a block work on together
 * ------------------------------------------------------ A lane is a thread of a GPU's block. Here
 * the one thread is all lanes in turn, and what a lane keeps in registers lies in an array for all
 * of them, in the order of the row. */
#define OH_LANES(lane, g, lanes)    for (lane = (g).thread; lane < (lanes); lane++)
#define OH_KEPT_ROOM(max)           (OH_MAX_LANES * (max))
#define OH_KEPT(lane, index, lanes) ((lane) + (index) * (lanes))
#define OH_SHARED

/* Declares an array of what lanes keep. Such arrays are too long for a caller's stack, so each has
 * a place in the communicator's scratch; those that are in use together have different ones. */
#define OH_KEEP(type, name, max, a, place)                                                         \
    type *__restrict const name = OH_AT(type, OH_SCRATCH(a) + (place))
#define OH_SCRATCH(a) (OH_AT(const oh_host_side, (a)->host_poll_argument)->scratch)

/* The sum of all lanes' values by a tree that depends on the number of lanes only: halves of 32 are
 * added, then quarters, ..., then the sums of 32 by neighbours. */
OH_FN float oh_tree_of_16(const float *v) {
    return (((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]))) +
           (((v[8] + v[9]) + (v[10] + v[11])) + ((v[12] + v[13]) + (v[14] + v[15])));
}
OH_FN float oh_block_sum(const float *values, oh_u32 lanes, oh_u32 turn) {
    float sums[OH_MAX_LANES / 32] = {0}, v[32];
    oh_u32 w, i, step;
    (void)turn;
    for (w = 0; w < lanes / 32; w++) {
        memcpy(v, values + 32 * w, sizeof v);
        for (step = 16; step; step /= 2)
            for (i = 0; i < step; i++) v[i] += v[i + step];
        sums[w] = v[0];
    }
    return oh_tree_of_16(sums);
}
OH_FN float oh_block_max(const float *values, oh_u32 lanes, oh_u32 turn) {
    float max = 0.0f;
    oh_u32 i;
    (void)turn;
    for (i = 0; i < lanes; i++) max = oh_max_f32(max, values[i]);
    return max;
}

/* ---- several rows at a time
 * -------------------------------------------------------------------------------- The one thread
 * has too many lanes to keep their units, which lie in its caches; it hears all ranks in turn. */
#define OH_ROWS_KEPT                  0
#define OH_ROWS_OF(max, there)        (there)
#define OH_SERVERS                    1
#define OH_SERVED_TOGETHER            1u
#define OH_ROWS_SERVED(g)             ((g).threads * 8u)
#define OH_SERVED_ROWS(row, g, count) for (row = (g).thread; row < (count); row++)
#define OH_SERVED(row)                (row)
#define OH_EACH_SERVER(i, g, count)   for (i = (g).thread; i < (count); i++)
#define OH_SERVER_AT(i)               (i)

typedef struct oh_sums {
    float of[16];
} oh_sums;

OH_FN void oh_sums_begin(oh_sums *s, oh_u32 count, oh_u32 lanes) {
    (void)s, (void)count, (void)lanes;
}
OH_FN void oh_sums_put(oh_sums *s, const float *values, oh_u32 count, oh_u32 lanes) {
    for (oh_u32 i = 0; i < count; i++)
        s->of[i] = oh_block_sum(values + OH_KEPT(0, i, lanes), lanes, 0);
}
OH_FN float oh_sums_get(const oh_sums *s, oh_u32 i) {
    return s->of[i];
}
OH_FN oh_u64 oh_server_word(const oh_u64 *words, oh_u32 i) {
    return words[i];
}

/* ---- multicast, emulated: `group` names all ranks' symmetric buffers; sums in rank order ----- */
OH_FN oh_u32 oh_multicast_word(const oh_multicast_buffers *m, uint32_t rank, oh_u64 at) {
    return oh_ld_relaxed_sys_u32(m->buffers[rank] + at);
}
OH_FN oh_unit oh_multimem_add_relaxed_sys_f32(oh_u64 group, oh_u64 offset) {
    const oh_multicast_buffers *m = OH_AT(const oh_multicast_buffers, group);
    oh_unit v;
    OH_CHAOS();
    for (uint32_t i = 0; i < 4; i++) {
        float sum = oh_f32_of_bits(oh_multicast_word(m, 0, offset + 4 * i));
        for (uint32_t r = 1; r < m->count; r++)
            sum += oh_f32_of_bits(oh_multicast_word(m, r, offset + 4 * i));
        v.w[i] = oh_canonical_f32(sum);
    }
    return v;
}
OH_FN oh_unit oh_multimem_add_relaxed_sys_f16x2(oh_u64 group, oh_u64 offset) {
    const oh_multicast_buffers *m = OH_AT(const oh_multicast_buffers, group);
    oh_unit v;
    OH_CHAOS();
    for (uint32_t i = 0; i < 4; i++) {
        oh_u32 word = oh_multicast_word(m, 0, offset + 4 * i);
        float low = oh_f32_of_f16(word & 0xffffu), high = oh_f32_of_f16(word >> 16);
        for (uint32_t r = 1; r < m->count; r++) {
            word = oh_multicast_word(m, r, offset + 4 * i);
            low += oh_f32_of_f16(word & 0xffffu);
            high += oh_f32_of_f16(word >> 16);
        }
        v.w[i] = oh_f16x2_of_f32(low, high);
    }
    return v;
}
OH_FN oh_unit oh_multimem_add_relaxed_sys_bf16x2(oh_u64 group, oh_u64 offset) {
    const oh_multicast_buffers *m = OH_AT(const oh_multicast_buffers, group);
    oh_unit v;
    OH_CHAOS();
    for (uint32_t i = 0; i < 4; i++) {
        oh_u32 word = oh_multicast_word(m, 0, offset + 4 * i);
        float low = oh_f32_of_bits(word << 16), high = oh_f32_of_bits(word & 0xffff0000u);
        for (uint32_t r = 1; r < m->count; r++) {
            word = oh_multicast_word(m, r, offset + 4 * i);
            low += oh_f32_of_bits(word << 16);
            high += oh_f32_of_bits(word & 0xffff0000u);
        }
        v.w[i] = oh_bf16x2_of_f32(low, high);
    }
    return v;
}
OH_FN void oh_multimem_st_relaxed_sys_unit(oh_u64 group, oh_u64 offset, oh_unit v) {
    const oh_multicast_buffers *m = OH_AT(const oh_multicast_buffers, group);
    for (uint32_t r = 0; r < m->count; r++) oh_st_relaxed_sys_unit(m->buffers[r] + offset, v);
}
/* One place has one address here, or mappings of one file that caches keep alike. */
OH_FN void oh_fence_proxy_alias(void) {
}

#endif
