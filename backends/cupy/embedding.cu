// Rows of a table (V, D) at ids (N,), contiguous: y[n] = table[ids[n]], NaN where an id does not lie
// in [0, V): nobody looks at ids before, and nothing is read there. A thread a pack: grid
// N * D / (VEC * 256), block 256. The gradient is index_add's.
//
// Budget: embedding_forward: 32 registers, 0 spilled, 0 shared
#include "common.cuh"

extern "C" __global__ void embedding_forward(const stored* __restrict__ table,
                                             const long long* __restrict__ ids,
                                             stored* __restrict__ y, long long n, long long width,
                                             long long n_rows) {
    const long long i = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * VEC;
    if (i >= n) return;
    const long long id = ids[i / width];
    Pack p;
    if (id >= 0 && id < n_rows)
        p = load(table + id * width + i % width);
    else
        for (int k = 0; k < VEC; ++k) p.v[k] = not_a_number();
    store(y + i, p);
}
