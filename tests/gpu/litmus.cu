/* Kernels of test_gpu_litmus.c: small programs that ask the machine what the protocols rely on.
 * Every loop is bounded by a count or by the clock. */

struct litmus_args {
    unsigned long long mine, peer; /* addresses of this GPU's and the other's memory */
    unsigned long long counts;     /* litmus_counts of this GPU */
    unsigned long long limit_ns;   /* of any wait */
    unsigned int round, rounds;
    unsigned int delay_ns, unused;
};

struct litmus_counts {
    unsigned int trials, early, lost, stale, stuck, wrong;
};

typedef unsigned int u32;
typedef unsigned long long u64;

__device__ static inline u64 now_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
    return t;
}
__device__ static inline void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ static inline void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ static inline u32 ld_relaxed_gpu(u64 p) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ static inline void st_relaxed_gpu(u64 p, u32 v) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ static inline u32 ld_relaxed_sys(u64 p) {
    u32 v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ static inline void st_relaxed_sys(u64 p, u32 v) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ static inline uint4 ld_relaxed_sys_unit(u64 p) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
__device__ static inline void st_relaxed_sys_unit(u64 p, u32 w) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%1,%1,%1};" ::"l"(p), "r"(w) : "memory");
}
__device__ static inline uint4 ld_weak_unit(u64 p) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
__device__ static inline litmus_counts *counts_of(const litmus_args &a) {
    return (litmus_counts *)a.counts;
}

/* ---- (i) completion through kernels that never wait
 * --------------------------------------------------------- first -> pass (any number) -> last, in
 * one stream with programmatic dependent launch. `pass` triggers at once and does not wait. Has
 * `first` ended when `last` comes out of its wait? */
extern "C" __global__ void litmus_first(const __grid_constant__ litmus_args a) {
    const u64 begun = now_ns();
    pdl_wait();
    pdl_trigger();
    for (int i = 0; i < 100000 && now_ns() - begun < a.delay_ns; i++) {
    }
    st_relaxed_gpu(a.mine, a.round);
}
extern "C" __global__ void litmus_pass(const __grid_constant__ litmus_args a) {
    pdl_trigger();
}
extern "C" __global__ void litmus_last(const __grid_constant__ litmus_args a) {
    pdl_wait();
    atomicAdd(&counts_of(a)->trials, 1u);
    if (ld_relaxed_gpu(a.mine) != a.round) atomicAdd(&counts_of(a)->early, 1u);
}

/* ---- (ii) re-arm against push, no fence between
 * ---------------------------------------------------------------- Each thread exchanges units with
 * the same thread of the other GPU through two sub-slots in turn: push round c to the peer, wait
 * for the peer's round c, re-arm, go on. A re-arming that lands after the peer's push of round c+2
 * loses it, and the wait never ends. Slot memory: 2 sub-slots x threads x 16 bytes, armed. */
extern "C" __global__ void __launch_bounds__(256) litmus_rearm(const __grid_constant__ litmus_args a) {
    const u64 me = (u64)blockIdx.x * blockDim.x + threadIdx.x, half = (u64)gridDim.x * blockDim.x * 16;
    u32 wrong = 0, c;
    for (c = 0; c < a.rounds; c++) {
        const u64 off = (c & 1) * half + me * 16;
        const u32 expected = a.round + c + 1;
        u64 begun = 0;
        u32 polls = 0;
        uint4 v;
        st_relaxed_sys_unit(a.peer + off, expected);
        for (;;) {
            v = ld_relaxed_sys_unit(a.mine + off);
            if (v.x != ~0u && v.y != ~0u && v.z != ~0u && v.w != ~0u) break;
            if (++polls % 1024) continue;
            if (!begun) begun = now_ns();
            if (now_ns() - begun < a.limit_ns) continue;
            atomicAdd(&counts_of(a)->lost, 1u);
            atomicAdd(&counts_of(a)->trials, c);
            return;
        }
        wrong += v.x != expected || v.y != expected || v.z != expected || v.w != expected;
        st_relaxed_sys_unit(a.mine + off, ~0u);
    }
    if (wrong) atomicAdd(&counts_of(a)->wrong, wrong);
    atomicAdd(&counts_of(a)->trials, a.rounds);
}

/* ---- (iii) weak peer loads after a relaxed enter
 * ------------------------------------------------------------------ A kernel writes its GPU's data
 * with weak stores. The next one, after its wait, tells the peer's same block by a relaxed store,
 * waits for the peer's word with relaxed loads, and reads the peer's data with weak loads. Then the
 * same again as an exit, so that nobody overwrites what is being read. Memory: data (grid x 256 x
 * 16 bytes), enter words, exit words (128 bytes a block each). */
extern "C" __global__ void __launch_bounds__(256) litmus_write(const __grid_constant__ litmus_args a) {
    const u64 p = a.mine + ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 16;
    pdl_wait();
    asm volatile("st.global.v4.u32 [%0], {%1,%1,%1,%1};" ::"l"(p), "r"(a.round) : "memory");
    pdl_trigger();
}

__device__ static int meet(const litmus_args &a, u64 words) {
    u64 begun = 0;
    u32 polls = 0;
    st_relaxed_sys(a.peer + words + blockIdx.x * 128ull, a.round);
    while ((int)(ld_relaxed_sys(a.mine + words + blockIdx.x * 128ull) - a.round) < 0) {
        if (++polls % 1024) continue;
        if (!begun) begun = now_ns();
        if (now_ns() - begun < a.limit_ns) continue;
        atomicAdd(&counts_of(a)->stuck, 1u);
        return 0;
    }
    return 1;
}

extern "C" __global__ void __launch_bounds__(256) litmus_pull(const __grid_constant__ litmus_args a) {
    const u64 off = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 16, data = (u64)gridDim.x * blockDim.x * 16;
    __shared__ int met;
    uint4 v;
    u32 stale;
    pdl_wait();
    if (threadIdx.x == 0) met = meet(a, data);
    __syncthreads();
    v = ld_weak_unit(a.peer + off);
    stale = (v.x != a.round) + (v.y != a.round) + (v.z != a.round) + (v.w != a.round);
    if (met && stale) atomicAdd(&counts_of(a)->stale, stale);
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (met) meet(a, data + gridDim.x * 128ull);
    atomicAdd(&counts_of(a)->trials, 4 * blockDim.x);
}
