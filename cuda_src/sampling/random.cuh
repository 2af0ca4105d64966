// The random numbers of a draw.
#pragma once
#include "common/numeric.cuh"
#include "common/philox.cuh"

// The random numbers of a row: a function of the seed, the offset, the place of the row among those of one seed, the
// group of tokens and the round of the draw.
//
// A word of the counter holds both the place and the round, in its high 24 and its low 8 bits: a batch has at most 2^24
// rows, and a draw has more than 256 rounds with a probability below 1e-30, whatever top_p.
struct Stream {
    unsigned long long seed, offset;
    unsigned place; // in the high 24 bits; 0 where each row has a seed of its own

    __device__ __forceinline__ uint4 at(unsigned group, unsigned round) const {
        return philox(make_uint4(group, place ^ round, unsigned(offset), unsigned(offset >> 32)), seed);
    }
};

// -log2(an exponentially distributed time, in units of ln 2). Where the time is short, 1 - v would round its digits
// away, so a series takes over.
__device__ __forceinline__ float earliness(unsigned bits) {
    const float v = fmaf(float(bits), 0x1p-32f, 0x1p-33f);
    const float series = v * fmaf(v, fmaf(v, fmaf(v, 0.25f, 1.f / 3), 0.5f), 1.f) * LOG2_E;
    return -fast_log2(v < 0x1p-6f ? series : -fast_log2(1.f - v));
}
