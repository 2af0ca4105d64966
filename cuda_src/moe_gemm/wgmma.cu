// Grouped GEMM (moe_gemm/params.cuh) of bfloat16 or float16 on Hopper, by TMA and wgmma. GATHER: rows are gathered by
// row_token.
//
// Weights are the M side of wgmma (64). The rows of a group, called tokens here, are the N side, which can be any
// multiple of 8: N is the smallest entry of WIDTHS that is at least the tile's tokens. Rows past a group's end only
// affect sums that are not written. Every token tile reads all weights of the expert, so a group is divided into as few
// token tiles as possible. The token tiles of a group have about equal sizes.
//
// Grid: CLUSTER * (resident clusters) persistent blocks. A tile is 128 rows of weights times up to TOKENS tokens. The
// blocks of a cluster have neighbouring weights and the same tokens; each block multicasts every CLUSTER-th TMA box of
// the tokens.
//
//   warp 8           producer: 64 elements along k per stage, up to STAGES stages ahead, also across tiles
//   warpgroup w < 2  consumer: multiplies weight rows `64 * w` to `64 * w + 63` of a tile, and writes the results
//
// A stage is full when its bytes have arrived, and empty when all consumer warps of all receiving blocks have released
// it.
//
// If gated, a tile alternates 8 gate rows and their 8 up rows. A thread has rows `lane / 4` and `lane / 4 + 8` of its
// warp's 16 rows: a gate and its up.
//
// With TOKENS > 128 the second warpgroup begins one stage after the first. Therefore one warpgroup multiplies while the
// other writes results.
//
// Speed of light: up to about 200 rows per expert it is the time to read the weights, above that the time of
// `2 * rows * n * k` operations. The table gives this bound divided by the measured time, on an H200, with `n = 4096`,
// `k = 7168` unless noted:
//
//   256 experts x 8 rows               100%
//   64 x 64 rows                       97%
//   8 x 1024 rows                      99%; gathered, 5% more time
//   8 x 1024 rows, n = 7168, k = 2048  94%
//   8 x 4096 rows                      100%
#include "common/cluster.cuh"
#include "common/launch.cuh"
#include "common/overlap.cuh"
#include "moe_gemm/wgmma_gather.cuh"
#include "moe_gemm/wgmma_layout.cuh"
#include "moe_gemm/wgmma_store.cuh"
#include "moe_gemm/wgmma_tiles.cuh"
#include "moe_gemm/wgmma_transposed.cuh"
#include "moe_gemm/wgmma_widths.cuh"

template <int ACTIVATION, int TOKENS, int STAGES, int CLUSTER, bool MEMORY_BOUND, bool B_TRANSPOSED>
__device__ __forceinline__ void load_tiles(const MappedGemmParams& p, WgmmaShared<TOKENS, STAGES>& shared,
                                           unsigned stages) {
    using Shared = WgmmaShared<TOKENS, STAGES>;
    constexpr bool GATED = is_gated(ACTIVATION);
    constexpr int WEIGHTS = WARPGROUPS * 64, BOX = box_of(TOKENS);
    constexpr unsigned long long POLICY = MEMORY_BOUND ? EVICT_FIRST : EVICT_NORMAL;
    const int lane = threadIdx.x % 32, rank = cluster_rank<CLUSTER>();
    WgmmaTiles<TOKENS, is_largest(TOKENS)> tiles(p, (p.n + CLUSTER * WEIGHTS - 1) / (CLUSTER * WEIGHTS),
                                                 reinterpret_cast<unsigned char*>(&shared + 1));
    TileSequence<is_largest(TOKENS), CLUSTER> sequence;
    PipelineState<STAGES> state;
    const int steps = (p.k + DEPTH - 1) / DEPTH;
    int expert, row, tokens, weight_tile;
    for (; tiles.find(sequence.tile, expert, row, tokens, weight_tile); sequence.advance()) {
        if (lane == 0) {
            const int first_weight = (weight_tile * CLUSTER + rank) * WEIGHTS;
            const int boxes = (tokens + BOX - 1) / BOX;
            for (int step = 0; step < steps; ++step, state.advance()) {
                const unsigned full = shared_address(&shared.full[state.stage]);
                const unsigned weights_to = stages + state.stage * Shared::STAGE;
                const unsigned tokens_to = weights_to + Shared::WEIGHT_TILE;
                const int x = step * DEPTH;
                mbarrier_wait(shared_address(&shared.empty[state.stage]), state.phase + 1);
                if (step == 0)
                    shared.tiles[state.stage] = {row, tokens, GATED ? first_weight / 2 : first_weight,
                                                 ACTIVATION & BIASED ? expert : 0};
                mbarrier_arrive_expect_tx(full, Shared::WEIGHT_TILE + boxes * BOX * ROW_BYTES);
                if constexpr (B_TRANSPOSED)
                    load_transposed<POLICY, ACTIVATION>(p, weights_to, x, first_weight, expert, full);
                else if constexpr (GATED)
                    tma_load<POLICY>(weights_to, p.b_map, x, 0, 0, first_weight / 16, expert, full);
                else
                    tma_load<POLICY>(weights_to, p.b_map, x, first_weight, expert, 0, full);
                for (int box = rank; box < boxes; box += CLUSTER) {
                    const unsigned to = tokens_to + box * BOX * ROW_BYTES;
                    if constexpr (CLUSTER == 1)
                        tma_load<EVICT_NORMAL>(to, p.a_map, x, row + box * BOX, 0, 0, full);
                    else
                        tma_load_multicast((1 << CLUSTER) - 1, to, p.a_map, x, row + box * BOX, 0, 0, full);
                }
            }
        }
        __syncwarp();
    }
    if (lane == 0) {
        mbarrier_wait(shared_address(&shared.empty[state.stage]), state.phase + 1);
        shared.tiles[state.stage].tokens = 0;
        mbarrier_arrive(shared_address(&shared.full[state.stage]));
    }
    __syncwarp();
}

