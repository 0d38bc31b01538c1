/* CUDA half of prim.h: all PTX of the project. Compiled by nvcc and NVRTC, sm_80 and later. */
#ifndef OH_PRIM_CUDA_H
#define OH_PRIM_CUDA_H

#define OH_FN        static __device__ __forceinline__
#define OH_SLOW_FN   static __device__ __noinline__
#define OH_UNROLL    _Pragma("unroll")
#define OH_NO_UNROLL _Pragma("unroll 1")

/* Keeps what rarely runs out of the way of what often does. */
#define OH_UNLIKELY(condition) __builtin_expect(!!(condition), 0)
#define OH_LIKELY(condition)   __builtin_expect(!!(condition), 1)

/* Polls before a wait looks at clock, control page and host; bare, since a test inside the loop
 * costs 0.1 us a call (two H200, graphs, W=2). */
#define OH_POLLS 1024

/* The k, from 1 on, of the k-th next ranks that a thread serves: one at most, since a block has
 * more threads than there are ranks. */
#define OH_PEERS(k, g, world) if (((k) = (g).thread + 1) < (world))

/* How long ranks that give up wait for each other's failure rows. */
#define OH_WAITS_TOLD_NS 10000000ull

/* Each thread pushes a unit and polls it at once: lanes are many and hide each other's latency. */
#define OH_PUSH_WHOLE_CHUNK 0

/* Whose control page holds the word that `from` writes for `to`: the reader's, so that it polls its
 * own memory. */
#define OH_SIGNATURE_HOME(from, to) (to)

typedef struct oh_grid {
    oh_u32 block, blocks;
    oh_u32 thread, threads;
} oh_grid;

OH_FN oh_grid oh_grid_here(oh_u32 blocks) {
    oh_grid g;
    g.block = blockIdx.x;
    g.blocks = blocks;
    g.thread = threadIdx.x;
    g.threads = blockDim.x;
    return g;
}

#define OH_KERNEL_OF(type, name, bound, statement)                                                 \
    extern "C" __global__ void __launch_bounds__(bound, 1)                                         \
        name(const __grid_constant__ type args) {                                                  \
        const type *a = &args;                                                                     \
        const oh_grid g = oh_grid_here(((const oh_args *)a)->blocks);                              \
        statement;                                                                                 \
    }
#define OH_KERNEL(name, bound, statement) OH_KERNEL_OF(oh_args, name, bound, statement)

/* Multimem instructions begin with sm_90: images for less do not have these kernels. */
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define OH_MULTICAST_KERNEL(name, bound, statement) OH_KERNEL(name, bound, statement)
#else
#define OH_MULTICAST_KERNEL(name, bound, statement)
#endif

/* ---- ordinary accesses: inputs, outputs, staged data
 * ------------------------------------------------------- volatile asm: never merged, never moved
 * across pdl_wait, never turned into ld.global.nc. */
