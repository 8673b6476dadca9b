// Rotary position embedding (arXiv:2104.09864): pairs of channels (a, b) of x (B, H, T, K) are
// turned to (a cos - b sin, b cos + a sin); the K - 2 * half channels behind them pass through.
// cos, sin: (T, half), or (B, T, half). A pair is (i, i + half), or, interleaved, (2i, 2i + 1).
// Backward is the same with sign = -1.
//
// x is read by its strides, in elements: the heads of a packed product need no copy. y lies as (B, H,
// T, K), or, by_token, as (B, T, H, K), and rows are taken in the order of y. A block has blockDim.y
// rows of blockDim.x threads; a thread turns the pairs threadIdx.x, threadIdx.x + blockDim.x, ... of
// its row. Grid: B * H * T / blockDim.y.
//
// Budget: rope: 40 registers, 0 spilled, 0 shared
#include "common.cuh"

extern "C" __global__ void rope(const stored* __restrict__ x, const real* __restrict__ cosines,
                                const real* __restrict__ sines, stored* __restrict__ y,
                                long long rows, long long heads, long long length, long long width,
                                long long half, long long stride_b, long long stride_h,
                                long long stride_t, long long stride_k, long long table_stride,
                                long long by_token, long long interleaved, long long sign) {
    const long long row = blockIdx.x * (long long)blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const long long inner = by_token ? heads : length, outer = by_token ? length : heads;
    const unsigned in = row % inner, above = row / inner, out = above % outer, b = above / outer;
    const unsigned h = by_token ? in : out, t = by_token ? out : in;
    const stored* const from = x + b * stride_b + h * stride_h + t * stride_t;
    const long long table = b * table_stride + t * half;
    stored* const to = y + row * width;
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        const int first = interleaved ? 2 * i : i, second = interleaved ? 2 * i + 1 : i + half;
        const real c = cosines[table + i], s = sign * sines[table + i];
        const real a = from[first * stride_k], z = from[second * stride_k];
        to[first] = a * c - z * s;
        to[second] = z * c + a * s;
    }
    for (int i = 2 * half + threadIdx.x; i < width; i += blockDim.x) to[i] = from[i * stride_k];
}
