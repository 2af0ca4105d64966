// Grouped GEMM of bfloat16 or float16 tokens and prepared 4-bit weights on Hopper, by TMA and wgmma. Tokens may be
// gathered.
//
//   x[r, j]   = sum over i of a[row_token[r], i] * b[e, j, i]       for the rows r of the group of expert e
//   out[r, j] = x[r, j], or activate(x[r, j], x[r, n / 2 + j]) with ACTIVATION; moe_gemm/epilogue.cuh lists all forms
//
// Each element of b is multiplied by its scale. Sums are in float32 and rounded once. moe_gemm/params.cuh defines the
// groups, moe_gemm/fp4_prepared.cuh the prepared weights.
//
// Weights are the M side of wgmma (64 rows) and tokens (rows of a group) are the N side, as in gemm_wgmma. So each
// weight is converted once for all tokens of a tile. The weights are A fragments in registers: a warp converts 32
// elements along k of its 16 rows while the tensor cores multiply the 32 elements before them.
//
// Grid: CLUSTER * (number of resident clusters) persistent blocks of Fp4Layout::THREADS threads. A tile is 64 * SIDES
// rows of weights times up to TOKENS tokens; a side is 64 of these rows of weights. The blocks of a cluster have the
// same tokens and neighbouring weights. Each block copies every CLUSTER-th TMA box of tokens, by multicast to the whole
// cluster.
//
//   the last warp   finds tiles; copies UNITS * 64 elements along k per stage to a ring of STAGES stages, by TMA.
//                   GATHER: copies the tokens by cp.async
//   warpgroup w     converts and multiplies the 64 weight rows of side `w % SIDES` of a tile, in every SPLIT-th
//                   stage. At the end one warpgroup of each side adds the SPLIT partial sums and writes the result.
//
// With few tokens a warpgroup is bound by latency, because it loads, converts and multiplies in sequence. So a
// multiprocessor needs several warpgroups to reach the memory bandwidth. With SPLIT > 1 these warpgroups are in one
// block and divide one tile along k. A tile then takes less time than with one tile per warpgroup, so the last tiles
// delay the end of the kernel less.
//
// Speed of light: for few rows the time to read the weights; for many rows the time of 2 * rows * n * k operations at
// the bfloat16 rate. On an H200 with n = 4096, k = 7168, 256 experts of 8 rows take 985 us in MXFP4 (4.05 TB/s, 84% of
// the memory bandwidth) and 1047 us in NVFP4. 8 experts of 1024 rows take 572 us (841 TFLOP/s); gemm_wgmma with 16-bit
// weights takes 610 us. With n = 28672, k = 4096, two experts of one row each take 40 us (3.1 TB/s).
#include "common/launch.cuh"
#include "moe_gemm/fp4_load.cuh"
#include "moe_gemm/fp4_weights.cuh"
#include "moe_gemm/wgmma_store.cuh"
#include "moe_gemm/wgmma_widths.cuh"

// Shared addresses of a lane's operands in a stage. `weights`, `scales`: the lane's elements and scales in the first 8
// weight rows of its warp. `tokens`: the lower half of the token descriptor; the upper half is constant.
struct Fp4Operands {
    unsigned weights, scales, tokens;
};

