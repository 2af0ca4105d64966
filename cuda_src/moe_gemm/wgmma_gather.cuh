// The warps of gemm_wgmma that load tiles where the rows of `a` are gathered.
//
// A box of TMA is one row. The swizzle is of the address, so that a row is in its place in the tile. The warps of all
// blocks of a cluster share out the rows of a tile, and each row reaches all of these blocks, as the boxes of rows in
// order do: else tokens would be read from L2 once for each block, which is faster than L2 can be. A warp has
// neighbouring rows of a tile, a multiple of 4: past the tile's tokens they lie in columns that nobody writes.
//
// A stage is full when its bytes are there, and each warp of the block has arrived. Warp 0 arrives once more, when it
// has said how many bytes are to come.
//
// Where the warps copy the rows by cp.async, to their own block and from there to the other, 8 x 1024 rows take 1.4
// times as long on an H200.
#pragma once
#include "common/cluster.cuh"
#include "common/mma.cuh"
#include "moe_gemm/epilogue.cuh"
#include "moe_gemm/wgmma_layout.cuh"
#include "moe_gemm/wgmma_tiles.cuh"
#include "moe_gemm/wgmma_transposed.cuh"

// Warps that load gathered rows.
__host__ __device__ constexpr int gather_warps(int tokens) { return tokens >= 64 ? 4 : 1; }

// Threads of a block that gathers.
__host__ __device__ constexpr int gather_threads(int tokens) {
    return WARPGROUPS * WARPGROUP + gather_warps(tokens) * 32;
}

// Start the copy of 128 bytes of row `y` of `a` to all blocks of the cluster.
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

// True in one lane of the warp, always the same. The compiler knows that it is one, which it does not of `lane == 0`:
// there it makes a loop of each instruction whose operands are of a whole warp, as those of TMA are.
__device__ __forceinline__ bool elect_one() {
    unsigned elected;
    asm volatile("{ .reg .pred elected;\n"
                 "  elect.sync _|elected, 0xffffffff;\n"
                 "  selp.u32 %0, 1, 0, elected; }"
                 : "=r"(elected));
    return elected;
}

// The loop of a warp. It keeps the sources of its rows in shared memory, behind `shared`, and with the largest tiles the
// order of groups behind those of all warps.
template <int ACTIVATION, int TOKENS, int STAGES, int CLUSTER, bool STREAMED, bool TURNED>
__device__ __forceinline__ void gather_tiles(const MappedGemmParams& p, WgmmaShared<TOKENS, STAGES>& shared,
                                             unsigned stages) {
    using Shared = WgmmaShared<TOKENS, STAGES>;
    constexpr bool GATED = is_gated(ACTIVATION);
    constexpr int WEIGHTS = WARPGROUPS * 64, WARPS = gather_warps(TOKENS), SHARES = WARPS * CLUSTER;
    constexpr int EACH = TOKENS / SHARES; // the most rows of a warp
    static_assert(EACH % 4 == 0, "");
    constexpr unsigned long long POLICY = STREAMED ? EVICT_FIRST : EVICT_NORMAL;
    const int lane = threadIdx.x % 32, rank = cluster_rank<CLUSTER>();
    // By a shuffle, so that the compiler knows that it is the same in all lanes.
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
                // All warps wait, also those without rows: so none is ever more than one phase behind.
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
