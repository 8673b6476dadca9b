// Cross-entropy of logits (N, V), contiguous, against targets (N,): for each token
//
//   loss = (1 - a) (lse - x[target]) + a (lse - mean(x)) + z lse^2,  lse = log(total) + top
//   dlogits = factor * (exp(x - top) / total (1 + 2 z lse) - (1 - a) onehot(target) - a / V)
//   top = max(x),  total = sum(exp(x - top))
//
// top is taken off x first: lse - x would lose log(total) where top is large.
//
// a: smoothing, z: z_loss; ignored tokens give 0, whatever their logits hold; a target outside [0, V)
// gives NaN, in the loss and in its row of dlogits, and nothing is read there. A block a token: the
// maximum, then the sums around it, the row from memory once. token_total adds the tokens up in one
// block, in a fixed order, so that no count passes through the host; scale: 1 / number of tokens
// that are kept, for the mean. dlogits may be logits: each thread writes what it alone has read.
// Grid: N; token_total: 1.
//
// Budget: cross_entropy_forward: 56 registers, 0 spilled, 768 shared
// Budget: token_total: 40 registers, 0 spilled, 512 shared
// Budget: cross_entropy_backward: 56 registers, 0 spilled, 0 shared
#include "common.cuh"

extern "C" __global__ void cross_entropy_forward(const stored* __restrict__ logits,
                                                 const long long* __restrict__ targets,
                                                 real* __restrict__ loss, real* __restrict__ tops,
                                                 real* __restrict__ totals,
                                                 long long n_classes, long long ignores,
                                                 long long ignore_index, real smoothing,
                                                 real z_loss) {
    const long long token = blockIdx.x, target = targets[token];
    if (ignores && target == ignore_index) {
        if (threadIdx.x == 0) loss[token] = tops[token] = totals[token] = 0;
        return;
    }
    if (target < 0 || target >= n_classes) {
        if (threadIdx.x == 0) loss[token] = tops[token] = totals[token] = not_a_number();
        return;
    }
    logits += token * n_classes;
    const int packs = n_classes / VEC;
    real top = -infinity();
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        const Pack p = load(logits + i * VEC);
        for (int k = 0; k < VEC; ++k) top = larger(top, p.v[k]);
    }
    top = block_max(top);
    real sums[2] = {0, 0};  // of exp(x - top), of x - top
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        const Pack p = load(logits + i * VEC);
        for (int k = 0; k < VEC; ++k) {
            sums[0] += exp(p.v[k] - top);
            sums[1] += p.v[k] - top;
        }
    }
    block_sum(sums);
    if (threadIdx.x) return;
    const real log_total = log(sums[0]), lse = log_total + top;
    real result = log_total;
    if (smoothing < 1) result -= (1 - smoothing) * (logits[target] - top);  // 0 * -inf would be NaN
    if (smoothing > 0) result -= smoothing * (sums[1] / n_classes);
    loss[token] = result + z_loss * lse * lse;
    tops[token] = top;
    totals[token] = sums[0];
}

extern "C" __global__ void token_total(const real* __restrict__ loss,
                                       const long long* __restrict__ targets,
                                       real* __restrict__ total, real* __restrict__ scale,
                                       long long n_tokens, long long ignores,
                                       long long ignore_index, long long mean) {
    real sums[2] = {0, 0};  // losses, tokens that are kept
    for (long long i = threadIdx.x; i < n_tokens; i += blockDim.x) {
        sums[0] += loss[i];
        sums[1] += !(ignores && targets[i] == ignore_index);
    }
    block_sum(sums);
    if (threadIdx.x) return;
    *scale = mean ? 1 / (sums[1] > 1 ? sums[1] : real(1)) : real(1);
    *total = sums[0] * *scale;
}

// dloss and scale: one number for all tokens (step 0), or one each (step 1; scale null: 1).
extern "C" __global__ void cross_entropy_backward(const stored* logits,
                                                  const long long* __restrict__ targets,
                                                  const real* __restrict__ tops,
                                                  const real* __restrict__ totals,
                                                  const real* __restrict__ dloss,
                                                  const real* __restrict__ scale, stored* dlogits,
                                                  long long n_classes, long long ignores,
                                                  long long ignore_index, real smoothing,
                                                  real z_loss, long long dloss_step) {
    const long long token = blockIdx.x, target = targets[token];
    logits += token * n_classes;
    dlogits += token * n_classes;
    const int packs = n_classes / VEC;
    if (ignores && target == ignore_index) {
        const Pack zeros = {};
        for (int i = threadIdx.x; i < packs; i += blockDim.x) store(dlogits + i * VEC, zeros);
        return;
    }
    const real top = tops[token], total = totals[token];
    const real slope = (1 + 2 * z_loss * (log(total) + top)) / total;
    const real factor = dloss[token * dloss_step] * (scale ? *scale : real(1));
    const real even = smoothing / n_classes;
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        Pack p = load(logits + i * VEC);
        for (int k = 0; k < VEC; ++k) {
            const real hit = i * VEC + k == target ? 1 - smoothing : real(0);
            p.v[k] = factor * (exp(p.v[k] - top) * slope - hit - even);
        }
        store(dlogits + i * VEC, p);
    }
}