// Convert weights of a stage and start their MMAs. A unit has 64 elements along k, half a unit has 32. The call handles
// HALVES halves of the unit with index `unit`, starting with half `half` (0 or 1). PAIRS: the two rows of lane l in an
// MMA (`l / 4` and `l / 4 + 8`) are a gate row and its up row, which are neighbours in memory.
template <typename T, class Layout, bool PAIRS, int REGISTERS>
__device__ __forceinline__ void multiply_part(float (&c)[REGISTERS], Fp4Fragments<Layout::HALVES>& fragments,
                                              const Fp4Operands& stage, int unit, int half, int width, bool add) {
    constexpr int HALVES = Layout::HALVES;
    const unsigned at = unit * UNIT_BYTES<Layout::FORMAT>;
    // Distance in bytes from the lane's first row to its second row: the size of 8 rows or, with PAIRS, of one row.
    constexpr int NUMBERS_APART = PAIRS ? ROW_NUMBERS : Layout::EIGHT;
    constexpr int SCALES_APART = PAIRS ? UNIT_SCALES<Layout::FORMAT> : Layout::EIGHT;
    unsigned words[HALVES][2];
    Fp4Factors<T, Layout::FORMAT, HALVES> factors[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const unsigned from = stage.weights + at + row * NUMBERS_APART;
        if constexpr (HALVES == 2) {
            const uint2 both = load_shared_two(from);
            words[0][row] = both.x, words[1][row] = both.y;
        } else {
            words[0][row] = load_shared_bytes<4>(from + half * 4);
        }
        factors[row].load(stage.scales + at + row * SCALES_APART, half);
    }
    fragments.template convert<T, 0>(words[0], factors);
    if constexpr (HALVES == 2) fragments.template convert<T, 1>(words[1], factors);
    fragments.finish();
    const unsigned tokens = stage.tokens + (unit * (EIGHT_ROWS >> 4) + half * 4);
    with_width<Layout::TOKENS>(width, [&](auto columns) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 2 * HALVES; ++i) // an MMA reads 32 bytes along k: 2 descriptor units of 16 bytes
            multiply_step<T, decltype(columns)::value>(
                c, fragments.a[i], k_major_descriptor_of<Layout::UNITS * EIGHT_ROWS>(tokens + i * 2), i > 0 || add);
        wgmma_commit_group();
    });
    wgmma_wait_group<1>(); // the previous MMAs are complete, so their fragments may be overwritten
}

// Compile-time argument: successive calls of multiply_part use two fragment sets alternately, and the first call of a
// stage uses set `I` (0 or 1).
template <int I> struct FragmentSet {
    static constexpr int value = I;
};

// Compute a warpgroup's partial sums of a tile of at most `width` tokens. `part` (0 to SPLIT - 1) is the index of the
// warpgroup among the SPLIT warpgroups of its side. The warpgroup multiplies steps `part`, `part + SPLIT`, ... along k.
// `at`: ring position of the warpgroup's first step; the function advances `at` to the warpgroup's first step of the
// next tile. `first_stage`: addresses of the operands in stage 0. `skewed_after`: the step after which the other
// warpgroup may begin, or -1.
template <typename T, class Layout, bool PAIRS, int REGISTERS>
__device__ __forceinline__ void sum_fp4_tile(float (&c)[REGISTERS], typename Layout::Shared& shared,
                                             RingPlace<Layout::STAGES>& at, int steps, int skewed_after, int part,
                                             int width, const Fp4Operands& first_stage) {
    constexpr int CLUSTER = Layout::CLUSTER, SPLIT = Layout::SPLIT;
    constexpr int TIMES = 2 / Layout::HALVES, PARTS = Layout::UNITS * TIMES;
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
        for (int i = 0; i < PARTS; ++i) {
            multiply_part<T, Layout, PAIRS>(c, fragments[(decltype(set)::value + i) % 2], stage, i / TIMES, i % TIMES,
                                            width, i > 0 || step > part);
            // The MMAs of the previous stage are complete.
            if (i == 0 && step > part) release(previous);
        }
        if (step == skewed_after && lane == 0) mbarrier_arrive(shared_address(&shared.skewed));
        previous = at.stage;
        if constexpr (SPLIT == 1)
            at.advance();
        else
            skip(at, SPLIT);
    };
    // Successive calls of multiply_part use the two fragment sets alternately, also across stages.
    int step = part;
