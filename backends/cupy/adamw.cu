// One step of AdamW (arXiv:1711.05101) over n parameters p, gradients g and moments m, v, contiguous:
//
//   m' = beta1 m + (1 - beta1) g,  v' = beta2 v + (1 - beta2) g^2
//   p' = keep p - rate m' / (sqrt(v') / root + eps)
//
// keep = 1 - lr * weight_decay, rate = lr / (1 - beta1^t), root = sqrt(1 - beta2^t). The new arrays
// may be the old ones: each thread writes what it alone has read. A thread a pack: grid n / (VEC *
// 256), block 256.
//
// Budget: adamw: 48 registers, 0 spilled, 0 shared
#include "common.cuh"

extern "C" __global__ void adamw(const real* p, const real* __restrict__ g, const real* m,
                                 const real* v, real* new_p, real* new_m, real* new_v, long long n,
                                 real keep, real rate, real root, real beta1, real rest1,
                                 real beta2, real rest2, real eps) {
    const long long i = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * VEC;
    if (i >= n) return;
    Pack param = load(p + i), mean = load(m + i), square = load(v + i);
    const Pack grad = load(g + i);
    for (int k = 0; k < VEC; ++k) {
        mean.v[k] = beta1 * mean.v[k] + rest1 * grad.v[k];
        square.v[k] = beta2 * square.v[k] + rest2 * (grad.v[k] * grad.v[k]);
        param.v[k] = keep * param.v[k] - rate * mean.v[k] / (sqrt(square.v[k]) / root + eps);
    }
    store(new_p + i, param);
    store(new_m + i, mean);
    store(new_v + i, square);
}
