// Layout of prepared MXFP4 weights for FP8 activations (gemm_folded_wgmma). prepare_folded.cu writes it.
//
// Every 32 elements along k of a row of weights have a scale 2^e. E is the largest e of the row. The scales are folded
// into the elements: the MMA multiplies a 4-bit element x as `x * 2^(6 + e - E)`, rounded to e4m3, and the epilogue
// multiplies the sums of the row by 2^(E - 6). The largest magnitude, 6, becomes at most 384 (e4m3 maximum: 448). If
// `E - e` is at most 14, the conversion is exact: 0.5 becomes at least 2^-9, the smallest e4m3 value. If `E - e` is 19
// or more, every element becomes 0.
//
// A unit is 8 rows of weights and 128 elements along k: 512 bytes of 4-bit elements, then a 32-bit scale word per row.
// Units are ordered by expert, then by rows, then along k. Elements past k are 0.
//
// Elements have the order of A fragments (wgmma_k_major in common/hopper.cuh). Lane l reads row `l / 4`. For each group
// g (0 to 3) of 32 elements along k, it reads the 32-bit word at byte `256 * (g / 2) + 8 * l + 4 * (g % 2)` of the
// unit. The word holds elements `m = 4 * (l % 4) + i` (i = 0 to 3) and `m + 16` of the group:
//
//                   magnitude (a __byte_perm selector)   sign
//   element m       bits 4 i to 4 i + 2                  bit 8 i + 7
//   element m + 16  bits 16 + 4 i to 16 + 4 i + 2        bit 8 i + 3
//
// Byte g of a scale word is for group g: bits 3 to 7 are `E - e`, capped at 19. Bits 0 to 2 of bytes 0, 1 and 2 are
// bits 0 to 2, 3 to 5, and 6 to 7 of E as an E8M0 byte.
#pragma once
#include "moe_gemm/params.cuh"

constexpr int FOLDED_ROWS = 8, FOLDED_K = 128, FOLDED_ELEMENT_BYTES = FOLDED_ROWS * FOLDED_K / 2; // of a unit
constexpr int FOLDED_ROW_BYTES = 32;                                                              // of a row of a unit
constexpr int FOLDED_UNIT_BYTES = FOLDED_ELEMENT_BYTES + FOLDED_ROWS * 4; // with the scale words
constexpr int FOLDED_GROUP = 32;                                          // elements that share a scale
constexpr int FOLDED_MAX_DIFFERENCE = 19; // cap of `E - e`; every element then becomes 0
constexpr int FOLDED_SHIFT = 6;           // e4m3 elements are scaled by 2^6

// `four` holds four 4-bit elements. Move the sign of element i to bit `8 * i + 7`.
__device__ __forceinline__ unsigned spread_signs(unsigned four) {
    return (four & 0x8) << 4 | (four & 0x80) << 8 | (four & 0x800) << 12 | (four & 0x8000) << 16;
}

// Inverse of spread_signs.
__device__ __forceinline__ unsigned gather_signs(unsigned packed) {
    return (packed >> 4 & 0x8) | (packed >> 8 & 0x80) | (packed >> 12 & 0x800) | (packed >> 16 & 0x8000);
}

// Return E, as an E8M0 byte, from a row's scale word.
__device__ __forceinline__ unsigned folded_exponent(unsigned scale_word) {
    return (scale_word & 7) | (scale_word >> 5 & 0x38) | (scale_word >> 10 & 0xc0);
}

// b [experts, n, k / 2], b_scale [experts, n, k / 32], prepared [experts, n / 8, ceil(k / 128), FOLDED_UNIT_BYTES].
struct FoldedParams {
    unsigned char *b, *b_scale, *prepared;
    int k;
};

constexpr int FOLDED_THREADS = 256, FOLDED_WORDS = FOLDED_ELEMENT_BYTES / 4;

// The position of 32-bit word `unit_word` of a unit in the A fragments of gemm_folded_wgmma. `lane`: the lane that
// reads the word. `group`: the word's group of 32 elements along k.
struct FoldedPlace {
    int lane, group;

    __device__ __forceinline__ explicit FoldedPlace(int unit_word)
        : lane(unit_word % (FOLDED_WORDS / 2) / 2), group(unit_word / (FOLDED_WORDS / 2) * 2 + unit_word % 2) {}
};
