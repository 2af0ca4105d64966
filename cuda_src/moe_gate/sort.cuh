// Sort an array in the registers of one thread.
#pragma once

// Sort the values in descending order with Batcher's merge exchange (Knuth, volume 3, algorithm 5.2.2M).
template <int COUNT> __device__ __forceinline__ void sort_descending(unsigned (&value)[COUNT]) {
    constexpr int TOP = COUNT > 16 ? 16 : COUNT > 8 ? 8 : COUNT > 4 ? 4 : COUNT > 2 ? 2 : 1;
#pragma unroll
    for (int p = TOP; p > 0; p /= 2)
#pragma unroll
        for (int q = TOP; q >= p; q /= 2) {
            const int r = q == TOP ? 0 : p, d = q == TOP ? p : 2 * q - p;
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                if (i + d < COUNT && (i & p) == r) {
                    const unsigned low = min(value[i], value[i + d]);
                    value[i] = max(value[i], value[i + d]);
                    value[i + d] = low;
                }
        }
}
