// Philox4x32-10 (Salmon et al., SC 2011), as xformer/ops/random_bits.py: word i of a stream is word
// i mod 4 of block i / 4, whose counter is (block low, block high, site, step).

struct Words {
    unsigned v[4];
};

// The step of a key: from the device where it lies there, as in a captured graph.
__device__ __forceinline__ unsigned step_of(long long step, const long long* on_device) {
    return unsigned(on_device ? *on_device : step);
}

__device__ __forceinline__ Words philox(unsigned long long block, unsigned site, unsigned step,
                                        unsigned key0, unsigned key1) {
    Words c = {{unsigned(block), unsigned(block >> 32), site, step}};
    for (int round = 0; round < 10; ++round) {
        const unsigned high0 = __umulhi(0xD2511F53u, c.v[0]), low0 = 0xD2511F53u * c.v[0];
        const unsigned high1 = __umulhi(0xCD9E8D57u, c.v[2]), low1 = 0xCD9E8D57u * c.v[2];
        c = {{high1 ^ c.v[1] ^ key0, low1, high0 ^ c.v[3] ^ key1, low0}};
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return c;
}
