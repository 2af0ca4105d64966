// Grouped GEMM (moe_gemm/params.cuh) of bfloat16 or float16 tokens and prepared 4-bit weights
// (moe_gemm/fp4_prepared.cuh) on Hopper, by TMA and wgmma. GATHER: rows are gathered by row_token.
//
// Weights are the M side of wgmma, tokens (rows of a group) the N side, so each weight is converted once per tile. A
// warp converts 32 elements along k of its 16 rows to A fragments in registers while the tensor cores multiply the 32
// elements before them.
//
// Grid: persistent blocks, in clusters of CLUSTER * PARTS. A tile is 64 * SIDES rows of weights times up to TOKENS
// tokens; a side is 64 rows of weights. CLUSTER > 1: the blocks of a cluster have neighbouring weights and the same
// tokens; each block multicasts every CLUSTER-th TMA box of the tokens. PARTS > 1: the blocks of a cluster divide a tile
// along k (split-K), and block 0 adds their sums and writes the result.
//
//   the last warp   producer: UNITS * 64 elements along k per stage, in a ring of STAGES stages, by TMA
//                   (GATHER: tokens by cp.async)
//   warpgroup w     multiplies side w of a tile, and writes the result
//
// With few tokens a warpgroup is bound by latency, because it loads, converts and multiplies in sequence. So it takes
// several warpgroups to reach the memory bandwidth. PARTS > 1 gives work to all multiprocessors if there are fewer
// tiles than multiprocessors.
//
// Speed of light: for few rows it is the time to read the weights, for many rows the time of 2 * rows * n * k
// operations at the bfloat16 rate. On an H200 with n = 4096, k = 7168, 256 experts of 8 rows take 985 us in MXFP4 (4.05
// TB/s, 84% of the memory bandwidth) and 1047 us in NVFP4. 8 experts of 1024 rows take 572 us (841 TFLOP/s); gemm_wgmma
// with 16-bit weights takes 610 us.
#include "common/launch.cuh"
#include "moe_gemm/fp4_load.cuh"
#include "moe_gemm/fp4_weights.cuh"
#include "moe_gemm/wgmma_store.cuh"
#include "moe_gemm/wgmma_widths.cuh"

// A lane's operands in a stage. `weights`, `scales`: shared addresses for its first row of weights. `tokens`: lower
// half of the token descriptor.
struct Fp4Operands {
    unsigned weights, scales, tokens;
};

// Convert HALVES halves of a unit (32 elements along k each) and start their MMAs. `unit`: index in the stage. `half`:
// index (0 or 1) of the first of these halves in the unit.
template <typename T, class Layout, bool INTERLEAVED_GATES, int REGISTERS>
__device__ __forceinline__ void multiply_halves(float (&c)[REGISTERS], Fp4Fragments<Layout::HALVES>& fragments,
                                                const Fp4Operands& stage, int unit, int half, int width, bool add) {
    constexpr int HALVES = Layout::HALVES;
    const unsigned at = unit * UNIT_BYTES<Layout::FORMAT>;
    // Bytes between the lane's two rows, which are 8 rows apart or, with INTERLEAVED_GATES, neighbours.
    constexpr int ELEMENT_STRIDE = INTERLEAVED_GATES ? ROW_ELEMENT_BYTES : Layout::UNITS_BYTES;
    constexpr int SCALE_STRIDE = INTERLEAVED_GATES ? ROW_SCALE_BYTES<Layout::FORMAT> : Layout::UNITS_BYTES;
    unsigned packed[HALVES][2];
    Fp4Factors<T, Layout::FORMAT, HALVES> factors[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const unsigned from = stage.weights + at + row * ELEMENT_STRIDE;
        if constexpr (HALVES == 2) {
            const uint2 both = load_shared_two(from);
            packed[0][row] = both.x, packed[1][row] = both.y;
        } else {
            packed[0][row] = load_shared_bytes<4>(from + half * 4);
        }
        factors[row].load(stage.scales + at + row * SCALE_STRIDE, half);
    }
    fragments.template convert<T, 0>(packed[0], factors);
    if constexpr (HALVES == 2) fragments.template convert<T, 1>(packed[1], factors);
    fragments.finish();
    const unsigned tokens = stage.tokens + (unit * (EIGHT_ROWS_BYTES >> 4) + half * 4);
    with_width<Layout::TOKENS>(width, [&](auto columns) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 2 * HALVES; ++i) // 32 bytes along k: 2 descriptor units of 16 bytes
            multiply_step<T, decltype(columns)::value>(
                c, fragments.a[i], k_major_descriptor_of<Layout::UNITS * EIGHT_ROWS_BYTES>(tokens + i * 2),
                i > 0 || add);
        wgmma_commit_group();
    });
    wgmma_wait_group<1>(); // complete the previous MMAs, so that their fragments may be overwritten
}

