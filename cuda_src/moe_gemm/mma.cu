// Grouped GEMM by mma.sync, on every GPU from sm_80 on. Rows of `a` may be gathered.
//
//   x[r, j]   = sum over i of a[row_token[r], i] * b[e, j, i]       for the rows r of the group of expert e
//   out[r, j] = x[r, j], or activate(x[r, j], x[r, n / 2 + j]) with ACTIVATION; moe_gemm/epilogue.cuh lists all forms
//
// Each element of a and b is multiplied by its scale, if it has one. Sums are in float32 and rounded once.
// moe_gemm/params.cuh defines the groups.
//
//   FORMAT       a      b
//   PLAIN        T      T
//   TRANSPOSED   T      T, in memory as [experts, k, n]: moe_gemm/mma_transposed.cuh
//   FP8          e4m3   e4m3, with a_scale and b_scale
//   MXFP4        T      e2m1, two to a byte (the lower half first), with an E8M0 scale for every 32 along k
//   NVFP4        T      the same, with an e4m3 scale for every 16 along k, and b_global_scale
//
// Grid: at least tiles * ceil(n / WEIGHTS) blocks, where `tiles` is an upper bound of the number of tiles of TOKENS
// rows in all groups. A block of TOKEN_WARPS x WEIGHT_WARPS warps computes one tile: TOKENS tokens (rows of a) times
// WEIGHTS rows of weights. It multiplies one step of STEP elements along k while cp.async copies STAGES - 1 further
// steps to shared memory. Blocks without a tile exit at once.
//
// Speed of light: up to about 200 rows per expert the time to read the weights, above that the time of 2 * rows * n * k
// operations. The table shows this lower bound divided by the measured time, on an H200 with n = 4096, k = 7168:
//
//                                 bfloat16   MXFP4   NVFP4   FP8
//   256 x 8 rows, memory          100%       55%     54%
//   8 x 1024 rows, tensor cores   64%        35%     34%     23%
//
// 4-bit weights are slower because their conversion takes instructions. FP8 is slower because it is converted to
// float16 and multiplied as float16. Even bfloat16 is slower than in wgmma.cu, because all operands pass through
// registers.
#include "common/launch.cuh"
#include "common/overlap.cuh"
#include "moe_gemm/mma_fp4.cuh"
#include "moe_gemm/mma_ldmatrix.cuh"
#include "moe_gemm/mma_store.cuh"
#include "moe_gemm/mma_transposed.cuh"

// Selects the form of an operand format. A form is the class that defines, for one format, the shared memory layout and
// the types ScaleCopies (copies of the scales), Products (mainloop) and Factors (scales of the finished sums).
template <typename T, int FORMAT, bool BLOCK_SCALES, class Block> struct MmaFormOf {
    using Type = PlainForm<T, Block>;
    static_assert(FORMAT == PLAIN && !BLOCK_SCALES, "");
};
template <typename T, class Block> struct MmaFormOf<T, TRANSPOSED, false, Block> {
    using Type = TransposedForm<T, Block>;
};
template <typename T, class Block> struct MmaFormOf<T, FP8, false, Block> {
    using Type = Fp8RowForm<Block>;
};
template <typename T, class Block> struct MmaFormOf<T, FP8, true, Block> {
    using Type = Fp8BlockForm<Block>;
};
template <typename T, class Block> struct MmaFormOf<T, MXFP4, false, Block> {
    using Type = Fp4Form<T, E8m0Scale, IS_BFLOAT16<T>, Block>;
};
template <typename T, class Block> struct MmaFormOf<T, NVFP4, false, Block> {
    using Type = Fp4Form<T, E4m3Scale, true, Block>;
};

template <typename T, int FORMAT, int TOKENS, int WEIGHTS, int TOKEN_WARPS, int WEIGHT_WARPS, int STEP, int STAGES, int,
          int ACTIVATION, bool BLOCK_SCALES>
constexpr Launch gemm_mma_launch() {
    using Block = MmaBlock<TOKENS, WEIGHTS, TOKEN_WARPS, WEIGHT_WARPS, STEP, STAGES, ACTIVATION>;
    return {Block::THREADS, STAGES * MmaFormOf<T, FORMAT, BLOCK_SCALES, Block>::Type::BYTES};
}

// T: __nv_bfloat16 or __half; the type of the result, and of `a` and `b` if they have 16-bit elements. STEP: 32 or 64
// with PLAIN and TRANSPOSED, otherwise 128. STAGES: number of steps that shared memory holds. BLOCKS: resident blocks
// per multiprocessor. ACTIVATION: see moe_gemm/epilogue.cuh. BLOCK_SCALES: FP8 with block scales, otherwise with row
// scales.
template <typename T, int FORMAT, int TOKENS, int WEIGHTS, int TOKEN_WARPS, int WEIGHT_WARPS, int STEP, int STAGES,
          int BLOCKS, int ACTIVATION, bool BLOCK_SCALES>
__global__ __launch_bounds__(TOKEN_WARPS * WEIGHT_WARPS * 32,
                             BLOCKS) void gemm_mma(const __grid_constant__ GemmParams p) {
    wait_for_earlier_kernels();
    using Block = MmaBlock<TOKENS, WEIGHTS, TOKEN_WARPS, WEIGHT_WARPS, STEP, STAGES, ACTIVATION>;
    using Form = typename MmaFormOf<T, FORMAT, BLOCK_SCALES, Block>::Type;
    extern __shared__ __align__(1024) char shared[];
    __shared__ GroupTile group;
    const MmaThread<Block> me;
    const int weight_tiles = (p.n + WEIGHTS - 1) / WEIGHTS;
    if (!find_tile<TOKENS, Block::THREADS>(p, blockIdx.x / weight_tiles, group)) return;
    MmaTile<Block> tile(p, group, weight_tiles);

    int tokens[MmaCopies<Form>::A_COPIES];
    MmaCopies<Form> copies(p, tile, me, shared_address(shared), tokens);
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) copies.start(i, i * Form::BYTES);

    MmaSums<Block> sums;
    clear(sums);
    typename Form::Products products;
    products.add_to(sums, copies, me, shared);
    if constexpr (FORMAT == TRANSPOSED && Block::GATED && !Block::HALVES) part_pairs(sums, me);

    tile.locate(); // recompute the tile: keeping it would take registers in the mainloop
    const typename Form::Factors factors(p, tile, me, sums);
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