OH_FN oh_unit oh_ld_unit(oh_u64 p) {
    oh_unit v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
                 : "l"(p)
                 : "memory");
    return v;
}
OH_FN void oh_st_unit(oh_u64 p, oh_unit v) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.w[0]), "r"(v.w[1]),
                 "r"(v.w[2]), "r"(v.w[3])
                 : "memory");
}
OH_FN oh_u8 oh_ld_u8(oh_u64 p) {
    oh_u16 v;
    asm volatile("ld.global.u8 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
    return (oh_u8)v;
}
OH_FN void oh_st_u8(oh_u64 p, oh_u8 v) {
    asm volatile("st.global.u8 [%0], %1;" ::"l"(p), "h"((oh_u16)v) : "memory");
}
OH_FN oh_u16 oh_ld_u16(oh_u64 p) {
    oh_u16 v;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
    return v;
}
OH_FN void oh_st_u16(oh_u64 p, oh_u16 v) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(p), "h"(v) : "memory");
}
OH_FN oh_u32 oh_ld_u32(oh_u64 p) {
    oh_u32 v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
OH_FN void oh_st_u32(oh_u64 p, oh_u32 v) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
OH_FN oh_u64 oh_ld_u64(oh_u64 p) {
    oh_u64 v;
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
OH_FN void oh_st_u64(oh_u64 p, oh_u64 v) {
    asm volatile("st.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

/* ---- ordered accesses: slots, signatures, control -------------------------------------------- */
OH_FN oh_unit oh_ld_relaxed_sys_unit(oh_u64 p) {
    oh_unit v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
                 : "l"(p)
                 : "memory");
    return v;
}
OH_FN void oh_st_relaxed_sys_unit(oh_u64 p, oh_unit v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.w[0]),
                 "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3])
                 : "memory");
}
OH_FN oh_u32 oh_ld_relaxed_sys_u32(oh_u64 p) {
    oh_u32 v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
OH_FN void oh_st_relaxed_sys_u32(oh_u64 p, oh_u32 v) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
OH_FN oh_u64 oh_ld_relaxed_sys_u64(oh_u64 p) {
    oh_u64 v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
OH_FN void oh_st_relaxed_sys_u64(oh_u64 p, oh_u64 v) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
/* A vector is as many accesses as it has elements, each atomic. */
OH_FN oh_pair oh_ld_relaxed_sys_pair(oh_u64 p) {
    oh_pair v;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0,%1}, [%2];"
                 : "=l"(v.w[0]), "=l"(v.w[1])
                 : "l"(p)
                 : "memory");
    return v;
}
OH_FN void oh_st_relaxed_sys_pair(oh_u64 p, oh_pair v) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1,%2};" ::"l"(p), "l"(v.w[0]), "l"(v.w[1])
                 : "memory");
}
OH_FN oh_u64 oh_ld_acquire_sys_u64(oh_u64 p) {
    oh_u64 v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
OH_FN void oh_st_release_sys_u64(oh_u64 p, oh_u64 v) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
OH_FN void oh_st_release_sys_u32(oh_u64 p, oh_u32 v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
OH_FN oh_u32 oh_cas_relaxed_gpu_u32(oh_u64 p, oh_u32 expected, oh_u32 desired) {
    oh_u32 old;
    asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(old)
                 : "l"(p), "r"(expected), "r"(desired)
                 : "memory");
    return old;
}
OH_FN oh_u32 oh_exchange_relaxed_gpu_u32(oh_u64 p, oh_u32 v) {
    oh_u32 old;
    asm volatile("atom.relaxed.gpu.global.exch.b32 %0, [%1], %2;"
                 : "=r"(old)
                 : "l"(p), "r"(v)
                 : "memory");
    return old;
}
OH_FN oh_u32 oh_ld_relaxed_gpu_u32(oh_u64 p) {
    oh_u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
OH_FN void oh_st_relaxed_gpu_u32(oh_u64 p, oh_u32 v) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
OH_FN oh_u64 oh_ld_relaxed_gpu_u64(oh_u64 p) {
    oh_u64 v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
OH_FN void oh_fence_acq_rel_sys(void) {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}
/* For what a GPU orders by the boundary between two kernels and a host does not: nothing here. */
/* The look costs 2 to 14 % of a call here (docs/notes/tuning-log.md). */
#define OH_LOOKS_BEFORE_STORES 0
OH_FN void oh_boundary_fence(void) {
}

/* ---- group, time, launch chain --------------------------------------------------------------- */
OH_FN void oh_block_sync(void) {
    __syncthreads();
}
/* The same, and tells all threads whether any of them brought a nonzero value. */
OH_FN oh_u32 oh_block_any(oh_u32 v) {
    return (oh_u32)__syncthreads_or((int)v);
}
/* What only the host writes, before the launch: the one load that may stand before pdl_wait.
 * Relaxed, so that the L2 answers: an L1 may keep the line from before the host wrote. */
OH_FN oh_u64 oh_ld_host_u64(oh_u64 p) {
    oh_u64 v;
    asm volatile("ld.relaxed.gpu.global.L1::no_allocate.u64 %0, [%1];"
                 : "=l"(v)
                 : "l"(p)
                 : "memory");
    return v;
}
/* Asks the L2 for what will be read after pdl_wait. It reads nothing, so it may stand before; it
 * also makes ptxas compute the address there and not after the wait, where every call would wait
 * for it (0.05 to 0.1 us, docs/notes/tuning-log.md). */
OH_FN void oh_prefetch(oh_u64 p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory");
}
/* All that a block behind the grid does: its share of a range, by lines of 128 bytes. */
OH_SLOW_FN void oh_prefetch_share(oh_u64 at, oh_u64 bytes, oh_grid g) {
    const oh_u64 end = at + bytes, first = (g.block - g.blocks) * g.threads + g.thread;
    oh_u64 p;
    OH_NO_UNROLL
    for (p = (at & ~127ull) + 128 * first; p < end;
         p += 128ull * (gridDim.x - g.blocks) * g.threads)
        oh_prefetch(p);
    asm volatile("exit;");
}
/* Nothing that the previous kernel of the stream may still write is read before this. */
OH_FN void oh_pdl_wait(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
OH_FN void oh_pdl_trigger(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
OH_FN oh_u64 oh_now_ns(void) {
    oh_u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
    return t;
}
/* A short rest between looks at other ranks' failure rows. */
OH_FN void oh_rest(void) {
    asm volatile("nanosleep.u32 1000;" ::: "memory");
}
/* Host device only: gives the core away and looks at the peers' processes. */
OH_FN oh_i32 oh_host_wait(oh_u64 poll, oh_u64 argument, oh_u64 waited_ns) {
    (void)poll;
    (void)argument;
    (void)waited_ns;
    return -1;
}

/* ---- numbers: fp32 sums, one rounding; NaN comes out canonical (measured) -------------------- */
OH_FN float oh_f32_of_bits(oh_u32 v) {
    return __uint_as_float(v);
}
OH_FN oh_u32 oh_bits_of_f32(float f) {
    return __float_as_uint(f);
}
OH_FN float oh_f32_of_f16(oh_u32 bits) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((oh_u16)bits));
    return f;
}
/* Two roundings to nearest even, packed: `low` in bits 0..15. */
OH_FN oh_u32 oh_bf16x2_of_f32(float low, float high) {
    oh_u32 v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}
OH_FN oh_u32 oh_f16x2_of_f32(float low, float high) {
    oh_u32 v;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}
OH_FN oh_u32 oh_canonical_f32(float f) {
    return __float_as_uint(f);
}

/* The same value, worked out here: compilers may do so neither behind a wait that follows nor ahead
 * of a loop around this, where it would take a register for long. */
OH_FN oh_u32 oh_here_u32(oh_u32 v) {
    oh_u32 same;
    asm volatile("mov.b32 %0, %1;" : "=r"(same) : "r"(v) : "memory");
    return same;
}

/* Rounded correctly, as a host does: rsqrt.approx would give other bits. */
OH_FN float oh_div_f32(float a, float b) {
    float f;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(f) : "f"(a), "f"(b));
    return f;
}
OH_FN float oh_reciprocal_f32(float a) {
    float f;
    asm("rcp.rn.f32 %0, %1;" : "=f"(f) : "f"(a));
    return f;
}
OH_FN float oh_sqrt_f32(float f) {
    float root;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(root) : "f"(f));
    return root;
}
/* The larger, or the one that is no NaN. */
OH_FN float oh_max_f32(float a, float b) {
    return fmaxf(a, b);
}
/* Two bytes of e4m3, to nearest even, above 448 to 448, NaN 0x7F; `low` in bits 0..7. */
#if __CUDA_ARCH__ >= 890
OH_FN oh_u32 oh_e4m3x2_of_f32(float low, float high) {
    oh_u16 v;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(high), "f"(low));
    return v;
}
#else
#define oh_e4m3x2_of_f32 oh_e4m3x2_by_bits
#endif