// Compile-time index (0 or 1) of the fragments that a stage's first call of multiply_halves uses.
template <int I> struct FragmentSet {
    static constexpr int value = I;
};

// Compute a warpgroup's sums of a tile of at most `width` tokens, over `steps` steps along k. `at`: ring position of the
// first step; on return, of the first step of the next tile. `skewed_after`: the step after which the other warpgroup may
// begin, or -1.
template <typename T, class Layout, bool INTERLEAVED_GATES, int REGISTERS>
__device__ __forceinline__ void sum_fp4_tile(float (&c)[REGISTERS], typename Layout::Shared& shared,
                                             PipelineState<Layout::STAGES>& at, int steps, int skewed_after, int width,
                                             const Fp4Operands& first_stage) {
    constexpr int CLUSTER = Layout::CLUSTER;
    constexpr int UNIT_CALLS = 2 / Layout::HALVES, STAGE_CALLS = Layout::UNITS * UNIT_CALLS;
    const int lane = threadIdx.x % 32;
    auto release = [&](int stage) {
        const unsigned empty = shared_address(&shared.empty[stage]);
        if constexpr (CLUSTER == 1) {
            if (lane == 0) mbarrier_arrive(empty);
        } else {
            if (lane < CLUSTER) mbarrier_arrive_cluster(map_shared_rank(empty, lane));
        }
    };
    Fp4Fragments<Layout::HALVES> fragments[2];
    int previous = 0;
    auto multiply_stage = [&](int step, auto set) {
        mbarrier_wait(shared_address(&shared.full[at.stage]), at.phase);
        const Fp4Operands stage{first_stage.weights + at.stage * Layout::WEIGHT_BYTES,
                                first_stage.scales + at.stage * Layout::WEIGHT_BYTES,
                                first_stage.tokens + at.stage * (Layout::TOKEN_BYTES >> 4)};
#pragma unroll
        for (int i = 0; i < STAGE_CALLS; ++i) {
            multiply_halves<T, Layout, INTERLEAVED_GATES>(c, fragments[(decltype(set)::value + i) % 2], stage,
                                                          i / UNIT_CALLS, i % UNIT_CALLS, width, i > 0 || step > 0);
            // The MMAs of the previous stage are complete.
            if (i == 0 && step > 0) release(previous);
        }
        if (step == skewed_after && lane == 0) mbarrier_arrive(shared_address(&shared.skewed));
        previous = at.stage;
        at.advance();
    };
    // The calls of multiply_halves alternate between fragments[0] and fragments[1], also across stages.
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        multiply_stage(step, FragmentSet<0>());
        if constexpr (STAGE_CALLS % 2) {
            if (++step >= steps) break;
            multiply_stage(step, FragmentSet<1>());
        }
    }
    wgmma_wait_group<0>();
    release(previous);
    wgmma_fence_operand(c);
}

