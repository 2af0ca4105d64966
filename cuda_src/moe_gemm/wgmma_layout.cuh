// Sizes and shared memory of a block of gemm_wgmma.
#pragma once
#include "common/hopper.cuh"

constexpr int WARPGROUPS = 2; // warpgroups that multiply, each 64 weights of a tile
constexpr int DEPTH = 64;     // numbers along k of a stage: 128 bytes, a row of a swizzled tile
constexpr int ROW_BYTES = DEPTH * 2;

// Whether tiles are the largest, for groups of many rows: their groups have tails and are sorted (wgmma_tiles.cuh), the
// epilogue overlaps its rounds (wgmma_store.cuh), and the second warpgroup is a stage behind the first.
__host__ __device__ constexpr bool is_largest(int tokens) { return tokens > 128; }

// Tokens of a box of TMA.
__host__ __device__ constexpr int box_of(int tokens) { return tokens >= 64 ? 32 : tokens >= 16 ? tokens / 2 : 8; }

// Tokens of a round of the epilogue, which transposes their results.
__host__ __device__ constexpr int round_of(int tokens) {
    return tokens > 128 ? 32 : tokens == 128 ? 64 : tokens < 16 ? 8 : 16;
}

// Threads of a block. 288 tokens need 144 registers of a thread for sums, more than each can have of an equal share:
// the loading warp then is one of a whole warpgroup, which gives registers away.
__host__ __device__ constexpr int gemm_threads(int tokens) {
    return WARPGROUPS * WARPGROUP + (tokens > 128 ? WARPGROUP : 32);
}

// A tile, for a block.
struct alignas(16) WgmmaTile {
    int row;    // its first row of `out`
    int tokens; // 0: there are no more tiles
    int column; // its first column of `out`
    int expert; // of gemm_fp4_wgmma, and where there are biases
};

template <int TOKENS, int STAGES> struct WgmmaShared {
    static constexpr int WEIGHT_TILE = WARPGROUPS * 64 * ROW_BYTES, TOKEN_TILE = TOKENS * ROW_BYTES; // bytes
    static constexpr int STAGE = WEIGHT_TILE + TOKEN_TILE;
    static constexpr int STAGING = round_of(TOKENS) * ROW_BYTES;           // of a round; a warpgroup has room for two
    static constexpr int REST = STAGES * STAGE + WARPGROUPS * 2 * STAGING; // where this struct begins

    unsigned long long full[STAGES], empty[STAGES], skewed;
    // The tile that begins with this stage, if one does; `full` publishes it. A tile has a stage at least, and a warp
    // reads its tile before it releases the stage, so there are enough of them.
    WgmmaTile tiles[STAGES];
};

// The place of a warp in the ring.
template <int STAGES> struct RingPlace {
    int stage = 0, phase = 0; // phase: how often the ring's end was passed

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, ++phase;
    }
};
