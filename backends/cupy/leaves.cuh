// One launch over the elements of many arrays, at most LEAVES (a macro), which come as lists in the
// arguments. Block after block has `share` elements of an array; then those of the next follow.
#include "common.cuh"

template <class T>
struct Leaves {
    T at[LEAVES];
};

struct Part {
    int leaf;
    long long start, stop;  // of its elements
};

// What the block is to do. firsts: each array's first block; of those that lists lack, the grid's end.
__device__ __forceinline__ Part part_of(const Leaves<long long>& sizes,
                                        const Leaves<long long>& firsts, long long share) {
    static_assert(LEAVES <= 64, "six halvings");
    int leaf = 0;
    for (int step = 32; step > 0; step /= 2)
        if (leaf + step < LEAVES && firsts.at[leaf + step] <= blockIdx.x) leaf += step;
    const long long start = (blockIdx.x - firsts.at[leaf]) * share;
    const long long left = sizes.at[leaf] - start;
    return {leaf, start, start + (left < share ? left : share)};
}
