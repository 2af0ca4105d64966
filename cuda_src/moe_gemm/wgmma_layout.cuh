// The shared memory of a block of gemm_wgmma, and its ring of stages.
#pragma once
#include "common/hopper.cuh"

constexpr int WARPGROUPS = 2; // that multiply, each 64 weights of a tile
constexpr int DEPTH = 64;     // numbers of 16 bits in a stage, and in a row of a tile in shared memory
constexpr int ROW_BYTES = DEPTH * 2;

// Tokens that are copied at once.
__host__ __device__ constexpr int box_of(int tokens) { return tokens >= 64 ? 32 : tokens >= 16 ? tokens / 2 : 8; }

// Tokens whose results are transposed at once.
__host__ __device__ constexpr int round_of(int tokens) {
    return tokens > 128 ? 32 : tokens == 128 ? 64 : tokens < 16 ? 8 : 16;
}

// Threads of a block. 288 tokens need 144 registers a thread for sums, more than each can have: the loading warp then is one
// of a warpgroup, which gives its registers away.
__host__ __device__ constexpr int gemm_threads(int tokens) {
    return WARPGROUPS * WARPGROUP + (tokens > 128 ? WARPGROUP : 32);
}

struct alignas(16) GemmVisit {
    int row;    // the first
    int tokens; // 0: there are no more tiles
    int column; // the first of this block in `out`
    int unused;
};

template <int TOKENS, int STAGES> struct GemmShared {
    static constexpr int WEIGHT_TILE = WARPGROUPS * 64 * ROW_BYTES, TOKEN_TILE = TOKENS * ROW_BYTES;
    static constexpr int STAGE = WEIGHT_TILE + TOKEN_TILE;
    static constexpr int STAGING = round_of(TOKENS) * ROW_BYTES; // a warpgroup has two of them

    unsigned long long full[STAGES], empty[STAGES], skewed;
    GemmVisit visits[STAGES];
};

// The place in a ring, and how often its end was passed.
template <int STAGES> struct GemmPlace {
    int stage = 0, phase = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, ++phase;
    }
};
