// ---- 16 bits, by warpgroups ----
//
// Groups have any number of rows, so rows of `a`, called tokens here, are the columns of the product, of which wgmma takes
// any multiple of 8, and weights are its 64 rows: a tile of few tokens costs little, and what lies beside a group's tokens
// does not touch them.
//
// All tiles of tokens read all weights of their group, so that a group has as few of them as can be, of about as many tokens
// each, and a tile is multiplied at the smallest of WIDTHS that holds it.
//
//   gemm_wgmma<...>     CLUSTER * (as many clusters as run at once) blocks of gemm_threads(TOKENS) threads
//
// A block computes tiles of 128 weights and up to TOKENS tokens, one after the other, and a cluster as many beside each
// other, of the same tokens. Warp 8 finds tiles and has TMA copy their parts along k to a ring of STAGES stages of DEPTH
// numbers each; it is ahead of the others by the whole ring, also across tiles. Of the tokens each block of a cluster
// copies every CLUSTER-th box, to all its blocks. Warpgroup w multiplies weights 64 w ... 64 w + 63 by all tokens of
// the tile.
//
// A stage is full when its bytes are there. It is empty when all warps of all blocks that it is copied to are done with it.
// What the first stage of a tile is a part of is in `visits`, which the barrier of the stage publishes. There are STAGES of
// them, since a tile has a stage at least, and a warp reads its visit before it lets go of the stage.
//
// Results lie along the weights in memory, but along the tokens in the registers of a thread: stmatrix transposes them
// through shared memory, a few tokens at a time, so that 8 (or with ACTIVATION 4) threads write what a token gets.
//
// ACTIVATION: the weights come as 8 rows of gates, the 8 of ups that belong to them, the next 8 gates, and so on; a thread
// then has the sums of both (in rows lane / 4 and lane / 4 + 8).
//
// With the largest tiles the second warpgroup begins a stage behind the first, and stays there: while one writes a tile, the
// other multiplies.
#include "common/cluster.cuh"
#include "moe_gemm/wgmma_layout.cuh"
#include "moe_gemm/wgmma_store.cuh"
#include "moe_gemm/wgmma_tiles.cuh"
#include "moe_gemm/wgmma_widths.cuh"

template <bool GATED, int TOKENS, int STAGES, int CLUSTER, bool STREAMED>
__device__ __forceinline__ void gemm_load(const MappedGemmParams& p, GemmShared<TOKENS, STAGES>& shared,
                                          unsigned stages) {
    using Shared = GemmShared<TOKENS, STAGES>;
    constexpr int WEIGHTS = WARPGROUPS * 64, BOX = box_of(TOKENS);
    constexpr unsigned long long POLICY = STREAMED ? EVICT_FIRST : EVICT_NORMAL;
    const int lane = threadIdx.x % 32, rank = cluster_rank<CLUSTER>();
    GemmTiles<TOKENS> tiles(p, (p.n + CLUSTER * WEIGHTS - 1) / (CLUSTER * WEIGHTS));
    GemmPlace<STAGES> place;
    const int steps = (p.k + DEPTH - 1) / DEPTH;
    int expert, row, tokens, weight_tile;
    for (int tile = blockIdx.x / CLUSTER; tiles.find(tile, expert, row, tokens, weight_tile);
         tile += gridDim.x / CLUSTER) {
        if (lane == 0) {
            const int first_weight = (weight_tile * CLUSTER + rank) * WEIGHTS;
            const int boxes = (tokens + BOX - 1) / BOX;
            for (int step = 0; step < steps; ++step, place.advance()) {
                const unsigned full = shared_address(&shared.full[place.stage]);
                const unsigned weights_to = stages + place.stage * Shared::STAGE;
                const unsigned tokens_to = weights_to + Shared::WEIGHT_TILE;
                const int x = step * DEPTH;
                barrier_wait(shared_address(&shared.empty[place.stage]), place.phase + 1);
                if (step == 0) shared.visits[place.stage] = {row, tokens, GATED ? first_weight / 2 : first_weight, 0};
                barrier_expect(full, Shared::WEIGHT_TILE + boxes * BOX * ROW_BYTES);
                if constexpr (GATED)
                    copy_tile<POLICY>(weights_to, p.b_map, x, 0, 0, first_weight / 16, expert, full);
                else
                    copy_tile<POLICY>(weights_to, p.b_map, x, first_weight, expert, 0, full);
                for (int box = rank; box < boxes; box += CLUSTER) {
                    const unsigned to = tokens_to + box * BOX * ROW_BYTES;
                    if constexpr (CLUSTER == 1)
                        copy_tile<EVICT_NORMAL>(to, p.a_map, x, row + box * BOX, 0, 0, full);
                    else
                        copy_tile_to((1 << CLUSTER) - 1, to, p.a_map, x, row + box * BOX, 0, 0, full);
                }
            }
        }
        __syncwarp();
    }
    if (lane == 0) {
        barrier_wait(shared_address(&shared.empty[place.stage]), place.phase + 1);
        shared.visits[place.stage].tokens = 0;
        barrier_arrive(shared_address(&shared.full[place.stage]));
    }
    __syncwarp();
}