template <typename T, int ACTIVATION, class Layout>
__device__ __forceinline__ void compute_fp4_tiles(const MappedGemmParams& p, typename Layout::Shared& shared,
                                                  unsigned ring) {
    constexpr int TOKENS = Layout::TOKENS, SKEW = TOKENS > 128; // lag of the second warpgroup in stages
    constexpr float EPILOGUE_FACTOR = Fp4Factors<T, Layout::FORMAT, Layout::HALVES>::EPILOGUE_FACTOR;
    // The shuffle tells the compiler that the value is warp-uniform, so that descriptors stay in uniform registers.
    const int side = Layout::SIDES == 1 ? 0 : __shfl_sync(FULL_WARP, int(threadIdx.x / WARPGROUP), 0);
    const int lane = threadIdx.x % 32;
    const unsigned weights =
        ring + Layout::WEIGHTS + (side * 8 + threadIdx.x % WARPGROUP / 32 * 2) * Layout::UNITS_BYTES;
    Fp4Operands operands{weights + lane * 8, weights + UNIT_ELEMENT_BYTES + lane / 4 * ROW_SCALE_BYTES<Layout::FORMAT>,
                         unsigned(k_major_descriptor(ring))};
    constexpr bool INTERLEAVED_GATES = is_gated(ACTIVATION) && !has_halves(ACTIVATION);
    if constexpr (INTERLEAVED_GATES) { // rows 8 to 15 are in the second unit
        const int row = lane / 4 * 2 % UNIT_ROWS;
        const unsigned unit = weights + lane / 16 * Layout::UNITS_BYTES;
        operands.weights = unit + row * ROW_ELEMENT_BYTES + lane % 4 * 8;
        operands.scales = unit + UNIT_ELEMENT_BYTES + row * ROW_SCALE_BYTES<Layout::FORMAT>;
    }
    // Without this empty asm, the compiler recomputes the addresses at every stage.
    asm volatile("" : "+r"(operands.weights), "+r"(operands.scales), "+r"(operands.tokens));
    const unsigned staging = ring + Layout::STAGED + side * 2 * Layout::STAGING;
    const int steps = steps_of<Layout>(p.k).count;
    PipelineState<Layout::STAGES> state;
    PipelineState<TILES_AHEAD> at;
    int round = 0;
    int skewed_after = SKEW && side == 0 ? min(SKEW, steps) - 1 : -1;
    float c[TOKENS / 2];
    for (bool first = true;; first = false) {
        mbarrier_wait(shared_address(&shared.tile_full[at.stage]), at.phase);
        const WgmmaTile tile = shared.tiles[at.stage];
        // The reduction tells the compiler that the value is warp-uniform.
        const int tokens = __reduce_max_sync(FULL_WARP, tile.tokens);
        if (tokens == 0) break;
        if (SKEW && first && side > 0) mbarrier_wait(shared_address(&shared.skewed), 0);
        const float factor =
            Layout::FORMAT == NVFP4 ? EPILOGUE_FACTOR * p.b_global_scale[tile.expert] : EPILOGUE_FACTOR;
        sum_fp4_tile<T, Layout, INTERLEAVED_GATES>(c, shared, state, steps, skewed_after, tokens, operands);
        skewed_after = -1;
        // All lanes have read the tile. A __syncwarp would keep warp-uniform values out of uniform registers.
        if (lane == 0) mbarrier_arrive(shared_address(&shared.tile_empty[at.stage]));
        at.advance();
        // Do not modify `c` in place: the compiler would then insert a wait after each MMA.
        if constexpr (Layout::PARTS > 1) {
            float reduced[TOKENS / 2];
            if (add_parts<Layout::PARTS>(reduced, c, shared.parts[side], ring + Layout::EXCHANGE + side * Layout::SUMS,
                                         at.stage - 1))
                store_tile<T, ACTIVATION, TOKENS>(p, reduced, tile, side, staging, round, factor);
        } else {
            store_tile<T, ACTIVATION, TOKENS>(p, c, tile, side, staging, round, factor);
        }
    }
}

