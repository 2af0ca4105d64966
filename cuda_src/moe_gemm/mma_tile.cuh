// The shared memory of a block of gemm_mma.
#pragma once
#include "common/numeric.cuh"
#include "moe_gemm/params.cuh"

// The shared memory of one step along k: tokens, weights, and scales.
//
// 16-byte chunks are permuted within rows so that what eight lanes read at once, or write, is in different banks.
template <typename T, int FORMAT, int TOKENS, int WEIGHTS, int STEP, bool BLOCK_SCALES> struct MmaTile {
    static constexpr bool FP4 = FORMAT == MXFP4 || FORMAT == NVFP4;
    // Scales are multiplied into the weights; else (4-bit) into sums over 32.
    static constexpr bool FOLDED = FP4 && !(FORMAT == MXFP4 && !IS_BFLOAT16<T>);
    static constexpr int A_LINE = FORMAT == FP8 ? STEP : STEP * 2; // bytes of a row
    static constexpr int B_LINE = FP4 ? STEP / 2 : A_LINE;
    static constexpr int GROUPS = FORMAT == MXFP4 ? STEP / 32 : STEP / 16; // 4-bit: of one scale
    // 4-bit: a row's scales, copied in words from the multiple of 4 before them.
    static constexpr int SLOT_WORDS = GROUPS / 4 + 1, SLOT = SLOT_WORDS * 4;

    static constexpr int B = TOKENS * A_LINE, SCALES = B + WEIGHTS * B_LINE;
    // FP8: of the tokens, then of each 8 weights.
    static constexpr int SCALE_BYTES = FP4 ? WEIGHTS * SLOT : BLOCK_SCALES ? (TOKENS + WEIGHTS / 8) * 4 : 0;
    static constexpr int BYTES = (SCALES + SCALE_BYTES + 127) / 128 * 128;

    static_assert(FP4 || FORMAT == FP8 ? STEP == 128 : STEP == 32 || STEP == 64, "");
    static_assert(!BLOCK_SCALES || FORMAT == FP8, "");

    // Where a chunk lies. With 4 bits a lane has 16 neighbours of 64 if FOLDED, for they have one scale: 2 chunks of a
    // and 8 bytes of b. Else it has 8 neighbours of either 32.
    static __device__ __forceinline__ int a_at(int row, int chunk) {
        if constexpr (FP4)
            chunk ^= (row & 1) * (FOLDED ? 1 : 4);
        else
            chunk ^= A_LINE == 128 ? row & 7 : row >> 1 & 3;
        return row * A_LINE + chunk * 16;
    }

    static __device__ __forceinline__ int b_at(int row, int chunk) {
        if constexpr (FP4)
            chunk ^= FOLDED ? row & 2 : row >> 1 & 3;
        else
            chunk ^= B_LINE == 128 ? row & 7 : row >> 1 & 3;
        return row * B_LINE + chunk * 16;
    }
};
