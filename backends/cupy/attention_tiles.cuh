// Attention in tiles (arXiv:2205.14135): what forward and backward share.
//
// A block holds OWN rows of one kind, queries or keys, and walks over the rows of the other kind,
// OTHER at a time. Its 128 threads stand in TY = 16 by TX = 8: thread (ty, tx) has the RM own rows
// from ty * RM on, the RN other rows from tx * RN on, and of rows of WIDTH numbers those from tx *
// PACK, (TX + tx) * PACK, ... on. Two products do all the work:
//
//   dots  scores, own by other rows, each thread RM x RN of them: 16-byte reads along the rows;
//   mix   sums of other rows by weights, each thread RM x RW numbers of its own rows. The weights
//         lie in shared memory, but only the warp that wrote them reads them.
//
// Row r of a tile lies at place(r), so that neighbouring threads, whose rows are RM or RN apart,
// read places that are next to one another, 16 bytes apart modulo 128: no bank conflicts. WIDTH is
// the head width rounded up; rows are filled up with zeros. OWN_BYTES is what a block has for a
// tile of own rows.
//
// Which keys a query sees, and which of them dropout keeps, are bits of one word: element (a, c) of
// a thread is bit a * RN + c. Sums have a fixed order, and there are no atomics.
#include "attention.cuh"

constexpr int PACK = 16 / sizeof(real);
using Piece = Elements<real, PACK>;
constexpr int TX = 8, TY = 16, THREADS = TX * TY;
constexpr int BLOCKS = 2;  // of a multiprocessor, at least: 255 registers for each thread
constexpr int UNROLLED = sizeof(real) == 4 ? 2 : 1;  // steps of the inner loops

// As `tile` of attention.py.
constexpr int ROW_BYTES = WIDTH * sizeof(real);
constexpr int MAX_OWN = OWN_BYTES / 64 / sizeof(real);
constexpr int OWN = FEW ? TY : most(TY, least(MAX_OWN, OWN_BYTES / ROW_BYTES));
constexpr int OTHER = least(32, (16 << 10) / ROW_BYTES);
constexpr int RM = OWN / TY, RN = OTHER / TX, RW = WIDTH / TX;
constexpr int STRIDE = WIDTH + PACK;   // of a row in shared memory
constexpr int WEIGHTS = OTHER + PACK;  // of a row of weights

__device__ __forceinline__ int thread_x() { return threadIdx.x % TX; }
__device__ __forceinline__ int thread_y() { return threadIdx.x / TX; }

// ---- Tiles ----

// Where row r of a tile lies whose N threads have R rows each.
template <int R, int N>
__device__ __forceinline__ int place(int r) {
    return r % R * N + r / R;
}

struct Own {
    static constexpr int ROWS = OWN, N = TY;
};
struct Other {
    static constexpr int ROWS = OTHER, N = TX;
};
struct Constant {
    real value;
    __device__ real operator()(int) const { return value; }
};

// A tile of rows of `width` numbers, times factor(row); zeros behind the first `rows`.
template <class Tile, class F>
__device__ __forceinline__ void load_rows(real* to, const stored* from, long long stride, int rows,
                                          int width, bool packed, F factor) {
    constexpr int PACKS = WIDTH / PACK;
    static_assert(THREADS % PACKS == 0, "a thread stays in its columns");
    const int c = threadIdx.x % PACKS * PACK;
    for (int r = threadIdx.x / PACKS; r < Tile::ROWS; r += THREADS / PACKS) {
        Piece p = {};
        if (r < rows) {
            const stored* const x = from + r * stride + c;
            if (!packed) {
                for (int l = 0; l < PACK; ++l)
                    if (c + l < width) p.v[l] = x[l];
            } else if (c < width) {
                p = load<PACK>(x);
            }
            const real f = factor(r);
            for (int l = 0; l < PACK; ++l) p.v[l] *= f;
        }
        store(to + place<Tile::ROWS / Tile::N, Tile::N>(r) * STRIDE + c, p);
    }
}

template <class Tile>
__device__ __forceinline__ void load_queries(const Attention& at, real* to, int b, int h, int from,
                                             int end) {
    load_rows<Tile>(to, at.q + b * at.q_b + h * at.q_h + from * at.q_t, at.q_t, end - from,
                    at.width, at.packed, Constant{at.factor});
}

// Keys and values.
template <class Tile>
__device__ __forceinline__ void load_keys(const Attention& at, real* k_to, real* v_to, int b, int g,
                                          int from, int end) {
    load_rows<Tile>(k_to, at.k + b * at.k_b + g * at.k_g + from * at.k_s, at.k_s, end - from,
                    at.width, at.packed, Constant{1});
    load_rows<Tile>(v_to, at.v + b * at.v_b + g * at.v_g + from * at.v_s, at.v_s, end - from,
                    at.value_width, at.packed, Constant{1});
}

// out = own rows by other rows, over their first `width` numbers, one after the other.
__device__ __forceinline__ void dots(const real* own, const real* other, int width,
                                     real (&out)[RM][RN]) {
    own += thread_y() * STRIDE;
    other += thread_x() * STRIDE;
#pragma unroll
    for (int a = 0; a < RM; ++a)
#pragma unroll
        for (int c = 0; c < RN; ++c) out[a][c] = 0;
#pragma unroll UNROLLED
    for (int k = 0; k < width; k += PACK) {
        Piece y[RN];
#pragma unroll
        for (int c = 0; c < RN; ++c) y[c] = load<PACK>(other + c * TX * STRIDE + k);
#pragma unroll
        for (int a = 0; a < RM; ++a) {
            const Piece x = load<PACK>(own + a * TY * STRIDE + k);
#pragma unroll
            for (int c = 0; c < RN; ++c)
#pragma unroll
                for (int l = 0; l < PACK; ++l) out[a][c] += x.v[l] * y[c].v[l];
        }
    }
}

