// From float to what is stored in two bytes and back, of n numbers, a thread each
// (tests/test_cuda_storage.py). Not part of the library. Grid: n / 256, block 256.
#include "../../backends/cupy/common.cuh"

extern "C" __global__ void narrow(const real* x, stored* y, long long n) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i];
}

extern "C" __global__ void widen(const stored* y, real* x, long long n) {
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) x[i] = y[i];
}
