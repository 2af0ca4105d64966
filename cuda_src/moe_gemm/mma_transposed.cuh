// Traits of gemm_mma for weights that are [experts, k, n] in memory. ldmatrix transposes them.
#pragma once
#include "moe_gemm/mma_ldmatrix.cuh"

// Each row of a stage is one index along k, with an element of each of the tile's WEIGHTS rows of weights. A 16-byte
// chunk has the elements of 8 rows of weights (INTERLEAVED: 4 gates and their ups, alternating). Chunk c of row r is
// stored at chunk `c ^ (r % 8)`.
template <typename T, class Block_> struct TransposedTraits : LdmatrixLayout<Block_, 2, 0>, ProductsOf16Bits<T> {
    using Block = Block_;
    static constexpr int B_ROW_BYTES = Block::WEIGHTS * 2;
    using ScaleCopies = NoScaleCopies<Block>;
    using Sums = PlainSums<Block>;
    using Products = LdmatrixProducts<TransposedTraits>;
    using Factors = NoFactors<Block>;

    static __device__ __forceinline__ int b_at(int row, int chunk) {
        return row * B_ROW_BYTES + (chunk ^ (row & 7)) * 16;
    }
    static __device__ __forceinline__ long long b_bytes(int n) { return (long long)n * 2; }

    // Return the first row of the expert's weights in a chunk, clamped to the last chunk.
    static __device__ __forceinline__ int b_column(const MmaTile<Block>& tile, int chunk) {
        if constexpr (Block::HALVES)
            return chunk % 2 * tile.half + min(tile.first_column + chunk / 2 * 8, tile.half - 8);
        return min(tile.first_column * (Block::GATED ? 2 : 1) + chunk * 8, tile.p.n - 8);
    }
};
template <typename T, class Block> constexpr bool IS_TRANSPOSED<TransposedTraits<T, Block>> = true;

// Separate gate sums and up sums, which alternate by columns in two neighbouring MMA tiles: the first tile gets 8
// gates, the second their ups. A lane's gates are `pair` and `4 + pair` before the call, `2 * pair` and `2 * pair + 1`
// after it. In each of two shuffles a lane provides the sums of one of its two tiles.
template <class Block>
__device__ __forceinline__ void deinterleave_gates(MmaSums<Block>& sums, const MmaThread<Block>& me) {
    const bool is_odd = me.pair & 1, is_high = me.pair & 2;
    const int four = me.lane & ~3, first = four + (2 * me.pair + is_high) % 4, second = first ^ 1;
#pragma unroll
    for (int m = 0; m < Block::M; ++m)
#pragma unroll
        for (int n = 0; n < Block::N; n += 2)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float (&low)[4] = sums[m][n], (&high)[4] = sums[m][n + 1];
                float a[2], b[2]; // gate, up
#pragma unroll
                for (int side = 0; side < 2; ++side) {
                    const float x = low[j * 2 + side], y = high[j * 2 + side];
                    a[side] = __shfl_sync(FULL_WARP, is_odd ? y : x, first);
                    b[side] = __shfl_sync(FULL_WARP, is_odd ? x : y, second);
                }
                low[j * 2] = is_high ? b[0] : a[0], low[j * 2 + 1] = is_high ? a[0] : b[0];
                high[j * 2] = is_high ? b[1] : a[1], high[j * 2 + 1] = is_high ? a[1] : b[1];
            }
}
