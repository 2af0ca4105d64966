// Producer warps of gemm_folded_wgmma.
#pragma once
#include "common/cluster.cuh"
#include "common/mma.cuh"
#include "moe_gemm/epilogue.cuh"
#include "moe_gemm/folded_layout.cuh"
#include "moe_gemm/wgmma_tiles.cuh"

// Run the TMA producer warp. A tile's first stage carries its description (shared.tiles). A description with 0 tokens
// ends the consumers' loops.
template <class Layout, int ACTIVATION, bool MEMORY_BOUND>
__device__ __forceinline__ void load_folded_tiles(const MappedGemmParams& p, typename Layout::Shared& shared,
                                                  unsigned ring) {
    constexpr int TOKENS = Layout::TOKENS, CLUSTER = Layout::CLUSTER, BOX = box_of(TOKENS);
    constexpr int WEIGHTS = CLUSTER * Layout::ROWS; // rows of weights of a cluster's tile
    constexpr unsigned long long POLICY = MEMORY_BOUND ? EVICT_FIRST : EVICT_NORMAL;
    const int lane = threadIdx.x % 32, rank = cluster_rank<CLUSTER>();
    WgmmaTiles<TOKENS> tiles(p, (p.n + WEIGHTS - 1) / WEIGHTS);
    PipelineState<Layout::STAGES> state;
    const int steps = (p.k + FOLDED_K - 1) / FOLDED_K;
    int expert, row, tokens, weight_tile;
    for (int tile = blockIdx.x / CLUSTER; tiles.find(tile, expert, row, tokens, weight_tile);
         tile += gridDim.x / CLUSTER) {
        if (lane == 0) {
            const int first_weight = weight_tile * WEIGHTS + rank * Layout::ROWS, boxes = (tokens + BOX - 1) / BOX;
#pragma unroll 1
            for (int step = 0; step < steps; ++step) {
                const unsigned full = shared_address(&shared.full[state.stage]);
                const unsigned tokens_to = ring + state.stage * Layout::TOKEN_BYTES;
                const unsigned weights_to = ring + Layout::WEIGHTS + state.stage * Layout::WEIGHT_BYTES;
                mbarrier_wait(shared_address(&shared.empty[state.stage]), state.phase + 1);
                if (step == 0)
                    shared.tiles[state.stage] = {row, tokens, is_gated(ACTIVATION) ? first_weight / 2 : first_weight,
                                                 expert};
                mbarrier_arrive_expect_tx(full, Layout::WEIGHT_BYTES + boxes * BOX * FOLDED_K);
                const int x = step * (FOLDED_UNIT_BYTES / 8); // the tensor map has 8-byte elements
                if constexpr (has_halves(ACTIVATION))
                    tma_load<POLICY>(weights_to, p.b_map, x, 0, first_weight / 16, expert, full);
                else
                    tma_load<POLICY>(weights_to, p.b_map, x, first_weight / 8, expert, 0, full);
#pragma unroll 1
                for (int box = rank; box < boxes; box += CLUSTER) {
                    const unsigned to = tokens_to + box * BOX * FOLDED_K;
                    if constexpr (CLUSTER == 1)
                        tma_load<EVICT_NORMAL>(to, p.a_map, step * FOLDED_K, row + box * BOX, 0, 0, full);
                    else
                        tma_load_multicast((1 << CLUSTER) - 1, to, p.a_map, step * FOLDED_K, row + box * BOX, 0, 0,
                                           full);
                }
                state.advance();
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

__device__ __forceinline__ void store_shared_pair(unsigned to, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}

// Run a scale producer warp. It copies the scales of 128 tokens of each tile, from token `128 * chunk` on, 4 per lane.
// It loads the scales of BATCH_STEPS stages before it waits for the first of these stages, so that the loads overlap
// the wait.
template <class Layout>
__device__ __forceinline__ void load_folded_scales(const MappedGemmParams& p, typename Layout::Shared& shared,
                                                   unsigned scales, int chunk) {
    constexpr int TOKENS = Layout::TOKENS, CLUSTER = Layout::CLUSTER, WEIGHTS = CLUSTER * Layout::ROWS, BATCH_STEPS = 4;
    const int steps = (p.k + FOLDED_K - 1) / FOLDED_K, lane = threadIdx.x % 32;
    const int first = chunk * 128 + lane * 4;
    const bool aligned = steps % BATCH_STEPS == 0 && reinterpret_cast<size_t>(p.a_scale) % 16 == 0;
    // FoldedLayout stores the scales of the lane's first two tokens in row `2 * (lane % 2)`, and the scales of the
    // other two in the next row.
    const unsigned to = scales + chunk * Layout::CHUNK_SCALE_BYTES + lane % 2 * 2 * Layout::SCALE_PITCH + lane / 2 * 8;
    WgmmaTiles<TOKENS> tiles(p, (p.n + WEIGHTS - 1) / WEIGHTS);
    PipelineState<Layout::STAGES> state;
    auto wait_empty = [&] { mbarrier_wait(shared_address(&shared.empty[state.stage]), state.phase + 1); };
    auto arrive_full = [&] {
        mbarrier_arrive(shared_address(&shared.full[state.stage]));
        state.advance();
    };
    int expert, row, tokens, weight_tile;
    for (int tile = blockIdx.x / CLUSTER; tiles.find(tile, expert, row, tokens, weight_tile);
         tile += gridDim.x / CLUSTER) {
        const float* const tile_scales = p.a_scale + (long long)row * steps;
#pragma unroll 1
        for (int step = 0; step < steps; step += BATCH_STEPS) {
            float token_scales[4][BATCH_STEPS];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* const from = tile_scales + (long long)min(first + i, tokens - 1) * steps;
                if (aligned) {
                    const float4 four = __ldg(reinterpret_cast<const float4*>(from + step));
                    token_scales[i][0] = four.x, token_scales[i][1] = four.y, token_scales[i][2] = four.z,
                    token_scales[i][3] = four.w;
                } else {
#pragma unroll
                    for (int j = 0; j < BATCH_STEPS; ++j) token_scales[i][j] = __ldg(from + min(step + j, steps - 1));
                }
            }
#pragma unroll
            for (int j = 0; j < BATCH_STEPS; ++j)
                if (step + j < steps) {
                    wait_empty();
                    if (TOKENS >= 128 || first < TOKENS) {
                        const unsigned at = to + state.stage * Layout::SCALE_BYTES;
                        store_shared_pair(at, token_scales[0][j], token_scales[1][j]);
                        store_shared_pair(at + Layout::SCALE_PITCH, token_scales[2][j], token_scales[3][j]);
                    }
                    arrive_full();
                }
        }
        __syncwarp();
    }
    wait_empty(); // the stage whose description ends the consumers' loops
    arrive_full();
    __syncwarp();
}
