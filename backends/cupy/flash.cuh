// Attention by tensor cores (arXiv:2307.08691): what forward and backward share.
//
// A block holds OWN rows of one kind, queries or keys, and walks over the rows of the other kind,
// OTHER at a time; the next ones come while those are computed with. Each of its four warps has 16
// M own rows; scores are M by N tiles of 16 by 8, sums of rows of WIDTH numbers M by W (mma.cuh).
// Lane 4 g + t has own rows 16 m + g and 16 m + 8 + g of its warp, other rows 8 n + 2t and 8 n + 2t
// + 1, and of a sum such columns: element e of a tile is row e / 2, column e % 2 of these.
//
// Products are sums in float of two-byte factors: weights are rounded to two bytes. In shared
// memory a row has 16 bytes more than its numbers, so that eight rows that are loaded together lie
// in different banks. WIDTH is the head width rounded up; rows are filled up with zeros.
#include "attention.cuh"
#include "mma.cuh"

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int BLOCKS = 2;  // of a multiprocessor, at least: 255 registers for each thread
constexpr int M = OWN_TILES, ROWS = 16 * M;  // own rows of a warp
constexpr int OWN = WARPS * ROWS, OTHER = OTHER_ROWS;
constexpr int N = OTHER / 8, W = WIDTH / 8;
constexpr int PACKS = WIDTH / 8;  // of 16 bytes in a row
constexpr int STRIDE = WIDTH + 8;
constexpr float LOG2E = 1.4426950408889634f;

using Scores = float[M][N][4];
using Rows = float[M][W][4];
using Bits = unsigned long long;  // one for each score: (m N + n) 4 + e

// Rows of `width` numbers begin to come; zeros behind the first `rows`.
template <int TILE>
__device__ __forceinline__ void fetch(Copies& copies, stored* to, const stored* from,
                                      long long stride, int rows, int width) {
    static_assert(TILE * PACKS % THREADS == 0, "as many for each thread");
#pragma unroll 2
    for (int n = 0; n < TILE * PACKS / THREADS; ++n) {  // unrolled more, it takes registers
        const int nth = threadIdx.x + n * THREADS, r = nth / PACKS, c = nth % PACKS * 8;
        const bool any = r < rows && c < width;
        copies.start(to + r * STRIDE + c, any ? from + r * stride + c : from, any);
    }
}

template <int TILE>
__device__ __forceinline__ void fetch_keys(Copies& copies, const Attention& at, stored* k_to,
                                           stored* v_to, int b, int g, int from, int end) {
    fetch<TILE>(copies, k_to, at.k + b * at.k_b + g * at.k_g + from * at.k_s, at.k_s, end - from,
                at.width);
    fetch<TILE>(copies, v_to, at.v + b * at.v_b + g * at.v_g + from * at.v_s, at.v_s, end - from,
                at.value_width);
}

// Where this lane's row of four matrices begins: two of them one below the other, or side by side.
__device__ __forceinline__ int below() {
    const int lane = threadIdx.x % 32;
    return lane % 16 * STRIDE + lane / 16 * 8;
}
__device__ __forceinline__ int beside() {
    const int lane = threadIdx.x % 32;
    return (lane / 16 * 8 + lane % 8) * STRIDE + lane / 8 % 2 * 8;
}

// Products of the warp's own rows with the others of a tile.
__device__ __forceinline__ void products(const stored* own, const stored* others,
                                         Scores& s) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[m][n][e] = 0;
#pragma unroll
    for (int k = 0; k < WIDTH; k += 16) {
        unsigned a[M][4];
#pragma unroll
        for (int m = 0; m < M; ++m)
            load_matrices(a[m], own + m * 16 * STRIDE + k + below());
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            unsigned y[4];
            load_matrices(y, others + n * 8 * STRIDE + k + beside());
#pragma unroll
            for (int m = 0; m < M; ++m) {
                multiply<stored>(s[m][n], a[m], y[0], y[1]);
                multiply<stored>(s[m][n + 1], a[m], y[2], y[3]);
            }
        }
    }
}

// ---- Scores: own row o0 + 16 m + 8 (e / 2), other row p0 + 8 n + e % 2 ----

template <bool OWN_KEYS>
struct Place {
    int o0, p0;
    __device__ __forceinline__ int own(int nth) const {
        return o0 + nth / (N * 4) * 16 + nth % 4 / 2 * 8;
    }
    __device__ __forceinline__ int other(int nth) const {
        return p0 + nth / 4 % N * 8 + nth % 2;
    }
    __device__ __forceinline__ int query(int nth) const { return OWN_KEYS ? other(nth) : own(nth); }
    __device__ __forceinline__ int key(int nth) const { return OWN_KEYS ? own(nth) : other(nth); }
};

