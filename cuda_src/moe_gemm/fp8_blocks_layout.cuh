// Sizes, shared memory layout and tiles of a block of gemm_fp8_blocks.
#pragma once
#include "moe_gemm/fp8_tiles.cuh"

// Arguments of gemm_fp8_blocks. `out` is e4m3 [rows, n / 2].
struct Fp8BlocksParams : MappedGemmParams {
    float* out_scale; // [rows, n / 256]
    float smallest;   // a scale is max(largest magnitude, smallest) / 448
};

constexpr int FP8_PAD = 16; // padding in bytes after a staged row, against bank conflicts

// Byte offsets from a 1024-byte boundary. The order is: stages (rows, gate weights, up weights), staging buffers of the
// warps, scales, Fp8Shared.
template <int CLUSTER_, int ACTIVATION_> struct Fp8BlocksLayout {
    static constexpr int TOKENS = 128, CLUSTER = CLUSTER_, STAGES = 4, ACTIVATION = ACTIVATION_;
    static constexpr bool GATED = true;
    static_assert(has_halves(ACTIVATION) && ACTIVATION < FUNCTIONS, "gates and ups come in halves, without biases");
    static constexpr int TAIL = 0;
    static constexpr bool SHARES_ROWS = false; // the blocks of a cluster share weights and have neighbouring rows
    static constexpr int TILE_TOKENS = TOKENS * CLUSTER, OUT_COLUMNS = FP8_COLUMNS;
    static constexpr bool DEALS_ODD = true; // odd tiles are distributed separately (Fp8Tiles)
    static constexpr int ROW_BYTES = TOKENS * FP8_K, STAGE_BYTES = ROW_BYTES + 2 * FP8_WEIGHT_BYTES;
    static constexpr int STAGED_PITCH = OUT_COLUMNS + FP8_PAD, STAGED_BYTES = 16 * STAGED_PITCH; // bytes: row; warp
    static constexpr int SCALED_ROWS = TOKENS;
    static constexpr int SETS = 2, SCALE_BYTES = SETS * TOKENS * 4; // SETS: gates and ups have separate scales
    static constexpr int STAGED = STAGES * STAGE_BYTES, SCALES = STAGED + 2 * WARPGROUP / 32 * STAGED_BYTES;
    static constexpr int REST = SCALES + STAGES * SCALE_BYTES;
    using Shared = Fp8Shared<STAGES>;
};

// Tiles of a block. The blocks of a cluster divide the rows of each of the cluster's tiles. If a block gets none of the
// rows of a tile, `next` returns a tile of AT_LEAST rows for this block. The TMA producer uses AT_LEAST = 0. The scale
// producer uses AT_LEAST = 1, because it clamps row indices to the last row, so there must be one.
template <class Layout, int AT_LEAST> struct Fp8BlocksTiles : Fp8Tiles<Layout> {
    using Fp8Tiles<Layout>::Fp8Tiles;

    __device__ __forceinline__ bool next(Fp8Tile& tile) {
        if (!Fp8Tiles<Layout>::next(tile)) return false;
        if constexpr (Layout::CLUSTER > 1) {
            // Each block gets half of the boxes of 64 rows, so that both blocks share the short last tile of a group.
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
