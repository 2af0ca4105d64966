// Grouped GEMM of bfloat16 or float16 on Hopper, by TMA and wgmma.
//
//   x[r, j]   = sum over i of a[r, i] * b[e, j, i]       for the rows r of the group of expert e;
//                                                        GATHER: row row_token[r] of a instead of row r
//   out[r, j] = x[r, j], or activate(x[r, j], x[r, n / 2 + j]) with ACTIVATION; moe_gemm/epilogue.cuh lists all forms
//
// Sums are in float32 and rounded once. moe_gemm/params.cuh defines the groups.
//
// wgmma has M = 64, and N is any multiple of 8 up to 256. A group can have any number of rows. So the rows of a group,
// called tokens here, are the N side, and weights are the M side. A tile of few tokens then takes little time, because
// N is small. TMA may copy rows past a group's end; they only affect sums that are not written. Every token tile of a
// group reads all weights of the expert. So a group is divided into as few token tiles as possible, of about equal
// size. N is the smallest entry of WIDTHS that is at least the number of tokens of the tile.
//
// Grid: CLUSTER * (number of resident clusters) persistent blocks of gemm_threads(TOKENS) threads. A tile is 128 rows
// of weights times up to TOKENS tokens. The blocks of a cluster have the same tokens and neighbouring weights. Each
// block copies every CLUSTER-th box of tokens (the tokens of one TMA copy), by multicast to the whole cluster.
//
//   warp 8           finds tiles; copies 64 elements along k per stage to a ring of STAGES stages, by TMA. It runs up
//                    to STAGES stages ahead of the consumers, also across tiles. GATHER: see wgmma_gather.cuh
//   warpgroup w < 2  multiplies weight rows `64 * w` to `64 * w + 63` of a tile, and writes the results
//
// A stage is full when its bytes have arrived. A stage is empty when all consumer warps of all blocks that receive it
// have released it.
//
// If gated, a tile of weights is 8 gate rows, their 8 up rows, the next 8 gate rows, and so on. So a thread has the
// sums of a gate row and of its up row: rows `lane / 4` and `lane / 4 + 8` of its warp's 16 rows.
//
// With the largest tiles (TOKENS > 128) the second warpgroup stays one stage behind the first. Then one warpgroup
// multiplies while the other writes its results, and the tensor cores always have work. These tiles are scheduled from
// the largest to the smallest. The last tile of a group may have up to 32 tokens more than 256
// (moe_gemm/wgmma_tiles.cuh).
//
// Speed of light: up to about 200 rows per expert the time to read the weights, above that the time of 2 * rows * n * k
// operations. The table shows this lower bound divided by the measured time, on an H200, with n = 4096, k = 7168 unless
// noted:
//
//   256 experts x 8 rows               100%
//   64 x 64 rows                       97%
//   8 x 1024 rows                      99%; gathered, 5% more time
//   8 x 1024 rows, n = 7168, k = 2048  94%
//   8 x 4096 rows                      100%
//
// If there are few rows, gathering takes no extra time. Whole MoE layers with 4096 tokens reach 92% (Mixtral), 86%
// (DeepSeek-V3 with 32 experts) and 70% (Qwen3-30B-A3B) of the rate of a large GEMM.
#include "common/cluster.cuh"
#include "common/launch.cuh"
#include "common/overlap.cuh"
#include "moe_gemm/wgmma_gather.cuh"
#include "moe_gemm/wgmma_layout.cuh"
#include "moe_gemm/wgmma_store.cuh"
#include "moe_gemm/wgmma_tiles.cuh"
#include "moe_gemm/wgmma_transposed.cuh"
#include "moe_gemm/wgmma_widths.cuh"

