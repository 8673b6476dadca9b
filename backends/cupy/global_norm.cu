// norm = sqrt(sum of x^2) over all arrays of a list, contiguous, and x * scale of each of them,
// scale = min(1, max_norm / (norm + 1e-6)). A block of 256 threads has `share` elements of one array,
// a thread a pack in turn; the grid is what all arrays need (leaves.cuh). squares writes one sum a
// block to its place in parts, from `offset` on; norm_of_parts adds the parts up in one block. No
// atomics: the order is fixed, and the same however the arrays are shared out among launches.
//
// Budget: squares: 40 registers, 0 spilled, 256 shared
// Budget: norm_of_parts: 32 registers, 0 spilled, 256 shared
// Budget: scaled: 40 registers, 0 spilled, 0 shared
#include "leaves.cuh"

extern "C" __global__ void squares(const __grid_constant__ Leaves<const real*> x,
                                   const __grid_constant__ Leaves<long long> sizes,
                                   const __grid_constant__ Leaves<long long> firsts, long long share,
                                   real* __restrict__ parts, long long offset) {
    const Part part = part_of(sizes, firsts, share);
    const real* const own = x.at[part.leaf];
    const long long step = blockDim.x * VEC;
    real sum = 0;
    for (long long i = part.start + threadIdx.x * VEC; i < part.stop; i += step) {
        const Pack p = load(own + i);
        for (int k = 0; k < VEC; ++k) sum += p.v[k] * p.v[k];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) parts[offset + blockIdx.x] = sum;
}

extern "C" __global__ void norm_of_parts(const real* __restrict__ parts, real* __restrict__ norm,
                                         real* __restrict__ scale, long long n, real max_norm) {
    real sum = 0;
    for (long long i = threadIdx.x; i < n; i += blockDim.x) sum += parts[i];
    sum = sqrt(block_sum(sum));
    if (threadIdx.x) return;
    const real share = max_norm / (sum + real(1e-6));
    *norm = sum;
    *scale = share > 1 ? real(1) : share;  // NaN stays NaN
}

extern "C" __global__ void scaled(const __grid_constant__ Leaves<const real*> x,
                                  const __grid_constant__ Leaves<real*> y,
                                  const __grid_constant__ Leaves<long long> sizes,
                                  const __grid_constant__ Leaves<long long> firsts, long long share,
                                  const real* __restrict__ scale) {
    const Part part = part_of(sizes, firsts, share);
    const real* const from = x.at[part.leaf];
    real* const to = y.at[part.leaf];
    const real factor = *scale;
    const long long step = blockDim.x * VEC;
    for (long long i = part.start + threadIdx.x * VEC; i < part.stop; i += step) {
        Pack p = load(from + i);
        for (int k = 0; k < VEC; ++k) p.v[k] *= factor;
        store(to + i, p);
    }
}
