// Generate the random numbers of a draw.
#pragma once
#include "common/numeric.cuh"
#include "common/philox.cuh"

// The random numbers of a row. They depend on the seed, the offset, the row's index (if all rows have the same seed),
// the group of tokens and the round of the draw.
//
// One 32-bit word of the Philox counter holds the row's index in its high 24 bits and the round in its low 8 bits. A
// batch has at most 2^24 rows. The probability that a draw takes more than 256 rounds is below 1e-30 for any top_p.
struct Stream {
    unsigned long long seed, offset;
    unsigned place; // the row's index in the high 24 bits; 0 if each row has its own seed

    __device__ __forceinline__ uint4 at(unsigned group, unsigned round) const {
        return philox(make_uint4(group, place ^ round, unsigned(offset), unsigned(offset >> 32)), seed);
    }
};

// Turn random bits into a number v, uniform in (0, 1), and return -log2(t). Here t = -log2(1 - v) is an exponentially
// distributed arrival time. For small v, t is computed as a series, because `1 - v` would lose the low bits of v.
__device__ __forceinline__ float earliness(unsigned bits) {
    const float v = fmaf(float(bits), 0x1p-32f, 0x1p-33f);
    const float series = v * fmaf(v, fmaf(v, fmaf(v, 0.25f, 1.f / 3), 0.5f), 1.f) * LOG2_E;
    return -fast_log2(v < 0x1p-6f ? series : -fast_log2(1.f - v));
}
