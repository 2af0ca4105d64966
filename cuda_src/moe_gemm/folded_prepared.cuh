// Layout of the prepared MXFP4 weights of gemm_folded_wgmma (FP8 activations). prepare_folded.cu writes it.
//
// Every group of 32 elements along k of a row of weights has a scale 2^e. E is the largest e of the row. The kernel
// "folds" the scales into the elements: a 4-bit element x enters the MMA as `x * 2^(6 + e - E)`, rounded to the nearest
// e4m3 value (ties to even), and the epilogue multiplies the sums of the row by 2^(E - 6). The largest magnitude, 6,
// becomes at most 384; the e4m3 maximum is 448. The conversion is exact if `E - e` is at most 14, because 0.5 then
// becomes at least 2^-9, the smallest positive e4m3 value. If `E - e` is 19 or more, every element becomes 0.
//
// A unit is 8 rows of weights and 128 elements along k: 512 bytes of 4-bit elements, then one 32-bit scale word per
// row. Units are ordered by k, then by rows, then by expert. Elements past k are 0.
//
// The elements are stored in the order of A fragments (wgmma_k_major in common/hopper.cuh). Lane l reads row `l / 4`:
// one 32-bit word for each group `g` (0 to 3) of 32 elements along k, at byte `256 * (g / 2) + 8 * l + 4 * (g % 2)` of
// the unit. The word holds elements `m = 4 * (l % 4) + i` of the group (i = 0 to 3) and elements `m + 16`:
//
//                   magnitude (a __byte_perm selector)   sign
//   element m       bits 4 i to 4 i + 2                  bit 8 i + 7
//   element m + 16  bits 16 + 4 i to 16 + 4 i + 2        bit 8 i + 3
//
// The scale word of a row has one byte for each group of 32 elements. Bits 3 to 7 of the byte are `E - e` of the group,
// capped at 19. Bits 0 to 2 of the first three bytes hold E as an E8M0 byte: byte 0 has bits 0 to 2 of E, byte 1 has
// bits 3 to 5, byte 2 has bits 6 and 7.
#pragma once
#include "moe_gemm/params.cuh"

constexpr int FOLDED_ROWS = 8, FOLDED_K = 128, FOLDED_NUMBERS = FOLDED_ROWS * FOLDED_K / 2; // bytes of elements
constexpr int FOLDED_ROW_NUMBERS = 32;                                                      // bytes of elements per row
constexpr int FOLDED_UNIT = FOLDED_NUMBERS + FOLDED_ROWS * 4;                               // bytes with scale words
constexpr int FOLDED_GROUP = 32;      // elements that share a scale
constexpr int FOLDED_DIFFERENCE = 19; // cap of `E - e`; at this difference every element becomes 0
constexpr int FOLDED_SHIFT = 6;       // the e4m3 elements are scaled by 2^6

// Return the sign bits of four packed 4-bit elements. The sign of element i becomes bit `8 * i + 7` of the result.
__device__ __forceinline__ unsigned spread_signs(unsigned four) {
    return (four & 0x8) << 4 | (four & 0x80) << 8 | (four & 0x800) << 12 | (four & 0x8000) << 16;
}

// Inverse of spread_signs.
__device__ __forceinline__ unsigned gather_signs(unsigned word) {
    return (word >> 4 & 0x8) | (word >> 8 & 0x80) | (word >> 12 & 0x800) | (word >> 16 & 0x8000);
}

// Return E, as an E8M0 byte, from the scale word of a row.
__device__ __forceinline__ unsigned folded_exponent(unsigned word) {
    return (word & 7) | (word >> 5 & 0x38) | (word >> 10 & 0xc0);
}

// Arguments of prepare_folded and restore_folded: b [experts, n, k / 2], b_scale [experts, n, k / 32], prepared
// [experts, n / 8, ceil(k / 128), FOLDED_UNIT].
struct FoldedParams {
    unsigned char *b, *b_scale, *prepared;
    int k;
};

constexpr int FOLDED_THREADS = 256, FOLDED_WORDS = FOLDED_NUMBERS / 4;

// Position of a 32-bit word of elements in a unit. `lane`: the lane of gemm_folded_wgmma that reads the word. `group`:
// the index of the word's 32 elements along k, 0 to 3. The constructor's argument `in` is the index of the word in the
// unit.
struct FoldedPlace {
    int lane, group;

    __device__ __forceinline__ explicit FoldedPlace(int in)
        : lane(in % (FOLDED_WORDS / 2) / 2), group(in / (FOLDED_WORDS / 2) * 2 + in % 2) {}
};