// Run the producer warp: find the tiles and start the TMA copies of their stages.
template <int ACTIVATION, int TOKENS, int STAGES, int CLUSTER, bool STREAMED, bool TURNED>
__device__ __forceinline__ void load_tiles(const MappedGemmParams& p, WgmmaShared<TOKENS, STAGES>& shared,
                                           unsigned stages) {
    using Shared = WgmmaShared<TOKENS, STAGES>;
    constexpr bool GATED = is_gated(ACTIVATION);
    constexpr int WEIGHTS = WARPGROUPS * 64, BOX = box_of(TOKENS);
    constexpr unsigned long long POLICY = STREAMED ? EVICT_FIRST : EVICT_NORMAL;
    const int lane = threadIdx.x % 32, rank = cluster_rank<CLUSTER>();
    WgmmaTiles<TOKENS, is_largest(TOKENS)> tiles(p, (p.n + CLUSTER * WEIGHTS - 1) / (CLUSTER * WEIGHTS),
                                                 reinterpret_cast<unsigned char*>(&shared + 1));
    Turns<is_largest(TOKENS), CLUSTER> turns;
    RingPlace<STAGES> place;
    const int steps = (p.k + DEPTH - 1) / DEPTH;
    int expert, row, tokens, weight_tile;
    for (; tiles.find(turns.tile, expert, row, tokens, weight_tile); turns.advance()) {
        if (lane == 0) {
            const int first_weight = (weight_tile * CLUSTER + rank) * WEIGHTS;
            const int boxes = (tokens + BOX - 1) / BOX;
            for (int step = 0; step < steps; ++step, place.advance()) {
                const unsigned full = shared_address(&shared.full[place.stage]);
                const unsigned weights_to = stages + place.stage * Shared::STAGE;
                const unsigned tokens_to = weights_to + Shared::WEIGHT_TILE;
                const int x = step * DEPTH;
                mbarrier_wait(shared_address(&shared.empty[place.stage]), place.phase + 1);
                if (step == 0)
                    shared.tiles[place.stage] = {row, tokens, GATED ? first_weight / 2 : first_weight,
                                                 ACTIVATION & BIASED ? expert : 0};
                mbarrier_arrive_expect_tx(full, Shared::WEIGHT_TILE + boxes * BOX * ROW_BYTES);
                if constexpr (TURNED)
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
        mbarrier_wait(shared_address(&shared.empty[place.stage]), place.phase + 1);
        shared.tiles[place.stage].tokens = 0;
        mbarrier_arrive(shared_address(&shared.full[place.stage]));
    }
    __syncwarp();
}

// Compute a warpgroup's sums of a tile of at most WIDTH tokens. `a`, `b`: descriptors of the weights and the tokens in
// stage 0, both K-major. If the weights are [experts, k, n] in memory, `a` is an MN-major descriptor instead
// (moe_gemm/wgmma_transposed.cuh). `skewed_after`: the step after which the other warpgroup may begin, or -1.
template <typename T, int WIDTH, int CLUSTER, bool STREAMED, int REGISTERS, typename Shared, int STAGES, typename A>
__device__ __forceinline__ void sum_tile(float (&c)[REGISTERS], Shared& shared, RingPlace<STAGES>& place, int steps,
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
        mbarrier_wait(shared_address(&shared.full[place.stage]), place.phase);
        const unsigned long long at = place.stage * (Shared::STAGE >> 4);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < DEPTH / 16; ++i) multiply_weights<T, WIDTH>(c, a, b, at, i, i > 0 || step > 0);
        wgmma_commit_group();
        if constexpr (STREAMED) { // memory-bound: release the stage at once, so that its next copies start
            wgmma_wait_group<0>();
            release(place.stage);
        } else { // compute-bound: release the previous stage while this stage's MMAs run
            wgmma_wait_group<1>();
            if (step > 0) release(previous);
        }
        if (step == skewed_after && lane == 0) mbarrier_arrive(shared_address(&shared.skewed));
        previous = place.stage;
        place.advance();
    }
    if constexpr (!STREAMED) {
        wgmma_wait_group<0>();
        release(previous);
    }
    wgmma_fence_operand(reinterpret_cast<float (&)[WIDTH / 2]>(c));
    if constexpr (IS_PAIR<A>) wgmma_fence_operand(reinterpret_cast<float (&)[WIDTH / 2]>(c[REGISTERS / 2]));
}

// Run a consumer warpgroup: compute all tiles of the block.
template <typename T, int ACTIVATION, int TOKENS, int STAGES, int CLUSTER, bool STREAMED, bool TURNED>
__device__ __forceinline__ void compute_tiles(const MappedGemmParams& p, WgmmaShared<TOKENS, STAGES>& shared,
                                              unsigned stages) {
    using Shared = WgmmaShared<TOKENS, STAGES>;
    constexpr int SKEW = is_largest(TOKENS); // lag of the second warpgroup in stages
    // The shuffle tells the compiler that the value is warp-uniform, so descriptors stay in uniform registers.
    const int warpgroup = __shfl_sync(FULL_WARP, int(threadIdx.x / WARPGROUP), 0);
    constexpr bool BY_TOKENS = TURNED && has_halves(ACTIVATION); // the warpgroups split the tokens, not the weights
    const auto a = weights_at<TURNED, ACTIVATION>(stages, warpgroup);
    const unsigned long long b = k_major_descriptor(stages + Shared::WEIGHT_TILE);
    const unsigned staging = stages + STAGES * Shared::STAGE + warpgroup * 2 * Shared::STAGING;
    const int steps = (p.k + DEPTH - 1) / DEPTH;
    RingPlace<STAGES> place;
    int round = 0;
    int skewed_after = SKEW && warpgroup == 0 ? min(SKEW, steps) - 1 : -1;
    float c[TOKENS / 2];
    for (bool first = true;; first = false) {
        mbarrier_wait(shared_address(&shared.full[place.stage]), place.phase);
        const WgmmaTile tile = shared.tiles[place.stage];
        if (tile.tokens == 0) break;
        if (SKEW && first && warpgroup > 0) mbarrier_wait(shared_address(&shared.skewed), 0);
        if constexpr (TURNED && is_gated(ACTIVATION)) clear(c);
        if constexpr (BY_TOKENS) {
            const WgmmaTile mine = share_of(tile, warpgroup);
            const unsigned long long tokens = b + ((mine.row - tile.row) * ROW_BYTES >> 4);
            with_width<TOKENS / 2>(mine.tokens, [&](auto width) {
                sum_tile<T, decltype(width)::value, CLUSTER, STREAMED>(c, shared, place, steps, skewed_after, a,
                                                                       tokens);
            });
            skewed_after = -1;
            store_share<T, ACTIVATION, TOKENS>(p, c, mine, warpgroup, staging, round);
        } else {
            with_width<TOKENS>(tile.tokens, [&](auto width) {
                sum_tile<T, decltype(width)::value, CLUSTER, STREAMED>(c, shared, place, steps, skewed_after, a, b);
            });
            skewed_after = -1;
            if constexpr (TURNED && is_gated(ACTIVATION)) part_pairs(c, tile.tokens);
            store_tile<T, ACTIVATION, TOKENS, is_largest(TOKENS)>(p, c, tile, warpgroup, staging, round);
        }
    }
}

