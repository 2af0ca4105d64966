// Define the shared memory and the barriers of attend_wgmma and attend_two_loaders, and copy the queries.
#pragma once
#include "common/hopper.cuh"
#include "common/mma.cuh"
#include "common/warp.cuh"
#include "mla_decode/copies.cuh"
#include "mla_decode/parts.cuh"
#include "mla_decode/rows.cuh"

constexpr int WGMMA_ROWS = 64;
constexpr int WGMMA_THREADS = 3 * WARPGROUP;
// A tile has 64 rows of COLUMNS 16-bit elements.
constexpr int COLUMNS = 64;
constexpr int TILE_BYTES = 64 * COLUMNS * 2;
// 64 queries or keys take eight tiles for the value columns, and one for the rotary part. With heads of 512 dimensions
// the ninth key tile holds only the probabilities.
constexpr int TILES = 9, VALUE_TILES = 8, ROTARY_TILE = 8;
constexpr int BAD_FLAGS = 4; // producers are up to two sequences ahead

// In shared memory, this struct follows 9 tiles of queries and two buffers of 9 tiles of keys.
struct WgmmaShared {
    unsigned long long full[2][TILES]; // per buffer: with TMA one per tile, else one per half
    unsigned long long empty[2][2];    // [buffer][half]
    unsigned long long queries_full;
    unsigned long long queries_empty;
    unsigned long long summed;    // both consumers have stored their sums
    float row_max[2][WGMMA_ROWS]; // [consumer]: after its latest tile
    float sums[2][2][WGMMA_ROWS]; // [index of the sequence in the SM part % 2][consumer]
    int bad[BAD_FLAGS];           // bad[i % BAD_FLAGS] is i if sequence i (with tiles) has an invalid page or slot
    unsigned long long valid[2];  // [buffer], with `indices`: a bit per token
};
// Bytes of shared memory before WgmmaShared: up to 1024 for alignment, then the tiles.
constexpr int BEFORE_SHARED = 1024 + 3 * TILES * TILE_BYTES;

struct alignas(64) WgmmaParams {
    // Tensor map of the cache [pages, page_size, kv_heads, 576]. A TMA box is 64 columns of `box_tokens` tokens. Unused
    // with FP8 or GATHER.
    TensorMap map;
    Params p;
    int box_tokens; // divides 64 and page_size
};

// Named barriers. PROBABILITIES_i: the probabilities of the tile in buffer i are in shared memory. WARPGROUP_i: all
// threads of consumer i have arrived.
enum { PROBABILITIES_0 = 1, PROBABILITIES_1, WARPGROUP_0, WARPGROUP_1 };

__device__ __forceinline__ unsigned key_tile(unsigned queries, int buffer, int tile) {
    return queries + ((buffer + 1) * TILES + tile) * TILE_BYTES;
}

// Issue the copies of query rows `first`, `first + WARPS` and so on as one commit group. A row spans ROW_TILES tiles.
// UNROLL rows are in flight at once; more would need too many registers.
template <typename T, int WARPS, int ROW_TILES, int UNROLL = WARPS == 4 ? 2 : 4>
__device__ __forceinline__ void load_queries(const Params& p, const Split& split, unsigned queries, int first) {
    constexpr int ROWS_PER_WARP = (WGMMA_ROWS + WARPS - 1) / WARPS;
    const int lane = threadIdx.x % 32;
    // Lane i computes the address of this warp's i-th row.
    const int row_index = blockIdx.x * WGMMA_ROWS + min(first + lane * WARPS, WGMMA_ROWS - 1);
    // With ROW_TILES == 8 there is one query token and one kv head. The row index is then the head, which saves a
    // division.
    const Row row = ROW_TILES == 8 ? Row{split.token, min(row_index, p.heads - 1), row_index < p.heads}
                                   : Row(p, split, blockIdx.y, row_index);
    const unsigned long long at =
        reinterpret_cast<unsigned long long>(static_cast<const T*>(p.q) + split.batch * p.q_strides[0] +
                                             row.token * p.q_strides[1] + row.head * p.q_strides[2]);
    const unsigned valid = __ballot_sync(FULL_WARP, row.valid);
#pragma unroll(UNROLL)
    for (int i = 0; i < ROWS_PER_WARP; ++i) {
        const int r = first + i * WARPS;
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

// PENDING_GROUPS: number of later commit groups (copies of keys) that may stay in flight.
template <int PENDING_GROUPS> __device__ __forceinline__ void publish_queries(WgmmaShared& shared) {
    cp_async_wait_group<PENDING_GROUPS>();
    fence_proxy_async();
    mbarrier_arrive(shared_address(&shared.queries_full));
}

__device__ __forceinline__ void publish_keys(unsigned barrier) {
    fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}
