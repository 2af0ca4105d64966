// MXFP4 weights as gemm_folded_wgmma takes them, for products with FP8 rows, and as prepare_folded.cu makes them.
//
// A row of weights has one exponent E, the largest of its scales 2^e. It is multiplied by 2^(E - 6) at the end; a
// number of 4 bits goes into the products as the e4m3 number nearest to it times 2^(6 + e - E), ties to even. So the
// largest, 6, becomes 384 of at most 448, and what is multiplied is exact while E - e <= 14: then 0.5 is at least 2^-9,
// the smallest e4m3 number. From E - e = 19 on all is 0.
//
// A unit is 8 rows of weights and 128 numbers along k: 512 bytes of numbers, then a word for each row. Units along k
// lie together, then those of the next 8 rows, then the next expert's; past k all numbers are 0.
//
// The numbers are those that each lane of a warp needs as fragments (wgmma_k_major of common/hopper.cuh): lane l has a
// word of row l / 4 for each 32 along k, those of 32 g at byte 256 (g / 2) + 8 l + 4 (g % 2): numbers 4 (l % 4) ... + 3
// of the 32, and the same 16 further. The lower
// three bits of number i of the first four are bits 4 i to 4 i + 2, of the other four bits 16 + 4 i to 16 + 4 i + 2:
// selectors of __byte_perm. Their signs are bit 8 i + 7, and bit 8 i + 3.
//
// The word of a row has a byte for each 32 along k: bits 3 to 7 are E - e, at most 19. In the lower bits of the first
// three there is the byte of E as E8M0: three bits, the next three, the last two.
#pragma once
#include "moe_gemm/params.cuh"

constexpr int FOLDED_ROWS = 8, FOLDED_K = 128, FOLDED_NUMBERS = FOLDED_ROWS * FOLDED_K / 2; // bytes of numbers
constexpr int FOLDED_ROW_NUMBERS = 32;                        // bytes from a row's numbers to the next row's
constexpr int FOLDED_UNIT = FOLDED_NUMBERS + FOLDED_ROWS * 4; // bytes of a unit
constexpr int FOLDED_GROUP = 32;                              // numbers that share a scale
constexpr int FOLDED_DIFFERENCE = 19;                         // the largest E - e
constexpr int FOLDED_SHIFT = 6;                               // the numbers are multiplied by 2^6 beside their scales

// The sign bits of two bytes, four numbers of 4 bits, as bit 8 i + 7 of a word.
__device__ __forceinline__ unsigned spread_signs(unsigned four) {
    return (four & 0x8) << 4 | (four & 0x80) << 8 | (four & 0x800) << 12 | (four & 0x8000) << 16;
}

// The reverse.
__device__ __forceinline__ unsigned gather_signs(unsigned word) {
    return (word >> 4 & 0x8) | (word >> 8 & 0x80) | (word >> 12 & 0x800) | (word >> 16 & 0x8000);
}

// E of a row's word, as E8M0.
__device__ __forceinline__ unsigned folded_exponent(unsigned word) {
    return (word & 7) | (word >> 5 & 0x38) | (word >> 10 & 0xc0);
}

// What is converted: b [experts, n, k / 2], b_scale [experts, n, k / 32], and prepared [experts, n / 8, ceil(k / 128),
// FOLDED_UNIT].
struct FoldedParams {
    unsigned char *b, *b_scale, *prepared;
    int k;
};

constexpr int FOLDED_THREADS = 256, FOLDED_WORDS = FOLDED_NUMBERS / 4;

// The place of word `in` of a unit: the lane that has it, and the 32 along k that it is of.
struct FoldedPlace {
    int lane, group;

    __device__ __forceinline__ explicit FoldedPlace(int in)
        : lane(in % (FOLDED_WORDS / 2) / 2), group(in / (FOLDED_WORDS / 2) * 2 + in % 2) {}
};
