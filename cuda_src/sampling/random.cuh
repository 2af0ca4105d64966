// Generate the random numbers of a draw.
#pragma once
#include "common/numeric.cuh"
#include "common/philox.cuh"

// The random numbers of a row, as a function of the seed, the offset, the row's index among the rows with the same
// seed, the group of tokens and the round of the draw.
//
// One counter word holds the index in its high 24 bits and the round in its low 8 bits. A batch has at most 2^24 rows,
// and a draw exceeds 256 rounds with a probability below 1e-30 for any top_p.
struct Stream {
    unsigned long long seed, offset;
    unsigned place; // the row's index in the high 24 bits; 0 if each row has its own seed

    __device__ __forceinline__ uint4 at(unsigned group, unsigned round) const {
        return philox(make_uint4(group, place ^ round, unsigned(offset), unsigned(offset >> 32)), seed);
    }
};

// Return -log2 of an exponentially distributed time in units of ln 2. For short times a series replaces log2(1 - v),
// because 1 - v would round their digits away.
__device__ __forceinline__ float earliness(unsigned bits) {
    const float v = fmaf(float(bits), 0x1p-32f, 0x1p-33f);
    const float series = v * fmaf(v, fmaf(v, fmaf(v, 0.25f, 1.f / 3), 0.5f), 1.f) * LOG2_E;
    return -fast_log2(v < 0x1p-6f ? series : -fast_log2(1.f - v));
}
