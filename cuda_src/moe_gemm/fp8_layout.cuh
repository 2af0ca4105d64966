// The shared memory of a block of gemm_fp8_wgmma.
#pragma once
#include "common/hopper.cuh"

constexpr int FP8_THREADS = 3 * WARPGROUP;
constexpr int FP8_BOX = 64;      // rows of a box, and of a product
constexpr int FP8_COLUMNS = 128; // weight rows of a tile
constexpr int FP8_K = 128;       // bytes along k of a stage, and numbers of a scale
constexpr int FP8_BOX_BYTES = FP8_BOX * FP8_K, FP8_WEIGHT_BYTES = FP8_COLUMNS * FP8_K;
constexpr int FP8_SCALES = 4;          // of a row, neighbours along k, that a lane reads at once
constexpr int FP8_SCALED_ROWS = 128;   // whose scales a warp brings: 4 to a lane
constexpr int FP8_ARRIVING = 32;       // of the lanes that brought scales: all, or 1 for all
constexpr int FP8_STAGED_COLUMNS = 64; // of the output, that a warp turns into whole pieces at once

// expert, first row, rows (0: no tile is left), first column of the output.
using Fp8Tile = int4;

template <int STAGES> struct Fp8GemmShared {
    unsigned long long full[STAGES], empty[STAGES];
    Fp8Tile tiles[STAGES]; // the one whose first bytes along k are in this stage
    int4 groups
        [3]
        [32]; // of neighbouring experts: first row, rows, tiles, tiles up to this one's last; of each warp that looks
};

// The shared memory, from a multiple of 1024 on.
template <int TOKENS, int STAGES, bool BLOCK_SCALED, int ACTIVATION> struct Fp8GemmLayout {
    static constexpr int STAGE_BYTES = TOKENS * FP8_K + FP8_WEIGHT_BYTES;
    static constexpr int STAGED_BYTES = 16 * FP8_STAGED_COLUMNS * 2; // of a warp
    static constexpr int SETS = ACTIVATION ? 2 : 1;                  // of scales: those of up weights may differ
    static constexpr int SCALE_BYTES = BLOCK_SCALED ? SETS * TOKENS * 4 : 0;
    static constexpr int SCALE_WARPS = BLOCK_SCALED ? TOKENS / FP8_SCALED_ROWS : 0;
    static constexpr int STAGED = STAGES * STAGE_BYTES, SCALES = STAGED + 2 * WARPGROUP / 32 * STAGED_BYTES;
    static constexpr int REST = SCALES + STAGES * SCALE_BYTES;
    static_assert(1024 - 16 + REST + sizeof(Fp8GemmShared<STAGES>) <= 227 << 10, "more than a block can have");
};
