// The sizes, shared memory and barriers of attend_wgmma and attend_two_loaders, and the loading of queries.
#pragma once
#include "common/hopper.cuh"
#include "common/mma.cuh"
#include "common/warp.cuh"
#include "mla_decode/copies.cuh"
#include "mla_decode/parts.cuh"
#include "mla_decode/rows.cuh"

constexpr int WGMMA_ROWS = 64;
constexpr int WGMMA_THREADS = 3 * WARPGROUP;
// A tile in shared memory has 64 rows of COLUMNS 16-bit elements, 128 bytes per row.
constexpr int COLUMNS = 64;
constexpr int TILE_BYTES = 64 * COLUMNS * 2;
// 64 queries, or the keys of 64 tokens, take nine tiles: four for each half of the value columns, and one for the
// rotary part. Heads of 512 dimensions fill only the first eight tiles. Their ninth key tile holds only the
// probabilities.
constexpr int TILES = 9, VALUE_TILES = 8, ROTARY_TILE = 8;
constexpr int VISITS = 4; // entries of `bad`, one per sequence; producers are up to two sequences ahead

// The shared memory after 27 tiles: 9 of queries, and two buffers of 9 tiles of keys. Converting producers store more
// data after this struct.
struct WgmmaShared {
    unsigned long long full[2][TILES]; // full barriers of the buffers: with TMA one per tile, else one per half
    unsigned long long empty[2][2];    // empty barriers of the buffers, one per half
    unsigned long long queries_full;   // full barrier: the queries of a sequence are loaded
    unsigned long long queries_empty;  // empty barrier: the queries have been read
    unsigned long long summed;         // both consumers have stored their sums of a sequence
    float base[2][WGMMA_ROWS];         // [consumer]: bases of the rows (see BASE_LAG) after its latest tile
    float sums[2][2][WGMMA_ROWS];      // [index of the sequence in the part % 2][consumer]
    int bad[VISITS];                   // bad[i % VISITS] is i if sequence i (with tiles) has an invalid page or slot
    unsigned long long valid[2];       // with `indices`: a bit per token of a buffer, set if it exists
};
// Bytes before WgmmaShared: the 1024-byte alignment of the first tile, and the tiles.
constexpr int BEFORE_SHARED = 1024 + 3 * TILES * TILE_BYTES;

struct alignas(64) WgmmaParams {
    // Tensor map of the cache [pages, page_size, kv_heads, 576]. A TMA box is 64 columns of `box_tokens` tokens of a
    // head. Unused with FP8 or GATHER.
    TensorMap map;
    Params p;
    int box_tokens; // divides 64 and page_size
};

// Named barriers. PROBABILITIES_i: the probabilities of the tile in buffer i are in shared memory. WARPGROUP_i: all
// threads of consumer i have arrived.
enum { PROBABILITIES_0 = 1, PROBABILITIES_1, WARPGROUP_0, WARPGROUP_1 };

// Return the shared address of a tile of a key buffer.
__device__ __forceinline__ unsigned key_tile(unsigned queries, int buffer, int tile) {
    return queries + ((buffer + 1) * TILES + tile) * TILE_BYTES;
}

// Issue this warp's copies of queries as one commit group. LOADERS warps share the rows, and this warp copies rows
// `first`, `first + LOADERS`, and so on. A row spans ROW_TILES tiles, 8 or 9. AT_ONCE is the number of rows in flight
// at once, limited by the registers.
template <typename T, int LOADERS, int ROW_TILES, int AT_ONCE = LOADERS == 4 ? 2 : 4>
__device__ __forceinline__ void load_queries(const Params& p, const Visit& visit, unsigned queries, int first) {
    constexpr int EACH = (WGMMA_ROWS + LOADERS - 1) / LOADERS;
    const int lane = threadIdx.x % 32;
    // Lane i computes the address of this warp's i-th row.
    const int own = blockIdx.x * WGMMA_ROWS + min(first + lane * LOADERS, WGMMA_ROWS - 1);
    // With 8 tiles there is one query token and one kv head. A row is then a head, which saves a division.
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

// Wait for this thread's query copies, and arrive at queries_full. The latest LATER commit groups are copies of keys
// and may stay in flight.
template <int LATER> __device__ __forceinline__ void publish_queries(WgmmaShared& shared) {
    cp_async_wait_group<LATER>();
    fence_proxy_async();
    mbarrier_arrive(shared_address(&shared.queries_full));
}

// Arrive at a full barrier for the warp, once all its threads have written their share of the keys.
__device__ __forceinline__ void publish_keys(unsigned barrier) {
    fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}
