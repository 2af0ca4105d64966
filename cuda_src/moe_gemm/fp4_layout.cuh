// Sizes and shared memory of a block of gemm_fp4_wgmma.
#pragma once
#include "moe_gemm/fp4_prepared.cuh"
#include "moe_gemm/wgmma_layout.cuh"

static_assert(DEPTH == UNIT_K, "");

// Places in bytes, from a multiple of 1024 on: the ring of tokens, that of weights, room for results, Fp4Shared.
template <int FORMAT_, int TOKENS_, int UNITS_, int STAGES_, int CLUSTER_, bool SPLIT_> struct Fp4Layout {
    static constexpr int FORMAT = FORMAT_, TOKENS = TOKENS_, UNITS = UNITS_, STAGES = STAGES_, CLUSTER = CLUSTER_;
    static constexpr bool SPLIT = SPLIT_;
    static constexpr int ROWS = SPLIT ? 64 : WARPGROUPS * 64; // of weights of a tile
    static constexpr int EIGHT = UNITS * UNIT_BYTES<FORMAT>;  // bytes of 8 rows of weights of a stage
    static constexpr int WEIGHT_BYTES = ROWS / UNIT_ROWS * EIGHT;
    static constexpr int TOKEN_TILE = TOKENS * ROW_BYTES, TOKEN_BYTES = UNITS * TOKEN_TILE;
    static constexpr int STAGING = round_of(TOKENS) * ROW_BYTES; // of a round; a warpgroup that stores has room for two
    static constexpr int WEIGHTS = STAGES * TOKEN_BYTES, STAGED = WEIGHTS + STAGES * WEIGHT_BYTES;
    static constexpr int EXCHANGE = STAGED + (SPLIT ? 1 : WARPGROUPS) * 2 * STAGING;
    static constexpr int REST = EXCHANGE + (SPLIT ? WARPGROUP * TOKENS / 2 * 4 : 0);
    // Halves of a unit that are converted and multiplied at once, so that a warpgroup has an even number of times of them
    // in a stage: it has two sets of registers for them.
    static constexpr int HALVES = TOKENS <= 16 && UNITS / (SPLIT ? 2 : 1) % 2 == 0 ? 2 : 1;
    static_assert(WEIGHT_BYTES % 128 == 0 && UNITS % (SPLIT ? 2 : 1) == 0, "");

    struct Shared {
        unsigned long long full[STAGES], empty[STAGES], skewed;
        WgmmaTile tiles[STAGES]; // as those of WgmmaShared
    };
};
