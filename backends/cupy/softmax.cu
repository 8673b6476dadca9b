// Softmax along one axis of x (outer, n, inner), contiguous.
//
//   y = exp(x - max) / sum(exp(x - max));  dx = y * (dy - sum(dy * y))
//
// A block a row of n elements that lie `inner` apart: maximum, sum, y; after the first pass the row
// comes from the cache. Grid: outer * inner.
//
// Budget: softmax_forward: 48 registers, 0 spilled, 512 shared
// Budget: softmax_backward: 32 registers, 0 spilled, 256 shared
#include "common.cuh"

// Rows are packed only where inner is 1.
__device__ __forceinline__ long long row_start(long long n, long long inner) {
    return blockIdx.x / inner * n * inner + blockIdx.x % inner;
}

extern "C" __global__ void softmax_forward(const real* __restrict__ x, real* __restrict__ y,
                                           long long n, long long inner) {
    const long long start = row_start(n, inner), step = inner * VEC;
    const int packs = n / VEC;
    real top = -infinity();
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        const Pack p = load(x + start + i * step);
        for (int k = 0; k < VEC; ++k) top = larger(top, p.v[k]);
    }
    top = block_max(top);
    real sum = 0;
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        const Pack p = load(x + start + i * step);
        for (int k = 0; k < VEC; ++k) sum += exp(p.v[k] - top);
    }
    sum = block_sum(sum);
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        Pack p = load(x + start + i * step);
        for (int k = 0; k < VEC; ++k) p.v[k] = exp(p.v[k] - top) / sum;
        store(y + start + i * step, p);
    }
}

extern "C" __global__ void softmax_backward(const real* __restrict__ y, const real* __restrict__ dy,
                                            real* __restrict__ dx, long long n, long long inner) {
    const long long start = row_start(n, inner), step = inner * VEC;
    const int packs = n / VEC;
    real sum = 0;
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        const Pack p = load(y + start + i * step), g = load(dy + start + i * step);
        for (int k = 0; k < VEC; ++k) sum += g.v[k] * p.v[k];
    }
    sum = block_sum(sum);
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        const Pack p = load(y + start + i * step), g = load(dy + start + i * step);
        Pack out;
        for (int k = 0; k < VEC; ++k) out.v[k] = p.v[k] * (g.v[k] - sum);
        store(dx + start + i * step, out);
    }
}
