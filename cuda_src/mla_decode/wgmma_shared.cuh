// What the warpgroups of attend_wgmma share.
#pragma once
#include "common/hopper.cuh"
#include "common/mma.cuh"
#include "common/warp.cuh"
#include "mla_decode/copies.cuh"
#include "mla_decode/rows.cuh"

constexpr int WGMMA_ROWS = 64;
constexpr int WGMMA_THREADS = 3 * WARPGROUP;
constexpr int COLUMNS = 64; // of a tile in shared memory: 128 bytes
constexpr int TILE_BYTES = 64 * COLUMNS * 2;
constexpr int TILES = 9, VALUE_TILES = 8, ROTARY = 8; // of a token: four for each half of the values, the rotary part
constexpr int VISITS = 4; // how many visits something is kept of: the loaders are up to two ahead

// After 27 tiles, of the queries and of two buffers.
struct WgmmaShared {
    unsigned long long full[2][TILES]; // a tile of a buffer is here; or, not by TMA, half 0 or 1 is
    unsigned long long empty[2][2];    // a half of a buffer is free
    unsigned long long queries_full, queries_empty;
    unsigned long long summed;                  // both warpgroups have their sums of a visit here
    float base[2][WGMMA_ROWS];                  // after the latest tile of a warpgroup
    float sums[2][2][WGMMA_ROWS];               // [parity of the visit][warpgroup]
    int bad[VISITS];                            // the latest visit that found a bad page or slot
    unsigned long long valid[2];                // of `indices`: which tokens of a buffer are there, a bit each
    unsigned long long tokens[4][BLOCK_TOKENS]; // where those of the next tiles are; or MISSING, OUTSIDE the cache
};
static_assert(3 * TILES * TILE_BYTES + sizeof(WgmmaShared) + 1024 <= 232448, "");

struct alignas(64) WgmmaParams {
    // Of the cache [pages, page_size, kv_heads, 576], for boxes of 64 columns of `box_tokens` tokens of a head. Unused
    // with FP8 or GATHER.
    TensorMap map;
    Params p;
    int box_tokens; // divides 64 and page_size
};

// The numbered barriers.
enum { SHARED_0 = 1, SHARED_1, WARPGROUP_0, WARPGROUP_1 };

__device__ __forceinline__ unsigned key_tile(unsigned queries, int buffer, int tile) {
    return queries + ((buffer + 1) * TILES + tile) * TILE_BYTES;
}

// Start copying every LOADERS-th row of the queries.
template <typename T, int LOADERS>
__device__ __forceinline__ void load_queries(const Params& p, const Visit& visit, unsigned queries, int first) {
    constexpr int EACH = (WGMMA_ROWS + LOADERS - 1) / LOADERS;
    const int lane = threadIdx.x % 32;
    // Lane i knows where this warp's i-th row is.
    const Row row(p, visit, blockIdx.y, blockIdx.x * WGMMA_ROWS + min(first + lane * LOADERS, WGMMA_ROWS - 1));
    const unsigned long long at =
        reinterpret_cast<unsigned long long>(static_cast<const T*>(p.q) + visit.batch * p.q_strides[0] +
                                             row.token * p.q_strides[1] + row.head * p.q_strides[2]);
    const unsigned valid = __ballot_sync(FULL_WARP, row.valid);
#pragma unroll(LOADERS == 4 ? 2 : 4)
    for (int i = 0; i < EACH; ++i) {
        const int r = first + i * LOADERS;
        const T* const from = reinterpret_cast<const T*>(__shfl_sync(FULL_WARP, at, i)) + lane * 8;
        const unsigned to = queries + lane / 8 * TILE_BYTES + r * COLUMNS * 2 + ((lane ^ r) & 7) * 16;
        if (r >= WGMMA_ROWS) continue;
        const bool wanted = valid >> i & 1;
        copy_async_or_zero(to, from, wanted);
        copy_async_or_zero(to + 4 * TILE_BYTES, from + 4 * COLUMNS, wanted);
        if (lane < 8) copy_async_or_zero(to + 8 * TILE_BYTES, from + 8 * COLUMNS, wanted);
    }
    copies_commit();
}