#pragma unroll 1
    for (; step < steps; step += SPLIT) {
        multiply_stage(step, FragmentSet<0>());
        if constexpr (PARTS % 2) {
            step += SPLIT;
            if (step >= steps) break;
            multiply_stage(step, FragmentSet<1>());
        }
    }
    wgmma_wait_group<0>();
    if (SPLIT == 1 || part < steps) release(previous);
    if (SPLIT > 1 && step < stages_of<SPLIT>(steps)) {
        mbarrier_wait(shared_address(&shared.full[at.stage]), at.phase);
        release(at.stage);
        skip(at, SPLIT);
    }
    wgmma_fence_operand(c);
}

// Add the partial sums of the SPLIT warpgroups of a side, which have the same 64 rows of weights. The warpgroup with
// the highest `part` adds the sums of the other warpgroups to its own. Each thread adds the sums of the corresponding
// threads, always in the same order. `any`: this warpgroup has multiplied at least one stage; otherwise its sums are
// taken as 0. `phase`: the number of earlier tiles; only its parity is used. `exchange`: shared memory buffer for the
// sums of the other warpgroups.
template <class Layout, int REGISTERS>
__device__ __forceinline__ void join_sums(float (&joined)[REGISTERS], const float (&c)[REGISTERS],
                                          typename Layout::Shared& shared, bool any, int part, int side,
                                          unsigned exchange, int phase) {
    const unsigned full = shared_address(&shared.sums_full[side]), empty = shared_address(&shared.sums_empty[side]);
    const unsigned mine = exchange + threadIdx.x % WARPGROUP * 16;
    if (part < Layout::SPLIT - 1) {
        const unsigned to = mine + part * Layout::SUMS;
        mbarrier_wait(empty, phase + 1);
#pragma unroll
        for (int i = 0; i < REGISTERS; i += 4)
            store_shared(to + i / 4 * WARPGROUP * 16,
                         any ? make_uint4(__float_as_uint(c[i]), __float_as_uint(c[i + 1]), __float_as_uint(c[i + 2]),
                                          __float_as_uint(c[i + 3]))
                             : make_uint4(0, 0, 0, 0));
        mbarrier_arrive(full);
    } else {
        mbarrier_wait(full, phase);
#pragma unroll
        for (int i = 0; i < REGISTERS; ++i) joined[i] = any ? c[i] : 0;
#pragma unroll 1
        for (int other = 0; other < Layout::SPLIT - 1; ++other) {
#pragma unroll
            for (int i = 0; i < REGISTERS; i += 4) {
                const uint4 sums = load_shared(mine + other * Layout::SUMS + i / 4 * WARPGROUP * 16);
                joined[i] += __uint_as_float(sums.x), joined[i + 1] += __uint_as_float(sums.y);
                joined[i + 2] += __uint_as_float(sums.z), joined[i + 3] += __uint_as_float(sums.w);
            }
        }
        mbarrier_arrive(empty);
    }
}

