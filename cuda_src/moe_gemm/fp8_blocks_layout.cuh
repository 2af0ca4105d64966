// Sizes, shared memory and tiles of a block of gemm_fp8_blocks.
#pragma once
#include "moe_gemm/fp8_tiles.cuh"

// The arguments of gemm_fp8_blocks. `out` has e4m3: [rows, n / 2].
struct Fp8BlocksParams : MappedGemmParams {
    float* out_scale; // [rows, n / 256]
    float smallest;   // the least of the largest magnitudes that scales are made of
};

constexpr int FP8_PAD = 16; // bytes after each staged row, so that 8 rows' chunks are in different banks

// Sizes in bytes, and places from a multiple of 1024 on: stages of rows, gates and ups, staging rooms, scales,
// Fp8Shared.
template <int CLUSTER_, int ACTIVATION_> struct Fp8BlocksLayout {
    static constexpr int TOKENS = 128, CLUSTER = CLUSTER_, STAGES = 4, ACTIVATION = ACTIVATION_;
    static constexpr bool GATED = true;
    static_assert(has_halves(ACTIVATION) && ACTIVATION < FUNCTIONS, "gates and ups come in halves, without biases");
    static constexpr int TAIL = 0;
    static constexpr bool SHARES_ROWS = false; // the blocks of a cluster have the same weights, and neighbouring rows
    static constexpr int TILE_TOKENS = TOKENS * CLUSTER, OUT_COLUMNS = FP8_COLUMNS;
    static constexpr bool DEALS_ODD = true; // odd tiles have a deal of their own (Fp8Tiles)
    static constexpr int ROW_BYTES = TOKENS * FP8_K, STAGE_BYTES = ROW_BYTES + 2 * FP8_WEIGHT_BYTES;
    static constexpr int STAGED_PITCH = OUT_COLUMNS + FP8_PAD, STAGED_BYTES = 16 * STAGED_PITCH; // of a row, of a warp
    static constexpr int SCALED_ROWS = TOKENS;
    static constexpr int SETS = 2, SCALE_BYTES = SETS * TOKENS * 4; // gates and ups have their own scales
    static constexpr int STAGED = STAGES * STAGE_BYTES, SCALES = STAGED + 2 * WARPGROUP / 32 * STAGED_BYTES;
    static constexpr int REST = SCALES + STAGES * SCALE_BYTES;
    using Shared = Fp8Shared<STAGES>;
};

// The tiles of a block: those of its cluster, of whose rows it has a part. A block may be left without rows (z is 0).
// Then, and for the warps that load scales always (AT_LEAST 1), it counts as having so many.
template <class Layout, int AT_LEAST> struct Fp8BlocksTiles : Fp8Tiles<Layout> {
    using Fp8Tiles<Layout>::Fp8Tiles;

    __device__ __forceinline__ bool next(Fp8Tile& tile) {
        if (!Fp8Tiles<Layout>::next(tile)) return false;
        if constexpr (Layout::CLUSTER > 1) {
            // Half of the boxes of 64 rows for each, so that the last rows of a group are not left to one block.
            const int boxes = (tile.z + FP8_BOX - 1) / FP8_BOX, first = (boxes + 1) / 2 * FP8_BOX;
            if (cluster_rank<Layout::CLUSTER>() == 0) {
                tile.z = min(tile.z, first);
            } else if (tile.z > first) {
                tile.y += first, tile.z -= first;
            } else {
                tile.z = AT_LEAST;
            }
        }
        return true;
    }
};
