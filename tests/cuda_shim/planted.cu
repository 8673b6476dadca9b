// Kernels with one mistake each, and right ones beside them: what the stand-in must and must not
// report (tests/test_cuda_shim.py). Not part of the library. REAL is float.
using real = REAL;

#define ALL 0xffffffffu

// ---- Right ----

extern "C" __global__ void reverse(const real* x, real* y) {
    __shared__ real row[64];
    row[threadIdx.x] = x[blockIdx.x * 64 + threadIdx.x];
    __syncthreads();
    y[blockIdx.x * 64 + threadIdx.x] = row[63 - threadIdx.x];
}

extern "C" __global__ void warp_reverse(const real* x, real* y) {
    __shared__ real row[64];
    row[threadIdx.x] = x[threadIdx.x];
    __syncwarp();
    y[threadIdx.x] = row[threadIdx.x ^ 31];
    __syncwarp();
    row[threadIdx.x ^ 31] = 0;
}

extern "C" __global__ void shuffled(const real* x, real* y) {
    real sum = x[threadIdx.x];
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(ALL, sum, offset);
    const real below = __shfl_up_sync(ALL, x[threadIdx.x], 1);
    const real above = __shfl_down_sync(ALL, x[threadIdx.x], 1);
    const real third = __shfl_sync(ALL, x[threadIdx.x], 3);
    const unsigned odd = __ballot_sync(ALL, threadIdx.x % 2);
    y[threadIdx.x] = sum + 1000 * below + 2000 * above + 4000 * third + (odd == 0xaaaaaaaau);
}

extern "C" __global__ void some_lanes(const real* x, real* y) {
    if (threadIdx.x < 8) y[threadIdx.x] = __shfl_xor_sync(0xffu, x[threadIdx.x], 1);
    else y[threadIdx.x] = __shfl_down_sync(0xffffff00u, x[threadIdx.x], 1);
}

extern "C" __global__ void counted(real* y, long long n) {
    if (threadIdx.x < n) atomicAdd(y, real(1));
}

extern "C" __global__ void dynamic(const real* x, real* y, long long n) {
    SHARED_BUFFER(real, row);
    for (int i = threadIdx.x; i < n; i += blockDim.x) row[i] = x[i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = row[n - 1 - i];
}

struct Pair {
    const real* at[2];
};
struct Sizes {
    long long at[2];
};

extern "C" __global__ void one_of_two(Pair x, Sizes sizes, real* y) {  // a block an array
    if (threadIdx.x < sizes.at[blockIdx.x]) y[blockIdx.x * 64 + threadIdx.x] = x.at[blockIdx.x][threadIdx.x];
}

// ---- Wrong ----

extern "C" __global__ void missing_barrier(const real* x, real* y) {
    __shared__ real row[64];
    row[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = row[63 - threadIdx.x];
}

extern "C" __global__ void write_after_read(const real* x, real* y) {
    __shared__ real row[64];
    row[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = row[63 - threadIdx.x];
    row[threadIdx.x] = 0;
}

extern "C" __global__ void same_place(real* y) {
    __shared__ real total;
    total = threadIdx.x;
    __syncthreads();
    y[threadIdx.x] = total;
}

extern "C" __global__ void warp_without_barrier(const real* x, real* y) {
    __shared__ real row[64];
    row[threadIdx.x] = x[threadIdx.x];
    const real other = __shfl_xor_sync(ALL, x[threadIdx.x], 31);  // orders no memory
    y[threadIdx.x] = other + row[threadIdx.x ^ 31];
}

extern "C" __global__ void unwritten(real* y) {
    __shared__ real row[64];
    if (threadIdx.x) row[threadIdx.x] = 1;
    __syncthreads();
    y[threadIdx.x] = row[63 - threadIdx.x];
}

extern "C" __global__ void left_over(real* y) {  // what the block before has left there
    __shared__ real row[64];
    if (blockIdx.x == 0) row[threadIdx.x] = 1;
    __syncthreads();
    y[blockIdx.x * 64 + threadIdx.x] = row[threadIdx.x];
}

extern "C" __global__ void divergent(const real* x, real* y) {
    if (threadIdx.x < 40) __syncthreads();
    y[threadIdx.x] = x[threadIdx.x];
}

extern "C" __global__ void two_barriers(const real* x, real* y) {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
    y[threadIdx.x] = x[threadIdx.x];
}

extern "C" __global__ void lane_away(const real* x, real* y) {
    if (threadIdx.x == 5) {
        __syncthreads();
        return;
    }
    y[threadIdx.x] = __shfl_xor_sync(ALL, x[threadIdx.x], 1);
    __syncthreads();
}

extern "C" __global__ void lane_left(const real* x, real* y) {
    if (threadIdx.x >= 20) return;
    y[threadIdx.x] = __shfl_down_sync(ALL, x[threadIdx.x], 1);
}

extern "C" __global__ void not_in_mask(const real* x, real* y) {
    y[threadIdx.x] = __shfl_xor_sync(0xffu, x[threadIdx.x], 1);
}

extern "C" __global__ void write_behind(const real* x, real* y) {
    y[threadIdx.x + 1] = x[threadIdx.x];
}

extern "C" __global__ void read_before(const real* x, real* y) {
    y[threadIdx.x] = x[(int)threadIdx.x - 1];
}

extern "C" __global__ void shared_behind(real* y) {
    __shared__ real row[63];
    row[threadIdx.x] = 1;
    __syncthreads();
    y[threadIdx.x] = row[0];
}

extern "C" __global__ void dynamic_behind(real* y) {
    SHARED_BUFFER(real, row);
    row[threadIdx.x] = 1;
    y[threadIdx.x] = 1;
}

extern "C" __global__ void misaligned(const real* x, real* y) {
    const double* const pairs = reinterpret_cast<const double*>(x + 1);
    if (threadIdx.x < 16) y[threadIdx.x] = real(pairs[threadIdx.x]);
}

extern "C" __global__ void blocks_collide(real* y) { y[threadIdx.x] = blockIdx.x; }

extern "C" __global__ void block_reads_another(const real* x, real* y) {
    const int i = blockIdx.x * 64 + threadIdx.x, n = gridDim.x * 64;
    y[i] = x[i];
    __syncthreads();
    if (y[(i + 64) % n] > 1e30f) y[i] = 0;
}

extern "C" __global__ void counted_plainly(real* y) { *y += 1; }

extern "C" __global__ void atomic_and_plain(real* y) {
    if (threadIdx.x) atomicAdd(y, real(1));
    else *y = 0;
}

extern "C" __global__ void takes(const real* x, long long n, real a, real* y) {
    y[threadIdx.x] = x[threadIdx.x] * a + n;
}

extern "C" __global__ void overflow(const real* x, real* y) {
    y[threadIdx.x] = x[threadIdx.x] + (2147483647 - 3 + (int)threadIdx.x);
}
