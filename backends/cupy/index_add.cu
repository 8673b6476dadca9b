// out (V, D) += rows of y (N, D) at ids (N,): the gradient of an embedding. D elements of a row lie
// together; y is read by its row stride, in elements. Rows with an id outside [0, V) are left out.
//
// add_rows: atomic additions, in no fixed order. A thread an element. Grid: N * D / 256.
// add_sorted: ids sorted, order[n] the place of the nth in y: a block sums one id's rows for 256
// columns, in the order in which they stand in y, so the result is the same in every run; blocks
// that do not stand at the first of an id's rows have nothing to do. Grid: (N, D / 256).
//
// Budget: add_rows: 16 registers, 0 spilled, 0 shared
// Budget: add_sorted: 24 registers, 0 spilled, 0 shared
#include "common.cuh"

extern "C" __global__ void add_rows(const stored* __restrict__ y, const long long* __restrict__ ids,
                                    real* out, long long rows, long long width, long long stride,
                                    long long n_ids) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= rows * width) return;
    const long long row = i / width, column = i % width, id = ids[row];
    if (id < 0 || id >= n_ids) return;
    atomicAdd(out + id * width + column, real(y[row * stride + column]));
}

extern "C" __global__ void add_sorted(const stored* __restrict__ y, const long long* __restrict__ ids,
                                      const long long* __restrict__ order, real* out,
                                      long long rows, long long width, long long stride,
                                      long long n_ids) {
    const long long first = blockIdx.x, id = ids[first];
    const long long column = blockIdx.y * (long long)blockDim.x + threadIdx.x;
    if (column >= width || (first > 0 && ids[first - 1] == id)) return;
    if (id < 0 || id >= n_ids) return;
    real sum = 0;
    for (long long n = first; n < rows && ids[n] == id; ++n) sum += y[order[n] * stride + column];
    out[id * width + column] += sum;
}
