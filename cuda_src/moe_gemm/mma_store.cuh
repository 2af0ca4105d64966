// The epilogue of gemm_mma: from sums to results in memory.
#pragma once
#include "common/activation.cuh"
#include "common/mma.cuh"
#include "common/warp.cuh"
#include "moe_gemm/mma_block.cuh"

// The result of sums[n] or, gated, of sums[2 n] (gates) and sums[2 n + 1] (ups), at one of a lane's places in
// fragments.
template <int ACTIVATION, int N>
__device__ __forceinline__ float result(const float (&sums)[N][4], int n, int at, float factor) {
    if constexpr (ACTIVATION != NO_ACTIVATION)
        return activate<ACTIVATION>(sums[n * 2][at] * factor, sums[n * 2 + 1][at] * factor);
    else
        return sums[n][at] * factor;
}

// The results of one row: of the two rows of a fragment that a lane has sums of, row j. A pair of each fragment.
template <typename T, class Block>
__device__ __forceinline__ void pack_row(unsigned (&pairs)[Block::OUT], const float (&sums)[Block::N][4], int j,
                                         float factor) {
#pragma unroll
    for (int n = 0; n < Block::OUT; ++n) {
        const float low = result<Block::ACTIVATION>(sums, n, j * 2, factor);
        const float high = result<Block::ACTIVATION>(sums, n, j * 2 + 1, factor);
        pairs[n] = pack<T>(low, high);
    }
}

// The place of a warp's results. Neighbouring lanes exchange pairs of two fragments, so that each then has four
// neighbours of one fragment: 8 bytes.
template <typename T, class Block> struct MmaOutput {
    const MmaTile<Block>& tile;
    const int pair, first;

    __device__ __forceinline__ MmaOutput(const MmaTile<Block>& tile, const MmaThread<Block>& me)
        : tile(tile), pair(me.pair),
          first(tile.first_column + me.weight_warp * Block::OUT * 8 + pair % 2 * 8 + pair / 2 * 4) {}

    __device__ __forceinline__ void write(int row, int end, const unsigned (&pairs)[Block::OUT]) const {
        T* const to = static_cast<T*>(tile.p.out) + (long long)row * tile.half + first;
#pragma unroll
        for (int n = 0; n < Block::OUT; n += 2) {
            const bool odd = pair % 2;
            const unsigned got = __shfl_xor_sync(FULL_WARP, odd ? pairs[n] : pairs[n + 1], 1);
            const uint2 four = make_uint2(odd ? got : pairs[n], odd ? pairs[n + 1] : got);
            if (row < end && first + n * 8 < tile.half) *reinterpret_cast<uint2*>(to + n * 8) = four;
        }
    }
};