// A warpgroup's part of a tile of at most WIDTH tokens, whose first stage is full. `a`, `b`: where it finds them in stage 0.
template <typename T, int WIDTH, int CLUSTER, bool STREAMED, int PLACES, typename Shared, int STAGES>
__device__ __forceinline__ void gemm_sum(float (&c)[PLACES], Shared& shared, GemmPlace<STAGES>& place, int steps,
                                         int skewed_after, unsigned long long a, unsigned long long b) {
    const int lane = threadIdx.x % 32;
    auto release = [&](int stage) {
        const unsigned empty = shared_address(&shared.empty[stage]);
        if constexpr (CLUSTER == 1) {
            if (lane == 0) barrier_arrive(empty);
        } else {
            if (lane < CLUSTER) barrier_arrive_in(barrier_in_block(empty, lane));
        }
    };
    int previous = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        barrier_wait(shared_address(&shared.full[place.stage]), place.phase);
        const unsigned long long at = place.stage * (Shared::STAGE >> 4);
        products_begin();
#pragma unroll
        for (int i = 0; i < DEPTH / 16; ++i) // 16 numbers are 32 bytes
            gemm_multiply<T, WIDTH>(c, a + at + (i * 32 >> 4), b + at + (i * 32 >> 4), i > 0 || step > 0);
        products_commit();
        if constexpr (STREAMED) { // the next stage is awaited from memory: meanwhile this one can be on its way again
            products_wait<0>();
            release(place.stage);
        } else { // the tensor cores shall never wait
            products_wait<1>();
            if (step > 0) release(previous);
        }
        if (step == skewed_after && lane == 0) barrier_arrive(shared_address(&shared.skewed));
        previous = place.stage;
        place.advance();
    }
    if constexpr (!STREAMED) {
        products_wait<0>();
        release(previous);
    }
    pin(reinterpret_cast<float (&)[WIDTH / 2]>(c));
}

template <typename T, int ACTIVATION, int TOKENS, int STAGES, int CLUSTER, bool STREAMED>
__device__ __forceinline__ void gemm_compute(const MappedGemmParams& p, GemmShared<TOKENS, STAGES>& shared,
                                             unsigned stages) {
    using Shared = GemmShared<TOKENS, STAGES>;
    constexpr int SKEW = TOKENS > 128; // stages that the second warpgroup is behind the first
    // From one lane: so the compiler knows that it is the same in all, and keeps what follows from it in uniform registers.
    const int warpgroup = __shfl_sync(FULL_WARP, int(threadIdx.x / WARPGROUP), 0);
    const unsigned long long a = along_the_sum(stages + warpgroup * 64 * ROW_BYTES);
    const unsigned long long b = along_the_sum(stages + Shared::WEIGHT_TILE);
    const unsigned staging = stages + STAGES * Shared::STAGE + warpgroup * 2 * Shared::STAGING;
    const int steps = (p.k + DEPTH - 1) / DEPTH;
    GemmPlace<STAGES> place;
    int round = 0;
    int skewed_after = SKEW && warpgroup == 0 ? min(SKEW, steps) - 1 : -1;
    float c[TOKENS / 2];
    for (bool first = true;; first = false) {
        barrier_wait(shared_address(&shared.full[place.stage]), place.phase);
        const GemmVisit visit = shared.visits[place.stage];
        if (visit.tokens == 0) break;
        if (SKEW && first && warpgroup > 0) barrier_wait(shared_address(&shared.skewed), 0);
        with_width<TOKENS>(visit.tokens, [&](auto width) {
            gemm_sum<T, decltype(width)::value, CLUSTER, STREAMED>(c, shared, place, steps, skewed_after, a, b);
        });
        skewed_after = -1;
        gemm_store<T, ACTIVATION, TOKENS>(p, c, visit, warpgroup, staging, round);
    }
}

// T: __nv_bfloat16 or __half. TOKENS: 8, 16, 32, 64, 128 or 288. BLOCKS run at once on a multiprocessor. STREAMED: few tokens;
// what counts is how many bytes are on their way, and nearly all weights are read once.
template <typename T, int ACTIVATION, int TOKENS, int STAGES, int CLUSTER, int BLOCKS, bool STREAMED>
__global__ __launch_bounds__(gemm_threads(TOKENS), BLOCKS)
    CLUSTER_OF(CLUSTER) void gemm_wgmma(const __grid_constant__ MappedGemmParams p) {
#if HAS_WGMMA
    using Shared = GemmShared<TOKENS, STAGES>;
    extern __shared__ char memory[];
    const unsigned misplaced = -shared_address(memory) & 1023; // swizzled tiles lie at multiples of 1024
    const unsigned stages = shared_address(memory) + misplaced;
    Shared& shared =
        *reinterpret_cast<Shared*>(memory + misplaced + STAGES * Shared::STAGE + WARPGROUPS * 2 * Shared::STAGING);
    if (threadIdx.x == 0) {
        prefetch_map(p.b_map);
        prefetch_map(p.a_map);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared_address(&shared.full[i]), 1);
            barrier_init(shared_address(&shared.empty[i]), CLUSTER * WARPGROUPS * (WARPGROUP / 32));
        }
        barrier_init(shared_address(&shared.skewed), WARPGROUP / 32);
        barriers_ready();
    }
    cluster_barrier<CLUSTER>();
    constexpr bool DEAL = TOKENS > 128;
    if (threadIdx.x < WARPGROUPS * WARPGROUP) {
        if constexpr (DEAL) take_registers<224>();
        gemm_compute<T, ACTIVATION, TOKENS, STAGES, CLUSTER, STREAMED>(p, shared, stages);
    } else {
        if constexpr (DEAL) leave_registers<56>();
        if (threadIdx.x < WARPGROUPS * WARPGROUP + 32)
            gemm_load<ACTIVATION != NO_ACTIVATION, TOKENS, STAGES, CLUSTER, STREAMED>(p, shared, stages);
    }
    // Until here the other blocks may write here.
    if constexpr (CLUSTER > 1) cluster_barrier<CLUSTER>();
#endif
}