// This thread's weights, for the threads of its warp.
__device__ __forceinline__ void put(real* weights, const real (&x)[RM][RN]) {
    weights += thread_y() * WEIGHTS + thread_x() * RN;
    __syncwarp();  // whoever still reads the last ones
    constexpr int TOGETHER = RN % PACK ? 1 : PACK;
#pragma unroll
    for (int a = 0; a < RM; ++a)
#pragma unroll
        for (int c = 0; c < RN; c += TOGETHER) {
            Elements<real, TOGETHER> some;
#pragma unroll
            for (int l = 0; l < TOGETHER; ++l) some.v[l] = x[a][c + l];
            store(weights + a * TY * WEIGHTS + c, some);
        }
    __syncwarp();
}

// out += weights (own by other rows) times other rows.
__device__ __forceinline__ void mix(const real* weights, const real* other, real (&out)[RM][RW]) {
    weights += thread_y() * WEIGHTS;
    other += thread_x() * PACK;
#pragma unroll UNROLLED
    for (int c = 0; c < OTHER; c += PACK) {
        Piece x[RM];
#pragma unroll
        for (int a = 0; a < RM; ++a) x[a] = load<PACK>(weights + a * TY * WEIGHTS + c);
#pragma unroll
        for (int l = 0; l < PACK; ++l) {
            const real* const row = other + place<RN, TX>(c + l) * STRIDE;
#pragma unroll
            for (int n = 0; n < RW; n += PACK) {
                const Piece y = load<PACK>(row + n * TX);
#pragma unroll
                for (int a = 0; a < RM; ++a)
#pragma unroll
                    for (int m = 0; m < PACK; ++m) out[a][n + m] += x[a].v[l] * y.v[m];
            }
        }
    }
}

// A row of `width` numbers, of which a thread has those that `mix` gave it, times factor.
template <class T>
__device__ __forceinline__ void store_row(T* to, const real (&x)[RW], int width, bool packed,
                                          real factor) {
#pragma unroll
    for (int n = 0; n < RW; n += PACK) {
        const int c = n * TX + thread_x() * PACK;
        Piece p;
#pragma unroll
        for (int m = 0; m < PACK; ++m) p.v[m] = x[n + m] * factor;
        if (!packed) {
#pragma unroll
            for (int m = 0; m < PACK; ++m)
                if (c + m < width) to[c + m] = p.v[m];
        } else if (c < width) {
            store(to + c, p);
        }
    }
}

// ---- Scores ----

// Of a thread: queries i0, i0 + 1, ... and keys j0, j0 + 1, ...
template <bool OWN_KEYS>
constexpr int QUERIES = OWN_KEYS ? RN : RM;
template <bool OWN_KEYS>
constexpr int KEYS = OWN_KEYS ? RM : RN;

// Bits of the pairs that see each other.
template <bool OWN_KEYS>
__device__ __forceinline__ unsigned visible(const Attention& at, int b, int h, int i0, int j0) {
    if (!at.mask && at.sees_all(i0, i0 + QUERIES<OWN_KEYS>, j0, j0 + KEYS<OWN_KEYS>)) return ~0u;
    unsigned bits = 0;
#pragma unroll 1
    for (int a = 0; a < RM; ++a)
#pragma unroll
        for (int c = 0; c < RN; ++c) {
            const int i = i0 + (OWN_KEYS ? c : a), j = j0 + (OWN_KEYS ? a : c);
            bits |= unsigned(at.sees(b, h, i, j)) << (a * RN + c);
        }
    return bits;
}

// Bits of the probabilities that dropout keeps: four keys that follow one another share the words
// of one call, or of two.
template <bool OWN_KEYS>
__device__ __forceinline__ unsigned kept(const Attention& at, int b, int h, int i0, int j0) {
    if (!at.lowest) return ~0u;
    unsigned bits = 0;
#pragma unroll 1
    for (int y = 0; y < QUERIES<OWN_KEYS>; ++y) {
        const long long row = (b * (long long)at.heads + h) * at.queries + i0 + y;
        unsigned long long element = (unsigned long long)row * at.keys + j0;
        Words words = {};
#pragma unroll 1
        for (int x = 0; x < KEYS<OWN_KEYS>; ++x, ++element) {
            const unsigned nth = element % 4;
            if (x == 0 || nth == 0)
                words = philox(element / 4, at.site, step_of(at.step, at.on_device), at.key0, at.key1);
            const unsigned word = nth < 2 ? (nth ? words.v[1] : words.v[0])
                                          : (nth == 2 ? words.v[2] : words.v[3]);
            bits |= unsigned(word >= at.lowest) << (OWN_KEYS ? x * RN + y : y * RN + x);
        }
    }
    return bits;
}

// The score of a product: softcap, bias, -inf where not `seen`. slope: the softcap's derivative.
__device__ __forceinline__ real score(const Attention& at, int b, int h, int i, int j, bool seen,
                                      real product, real& slope) {
    slope = 1;
    if (at.softcap > 0) {
        const real t = tanh(product);
        slope = 1 - t * t;
        product = at.softcap * t;
    }
    if (!seen) return -infinity();
    if (!at.bias) return product;
    return product + at.bias[b * at.bias_b + h * at.bias_h + i * at.bias_t + j * at.bias_s];
}