// Compute a warpgroup's sums of a tile of at most WIDTH tokens. `a`, `b`: descriptors of weights (B_TRANSPOSED:
// MN-major) and tokens in stage 0. `skewed_after`: the step after which the other warpgroup may begin, or -1.
template <typename T, int WIDTH, int CLUSTER, bool MEMORY_BOUND, int REGISTERS, typename Shared, int STAGES, typename A>
__device__ __forceinline__ void sum_tile(float (&c)[REGISTERS], Shared& shared, PipelineState<STAGES>& state, int steps,
                                         int skewed_after, A a, unsigned long long b) {
    const int lane = threadIdx.x % 32;
    auto release = [&](int stage) {
        const unsigned empty = shared_address(&shared.empty[stage]);
        if constexpr (CLUSTER == 1) {
            if (lane == 0) mbarrier_arrive(empty);
        } else {
            if (lane < CLUSTER) mbarrier_arrive_cluster(map_shared_rank(empty, lane));
        }
    };
    int previous = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        mbarrier_wait(shared_address(&shared.full[state.stage]), state.phase);
        const unsigned long long at = state.stage * (Shared::STAGE >> 4);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < DEPTH / 16; ++i) multiply_weights<T, WIDTH>(c, a, b, at, i, i > 0 || step > 0);
        wgmma_commit_group();
        if constexpr (MEMORY_BOUND) { // memory-bound: release the stage at once
            wgmma_wait_group<0>();
            release(state.stage);
        } else { // compute-bound: release the previous stage while this one's MMAs run
            wgmma_wait_group<1>();
            if (step > 0) release(previous);
        }
        if (step == skewed_after && lane == 0) mbarrier_arrive(shared_address(&shared.skewed));
        previous = state.stage;
        state.advance();
    }
    if constexpr (!MEMORY_BOUND) {
        wgmma_wait_group<0>();
        release(previous);
    }
    wgmma_fence_operand(reinterpret_cast<float (&)[WIDTH / 2]>(c));
    if constexpr (IS_PAIR<A>) wgmma_fence_operand(reinterpret_cast<float (&)[WIDTH / 2]>(c[REGISTERS / 2]));
}

template <typename T, int ACTIVATION, int TOKENS, int STAGES, int CLUSTER, bool MEMORY_BOUND, bool B_TRANSPOSED>
__device__ __forceinline__ void compute_tiles(const MappedGemmParams& p, WgmmaShared<TOKENS, STAGES>& shared,
                                              unsigned stages) {
    using Shared = WgmmaShared<TOKENS, STAGES>;
    constexpr int SKEW = is_largest(TOKENS); // lag of the second warpgroup in stages
    // The shuffle tells the compiler that the value is warp-uniform, so that descriptors stay in uniform registers.
    const int warpgroup = __shfl_sync(FULL_WARP, int(threadIdx.x / WARPGROUP), 0);
    constexpr bool BY_TOKENS =
        B_TRANSPOSED && has_halves(ACTIVATION); // the warpgroups split the tokens, not the weights
    const auto a = weights_at<B_TRANSPOSED, ACTIVATION>(stages, warpgroup);
    const unsigned long long b = k_major_descriptor(stages + Shared::WEIGHT_TILE);
    const unsigned staging = stages + STAGES * Shared::STAGE + warpgroup * 2 * Shared::STAGING;
    const int steps = (p.k + DEPTH - 1) / DEPTH;
    PipelineState<STAGES> state;
    int round = 0;
    int skewed_after = SKEW && warpgroup == 0 ? min(SKEW, steps) - 1 : -1;
    float c[TOKENS / 2];
    for (bool first = true;; first = false) {
        mbarrier_wait(shared_address(&shared.full[state.stage]), state.phase);
        const WgmmaTile tile = shared.tiles[state.stage];
        if (tile.tokens == 0) break;
        if (SKEW && first && warpgroup > 0) mbarrier_wait(shared_address(&shared.skewed), 0);
        if constexpr (B_TRANSPOSED && is_gated(ACTIVATION)) clear(c);
        if constexpr (BY_TOKENS) {
            const WgmmaTile mine = share_of(tile, warpgroup);
            const unsigned long long tokens = b + ((mine.row - tile.row) * ROW_BYTES >> 4);
            with_width<TOKENS / 2>(mine.tokens, [&](auto width) {
                sum_tile<T, decltype(width)::value, CLUSTER, MEMORY_BOUND>(c, shared, state, steps, skewed_after, a,
                                                                           tokens);
            });
            skewed_after = -1;
            store_share<T, ACTIVATION, TOKENS>(p, c, mine, warpgroup, staging, round);
        } else {
            with_width<TOKENS>(tile.tokens, [&](auto width) {
                sum_tile<T, decltype(width)::value, CLUSTER, MEMORY_BOUND>(c, shared, state, steps, skewed_after, a, b);
            });
            skewed_after = -1;
            if constexpr (B_TRANSPOSED && is_gated(ACTIVATION)) deinterleave_gates(c, tile.tokens);
            store_tile<T, ACTIVATION, TOKENS, is_largest(TOKENS)>(p, c, tile, warpgroup, staging, round);
        }
    }
}

