// Epilogue of gemm_mma: scales, bias, activation and stores.
#pragma once
#include "common/mma.cuh"
#include "common/warp.cuh"
#include "moe_gemm/mma_block.cuh"

// Adds biases to a lane's sums.
template <typename T, class Block> struct MmaBiases {
    const MmaTile<Block>& tile;
    const int first; // the lane's first row of the tile's weights

    __device__ __forceinline__ MmaBiases(const MmaTile<Block>& tile, const MmaThread<Block>& me)
        : tile(tile), first(me.weight_warp * Block::N * 8 + me.pair * 2) {}

    // Return `sum * factor` plus the bias. `n`: index of the MMA tile. `i` (0 or 1) selects one of the lane's two
    // columns.
    __device__ __forceinline__ float add(float sum, float factor, int n, int i) const {
        if constexpr (Block::ACTIVATION & BIASED)
            return sum * factor + bias_of<T>(tile.p, tile.group.expert, tile.weight_of(first + n * 8 + i));
        return sum * factor;
    }
};

// Return the result of sums[n][at] or, if gated, of sums[2 * n][at] (gate) and sums[2 * n + 1][at] (up).
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

// Compute a lane's results in one row. A lane has two rows of an MMA tile, and `j` (0 or 1) selects one. Each MMA tile
// along n gives one pair of results.
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

// Stores a warp's results. Two neighbouring lanes exchange pairs of results of two MMA tiles. Then each lane has four
// neighbouring columns of one MMA tile and stores them as 8 bytes.
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
