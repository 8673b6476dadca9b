// Cross-entropy of logits (N, V) against targets (N,), rows `step` elements apart, step >= V: for
// each token
//
//   loss = (1 - a) (lse - x[target]) + a (lse - mean(x)) + z lse^2,  lse = log(total) + top
//   dlogits = factor * (exp(x - top) / total (1 + 2 z lse) - (1 - a) onehot(target) - a / V)
//   top = max(x),  total = sum(exp(x - top))
//
// top is taken off x first: lse - x would lose log(total) where top is large.
//
// a: smoothing, z: z_loss; ignored tokens give 0, whatever their logits hold; a target outside [0, V)
// gives NaN, in the loss and in its row of dlogits, and nothing is read there. What a row holds from
// column V on is not read, and dlogits are 0 there: products may take whole rows.
//
// A block a token. Forward reads the row once: each thread keeps a maximum and sums around it, which
// are joined at the end. If dlogits is given, forward writes them too, for factor 1: it reads the row
// again, last columns first, while the L2 cache still holds them. dlogits may be logits: each thread
// writes what it alone has read. tops and totals are for a backward, and may be null.
// token_total adds the tokens up in one block, in a fixed order, so that no count passes through the
// host; scale: 1 / number of tokens that are kept, for the mean.
// Grid: N; token_total: 1.
//
// Budget: cross_entropy_forward: 56 registers, 0 spilled, 768 shared
// Budget: token_total: 40 registers, 0 spilled, 512 shared
// Budget: cross_entropy_backward: 56 registers, 0 spilled, 0 shared
// Budget in two bytes: cross_entropy_forward: 40 registers, 0 spilled, 768 shared
// Budget in two bytes: cross_entropy_backward: 40 registers, 0 spilled, 0 shared
#include "common.cuh"

// Of what one thread has read of a row.
struct Sums {
    real top = -infinity();  // the maximum; of NaN, which shows in `total`, it knows nothing
    real base = 0;           // top, or 0 where that is -inf: -inf - -inf would be NaN
    real total = 0;          // of exp(x - base)
    real apart = 0;          // of x - base
    int count = 0;

    template <int N>
    __device__ __forceinline__ void add(const Elements<real, N>& x) {
        real high = x.v[0];
        for (int k = 1; k < N; ++k) high = fmax(high, x.v[k]);
        if (high > top) {
            total *= exp(top - high);
            apart += count * (base - high);
            top = base = high;
        }
        for (int k = 0; k < N; ++k) {
            total += exp(x.v[k] - base);
            apart += x.v[k] - base;
        }
        count += N;
    }

    // Over all threads of the block: the maximum, and sums around it.
    __device__ __forceinline__ void join() {
        const real own = top;
        top = block_max(own);
        real sums[2] = {total * exp(own - top), apart + count * (base - top)};
        block_sum(sums);
        total = sums[0];
        apart = sums[1];
    }
};

// What makes a row of dlogits of a row of logits.
struct Slope {
    real top, slope, even, hit, factor;
    long long target;

    __device__ __forceinline__ Slope(real top, real total, long long target, long long n_classes,
                                     real smoothing, real z_loss, real factor)
        : top(top), slope((1 + 2 * z_loss * (log(total) + top)) / total),
          even(smoothing / n_classes), hit(1 - smoothing), factor(factor), target(target) {}

    // Of the columns from i on.
    template <int N>
    __device__ __forceinline__ Elements<real, N> operator()(Elements<real, N> x, int i) const {
        for (int k = 0; k < N; ++k) x.v[k] = exp(x.v[k] - top) * slope - even;
        if (i <= target && target < i + N)
            for (int k = 0; k < N; ++k)
                if (i + k == target) x.v[k] -= hit;
        for (int k = 0; k < N; ++k) x.v[k] *= factor;
        return x;
    }
};

__device__ __forceinline__ void write_zeros(stored* row, int step) {
    const Pack zeros = {};
    for (int i = threadIdx.x; i < step / VEC; i += blockDim.x) store(row + i * VEC, zeros);
}

// A row of `step` elements; rows that are read in packs are made of whole packs.
__device__ __forceinline__ void write_slopes(const stored* from, stored* to, const Slope& slopes,
                                             int n_classes, int step) {
    const int packs = n_classes / VEC, threads = blockDim.x, thread = threadIdx.x;
    for (int i = packs * VEC + thread; i < step; i += threads) {  // what no whole pack holds
        Elements<real, 1> x = {};
        if (i < n_classes) x = slopes(load<1>(from + i), i);
        store(to + i, x);
    }
    const int last = thread + ((packs - 1 - thread + threads) / threads - 1) * threads;
    for (int i = last; i >= 0; i -= threads)
        store(to + i * VEC, slopes(load(from + i * VEC), i * VEC));
}

extern "C" __global__ void cross_entropy_forward(const stored* logits,
                                                 const long long* __restrict__ targets,
                                                 real* __restrict__ loss, real* __restrict__ tops,
                                                 real* __restrict__ totals, stored* dlogits,
                                                 long long n_classes, long long step,
                                                 long long ignores, long long ignore_index,
                                                 real smoothing, real z_loss) {
    const long long token = blockIdx.x, target = targets[token];
    logits += token * step;
    if (dlogits) dlogits += token * step;
    Sums sums;
    real result = 0;
    if (ignores && target == ignore_index) {
        sums.top = 0;
        if (dlogits) write_zeros(dlogits, step);
    } else if (target < 0 || target >= n_classes) {
        sums.top = sums.total = result = not_a_number();
    } else {
        const int packs = n_classes / VEC;
        for (int i = threadIdx.x; i < packs; i += blockDim.x) sums.add(load(logits + i * VEC));
        for (int i = packs * VEC + threadIdx.x; i < n_classes; i += blockDim.x)
            sums.add(load<1>(logits + i));
        const real hit = logits[target];
        sums.join();
        const real log_total = log(sums.total), lse = log_total + sums.top;
        result = log_total + z_loss * lse * lse;
        if (smoothing < 1) result -= (1 - smoothing) * (hit - sums.top);  // 0 * -inf would be NaN
        if (smoothing > 0) result -= smoothing * (sums.apart / n_classes);
    }
    if (threadIdx.x == 0) {
        loss[token] = result;
        if (tops) tops[token] = sums.top;
        if (totals) totals[token] = sums.total;
    }
    if (!dlogits || (ignores && target == ignore_index)) return;
    __syncthreads();  // all have read the target's logit
    const Slope slopes(sums.top, sums.total, target, n_classes, smoothing, z_loss, real(1));
    write_slopes(logits, dlogits, slopes, n_classes, step);
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

// dloss and scale: one number for all tokens (dloss_step 0), or one each (1; scale null: 1).
extern "C" __global__ void cross_entropy_backward(const stored* logits,
                                                  const long long* __restrict__ targets,
                                                  const real* __restrict__ tops,
                                                  const real* __restrict__ totals,
                                                  const real* __restrict__ dloss,
                                                  const real* __restrict__ scale, stored* dlogits,
                                                  long long n_classes, long long step,
                                                  long long ignores, long long ignore_index,
                                                  real smoothing, real z_loss,
                                                  long long dloss_step) {
    const long long token = blockIdx.x, target = targets[token];
    logits += token * step;
    dlogits += token * step;
    if (ignores && target == ignore_index) return write_zeros(dlogits, step);
    const real factor = dloss[token * dloss_step] * (scale ? *scale : real(1));
    const Slope slopes(tops[token], totals[token], target, n_classes, smoothing, z_loss, factor);
    write_slopes(logits, dlogits, slopes, n_classes, step);
}