template <typename, int, int TOKENS, int STAGES, int CLUSTER, int, bool, bool GATHER, bool = false>
constexpr Launch gemm_wgmma_launch() {
    using Shared = WgmmaShared<TOKENS, STAGES>;
    constexpr int WARPS = GATHER ? gather_warps(TOKENS) : 1;            // producer warps
    constexpr int SORTED = is_largest(TOKENS) ? WARPS * MAX_SORTED : 0; // bytes of the sorted lists of experts
    constexpr int SOURCES = GATHER ? TOKENS / CLUSTER * int(sizeof(int)) : 0;
    return {GATHER ? gather_threads(TOKENS) : gemm_threads(TOKENS),
            1024 + Shared::SHARED_OFFSET + int(sizeof(Shared)) + SORTED + SOURCES, box_of(TOKENS)};
}

// TOKENS: 8, 16, 32, 64, 96, 128 or 288. B_TRANSPOSED: weights are [experts, k, n] in memory; if gates and ups are
// halves of n, TOKENS is at least 16, and the largest TOKENS is 256 instead of 288.
template <typename T, int ACTIVATION, int TOKENS, int STAGES, int CLUSTER, int BLOCKS_PER_SM, bool MEMORY_BOUND,
          bool GATHER, bool B_TRANSPOSED = false>
__global__ __launch_bounds__(GATHER ? gather_threads(TOKENS) : gemm_threads(TOKENS), BLOCKS_PER_SM)
    CLUSTER_OF(CLUSTER) void gemm_wgmma(const __grid_constant__ MappedGemmParams p) {
    wait_for_earlier_kernels();
#if HAS_WGMMA
    using Shared = WgmmaShared<TOKENS, STAGES>;
    extern __shared__ char memory[];
    const unsigned padding = -shared_address(memory) & 1023; // swizzled tiles are 1024-byte aligned
    const unsigned stages = shared_address(memory) + padding;
    Shared& shared = *reinterpret_cast<Shared*>(memory + padding + Shared::SHARED_OFFSET);
    if (threadIdx.x == 0) {
        prefetch_tensormap(p.b_map);
        prefetch_tensormap(p.a_map);
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(shared_address(&shared.full[i]), GATHER ? gather_warps(TOKENS) + 1 : 1);
            mbarrier_init(shared_address(&shared.empty[i]), CLUSTER * WARPGROUPS * (WARPGROUP / 32));
        }
        mbarrier_init(shared_address(&shared.skewed), WARPGROUP / 32);
        fence_mbarrier_init();
    }
    cluster_sync<CLUSTER>();
    constexpr bool MOVES_REGISTERS = is_largest(TOKENS);
    if (threadIdx.x < WARPGROUPS * WARPGROUP) {
        if constexpr (MOVES_REGISTERS) setmaxnreg_inc<224>();
        compute_tiles<T, ACTIVATION, TOKENS, STAGES, CLUSTER, MEMORY_BOUND, B_TRANSPOSED>(p, shared, stages);
    } else {
        if constexpr (MOVES_REGISTERS) setmaxnreg_dec<56>();
        if constexpr (GATHER)
            gather_tiles<ACTIVATION, TOKENS, STAGES, CLUSTER, MEMORY_BOUND, B_TRANSPOSED>(p, shared, stages);
        else if (threadIdx.x < WARPGROUPS * WARPGROUP + 32)
            load_tiles<ACTIVATION, TOKENS, STAGES, CLUSTER, MEMORY_BOUND, B_TRANSPOSED>(p, shared, stages);
    }
    // A block must not exit while other blocks of its cluster write to its shared memory.
    if constexpr (CLUSTER > 1) cluster_sync<CLUSTER>();
#endif
}
