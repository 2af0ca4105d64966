// Draw random numbers with Philox.
#pragma once
#include "common/numeric.cuh"
#include "common/philox.cuh"

// A word of the Philox counter holds the row's index in its high 24 bits (a batch has at most 2^24 rows) and the round
// in its low 8 bits. For any top_p, a draw takes more than 256 rounds with a probability below 1e-30.
struct Stream {
    unsigned long long seed, offset;
    unsigned row_bits; // the row's index in the high 24 bits; 0 if each row has its own seed

    __device__ __forceinline__ uint4 at(unsigned group, unsigned round) const {
        return philox(make_uint4(group, row_bits ^ round, unsigned(offset), unsigned(offset >> 32)), seed);
    }
};

// Return -log2(t) of the exponentially distributed arrival time t = -log2(1 - v), with v uniform in (0, 1). A small v
// uses a series, because `1 - v` would lose its low bits.
__device__ __forceinline__ float earliness(unsigned bits) {
    const float v = fmaf(float(bits), 0x1p-32f, 0x1p-33f);
    const float series = v * fmaf(v, fmaf(v, fmaf(v, 0.25f, 1.f / 3), 0.5f), 1.f) * LOG2_E;
    return -fast_log2(v < 0x1p-6f ? series : -fast_log2(1.f - v));
}
