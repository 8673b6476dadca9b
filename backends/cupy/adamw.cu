// One step of AdamW (arXiv:1711.05101) over parameters p, gradients g and moments m, v, each a list
// of contiguous arrays:
//
//   m' = beta1 m + (1 - beta1) g,  v' = beta2 v + (1 - beta2) g^2
//   p' = keep p - rate m' / (sqrt(v') / root + eps)
//
// keep = 1 - lr * weight_decay, rate = lr / (1 - beta1^t), root = sqrt(1 - beta2^t), or the three numbers
// that `on_device` points to, as in a captured graph. The new arrays
// may be the old ones: each thread writes what it alone has read. A block of 256 threads has `share`
// elements of one array, a thread a pack in turn; the grid is what all arrays need (leaves.cuh).
//
// Budget: adamw: 64 registers, 0 spilled, 0 shared
#include "leaves.cuh"

extern "C" __global__ void adamw(
    const __grid_constant__ Leaves<const real*> p, const __grid_constant__ Leaves<const real*> g,
    const __grid_constant__ Leaves<const real*> m, const __grid_constant__ Leaves<const real*> v,
    const __grid_constant__ Leaves<real*> new_p, const __grid_constant__ Leaves<real*> new_m,
    const __grid_constant__ Leaves<real*> new_v, const __grid_constant__ Leaves<long long> sizes,
    const __grid_constant__ Leaves<long long> firsts, long long share,
    const real* __restrict__ on_device, real keep, real rate, real root, real beta1, real rest1, real beta2, real rest2, real eps) {
    if (on_device) {
        keep = on_device[0];
        rate = on_device[1];
        root = on_device[2];
    }
    const Part part = part_of(sizes, firsts, share);
    const int leaf = part.leaf;
    const long long step = blockDim.x * VEC;
    for (long long i = part.start + threadIdx.x * VEC; i < part.stop; i += step) {
        Pack param = load(p.at[leaf] + i), mean = load(m.at[leaf] + i), square = load(v.at[leaf] + i);
        const Pack grad = load(g.at[leaf] + i);
        for (int k = 0; k < VEC; ++k) {
            mean.v[k] = beta1 * mean.v[k] + rest1 * grad.v[k];
            square.v[k] = beta2 * square.v[k] + rest2 * grad.v[k] * grad.v[k];
            param.v[k] = keep * param.v[k] - rate * mean.v[k] / (sqrt(square.v[k]) / root + eps);
        }
        store(new_p.at[leaf] + i, param);
        store(new_m.at[leaf] + i, mean);
        store(new_v.at[leaf] + i, square);
    }
}
