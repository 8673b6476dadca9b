// Sums over P of parts (K, P, D), contiguous, for each of K: out (K, D). The last of the K may have
// fewer: `total` is the number of rows of D in all. The second stage of the parameters' gradients, and
// both stages of a sum over rows: the order is fixed, so the result is the same in every run.
//
// A block sums 32 columns: its 8 warps take every eighth part, one warp adds up the eight.
// Grid: (D / 32) * K, block: 256.
//
// Budget: column_sums: 40 registers, 0 spilled, 2112 shared
#include "common.cuh"

extern "C" __global__ void column_sums(const stored* __restrict__ parts, real* __restrict__ out,
                                       long long n_parts, long long total, long long width) {
    __shared__ real sums[8][33];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const unsigned tiles = (width + 31) / 32;
    const long long k = blockIdx.x / tiles, first = k * n_parts;
    const long long column = blockIdx.x % tiles * 32ll + lane;
    const long long end = first + n_parts < total ? first + n_parts : total;
    real sum = 0;
    if (column < width)
        for (long long p = first + warp; p < end; p += 8) sum += parts[p * width + column];
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && column < width) {
        for (int i = 1; i < 8; ++i) sum += sums[i][lane];
        out[k * width + column] = sum;
    }
}
