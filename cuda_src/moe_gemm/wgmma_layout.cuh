// Sizes and shared memory layout of a block of gemm_wgmma.
#pragma once
#include "common/hopper.cuh"

constexpr int WARPGROUPS = 2; // consumer warpgroups; each has 64 weight rows of a tile
constexpr int DEPTH = 64;     // elements along k of a stage: 128 bytes, one row of a swizzled tile
constexpr int ROW_BYTES = DEPTH * 2;

// Return whether tiles of up to `tokens` tokens are the largest tiles, which are for groups of many rows. With the
// largest tiles, the last tile of a group may have a tail, groups are sorted by size (both in wgmma_tiles.cuh), the
// epilogue overlaps its rounds (wgmma_store.cuh), and the second warpgroup stays one stage behind the first.
__host__ __device__ constexpr bool is_largest(int tokens) { return tokens > 128; }

// Return the number of tokens that one TMA copy transfers (a box).
__host__ __device__ constexpr int box_of(int tokens) { return tokens >= 64 ? 32 : tokens >= 16 ? tokens / 2 : 8; }

// Return the number of tokens of one round of the epilogue. A round transposes the results of these tokens through
// shared memory.
__host__ __device__ constexpr int round_of(int tokens) {
    return tokens > 128 ? 32 : tokens == 128 ? 64 : tokens < 16 ? 8 : 16;
}

// Return the threads of a block. With 288 tokens a thread needs 144 registers for sums, more than an equal share of the
// registers allows. The producer is then a whole warpgroup, which gives registers to the consumers (setmaxnreg).
__host__ __device__ constexpr int gemm_threads(int tokens) {
    return WARPGROUPS * WARPGROUP + (tokens > 128 ? WARPGROUP : 32);
}

// A block's tile.
struct alignas(16) WgmmaTile {
    int row;    // first row of `out`
    int tokens; // 0: no more tiles
    int column; // first column of `out`
    int expert; // valid in gemm_fp4_wgmma and gemm_folded_wgmma, and with BIASED
};

template <int TOKENS, int STAGES> struct WgmmaShared {
    static constexpr int WEIGHT_TILE = WARPGROUPS * 64 * ROW_BYTES, TOKEN_TILE = TOKENS * ROW_BYTES; // bytes
    static constexpr int STAGE = WEIGHT_TILE + TOKEN_TILE;
    static constexpr int STAGING = round_of(TOKENS) * ROW_BYTES;           // of a staging buffer; two per warpgroup
    static constexpr int REST = STAGES * STAGE + WARPGROUPS * 2 * STAGING; // offset of this struct

    unsigned long long full[STAGES], empty[STAGES], skewed;
    // tiles[i]: description of the tile whose first stage is stage i, if there is one. The stage's full barrier
    // publishes it. One description per stage is enough, because a tile has at least one stage, and a warp reads the
    // description before it releases the stage.
    WgmmaTile tiles[STAGES];
};

// Position of a warp in the ring.
template <int STAGES> struct RingPlace {
    int stage = 0, phase = 0; // phase: how many times the warp has gone through the whole ring

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, ++phase;
    }
};
