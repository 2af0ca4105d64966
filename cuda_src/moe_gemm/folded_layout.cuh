// Shared memory layout of gemm_folded_wgmma.
#pragma once
#include "moe_gemm/folded_prepared.cuh"
#include "moe_gemm/wgmma_layout.cuh"

// Number of scale producer warps. Each loads the scales of up to 128 tokens, 4 per lane.
__host__ __device__ constexpr int folded_scale_warps(int tokens) { return tokens > 128 ? tokens / 128 : 1; }

// The producers are two warps or, with 128 or more tokens, a warpgroup, because setmaxnreg changes whole warpgroups.
__host__ __device__ constexpr int folded_threads(int tokens) {
    return WARPGROUPS * WARPGROUP + (tokens >= 128 ? WARPGROUP : 32 + 32 * folded_scale_warps(tokens));
}

// Shared memory, as byte offsets from a 1024-byte boundary, in this order: tokens, weights and token scales of all
// stages, staging buffers, Shared.
template <int TOKENS_, int STAGES_, int CLUSTER_> struct FoldedLayout {
    static constexpr int TOKENS = TOKENS_, STAGES = STAGES_, CLUSTER = CLUSTER_;
    static constexpr int WIDTH = TOKENS < 128 ? TOKENS : 128, CHUNKS = TOKENS / WIDTH; // WIDTH: tokens of a wgmma
    static constexpr int ROWS = WARPGROUPS * 64;
    static constexpr int TOKEN_BYTES = TOKENS * FOLDED_K; // per stage
    static constexpr int WEIGHT_BYTES = ROWS / FOLDED_ROWS * FOLDED_UNIT_BYTES;
    // Lanes with `lane % 4 == c` have the sums of tokens `8 * j + 2 * c + i` (i = 0, 1). So the scales are in four
    // rows: float `2 * j + i` of row c is the scale of this token. Rows are SCALE_PITCH bytes apart, so that they are
    // in different banks.
    static constexpr int SCALE_PITCH = WIDTH / 4 * 4 + 16;
    static constexpr int CHUNK_SCALE_BYTES = 4 * SCALE_PITCH, SCALE_BYTES = CHUNKS * CHUNK_SCALE_BYTES;
    static constexpr int SCALE_WARPS = folded_scale_warps(TOKENS);
    static constexpr int STAGING = round_of(TOKENS) * ROW_BYTES; // two staging buffers per warpgroup
    static constexpr int WEIGHTS = STAGES * TOKEN_BYTES, SCALES = WEIGHTS + STAGES * WEIGHT_BYTES;
    static constexpr int STAGED = (SCALES + STAGES * SCALE_BYTES + 127) / 128 * 128;
    static constexpr int SHARED_OFFSET = (STAGED + WARPGROUPS * 2 * STAGING + 255) / 256 * 256;
    static_assert(WEIGHT_BYTES % 128 == 0 && SCALE_PITCH % (TOKENS < 16 ? 8 : 16) == 0, "");

    struct Shared {
        // table[d]: the 8 magnitudes of e2m1 times 2^(6 - d), as e4m3. The table is 256-byte aligned, because
        // FoldedFragments::convert replaces the lowest byte of its address.
        uint2 table[32];
        unsigned long long full[STAGES], empty[STAGES];
        WgmmaTile tiles[STAGES];
        WgmmaTile kept[WARPGROUPS * WARPGROUP / 32]; // current tile of each consumer warp
    };
    // Upper bound of the shared memory, with the padding before the 1024-, 128- and 256-byte boundaries.
    static constexpr int BYTES = 1024 + STAGES * (TOKEN_BYTES + WEIGHT_BYTES + SCALE_BYTES) + 128 +
                                 WARPGROUPS * 2 * STAGING + 256 + int(sizeof(Shared));
    static_assert(1024 + SHARED_OFFSET + sizeof(Shared) <= BYTES, "");
};
