// Dropout (arXiv:1207.0580, inverted) of n elements, contiguous: y = x / (1 - rate) where the word of
// philox.cuh at the element's place is at least `lowest` = rate * 2^32, else 0. Backward is the same
// on dy. A thread the four elements of a block of words: grid n / 1024, block 256.
//
// Budget: dropout: 40 registers, 0 spilled, 0 shared
#include "common.cuh"
#include "philox.cuh"

constexpr int STEP = VEC < 4 ? VEC : 4;

extern "C" __global__ void dropout(const stored* __restrict__ x, stored* __restrict__ y, long long n,
                                   real kept, long long lowest, long long key0, long long key1,
                                   long long site, long long step,
                                   const long long* __restrict__ on_device) {
    const long long block = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (4 * block >= n) return;
    const Words words = philox(block, site, step_of(step, on_device), key0, key1);
    for (int start = 0; start < 4; start += STEP) {
        const long long i = 4 * block + start;
        if (i >= n) return;
        Elements<real, STEP> p = load<STEP>(x + i);
        for (int k = 0; k < STEP; ++k)
            p.v[k] = words.v[start + k] >= (unsigned)lowest ? p.v[k] / kept : 0;
        store(y + i, p);
    }
}
