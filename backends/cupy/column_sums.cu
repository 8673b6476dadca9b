// Sums over P of parts (K, P, D), contiguous, for each of K: out (K, D). The last of the K may have
// fewer: `total` is the number of rows of D in all. The second stage of the parameters' gradients, and
// both stages of a sum over rows: the order is fixed, so the result is the same in every run.
//
// A block of W warps sums 32 columns: each warp takes every W-th part, one warp adds up the W sums.
// There are few blocks, so that the time is that of the reads which wait for each other.
// Grid: (D / 32) * K, block: 32 * W, W at most 32.
//
// Budget: column_sums: 40 registers, 0 spilled, 8448 shared
#include "common.cuh"

constexpr int MOST = 32;  // warps

extern "C" __global__ void column_sums(const stored* __restrict__ parts, real* __restrict__ out,
                                       long long n_parts, long long total, long long width) {
    __shared__ real sums[MOST][33];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const unsigned tiles = (width + 31) / 32;
    const long long k = blockIdx.x / tiles, first = k * n_parts;
    const long long column = blockIdx.x % tiles * 32ll + lane;
    const long long end = first + n_parts < total ? first + n_parts : total;
    real sum = 0;
    if (column < width)
        for (long long p = first + warp; p < end; p += warps) sum += parts[p * width + column];
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && column < width) {
        for (int i = 1; i < warps; ++i) sum += sums[i][lane];
        out[k * width + column] = sum;
    }
}