/* ---- rows: what the lanes of a block work on together
 * ------------------------------------------------------ A lane is a thread; a block has as many as
 * the row asks for. */
#define OH_LANES(lane, g, lanes)           lane = (g).thread;
#define OH_KEPT_ROOM(max)                  (max)
#define OH_KEEP(type, name, max, a, place) type name[OH_KEPT_ROOM(max)]
#define OH_KEPT(lane, index, lanes)        ((index) + 0 * (lane))
#define OH_SHARED                          __shared__

/* The sum of all lanes' values; see prim_host.h. One barrier: `turn` counts the calls of a block,
 * so that what is written now is not what a late thread still reads. */
OH_FN float oh_warp_sum(float v) {
    oh_u32 i;
    OH_UNROLL
    for (i = 16; i; i /= 2) v = v + __shfl_xor_sync(0xffffffffu, v, (int)i);
    return v;
}
/* A warp's sum to its place; warps that are not there have none. */
OH_FN void oh_put_warp_sum(float *sums, float v, oh_u32 lanes) {
    const oh_u32 t = threadIdx.x;
    if (!(t & 31)) sums[t / 32] = v;
    if (t >= lanes / 32 && t < 16) sums[t] = 0.0f;
}
OH_FN float oh_tree_of_16(const float *v) {
    return (((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]))) +
           (((v[8] + v[9]) + (v[10] + v[11])) + ((v[12] + v[13]) + (v[14] + v[15])));
}
OH_FN float oh_block_sum(const float *values, oh_u32 lanes, oh_u32 turn) {
    __shared__ __align__(16) float sums[2][16];
    oh_put_warp_sum(sums[turn & 1], oh_warp_sum(values[0]), lanes);
    __syncthreads();
    return oh_tree_of_16(sums[turn & 1]);
}

