// Grouped products by mma.sync, on every GPU from sm_80 on: each expert's weights times its rows, which may be
// gathered.
//
//   x[r, j]   = sum over i of a[row_token[r], i] * b[e, j, i]       for the rows r of the group of expert e
//   out[r, j] = x[r, j], or activate(x[r, j], x[r, n / 2 + j]) with ACTIVATION; moe_gemm/epilogue.cuh has all forms
//
// each number of a and b times its scale, if there are scales; sums in float32, rounded once. moe_gemm/params.cuh says
// what a group is.
//
//   FORMAT       a      b
//   PLAIN        T      T
//   TRANSPOSED   T      T, which lies as [experts, k, n]: moe_gemm/mma_transposed.cuh
//   FP8          e4m3   e4m3, with a_scale and b_scale
//   MXFP4        T      e2m1, two to a byte (the lower half first), with an E8M0 scale for every 32 along k
//   NVFP4        T      the same, with an e4m3 scale for every 16 along k, and b_global_scale
//
// Grid: tiles * ceil(n / WEIGHTS) blocks at least, where `tiles` bounds the tiles of TOKENS rows that the groups have.
// A block of TOKEN_WARPS x WEIGHT_WARPS warps makes one tile, TOKENS tokens (rows of a) times WEIGHTS rows of weights:
// it multiplies one step of STEP numbers along k while STAGES - 1 further ones are on their way to shared memory.
// Blocks without a tile end at once.
//
// Speed of light: the bytes of the weights up to some 200 rows of each expert, then 2 * rows * n * k operations. On an
// H200, with n = 4096, k = 7168: 256 experts x 8 rows reach all of the memory's floor in bfloat16, 55% of it in MXFP4
// and 54% in NVFP4, whose conversion takes instructions. 8 x 1024 rows reach 64% of the tensor cores' floor in bfloat16
// (every operand passes through registers, unlike those of wgmma.cu), 23% in FP8, which is multiplied as float16, 35%
// in MXFP4 and 34% in NVFP4.
#include "common/launch.cuh"
#include "common/overlap.cuh"
#include "moe_gemm/mma_fp4.cuh"
#include "moe_gemm/mma_ldmatrix.cuh"
#include "moe_gemm/mma_store.cuh"
#include "moe_gemm/mma_transposed.cuh"

// The form of the operands: a layout of shared memory, and the types ScaleCopies, Products and Factors.
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

// T: __nv_bfloat16 or __half, of the result, and of a and b where they have 16 bits. STEP: 32 or 64 with PLAIN and
// TRANSPOSED, else 128. STAGES: steps that shared memory holds. BLOCKS: blocks that fit a multiprocessor. ACTIVATION:
// as moe_gemm/epilogue.cuh has it. BLOCK_SCALES: FP8 with a scale for every 1 x 128 numbers of a and 128 x 128 of b;
// else FP8 has scales of whole rows.
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

    tile.locate(); // again, rather than keeping its registers during the products
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
