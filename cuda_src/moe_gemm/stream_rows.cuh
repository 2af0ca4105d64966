// Functions of stream_one.cu, stream_routed.cu and stream_summed.cu. The header of stream.cu explains the method.
#pragma once
#include "common/hopper.cuh"
#include "common/mma.cuh"
#include "common/warp.cuh"
#include "moe_gemm/epilogue.cuh"

constexpr int VECTOR_ELEMENTS = 8; // 16-bit elements in 16 bytes

// Return row `side` (0 or 1) of a pair. A pair is the gate row and the up row of one output or, if not gated, two
// neighbouring rows.
template <int ACTIVATION> __device__ __forceinline__ int row_of_pair(int pair, int side, int pairs) {
    return has_halves(ACTIVATION) ? pair + side * pairs : 2 * pair + side;
}

// Multiply a vector (16 bytes along k) of two rows of weights by a vector of a token, and add to `sums`.
template <typename T>
__device__ __forceinline__ void multiply_vectors(float (&sums)[4], const uint4& w0, const uint4& w1, const uint4& x) {
    const unsigned low[4] = {w0.x, w1.x, w0.y, w1.y}, high[4] = {w0.z, w1.z, w0.w, w1.w};
    mma_m16n8k16<T>(sums, low, x.x, x.y);
    mma_m16n8k16<T>(sums, high, x.z, x.w);
}

// Return the dot product of a token and row `side` (0 or 1) of a pair of weight rows: the sum of the diagonal of an 8 x
// 8 accumulator fragment. Lane `4 * g + g / 2` has element (g, g).
__device__ __forceinline__ float trace_of(const float (&sums)[4], int side, int lane) {
    const float mine = lane / 4 % 2 ? sums[2 * side + 1] : sums[2 * side];
    return lanes_sum<32>(lane % 4 == lane / 8 ? mine : 0.f);
}