/* ---- several rows at a time
 * -------------------------------------------------------------------------------- A lane can keep
 * its units of several rows in registers. Half a warp serves a row, a thread for each other rank.
 * Its warp comes in whole, hence for one row more if they are odd. */
#define OH_ROWS_KEPT           1
#define OH_ROWS_OF(max, there) (max) /* a constant, to be unrolled */
#define OH_SERVERS             16u
#define OH_SERVED_TOGETHER     2u /* by one warp */
#define OH_ROWS_SERVED(g)      ((g).threads / OH_SERVERS)
#define OH_SERVED_ROWS(row, g, count)                                                              \
    row = (g).thread / OH_SERVERS;                                                                 \
    if (row < (((count) + 1u) & ~1u))
#define OH_SERVED(row) 0
#define OH_EACH_SERVER(i, g, count)                                                                \
    i = (g).thread % OH_SERVERS;                                                                   \
    if (i < (count))
#define OH_SERVER_AT(i) 0

/* Up to 16 sums over all lanes, as one sum of each warp: rows in different banks, read 16 bytes at
 * once. */
typedef struct __align__(16) oh_sums {
    float of[16][20];
} oh_sums;

/* Warps that a block does not have add nothing. */
OH_FN void oh_sums_begin(oh_sums *s, oh_u32 count, oh_u32 lanes) {
    oh_u32 i;
    OH_NO_UNROLL
    for (i = threadIdx.x; i < 16 * count; i += blockDim.x)
        if (i % 16 >= lanes / 32) s->of[i / 16][i % 16] = 0.0f;
}
/* `count` values of every lane, a power of two: oh_warp_sum's tree for all of them at once, half of
 * what is left going to the other lane in each step. Barrier, then oh_sums_get. */
