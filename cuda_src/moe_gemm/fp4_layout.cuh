// Sizes and shared memory of a block of gemm_fp4_wgmma.
#pragma once
#include "moe_gemm/fp4_prepared.cuh"
#include "moe_gemm/wgmma_layout.cuh"

static_assert(DEPTH == UNIT_K, "");

constexpr int TILES_AHEAD = 8;            // tiles that the loading warp may have found and the others not yet summed
constexpr int FP4_SHARED = 304;           // bytes of Fp4Layout::Shared but those of stages
constexpr int EIGHT_ROWS = 8 * ROW_BYTES; // bytes of 8 rows of a swizzled tile
constexpr int MOST_BOX_WORDS = 256;       // of 8 bytes: TMA's limit of a box along a dimension

// Places in bytes, from a multiple of 1024 on: the ring of tokens, that of weights, room for results, room for sums,
// Shared. Tokens of a stage: 8 tokens of its first 64 numbers along k, of the next 64, ..., then the next 8 tokens, so
// that one box of TMA has all numbers of 8 tokens. STAGES is a multiple of SPLIT, so that a stage is always of the same
// warpgroups: only those that have waited for a stage to be full may wait for its next time.
template <int FORMAT_, int TOKENS_, int UNITS_, int STAGES_, int CLUSTER_, int SIDES_, int SPLIT_, int HALVES_>
struct Fp4Layout {
    static constexpr int FORMAT = FORMAT_, TOKENS = TOKENS_, UNITS = UNITS_, STAGES = STAGES_, CLUSTER = CLUSTER_;
    static constexpr int SIDES = SIDES_, SPLIT = SPLIT_, HALVES = HALVES_;
    static constexpr int GROUPS = SIDES * SPLIT; // warpgroups that multiply
    static constexpr int COMPUTE_THREADS = GROUPS * WARPGROUP;
    static constexpr int THREADS = COMPUTE_THREADS + (TOKENS > 128 ? WARPGROUP : 32); // as gemm_threads
    static constexpr int ROWS = SIDES * 64;                                           // of weights of a tile
    static constexpr int EIGHT = UNITS * UNIT_BYTES<FORMAT>; // bytes of 8 rows of weights of a stage
    static constexpr int WEIGHT_BYTES = ROWS / UNIT_ROWS * EIGHT;
    static constexpr int TOKEN_BYTES = UNITS * TOKENS * ROW_BYTES;
    static constexpr int BOX = UNITS == 1 ? box_of(TOKENS) : 8;  // tokens of a box
    static constexpr int STAGING = round_of(TOKENS) * ROW_BYTES; // of a round; a warpgroup that stores has room for two
    static constexpr int SUMS = WARPGROUP * TOKENS / 2 * 4;      // bytes of a warpgroup's sums
    static constexpr int WEIGHTS = STAGES * TOKEN_BYTES, STAGED = WEIGHTS + STAGES * WEIGHT_BYTES;
    static constexpr int EXCHANGE = STAGED + SIDES * 2 * STAGING, REST = EXCHANGE + (SPLIT - 1) * SIDES * SUMS;
    static_assert(WEIGHT_BYTES % 128 == 0 && EIGHT <= MOST_BOX_WORDS * 8 && STAGES % SPLIT == 0 && STAGES > SPLIT, "");
    static_assert(TOKENS <= 128 || (UNITS == 1 && SPLIT == 1), "");

    struct Shared {
        unsigned long long full[STAGES], empty[STAGES];
        unsigned long long tile_full[TILES_AHEAD], tile_empty[TILES_AHEAD];
        unsigned long long sums_full[2], sums_empty[2], skewed; // sums_full, sums_empty: of each side
        WgmmaTile tiles[TILES_AHEAD];                           // those that the loading warp has found
    };
    static_assert(sizeof(Shared) == 16 * STAGES + FP4_SHARED && SIDES <= 2, "");
};

// Advance a place by at most a round of the ring.
template <int STAGES> __device__ __forceinline__ void skip(RingPlace<STAGES>& place, int stages) {
    place.stage += stages;
    if (place.stage >= STAGES) place.stage -= STAGES, ++place.phase;
}

// Stages of a tile whose k takes `steps` of them: as many for each of SPLIT warpgroups, so that the last ones may stay
// empty.
template <int SPLIT> __device__ __forceinline__ int stages_of(int steps) { return (steps + SPLIT - 1) / SPLIT * SPLIT; }
