// sdpa.cu for numbers of two bytes, by tensor cores: the same formulas, inputs by their strides,
// outputs. Probabilities are rounded to two bytes for the product with v, before they are divided
// by their total. Rows must begin at 16 bytes. Tiles, and which lane has what: flash.cuh.
//
// flash_forward: a block a tile of queries of a head, the last queries first (they see most keys).
// Grid: B * H * tiles. Block: 128.
//
// Budget: flash_forward: 255 registers, 0 spilled, 0 shared
#include "philox.cuh"
#define OWN_TILES 2
#define OTHER_ROWS (WIDTH > 64 ? 32 : 64)  // as in flash.py
#include "common.cuh"
#include "flash.cuh"

// What a lane has of the softmax of its queries: total of its own keys alone.
struct Sums {
    float top[M][2], total[M][2];
    Rows ctx;
};

// Scores s of a tile go into the sums, their exponentials into s.
__device__ __forceinline__ void take_in(Sums& sums, Scores& s) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float top = sums.top[m][half];
#pragma unroll
            for (int n = 0; n < N; ++n)
                top = larger(larger(top, s[m][n][2 * half]), s[m][n][2 * half + 1]);
            top = larger(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = larger(top, __shfl_xor_sync(0xffffffffu, top, 2));
            const float shift = top == -infinity() ? 0 : top * LOG2E;
            const float decay = exp2(sums.top[m][half] * LOG2E - shift);
            sums.top[m][half] = top;
            sums.total[m][half] *= decay;
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; ++e) {
                    s[m][n][e] = exp2(s[m][n][e] * LOG2E - shift);
                    sums.total[m][half] += s[m][n][e];
                }
#pragma unroll
            for (int w = 0; w < W; ++w)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; ++e) sums.ctx[m][w][e] *= decay;
        }
}

// Weights that dropout takes away are 0.
__device__ __forceinline__ void drop(Scores& s, Bits kept) {
#pragma unroll
    for (int nth = 0; nth < M * N * 4; ++nth)
        if (!(kept >> nth & 1)) s[nth / (N * 4)][nth / 4 % N][nth % 4] = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    flash_forward(ATTENTION_PARAMETERS, stored* __restrict__ ctx, real* __restrict__ tops,
                  real* __restrict__ totals) {
    const Attention at = ATTENTION;
    SHARED_BUFFER(stored, q_tile);
    stored* const tiles_of_keys = q_tile + OWN * STRIDE;  // two of k, each with that of v behind it
    constexpr int PAIR = 2 * OTHER * STRIDE;

    const int tiles = (at.queries + OWN - 1) / OWN, lane = threadIdx.x % 32;
    const long long head = blockIdx.x / tiles;
    const int b = head / at.heads, h = head % at.heads;
    const int start = (tiles - 1 - blockIdx.x % tiles) * OWN, end = least(start + OWN, at.queries);
    const int warp_start = start + threadIdx.x / 32 * ROWS, warp_end = warp_start + ROWS;
    const int low = at.first_key(start) / OTHER * OTHER, high = at.end_of_keys(end);
    stored* const q_rows = q_tile + threadIdx.x / 32 * ROWS * STRIDE;

    Copies copies;
    fetch<OWN>(copies, q_tile, at.q + b * at.q_b + h * at.q_h + start * at.q_t, at.q_t, end - start,
               at.width);
    if (low < high)
        fetch_keys<OTHER>(copies, at, tiles_of_keys, tiles_of_keys + PAIR / 2, b, at.group(h), low,
                          high);
    copies.end_group();

    const float sink = at.sinks ? float(at.sinks[h]) : -infinity();
    Sums sums = {};
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            sums.top[m][half] = sink;
            sums.total[m][half] = sink > -infinity() && lane % 4 == 0 ? 1 : 0;
        }
    int turn = 0;
    for (int key = low; key < high; key += OTHER, turn ^= 1) {
        copies.wait<0>();
        __syncthreads();  // the tile is there; nobody reads the one before it any more
        const stored* const k_tile = tiles_of_keys + turn * PAIR;
        if (key + OTHER < high) {
            stored* const next = tiles_of_keys + (turn ^ 1) * PAIR;
            // The group anew: kept, it would be a register too many where heads are 128 wide.
            fetch_keys<OTHER>(copies, at, next, next + PAIR / 2, b, at.group(h), key + OTHER, high);
        }
        copies.end_group();
        if (!at.meets(warp_start, warp_end, key, key + OTHER)) continue;
        Scores s;
        const Place<false> place = {warp_start + lane / 4, key + lane % 4 * 2};
        products(q_rows, k_tile, s);
        to_scores(at, b, h, place, at.sees_all(warp_start, warp_end, key, key + OTHER), s);
        take_in(sums, s);
        drop(s, kept(at, b, h, place));
        mix(s, k_tile + PAIR / 2, sums.ctx);
    }
    copies.wait<0>();
    __syncthreads();  // also where there was no tile

#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float top = sums.top[m][half], total = sums.total[m][half];
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            if (total == 0) top = 0, total = 1;
            const float over = 1 / (total * at.keep);
#pragma unroll
            for (int w = 0; w < W; ++w)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; ++e) sums.ctx[m][w][e] *= over;
            const int i = warp_start + 16 * m + 8 * half + lane / 4;
            if (lane % 4 == 0 && i < at.queries) {
                tops[head * at.queries + i] = top;
                totals[head * at.queries + i] = total;
            }
        }
    const long long token = b * (long long)at.queries * at.heads + h;
    store_rows(q_rows, sums.ctx, ctx + (token + (long long)warp_start * at.heads) * at.value_width,
               at.heads * (long long)at.value_width, at.queries - warp_start, at.value_width);
}
