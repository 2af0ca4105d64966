// Sizes and shared memory of a block of gemm_folded_wgmma.
#pragma once
#include "moe_gemm/folded_prepared.cuh"
#include "moe_gemm/wgmma_layout.cuh"

// Warps that load the scales of a tile's tokens, 4 of each lane.
__host__ __device__ constexpr int folded_scale_warps(int tokens) { return tokens > 128 ? tokens / 128 : 1; }

// Threads of a block, as gemm_threads has them.
__host__ __device__ constexpr int folded_threads(int tokens) {
    return WARPGROUPS * WARPGROUP + (tokens >= 128 ? WARPGROUP : 32 + 32 * folded_scale_warps(tokens));
}

// Places in bytes, from a multiple of 1024 on: the ring of tokens, that of weights, that of the tokens' scales, room
// for results, Shared.
template <int TOKENS_, int STAGES_, int CLUSTER_> struct FoldedLayout {
    static constexpr int TOKENS = TOKENS_, STAGES = STAGES_, CLUSTER = CLUSTER_;
    static constexpr int WIDTH = TOKENS < 128 ? TOKENS : 128, PARTS = TOKENS / WIDTH; // WIDTH: tokens of a product
    static constexpr int ROWS = WARPGROUPS * 64;                                      // of weights of a tile
    static constexpr int TOKEN_BYTES = TOKENS * FOLDED_K;                             // of a stage
    static constexpr int WEIGHT_BYTES = ROWS / FOLDED_ROWS * FOLDED_UNIT;
    // The scales of a stage's tokens in the order of the sums of a lane (wgmma_k_major): token 8 j + 2 c + i of each
    // WIDTH has place 2 j + i of lanes 4 g + c. Those of the four c begin in different banks.
    static constexpr int SCALE_PITCH = WIDTH / 4 * 4 + 16;
    static constexpr int SCALES_EACH = 4 * SCALE_PITCH, SCALE_BYTES = PARTS * SCALES_EACH;
    static constexpr int SCALE_WARPS = folded_scale_warps(TOKENS);
    static constexpr int STAGING = round_of(TOKENS) * ROW_BYTES; // of a round; a warpgroup has room for two
    static constexpr int WEIGHTS = STAGES * TOKEN_BYTES, SCALES = WEIGHTS + STAGES * WEIGHT_BYTES;
    static constexpr int STAGED = (SCALES + STAGES * SCALE_BYTES + 127) / 128 * 128;
    static constexpr int REST = (STAGED + WARPGROUPS * 2 * STAGING + 255) / 256 * 256;
    static_assert(WEIGHT_BYTES % 128 == 0 && SCALE_PITCH % (TOKENS < 16 ? 8 : 16) == 0, "");

    struct Shared {
        // The 8 numbers without sign as e4m3, times 2^(6 - d), for each difference d. At a multiple of 256 bytes.
        uint2 table[32];
        unsigned long long full[STAGES], empty[STAGES];
        WgmmaTile tiles[STAGES];                     // as those of WgmmaShared
        WgmmaTile kept[WARPGROUPS * WARPGROUP / 32]; // the tile that each warp multiplies
    };
    // With the most that goes before places at multiples of 1024, 128 and 256, for any STAGES.
    static constexpr int BYTES = 1024 + STAGES * (TOKEN_BYTES + WEIGHT_BYTES + SCALE_BYTES) + 128 +
                                 WARPGROUPS * 2 * STAGING + 256 + int(sizeof(Shared));
    static_assert(1024 + REST + sizeof(Shared) <= BYTES, "");
};
