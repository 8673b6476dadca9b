// Activations, elementwise over n elements, contiguous: y = ACT(x); dx = dy * ACT'(x), by the
// formulas of activation.cuh. A thread a pack: grid n / (VEC * 256), block 256.
//
// Budget in two bytes: activation_forward: 40 registers, 0 spilled, 0 shared
// Budget: activation_forward: 32 registers, 0 spilled, 0 shared
// Budget: activation_backward: 40 registers, 0 spilled, 0 shared
#include "activation.cuh"

extern "C" __global__ void activation_forward(const stored* __restrict__ x, stored* __restrict__ y,
                                              long long n) {
    const long long i = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * VEC;
    if (i >= n) return;
    Pack p = load(x + i);
    for (int k = 0; k < VEC; ++k) p.v[k] = ACT(p.v[k]);
    store(y + i, p);
}

extern "C" __global__ void activation_backward(const stored* __restrict__ x,
                                               const stored* __restrict__ dy, stored* __restrict__ dx,
                                               long long n) {
    const long long i = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * VEC;
    if (i >= n) return;
    const Pack p = load(x + i);
    Pack g = load(dy + i);
    for (int k = 0; k < VEC; ++k) g.v[k] *= D_ACT(p.v[k]);
    store(dx + i, g);
}
