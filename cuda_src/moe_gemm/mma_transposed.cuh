// Form of gemm_mma (the class for one operand format) for weights that are [experts, k, n] in memory. ldmatrix
// transposes the fragments of the weights.
#pragma once
#include "moe_gemm/mma_ldmatrix.cuh"

// TRANSPOSED: tokens and weights are T. A stage has STEP rows of WEIGHTS elements; a row belongs to one index along k.
// A 16-byte chunk has 8 elements: one of each of 8 rows of the tile's weights, in the order of `MmaTile::weight_of`.
// With INTERLEAVED gates a chunk has elements of 4 gate rows and their 4 up rows, alternating as in memory. Swizzle:
// chunk c of row r is stored at chunk `c ^ (r % 8)`.
template <typename T, class Block_> struct TransposedForm : LdmatrixLayout<Block_, 2, 0>, ProductsOf16Bits<T> {
    using Block = Block_;
    static constexpr int B_LINE = Block::WEIGHTS * 2;
    using ScaleCopies = NoScaleCopies<Block>;
    using Sums = PlainSums<Block>;
    using Products = LdmatrixProducts<TransposedForm>;
    using Factors = NoFactors<Block>;

    static __device__ __forceinline__ int b_at(int row, int chunk) { return row * B_LINE + (chunk ^ (row & 7)) * 16; }
    static __device__ __forceinline__ long long b_bytes(int n) { return (long long)n * 2; }

    // Return the first row of the expert's weights in a chunk. A chunk past the end is replaced by the last chunk, and
    // its results are not written.
    static __device__ __forceinline__ int b_column(const MmaTile<Block>& tile, int chunk) {
        if constexpr (Block::HALVES)
            return chunk % 2 * tile.half + min(tile.first_column + chunk / 2 * 8, tile.half - 8);
        return min(tile.first_column * (Block::GATED ? 2 : 1) + chunk * 8, tile.p.n - 8);
    }
};
template <typename T, class Block> constexpr bool IS_TRANSPOSED<TransposedForm<T, Block>> = true;

// Separate the sums of gate rows and up rows. Before the call, gates and ups alternate column by column in two
// neighbouring MMA tiles of a warp's sums. After the call the first tile has 8 gates, and the second tile has their
// ups. A lane has gates `pair` and `4 + pair` and their ups before the call, and gates `2 * pair` and `2 * pair + 1`
// and their ups after the call. Two shuffles exchange the sums. In each shuffle a lane provides the sums of one of its
// two tiles; odd lanes and even lanes provide different tiles.
template <class Block> __device__ __forceinline__ void part_pairs(MmaSums<Block>& sums, const MmaThread<Block>& me) {
    const bool is_odd = me.pair & 1, is_high = me.pair & 2;
    const int four = me.lane & ~3, first = four + (2 * me.pair + is_high) % 4, second = first ^ 1;
#pragma unroll
    for (int m = 0; m < Block::M; ++m)
#pragma unroll
        for (int n = 0; n < Block::N; n += 2)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float (&low)[4] = sums[m][n], (&high)[4] = sums[m][n + 1];
                float a[2], b[2]; // index 0: gate, 1: up
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
