// Parameters as a model computes with them: y = x rounded to two bytes, to the nearest, ties to even,
// over two lists of contiguous arrays. NaN stays NaN; what float16 cannot hold becomes infinite. A
// block of 256 threads has `share` elements of one array, a thread a pack in turn; the grid is what
// all arrays need (leaves.cuh).
//
// Budget: rounded: 40 registers, 0 spilled, 0 shared
#include "leaves.cuh"

extern "C" __global__ void rounded(const __grid_constant__ Leaves<const real*> x,
                                   const __grid_constant__ Leaves<stored*> y,
                                   const __grid_constant__ Leaves<long long> sizes,
                                   const __grid_constant__ Leaves<long long> firsts,
                                   long long share) {
    const Part part = part_of(sizes, firsts, share);
    const real* const from = x.at[part.leaf];
    stored* const to = y.at[part.leaf];
    const long long step = blockDim.x * VEC;
    for (long long i = part.start + threadIdx.x * VEC; i < part.stop; i += step)
        store(to + i, load(from + i));
}
