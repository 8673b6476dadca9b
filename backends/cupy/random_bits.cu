// n random words in [0, 2^32) by philox.cuh, as 64-bit integers. A thread a block of four words:
// grid n / 1024, block 256.
//
// Budget: random_bits: 24 registers, 0 spilled, 0 shared
#include "philox.cuh"

extern "C" __global__ void random_bits(long long* __restrict__ out, long long n, long long key0,
                                       long long key1, long long site, long long step,
                                       const long long* __restrict__ on_device) {
    const long long block = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (4 * block >= n) return;
    const Words words = philox(block, site, step_of(step, on_device), key0, key1);
    for (int k = 0; k < 4; ++k)
        if (4 * block + k < n) out[4 * block + k] = words.v[k];
}
