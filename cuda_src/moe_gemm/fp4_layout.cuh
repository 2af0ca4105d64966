// Shared memory layout of gemm_fp4_wgmma.
#pragma once
#include "moe_gemm/fp4_prepared.cuh"
#include "moe_gemm/parts.cuh"
#include "moe_gemm/wgmma_layout.cuh"

static_assert(DEPTH == UNIT_K, "");

constexpr int TILES_AHEAD = 8;                  // capacity of the ring of tile descriptions; even (add_parts)
constexpr int FP4_SHARED = 304;                 // bytes of Fp4Layout::Shared without the barriers of the stages
constexpr int EIGHT_ROWS_BYTES = 8 * ROW_BYTES; // 8 rows of a swizzled tile
constexpr int MAX_BOX_ELEMENTS = 256;           // TMA's limit of a box dimension

// Shared memory, as byte offsets from a 1024-byte boundary, in this order: tokens and weights of all stages, staging
// buffers, partial sums (if PARTS > 1), Shared.
//
// The tokens of a stage are in groups of 8, so that one TMA box can write all elements of 8 tokens: 64 elements along k
// of the 8 tokens, then the next 64, and so on.
template <int FORMAT_, int TOKENS_, int UNITS_, int STAGES_, int CLUSTER_, int SIDES_, int HALVES_, int PARTS_>
struct Fp4Layout {
    static constexpr int FORMAT = FORMAT_, TOKENS = TOKENS_, UNITS = UNITS_, STAGES = STAGES_, CLUSTER = CLUSTER_;
    static constexpr int SIDES = SIDES_, HALVES = HALVES_, PARTS = PARTS_;
    static constexpr int BLOCKS = CLUSTER * PARTS; // of a cluster
    static constexpr int COMPUTE_THREADS = SIDES * WARPGROUP;
    static constexpr int THREADS = COMPUTE_THREADS + (TOKENS > 128 ? WARPGROUP : 32);
    static constexpr int ROWS = SIDES * 64;
    static constexpr int UNITS_BYTES = UNITS * UNIT_BYTES<FORMAT>; // 8 rows of weights of a stage
    static constexpr int WEIGHT_BYTES = ROWS / UNIT_ROWS * UNITS_BYTES;
    static constexpr int TOKEN_BYTES = UNITS * TOKENS * ROW_BYTES;
    static constexpr int BOX = UNITS == 1 ? box_of(TOKENS) : 8;  // tokens of a TMA box
    static constexpr int STAGING = round_of(TOKENS) * ROW_BYTES; // two staging buffers per side
    static constexpr int SUMS = PARTS_BYTES<PARTS, TOKENS / 2>;  // of a side
    static constexpr int WEIGHTS = STAGES * TOKEN_BYTES, STAGED = WEIGHTS + STAGES * WEIGHT_BYTES;
    static constexpr int EXCHANGE = STAGED + SIDES * 2 * STAGING, SHARED_OFFSET = EXCHANGE + SIDES * SUMS;
    static_assert(WEIGHT_BYTES % 128 == 0 && UNITS_BYTES <= MAX_BOX_ELEMENTS * 8 && STAGES > 1, "");
    static_assert(TOKENS <= 128 || (UNITS == 1 && PARTS == 1), "");
    static_assert(CLUSTER == 1 || PARTS == 1, "");

    struct Shared {
        unsigned long long full[STAGES], empty[STAGES];
        unsigned long long tile_full[TILES_AHEAD], tile_empty[TILES_AHEAD];
        PartBarriers parts[2]; // of each side
        unsigned long long skewed;
        WgmmaTile tiles[TILES_AHEAD];
    };
    static_assert(sizeof(Shared) == 16 * STAGES + FP4_SHARED && SIDES <= 2, "");
};

// The steps along k of a tile that this block multiplies, a stage for each: `count` steps from step `first` on. The blocks
// that divide k have contiguous ranges, in the order of the blocks. The host ensures that `count` is not 0.
struct Steps {
    int first, count;
};

template <class Layout> __device__ __forceinline__ Steps steps_of(int k) {
    const int all = (k + Layout::UNITS * DEPTH - 1) / (Layout::UNITS * DEPTH), rank = cluster_rank<Layout::PARTS>();
    const int first = all * rank / Layout::PARTS;
    return {first, all * (rank + 1) / Layout::PARTS - first};
}
