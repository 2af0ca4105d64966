// Producer warp of gemm_fp4_wgmma.
#pragma once
#include "common/cluster.cuh"
#include "common/mma.cuh"
#include "moe_gemm/epilogue.cuh"
#include "moe_gemm/fp4_layout.cuh"
#include "moe_gemm/shared_memory.cuh"
#include "moe_gemm/wgmma_tiles.cuh"

// Start the copy of a stage's weights from unit `unit` along k on. If gates and ups are halves of n, the TMA box
// alternates 8 gate rows and 8 up rows.
template <class Layout, int ACTIVATION, bool MEMORY_BOUND>
__device__ __forceinline__ void load_fp4_weights(const MappedGemmParams& p, unsigned ring, int stage, int unit,
                                                 int first_weight, int expert, unsigned full) {
    constexpr unsigned long long POLICY = MEMORY_BOUND ? EVICT_FIRST : EVICT_NORMAL;
    const unsigned to = ring + Layout::WEIGHTS + stage * Layout::WEIGHT_BYTES;
    const int x = unit * (UNIT_BYTES<Layout::FORMAT> / 8); // the tensor map has 8-byte elements
    if constexpr (has_halves(ACTIVATION))
        tma_load<POLICY>(to, p.b_map, x, 0, first_weight / 16, expert, full);
    else
        tma_load<POLICY>(to, p.b_map, x, first_weight / 8, expert, 0, full);
}

// Publish the next tile; a tile with 0 tokens ends the consumers' loops. One thread calls this.
template <class Shared>
__device__ __forceinline__ void publish_tile(Shared& shared, const PipelineState<TILES_AHEAD>& at,
                                             const WgmmaTile& tile) {
    mbarrier_wait(shared_address(&shared.tile_empty[at.stage]), at.phase + 1);
    shared.tiles[at.stage] = tile;
    mbarrier_arrive(shared_address(&shared.tile_full[at.stage]));
}

// Start the copies of a stage's tokens. `k_aligned`: k is a multiple of 64, so that the tensor map has a dimension of
// 64-element units, and one TMA box has all units of the stage.
template <class Layout>
__device__ __forceinline__ void load_fp4_tokens(const MappedGemmParams& p, unsigned to, int unit, int row, int boxes,
                                                int rank, bool k_aligned, unsigned full) {
    constexpr int CLUSTER = Layout::CLUSTER, UNITS = Layout::UNITS, BOX = Layout::BOX;
    auto load = [&](unsigned to, int x, int y, int z) {
        if constexpr (CLUSTER == 1)
            tma_load<EVICT_NORMAL>(to, p.a_map, x, y, z, 0, full);
        else
            tma_load_multicast((1 << CLUSTER) - 1, to, p.a_map, x, y, z, 0, full);
    };
    for (int box = rank; box < boxes; box += CLUSTER) {
        const unsigned box_to = to + box * (UNITS * BOX * ROW_BYTES);
        if constexpr (UNITS == 1) {
            load(box_to, unit * DEPTH, row + box * BOX, 0);
        } else if (k_aligned) {
            load(box_to, 0, row + box * BOX, unit);
        } else {
#pragma unroll
            for (int i = 0; i < UNITS; ++i) load(box_to + i * EIGHT_ROWS_BYTES, (unit + i) * DEPTH, row + box * BOX, 0);
        }
    }
}

template <class Layout, int ACTIVATION, bool MEMORY_BOUND>
__device__ __forceinline__ void load_fp4_tiles(const MappedGemmParams& p, typename Layout::Shared& shared,
                                               unsigned ring) {
    constexpr int TOKENS = Layout::TOKENS, UNITS = Layout::UNITS, CLUSTER = Layout::CLUSTER, BOX = Layout::BOX;
    constexpr int WEIGHTS = CLUSTER * Layout::ROWS; // rows of weights of a cluster's tile
    const int lane = threadIdx.x % 32, rank = cluster_rank<CLUSTER>();
    WgmmaTiles<TOKENS> tiles(p, (p.n + WEIGHTS - 1) / WEIGHTS);
    PipelineState<Layout::STAGES> state;
    PipelineState<TILES_AHEAD> at;
    const Steps steps = steps_of<Layout>(p.k);
    const bool k_aligned = p.k % DEPTH == 0;
    int expert, row, tokens, weight_tile;
    for (int tile = blockIdx.x / Layout::BLOCKS; tiles.find(tile, expert, row, tokens, weight_tile);
         tile += gridDim.x / Layout::BLOCKS, at.advance()) {
        if (lane == 0) {
            const int first_weight = weight_tile * WEIGHTS + rank * Layout::ROWS;
            const int boxes = TOKENS <= BOX ? 1 : (tokens + BOX - 1) / BOX;
            publish_tile(shared, at, {row, tokens, is_gated(ACTIVATION) ? first_weight / 2 : first_weight, expert});
            for (int step = 0; step < steps.count; ++step, state.advance()) {
                const unsigned full = shared_address(&shared.full[state.stage]);
                const unsigned tokens_to = ring + state.stage * Layout::TOKEN_BYTES;
                mbarrier_wait(shared_address(&shared.empty[state.stage]), state.phase + 1);
                mbarrier_arrive_expect_tx(full, Layout::WEIGHT_BYTES + UNITS * boxes * BOX * ROW_BYTES);
                const int unit = (steps.first + step) * UNITS;
                load_fp4_weights<Layout, ACTIVATION, MEMORY_BOUND>(p, ring, state.stage, unit, first_weight, expert,
                                                                   full);
                load_fp4_tokens<Layout>(p, tokens_to, unit, row, boxes, rank, k_aligned, full);
            }
        }
        __syncwarp();
    }
    if (lane == 0) publish_tile(shared, at, {0, 0, 0, 0});
    __syncwarp();
}

