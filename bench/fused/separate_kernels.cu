/* What fused calls are compared with: the best separate kernels for the work beside the all-reduce.
 * bfloat16, aligned, sizes of whole units of 16 bytes; one block a row; programmatic dependent
 * launch: what the kernel before does not write is loaded before the wait for it. And a matrix
 * product of one row, bound by memory, to follow an all-reduce. */
#include <cuda_bf16.h>

struct separate_args {
    unsigned long long x, residual, weight, y, q, k, q_weight, k_weight, sums;
    unsigned rows, units, q_units, k_units, stride_units, loads_ahead;
    float eps, inverse_q, inverse_k;
};

struct alignas(16) unit {
    __nv_bfloat162 v[4];
};

__device__ static inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ static inline void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ static inline float squares_of(const unit &u) {
    float s = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 f = __bfloat1622float2(u.v[i]);
        s += f.x * f.x + f.y * f.y;
    }
    return s;
}

__device__ static inline unit scaled(const unit &u, const unit &w, float inverse) {
    unit y;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 f = __bfloat1622float2(u.v[i]), g = __bfloat1622float2(w.v[i]);
        y.v[i] = __floats2bfloat162_rn(f.x * inverse * g.x, f.y * inverse * g.y);
    }
    return y;
}

/* Of all threads of a block; whole warps. */
__device__ static inline float block_sum(float v, float *shared) {
    for (int step = 16; step; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
    if (!(threadIdx.x & 31)) shared[threadIdx.x / 32] = v;
    __syncthreads();
    v = threadIdx.x % 32 < blockDim.x / 32 ? shared[threadIdx.x % 32] : 0.0f;
    for (int step = 16; step; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
    return v;
}

/* residual += x; y = RMSNorm(residual) * weight. At most 2 units a thread. */
extern "C" __global__ void __launch_bounds__(1024) separate_add_norm(const __grid_constant__ separate_args a) {
    __shared__ float shared[32];
    const unit *x = (const unit *)a.x + (size_t)blockIdx.x * a.units, *weight = (const unit *)a.weight;
    unit *residual = (unit *)a.residual + (size_t)blockIdx.x * a.units, *y = (unit *)a.y + (size_t)blockIdx.x * a.units;
    unit r[2], w[2];
    float sum = 0;
    let_next_begin();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const unsigned u = threadIdx.x + i * blockDim.x;
        if (u < a.units) {
            r[i] = residual[u];
            w[i] = weight[u];
        }
    }
    wait_for_previous();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const unsigned u = threadIdx.x + i * blockDim.x;
        if (u >= a.units) continue;
        const unit in = x[u];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float2 f = __bfloat1622float2(in.v[k]), g = __bfloat1622float2(r[i].v[k]);
            r[i].v[k] = __floats2bfloat162_rn(f.x + g.x, f.y + g.y);
        }
        residual[u] = r[i];
        sum += squares_of(r[i]);
    }
    const float inverse = rsqrtf(block_sum(sum, shared) / (8.0f * a.units) + a.eps);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const unsigned u = threadIdx.x + i * blockDim.x;
        if (u < a.units) y[u] = scaled(r[i], w[i], inverse);
    }
}

/* Sums of squares of a token's q and k, to be added up by an all-reduce of [tokens, 2] floats. */
extern "C" __global__ void __launch_bounds__(1024) separate_qk_squares(const __grid_constant__ separate_args a) {
    __shared__ float shared[2][32];
    const unit *q = (const unit *)a.q + (size_t)blockIdx.x * a.stride_units,
               *k = (const unit *)a.k + (size_t)blockIdx.x * a.stride_units;
    float of_q = 0, of_k = 0;
    wait_for_previous();
    let_next_begin();
    for (unsigned u = threadIdx.x; u < a.q_units + a.k_units; u += blockDim.x)
        if (u < a.q_units)
            of_q += squares_of(q[u]);
        else
            of_k += squares_of(k[u - a.q_units]);
    of_q = block_sum(of_q, shared[0]);
    of_k = block_sum(of_k, shared[1]);
    if (threadIdx.x == 0) ((float2 *)a.sums)[blockIdx.x] = make_float2(of_q, of_k);
}

extern "C" __global__ void __launch_bounds__(1024) separate_qk_apply(const __grid_constant__ separate_args a) {
    unit *q = (unit *)a.q + (size_t)blockIdx.x * a.stride_units, *k = (unit *)a.k + (size_t)blockIdx.x * a.stride_units;
    const unit *q_weight = (const unit *)a.q_weight, *k_weight = (const unit *)a.k_weight;
    const unsigned u = threadIdx.x;
    const bool is_q = u < a.q_units, mine = u < a.q_units + a.k_units;
    unit *at = is_q ? q + u : k + (u - a.q_units);
    unit x, w;
    let_next_begin();
    if (mine) {
        x = *at;
        w = is_q ? q_weight[u] : k_weight[u - a.q_units];
    }
    wait_for_previous();
    const float2 sums = ((const float2 *)a.sums)[blockIdx.x];
    if (mine) *at = scaled(x, w, rsqrtf((is_q ? sums.x * a.inverse_q : sums.y * a.inverse_k) + a.eps));
}

/* y[n] = sum over k of weight[n][k] x[k]; a block a row of the matrix, of 4 units a thread, all in
 * flight. `loads_ahead`: also while the kernel before still runs, as far as blocks find room. */
extern "C" __global__ void __launch_bounds__(128) separate_matvec(const __grid_constant__ separate_args a) {
    __shared__ float shared[32];
    const unit *x = (const unit *)a.x, *weight = (const unit *)a.weight + (size_t)blockIdx.x * a.units;
    unit w[4];
    float sum = 0;
    let_next_begin();
    if (!a.loads_ahead) wait_for_previous();
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = weight[threadIdx.x + 128 * i];
    if (a.loads_ahead) wait_for_previous();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const unit in = x[threadIdx.x + 128 * i];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float2 f = __bfloat1622float2(in.v[k]), g = __bfloat1622float2(w[i].v[k]);
            sum += f.x * g.x + f.y * g.y;
        }
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) ((__nv_bfloat16 *)a.y)[blockIdx.x] = __float2bfloat16_rn(sum);
}
