// The gradients of flash.cu, whose scores are made anew from q, k and lse = log2(e) log(total) + top.
//
//   p = exp(scores) / exp(lse),  dp = dctx v^T,  inner = dctx . ctx
//   dv = (p * kept / keep)^T dctx,  dscores = p * (dp * kept / keep - inner)
//   dq = scale (dscores * slope) k,  dk = scale (dscores * slope)^T q,  slope that of the softcap
//   dsinks = -exp(sink - lse) inner, summed over all queries
//
// p and dscores are rounded to two bytes for their products; ctx is as it was stored. Layouts are
// those of sdpa_backward.cu; lse, in powers of two, and inner are (B, H, T). Rows must begin at 16
// bytes. Tiles, and which lane has what: flash.cuh. No atomics.
//
// flash_backward_rows: a warp a query; lse, inner, and shares (B * T, H) of dsinks, which
// column_sums adds up. flash_backward_queries: a block a tile of queries of a head; dq.
// flash_backward_keys: a block a tile of keys of a head, which walks over the queries of all heads
// of its group; dk, dv. Grids: B * H * T / 4; B * H * tiles; B * G * tiles. Blocks: 128.
//
// Budget: flash_backward_rows: 40 registers, 0 spilled, 0 shared
// Budget: flash_backward_queries: 255 registers, 0 spilled, 0 shared
// Budget: flash_backward_keys: 255 registers, 0 spilled, 0 shared
#include "philox.cuh"
#define OWN_TILES (WIDTH > 64 ? 1 : 2)  // as in flash_backward.py
#define OTHER_ROWS (WIDTH == 64 ? 16 : 32)  // likewise; 32 of 64 would take more registers
#include "common.cuh"
#include "flash.cuh"

extern "C" __global__ void flash_backward_rows(
    const stored* __restrict__ ctx, const stored* __restrict__ dctx,
    const stored* __restrict__ sinks, const real* __restrict__ tops,
    const real* __restrict__ totals, real* __restrict__ lse, real* __restrict__ inner,
    real* __restrict__ shares, long long heads, long long queries, long long width,
    long long d_b, long long d_h, long long d_t, long long rows) {
    const long long row = blockIdx.x * (long long)WARPS + threadIdx.x / 32;
    if (row >= rows) return;
    const int lane = threadIdx.x % 32;
    const long long b = row / queries / heads, h = row / queries % heads, i = row % queries;
    const stored* const x = ctx + ((b * queries + i) * heads + h) * width;
    const stored* const dx = dctx + b * d_b + h * d_h + i * d_t;
    float sum = 0;
    for (int c = lane; c < width; c += 32) sum += float(x[c]) * float(dx[c]);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (lane != 0) return;
    inner[row] = sum;
    lse[row] = tops[row] * LOG2E + log2(totals[row]);
    if (shares) shares[(b * queries + i) * heads + h] = -exp(float(sinks[h]) - tops[row]) / totals[row] * sum;
}

// Parameters behind those of attention.cuh; strides of dctx.
#define GRADIENT_PARAMETERS                                                                        \
    const real *__restrict__ lse, const real *__restrict__ inner,                                  \
        const stored *__restrict__ dctx, long long d_b, long long d_h, long long d_t, real scale
#define GRADIENT {lse, inner, dctx, d_b, d_h, d_t}

struct Gradient {
    const real *lse, *inner;
    const stored* dctx;
    long long d_b, d_h, d_t;
};

// Queries, and dctx.
template <int TILE>
__device__ __forceinline__ void fetch_both(Copies& copies, const Attention& at, const Gradient& d,
                                           stored* q_to, stored* d_to, int b, int h, int from,
                                           int end) {
    fetch<TILE>(copies, q_to, at.q + b * at.q_b + h * at.q_h + from * at.q_t, at.q_t, end - from,
                at.width);
    fetch<TILE>(copies, d_to, d.dctx + b * d.d_b + h * d.d_h + from * d.d_t, d.d_t, end - from,
                at.value_width);
}

