/* Kernels that disturb: see gpu_ranks.h. Every loop is bounded. */

struct helper_args {
    unsigned long long a, b, c, d;
};

__device__ static inline unsigned long long now_ns() {
    unsigned long long t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
    return t;
}

/* Lasts a nanoseconds. */
extern "C" __global__ void helper_spin(const __grid_constant__ helper_args args) {
    const unsigned long long begun = now_ns();
    for (int i = 0; i < 10000000 && now_ns() - begun < args.a; i++) asm volatile("nanosleep.u32 200;" ::: "memory");
}

/* Copies c bytes from b to a, once its predecessor is done. */
extern "C" __global__ void __launch_bounds__(1024) helper_consume(const __grid_constant__ helper_args args) {
    volatile unsigned char *to = (volatile unsigned char *)args.a;
    const volatile unsigned char *from = (const volatile unsigned char *)args.b;
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
    for (unsigned long long i = blockIdx.x * 1024ull + threadIdx.x; i < args.c; i += gridDim.x * 1024ull) to[i] = from[i];
}

/* Adds to the word at d how many of the c words at a differ from those at b. */
extern "C" __global__ void helper_compare(const __grid_constant__ helper_args args) {
    const unsigned *found = (const unsigned *)args.a, *expected = (const unsigned *)args.b;
    unsigned wrong = 0;
    for (unsigned long long i = blockIdx.x * 256ull + threadIdx.x; i < args.c; i += gridDim.x * 256ull)
        wrong += found[i] != expected[i];
    if (wrong) atomicAdd((unsigned *)args.d, wrong);
}
