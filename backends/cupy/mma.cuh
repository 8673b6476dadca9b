// Tensor cores, and copies to shared memory that go on while a block computes (sm_80 and newer): one
// instruction each. All lanes of a warp call them together. Under CUDA_SHIM each has a plain form
// that gives every lane what the instruction does, so that a wrong index shows on the CPU.
//
// multiply: c (16 x 8) += a (16 x 16) b (16 x 8), c in float. Lane 4 g + t holds, two to a word,
//
//   a[0], a[1]: rows g, g + 8; columns 2t, 2t + 1      a[2], a[3]: the same rows, columns 2t + 8, 9
//   b0: rows 2t, 2t + 1 of column g                    b1: rows 2t + 8, 2t + 9 of it
//   c[0], c[1]: row g, columns 2t, 2t + 1              c[2], c[3]: row g + 8, the same columns
//
// load_matrices: four matrices of 8 x 8 numbers from shared memory, whose rows lie anywhere: lane 8 m
// + r says where row r of matrix m begins, at 16 bytes each. to[m] are numbers 2t, 2t + 1 of row g
// of matrix m; of load_transposed of its column g.
//
// Copies: 16 bytes a call, from global to shared memory, or zeros. They are there after `wait`, for
// the thread that asked; for others after a barrier.

#ifndef CUDA_SHIM
template <class T>
__device__ __forceinline__ unsigned pair(float low, float high);
template <>
__device__ __forceinline__ unsigned pair<bfloat16>(float low, float high) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
template <>
__device__ __forceinline__ unsigned pair<float16>(float low, float high) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

template <class T>
__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                         unsigned b1);
template <>
__device__ __forceinline__ void multiply<bfloat16>(float (&c)[4], const unsigned (&a)[4],
                                                   unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void multiply<float16>(float (&c)[4], const unsigned (&a)[4],
                                                  unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ unsigned shared_address(const void* p) {
    return unsigned(__cvta_generic_to_shared(p));
}

template <class T>
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], const T* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}
template <class T>
__device__ __forceinline__ void load_transposed(unsigned (&to)[4], const T* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

struct Copies {
    __device__ __forceinline__ void start(void* to, const void* from, bool any) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :: "r"(shared_address(to)), "l"(__cvta_generic_to_global(from)),
                        "r"(any ? 16 : 0)
                     : "memory");
    }
    __device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
    // All groups have come but for the last N.
    template <int N>
    __device__ __forceinline__ void wait() {
        asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
    }
};
#else
template <class T>
SHIM_INLINE unsigned pair(float low, float high) {
    T both[2];
    both[0] = low, both[1] = high;
    unsigned word;
    std::memcpy(&word, both, 4);
    return word;
}

template <class T>
SHIM_INLINE float number_of(unsigned word, int nth) {
    T x;
    x.bits = (unsigned short)(word >> 16 * nth);
    return x;
}

// Of each lane, whoever holds a number says what it is.
template <class T>
static inline void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint64_t rows[2] = {a[0] | (uint64_t)a[2] << 32, a[1] | (uint64_t)a[3] << 32};
    const uint64_t column = b0 | (uint64_t)b1 << 32;
    uint64_t as[2][4], bs[2][4];  // of the four lanes that share a row, or a column
    for (int n = 0; n < 4; ++n)
        for (int half = 0; half < 2; ++half) {
            as[half][n] = __shfl_sync(0xffffffffu, rows[half], 4 * g + n);
            bs[half][n] = __shfl_sync(0xffffffffu, column, 4 * (2 * t + half) + n);
        }
    for (int k = 0; k < 16; ++k) {
        const int holder = k % 8 / 2, word = k / 8, nth = k % 2;
        for (int e = 0; e < 4; ++e)
            c[e] += number_of<T>((unsigned)(as[e / 2][holder] >> 32 * word), nth) *
                    number_of<T>((unsigned)(bs[e % 2][holder] >> 32 * word), nth);
    }
}

template <class T>
SHIM_INLINE const T* row_of_lane(const T* row, int lane) {
    if ((uintptr_t)row % 16) shim::fail("a row of a matrix must begin at 16 bytes");
    return (const T*)__shfl_sync(0xffffffffu, (uint64_t)row, lane);
}
template <class T>
static inline void load_matrices(unsigned (&to)[4], const T* row) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int m = 0; m < 4; ++m) {
        const T* const own = row_of_lane(row, 8 * m + g);
        to[m] = own[2 * t].bits | (unsigned)own[2 * t + 1].bits << 16;
    }
}
template <class T>
static inline void load_transposed(unsigned (&to)[4], const T* row) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int m = 0; m < 4; ++m) {
        const T *const low = row_of_lane(row, 8 * m + 2 * t), *const high = row_of_lane(row, 8 * m + 2 * t + 1);
        to[m] = low[g].bits | (unsigned)high[g].bits << 16;
    }
}

// What is copied comes as late as it may, and NaN until then.
struct Copies {
    struct Copy {
        uint4* to;
        const uint4* from;
        bool any;
        int group;
    } waiting[256];
    int n = 0, groups = 0;

    void start(void* to, const void* from, bool any) {
        if (n == 256) shim::fail("more copies are under way than the stand-in counts");
        *(uint4*)to = {~0u, ~0u, ~0u, ~0u};
        waiting[n++] = {(uint4*)to, (const uint4*)from, any, groups};
    }
    void end_group() { ++groups; }
    template <int N>
    void wait() {
        int left = 0;
        for (int i = 0; i < n; ++i) {
            const Copy& copy = waiting[i];
            if (copy.group >= groups - N) waiting[left++] = copy;
            else *copy.to = copy.any ? *copy.from : uint4{0, 0, 0, 0};
        }
        n = left;
    }
};
#endif