// Run the producer warp, with tokens gathered by cp.async. wgmma may read them when the copies are complete and the
// thread that started them has executed a proxy fence. So the warp arrives at the full barrier of a stage only after it
// has started the copies of the next LAG stages. Two waits would deadlock with a larger LAG:
// - publish_tile waits until the consumers have read the tile TILES_AHEAD tiles earlier, and a tile may have only one
//   stage. So LAG is less than TILES_AHEAD.
// - A warpgroup releases a stage in the middle of the next stage. So LAG is less than `STAGES - 1`.
template <class Layout, int ACTIVATION, bool MEMORY_BOUND>
__device__ __forceinline__ void gather_fp4_tiles(const MappedGemmParams& p, typename Layout::Shared& shared,
                                                 unsigned ring) {
    constexpr int TOKENS = Layout::TOKENS, UNITS = Layout::UNITS, STAGES = Layout::STAGES;
    constexpr int MAX_LAG = STAGES / 2 < TILES_AHEAD ? STAGES / 2 : TILES_AHEAD - 1, FREE_STAGES = STAGES - 2;
    constexpr int LAG = MAX_LAG < FREE_STAGES ? MAX_LAG : FREE_STAGES;
    static_assert(LAG > 0, "");
    const int lane = threadIdx.x % 32, chunk = lane % 8;
    WgmmaTiles<TOKENS> tiles(p, (p.n + Layout::ROWS - 1) / Layout::ROWS);
    PipelineState<STAGES> state, full_state;
    PipelineState<TILES_AHEAD> at;
    const Steps steps = steps_of<Layout>(p.k);
    int copied = 0;
    auto arrive_full = [&] {
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(shared_address(&shared.full[full_state.stage]));
        full_state.advance();
    };
    int expert, row, tokens, weight_tile;
    for (int tile = blockIdx.x / Layout::BLOCKS; tiles.find(tile, expert, row, tokens, weight_tile);
         tile += gridDim.x / Layout::BLOCKS, at.advance()) {
        const int first_weight = weight_tile * Layout::ROWS;
        if (lane == 0)
            publish_tile(shared, at, {row, tokens, is_gated(ACTIVATION) ? first_weight / 2 : first_weight, expert});
        int sources[TOKENS / 4]; // rows of `a` for tokens lane / 8, lane / 8 + 4, ...
#pragma unroll
        for (int i = 0; i < TOKENS / 4; ++i) sources[i] = source_of(p, row + min(lane / 8 + i * 4, tokens - 1));
        for (int step = 0; step < steps.count; ++step, state.advance()) {
            const int first_unit = (steps.first + step) * UNITS;
            mbarrier_wait(shared_address(&shared.empty[state.stage]), state.phase + 1);
            if (lane == 0) {
                const unsigned full = shared_address(&shared.full[state.stage]);
                mbarrier_arrive_expect_tx(full, Layout::WEIGHT_BYTES);
                load_fp4_weights<Layout, ACTIVATION, MEMORY_BOUND>(p, ring, state.stage, first_unit, first_weight,
                                                                   expert, full);
            }
#pragma unroll
            for (int i = 0; i < TOKENS / 4; ++i) {
                const int token = lane / 8 + i * 4;
                if (i * 4 >= tokens) break;
                const unsigned to = ring + state.stage * Layout::TOKEN_BYTES + token / 8 * (UNITS * EIGHT_ROWS_BYTES) +
                                    token % 8 * ROW_BYTES + ((chunk ^ token % 8) * 16);
#pragma unroll
                for (int unit = 0; unit < UNITS; ++unit) {
                    const int x = (first_unit + unit) * DEPTH + chunk * 8;
                    copy_part_async<16>(to + unit * EIGHT_ROWS_BYTES,
                                        static_cast<const char*>(p.a) +
                                            ((long long)sources[i] * p.k + min(x, p.k - 8)) * 2,
                                        x < p.k ? 16 : 0);
                }
            }
            cp_async_commit_group();
            if (++copied > LAG) {
                cp_async_wait_group<LAG>();
                arrive_full();
            }
        }
    }
    cp_async_wait_group<0>();
    for (int left = min(copied, LAG); left > 0; --left) arrive_full();
    if (lane == 0) publish_tile(shared, at, {0, 0, 0, 0});
    __syncwarp();
}
