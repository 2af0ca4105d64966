// The warps of gemm_wgmma that load tiles where the rows of `a` are gathered.
//
// The warps of all blocks of a cluster share out the rows of a tile, and each row reaches all of these blocks, as the
// boxes of rows in order do: else tokens would be read from L2 once for each block, which is faster than L2 can be.
//
// A warp has neighbouring rows of a tile, a multiple of 4: past the tile's tokens they lie in columns that nobody
// writes. The last COPYING warps of a block copy theirs, the others have TMA do so:
//
//   TMA     a box is one row. The swizzle is of the address, so that a row is in its place in the tile.
//   copies  cp.async copies the rows of the warp to its own block; when they are there, one bulk copy takes them on to
//           the other block.
//
// A stage is full when its bytes by TMA and by bulk copies are there, and each warp of the block has arrived: one that
// copies when its own rows are there. Warp 0 arrives once more, when it has said how many bytes are to come.
#pragma once
#include "common/cluster.cuh"
#include "common/mma.cuh"
#include "moe_gemm/shared_memory.cuh"
#include "moe_gemm/wgmma_layout.cuh"
#include "moe_gemm/wgmma_tiles.cuh"

// Warps that load gathered rows.
__host__ __device__ constexpr int gather_warps(int tokens) { return tokens >= 64 ? 4 : 1; }

// Threads of a block that gathers.
__host__ __device__ constexpr int gather_threads(int tokens) {
    return WARPGROUPS * WARPGROUP + gather_warps(tokens) * 32;
}

// Copy `bytes` to the same shared address in another block of the cluster; they count at its `barrier`.
__device__ __forceinline__ void bulk_copy_to_rank(unsigned from, int bytes, unsigned barrier, unsigned rank) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     map_shared_rank(from, rank)),
                 "r"(from), "r"(bytes), "r"(map_shared_rank(barrier, rank))
                 : "memory");
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

// What the loading warps of a block know.
template <bool GATED, int TOKENS_, int STAGES_, int CLUSTER_, bool STREAMED, int COPYING> struct GatherLoop {
    static constexpr int TOKENS = TOKENS_, STAGES = STAGES_, CLUSTER = CLUSTER_;
    static constexpr int WEIGHTS = WARPGROUPS * 64, WARPS = gather_warps(TOKENS), SHARES = WARPS * CLUSTER;
    static constexpr int EACH = TOKENS / SHARES; // the most rows of a warp
    static_assert(EACH % 4 == 0 && COPYING <= WARPS && CLUSTER <= 2, "");
    using Shared = WgmmaShared<TOKENS, STAGES>;

    const MappedGemmParams& p;
    Shared& shared;
    const unsigned stages;
    const int lane, warp, rank, share, steps; // share: of the rows of a tile, this warp's
    WgmmaTiles<TOKENS> tiles;
    RingPlace<STAGES> place;
    int tile, expert, row, tokens, weight_tile;

    __device__ __forceinline__ GatherLoop(const MappedGemmParams& p, Shared& shared, unsigned stages)
        : p(p), shared(shared), stages(stages), lane(threadIdx.x % 32),
          // By a shuffle, so that the compiler knows that it is the same in all lanes.
          warp(__shfl_sync(FULL_WARP, int(threadIdx.x / 32) - WARPGROUPS * 4, 0)), rank(cluster_rank<CLUSTER>()),
          share(rank * WARPS + warp), steps((p.k + DEPTH - 1) / DEPTH),
          tiles(p, (p.n + CLUSTER * WEIGHTS - 1) / (CLUSTER * WEIGHTS)),
          tile(int(blockIdx.x / CLUSTER) - int(gridDim.x / CLUSTER)) {}

    // Go to the next tile; false if there is none. All lanes call it.
    __device__ __forceinline__ bool next() {
        tile += gridDim.x / CLUSTER;
        return tiles.find(tile, expert, row, tokens, weight_tile);
    }

    // Rows of the tile that each warp has.
    __device__ __forceinline__ int each() const { return (tokens + SHARES * 4 - 1) / (SHARES * 4) * 4; }

    // The row of `a` for row `at` of the tile.
    __device__ __forceinline__ int source(int at) const { return source_of(p, row + min(at, tokens - 1)); }

    __device__ __forceinline__ unsigned full() const { return shared_address(&shared.full[place.stage]); }

    // Where stage `stage` has its tokens.
    __device__ __forceinline__ unsigned tokens_of(int stage) const {
        return stages + stage * Shared::STAGE + Shared::WEIGHT_TILE;
    }

    // All warps wait here, also those without rows: so none is ever more than one phase behind.
    __device__ __forceinline__ void wait_empty() const {
        mbarrier_wait(shared_address(&shared.empty[place.stage]), place.phase + 1);
    }

    // By one lane of warp 0: start the copy of the stage's weights, and say how many bytes are to come.
    __device__ __forceinline__ void load_weights(int step) const {
        constexpr unsigned long long POLICY = STREAMED ? EVICT_FIRST : EVICT_NORMAL;
        const int first_weight = (weight_tile * CLUSTER + rank) * WEIGHTS, x = step * DEPTH;
        const unsigned to = stages + place.stage * Shared::STAGE;
        if (step == 0) shared.tiles[place.stage] = {row, tokens, GATED ? first_weight / 2 : first_weight, 0};
        mbarrier_arrive_expect_tx(full(), Shared::WEIGHT_TILE + each() * (SHARES - COPYING) * ROW_BYTES);
        if constexpr (GATED)
            tma_load<POLICY>(to, p.b_map, x, 0, 0, first_weight / 16, expert, full());
        else
            tma_load<POLICY>(to, p.b_map, x, first_weight, expert, 0, full());
    }

    // By one lane: say that there are no more tiles.
    __device__ __forceinline__ void finish() const {
        wait_empty();
        if (warp == 0) {
            shared.tiles[place.stage].tokens = 0;
            mbarrier_arrive(full());
        }
        mbarrier_arrive(full());
    }
};

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

