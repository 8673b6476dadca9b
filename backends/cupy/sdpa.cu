// Scaled dot-product attention (arXiv:1706.03762) without its scores in memory (arXiv:2205.14135).
//
//   scores = scale q k^T, or softcap tanh(scale q k^T / softcap); + bias; -inf for forbidden keys
//   e = exp(scores - top),  total = sum(e) + exp(sink - top),  ctx = (e * kept) v / (total keep)
//
// q (B, H, T, K), k (B, G, S, K), v (B, G, S, M) by their strides; ctx as (B, T, H, M), top and
// total (B, H, T), contiguous. A query that sees no key has total 1, ctx 0. Tiles, and which thread
// does what: attention_tiles.cuh.
//
// sdpa_forward: a block a tile of queries of a head, the last queries first (they see most keys);
// it walks over the tiles of keys that any of them sees, top rising on the way (what was summed
// before is scaled down). Where queries are few (FEW), it walks over `split` keys only, and what it
// has summed goes to parts (n_splits, ...), at most 64, which sdpa_combine puts together: a block
// a query. A part whose keys a mask hides from all of them is not read: padding, and what comes
// behind the text in a cache of fixed columns.
// Grids: B * H * tiles * n_splits; B * H * T. Blocks: 128; any.
//
// Budget: sdpa_forward: 255 registers, 0 spilled, 0 shared
// Budget: sdpa_combine: 56 registers, 0 spilled, 512 shared
#include "philox.cuh"
#define WIDE 1
#define OWN_BYTES (32 << 10)
#include "common.cuh"
#include "attention_tiles.cuh"

#if FEW
using summed = real;  // parts, which are put together or rounded afterwards
#else
using summed = stored;
#endif

// What a thread has of the softmax of its queries: total of its own keys alone.
struct Sums {
    real top[RM], total[RM], ctx[RM][RW];
};

__device__ __forceinline__ void drop(real (&s)[RM][RN], unsigned bits) {
#pragma unroll
    for (int a = 0; a < RM; ++a)
#pragma unroll
        for (int c = 0; c < RN; ++c)
            if (!(bits >> (a * RN + c) & 1)) s[a][c] = 0;
}

// Scores s of a tile go into the sums, their exponentials into s.
__device__ __forceinline__ void take_in(Sums& sums, real (&s)[RM][RN]) {
#pragma unroll
    for (int a = 0; a < RM; ++a) {
        real top = sums.top[a];
#pragma unroll
        for (int c = 0; c < RN; ++c) top = larger(top, s[a][c]);
#pragma unroll
        for (int offset = TX / 2; offset > 0; offset /= 2)
            top = larger(top, __shfl_xor_sync(0xffffffffu, top, offset));
        const real shift = top == -infinity() ? real(0) : top;
        const real decay = exp(sums.top[a] - shift);
        sums.top[a] = top;
        sums.total[a] *= decay;
#pragma unroll
        for (int c = 0; c < RN; ++c) {
            s[a][c] = exp(s[a][c] - shift);
            sums.total[a] += s[a][c];
        }
#pragma unroll
        for (int n = 0; n < RW; ++n) sums.ctx[a][n] *= decay;
    }
}

// Where the sums of query i go: ctx, top and total of it, of the part's own.
struct Place {
    summed* ctx;
    real *top, *total;
};

__device__ __forceinline__ void write(const Attention& at, Sums& sums, int i0, bool whole,
                                      Place first, long long step) {
#pragma unroll
    for (int a = 0; a < RM; ++a) {
        real top = sums.top[a], total = sums.total[a], factor = 1;
#pragma unroll
        for (int offset = TX / 2; offset > 0; offset /= 2)
            total += __shfl_xor_sync(0xffffffffu, total, offset);
        if (whole) {
            if (total == 0) top = 0, total = 1;
            factor = 1 / (total * at.keep);
        }
        const int i = i0 + a;
        if (i >= at.queries) continue;
        store_row(first.ctx + i * step, sums.ctx[a], at.value_width, at.packed, factor);
        if (thread_x() == 0) {
            first.top[i] = top;
            first.total[i] = total;
        }
    }
}