template <typename, int FORMAT, int, int TOKENS, int UNITS, int STAGES, int CLUSTER, int, int SIDES, int HALVES,
          int PARTS, bool, bool>
constexpr Launch gemm_fp4_wgmma_launch() {
    using Layout = Fp4Layout<FORMAT, TOKENS, UNITS, STAGES, CLUSTER, SIDES, HALVES, PARTS>;
    return {Layout::THREADS, 1024 + Layout::SHARED_OFFSET + int(sizeof(typename Layout::Shared)), Layout::BOX};
}

// FORMAT: MXFP4 or NVFP4. TOKENS: 8, 16, 32, 64, 96, 128 or 288. HALVES: number of half units along k that are
// converted at once.
template <typename T, int FORMAT, int ACTIVATION, int TOKENS, int UNITS, int STAGES, int CLUSTER, int BLOCKS_PER_SM,
          int SIDES, int HALVES, int PARTS, bool MEMORY_BOUND, bool GATHER>
__global__ __launch_bounds__((Fp4Layout<FORMAT, TOKENS, UNITS, STAGES, CLUSTER, SIDES, HALVES, PARTS>::THREADS),
                             BLOCKS_PER_SM)
    CLUSTER_OF(CLUSTER* PARTS) void gemm_fp4_wgmma(const __grid_constant__ MappedGemmParams p) {
#if HAS_WGMMA
    static_assert(!GATHER || (CLUSTER == 1 && TOKENS <= 128), "");
    using Layout = Fp4Layout<FORMAT, TOKENS, UNITS, STAGES, CLUSTER, SIDES, HALVES, PARTS>;
    using Shared = typename Layout::Shared;
    constexpr bool MOVES_REGISTERS = TOKENS > 128;
    constexpr int WARPS = WARPGROUP / 32;
    extern __shared__ char memory[];
    const unsigned padding = -shared_address(memory) & 1023; // swizzled tiles are 1024-byte aligned
    const unsigned ring = shared_address(memory) + padding;
    Shared& shared = *reinterpret_cast<Shared*>(memory + padding + Layout::SHARED_OFFSET);
    if (threadIdx.x == 0) {
        prefetch_tensormap(p.b_map);
        if constexpr (!GATHER) prefetch_tensormap(p.a_map);
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(shared_address(&shared.full[i]), GATHER ? 2 : 1);
            mbarrier_init(shared_address(&shared.empty[i]), CLUSTER * SIDES * WARPS);
        }
        for (int i = 0; i < TILES_AHEAD; ++i) {
            mbarrier_init(shared_address(&shared.tile_full[i]), 1);
            mbarrier_init(shared_address(&shared.tile_empty[i]), SIDES * WARPS);
        }
        for (int i = 0; i < SIDES && PARTS > 1; ++i) shared.parts[i].init();
        mbarrier_init(shared_address(&shared.skewed), WARPS);
        fence_mbarrier_init();
    }
    cluster_sync<Layout::BLOCKS>();
    if (threadIdx.x < Layout::COMPUTE_THREADS) {
        if constexpr (MOVES_REGISTERS) setmaxnreg_inc<224>();
        compute_fp4_tiles<T, ACTIVATION, Layout>(p, shared, ring);
    } else {
        if constexpr (MOVES_REGISTERS) setmaxnreg_dec<56>();
        if (threadIdx.x < Layout::COMPUTE_THREADS + 32) {
            if constexpr (GATHER)
                gather_fp4_tiles<Layout, ACTIVATION, MEMORY_BOUND>(p, shared, ring);
            else
                load_fp4_tiles<Layout, ACTIVATION, MEMORY_BOUND>(p, shared, ring);
        }
    }
    // A block must not exit while other blocks of its cluster write to its shared memory.
    if constexpr (Layout::BLOCKS > 1) cluster_sync<Layout::BLOCKS>();
#endif
}
