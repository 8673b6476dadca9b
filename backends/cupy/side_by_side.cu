// y = [x_0 | x_1 | ...]: matrices of as many rows beside each other in one, at most MOST of them.
//
// x_i: (N, widths_i), rows contiguous, `steps_i` elements from one to the next; y: (N, sum of widths),
// contiguous. A thread a pack of y, 256 of them a block; the grid is what all packs need. `ends` are
// where each matrix ends in a row of y; those that lists lack end there too. Widths and steps are
// multiples of a pack.
//
// Budget: side_by_side: 40 registers, 0 spilled, 0 shared
#include "common.cuh"

constexpr int MOST = 4;  // as in side_by_side.py

template <class T>
struct Several {
    T at[MOST];
};

extern "C" __global__ void side_by_side(const __grid_constant__ Several<const stored*> x,
                                        const __grid_constant__ Several<long long> ends,
                                        const __grid_constant__ Several<long long> steps,
                                        stored* __restrict__ y, long long size) {
    const long long i = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * VEC;
    if (i >= size) return;
    const long long row = i / ends.at[MOST - 1], column = i % ends.at[MOST - 1];
    int nth = 0;
    while (column >= ends.at[nth]) ++nth;
    const long long start = nth ? ends.at[nth - 1] : 0;
    store(y + i, load(x.at[nth] + row * steps.at[nth] + column - start));
}
