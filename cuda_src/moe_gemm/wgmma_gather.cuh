// Producer warps of gemm_wgmma with GATHER.
//
// A TMA box is one row of `a`. The swizzle depends only on address bits, so single rows can be copied into the swizzled
// tile. The producer warps of a cluster divide the rows of a tile, and multicast them. Each warp has a multiple of 4
// neighbouring rows. Without multicast the token loads would exceed the L2 bandwidth.
//
// A stage is full when its bytes and all producer warps of the block have arrived; warp 0 arrives twice, once with
// expect_tx.
//
// With cp.async to the warp's own block, and copies from there to the other block, the kernel would take 1.4 times as
// long (8 x 1024 rows, H200).
#pragma once
#include "common/cluster.cuh"
#include "common/mma.cuh"
#include "moe_gemm/epilogue.cuh"
#include "moe_gemm/wgmma_layout.cuh"
#include "moe_gemm/wgmma_tiles.cuh"
#include "moe_gemm/wgmma_transposed.cuh"

__host__ __device__ constexpr int gather_warps(int tokens) { return tokens >= 64 ? 4 : 1; }

__host__ __device__ constexpr int gather_threads(int tokens) {
    return WARPGROUPS * WARPGROUP + gather_warps(tokens) * 32;
}

// Start the copy of 128 bytes of row `y` of `a`, from column `x` on, to all blocks of the cluster.
template <int CLUSTER>
__device__ __forceinline__ void load_row(unsigned to, const TensorMap& map, int x, int y, unsigned barrier) {
    if constexpr (CLUSTER == 1)
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
                     "[%1, {%2, %3}], [%4];" ::"r"(to),
                     "l"(&map), "r"(x), "r"(y), "r"(barrier)
                     : "memory");
    else
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                     ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
                     "l"(&map), "r"(x), "r"(y), "r"(barrier), "h"((unsigned short)((1 << CLUSTER) - 1))
                     : "memory");
}

// Return true in one lane. With `lane == 0` the compiler would wrap instructions with warp-uniform operands, such as
// TMA copies, in a loop.
__device__ __forceinline__ bool elect_one() {
    unsigned elected;
    asm volatile("{ .reg .pred elected;\n"
                 "  elect.sync _|elected, 0xffffffff;\n"
                 "  selp.u32 %0, 1, 0, elected; }"
                 : "=r"(elected));
    return elected;
}

// Run a producer warp. After `shared`, shared memory holds the row indices of each warp and, for the largest tiles,
// each warp's sorted list of experts.
template <int ACTIVATION, int TOKENS, int STAGES, int CLUSTER, bool MEMORY_BOUND, bool B_TRANSPOSED>
__device__ __forceinline__ void gather_tiles(const MappedGemmParams& p, WgmmaShared<TOKENS, STAGES>& shared,
                                             unsigned stages) {
    using Shared = WgmmaShared<TOKENS, STAGES>;
    constexpr bool GATED = is_gated(ACTIVATION);
    constexpr int WEIGHTS = WARPGROUPS * 64, WARPS = gather_warps(TOKENS), CLUSTER_WARPS = WARPS * CLUSTER;
    constexpr int MAX_ROWS = TOKENS / CLUSTER_WARPS;
    static_assert(MAX_ROWS % 4 == 0, "");
    constexpr unsigned long long POLICY = MEMORY_BOUND ? EVICT_FIRST : EVICT_NORMAL;
    const int lane = threadIdx.x % 32, rank = cluster_rank<CLUSTER>();
    // The shuffle tells the compiler that the value is warp-uniform.
    const int warp = __shfl_sync(FULL_WARP, int(threadIdx.x / 32) - WARPGROUPS * 4, 0);
    int *const all_sources = reinterpret_cast<int*>(&shared + 1), *const sources = all_sources + warp * MAX_ROWS;
    unsigned char* const order = reinterpret_cast<unsigned char*>(all_sources + WARPS * MAX_ROWS);
    WgmmaTiles<TOKENS, is_largest(TOKENS)> tiles(p, (p.n + CLUSTER * WEIGHTS - 1) / (CLUSTER * WEIGHTS),
                                                 order + warp * MAX_SORTED);
    TileSequence<is_largest(TOKENS), CLUSTER> sequence;
    PipelineState<STAGES> state;
    const int steps = (p.k + DEPTH - 1) / DEPTH;
    int expert, row, tokens, weight_tile;
    for (; tiles.find(sequence.tile, expert, row, tokens, weight_tile); sequence.advance()) {
        const int rows_per_warp = (tokens + CLUSTER_WARPS * 4 - 1) / (CLUSTER_WARPS * 4) * 4,
                  first = (rank * WARPS + warp) * rows_per_warp;
#pragma unroll
        for (int i = 0; i < (MAX_ROWS + 31) / 32; ++i) {
            const int at = i * 32 + lane;
            if (at < MAX_ROWS) sources[at] = source_of(p, row + min(first + at, tokens - 1));
        }
        __syncwarp();
        if (elect_one()) {
            const int first_weight = (weight_tile * CLUSTER + rank) * WEIGHTS;
            for (int step = 0; step < steps; ++step, state.advance()) {
                const unsigned full = shared_address(&shared.full[state.stage]);
                const unsigned weights_to = stages + state.stage * Shared::STAGE;
                const int x = step * DEPTH;
                // Warps without rows wait too, so that no warp is more than one phase behind.
                mbarrier_wait(shared_address(&shared.empty[state.stage]), state.phase + 1);
                if (warp == 0) {
                    if (step == 0)
                        shared.tiles[state.stage] = {row, tokens, GATED ? first_weight / 2 : first_weight,
                                                     ACTIVATION & BIASED ? expert : 0};
                    mbarrier_arrive_expect_tx(full, Shared::WEIGHT_TILE + rows_per_warp * CLUSTER_WARPS * ROW_BYTES);
                    if constexpr (B_TRANSPOSED)
                        load_transposed<POLICY, ACTIVATION>(p, weights_to, x, first_weight, expert, full);
                    else if constexpr (GATED)
                        tma_load<POLICY>(weights_to, p.b_map, x, 0, 0, first_weight / 16, expert, full);
                    else
                        tma_load<POLICY>(weights_to, p.b_map, x, first_weight, expert, 0, full);
                }
                unsigned to = weights_to + Shared::WEIGHT_TILE + first * ROW_BYTES;
#pragma unroll 2
                for (int i = 0; i < rows_per_warp / 4; ++i) {
                    const int4 four = reinterpret_cast<const int4*>(sources)[i];
                    const int rows[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                    for (int j = 0; j < 4; ++j, to += ROW_BYTES) load_row<CLUSTER>(to, p.a_map, x, rows[j], full);
                }
                mbarrier_arrive(full);
            }
        }
        __syncwarp();
    }
    if (elect_one()) {
        const unsigned full = shared_address(&shared.full[state.stage]);
        mbarrier_wait(shared_address(&shared.empty[state.stage]), state.phase + 1);
        if (warp == 0) {
            shared.tiles[state.stage].tokens = 0;
            mbarrier_arrive(full);
        }
        mbarrier_arrive(full);
    }
    __syncwarp();
}
