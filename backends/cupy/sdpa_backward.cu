// The gradients of sdpa.cu, whose scores are made anew from q, k, bias and top.
//
//   dout = dctx / (total keep),  e = exp(scores - top),  inner = dout . ctx keep
//   dv = (e * kept)^T dout,  dscores = e * (kept * dout v^T - inner)
//   dq = scale (dscores * slope) k,  dk = scale (dscores * slope)^T q,  slope that of the softcap
//   dbias = dscores,  dsinks = -exp(sink - top) inner, summed over what they were broadcast along
//
// Layouts are those of sdpa.cu; dctx by its strides; dq as (B, T, H, K), dk, dv as (B, S, G, .),
// the heads of a token on end, tokens dq_t, dk_t, dv_t elements apart; inner (B, H, T). Tiles, and
// which thread does what: attention_tiles.cuh.
//
// sdpa_backward_queries: a block a tile of queries of a head; makes inner, dq, and of dsinks its
// part, parts (B * tiles, H). sdpa_backward_keys: a block a tile of keys of a head, which walks
// over the queries of all heads of its group. sdpa_backward_bias: a block a tile of scores, which
// walks over all batch elements and heads that share them; rows or columns that share a number of
// the bias are summed in the block, blocks by column_sums: parts (lead, tiles that share, numbers).
// Grids: B * H * tiles; B * G * tiles; lead * tiles of queries * tiles of keys. Blocks: 128.
//
// Budget: sdpa_backward_queries: 255 registers, 0 spilled, 256 shared
// Budget: sdpa_backward_keys: 255 registers, 88 spilled, 0 shared
// Budget: sdpa_backward_bias: 216 registers, 0 spilled, 256 shared
#include "philox.cuh"
#define WIDE 1
#define FEW 0
#define OWN_BYTES (16 << 10)
#include "common.cuh"
#include "attention_tiles.cuh"

// Parameters behind those of attention.cuh; strides of dctx.
#define GRADIENT_PARAMETERS                                                                        \
    const real *__restrict__ tops, const real *__restrict__ totals,                                \
        const stored *__restrict__ dctx, long long d_b, long long d_h, long long d_t
#define GRADIENT {tops, totals, dctx, d_b, d_h, d_t}

struct Gradient {
    const real *tops, *totals;
    const stored* dctx;
    long long d_b, d_h, d_t;
};

struct OverTotal {
    const real* totals;
    real keep;
    __device__ real operator()(int row) const { return 1 / (totals[row] * keep); }
};

// Queries, and dout.
template <class Tile>
__device__ __forceinline__ void load_both(const Attention& at, const Gradient& d, real* q_to,
                                          real* dout_to, int b, int h, int from, int end) {
    const real* const totals = d.totals + (b * (long long)at.heads + h) * at.queries + from;
    load_queries<Tile>(at, q_to, b, h, from, end);
    load_rows<Tile>(dout_to, d.dctx + b * d.d_b + h * d.d_h + from * d.d_t, d.d_t, end - from,
                    at.value_width, at.packed, OverTotal{totals, at.keep});
}

// Given q k^T in e and dout v^T in dscores: e where dropout keeps it, else 0; dscores, those before
// the softcap where CAPPED.
template <bool OWN_KEYS, bool CAPPED>
__device__ __forceinline__ void go_back(const Attention& at, int b, int h, int i0, int j0,
                                        const real* tops, const real* inner, real (&e)[RM][RN],
                                        real (&dscores)[RM][RN]) {
    const long long row = (b * (long long)at.heads + h) * at.queries;
    const unsigned seen = visible<OWN_KEYS>(at, b, h, i0, j0);
    const unsigned bits = kept<OWN_KEYS>(at, b, h, i0, j0);
#pragma unroll
    for (int a = 0; a < RM; ++a)
#pragma unroll
        for (int c = 0; c < RN; ++c) {
            const int i = least(i0 + (OWN_KEYS ? c : a), at.queries - 1);
            const int j = j0 + (OWN_KEYS ? a : c);
            const bool sees = seen >> (a * RN + c) & 1, keeps = bits >> (a * RN + c) & 1;
            real slope;
            e[a][c] = exp(score(at, b, h, i, j, sees, e[a][c], slope) - tops[row + i]);
            dscores[a][c] = e[a][c] * ((keeps ? dscores[a][c] : real(0)) - inner[row + i]);
            if (CAPPED) dscores[a][c] *= slope;
            if (!keeps) e[a][c] = 0;
        }
}

