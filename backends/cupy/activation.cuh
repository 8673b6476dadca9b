// The activations, each with its derivative, by name; ACTIVATION chooses one. Formulas and limits
// are those of xformer/ops: 0 at -inf, NaN stays NaN.
#include "common.cuh"

constexpr real FAR = 1000;       // sigmoid and Phi are 0 or 1 there, to rounding
constexpr real FAR_GELU = 100;
constexpr real CUBIC = 0.044715;
constexpr real SCALE = 0.79788456080286535588;       // sqrt(2 / pi)
constexpr real ROOT_HALF = 0.70710678118654752440;
constexpr real DENSITY = 0.39894228040143267794;     // 1 / sqrt(2 pi)
constexpr real ERF_SLOPE = 1.12837916709551257390;   // 2 / sqrt(pi)
constexpr real QUICK = 1.702;

// The exponent is never positive.
__device__ __forceinline__ real stable_sigmoid(real x) {
    const real e = exp(-(x < 0 ? -x : x));
    return (x >= 0 ? real(1) : e) / (1 + e);
}
__device__ __forceinline__ real at_least(real x, real low) { return x < low ? low : x; }

__device__ __forceinline__ real act_relu(real x) { return at_least(x, 0); }
__device__ __forceinline__ real d_relu(real x) { return x > 0 ? 1 : 0; }

__device__ __forceinline__ real act_relu_squared(real x) {
    const real y = at_least(x, 0);
    return y * y;
}
__device__ __forceinline__ real d_relu_squared(real x) { return 2 * at_least(x, 0); }

__device__ __forceinline__ real act_sigmoid(real x) { return stable_sigmoid(x); }
__device__ __forceinline__ real d_sigmoid(real x) {
    const real s = stable_sigmoid(x);
    return s * (1 - s);
}

__device__ __forceinline__ real act_tanh(real x) { return tanh(x); }
__device__ __forceinline__ real d_tanh(real x) {
    const real y = tanh(x);
    return 1 - y * y;
}

__device__ __forceinline__ real act_erf(real x) { return erf(x); }
__device__ __forceinline__ real d_erf(real x) {
    x = clip(x, -30, 30);
    return ERF_SLOPE * exp(-x * x);
}

__device__ __forceinline__ real act_silu(real x) { return at_least(x, -FAR) * stable_sigmoid(x); }
__device__ __forceinline__ real d_silu(real x) {
    x = clip(x, -FAR, FAR);
    const real s = stable_sigmoid(x);
    return s * (1 + x * (1 - s));
}

__device__ __forceinline__ real act_quick_gelu(real x) {
    return at_least(x, -FAR) * stable_sigmoid(QUICK * clip(x, -FAR, FAR));
}
__device__ __forceinline__ real d_quick_gelu(real x) { return d_silu(QUICK * clip(x, -FAR, FAR)); }

__device__ __forceinline__ real act_gelu(real x) {
    const real phi = real(0.5) * (1 + erf(clip(x, -FAR_GELU, FAR_GELU) * ROOT_HALF));
    return at_least(x, -FAR_GELU) * phi;
}
__device__ __forceinline__ real d_gelu(real x) {
    x = clip(x, -FAR_GELU, FAR_GELU);
    const real phi = real(0.5) * (1 + erf(x * ROOT_HALF));
    return phi + x * DENSITY * exp(real(-0.5) * x * x);
}

__device__ __forceinline__ real phi_tanh(real x) {
    return stable_sigmoid(2 * SCALE * x * (1 + CUBIC * x * x));
}
__device__ __forceinline__ real act_gelu_tanh(real x) {
    return at_least(x, -FAR_GELU) * phi_tanh(clip(x, -FAR_GELU, FAR_GELU));
}
__device__ __forceinline__ real d_gelu_tanh(real x) {
    x = clip(x, -FAR_GELU, FAR_GELU);
    const real phi = phi_tanh(x);
    return phi + x * 2 * phi * (1 - phi) * SCALE * (1 + 3 * CUBIC * x * x);
}

#define JOINED(a, b) a##b
#define NAMED(prefix, name) JOINED(prefix, name)
#define ACT(x) NAMED(act_, ACTIVATION)(x)
#define D_ACT(x) NAMED(d_, ACTIVATION)(x)