OH_FN void oh_sums_put(oh_sums *s, float *v, oh_u32 count, oh_u32 lanes) {
    const oh_u32 lane = threadIdx.x & 31;
    oh_u32 i, step;
    (void)lanes;
    OH_UNROLL
    for (step = 16; step; step /= 2) {
        const oh_u32 left = count * step / 32;
        const bool upper = lane & step;
        OH_UNROLL
        for (i = 0; i < 8; i++) {
            if (i < left) {
                const float mine = upper ? v[i + left] : v[i], other = upper ? v[i] : v[i + left];
                v[i] = mine + __shfl_xor_sync(0xffffffffu, other, (int)step);
            }
        }
        if (!left) v[0] = v[0] + __shfl_xor_sync(0xffffffffu, v[0], (int)step);
    }
    if (lane % (32 / count) == 0) s->of[lane / (32 / count)][threadIdx.x / 32] = v[0];
}
OH_FN float oh_sums_get(const oh_sums *s, oh_u32 i) {
    const float4 *v = (const float4 *)s->of[i];
    const float4 a = v[0], b = v[1], c = v[2], d = v[3];
    return (((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w))) +
           (((c.x + c.y) + (c.z + c.w)) + ((d.x + d.y) + (d.z + d.w)));
}
/* What server i of this thread's row has. */
OH_FN oh_u64 oh_server_word(const oh_u64 *words, oh_u32 i) {
    return __shfl_sync(0xffffffffu, words[0], (int)i, (int)OH_SERVERS);
}

/* The largest of all lanes' values, NaN left out; at least zero. */
OH_FN float oh_block_max(const float *values, oh_u32 lanes, oh_u32 turn) {
    __shared__ float max[2][16];
    float v = fmaxf(values[0], 0.0f);
    oh_u32 i;
    OH_UNROLL
    for (i = 16; i; i /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, (int)i));
    if (!(threadIdx.x & 31)) max[turn & 1][threadIdx.x / 32] = v;
    __syncthreads();
    OH_UNROLL
    for (i = 0; i < 16; i++)
        if (i < lanes / 32) v = fmaxf(v, max[turn & 1][i]);
    return v;
}

/* ---- multicast: never run on hardware, and off unless asked for
 * ------------------------------------- The same offset of all ranks' memory: `group` is the
 * address under which the switch maps it. The operand of a 16-bit sum is packed and the sum is kept
 * in fp32 until its one rounding. */
OH_FN oh_unit oh_multimem_add_relaxed_sys_f32(oh_u64 group, oh_u64 offset) {
    float f[4];
    oh_unit v;
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(f[0]), "=f"(f[1]), "=f"(f[2]), "=f"(f[3])
                 : "l"(group + offset)
                 : "memory");
    v.w[0] = oh_bits_of_f32(f[0]);
    v.w[1] = oh_bits_of_f32(f[1]);
    v.w[2] = oh_bits_of_f32(f[2]);
    v.w[3] = oh_bits_of_f32(f[3]);
    return v;
}
OH_FN oh_unit oh_multimem_add_relaxed_sys_f16x2(oh_u64 group, oh_u64 offset) {
    oh_unit v;
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
                 : "l"(group + offset)
                 : "memory");
    return v;
}
OH_FN oh_unit oh_multimem_add_relaxed_sys_bf16x2(oh_u64 group, oh_u64 offset) {
    oh_unit v;
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
                 : "l"(group + offset)
                 : "memory");
    return v;
}
/* To all ranks; a store does not look at what it moves, so one type serves all. */
OH_FN void oh_multimem_st_relaxed_sys_unit(oh_u64 group, oh_u64 offset, oh_unit v) {
    asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(group + offset),
                 "f"(oh_f32_of_bits(v.w[0])), "f"(oh_f32_of_bits(v.w[1])),
                 "f"(oh_f32_of_bits(v.w[2])), "f"(oh_f32_of_bits(v.w[3]))
                 : "memory");
}
/* Between accesses to one place by its own address and by the group's: to the memory model these
 * are aliases, which nothing else puts in order. */
OH_FN void oh_fence_proxy_alias(void) {
    asm volatile("fence.proxy.alias;" ::: "memory");
}

#endif
