// Epilogue of gemm_mma.
#pragma once
#include "common/mma.cuh"
#include "common/warp.cuh"
#include "moe_gemm/mma_block.cuh"

template <typename T, class Block> struct MmaBiases {
    const MmaTile<Block>& tile;
    const int first; // the lane's first row of the tile's weights

    __device__ __forceinline__ MmaBiases(const MmaTile<Block>& tile, const MmaThread<Block>& me)
        : tile(tile), first(me.weight_warp * Block::N * 8 + me.pair * 2) {}

    // Return `sum * factor`, plus the bias if BIASED. `n`: the MMA tile. `i`: 0 or 1, the first or second column of the
    // lane.
    __device__ __forceinline__ float add(float sum, float factor, int n, int i) const {
        if constexpr (Block::ACTIVATION & BIASED)
            return sum * factor + bias_of<T>(tile.p, tile.group.expert, tile.weight_of(first + n * 8 + i));
        return sum * factor;
    }
};

// Return the result of sums[n][at] or, if gated, of sums[2 * n][at] and sums[2 * n + 1][at].
template <typename T, class Block>
__device__ __forceinline__ float result(const float (&sums)[Block::N][4], int n, int at, float factor,
                                        const MmaBiases<T, Block>& biases) {
    const GemmParams& p = biases.tile.p;
    if constexpr (Block::GATED)
        return finish<Block::ACTIVATION>(p, biases.add(sums[n * 2][at], factor, n * 2, at % 2),
                                         biases.add(sums[n * 2 + 1][at], factor, n * 2 + 1, at % 2));
    else
        return finish<Block::ACTIVATION>(p, biases.add(sums[n][at], factor, n, at % 2));
}

// Compute a lane's results in row `j` (0 or 1) of its two rows of an MMA tile.
template <typename T, class Block>
__device__ __forceinline__ void pack_row(unsigned (&pairs)[Block::OUT], const float (&sums)[Block::N][4], int j,
                                         float factor, const MmaBiases<T, Block>& biases) {
#pragma unroll
    for (int n = 0; n < Block::OUT; ++n) {
        const float low = result<T, Block>(sums, n, j * 2, factor, biases);
        const float high = result<T, Block>(sums, n, j * 2 + 1, factor, biases);
        pairs[n] = pack<T>(low, high);
    }
}

// Stores a warp's results. Neighbouring lanes exchange pairs of two MMA tiles, so that each lane stores 8 bytes of one
// tile.
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