// The tiles of own and other rows, and the weights, behind one another in shared memory.
struct Tiles {
    real *own[2], *other[2], *weights;
    __device__ __forceinline__ explicit Tiles(real* shared) {
        for (int n = 0; n < 2; ++n) {
            own[n] = shared + n * OWN * STRIDE;
            other[n] = shared + (2 * OWN + n * OTHER) * STRIDE;
        }
        weights = shared + 2 * (OWN + OTHER) * STRIDE;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    sdpa_backward_queries(ATTENTION_PARAMETERS, GRADIENT_PARAMETERS, const stored* __restrict__ ctx,
                          real* inner, stored* __restrict__ dq, real* __restrict__ sink_parts,
                          real scale, long long dq_t) {
    const Attention at = ATTENTION;
    const Gradient gradient = GRADIENT;
    SHARED_BUFFER(real, shared);
    const Tiles tile(shared);
    const int tiles = (at.queries + OWN - 1) / OWN;
    const long long head = blockIdx.x / tiles, row = head * at.queries;
    const int b = head / at.heads, h = head % at.heads, g = at.group(h);
    const int nth = tiles - 1 - blockIdx.x % tiles, start = nth * OWN;
    const int end = least(start + OWN, at.queries), i0 = start + thread_y() * RM;
    const int warp_start = start + threadIdx.x / 32 * 4 * RM, warp_end = warp_start + 4 * RM;
    const long long token = b * (long long)at.queries * at.heads + h;

    load_both<Own>(at, gradient, tile.own[0], tile.own[1], b, h, start, end);
    __syncthreads();
    // One after the other, as `dots` adds: where one key has all the weight, dscores are exactly 0.
    real share = 0;
    const int i = start + threadIdx.x;
    if (i < end) {
        const real* const dout = tile.own[1] + place<RM, TY>(threadIdx.x) * STRIDE;
        const stored* const own = ctx + (token + (long long)i * at.heads) * at.value_width;
        real sum = 0;
        for (int c = 0; c < at.value_width; ++c) sum += dout[c] * own[c];
        inner[row + i] = sum * at.keep;
        if (sink_parts) share = exp(at.sinks[h] - tops[row + i]) * (sum * at.keep);
    }
    if (sink_parts) {
        share = block_sum(share);
        if (threadIdx.x == 0) sink_parts[((long long)b * tiles + nth) * at.heads + h] = -share;
    }

    real sums[RM][RW] = {};
    const int high = at.end_of_keys(end);
    for (int key = at.first_key(start) / OTHER * OTHER; key < high; key += OTHER) {
        __syncthreads();  // inner is there; whoever still reads the last tile
        load_keys<Other>(at, tile.other[0], tile.other[1], b, g, key, high);
        __syncthreads();
        if (!at.meets(warp_start, warp_end, key, key + OTHER)) continue;
        real e[RM][RN], dscores[RM][RN];
        dots(tile.own[0], tile.other[0], at.width, e);
        dots(tile.own[1], tile.other[1], at.value_width, dscores);
        go_back<false, true>(at, b, h, i0, key + thread_x() * RN, tops, inner, e, dscores);
        put(tile.weights, dscores);
        mix(tile.weights, tile.other[0], sums);
    }
#pragma unroll
    for (int a = 0; a < RM; ++a)
        if (i0 + a < at.queries)
            store_row(dq + (b * (long long)at.queries + i0 + a) * dq_t + h * (long long)at.width,
                      sums[a], at.width, at.packed, scale);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    sdpa_backward_keys(ATTENTION_PARAMETERS, GRADIENT_PARAMETERS, const real* __restrict__ inner,
                       stored* __restrict__ dk, stored* __restrict__ dv, long long dk_t,
                       long long dv_t) {
    const Attention at = ATTENTION;
    const Gradient gradient = GRADIENT;
    SHARED_BUFFER(real, shared);
    const Tiles tile(shared);
    const int tiles = (at.keys + OWN - 1) / OWN;
    const long long task = blockIdx.x / tiles;
    const int b = task / at.groups, g = task % at.groups, shared_by = at.heads / at.groups;
    const int start = blockIdx.x % tiles * OWN, end = least(start + OWN, at.keys);
    const int j0 = start + thread_y() * RM;
    const int warp_start = start + threadIdx.x / 32 * 4 * RM, warp_end = warp_start + 4 * RM;

    load_keys<Own>(at, tile.own[0], tile.own[1], b, g, start, end);
    real dk_sums[RM][RW] = {}, dv_sums[RM][RW] = {};
    const int first = at.first_query(start) / OTHER * OTHER, last = at.end_of_queries(end);
    for (int h = g * shared_by; h < (g + 1) * shared_by; ++h)
        for (int query = first; query < last; query += OTHER) {
            __syncthreads();  // whoever still reads the last tile
            load_both<Other>(at, gradient, tile.other[0], tile.other[1], b, h, query, last);
            __syncthreads();
            const bool none = !at.meets(query, query + OTHER, warp_start, warp_end);
            if (none || warp_start >= end) continue;
            real e[RM][RN], dscores[RM][RN];
            dots(tile.own[0], tile.other[0], at.width, e);
            dots(tile.own[1], tile.other[1], at.value_width, dscores);
            go_back<true, true>(at, b, h, query + thread_x() * RN, j0, tops, inner, e, dscores);
            put(tile.weights, e);
            mix(tile.weights, tile.other[1], dv_sums);
            put(tile.weights, dscores);
            mix(tile.weights, tile.other[0], dk_sums);
        }
    const real rest = at.softcap > 0 ? at.softcap : real(1);  // of the scale: q has the other part
#pragma unroll
    for (int a = 0; a < RM; ++a) {
        if (j0 + a >= at.keys) continue;
        const long long token = b * (long long)at.keys + j0 + a;
        store_row(dk + token * dk_t + g * (long long)at.width, dk_sums[a], at.width, at.packed, rest);
        store_row(dv + token * dv_t + g * (long long)at.value_width, dv_sums[a], at.value_width,
                  at.packed, 1);
    }
}

// A tile of dbias, its rows or columns summed where the bias is broadcast along them. Elements
// outside the arrays are 0.
struct TileOfBias {
    long long lead, row_tiles, column_tiles, row_tile, column_tile;
    bool over_t, over_s;

    __device__ __forceinline__ void write(const Attention& at, const real (&sums)[RM][RN],
                                          real* weights, real* parts) const {
        const int start = row_tile * OWN, key = column_tile * OTHER, r = threadIdx.x;
        if (!over_t && !over_s) {
#pragma unroll
            for (int a = 0; a < RM; ++a)
#pragma unroll
                for (int c = 0; c < RN; ++c) {
                    const int i = start + thread_y() * RM + a, j = key + thread_x() * RN + c;
                    if (i < at.queries && j < at.keys)
                        parts[(lead * at.queries + i) * at.keys + j] = sums[a][c];
                }
            return;
        }
        put(weights, sums);
        __syncthreads();
        real sum = 0;
        if (!over_s) {
            if (r >= OTHER || key + r >= at.keys) return;
            for (int n = 0; n < OWN; ++n) sum += weights[n * WEIGHTS + r];
            parts[(lead * row_tiles + row_tile) * at.keys + key + r] = sum;
            return;
        }
        for (int c = 0; r < OWN && c < OTHER; ++c)
            sum += weights[place<RM, TY>(r) * WEIGHTS + c];
        if (over_t) {
            sum = block_sum(sum);
            if (r == 0) parts[(lead * row_tiles + row_tile) * column_tiles + column_tile] = sum;
        } else if (r < OWN && start + r < at.queries) {
            parts[(lead * column_tiles + column_tile) * at.queries + start + r] = sum;
        }
    }
};

// lead_b, lead_h: how many batch elements and heads the bias has; over_t, over_s: whether it is
// broadcast along queries, along keys.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    sdpa_backward_bias(ATTENTION_PARAMETERS, GRADIENT_PARAMETERS, const real* __restrict__ inner,
                       real* __restrict__ parts, long long batch, long long lead_b,
                       long long lead_h, long long over_t, long long over_s) {
    const Attention at = ATTENTION;
    const Gradient gradient = GRADIENT;
    SHARED_BUFFER(real, shared);
    const Tiles tile(shared);
    const int row_tiles = (at.queries + OWN - 1) / OWN;
    const int column_tiles = (at.keys + OTHER - 1) / OTHER;
    const int column_tile = blockIdx.x % column_tiles, key = column_tile * OTHER;
    const int row_tile = blockIdx.x / column_tiles % row_tiles, start = row_tile * OWN;
    const long long lead = blockIdx.x / column_tiles / row_tiles;
    const int end = least(start + OWN, at.queries);
    const int b_start = lead_b > 1 ? lead / lead_h : 0, b_end = lead_b > 1 ? b_start + 1 : batch;
    const int h_start = lead_h > 1 ? lead % lead_h : 0, h_end = lead_h > 1 ? h_start + 1 : at.heads;

    real sums[RM][RN] = {};
    const bool any = at.meets(start, end, key, key + OTHER);
    for (int b = b_start; any && b < b_end; ++b)
        for (int h = h_start; h < h_end; ++h) {
            __syncthreads();  // whoever still reads the last tiles
            load_both<Own>(at, gradient, tile.own[0], tile.own[1], b, h, start, end);
            load_keys<Other>(at, tile.other[0], tile.other[1], b, at.group(h), key, at.keys);
            __syncthreads();
            real e[RM][RN], dscores[RM][RN];
            dots(tile.own[0], tile.other[0], at.width, e);
            dots(tile.own[1], tile.other[1], at.value_width, dscores);
            go_back<false, false>(at, b, h, start + thread_y() * RM, key + thread_x() * RN, tops,
                                  inner, e, dscores);
#pragma unroll
            for (int a = 0; a < RM; ++a)
#pragma unroll
                for (int c = 0; c < RN; ++c) sums[a][c] += dscores[a][c];
        }
    const TileOfBias own = {lead,        row_tiles,   column_tiles, row_tile,
                            column_tile, over_t != 0, over_s != 0};
    own.write(at, sums, tile.weights, parts);
}
