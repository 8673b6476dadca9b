// Root-mean-square normalisation (arXiv:1910.07467) of the rows of x (N, D), contiguous; of s = x +
// addend where there is an addend, which has the gradient of x (residual.cuh).
//
//   y = x * rstd * (w + offset),  rstd = 1 / sqrt(mean(x^2) + eps);  w null: a gain of 1
//   dx = rstd * (dxhat - xhat * mean(dxhat * xhat)) + ds,  xhat = x * rstd,  dxhat = dy * (w + offset)
//   dw = sum of dy * xhat over the rows
//
// Blocks, rows and the sums of dw as in layer_norm.cu: a block a row forward; backward a block walks
// over rows gridDim apart and sums dw in shared memory, or in its row of `parts` (gridDim, D).
//
// Budget: rms_norm_forward: 32 registers, 0 spilled, 256 shared
// Budget: rms_norm_backward: 40 registers, 0 spilled, 256 shared
// Budget in two bytes: rms_norm_forward: 40 registers, 0 spilled, 256 shared
// Budget in two bytes: rms_norm_backward: 48 registers, 0 spilled, 256 shared
#include "residual.cuh"

__device__ __forceinline__ Pack gains(const stored* w, int i, real offset) {
    Pack gain;
    if (w) {
        gain = load(w + i * VEC);
        for (int k = 0; k < VEC; ++k) gain.v[k] += offset;
    } else {
        for (int k = 0; k < VEC; ++k) gain.v[k] = 1;
    }
    return gain;
}

extern "C" __global__ void rms_norm_forward(
    const stored* x, const stored* __restrict__ addend, stored* s, const stored* __restrict__ w,
    stored* __restrict__ y, real* __restrict__ rstd, long long width, real eps, real offset) {
    const long long row = blockIdx.x;
    const int packs = width / VEC;
    const stored* const own = (addend ? s : x) + row * width;
    y += row * width;
    real squares = 0;
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        const Pack p = summed(x, addend, s, row * width + i * VEC);
        for (int k = 0; k < VEC; ++k) squares += p.v[k] * p.v[k];
    }
    const real r = 1 / sqrt(block_sum(squares) / width + eps);
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        Pack p = load(own + i * VEC);
        const Pack gain = gains(w, i, offset);
        for (int k = 0; k < VEC; ++k) p.v[k] = p.v[k] * r * gain.v[k];
        store(y + i * VEC, p);
    }
    if (threadIdx.x == 0) rstd[row] = r;
}

extern "C" __global__ void rms_norm_backward(const stored* __restrict__ x,
                                             const stored* __restrict__ w,
                                             const real* __restrict__ rstd,
                                             const stored* __restrict__ dy,
                                             const stored* __restrict__ ds,
                                             stored* __restrict__ dx,
                                             real* parts, long long rows, long long width,
                                             real offset, long long in_shared) {
    SHARED_BUFFER(real, buffer);
    const int packs = width / VEC;
    real* const part = parts + blockIdx.x * width;  // only where there is w
    real* const dw = in_shared ? buffer : part;
    const Pack zeros = {};
    if (w)
        for (int i = threadIdx.x; i < packs; i += blockDim.x) store(dw + i * VEC, zeros);
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const stored* const x_row = x + row * width;
        const stored* const dy_row = dy + row * width;
        const real r = rstd[row];
        real sum = 0;  // of dxhat * xhat
        for (int i = threadIdx.x; i < packs; i += blockDim.x) {
            const Pack p = load(x_row + i * VEC), g = load(dy_row + i * VEC);
            const Pack gain = gains(w, i, offset);
            for (int k = 0; k < VEC; ++k) sum += g.v[k] * gain.v[k] * (p.v[k] * r);
        }
        const real slope = block_sum(sum) / width;
        for (int i = threadIdx.x; i < packs; i += blockDim.x) {
            const Pack p = load(x_row + i * VEC), g = load(dy_row + i * VEC);
            const Pack gain = gains(w, i, offset);
            Pack out;
            for (int k = 0; k < VEC; ++k)
                out.v[k] = r * (g.v[k] * gain.v[k] - p.v[k] * r * slope);
            store_gradient(dx, ds, row * width + i * VEC, out);
            if (w) {
                Pack dw_sum = load(dw + i * VEC);
                for (int k = 0; k < VEC; ++k) dw_sum.v[k] += g.v[k] * (p.v[k] * r);
                store(dw + i * VEC, dw_sum);
            }
        }
    }
    if (w && in_shared)
        for (int i = threadIdx.x; i < packs; i += blockDim.x)
            store(part + i * VEC, load(dw + i * VEC));
}
