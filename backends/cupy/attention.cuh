// What all kernels of attention are given, and which keys a query sees.

__device__ constexpr int least(int a, int b) { return a < b ? a : b; }
__device__ constexpr int most(int a, int b) { return a < b ? b : a; }

// The first parameters of every kernel. Strides are in elements, 0 along broadcast axes; those of
// the last axis of q, k, v are 1. Query i, at key i + S - T, sees the keys from `left` before to
// `right` behind it. factor: what q is multiplied by, over softcap where there is one (else 0).
// keep: 1 - rate; lowest: the lowest word of philox.cuh that keeps. packed: rows of q, k, v and all
// outputs can be accessed 16 bytes at a time.
#define ATTENTION_PARAMETERS                                                                       \
    const stored *__restrict__ q, const stored *__restrict__ k, const stored *__restrict__ v,      \
        const stored *__restrict__ bias, const stored *__restrict__ sinks,                         \
        const bool *__restrict__ mask, long long heads, long long groups, long long queries,       \
        long long keys, long long width, long long value_width, long long q_b, long long q_h,      \
        long long q_t, long long k_b, long long k_g, long long k_s, long long v_b, long long v_g,  \
        long long v_s, long long bias_b, long long bias_h, long long bias_t, long long bias_s,     \
        long long mask_b, long long mask_h, long long mask_t, long long mask_s, long long left,    \
        long long right, real factor, real softcap, real keep, long long lowest, long long key0,   \
        long long key1, long long site, long long step, const long long *__restrict__ on_device,    \
        long long packed
#define ATTENTION                                                                                  \
    {q,           k,           v,         bias,         sinks,  mask,   int(heads), int(groups),   \
     int(queries), int(keys),  int(width), int(value_width), q_b, q_h,  q_t,        k_b,           \
     k_g,         k_s,         v_b,       v_g,          v_s,    bias_b, bias_h,     bias_t,        \
     bias_s,      mask_b,      mask_h,    mask_t,       mask_s, int(left), int(right), factor,     \
     softcap,     keep,        lowest,    unsigned(key0), unsigned(key1), unsigned(site),          \
     unsigned(step), on_device, packed != 0}

struct Attention {
    const stored *q, *k, *v, *bias, *sinks;
    const bool* mask;
    int heads, groups, queries, keys, width, value_width;
    long long q_b, q_h, q_t, k_b, k_g, k_s, v_b, v_g, v_s;
    long long bias_b, bias_h, bias_t, bias_s, mask_b, mask_h, mask_t, mask_s;
    int left, right;
    real factor, softcap, keep;
    long long lowest;
    unsigned key0, key1, site, step;
    const long long* on_device;  // or null: where the step lies
    bool packed;

    __device__ __forceinline__ int ahead() const { return keys - queries; }
    __device__ __forceinline__ int group(int h) const { return h / (heads / groups); }

    // The keys, and the queries, that some of the others [from, to) see or are seen by.
    __device__ __forceinline__ int first_key(int from) const {
        return most(0, from + ahead() - left);
    }
    __device__ __forceinline__ int end_of_keys(int to) const {
        return least(keys, to + ahead() + right);
    }
    __device__ __forceinline__ int first_query(int from) const {
        return most(0, from - ahead() - right);
    }
    __device__ __forceinline__ int end_of_queries(int to) const {
        return least(queries, to - ahead() + left);
    }

    // Of queries [i0, i1) and keys [j0, j1): whether a window leaves any pair; all pairs.
    __device__ __forceinline__ bool meets(int i0, int i1, int j0, int j1) const {
        i1 = least(i1, queries);
        return i0 < i1 && first_key(i0) < j1 && j0 < end_of_keys(i1);
    }
    __device__ __forceinline__ bool sees_all(int i0, int i1, int j0, int j1) const {
        return i1 <= queries && i1 - 1 + ahead() - left <= j0 && j1 <= end_of_keys(i0 + 1);
    }
    __device__ __forceinline__ bool sees(int b, int h, int i, int j) const {
        if (i >= queries || j < i + ahead() - left || j >= end_of_keys(i + 1)) return false;
        return !mask || mask[b * mask_b + h * mask_h + i * mask_t + j * mask_s];
    }
};
