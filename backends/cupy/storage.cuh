// Numbers that are kept in two bytes and computed with as float: rounded to the nearest, ties to
// even, by one instruction each. By PTX and not cuda_bf16.h, which not every NVRTC brings along;
// shim.h has the same types for the CPU.
#ifndef CUDA_SHIM
struct bfloat16 {
    unsigned short bits;
    __device__ __forceinline__ operator float() const {
        return __uint_as_float((unsigned)bits << 16);
    }
    __device__ __forceinline__ bfloat16& operator=(float x) {
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
        return *this;
    }
};

struct float16 {
    unsigned short bits;
    __device__ __forceinline__ operator float() const {
        float x;
        asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
        return x;
    }
    __device__ __forceinline__ float16& operator=(float x) {
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
        return *this;
    }
};
#endif
