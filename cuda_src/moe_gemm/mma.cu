// Grouped GEMM (moe_gemm/params.cuh) by mma.sync, on every GPU from sm_80 on.
//
//   FORMAT       a      b
//   PLAIN        T      T
//   TRANSPOSED   T      T, in memory as [experts, k, n]: moe_gemm/mma_transposed.cuh
//   FP8          e4m3   e4m3
//   MXFP4        T      e2m1, two to a byte (the lower half first), with an E8M0 scale per 32 elements along k
//   NVFP4        T      the same, with an e4m3 scale per 16 elements along k, and b_global_scale
//
// Grid: ceil(n / WEIGHTS) blocks for each of the possible tiles of TOKENS rows in all groups; blocks without a tile
// exit. A block of TOKEN_WARPS x WEIGHT_WARPS warps multiplies TOKENS tokens (rows of a) by WEIGHTS rows of weights,
// STEP elements along k at a time, while cp.async copies the next STAGES - 1 steps.
//
// Speed of light: up to about 200 rows per expert it is the time to read the weights, above that the time of
// `2 * rows * n * k` operations. The table gives this bound divided by the measured time, on an H200 with `n = 4096`,
// `k = 7168`:
//
//                                 bfloat16   MXFP4   NVFP4   FP8
//   256 x 8 rows, memory          100%       55%     54%
//   8 x 1024 rows, tensor cores   64%        35%     34%     23%
//
// The lower percentages have three causes: 4-bit weights are converted, FP8 is multiplied as float16, and all operands
// pass through registers, unlike in wgmma.cu.
#include "common/launch.cuh"
#include "common/overlap.cuh"
#include "moe_gemm/mma_fp4.cuh"
#include "moe_gemm/mma_ldmatrix.cuh"
#include "moe_gemm/mma_store.cuh"
#include "moe_gemm/mma_transposed.cuh"

// Selects the traits of an operand format: shared memory layout, ScaleCopies, Products (mainloop) and Factors (scales
// of the finished sums).
template <typename T, int FORMAT, bool BLOCK_SCALES, class Block> struct MmaTraitsOf {
    using Type = PlainTraits<T, Block>;
    static_assert(FORMAT == PLAIN && !BLOCK_SCALES, "");
};
template <typename T, class Block> struct MmaTraitsOf<T, TRANSPOSED, false, Block> {
    using Type = TransposedTraits<T, Block>;
};
template <typename T, class Block> struct MmaTraitsOf<T, FP8, false, Block> {
    using Type = Fp8RowTraits<Block>;
};
template <typename T, class Block> struct MmaTraitsOf<T, FP8, true, Block> {
    using Type = Fp8BlockTraits<Block>;
};
template <typename T, class Block> struct MmaTraitsOf<T, MXFP4, false, Block> {
    using Type = Fp4Traits<T, E8m0Scale, IS_BFLOAT16<T>, Block>;
};
template <typename T, class Block> struct MmaTraitsOf<T, NVFP4, false, Block> {
    using Type = Fp4Traits<T, E4m3Scale, true, Block>;
};

template <typename T, int FORMAT, int TOKENS, int WEIGHTS, int TOKEN_WARPS, int WEIGHT_WARPS, int STEP, int STAGES, int,
          int ACTIVATION, bool BLOCK_SCALES>
constexpr Launch gemm_mma_launch() {
    using Block = MmaBlock<TOKENS, WEIGHTS, TOKEN_WARPS, WEIGHT_WARPS, STEP, STAGES, ACTIVATION>;
    return {Block::THREADS, STAGES * MmaTraitsOf<T, FORMAT, BLOCK_SCALES, Block>::Type::BYTES};
}

// T: type of the result, and of 16-bit `a` and `b`. STEP: 32 or 64 with PLAIN and TRANSPOSED, otherwise 128.
// BLOCK_SCALES: FP8 has block scales, otherwise row scales.
template <typename T, int FORMAT, int TOKENS, int WEIGHTS, int TOKEN_WARPS, int WEIGHT_WARPS, int STEP, int STAGES,
          int BLOCKS_PER_SM, int ACTIVATION, bool BLOCK_SCALES>
__global__ __launch_bounds__(TOKEN_WARPS * WEIGHT_WARPS * 32,
                             BLOCKS_PER_SM) void gemm_mma(const __grid_constant__ GemmParams p) {
    wait_for_earlier_kernels();
    using Block = MmaBlock<TOKENS, WEIGHTS, TOKEN_WARPS, WEIGHT_WARPS, STEP, STAGES, ACTIVATION>;
    using Traits = typename MmaTraitsOf<T, FORMAT, BLOCK_SCALES, Block>::Type;
    extern __shared__ __align__(1024) char shared[];
    __shared__ GroupTile group;
    const MmaThread<Block> me;
    const int weight_tiles = (p.n + WEIGHTS - 1) / WEIGHTS;
    if (!find_tile<TOKENS, Block::THREADS>(p, blockIdx.x / weight_tiles, group)) return;
    MmaTile<Block> tile(p, group, weight_tiles);

    int tokens[MmaCopies<Traits>::A_COPIES];
    MmaCopies<Traits> copies(p, tile, me, shared_address(shared), tokens);
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) copies.start(i, i * Traits::BYTES);

    MmaSums<Block> sums;
    clear(sums);
    typename Traits::Products products;
    products.add_to(sums, copies, me, shared);
    if constexpr (FORMAT == TRANSPOSED && Block::GATED && !Block::HALVES) deinterleave_gates(sums, me);

    tile.locate(); // keeping the tile would take registers in the mainloop
    const typename Traits::Factors factors(p, tile, me, sums);
    const MmaOutput<T, Block> out(tile, me);
    const MmaBiases<T, Block> biases(tile, me);
#pragma unroll
    for (int m = 0; m < Block::M; ++m)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int in_tile = (me.token_warp * Block::M + m) * 16 + j * 8 + me.row, row = tile.first_row + in_tile;
            unsigned pairs[Block::OUT];
            pack_row<T, Block>(pairs, sums[m], j, factors.of_row(in_tile), biases);
            out.write(row, tile.end, pairs);
        }
}
