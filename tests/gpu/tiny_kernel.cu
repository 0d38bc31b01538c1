/* Kernels for test_cuda_launch.c: just enough to see that an image is loaded, that arguments arrive
 * as one struct, and that launches with programmatic dependent launch keep the order of a
 * stream. */

struct tiny_args {
    unsigned long long out; /* address of count words */
    unsigned int value;
    unsigned int count;
};

/* Nothing that the kernel before may still write is touched before this. */
__device__ static inline void wait_for_predecessor(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ static inline void let_successor_start(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

extern "C" __global__ void __launch_bounds__(256)
    tiny_empty(const __grid_constant__ tiny_args args) {
}

/* out[i] = value + i */
extern "C" __global__ void __launch_bounds__(256)
    tiny_write(const __grid_constant__ tiny_args args) {
    unsigned int *out = (unsigned int *)args.out;
    wait_for_predecessor();
    for (unsigned int i = blockIdx.x * blockDim.x + threadIdx.x; i < args.count;
         i += gridDim.x * blockDim.x)
        out[i] = args.value + i;
}

/* out[i] = out[i] * value + 1, by as many threads as words: a launch out of order changes the
 * result. */
extern "C" __global__ void __launch_bounds__(256)
    tiny_step(const __grid_constant__ tiny_args args) {
    volatile unsigned int *out = (volatile unsigned int *)args.out;
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    let_successor_start(); /* early on purpose: the next launch overlaps up to its wait */
    wait_for_predecessor();
    if (i < args.count) out[i] = out[i] * args.value + 1;
}

/* Uses local memory: must be refused. */
extern "C" __global__ void __launch_bounds__(256)
    tiny_spill(const __grid_constant__ tiny_args args) {
    unsigned int table[1024]; /* too large for registers */
    unsigned int *out = (unsigned int *)args.out;
    for (int i = 0; i < 1024; i++) table[i] = out[i];
    out[threadIdx.x] = table[args.value % 1024] + table[(args.value + args.count) % 1024];
}
