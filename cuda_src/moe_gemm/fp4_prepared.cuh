// Weights of 4 bits as gemm_fp4_wgmma takes them, and as prepare.cu makes them.
//
// A unit is 8 rows of weights and 64 numbers along k: 256 bytes of numbers, then the scales of its rows, a byte each
// (MXFP4: 2 of a row, NVFP4: 4). Units along k lie together, then those of the next 8 rows, then the next expert's;
// past k all is 0.
//
// The numbers are those that each lane of a warp needs as fragments (common/mma.cuh): lane l has 8 bytes of row l / 4,
// a word for each 32 along k. A word has four pairs: pair i is of numbers 16 (i / 2) + 8 (i % 2) + 2 (l % 4) and the
// next. Of a number as 16 bits bit 15 is its sign, and bits 6, 7 and 8 are the other three of e2m1, so that as bfloat16
// it is 2^-126 times the number, subnormal ones included. No single shift for each of the four pairs covers a word
// without overlap; for pairs 0 to 2 one does, and pair 3 takes what is left, with one bit from elsewhere:
//
//            first number         second number
//   pair 0: bits 0 to 2, 9        16 to 18, 25       shifted to the left by 6
//   pair 1: bits 4 to 6, 13       20 to 22, 29       shifted by 2
//   pair 2: bits 26 to 28, 3      10 to 12, 19       rotated by 12
//   pair 3: bits 7, 8, 15; 30     23, 24, 31; 14     as they are; the last bit rotated by 8
//
// Scales are such that adding a constant to their exponent makes a 16-bit number of them. MXFP4: E8M0, at most 2^34,
// which becomes infinite. NVFP4: 5 bits of exponent and 3 of mantissa, which hold all positive numbers of e4m3 as normal
// ones. Weights whose scale is 0 are 0, and those whose scale is negative have the other sign.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/numeric.cuh"
#include "moe_gemm/params.cuh"

constexpr int UNIT_ROWS = 8, UNIT_K = 64;
constexpr int ROW_NUMBERS = UNIT_K / 2, UNIT_NUMBERS = UNIT_ROWS * ROW_NUMBERS; // bytes of numbers
constexpr int UNIT_MXFP4 = 272, UNIT_NVFP4 = 288;                               // bytes of a unit
constexpr int LARGEST_E8M0 = 161;

template <int FORMAT> constexpr int UNIT_BYTES = FORMAT == MXFP4 ? UNIT_MXFP4 : UNIT_NVFP4;
template <int FORMAT> constexpr int UNIT_SCALES = FORMAT == MXFP4 ? 2 : 4; // of a row

constexpr unsigned PAIR_BITS = 0x81c081c0; // of pairs as bfloat16

__device__ __forceinline__ unsigned rotate_left(unsigned word, int by) { return __funnelshift_l(word, word, by); }

// The pairs of a word as bfloat16, times 2^-126.
__device__ __forceinline__ void unpack_pairs(unsigned (&pairs)[4], unsigned word) {
    pairs[0] = word << 6 & PAIR_BITS;
    pairs[1] = word << 2 & PAIR_BITS;
    pairs[2] = rotate_left(word, 12) & PAIR_BITS;
    pairs[3] = (word & 0x81808180) | (rotate_left(word, 8) & 0x00400040);
}

// The reverse.
__device__ __forceinline__ unsigned pack_pairs(const unsigned (&pairs)[4]) {
    return pairs[0] >> 6 | pairs[1] >> 2 | rotate_left(pairs[2], 20) | (pairs[3] & 0x81808180) |
           rotate_left(pairs[3] & 0x00400040, 24);
}
