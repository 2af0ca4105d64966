// Producer warps of gemm_folded_wgmma: one warp starts the TMA copies, one or two warps load the token scales.
#pragma once
#include "common/cluster.cuh"
#include "common/mma.cuh"
#include "moe_gemm/epilogue.cuh"
#include "moe_gemm/folded_layout.cuh"
#include "moe_gemm/wgmma_tiles.cuh"

// Run the TMA producer warp: copy the tokens and weights of this block's tiles to the ring of stages in shared memory.
// The first stage of a tile carries the tile's description (shared.tiles). After the last tile, a description with 0
// tokens ends the loops of the consumer warps.
template <class Layout, int ACTIVATION, bool STREAMED>
__device__ __forceinline__ void load_folded_tiles(const MappedGemmParams& p, typename Layout::Shared& shared,
                                                  unsigned ring) {
    constexpr int TOKENS = Layout::TOKENS, CLUSTER = Layout::CLUSTER, BOX = box_of(TOKENS);
    constexpr int WEIGHTS = CLUSTER * Layout::ROWS; // rows of weights that a cluster computes at a time
    constexpr unsigned long long POLICY = STREAMED ? EVICT_FIRST : EVICT_NORMAL;
    const int lane = threadIdx.x % 32, rank = cluster_rank<CLUSTER>();
    WgmmaTiles<TOKENS> tiles(p, (p.n + WEIGHTS - 1) / WEIGHTS);
    RingPlace<Layout::STAGES> place;
    const int steps = (p.k + FOLDED_K - 1) / FOLDED_K;
    int expert, row, tokens, weight_tile;
    for (int tile = blockIdx.x / CLUSTER; tiles.find(tile, expert, row, tokens, weight_tile);
         tile += gridDim.x / CLUSTER) {
        if (lane == 0) {
            const int first_weight = weight_tile * WEIGHTS + rank * Layout::ROWS, boxes = (tokens + BOX - 1) / BOX;
#pragma unroll 1
            for (int step = 0; step < steps; ++step) {
                const unsigned full = shared_address(&shared.full[place.stage]);
                const unsigned tokens_to = ring + place.stage * Layout::TOKEN_BYTES;
                const unsigned weights_to = ring + Layout::WEIGHTS + place.stage * Layout::WEIGHT_BYTES;
                mbarrier_wait(shared_address(&shared.empty[place.stage]), place.phase + 1);
                if (step == 0)
                    shared.tiles[place.stage] = {row, tokens, is_gated(ACTIVATION) ? first_weight / 2 : first_weight,
                                                 expert};
                mbarrier_arrive_expect_tx(full, Layout::WEIGHT_BYTES + boxes * BOX * FOLDED_K);
                const int x = step * (FOLDED_UNIT / 8); // the tensor map has 8-byte elements
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
                place.advance();
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

__device__ __forceinline__ void store_shared_pair(unsigned to, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}

// Run a scale producer warp: copy token scales of each tile to the ring of stages. The warp copies the scales of the
// 128 tokens that start at token `128 * part` of the tile; each lane copies the scales of 4 neighbouring tokens. The
// warp goes through the same stages as the TMA producer and arrives at the same full barriers: a stage is full when its
// TMA bytes and its scales are both written. Each step along k fills one stage. The warp loads the scales of
// BATCH_STEPS steps from global memory before it waits for the first of these stages to be empty, so the loads overlap
// the wait.
template <class Layout>
__device__ __forceinline__ void load_folded_scales(const MappedGemmParams& p, typename Layout::Shared& shared,
                                                   unsigned scales, int part) {
    constexpr int TOKENS = Layout::TOKENS, CLUSTER = Layout::CLUSTER, WEIGHTS = CLUSTER * Layout::ROWS, BATCH_STEPS = 4;
    const int steps = (p.k + FOLDED_K - 1) / FOLDED_K, lane = threadIdx.x % 32;
    const int first = part * 128 + lane * 4; // the lane's first token in the tile
    const bool aligned = steps % BATCH_STEPS == 0 && reinterpret_cast<size_t>(p.a_scale) % 16 == 0;
    // FoldedLayout stores the scale of token `8 * j + 2 * c + i` (i = 0, 1) as float `2 * j + i` of row c; rows are
    // SCALE_PITCH bytes apart. Lane l has the four tokens that start at token `4 * l`, so `j == l / 2`. The scales of
    // its first two tokens go to row `2 * (l % 2)`, the scales of the other two to the next row.
    const unsigned to = scales + part * Layout::SCALES_EACH + lane % 2 * 2 * Layout::SCALE_PITCH + lane / 2 * 8;
    WgmmaTiles<TOKENS> tiles(p, (p.n + WEIGHTS - 1) / WEIGHTS);
    RingPlace<Layout::STAGES> place;
    auto wait_empty = [&] { mbarrier_wait(shared_address(&shared.empty[place.stage]), place.phase + 1); };
    auto say_full = [&] {
        mbarrier_arrive(shared_address(&shared.full[place.stage]));
        place.advance();
    };
    int expert, row, tokens, weight_tile;
    for (int tile = blockIdx.x / CLUSTER; tiles.find(tile, expert, row, tokens, weight_tile);
         tile += gridDim.x / CLUSTER) {
        const float* const of_tile = p.a_scale + (long long)row * steps;
#pragma unroll 1
        for (int step = 0; step < steps; step += BATCH_STEPS) {
            float found[4][BATCH_STEPS];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* const from = of_tile + (long long)min(first + i, tokens - 1) * steps;
                if (aligned) {
                    const float4 four = __ldg(reinterpret_cast<const float4*>(from + step));
                    found[i][0] = four.x, found[i][1] = four.y, found[i][2] = four.z, found[i][3] = four.w;
                } else {
#pragma unroll
                    for (int j = 0; j < BATCH_STEPS; ++j) found[i][j] = __ldg(from + min(step + j, steps - 1));
                }
            }
#pragma unroll
            for (int j = 0; j < BATCH_STEPS; ++j)
                if (step + j < steps) {
                    wait_empty();
                    if (TOKENS >= 128 || first < TOKENS) {
                        const unsigned at = to + place.stage * Layout::SCALE_BYTES;
                        store_shared_pair(at, found[0][j], found[1][j]);
                        store_shared_pair(at + Layout::SCALE_PITCH, found[2][j], found[3][j]);
                    }
                    say_full();
                }
        }
        __syncwarp();
    }
    wait_empty(); // the last stage: its description has 0 tokens and ends the consumers' loops
    say_full();
    __syncwarp();
}
