// The warps of gemm_wgmma that load tiles where the rows of `a` are gathered.
//
// The warps of all blocks of a cluster share out the rows of a tile, and each row reaches all of these blocks, as the
// boxes of rows in order do: else tokens would be read from L2 once for each block, which is faster than L2 can be.
//
//   ROWS_BY_TMA     a box is one row. The swizzle is of the address, so that a row is in its place in the tile.
//   ROWS_BY_COPIES  cp.async copies the rows of a warp, which lie together in the tile, to the warp's own block; when
//                   they are there, one bulk copy takes them on to the other block.
#pragma once
#include "common/cluster.cuh"
#include "common/mma.cuh"
#include "moe_gemm/shared_memory.cuh"
#include "moe_gemm/wgmma_layout.cuh"
#include "moe_gemm/wgmma_tiles.cuh"

// How the rows of `a` come: in order, in boxes of many; or gathered. To ROWS_BY_COPIES is added BEHIND of
// gather_by_copies.
enum Gather { IN_ORDER, ROWS_BY_TMA, ROWS_BY_COPIES };

// Warps that load gathered rows.
__host__ __device__ constexpr int gather_warps(int tokens) { return tokens >= 64 ? 4 : 1; }

// Threads of a block that gathers.
__host__ __device__ constexpr int gather_threads(int tokens) {
    return WARPGROUPS * WARPGROUP + gather_warps(tokens) * 32;
}

