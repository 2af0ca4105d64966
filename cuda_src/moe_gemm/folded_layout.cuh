// Sizes and shared memory layout of a block of gemm_folded_wgmma.
#pragma once
#include "moe_gemm/folded_prepared.cuh"
#include "moe_gemm/wgmma_layout.cuh"

// Number of warps that load token scales. A lane loads 4 tokens, so a warp loads 128.
__host__ __device__ constexpr int folded_scale_warps(int tokens) { return tokens > 128 ? tokens / 128 : 1; }

// Threads of a block: WARPGROUPS consumer warpgroups and the producer warps. With 128 or more tokens the producer warps
// form a whole warpgroup, because setmaxnreg changes the register count of whole warpgroups.
__host__ __device__ constexpr int folded_threads(int tokens) {
    return WARPGROUPS * WARPGROUP + (tokens >= 128 ? WARPGROUP : 32 + 32 * folded_scale_warps(tokens));
}

// Byte offsets from a 1024-byte boundary. The order is: the tokens of all stages, the weights of all stages, the token
// scales of all stages, staging buffers of the epilogue, Shared.
template <int TOKENS_, int STAGES_, int CLUSTER_> struct FoldedLayout {
    static constexpr int TOKENS = TOKENS_, STAGES = STAGES_, CLUSTER = CLUSTER_;
    static constexpr int WIDTH = TOKENS < 128 ? TOKENS : 128, PARTS = TOKENS / WIDTH; // WIDTH: tokens of a wgmma
    static constexpr int ROWS = WARPGROUPS * 64;                                      // rows of weights of a tile
    static constexpr int TOKEN_BYTES = TOKENS * FOLDED_K;                             // per stage, as WEIGHT_BYTES
    static constexpr int WEIGHT_BYTES = ROWS / FOLDED_ROWS * FOLDED_UNIT;
    // The scales of WIDTH tokens are stored as four rows of floats, one row for each value `c` of `lane % 4`. Row c has
    // the scales in the order in which these lanes read them: the lanes have the sums of tokens `8 * j + 2 * c + i`
    // (`i` is 0 or 1; see wgmma_k_major), and float `2 * j + i` of row c is the scale of this token. SCALE_PITCH is the
    // distance between two rows in bytes; its padding puts the four rows into different banks.
    static constexpr int SCALE_PITCH = WIDTH / 4 * 4 + 16;
    static constexpr int SCALES_EACH = 4 * SCALE_PITCH, SCALE_BYTES = PARTS * SCALES_EACH;
    static constexpr int SCALE_WARPS = folded_scale_warps(TOKENS);
    static constexpr int STAGING = round_of(TOKENS) * ROW_BYTES; // bytes of a staging buffer; two per warpgroup
    static constexpr int WEIGHTS = STAGES * TOKEN_BYTES, SCALES = WEIGHTS + STAGES * WEIGHT_BYTES;
    static constexpr int STAGED = (SCALES + STAGES * SCALE_BYTES + 127) / 128 * 128;
    static constexpr int REST = (STAGED + WARPGROUPS * 2 * STAGING + 255) / 256 * 256;
    static_assert(WEIGHT_BYTES % 128 == 0 && SCALE_PITCH % (TOKENS < 16 ? 8 : 16) == 0, "");

    struct Shared {
        // table[d] holds the 8 magnitudes of e2m1 times 2^(6 - d), as e4m3. The table is 256-byte aligned, because
        // FoldedFragments::convert forms the address of an entry by replacing the lowest byte of the table's address.
        uint2 table[32];
        unsigned long long full[STAGES], empty[STAGES];
        WgmmaTile tiles[STAGES];                     // as in WgmmaShared
        WgmmaTile kept[WARPGROUPS * WARPGROUP / 32]; // the current tile of each consumer warp
    };
    // Upper bound for any STAGES: includes the largest padding before the 1024-, 128- and 256-byte boundaries.
    static constexpr int BYTES = 1024 + STAGES * (TOKEN_BYTES + WEIGHT_BYTES + SCALE_BYTES) + 128 +
                                 WARPGROUPS * 2 * STAGING + 256 + int(sizeof(Shared));
    static_assert(1024 + REST + sizeof(Shared) <= BYTES, "");
};