template <typename, int, int TOKENS, int STAGES, int CLUSTER, int, bool, bool GATHER, bool = false>
constexpr Launch gemm_wgmma_launch() {
    using Shared = WgmmaShared<TOKENS, STAGES>;
    constexpr int WARPS = GATHER ? gather_warps(TOKENS) : 1;                  // producer warps
    constexpr int SORTED = is_largest(TOKENS) ? WARPS * MAX_SORTED : 0;       // bytes of the warps' sorted expert lists
    constexpr int SOURCES = GATHER ? TOKENS / CLUSTER * int(sizeof(int)) : 0; // bytes of the row indices to gather
    return {GATHER ? gather_threads(TOKENS) : gemm_threads(TOKENS),
            1024 + Shared::REST + int(sizeof(Shared)) + SORTED + SOURCES, box_of(TOKENS)};
}

// T: __nv_bfloat16 or __half. TOKENS: 8, 16, 32, 64, 96, 128 or 288. BLOCKS: resident blocks per multiprocessor.
// STREAMED: for few tokens, where the kernel is memory-bound; weights are read once, with the L2 policy evict-first.
// ACTIVATION: see moe_gemm/epilogue.cuh. GATHER: rows of `a` are gathered; blocks have gather_threads(TOKENS) threads.
// TURNED: weights are [experts, k, n] in memory; if gates and ups are halves of n, TOKENS is at least 16, and 256
// instead of 288.
template <typename T, int ACTIVATION, int TOKENS, int STAGES, int CLUSTER, int BLOCKS, bool STREAMED, bool GATHER,
          bool TURNED = false>
__global__ __launch_bounds__(GATHER ? gather_threads(TOKENS) : gemm_threads(TOKENS), BLOCKS)
    CLUSTER_OF(CLUSTER) void gemm_wgmma(const __grid_constant__ MappedGemmParams p) {
    wait_for_earlier_kernels();
#if HAS_WGMMA
    using Shared = WgmmaShared<TOKENS, STAGES>;
    extern __shared__ char memory[];
    const unsigned misplaced = -shared_address(memory) & 1023; // swizzled tiles are 1024-byte aligned
    const unsigned stages = shared_address(memory) + misplaced;
    Shared& shared = *reinterpret_cast<Shared*>(memory + misplaced + Shared::REST);
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
    constexpr bool DEAL = is_largest(TOKENS);
    if (threadIdx.x < WARPGROUPS * WARPGROUP) {
        if constexpr (DEAL) setmaxnreg_inc<224>();
        compute_tiles<T, ACTIVATION, TOKENS, STAGES, CLUSTER, STREAMED, TURNED>(p, shared, stages);
    } else {
        if constexpr (DEAL) setmaxnreg_dec<56>();
        if constexpr (GATHER)
            gather_tiles<ACTIVATION, TOKENS, STAGES, CLUSTER, STREAMED, TURNED>(p, shared, stages);
        else if (threadIdx.x < WARPGROUPS * WARPGROUP + 32)
            load_tiles<ACTIVATION, TOKENS, STAGES, CLUSTER, STREAMED, TURNED>(p, shared, stages);
    }
    // A block must not exit while other blocks of its cluster write to its shared memory.
    if constexpr (CLUSTER > 1) cluster_sync<CLUSTER>();
#endif
}