// Arrivals at the barrier of a full stage. A warp that copies arrives when its rows are there, and warp 0 also when the
// stage's weights are under way.
__host__ __device__ constexpr int full_arrivals(int gather, int tokens) {
    return gather == IN_ORDER ? 1 : gather_warps(tokens) + (gather >= ROWS_BY_COPIES);
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
template <bool GATED_, int TOKENS_, int STAGES_, int CLUSTER_, bool STREAMED_> struct GatherLoop {
    static constexpr bool GATED = GATED_, STREAMED = STREAMED_;
    static constexpr int TOKENS = TOKENS_, STAGES = STAGES_, CLUSTER = CLUSTER_;
    static constexpr int WEIGHTS = WARPGROUPS * 64, WARPS = gather_warps(TOKENS);
    static constexpr int SHARES = WARPS * CLUSTER, EACH = TOKENS / SHARES; // EACH: the most rows of a warp
    static_assert(TOKENS % SHARES == 0, "");
    using Shared = WgmmaShared<TOKENS, STAGES>;

    const MappedGemmParams& p;
    Shared& shared;
    const unsigned stages;
    const int lane, warp, rank, share; // share: of the rows of a tile, this warp's
    RingPlace<STAGES> place;

    __device__ __forceinline__ GatherLoop(const MappedGemmParams& p, Shared& shared, unsigned stages)
        : p(p), shared(shared), stages(stages), lane(threadIdx.x % 32),
          // By a shuffle, so that the compiler knows that it is the same in all lanes.
          warp(__shfl_sync(FULL_WARP, int(threadIdx.x / 32) - WARPGROUPS * 4, 0)), rank(cluster_rank<CLUSTER>()),
          share(rank * WARPS + warp) {}

    __device__ __forceinline__ WgmmaTiles<TOKENS> tiles() const {
        return WgmmaTiles<TOKENS>(p, (p.n + CLUSTER * WEIGHTS - 1) / (CLUSTER * WEIGHTS));
    }

    __device__ __forceinline__ unsigned full() const { return shared_address(&shared.full[place.stage]); }

    // Where the stage has its tokens.
    __device__ __forceinline__ unsigned tokens_to() const {
        return stages + place.stage * Shared::STAGE + Shared::WEIGHT_TILE;
    }

    // All warps wait here, also those without rows: so none is ever more than one phase behind.
    __device__ __forceinline__ void wait_empty() const {
        mbarrier_wait(shared_address(&shared.empty[place.stage]), place.phase + 1);
    }

    // By lane 0 of warp 0: start the copy of the stage's weights, and arrive for them and for `bytes` of tokens.
    __device__ __forceinline__ void load_weights(int step, int expert, int row, int tokens, int weight_tile,
                                                 int bytes) const {
        constexpr unsigned long long POLICY = STREAMED ? EVICT_FIRST : EVICT_NORMAL;
        const int first_weight = (weight_tile * CLUSTER + rank) * WEIGHTS, x = step * DEPTH;
        const unsigned to = stages + place.stage * Shared::STAGE;
        if (step == 0) shared.tiles[place.stage] = {row, tokens, GATED ? first_weight / 2 : first_weight, 0};
        mbarrier_arrive_expect_tx(full(), Shared::WEIGHT_TILE + bytes);
        if constexpr (GATED)
            tma_load<POLICY>(to, p.b_map, x, 0, 0, first_weight / 16, expert, full());
        else
            tma_load<POLICY>(to, p.b_map, x, first_weight, expert, 0, full());
    }

    // By one lane: say that there are no more tiles.
    __device__ __forceinline__ void finish(int arrivals) const {
        wait_empty();
        if (warp == 0) shared.tiles[place.stage].tokens = 0;
        for (int i = 0; i < arrivals; ++i) mbarrier_arrive(full());
    }
};

// True in one lane of the warp. The compiler knows that it is one, which it does not of `lane == 0`: there it makes a
// loop of each instruction whose operands are of a whole warp, as those of TMA are.
__device__ __forceinline__ bool elect_one() {
    unsigned elected;
    asm volatile("{ .reg .pred elected;\n"
                 "  elect.sync _|elected, 0xffffffff;\n"
                 "  selp.u32 %0, 1, 0, elected; }"
                 : "=r"(elected));
    return elected;
}

// The loop of a loading warp with ROWS_BY_TMA. It has rows share, share + SHARES, ... of a tile, whose sources it keeps
// in shared memory, at `list`. It copies whole quads of rows: the last ones of a tile may be past the tile's tokens, in
// columns that nobody writes.
template <class Loop>
__device__ __forceinline__ void gather_by_tma(const MappedGemmParams& p, typename Loop::Shared& shared, unsigned stages,
                                              int* list) {
    constexpr int EACH = Loop::EACH, SHARES = Loop::SHARES, QUAD = 4, HELD = (EACH + 31) / 32;
    static_assert(EACH % QUAD == 0, "");
    Loop loop(p, shared, stages);
    auto tiles = loop.tiles();
    const int steps = (p.k + DEPTH - 1) / DEPTH;
    list += loop.warp * EACH;
    int expert, row, tokens, weight_tile;
    for (int tile = blockIdx.x / Loop::CLUSTER; tiles.find(tile, expert, row, tokens, weight_tile);
         tile += gridDim.x / Loop::CLUSTER) {
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const int place = i * 32 + loop.lane;
            if (place < EACH) list[place] = source_of(p, row + min(place * SHARES + loop.share, tokens - 1));
        }
        __syncwarp();
        const int quads = (tokens + SHARES * QUAD - 1) / (SHARES * QUAD);
        if (elect_one()) {
            for (int step = 0; step < steps; ++step, loop.place.advance()) {
                loop.wait_empty();
                if (loop.warp == 0)
                    loop.load_weights(step, expert, row, tokens, weight_tile, quads * QUAD * SHARES * ROW_BYTES);
                else
                    mbarrier_arrive(loop.full());
                unsigned to = loop.tokens_to() + loop.share * ROW_BYTES;
#pragma unroll 2
                for (int quad = 0; quad < quads; ++quad) {
                    const int4 four = reinterpret_cast<const int4*>(list)[quad];
                    const int sources[QUAD] = {four.x, four.y, four.z, four.w};
#pragma unroll
                    for (int i = 0; i < QUAD; ++i, to += SHARES * ROW_BYTES)
                        load_row<Loop::CLUSTER>(to, p.a_map, step * DEPTH, sources[i], loop.full());
                }
            }
        }
        __syncwarp();
    }
    if (elect_one()) loop.finish(1);
    __syncwarp();
}

