// Sizes and shared memory layout of a block of gemm_fp4_wgmma.
#pragma once
#include "moe_gemm/fp4_prepared.cuh"
#include "moe_gemm/wgmma_layout.cuh"

static_assert(DEPTH == UNIT_K, "");

constexpr int TILES_AHEAD = 8;            // capacity of the ring that passes tile descriptions to the consumer warps
constexpr int FP4_SHARED = 304;           // bytes of Fp4Layout::Shared without the barriers of the stages
constexpr int EIGHT_ROWS = 8 * ROW_BYTES; // bytes of 8 rows of a swizzled tile
constexpr int MOST_BOX_WORDS = 256;       // TMA's limit of a box dimension, in elements of 8 bytes

// Byte offsets from a 1024-byte boundary. The order is: the tokens of all stages, the weights of all stages, staging
// buffers of the epilogue, partial sums (if SPLIT > 1), Shared. SIDES and SPLIT: see gemm_fp4_wgmma.
//
// The tokens of a stage are stored in groups of 8. A group has the first 64 elements along k of its 8 tokens, then the
// next 64 elements of these tokens, and so on. So one TMA box can write all elements of 8 tokens.
//
// STAGES is a multiple of SPLIT, so a given stage is always used by the same warpgroups. This is required because an
// mbarrier wait tests only the parity of the phase. So a warpgroup that uses a stage must wait for every phase of this
// stage.
template <int FORMAT_, int TOKENS_, int UNITS_, int STAGES_, int CLUSTER_, int SIDES_, int SPLIT_, int HALVES_>
struct Fp4Layout {
    static constexpr int FORMAT = FORMAT_, TOKENS = TOKENS_, UNITS = UNITS_, STAGES = STAGES_, CLUSTER = CLUSTER_;
    static constexpr int SIDES = SIDES_, SPLIT = SPLIT_, HALVES = HALVES_;
    static constexpr int GROUPS = SIDES * SPLIT; // consumer warpgroups
    static constexpr int COMPUTE_THREADS = GROUPS * WARPGROUP;
    static constexpr int THREADS = COMPUTE_THREADS + (TOKENS > 128 ? WARPGROUP : 32); // as in gemm_threads
    static constexpr int ROWS = SIDES * 64;                                           // rows of weights of a tile
    static constexpr int EIGHT = UNITS * UNIT_BYTES<FORMAT>; // bytes of 8 rows of weights of a stage
    static constexpr int WEIGHT_BYTES = ROWS / UNIT_ROWS * EIGHT;
    static constexpr int TOKEN_BYTES = UNITS * TOKENS * ROW_BYTES;
    static constexpr int BOX = UNITS == 1 ? box_of(TOKENS) : 8;  // tokens of a TMA box
    static constexpr int STAGING = round_of(TOKENS) * ROW_BYTES; // bytes of a staging buffer; two per side
    static constexpr int SUMS = WARPGROUP * TOKENS / 2 * 4;      // bytes of a warpgroup's sums
    static constexpr int WEIGHTS = STAGES * TOKEN_BYTES, STAGED = WEIGHTS + STAGES * WEIGHT_BYTES;
    static constexpr int EXCHANGE = STAGED + SIDES * 2 * STAGING, REST = EXCHANGE + (SPLIT - 1) * SIDES * SUMS;
    static_assert(WEIGHT_BYTES % 128 == 0 && EIGHT <= MOST_BOX_WORDS * 8 && STAGES % SPLIT == 0 && STAGES > SPLIT, "");
    static_assert(TOKENS <= 128 || (UNITS == 1 && SPLIT == 1), "");

    struct Shared {
        unsigned long long full[STAGES], empty[STAGES];
        unsigned long long tile_full[TILES_AHEAD], tile_empty[TILES_AHEAD];
        unsigned long long sums_full[2], sums_empty[2], skewed; // sums_full, sums_empty: one per side
        WgmmaTile tiles[TILES_AHEAD];                           // written by the producer warp
    };
    static_assert(sizeof(Shared) == 16 * STAGES + FP4_SHARED && SIDES <= 2, "");
};

// Advance `place` by `stages`, at most once around the ring.
template <int STAGES> __device__ __forceinline__ void skip(RingPlace<STAGES>& place, int stages) {
    place.stage += stages;
    if (place.stage >= STAGES) place.stage -= STAGES, ++place.phase;
}

// Return the number of stages of a tile that has `steps` steps along k: a multiple of SPLIT, so that every warpgroup
// has the same number of stages. The last stages may carry no data.
template <int SPLIT> __device__ __forceinline__ int stages_of(int steps) { return (steps + SPLIT - 1) / SPLIT * SPLIT; }
