// norm = sqrt(sum of x^2) over several arrays, contiguous: squares writes one sum a block to its
// place in parts, one launch an array; norm_of_parts adds the parts up in one block. No atomics: the order is
// fixed. Grid of squares: at most 512 blocks of 256 threads, each walking over the whole array.
//
// Budget: squares: 40 registers, 0 spilled, 256 shared
// Budget: norm_of_parts: 32 registers, 0 spilled, 256 shared
#include "common.cuh"

extern "C" __global__ void squares(const real* __restrict__ x, real* __restrict__ parts,
                                   long long n, long long offset) {
    real sum = 0;
    const long long step = (long long)gridDim.x * blockDim.x * VEC;
    for (long long i = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * VEC; i < n; i += step) {
        const Pack p = load(x + i);
        for (int k = 0; k < VEC; ++k) sum += p.v[k] * p.v[k];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) parts[offset + blockIdx.x] = sum;
}

extern "C" __global__ void norm_of_parts(const real* __restrict__ parts, real* __restrict__ out,
                                long long n) {
    real sum = 0;
    for (long long i = threadIdx.x; i < n; i += blockDim.x) sum += parts[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *out = sqrt(sum);
}
