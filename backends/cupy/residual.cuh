// A residual connection before a norm: what a thread reads of x, or of s = x + addend.
#include "common.cuh"

// The pack at i, of s where there is an addend; then it is written to s, where the same thread finds
// it again: rounded as it is stored there, so that all statistics are those of s.
__device__ __forceinline__ Pack summed(const stored* x, const stored* addend, stored* s, long long i) {
    Pack p = load(x + i);
    if (addend) {
        const Pack other = load(addend + i);
        for (int k = 0; k < VEC; ++k) {
            stored sum;
            sum = p.v[k] + other.v[k];
            p.v[k] = sum;
        }
        store(s + i, p);
    }
    return p;
}

// `store` to global memory by one access, by PTX: in a loop over rows the compiler rewrites the
// addresses of a pack's elements one by one, and then stores each element by itself.
__device__ __forceinline__ void store_whole(stored* p, Pack pack) {
#ifndef CUDA_SHIM
    if constexpr (sizeof(stored) * VEC == 16) {
        Elements<stored, VEC> to;
        for (int k = 0; k < VEC; ++k) to.v[k] = pack.v[k];
        uint4 w;
        memcpy(&w, &to, 16);
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::
                     "l"(__cvta_generic_to_global(p)), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w)
                     : "memory");
        return;
    }
#endif
    store(p, pack);
}

// dx at i, to which ds, the gradient of s that comes from elsewhere, is added where there is one.
__device__ __forceinline__ void store_gradient(stored* dx, const stored* ds, long long i, Pack own) {
    if (ds) {
        const Pack other = load(ds + i);
        for (int k = 0; k < VEC; ++k) own.v[k] += other.v[k];
    }
    store_whole(dx + i, own);
}
