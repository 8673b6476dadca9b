// What the kernels share. REAL is the type of all arithmetic, and of the arrays, but for those that
// are STORED in less. Blocks are whole warps, at most 1024 threads.
#include "storage.cuh"
#ifndef STORED
#define STORED REAL
#endif
#ifndef WIDE
#define WIDE 0
#endif
#ifndef SHARED_BUFFER
// The dynamic shared memory of a block, as an array of T.
#define SHARED_BUFFER(T, name)                                          \
    extern __shared__ __align__(16) unsigned char shared_bytes[];       \
    T* const name = reinterpret_cast<T*>(shared_bytes)
#endif

using real = REAL;
using stored = STORED;

// Elements that are read and written together: 16 bytes where the launcher saw that rows allow it.
constexpr int VEC = WIDE ? 16 / sizeof(stored) : 1;

template <class T, int N>
struct __align__(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Elements {
    T v[N];
};
using Pack = Elements<real, VEC>;

template <int N = VEC>
__device__ __forceinline__ Elements<real, N> load(const real* p) {
    return *reinterpret_cast<const Elements<real, N>*>(p);
}
template <int N>
__device__ __forceinline__ void store(real* p, Elements<real, N> pack) {
    *reinterpret_cast<Elements<real, N>*>(p) = pack;
}

// Of what is stored in less.
template <int N = VEC, class T>
__device__ __forceinline__ Elements<real, N> load(const T* p) {
    const Elements<T, N> from = *reinterpret_cast<const Elements<T, N>*>(p);
    Elements<real, N> pack;
    for (int k = 0; k < N; ++k) pack.v[k] = from.v[k];
    return pack;
}
template <int N, class T>
__device__ __forceinline__ void store(T* p, Elements<real, N> pack) {
    Elements<T, N> to;
    for (int k = 0; k < N; ++k) to.v[k] = pack.v[k];
    *reinterpret_cast<Elements<T, N>*>(p) = to;
}

__device__ __forceinline__ real infinity() { return real(__longlong_as_double(0x7ff0000000000000ll)); }

__device__ __forceinline__ real not_a_number() {
    return real(__longlong_as_double(0x7ff8000000000000ll));
}

// NaN stays NaN, which fmin and fmax would lose.
__device__ __forceinline__ real clip(real x, real low, real high) {
    return x < low ? low : x > high ? high : x;
}
__device__ __forceinline__ real larger(real a, real b) { return a > b || a != a ? a : b; }

struct Add {
    __device__ real operator()(real a, real b) const { return a + b; }
};
struct Larger {
    __device__ real operator()(real a, real b) const { return larger(a, b); }
};

// Of N values of each thread, over all threads of the block; every thread gets the result. The
// order is fixed: the same block size gives the same bits.
template <int N, class F>
__device__ void block_reduce(real (&v)[N], F f, real neutral) {
    for (int offset = 16; offset > 0; offset /= 2)
        for (int n = 0; n < N; ++n) v[n] = f(v[n], __shfl_xor_sync(0xffffffffu, v[n], offset));
    if (blockDim.x == 32) return;
    __shared__ real parts[N][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncthreads();  // whoever still reads the parts of the last reduction
    if (lane == 0)
        for (int n = 0; n < N; ++n) parts[n][warp] = v[n];
    __syncthreads();
    for (int n = 0; n < N; ++n) v[n] = lane < blockDim.x / 32 ? parts[n][lane] : neutral;
    for (int offset = 16; offset > 0; offset /= 2)
        for (int n = 0; n < N; ++n) v[n] = f(v[n], __shfl_xor_sync(0xffffffffu, v[n], offset));
}

template <int N>
__device__ __forceinline__ void block_sum(real (&v)[N]) {
    block_reduce(v, Add(), real(0));
}

__device__ __forceinline__ real block_sum(real x) {
    real v[1] = {x};
    block_reduce(v, Add(), real(0));
    return v[0];
}

__device__ __forceinline__ real block_max(real x) {
    real v[1] = {x};
    block_reduce(v, Larger(), -infinity());
    return v[0];
}
