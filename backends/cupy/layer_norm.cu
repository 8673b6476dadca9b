// Layer normalisation (arXiv:1607.06450) of the rows of x (N, D), contiguous; of s = x + addend where
// there is an addend, which has the gradient of x (residual.cuh).
//
//   y = (x - mean) * rstd * w + b,  rstd = 1 / sqrt(var + eps) or 1 / (sqrt(var) + eps)
//   dx = rstd * (dxhat - mean(dxhat) - xhat * slope) + ds,  xhat = (x - mean) * rstd,  dxhat = dy * w
//   slope = mean(dxhat * xhat), over 1 - eps * rstd where eps stands outside the root
//   dw = sum of dy * xhat over the rows,  db = sum of dy
//
// Forward: a block a row; the row is read from memory once, then from the cache: mean, then the
// squares around it (E[x^2] - mean^2 would cancel), then y. Where mean^2 is more than FAR times the
// variance, what the mean has lost by rounding is added and the squares are summed anew: a row of
// equal numbers gives exactly b. Backward: a block walks over rows gridDim apart; a thread's columns
// are the same in each, so it sums dw and db without a barrier, in shared memory where they fit, else
// in the block's row of `parts` (2 or 1, gridDim, D), which column_sums adds up. No atomics: the same
// grid gives the same bits. Blocks have a thread for each access of a row, up to 256.
//
// Budget: layer_norm_forward: 40 registers, 0 spilled, 768 shared
// Budget: layer_norm_backward: 56 registers, 0 spilled, 512 shared
#include "residual.cuh"

constexpr real FAR = 64;  // of mean^2, as in the NumPy backend's layer_norm.py

extern "C" __global__ void layer_norm_forward(
    const stored* x, const stored* __restrict__ addend, stored* s, const stored* __restrict__ w,
    const stored* __restrict__ b, stored* __restrict__ y, real* __restrict__ mean,
    real* __restrict__ rstd, long long width, real eps, long long inside) {
    const long long row = blockIdx.x;
    const int packs = width / VEC;
    const stored* const own = (addend ? s : x) + row * width;
    y += row * width;
    real sum = 0;
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        const Pack p = summed(x, addend, s, row * width + i * VEC);
        for (int k = 0; k < VEC; ++k) sum += p.v[k];
    }
    real m = block_sum(sum) / width, var = 0;
    for (int twice = 0; twice < 2; ++twice) {
        real sums[2] = {0, 0};  // of x - m, of its squares
        for (int i = threadIdx.x; i < packs; i += blockDim.x) {
            const Pack p = load(own + i * VEC);
            for (int k = 0; k < VEC; ++k) {
                const real centred = p.v[k] - m;
                sums[0] += centred;
                sums[1] += centred * centred;
            }
        }
        block_sum(sums);
        var = sums[1] / width;
        if (twice || !(FAR * var < m * m)) break;
        m += sums[0] / width;
    }
    const real r = inside ? 1 / sqrt(var + eps) : 1 / (sqrt(var) + eps);
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        const Pack p = load(own + i * VEC), gain = load(w + i * VEC);
        Pack out;
        for (int k = 0; k < VEC; ++k) out.v[k] = (p.v[k] - m) * r * gain.v[k];
        if (b) {
            const Pack shift = load(b + i * VEC);
            for (int k = 0; k < VEC; ++k) out.v[k] += shift.v[k];
        }
        store(y + i * VEC, out);
    }
    if (threadIdx.x == 0) {
        mean[row] = m;
        rstd[row] = r;
    }
}

extern "C" __global__ void layer_norm_backward(
    const stored* __restrict__ x, const stored* __restrict__ w, const real* __restrict__ mean,
    const real* __restrict__ rstd, const stored* __restrict__ dy, const stored* __restrict__ ds,
    stored* __restrict__ dx, real* parts, long long rows, long long width, real eps_outside,
    long long has_b, long long in_shared) {
    SHARED_BUFFER(real, buffer);
    const int packs = width / VEC;
    real* const dw_part = parts + blockIdx.x * width;
    real* const db_part = dw_part + gridDim.x * width;  // only where has_b
    real* const dw = in_shared ? buffer : dw_part;
    real* const db = in_shared ? buffer + width : db_part;
    const Pack zeros = {};
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        store(dw + i * VEC, zeros);
        if (has_b) store(db + i * VEC, zeros);
    }
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const stored* const x_row = x + row * width;
        const stored* const dy_row = dy + row * width;
        const real m = mean[row], r = rstd[row];
        real sums[2] = {0, 0};  // of dxhat, of dxhat * xhat
        for (int i = threadIdx.x; i < packs; i += blockDim.x) {
            const Pack p = load(x_row + i * VEC), g = load(dy_row + i * VEC), gain = load(w + i * VEC);
            for (int k = 0; k < VEC; ++k) {
                const real dxhat = g.v[k] * gain.v[k];
                sums[0] += dxhat;
                sums[1] += dxhat * ((p.v[k] - m) * r);
            }
        }
        block_sum(sums);
        const real middle = sums[0] / width;
        const real share = 1 - eps_outside * r;  // 0 in a constant row, whose xhat is 0 too
        const real slope = sums[1] / width / (share > 0 ? share : real(1));
        for (int i = threadIdx.x; i < packs; i += blockDim.x) {
            const Pack p = load(x_row + i * VEC), g = load(dy_row + i * VEC), gain = load(w + i * VEC);
            Pack out, dw_sum = load(dw + i * VEC);
            for (int k = 0; k < VEC; ++k) {
                const real xhat = (p.v[k] - m) * r;
                out.v[k] = r * (g.v[k] * gain.v[k] - middle - xhat * slope);
                dw_sum.v[k] += g.v[k] * xhat;
            }
            store_gradient(dx, ds, row * width + i * VEC, out);
            store(dw + i * VEC, dw_sum);
            if (has_b) {
                Pack db_sum = load(db + i * VEC);
                for (int k = 0; k < VEC; ++k) db_sum.v[k] += g.v[k];
                store(db + i * VEC, db_sum);
            }
        }
    }
    if (!in_shared) return;
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        store(dw_part + i * VEC, load(dw + i * VEC));
        if (has_b) store(db_part + i * VEC, load(db + i * VEC));
    }
}