// The loop of a loading warp with ROWS_BY_COPIES. It has neighbouring rows of a tile; lane l copies chunk l % 8 of rows
// l / 8, + 4, ... of them. wgmma and the bulk copy read what cp.async has written only after a fence of the thread that
// started the copy, once it is complete: so a warp starts the copies of BEHIND further stages before it waits for those
// of one.
template <class Loop, int BEHIND>
__device__ __forceinline__ void gather_by_copies(const MappedGemmParams& p, typename Loop::Shared& shared,
                                                 unsigned stages) {
    constexpr int ROUNDS = (Loop::EACH + 3) / 4, SHARES = Loop::SHARES, WARPS = Loop::WARPS;
    static_assert(BEHIND < Loop::STAGES - 1 && Loop::CLUSTER <= 2, "");
    Loop loop(p, shared, stages);
    auto tiles = loop.tiles();
    const int steps = (p.k + DEPTH - 1) / DEPTH, chunk = loop.lane % 8;
    RingPlace<Loop::STAGES> behind;
    int copied = 0;
    int2 sent[BEHIND + 1]; // the first row and the rows of the stages that are under way, the oldest first
    auto say_full = [&](const int2& part) {
        fence_proxy_async();
        __syncwarp();
        if (loop.lane == 0) {
            const unsigned full = shared_address(&shared.full[behind.stage]);
            if (Loop::CLUSTER > 1 && part.y > 0)
                bulk_copy_to_rank(stages + behind.stage * Loop::Shared::STAGE + Loop::Shared::WEIGHT_TILE +
                                      part.x * ROW_BYTES,
                                  part.y * ROW_BYTES, full, loop.rank ^ 1);
            mbarrier_arrive(full);
        }
        behind.advance();
    };
    int expert, row, tokens, weight_tile;
    for (int tile = blockIdx.x / Loop::CLUSTER; tiles.find(tile, expert, row, tokens, weight_tile);
         tile += gridDim.x / Loop::CLUSTER) {
        const int each = (tokens + SHARES - 1) / SHARES, first = min(loop.share * each, tokens);
        const int rows = min(each, tokens - first);
        // The rows of this block; those of the other one arrive as bytes.
        const int own = min((loop.rank + 1) * WARPS * each, tokens) - min(loop.rank * WARPS * each, tokens);
        int sources[ROUNDS];
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i)
            sources[i] = source_of(p, row + min(first + loop.lane / 8 + i * 4, tokens - 1));
        for (int step = 0; step < steps; ++step, loop.place.advance()) {
            loop.wait_empty();
            if (loop.warp == 0 && loop.lane == 0)
                loop.load_weights(step, expert, row, tokens, weight_tile, (tokens - own) * ROW_BYTES);
            const int x = step * DEPTH + chunk * 8;
            const char* const from = static_cast<const char*>(p.a) + min(x, p.k - 8) * 2;
            const int bytes = x < p.k ? 16 : 0;
            const unsigned to = loop.tokens_to();
#pragma unroll
            for (int i = 0; i < ROUNDS; ++i) {
                const int place = loop.lane / 8 + i * 4, token = first + place;
                if (place < rows)
                    copy_part_async<16>(to + token * ROW_BYTES + ((chunk ^ token % 8) * 16),
                                        from + (long long)sources[i] * p.k * 2, bytes);
            }
            cp_async_commit_group();
#pragma unroll
            for (int i = 0; i < BEHIND; ++i) sent[i] = sent[i + 1];
            sent[BEHIND] = make_int2(first, rows);
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
    if (loop.lane == 0) loop.finish(loop.warp == 0 ? 2 : 1);
    __syncwarp();
}