// Given scores in p and dctx v^T in dscores: p where dropout keeps it, else 0, and dscores before
// the softcap.
template <bool OWN_KEYS>
__device__ __forceinline__ void go_back(const Attention& at, const Gradient& d, int b, int h,
                                        Place<OWN_KEYS> place, Scores& p, Scores& dscores) {
    const Bits bits = kept(at, b, h, place);
    const long long row = (b * (long long)at.heads + h) * at.queries;
#pragma unroll
    for (int nth = 0; nth < M * N * 4; ++nth) {
        float &x = p[nth / (N * 4)][nth / 4 % N][nth % 4];
        float &dx = dscores[nth / (N * 4)][nth / 4 % N][nth % 4];
        const int i = least(place.query(nth), at.queries - 1);
        const float t = at.softcap > 0 ? x / at.softcap : 0;
        const float weight = exp2(x * LOG2E - d.lse[row + i]);
        const float over = bits >> nth & 1 ? 1 / at.keep : 0;
        dx = weight * (dx * over - d.inner[row + i]);
        if (at.softcap > 0) dx = weight > 0 ? dx * (1 - t * t) : 0;
        x = weight * over;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    flash_backward_queries(ATTENTION_PARAMETERS, GRADIENT_PARAMETERS, stored* __restrict__ dq,
                           long long dq_t) {
    const Attention at = ATTENTION;
    const Gradient gradient = GRADIENT;
    SHARED_BUFFER(stored, q_tile);
    stored* const d_tile = q_tile + OWN * STRIDE;
    stored* const others = d_tile + OWN * STRIDE;  // two of k, each with that of v behind it
    constexpr int PAIR = 2 * OTHER * STRIDE;

    const int tiles = (at.queries + OWN - 1) / OWN, lane = threadIdx.x % 32;
    const long long head = blockIdx.x / tiles;
    const int b = head / at.heads, h = head % at.heads, group = at.group(h);
    const int start = (tiles - 1 - blockIdx.x % tiles) * OWN, end = least(start + OWN, at.queries);
    const int own = threadIdx.x / 32 * ROWS, warp_start = start + own, warp_end = warp_start + ROWS;
    const int low = at.first_key(start) / OTHER * OTHER, high = at.end_of_keys(end);

    Copies copies;
    fetch_both<OWN>(copies, at, gradient, q_tile, d_tile, b, h, start, end);
    if (low < high) fetch_keys<OTHER>(copies, at, others, others + PAIR / 2, b, group, low, high);
    copies.end_group();
    Rows sums = {};
    int turn = 0;
    for (int key = low; key < high; key += OTHER, turn ^= 1) {
        copies.wait<0>();
        __syncthreads();  // the tile is there; nobody reads the one before it any more
        const stored* const k_tile = others + turn * PAIR;
        if (key + OTHER < high) {
            stored* const next = others + (turn ^ 1) * PAIR;
            fetch_keys<OTHER>(copies, at, next, next + PAIR / 2, b, group, key + OTHER, high);
        }
        copies.end_group();
        if (!at.meets(warp_start, warp_end, key, key + OTHER)) continue;
        Scores p, dscores;
        const Place<false> place = {warp_start + lane / 4, key + lane % 4 * 2};
        products(q_tile + own * STRIDE, k_tile, p);
        products(d_tile + own * STRIDE, k_tile + PAIR / 2, dscores);
        to_scores(at, b, h, place, at.sees_all(warp_start, warp_end, key, key + OTHER), p);
        go_back(at, gradient, b, h, place, p, dscores);
        mix(dscores, k_tile, sums);
    }
    copies.wait<0>();
    __syncthreads();  // also where there was no tile
    scale_by(sums, scale);
    const long long token = b * (long long)at.queries + warp_start;
    store_rows(q_tile + own * STRIDE, sums, dq + token * dq_t + h * (long long)at.width, dq_t,
               at.queries - warp_start, at.width);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    flash_backward_keys(ATTENTION_PARAMETERS, GRADIENT_PARAMETERS, stored* __restrict__ dk,
                        stored* __restrict__ dv, long long dk_t, long long dv_t) {
    const Attention at = ATTENTION;
    const Gradient gradient = GRADIENT;
    SHARED_BUFFER(stored, k_tile);
    stored* const v_tile = k_tile + OWN * STRIDE;
    stored* const others = v_tile + OWN * STRIDE;  // two of q, each with that of dctx behind it
    constexpr int PAIR = 2 * OTHER * STRIDE;

    const int tiles = (at.keys + OWN - 1) / OWN, lane = threadIdx.x % 32;
    const long long task = blockIdx.x / tiles;
    const int b = task / at.groups, group = task % at.groups, shared_by = at.heads / at.groups;
    const int start = blockIdx.x % tiles * OWN, end = least(start + OWN, at.keys);
    const int own = threadIdx.x / 32 * ROWS, warp_start = start + own, warp_end = warp_start + ROWS;
    const int first = at.first_query(start) / OTHER * OTHER, last = at.end_of_queries(end);
    const int n_tiles = most(0, last - first + OTHER - 1) / OTHER, n_all = shared_by * n_tiles;

    Copies copies;
    fetch_keys<OWN>(copies, at, k_tile, v_tile, b, group, start, end);
    if (n_all > 0)
        fetch_both<OTHER>(copies, at, gradient, others, others + PAIR / 2, b, group * shared_by,
                          first, last);
    copies.end_group();
    Rows dk_sums = {}, dv_sums = {};
    for (int nth = 0; nth < n_all; ++nth) {
        copies.wait<0>();
        __syncthreads();  // the tile is there; nobody reads the one before it any more
        const int h = group * shared_by + nth / n_tiles, query = first + nth % n_tiles * OTHER;
        const stored* const tile = others + nth % 2 * PAIR;
        if (nth + 1 < n_all) {
            stored* const next = others + (nth + 1) % 2 * PAIR;
            fetch_both<OTHER>(copies, at, gradient, next, next + PAIR / 2, b,
                              group * shared_by + (nth + 1) / n_tiles,
                              first + (nth + 1) % n_tiles * OTHER, last);
        }
        copies.end_group();
        const bool none = !at.meets(query, query + OTHER, warp_start, warp_end);
        if (none || warp_start >= end) continue;
        Scores p, dscores;
        const Place<true> place = {warp_start + lane / 4, query + lane % 4 * 2};
        products(k_tile + own * STRIDE, tile, p);
        products(v_tile + own * STRIDE, tile + PAIR / 2, dscores);
        to_scores(at, b, h, place, at.sees_all(query, query + OTHER, warp_start, warp_end), p);
        go_back(at, gradient, b, h, place, p, dscores);
        mix(p, tile + PAIR / 2, dv_sums);
        mix(dscores, tile, dk_sums);
    }
    copies.wait<0>();
    __syncthreads();  // also where there was no tile
    scale_by(dk_sums, scale);
    const long long token = b * (long long)at.keys + warp_start;
    const int n_rows = at.keys - warp_start;
    store_rows(k_tile + own * STRIDE, dk_sums, dk + token * dk_t + group * (long long)at.width, dk_t,
               n_rows, at.width);
    store_rows(v_tile + own * STRIDE, dv_sums, dv + token * dv_t + group * (long long)at.value_width,
               dv_t, n_rows, at.value_width);
}