// Whether some of queries [i0, i1) sees some of keys [j0, j1): each warp looks at all of them.
__device__ __forceinline__ bool sees_any(const Attention& at, int b, int h, int i0, int i1, int j0,
                                         int j1) {
    bool any = false;
    for (int i = i0; i < i1; ++i)
        for (int j = j0 + threadIdx.x % 32; j < j1; j += 32) any |= at.sees(b, h, i, j);
    return __any_sync(0xffffffffu, any);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    sdpa_forward(ATTENTION_PARAMETERS, summed* __restrict__ ctx, real* __restrict__ tops,
                 real* __restrict__ totals, long long n_splits, long long split) {
    const Attention at = ATTENTION;
    SHARED_BUFFER(real, q_tile);
    real* const k_tile = q_tile + OWN * STRIDE;
    real* const v_tile = k_tile + OTHER * STRIDE;
    real* const weights = v_tile + OTHER * STRIDE;

    const int tiles = (at.queries + OWN - 1) / OWN, part = blockIdx.x % n_splits;
    const long long task = blockIdx.x / n_splits, head = task / tiles;
    const int b = head / at.heads, h = head % at.heads, g = at.group(h);
    const int start = (tiles - 1 - task % tiles) * OWN, end = least(start + OWN, at.queries);
    const int i0 = start + thread_y() * RM;
    const int warp_start = start + threadIdx.x / 32 * 4 * RM, warp_end = warp_start + 4 * RM;
    const int low = most(at.first_key(start) / OTHER * OTHER, part * split);
    int high = least(at.end_of_keys(end), (part + 1) * split);
#if FEW
    if (at.mask && !sees_any(at, b, h, start, end, low, high)) high = low;
#endif

    load_queries<Own>(at, q_tile, b, h, start, end);
    const real sink = at.sinks && part == 0 ? at.sinks[h] : -infinity();
    Sums sums = {};
#pragma unroll
    for (int a = 0; a < RM; ++a) {
        sums.top[a] = sink;
        sums.total[a] = sink > -infinity() && thread_x() == 0 ? 1 : 0;
    }
    for (int key = low; key < high; key += OTHER) {
        __syncthreads();  // whoever still reads the last tile
        load_keys<Other>(at, k_tile, v_tile, b, g, key, high);
        __syncthreads();
        if (!at.meets(warp_start, warp_end, key, key + OTHER)) continue;
        const int j0 = key + thread_x() * RN;
        real s[RM][RN], slope;
        dots(q_tile, k_tile, at.width, s);
        const unsigned seen = visible<false>(at, b, h, i0, j0);
#pragma unroll
        for (int a = 0; a < RM; ++a)
#pragma unroll
            for (int c = 0; c < RN; ++c) {
                const bool sees = seen >> (a * RN + c) & 1;
                s[a][c] = score(at, b, h, i0 + a, j0 + c, sees, s[a][c], slope);
            }
        take_in(sums, s);
        drop(s, kept<false>(at, b, h, i0, j0));
        put(weights, s);
        mix(weights, v_tile, sums.ctx);
    }

    const long long rows = gridDim.x / n_splits / tiles * at.queries;  // B * H * T
    const long long token = b * (long long)at.queries * at.heads + h, row = head * at.queries;
    const Place place = {ctx + (part * rows + token) * at.value_width, tops + part * rows + row,
                         totals + part * rows + row};
    write(at, sums, i0, n_splits == 1, place, at.heads * (long long)at.value_width);
}

constexpr int MAX_SPLITS = 64;  // as in sdpa.py

extern "C" __global__ void sdpa_combine(const real* __restrict__ part_ctx,
                                        const real* __restrict__ part_tops,
                                        const real* __restrict__ part_totals,
                                        stored* __restrict__ ctx, real* __restrict__ tops,
                                        real* __restrict__ totals, long long heads,
                                        long long queries, long long width, real keep,
                                        long long n_splits) {
    const long long rows = gridDim.x, row = blockIdx.x;  // (b, h, i)
    const long long b = row / queries / heads, h = row / queries % heads, i = row % queries;
    const long long out = ((b * queries + i) * heads + h) * width;
    __shared__ real decays[MAX_SPLITS];
    real top = -infinity(), total = 0;
    for (int s = 0; s < n_splits; ++s) top = larger(top, part_tops[s * rows + row]);
    if (top == -infinity()) top = 0;
    for (int s = threadIdx.x; s < n_splits; s += blockDim.x)
        decays[s] = exp(part_tops[s * rows + row] - top);
    __syncthreads();
    for (int s = 0; s < n_splits; ++s) total += part_totals[s * rows + row] * decays[s];
    if (total == 0) top = 0, total = 1;
    const real factor = 1 / (total * keep);  // as of keys that are not split: the same bits
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        real sum = 0;
        for (int s = 0; s < n_splits; ++s)
            sum += part_ctx[s * rows * width + out + c] * decays[s];
        ctx[out + c] = sum * factor;
    }
    if (threadIdx.x == 0) {
        tops[row] = top;
        totals[row] = total;
    }
}
