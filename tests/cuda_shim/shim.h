// CUDA C++ on a CPU, as far as the kernels use it: what stands in every .cu file's place of the
// compiler's own declarations. The threads of a block are fibers of one thread (runtime.cpp).
// Reads and writes are watched: the compiler puts a call before each (-fsanitize=thread), which
// runtime.cpp answers instead of the sanitizer's library.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define CUDA_SHIM 1
#define __global__
#define __device__ __attribute__((unused))
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define __constant__ static const
// One place for all blocks, which run one after the other; build.py finds it by its name.
#define __shared__ static __attribute__((aligned(16)))
#define SHARED_BUFFER(T, name) T* const name = reinterpret_cast<T*>(shim::dynamic_shared())

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) double2 { double x, y; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline double2 make_double2(double x, double y) { return {x, y}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace shim {

struct Site { const char* file; int line; };

void barrier(Site);
uint64_t warp(Site, const char* what, unsigned mask, uint64_t value, int source, bool ballot);
void* dynamic_shared();
void atomic(const void* address, int size, const void* from);
void copy(void* to, const void* from, size_t size);  // unwatched
[[noreturn]] void fail(const char* format, ...);

enum Direction { FROM, UP, DOWN, XOR };

template <class T>
T shuffle(Site site, const char* what, Direction d, unsigned mask, T value, int by, int width = 32) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "4 or 8 bytes");
    const int lane = (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;
    const int low = lane / width * width;
    int source = d == FROM ? low + ((by % width) + width) % width
               : d == UP   ? lane - by
               : d == DOWN ? lane + by
                           : lane ^ by;
    if (source < low || source >= low + width) source = lane;  // CUDA gives back the own value
    uint64_t word = 0;
    std::memcpy(&word, &value, sizeof(T));
    word = warp(site, what, mask, word, source, false);
    std::memcpy(&value, &word, sizeof(T));
    return value;
}

template <class T, class F>
__attribute__((noinline, no_sanitize("thread"))) T update(T* address, F f) {
    atomic(address, sizeof(T), __builtin_return_address(0));
    const T old = *(volatile T*)address;  // one thread runs at a time: nothing comes between
    *(volatile T*)address = f(old);
    return old;
}

}  // namespace shim

#define __expf(x) std::exp((float)(x))  // glibc has functions of these names
#define __logf(x) std::log((float)(x))

#define SHIM_SITE (shim::Site{__FILE__, __LINE__})
#define __syncthreads() shim::barrier(SHIM_SITE)
#define __syncwarp(...) ((void)shim::warp(SHIM_SITE, "__syncwarp", shim_mask(__VA_ARGS__), 0, -1, false))
#define __shfl_sync(...) shim::shuffle(SHIM_SITE, "__shfl_sync", shim::FROM, __VA_ARGS__)
#define __shfl_up_sync(...) shim::shuffle(SHIM_SITE, "__shfl_up_sync", shim::UP, __VA_ARGS__)
#define __shfl_down_sync(...) shim::shuffle(SHIM_SITE, "__shfl_down_sync", shim::DOWN, __VA_ARGS__)
#define __shfl_xor_sync(...) shim::shuffle(SHIM_SITE, "__shfl_xor_sync", shim::XOR, __VA_ARGS__)
#define __ballot_sync(mask, p) ((unsigned)shim::warp(SHIM_SITE, "__ballot_sync", mask, (p) != 0, -1, true))
#define __any_sync(mask, p) (__ballot_sync(mask, p) != 0)
#define __all_sync(mask, p) (__ballot_sync(mask, !(p)) == 0)

static inline unsigned shim_mask(unsigned mask = 0xffffffffu) { return mask; }
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __trap() { shim::fail("__trap()"); }

#define SHIM_INLINE static inline __attribute__((always_inline))
#define SHIM_MEMBER inline __attribute__((always_inline))
template <class T> static inline T __ldg(const T* p) { return *p; }
template <class T> SHIM_INLINE T atomicAdd(T* p, T v) { return shim::update(p, [v](T old) { return old + v; }); }
template <class T> SHIM_INLINE T atomicMax(T* p, T v) { return shim::update(p, [v](T old) { return old > v ? old : v; }); }
template <class T> SHIM_INLINE T atomicMin(T* p, T v) { return shim::update(p, [v](T old) { return old < v ? old : v; }); }
template <class T> SHIM_INLINE T atomicExch(T* p, T v) { return shim::update(p, [v](T) { return v; }); }
template <class T> SHIM_INLINE T atomicCAS(T* p, T was, T v) { return shim::update(p, [=](T old) { return old == was ? v : old; }); }

using std::abs; using std::ceil; using std::erf; using std::exp; using std::exp2; using std::expm1;
using std::floor; using std::fma; using std::fmax; using std::fmin; using std::isfinite;
using std::isinf; using std::isnan; using std::log; using std::log1p; using std::log2; using std::pow;
using std::sqrt; using std::tanh;
static inline float rsqrt(float x) { return 1 / std::sqrt(x); }
static inline double rsqrt(double x) { return 1 / std::sqrt(x); }
static inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
static inline float __fdividef(float a, float b) { return a / b; }
template <class A, class B> constexpr std::common_type_t<A, B> min(A a, B b) { return b < a ? b : a; }
template <class A, class B> constexpr std::common_type_t<A, B> max(A a, B b) { return a < b ? b : a; }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __float_as_int(float x) { int i; std::memcpy(&i, &x, 4); return i; }
static inline double __longlong_as_double(long long i) { double x; std::memcpy(&x, &i, 8); return x; }
static inline float __int_as_float(int i) { float x; std::memcpy(&x, &i, 4); return x; }

// ---- What storage.cuh has for CUDA: two bytes, rounded to the nearest, ties to even ----

struct bfloat16 {
    uint16_t bits;
    SHIM_MEMBER operator float() const { return __int_as_float((int)((uint32_t)bits << 16)); }
    SHIM_MEMBER bfloat16& operator=(float x) {
        const uint32_t u = (uint32_t)__float_as_int(x);
        const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
        bits = nan ? 0x7fff : (uint16_t)((u + 0x7fffu + (u >> 16 & 1)) >> 16);
        return *this;
    }
};

struct float16 {
    uint16_t bits;
    SHIM_MEMBER operator float() const {
        const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, e = bits >> 10 & 31, m = bits & 1023;
        if (e == 0) return (sign ? -1 : 1) * (float)m * 0x1p-24f;
        return __int_as_float((int)(sign | (e == 31 ? 255u : e + 112) << 23 | m << 13));
    }
    SHIM_MEMBER float16& operator=(float x) {
        const uint32_t u = (uint32_t)__float_as_int(x) & 0x7fffffffu;
        const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
        if (u > 0x7f800000u) bits = 0x7fff;
        else if (u >= 0x477ff000u) bits = sign | 0x7c00;  // from 65520 on: infinity
        else if (u < 0x38800000u) bits = sign | (uint16_t)std::nearbyint(std::fabs(x) * 0x1p24f);
        else bits = sign | (uint16_t)((u + 0xfffu + (u >> 13 & 1) - (112u << 23)) >> 13);
        return *this;
    }
};

// ---- Arguments: types are compared, for CUDA would take any bytes for any argument ----

namespace shim {

struct Arg {
    char kind;           // p pointer, i integer, r real number
    char type;           // of the elements, as type_code says
    uint64_t bits;       // the address, the integer, or the number; a list's: where its words lie
    uint64_t low, high;  // a pointer's: what lies from low up to high may be read and written
    const Arg* items;    // a list's
    uint64_t count;      // of the items; 0: no list
};

template <class T> constexpr char type_code() {
    using U = std::remove_cv_t<T>;
    if (std::is_same<U, float>::value) return 'f';
    if (std::is_same<U, double>::value) return 'd';
    if (std::is_same<U, bfloat16>::value) return 'E';
    if (std::is_same<U, float16>::value) return 'e';
    if (std::is_same<U, bool>::value) return '?';
    if (std::is_integral<U>::value) {
        const char code = sizeof(U) == 1 ? 'b' : sizeof(U) == 2 ? 'h' : sizeof(U) == 4 ? 'i' : 'q';
        return std::is_signed<U>::value ? code : (char)(code - 'a' + 'A');
    }
    return '*';  // a struct: not compared
}

template <class A, class = void> struct Parameter {
    static_assert(std::is_pointer<A>::value || sizeof(A) == 8 || sizeof(A) == 4, "parameter");
    static constexpr int count = 0;
    static constexpr char kind = std::is_pointer<A>::value ? 'p' : std::is_integral<A>::value ? 'i' : 'r';
    static constexpr char type = type_code<std::remove_pointer_t<A>>();
    static A get(const Arg& arg) { A a; std::memcpy(&a, &arg.bits, sizeof a); return a; }
};

// A list: a struct of one array, `at`.
template <class A> struct Parameter<A, std::enable_if_t<std::is_class<A>::value>> {
    using Item = Parameter<std::remove_extent_t<decltype(A::at)>>;
    static constexpr int count = std::extent<decltype(A::at)>::value;
    static_assert(sizeof(A) == 8 * count, "items of 8 bytes, and nothing else");
    static constexpr char kind = Item::kind, type = Item::type;
    static A get(const Arg& arg) { A a; copy(&a, (const void*)arg.bits, sizeof a); return a; }
};

struct Entry {
    const char* name;
    void (*call)(void (*)(), const Arg*);
    void (*kernel)();
    int count;
    char kinds[64], types[64];
    int counts[64];  // of a list's items; 0: no list
};

template <class... A, size_t... I>
void call(void (*kernel)(), const Arg* args, std::index_sequence<I...>) {
    (void)args;
    reinterpret_cast<void (*)(A...)>(kernel)(Parameter<A>::get(args[I])...);
}

template <class... A> Entry entry(const char* name, void (*kernel)(A...)) {
    return {name,
            [](void (*k)(), const Arg* args) { call<A...>(k, args, std::index_sequence_for<A...>{}); },
            reinterpret_cast<void (*)()>(kernel), (int)sizeof...(A),
            {Parameter<A>::kind..., 0}, {Parameter<A>::type..., 0}, {Parameter<A>::count..., 0}};
}

}  // namespace shim
