// Producer warps of gemm_wgmma with GATHER: the rows of `a` are gathered.
//
// A TMA box is one row. The swizzle depends only on address bits, so single rows can be copied into the swizzled tile.
// The producer warps of all blocks of a cluster divide the rows of a tile among themselves, and multicast each row to
// the whole cluster. Without multicast every block would read all tokens from L2, which exceeds the L2 bandwidth. Each
// warp copies neighbouring rows of a tile, a multiple of 4. Rows past the tile's tokens only affect sums that are not
// written.
//
// A stage is full when its bytes have arrived and every producer warp of the block has arrived at the barrier. Warp 0
// arrives once more, when it announces the number of bytes (expect_tx).
//
// An alternative was measured: to copy rows by cp.async to the warp's own block, and from there to the other block. It
// takes 1.4 times as long for 8 x 1024 rows on an H200.
#pragma once
#include "common/cluster.cuh"
#include "common/mma.cuh"
#include "moe_gemm/epilogue.cuh"
#include "moe_gemm/wgmma_layout.cuh"
#include "moe_gemm/wgmma_tiles.cuh"
#include "moe_gemm/wgmma_transposed.cuh"

// Return the number of warps that gather rows.
__host__ __device__ constexpr int gather_warps(int tokens) { return tokens >= 64 ? 4 : 1; }

// Return the threads of a block that gathers.
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

// Return true in one lane of the warp, always the same lane. The compiler knows that only one lane is active in the
// branch. After a test of `lane == 0` it does not know this, and wraps each instruction that needs warp-uniform
// operands, such as a TMA copy, in a loop.
__device__ __forceinline__ bool elect_one() {
    unsigned elected;
    asm volatile("{ .reg .pred elected;\n"
                 "  elect.sync _|elected, 0xffffffff;\n"
                 "  selp.u32 %0, 1, 0, elected; }"
                 : "=r"(elected));
    return elected;
}

// Run a producer warp. Shared memory after `shared` holds the row indices that each warp gathers, then (largest tiles
// only) each warp's sorted list of experts.
template <int ACTIVATION, int TOKENS, int STAGES, int CLUSTER, bool STREAMED, bool TURNED>
__device__ __forceinline__ void gather_tiles(const MappedGemmParams& p, WgmmaShared<TOKENS, STAGES>& shared,
                                             unsigned stages) {
    using Shared = WgmmaShared<TOKENS, STAGES>;
    constexpr bool GATED = is_gated(ACTIVATION);
    constexpr int WEIGHTS = WARPGROUPS * 64, WARPS = gather_warps(TOKENS), SHARES = WARPS * CLUSTER;
    constexpr int EACH = TOKENS / SHARES; // maximum rows per warp
    static_assert(EACH % 4 == 0, "");
    constexpr unsigned long long POLICY = STREAMED ? EVICT_FIRST : EVICT_NORMAL;
    const int lane = threadIdx.x % 32, rank = cluster_rank<CLUSTER>();
    // The shuffle tells the compiler that the value is warp-uniform.
    const int warp = __shfl_sync(FULL_WARP, int(threadIdx.x / 32) - WARPGROUPS * 4, 0);
    int *const all_sources = reinterpret_cast<int*>(&shared + 1), *const sources = all_sources + warp * EACH;
    unsigned char* const order = reinterpret_cast<unsigned char*>(all_sources + WARPS * EACH);
    WgmmaTiles<TOKENS, is_largest(TOKENS)> tiles(p, (p.n + CLUSTER * WEIGHTS - 1) / (CLUSTER * WEIGHTS),
                                                 order + warp * MAX_SORTED);
    Turns<is_largest(TOKENS), CLUSTER> turns;
    RingPlace<STAGES> place;
    const int steps = (p.k + DEPTH - 1) / DEPTH;
    int expert, row, tokens, weight_tile;
    for (; tiles.find(turns.tile, expert, row, tokens, weight_tile); turns.advance()) {
        const int each = (tokens + SHARES * 4 - 1) / (SHARES * 4) * 4, first = (rank * WARPS + warp) * each;
#pragma unroll
        for (int i = 0; i < (EACH + 31) / 32; ++i) {
            const int at = i * 32 + lane;
            if (at < EACH) sources[at] = source_of(p, row + min(first + at, tokens - 1));
        }
        __syncwarp();
        if (elect_one()) {
            const int first_weight = (weight_tile * CLUSTER + rank) * WEIGHTS;
            for (int step = 0; step < steps; ++step, place.advance()) {
                const unsigned full = shared_address(&shared.full[place.stage]);
                const unsigned weights_to = stages + place.stage * Shared::STAGE;
                const int x = step * DEPTH;
                // Warps without rows wait too, so no warp is ever more than one phase behind.
                mbarrier_wait(shared_address(&shared.empty[place.stage]), place.phase + 1);
                if (warp == 0) {
                    if (step == 0)
                        shared.tiles[place.stage] = {row, tokens, GATED ? first_weight / 2 : first_weight,
                                                     ACTIVATION & BIASED ? expert : 0};
                    mbarrier_arrive_expect_tx(full, Shared::WEIGHT_TILE + each * SHARES * ROW_BYTES);
                    if constexpr (TURNED)
                        load_transposed<POLICY, ACTIVATION>(p, weights_to, x, first_weight, expert, full);
                    else if constexpr (GATED)
                        tma_load<POLICY>(weights_to, p.b_map, x, 0, 0, first_weight / 16, expert, full);
                    else
                        tma_load<POLICY>(weights_to, p.b_map, x, first_weight, expert, 0, full);
                }
                unsigned to = weights_to + Shared::WEIGHT_TILE + first * ROW_BYTES;
#pragma unroll 2
                for (int i = 0; i < each / 4; ++i) {
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
        const unsigned full = shared_address(&shared.full[place.stage]);
        mbarrier_wait(shared_address(&shared.empty[place.stage]), place.phase + 1);
        if (warp == 0) {
            shared.tiles[place.stage].tokens = 0;
            mbarrier_arrive(full);
        }
        mbarrier_arrive(full);
    }
    __syncwarp();
}
