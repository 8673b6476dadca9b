// Keys and values of one token more, in column `at` of what is kept of the tokens before: k (R, K) to
// keys (R, S, K), v (R, M) to values (R, S, M), all contiguous; R sequences and heads. at lies on the
// device; outside [0, S) nothing is written. A thread an element: grid R * (K + M) / 256, block 256.
//
// Budget: append: 32 registers, 0 spilled, 0 shared
#include "common.cuh"

extern "C" __global__ void append(const stored* __restrict__ k, const stored* __restrict__ v,
                                  stored* __restrict__ keys, stored* __restrict__ values,
                                  const long long* __restrict__ at, long long rows,
                                  long long columns, long long width, long long value_width) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    const long long column = *at, n_keys = rows * width;
    if (i >= n_keys + rows * value_width || column < 0 || column >= columns) return;
    const bool is_key = i < n_keys;
    if (!is_key) i -= n_keys;
    const long long n = is_key ? width : value_width, place = (i / n * columns + column) * n + i % n;
    (is_key ? keys : values)[place] = (is_key ? k : v)[i];
}
