// Philox4x32-10, a counter-based generator of random numbers (Salmon et al., "Parallel random numbers: as easy as 1, 2,
// 3", 2011): any random number of a stream can be computed directly.
#pragma once

__device__ __forceinline__ uint4 philox(uint4 counter, unsigned long long key) {
    unsigned key_x = unsigned(key), key_y = unsigned(key >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const unsigned long long product_x = 0xD2511F53ull * counter.x;
        const unsigned long long product_z = 0xCD9E8D57ull * counter.z;
        counter = make_uint4(unsigned(product_z >> 32) ^ counter.y ^ key_x, unsigned(product_z),
                             unsigned(product_x >> 32) ^ counter.w ^ key_y, unsigned(product_x));
        key_x += 0x9E3779B9u;
        key_y += 0xBB67AE85u;
    }
    return counter;
}

// Return a float in [0, 1), a multiple of 2^-24.
__device__ __forceinline__ float uniform(unsigned bits) { return float(bits >> 8) * 0x1p-24f; }
