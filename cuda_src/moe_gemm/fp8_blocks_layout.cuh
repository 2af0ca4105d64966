// Shared memory layout and tiles of gemm_fp8_blocks.
#pragma once
#include "moe_gemm/fp8_tiles.cuh"

// `out` is e4m3 [rows, n / 2].
struct Fp8BlocksParams : MappedGemmParams {
    float* out_scale; // [rows, n / 256]
    float smallest;   // a scale is max(largest magnitude, smallest) / 448
};

constexpr int FP8_PAD = 16; // bytes after a staged row, against bank conflicts

// Shared memory, as byte offsets from a 1024-byte boundary, in this order: stages (rows, gates, ups), staging buffers,
// scales, Fp8Shared.
template <int CLUSTER_, int ACTIVATION_> struct Fp8BlocksLayout {
    static constexpr int TOKENS = 128, CLUSTER = CLUSTER_, STAGES = 4, ACTIVATION = ACTIVATION_;
    static constexpr bool GATED = true;
    static_assert(has_halves(ACTIVATION) && ACTIVATION < FUNCTIONS, "gates and ups come in halves, without biases");
    static constexpr int TAIL = 0;
    static constexpr bool SHARES_ROWS = false;
    static constexpr int TILE_TOKENS = TOKENS * CLUSTER, OUT_COLUMNS = FP8_COLUMNS;
    static constexpr bool SEPARATE_ODD = true;
    static constexpr int ROW_BYTES = TOKENS * FP8_K, STAGE_BYTES = ROW_BYTES + 2 * FP8_WEIGHT_BYTES;
    static constexpr int STAGED_PITCH = OUT_COLUMNS + FP8_PAD,
                         STAGED_BYTES = 16 * STAGED_PITCH; // bytes of a row, of a warp
    static constexpr int SCALED_ROWS = TOKENS;
    static constexpr int SCALE_SETS = 2, SCALE_BYTES = SCALE_SETS * TOKENS * 4;
    static constexpr int STAGED = STAGES * STAGE_BYTES, SCALES = STAGED + 2 * WARPGROUP / 32 * STAGED_BYTES;
    static constexpr int SHARED_OFFSET = SCALES + STAGES * SCALE_BYTES;
    using Shared = Fp8Shared<STAGES>;
};

// The blocks of a cluster divide the rows of its tiles. If a block's share is empty, its `z` (number of rows) is
// MIN_ROWS: 0 for the TMA producer, and 1 for the scale producer, which clamps row indices to the last row and so needs
// one.
template <class Layout, int MIN_ROWS> struct Fp8BlocksTiles : Fp8Tiles<Layout> {
    using Fp8Tiles<Layout>::Fp8Tiles;

    __device__ __forceinline__ bool next(Fp8Tile& tile) {
        if (!Fp8Tiles<Layout>::next(tile)) return false;
        if constexpr (Layout::CLUSTER > 1) {
            // Each block gets half of the tile's boxes of 64 rows, so that both blocks share the short last tile of a
            // group.
            const int boxes = (tile.z + FP8_BOX - 1) / FP8_BOX, first = (boxes + 1) / 2 * FP8_BOX;
            if (cluster_rank<Layout::CLUSTER>() == 0) {
                tile.z = min(tile.z, first);
            } else if (tile.z > first) {
                tile.y += first, tile.z -= first;
            } else {
                tile.z = MIN_ROWS;
            }
        }
        return true;
    }
};