// Run a consumer warpgroup: compute all tiles of the block.
template <typename T, int ACTIVATION, class Layout>
__device__ __forceinline__ void compute_fp4_tiles(const MappedGemmParams& p, typename Layout::Shared& shared,
                                                  unsigned ring) {
    constexpr int TOKENS = Layout::TOKENS, SKEW = TOKENS > 128; // lag of the second warpgroup in stages
    constexpr int SIDES = Layout::SIDES, SPLIT = Layout::SPLIT;
    constexpr float MISSING = Fp4Factors<T, Layout::FORMAT, Layout::HALVES>::MISSING;
    // The shuffle tells the compiler that the value is warp-uniform, so descriptors stay in uniform registers.
    const int warpgroup = __shfl_sync(FULL_WARP, int(threadIdx.x / WARPGROUP), 0);
    const int side = SIDES == 1 ? 0 : SPLIT == 1 ? warpgroup : warpgroup % SIDES, lane = threadIdx.x % 32;
    // Index of the warpgroup among the SPLIT warpgroups of its side. The warpgroups that write the results get the
    // highest `part`, because the warpgroup with the highest `part` may have the fewest steps. A loop bound depends on
    // `part`; the reduction tells the compiler that it is warp-uniform.
    const int part = SPLIT == 1 ? 0 : __reduce_max_sync(FULL_WARP, SPLIT - 1 - warpgroup / SIDES);
    const unsigned weights = ring + Layout::WEIGHTS + (side * 8 + threadIdx.x % WARPGROUP / 32 * 2) * Layout::EIGHT;
    Fp4Operands operands{weights + lane * 8, weights + UNIT_NUMBERS + lane / 4 * UNIT_SCALES<Layout::FORMAT>,
                         unsigned(k_major_descriptor(ring))};
    constexpr bool PAIRS = is_gated(ACTIVATION) && !has_halves(ACTIVATION);
    if constexpr (PAIRS) { // the lane's first row is 2 * (l / 4); rows 8 to 15 are in the second unit
        const int row = lane / 4 * 2 % UNIT_ROWS;
        const unsigned unit = weights + lane / 16 * Layout::EIGHT;
        operands.weights = unit + row * ROW_NUMBERS + lane % 4 * 8;
        operands.scales = unit + UNIT_NUMBERS + row * UNIT_SCALES<Layout::FORMAT>;
    }
    // Keep the addresses in registers: otherwise the compiler recomputes them at every stage.
    asm volatile("" : "+r"(operands.weights), "+r"(operands.scales), "+r"(operands.tokens));
    const unsigned staging = ring + Layout::STAGED + side * 2 * Layout::STAGING;
    const int steps = (p.k + Layout::UNITS * DEPTH - 1) / (Layout::UNITS * DEPTH);
    RingPlace<Layout::STAGES> place;
    if constexpr (SPLIT > 1) skip(place, part);
    RingPlace<TILES_AHEAD> at;
    int round = 0;
    int skewed_after = SKEW && warpgroup == 0 ? min(SKEW, steps) - 1 : -1;
    float c[TOKENS / 2];
    for (bool first = true;; first = false) {
        mbarrier_wait(shared_address(&shared.tile_full[at.stage]), at.phase);
        const WgmmaTile tile = shared.tiles[at.stage];
        // The reduction tells the compiler that the value is warp-uniform.
        const int tokens = __reduce_max_sync(FULL_WARP, tile.tokens);
        if (tokens == 0) break;
        if (SKEW && first && warpgroup > 0) mbarrier_wait(shared_address(&shared.skewed), 0);
        const float factor = Layout::FORMAT == NVFP4 ? MISSING * p.b_global_scale[tile.expert] : MISSING;
        sum_fp4_tile<T, Layout, PAIRS>(c, shared, place, steps, skewed_after, part, tokens, operands);
        skewed_after = -1;
        // All lanes have read the tile by this point, so no __syncwarp is needed. With a __syncwarp the compiler would
        // not keep warp-uniform values in uniform registers.
        if (lane == 0) mbarrier_arrive(shared_address(&shared.tile_empty[at.stage]));
        at.advance();
        // Do not modify `c` in place: the compiler would then insert a wait after each MMA.
        if constexpr (SPLIT > 1) {
            float joined[TOKENS / 2];
            join_sums<Layout>(joined, c, shared, part < steps, part, side,
                              ring + Layout::EXCHANGE + side * (SPLIT - 1) * Layout::SUMS, at.stage - 1);
            if (part == SPLIT - 1) store_tile<T, ACTIVATION, TOKENS>(p, joined, tile, side, staging, round, factor);
        } else {
            store_tile<T, ACTIVATION, TOKENS>(p, c, tile, side, staging, round, factor);
        }
    }
}

template <typename, int FORMAT, int, int TOKENS, int UNITS, int STAGES, int CLUSTER, int, int SIDES, int SPLIT,
          int HALVES, bool, bool>