// The loop of a warp whose rows TMA copies. It keeps their sources in shared memory, at `list`.
template <class Loop> __device__ __forceinline__ void gather_by_tma(Loop& loop, int* list) {
    constexpr int EACH = Loop::EACH;
    list += loop.warp * EACH;
    while (loop.next()) {
        const int each = loop.each(), first = loop.share * each;
#pragma unroll
        for (int i = 0; i < (EACH + 31) / 32; ++i) {
            const int at = i * 32 + loop.lane;
            if (at < EACH) list[at] = loop.source(first + at);
        }
        __syncwarp();
        if (elect_one()) {
            for (int step = 0; step < loop.steps; ++step, loop.place.advance()) {
                loop.wait_empty();
                if (loop.warp == 0) loop.load_weights(step);
                unsigned to = loop.tokens_of(loop.place.stage) + first * ROW_BYTES;
#pragma unroll 2
                for (int i = 0; i < each / 4; ++i) {
                    const int4 four = reinterpret_cast<const int4*>(list)[i];
                    const int sources[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                    for (int j = 0; j < 4; ++j, to += ROW_BYTES)
                        load_row<Loop::CLUSTER>(to, loop.p.a_map, step * DEPTH, sources[j], loop.full());
                }
                mbarrier_arrive(loop.full());
            }
        }
        __syncwarp();
    }
    if (elect_one()) loop.finish();
    __syncwarp();
}

// The loop of a warp that copies its rows. Lane l copies chunk l % 8 of rows l / 8, + 4, ... wgmma and the bulk copy
// read what cp.async has written only after a fence of the thread that started the copy, once it is complete: so a warp
// starts the copies of BEHIND further stages before it waits for those of one.
template <class Loop> __device__ __forceinline__ void gather_by_copies(Loop& loop) {
    constexpr int ROUNDS = Loop::EACH / 4, BEHIND = (Loop::STAGES - (Loop::CLUSTER > 1 ? 3 : 1)) / 2;
    const MappedGemmParams& p = loop.p;
    const int chunk = loop.lane % 8;
    RingPlace<Loop::STAGES> behind;
    int copied = 0;
    int sent[BEHIND + 1]; // rows of the stages that are under way, the oldest first
    auto say_full = [&](int rows) {
        fence_proxy_async();
        __syncwarp();
        if (loop.lane == 0) {
            const unsigned full = shared_address(&loop.shared.full[behind.stage]);
            if constexpr (Loop::CLUSTER > 1)
                bulk_copy_to_rank(loop.tokens_of(behind.stage) + loop.share * rows * ROW_BYTES, rows * ROW_BYTES, full,
                                  loop.rank ^ 1);
            mbarrier_arrive(full);
        }
        behind.advance();
    };
    while (loop.next()) {
        const int each = loop.each(), first = loop.share * each;
        int sources[ROUNDS];
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) sources[i] = loop.source(first + loop.lane / 8 + i * 4);
        for (int step = 0; step < loop.steps; ++step, loop.place.advance()) {
            loop.wait_empty();
            if (loop.warp == 0 && loop.lane == 0) loop.load_weights(step);
            const int x = step * DEPTH + chunk * 8;
            const char* const from = static_cast<const char*>(p.a) + min(x, p.k - 8) * 2;
            const int bytes = x < p.k ? 16 : 0;
            const unsigned to = loop.tokens_of(loop.place.stage);
#pragma unroll
            for (int i = 0; i < ROUNDS; ++i) {
                const int at = first + loop.lane / 8 + i * 4;
                if (i * 4 < each)
                    copy_part_async<16>(to + at * ROW_BYTES + ((chunk ^ at % 8) * 16),
                                        from + (long long)sources[i] * p.k * 2, bytes);
            }
            cp_async_commit_group();
#pragma unroll
            for (int i = 0; i < BEHIND; ++i) sent[i] = sent[i + 1];
            sent[BEHIND] = each;
            if (++copied > BEHIND) {
                cp_async_wait_group<BEHIND>();
                say_full(sent[0]);
            }
        }
    }
    cp_async_wait_group<0>();
#pragma unroll
    for (int i = 1; i <= BEHIND; ++i)
        if (BEHIND - i < copied) say_full(sent[i]);
    if (loop.lane == 0) loop.finish();
    __syncwarp();
}

// What the loading warps do.
template <bool GATED, int TOKENS, int STAGES, int CLUSTER, bool STREAMED, int COPYING>
__device__ __forceinline__ void gather_tiles(const MappedGemmParams& p, WgmmaShared<TOKENS, STAGES>& shared,
                                             unsigned stages) {
    GatherLoop<GATED, TOKENS, STAGES, CLUSTER, STREAMED, COPYING> loop(p, shared, stages);
    int* const list = reinterpret_cast<int*>(&shared + 1);
    if constexpr (COPYING == 0)
        gather_by_tma(loop, list);
    else if constexpr (COPYING == gather_warps(TOKENS))
        gather_by_copies(loop);
    else if (loop.warp < loop.WARPS - COPYING)
        gather_by_tma(loop, list);
    else
        gather_by_copies(loop);
}
