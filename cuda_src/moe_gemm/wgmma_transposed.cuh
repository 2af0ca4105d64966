// What gemm_wgmma does otherwise with weights that lie as [experts, k, n].
//
// A tile of shared memory then has a step along k as a row, of 64 weights, and wgmma takes it as an MN-major operand: a
// stage of 64 steps has such a tile for each warpgroup. Gates and ups that are interleaved alternate by one, so that one
// thread has the sum of a gate and another one that of its up; `part_pairs` brings them together.
#pragma once
#include "common/warp.cuh"
#include "moe_gemm/wgmma_layout.cuh"
#include "moe_gemm/wgmma_widths.cuh"

// Start the copies of a stage's weights, from weight `first` and step `x` along k on. A box is one warpgroup's.
template <unsigned long long POLICY>
__device__ __forceinline__ void load_transposed(unsigned to, const TensorMap& map, int x, int first, int expert,
                                                unsigned barrier) {
#pragma unroll
    for (int i = 0; i < WARPGROUPS; ++i)
        tma_load<POLICY>(to + i * 64 * ROW_BYTES, map, first + i * 64, x, expert, 0, barrier);
}

// The weights of a warpgroup in stage 0, which begin at `address`.
template <bool TURNED> __device__ __forceinline__ auto weights_at(unsigned address) {
    if constexpr (TURNED)
        return MMajor{mn_major_descriptor<64 * ROW_BYTES>(address)};
    else
        return k_major_descriptor(address);
}

// The operand of product i of a stage, which lies `at` units of 16 bytes behind stage 0: of 16 numbers along k.
__device__ __forceinline__ unsigned long long product_of(unsigned long long a, unsigned long long at, int i) {
    return a + at + (i * 32 >> 4);
}
__device__ __forceinline__ MMajor product_of(MMajor a, unsigned long long at, int i) {
    return {a.descriptor + at + (i * 16 * ROW_BYTES >> 4)};
}

// Bring the sums of gates and of their ups together, of at most `tokens` tokens. Of a warp's 16 weights a thread has weight
// lane / 4 and 8 more in a pair of sums each: an even one is a gate, the next its up. It gets gate lane / 4 of the warp's
// 8 in the first pair, and its up in the second. In each of two exchanges a thread gives one of its pairs.
template <int REGISTERS> __device__ __forceinline__ void part_pairs(float (&c)[REGISTERS], int tokens) {
    const int lane = threadIdx.x % 32, column = lane / 4;
    const bool has_ups = column & 1, is_high = column & 4;
    // The thread of the column's gate in the first exchange, if its weights are among the first 8, else of its up.
    const int first = column % 4 * 8 + lane % 4 + (is_high ? 4 : 0), second = first ^ 4;
#pragma unroll
    for (int i = 0; i < REGISTERS; i += 4) {
        if (i * 2 >= tokens) break;
        float a[2], b[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float low = c[i + j], high = c[i + 2 + j];
            a[j] = __shfl_sync(FULL_WARP, has_ups ? high : low, first);
            b[j] = __shfl_sync(FULL_WARP, has_ups ? low : high, second);
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) c[i + j] = is_high ? b[j] : a[j], c[i + 2 + j] = is_high ? a[j] : b[j];
    }
}