constexpr Launch gemm_fp4_wgmma_launch() {
    using Layout = Fp4Layout<FORMAT, TOKENS, UNITS, STAGES, CLUSTER, SIDES, SPLIT, HALVES>;
    return {Layout::THREADS, 1024 + Layout::REST + int(sizeof(typename Layout::Shared)), Layout::BOX};
}

// T: type of tokens and result, __nv_bfloat16 or __half. FORMAT: MXFP4 or NVFP4. TOKENS: 8, 16, 32, 64, 96, 128 or 288.
// BLOCKS: resident blocks per multiprocessor. SIDES: warpgroups along the weights of a tile, 1 or 2. SPLIT: warpgroups
// along k. HALVES: half units along k that are converted and multiplied at once. STREAMED: set for few tokens; each
// weight is read once, with the L2 policy evict-first. ACTIVATION: see moe_gemm/epilogue.cuh.
template <typename T, int FORMAT, int ACTIVATION, int TOKENS, int UNITS, int STAGES, int CLUSTER, int BLOCKS, int SIDES,
          int SPLIT, int HALVES, bool STREAMED, bool GATHER>
__global__ __launch_bounds__((Fp4Layout<FORMAT, TOKENS, UNITS, STAGES, CLUSTER, SIDES, SPLIT, HALVES>::THREADS), BLOCKS)
    CLUSTER_OF(CLUSTER) void gemm_fp4_wgmma(const __grid_constant__ MappedGemmParams p) {
#if HAS_WGMMA
    static_assert(!GATHER || (CLUSTER == 1 && TOKENS <= 128), "");
    using Layout = Fp4Layout<FORMAT, TOKENS, UNITS, STAGES, CLUSTER, SIDES, SPLIT, HALVES>;
    using Shared = typename Layout::Shared;
    constexpr bool DEAL = TOKENS > 128;
    constexpr int WARPS = WARPGROUP / 32;
    extern __shared__ char memory[];
    const unsigned misplaced = -shared_address(memory) & 1023; // swizzled tiles are 1024-byte aligned
    const unsigned ring = shared_address(memory) + misplaced;
    Shared& shared = *reinterpret_cast<Shared*>(memory + misplaced + Layout::REST);
    if (threadIdx.x == 0) {
        prefetch_tensormap(p.b_map);
        if constexpr (!GATHER) prefetch_tensormap(p.a_map);
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(shared_address(&shared.full[i]), GATHER ? 2 : 1);
            mbarrier_init(shared_address(&shared.empty[i]), CLUSTER * SIDES * WARPS);
        }
        for (int i = 0; i < TILES_AHEAD; ++i) {
            mbarrier_init(shared_address(&shared.tile_full[i]), 1);
            mbarrier_init(shared_address(&shared.tile_empty[i]), Layout::GROUPS * WARPS);
        }
        for (int i = 0; i < SIDES && SPLIT > 1; ++i) {
            mbarrier_init(shared_address(&shared.sums_full[i]), (SPLIT - 1) * WARPGROUP);
            mbarrier_init(shared_address(&shared.sums_empty[i]), WARPGROUP);
        }
        mbarrier_init(shared_address(&shared.skewed), WARPS);
        fence_mbarrier_init();
    }
    cluster_sync<CLUSTER>();
    if (threadIdx.x < Layout::COMPUTE_THREADS) {
        if constexpr (DEAL) setmaxnreg_inc<224>();
        compute_fp4_tiles<T, ACTIVATION, Layout>(p, shared, ring);
    } else {
        if constexpr (DEAL) setmaxnreg_dec<56>();
        if (threadIdx.x < Layout::COMPUTE_THREADS + 32) {
            if constexpr (GATHER)
                gather_fp4_tiles<Layout, ACTIVATION, STREAMED>(p, shared, ring);
            else
                load_fp4_tiles<Layout, ACTIVATION, STREAMED>(p, shared, ring);
        }
    }
    // A block must not exit while other blocks of its cluster write to its shared memory.
    if constexpr (CLUSTER > 1) cluster_sync<CLUSTER>();
#endif
}
