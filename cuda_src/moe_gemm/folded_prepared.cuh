// Layout of the prepared MXFP4 weights of gemm_folded_wgmma (FP8 activations). prepare_folded.cu writes it.
//
// A row of weights has one exponent E: the largest exponent e among its group scales 2^e. A 4-bit number x of a group
// enters the MMA as the e4m3 number nearest to x * 2^(6 + e - E), ties to even. The epilogue multiplies the sums of the
// row by 2^(E - 6). The largest magnitude, 6, becomes at most 384, and e4m3 reaches 448. The conversion is exact while
// E - e <= 14: 0.5 then becomes at least 2^-9, the smallest e4m3 number. If E - e >= 19, every number becomes 0.
//
// A unit is 8 rows of weights and 128 numbers along k: 512 bytes of numbers, then a 4-byte word of scales for each row.
// Units are ordered by k, then by rows, then by expert. Numbers past k are 0.
//
// The numbers are in the order of A fragments (wgmma_k_major in common/hopper.cuh). Lane l has row l / 4, and one
// 32-bit word for each group g of 32 numbers along k, at byte 256 (g / 2) + 8 l + 4 (g % 2). The word holds numbers
// m = 4 (l % 4) + i of the group (i = 0 to 3), and numbers m + 16:
//
//                  magnitude, a selector of __byte_perm   sign
//   number m       bits 4 i to 4 i + 2                    bit 8 i + 7
//   number m + 16  bits 16 + 4 i to 16 + 4 i + 2          bit 8 i + 3
//
// The scale word of a row has one byte for each group of 32 numbers. Bits 3 to 7 of a byte are E - e, capped at 19.
// Bits 0 to 2 of the first three bytes hold E as an E8M0 byte: its bits 0 to 2, then bits 3 to 5, then bits 6 and 7.
#pragma once
#include "moe_gemm/params.cuh"

constexpr int FOLDED_ROWS = 8, FOLDED_K = 128, FOLDED_NUMBERS = FOLDED_ROWS * FOLDED_K / 2; // bytes of its numbers
constexpr int FOLDED_ROW_NUMBERS = 32;                                                      // bytes of numbers of a row
constexpr int FOLDED_UNIT = FOLDED_NUMBERS + FOLDED_ROWS * 4;                               // bytes of a unit
constexpr int FOLDED_GROUP = 32;      // numbers that share a scale
constexpr int FOLDED_DIFFERENCE = 19; // cap of E - e; at this difference every number becomes 0
constexpr int FOLDED_SHIFT = 6;       // the e4m3 numbers carry a factor of 2^6

// Return the sign bits of four packed 4-bit numbers: the sign of number i becomes bit `8 * i + 7` of the result.
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

// Position of word `in` of a unit: the lane of the GEMM that reads the word, and the word's group of 32 numbers along
// k.
struct FoldedPlace {
    int lane, group;

    __device__ __forceinline__ explicit FoldedPlace(int in)
        : lane(in % (FOLDED_WORDS / 2) / 2), group(in / (FOLDED_WORDS / 2) * 2 + in % 2) {}
};
