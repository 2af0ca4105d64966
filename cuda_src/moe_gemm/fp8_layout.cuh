// Shared memory layout of gemm_fp8_wgmma.
#pragma once
#include "moe_gemm/epilogue.cuh"

constexpr int FP8_THREADS = 3 * WARPGROUP;
constexpr int FP8_BOX = 64;      // rows of `a` in a TMA box and in a wgmma
constexpr int FP8_COLUMNS = 128; // rows of weights of a tile; gated: 64 gate rows and their 64 up rows
constexpr int FP8_K = 128;       // bytes (FP8 elements) along k of a stage and of a block scale
constexpr int FP8_BOX_BYTES = FP8_BOX * FP8_K, FP8_WEIGHT_BYTES = FP8_COLUMNS * FP8_K;
constexpr int FP8_SCALES = 4; // of a row, one per stage, that a lane loads at once
constexpr int FP8_TAIL = 32;  // maximum rows of a tail: N of its wgmma

// x: expert. y: first row. z: number of rows; 0 after the last tile. w: first column of the result.
using Fp8Tile = int4;

template <int STAGES, int WINDOWS = 3> struct Fp8Shared {
    unsigned long long full[STAGES], empty[STAGES];
    Fp8Tile tiles[STAGES]; // tile that begins with this stage, if any
    // The tile scheduler of a producer warp looks at a window of 32 experts at a time. x: an expert's first row. y: its
    // number of rows. z: its number of tiles. w: inclusive prefix sum of z.
    int4 groups[WINDOWS][32];
};

// Shared memory, as byte offsets from a 1024-byte boundary, in this order: stages, staging buffers of the warps,
// scales, Fp8Shared.
template <int TOKENS_, int CLUSTER_, int STAGES_, bool BLOCK_SCALED_, int ACTIVATION_> struct Fp8Layout {
    static constexpr int TOKENS = TOKENS_, CLUSTER = CLUSTER_, STAGES = STAGES_, ACTIVATION = ACTIVATION_;
    static constexpr bool BLOCK_SCALED = BLOCK_SCALED_, GATED = is_gated(ACTIVATION);
    static_assert(GATED == has_halves(ACTIVATION), "gates and ups are loaded from the halves of n");
    static constexpr bool SHARES_ROWS = true; // the blocks of a cluster have neighbouring weights
    static constexpr int TAIL = TOKENS % FP8_BOX, ROW_BLOCKS = TOKENS / (2 * FP8_BOX); // ROW_BLOCKS: of a warpgroup
    static_assert(TAIL == 0 || (TAIL == FP8_TAIL && BLOCK_SCALED && ACTIVATION == 0), "tails are of plain products");
    static constexpr int TILE_TOKENS = TOKENS - TAIL;
    static constexpr bool SEPARATE_ODD = ROW_BLOCKS > 1;
    static constexpr int LOADED_ROWS = TAIL ? TAIL : FP8_BOX; // rows of a TMA box
    static constexpr int OUT_COLUMNS = GATED ? FP8_COLUMNS / 2 : FP8_COLUMNS;
    static constexpr int STAGE_BYTES = TOKENS * FP8_K + FP8_WEIGHT_BYTES;
    static constexpr int STAGED_COLUMNS = TAIL ? 32 : 64;        // columns that a warp stages at once
    static constexpr int STAGED_BYTES = 16 * STAGED_COLUMNS * 2; // of a warp
    static constexpr int SCALE_SETS = GATED ? 2 : 1;             // gates and ups have their own scales
    static constexpr int SCALE_BYTES = BLOCK_SCALED ? SCALE_SETS * TOKENS * 4 : 0; // of a stage
    static constexpr int SCALED_ROWS = TAIL ? 96 : 128;                            // per scale warp
    static constexpr int SCALE_WARPS = BLOCK_SCALED ? TOKENS / SCALED_ROWS : 0;
    static constexpr int STAGED = STAGES * STAGE_BYTES, SCALES = STAGED + 2 * WARPGROUP / 32 * STAGED_BYTES;
    static constexpr int SHARED_OFFSET = SCALES + STAGES * SCALE_BYTES;
    using Shared = Fp8Shared<STAGES, TAIL ? 4 : 3>;
};
