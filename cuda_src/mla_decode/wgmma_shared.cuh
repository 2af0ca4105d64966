// What the warpgroups of attend_wgmma share: sizes, shared memory, barriers, and the loading of queries.
#pragma once
#include "common/hopper.cuh"
#include "common/mma.cuh"
#include "common/warp.cuh"
#include "mla_decode/copies.cuh"
#include "mla_decode/parts.cuh"
#include "mla_decode/rows.cuh"

constexpr int WGMMA_ROWS = 64;
constexpr int WGMMA_THREADS = 3 * WARPGROUP;
// A tile in shared memory: 64 rows of 64 columns, which are 128 bytes.
constexpr int COLUMNS = 64;
constexpr int TILE_BYTES = 64 * COLUMNS * 2;
// The tiles of 64 queries or tokens: four for each half of the value columns, then the rotary part. With 512 dimensions, which
// have only the first eight, the ninth of the keys has place for the probabilities alone.
constexpr int TILES = 9, VALUE_TILES = 8, ROTARY_TILE = 8;
constexpr int VISITS = 4; // of which `bad` is kept: the loading warps are up to two visits ahead

// What lies behind 27 tiles, which are the queries and two buffers of keys. Warps that convert keep more behind it.
struct WgmmaShared {
    unsigned long long full[2][TILES]; // a tile of a buffer is here; where TMA cannot copy: half 0 or 1 is
    unsigned long long empty[2][2];    // a half of a buffer is free
    unsigned long long queries_full;   // the queries of a visit are here
    unsigned long long queries_empty;  // their place is free
    unsigned long long summed;         // both warpgroups have stored their sums of a visit
    float base[2][WGMMA_ROWS];         // after the latest tile of a warpgroup
    float sums[2][2][WGMMA_ROWS];      // [parity of the visit][warpgroup]
    int bad[VISITS];                   // the latest visit that found a bad page or slot
    unsigned long long valid[2];       // with `indices`: the tokens of a buffer that are there, a bit each
};
// Before it: the first tile begins at a multiple of 1024.
constexpr int BEFORE_SHARED = 1024 + 3 * TILES * TILE_BYTES;

struct alignas(64) WgmmaParams {
    // The cache [pages, page_size, kv_heads, 576], for boxes of 64 columns of `box_tokens` tokens of a head. Unused with
    // FP8 or GATHER.
    TensorMap map;
    Params p;
    int box_tokens; // divides 64 and page_size
};

// Numbered barriers: the probabilities of the tile in a buffer are here; all threads of a warpgroup are.
enum { PROBABILITIES_0 = 1, PROBABILITIES_1, WARPGROUP_0, WARPGROUP_1 };

// The address of a tile of a buffer of keys.
__device__ __forceinline__ unsigned key_tile(unsigned queries, int buffer, int tile) {
    return queries + ((buffer + 1) * TILES + tile) * TILE_BYTES;
}

// Start copying every LOADERS-th row of the queries, of 8 or 9 tiles, from row `first` on. AT_ONCE: rows for which there
// are registers.
template <typename T, int LOADERS, int ROW_TILES, int AT_ONCE = LOADERS == 4 ? 2 : 4>
__device__ __forceinline__ void load_queries(const Params& p, const Visit& visit, unsigned queries, int first) {
    constexpr int EACH = (WGMMA_ROWS + LOADERS - 1) / LOADERS;
    const int lane = threadIdx.x % 32;
    // Lane i finds this warp's i-th row.
    const int own = blockIdx.x * WGMMA_ROWS + min(first + lane * LOADERS, WGMMA_ROWS - 1);
    // With 8 tiles there are one query token and one kv head, and the row is the head: no division.
    const Row row =
        ROW_TILES == 8 ? Row{visit.token, min(own, p.heads - 1), own < p.heads} : Row(p, visit, blockIdx.y, own);
    const unsigned long long at =
        reinterpret_cast<unsigned long long>(static_cast<const T*>(p.q) + visit.batch * p.q_strides[0] +
                                             row.token * p.q_strides[1] + row.head * p.q_strides[2]);
    const unsigned valid = __ballot_sync(FULL_WARP, row.valid);
#pragma unroll(AT_ONCE)
    for (int i = 0; i < EACH; ++i) {
        const int r = first + i * LOADERS;
        const T* const from = reinterpret_cast<const T*>(__shfl_sync(FULL_WARP, at, i)) + lane * 8;
        const unsigned to = queries + lane / 8 * TILE_BYTES + r * COLUMNS * 2 + ((lane ^ r) & 7) * 16;
        if (r >= WGMMA_ROWS) continue;
        const bool wanted = valid >> i & 1;
        copy_async_or_zero(to, from, wanted);
        copy_async_or_zero(to + 4 * TILE_BYTES, from + 4 * COLUMNS, wanted);
        if (ROW_TILES > 8 && lane < 8) copy_async_or_zero(to + 8 * TILE_BYTES, from + 8 * COLUMNS, wanted);
    }
    cp_async_commit_group();
}

// Tell the computing warpgroups that this thread's copies of the queries are here, but for the latest LATER groups of
// copies, which are of keys.
template <int LATER> __device__ __forceinline__ void publish_queries(WgmmaShared& shared) {
    cp_async_wait_group<LATER>();
    fence_proxy_async();
    mbarrier_arrive(shared_address(&shared.queries_full));
}

// Arrive at a barrier for a warp whose threads have all written their share of the keys.
__device__ __forceinline__ void publish_keys(unsigned barrier) {
    fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}