// The scores of products, -inf where they do not see each other. whole: the window leaves all.
template <bool OWN_KEYS>
__device__ __forceinline__ void to_scores(const Attention& at, int b, int h, Place<OWN_KEYS> place,
                                          bool whole, Scores& s) {
#pragma unroll
    for (int nth = 0; nth < M * N * 4; ++nth) {
        float& x = s[nth / (N * 4)][nth / 4 % N][nth % 4];
        x *= at.factor;
        if (at.softcap > 0) x = at.softcap * tanh(x);
        if (whole) continue;
        const int i = place.query(nth), j = place.key(nth);
        if (i >= at.queries || j < i + at.ahead() - at.left || j >= at.end_of_keys(i + 1))
            x = -infinity();
    }
    if (!at.mask) return;
    Bits seen = 0;
#pragma unroll 1
    for (int nth = 0; nth < M * N * 4; ++nth) {
        const int i = place.query(nth), j = place.key(nth);
        const bool inside = i < at.queries && j < at.keys;
        const bool* const one =
            at.mask + b * at.mask_b + h * at.mask_h + i * at.mask_t + j * at.mask_s;
        seen |= Bits(inside && *one) << nth;
    }
#pragma unroll
    for (int nth = 0; nth < M * N * 4; ++nth)
        if (!(seen >> nth & 1)) s[nth / (N * 4)][nth / 4 % N][nth % 4] = -infinity();
}

// Which of them dropout keeps. Two keys of a query that one lane has share the words of a call.
template <bool OWN_KEYS>
__device__ __forceinline__ Bits kept(const Attention& at, int b, int h, Place<OWN_KEYS> place) {
    if (!at.lowest) return ~Bits(0);
    Bits bits = 0;
    Words words = {};
#pragma unroll 1
    for (int nth = 0; nth < M * N * 4; ++nth) {
        const long long row = (b * (long long)at.heads + h) * at.queries + place.query(nth);
        const unsigned long long element = (unsigned long long)row * at.keys + place.key(nth);
        const unsigned y = element % 4;
        if (OWN_KEYS || nth % 2 == 0 || y == 0)
            words = philox(element / 4, at.site, at.step, at.key0, at.key1);
        const unsigned word = y < 2 ? (y ? words.v[1] : words.v[0])
                                    : (y == 2 ? words.v[2] : words.v[3]);
        bits |= Bits(word >= at.lowest) << nth;
    }
    return bits;
}

// ---- Sums of rows ----

// out += weights (own rows of the warp by others) times those others.
__device__ __forceinline__ void mix(const Scores& weights, const stored* others,
                                    Rows& out) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        unsigned a[M][4];
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const float* const y = weights[m][n + x / 2] + x % 2 * 2;
                a[m][x] = pair<stored>(y[0], y[1]);
            }
#pragma unroll
        for (int w = 0; w < W; w += 2) {
            unsigned y[4];
            load_transposed(y, others + n * 8 * STRIDE + w * 8 + below());
#pragma unroll
            for (int m = 0; m < M; ++m) {
                multiply<stored>(out[m][w], a[m], y[0], y[1]);
                multiply<stored>(out[m][w + 1], a[m], y[2], y[3]);
            }
        }
    }
}

__device__ __forceinline__ void scale_by(Rows& x, float factor) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int w = 0; w < W; ++w)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[m][w][e] *= factor;
}

// Rows of the warp, by way of its own rows of shared memory.
__device__ __forceinline__ void store_rows(stored* rows, const Rows& x, stored* to,
                                           long long stride, int n_rows, int width) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    __syncwarp();  // whoever still reads them
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int w = 0; w < W; ++w)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<unsigned*>(rows + (16 * m + 8 * half + g) * STRIDE + 8 * w + 2 * t) =
                    pair<stored>(x[m][w][2 * half], x[m][w][2 * half + 1]);
    __syncwarp();
    for (int nth = lane; nth < ROWS * PACKS; nth += 32) {
        const int r = nth / PACKS, c = nth % PACKS * 8;
        if (r < n_rows && c < width)
            *reinterpret_cast<uint4*>(to + r * stride + c) =
                *reinterpret_cast<const uint4*>(rows + r * STRIDE + c);
    }
}
