// Shared memory layout of gemm_wgmma.
#pragma once
#include "common/hopper.cuh"

constexpr int WARPGROUPS = 2; // consumers, of 64 weight rows each
constexpr int DEPTH = 64;     // elements along k of a stage: 128 bytes, one row of a swizzled tile
constexpr int ROW_BYTES = DEPTH * 2;

// Tiles of more than 128 tokens are for groups of many rows.
__host__ __device__ constexpr bool is_largest(int tokens) { return tokens > 128; }

// Tokens of a TMA box.
__host__ __device__ constexpr int box_of(int tokens) { return tokens >= 64 ? 32 : tokens >= 16 ? tokens / 2 : 8; }

// Tokens of a round of the epilogue (store_tile).
__host__ __device__ constexpr int round_of(int tokens) {
    return tokens > 128 ? 32 : tokens == 128 ? 64 : tokens < 16 ? 8 : 16;
}

// With 288 tokens a thread needs 144 registers for sums, so the producer is a warpgroup, which gives registers to the
// consumers (setmaxnreg).
__host__ __device__ constexpr int gemm_threads(int tokens) {
    return WARPGROUPS * WARPGROUP + (tokens > 128 ? WARPGROUP : 32);
}

struct alignas(16) WgmmaTile {
    int row;
    int tokens; // 0: no more tiles
    int column;
    int expert; // with BIASED, and in gemm_fp4_wgmma and gemm_folded_wgmma
};

template <int TOKENS, int STAGES> struct WgmmaShared {
    static constexpr int WEIGHT_TILE = WARPGROUPS * 64 * ROW_BYTES, TOKEN_TILE = TOKENS * ROW_BYTES;
    static constexpr int STAGE = WEIGHT_TILE + TOKEN_TILE;
    static constexpr int STAGING = round_of(TOKENS) * ROW_BYTES;                    // two staging buffers per warpgroup
    static constexpr int SHARED_OFFSET = STAGES * STAGE + WARPGROUPS * 2 * STAGING; // SHARED_OFFSET: of this struct

    unsigned long long full[STAGES], empty[STAGES], skewed;
    // tiles[i]: the tile whose first stage is stage i. The stage's full barrier publishes it.
    WgmmaTile tiles[STAGES];
};

template <int STAGES> struct PipelineState {
    int stage = 0, phase = 0; // `phase`: completed passes through the ring

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, ++phase;
    }
};
