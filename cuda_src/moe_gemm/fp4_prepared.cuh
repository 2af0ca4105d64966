// Layout of the prepared 4-bit weights of gemm_fp4_wgmma. prepare.cu writes it.
//
// A unit is 8 rows of weights and 64 elements along k: 256 bytes of 4-bit elements, then the scales of the rows, one
// byte each (MXFP4: 2 per row, NVFP4: 4 per row). Units are ordered by k, then by rows, then by expert. Elements and
// scales past k are 0.
//
// The elements are stored in the order of A fragments (common/mma.cuh). Lane l reads 8 bytes of row `l / 4`: one 32-bit
// word for each 32 elements along k. A word packs four pairs of neighbouring elements; pair i starts at element
// `16 * (i / 2) + 8 * (i % 2) + 2 * (l % 4)`.
//
// Unpacking moves the sign of an element to bit 15 of 16 bits, and its other three bits to bits 6 to 8. Read as
// bfloat16, these 16 bits are the element times 2^-126. This also holds if the element is subnormal in e2m1. One shift
// or rotation and a mask unpack each of the pairs 0 to 2. Pair 3 uses the remaining bits of the word. No single shift
// aligns them, so one bit of each element is rotated separately. The table shows the bits of the word that hold each
// element (magnitude, sign):
//
//           first element        second element
//   pair 0: bits 0 to 2, 9       16 to 18, 25       shifted left by 6
//   pair 1: bits 4 to 6, 13      20 to 22, 29       shifted left by 2
//   pair 2: bits 26 to 28, 3     10 to 12, 19       rotated left by 12
//   pair 3: bits 7, 8, 15; 30    23, 24, 31; 14     in place; the last bit rotated left by 8
//
// A stored scale becomes a 16-bit factor by the addition of a constant to its exponent (Fp4Factors). An MXFP4 scale is
// stored as its E8M0 byte, capped at 2^34; 2^34 becomes an infinite factor. An NVFP4 scale is stored with 5 exponent
// bits and 3 mantissa bits, so that no positive e4m3 scale is subnormal in this form. If the scale of NVFP4 weights is
// 0, the weights are stored as 0. If the scale is negative, the weights are stored with the opposite sign, and the
// scale without its sign.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/numeric.cuh"
#include "moe_gemm/params.cuh"

constexpr int UNIT_ROWS = 8, UNIT_K = 64;
constexpr int ROW_NUMBERS = UNIT_K / 2, UNIT_NUMBERS = UNIT_ROWS * ROW_NUMBERS; // bytes of elements of a row, of a unit
constexpr int UNIT_MXFP4 = 272, UNIT_NVFP4 = 288;                               // bytes of a unit
constexpr int LARGEST_E8M0 = 161;                                               // 2^34

template <int FORMAT> constexpr int UNIT_BYTES = FORMAT == MXFP4 ? UNIT_MXFP4 : UNIT_NVFP4;
template <int FORMAT> constexpr int UNIT_SCALES = FORMAT == MXFP4 ? 2 : 4; // bytes per row of a unit

constexpr unsigned PAIR_BITS = 0x81c081c0; // the bits that an unpacked pair may have set

__device__ __forceinline__ unsigned rotate_left(unsigned word, int by) { return __funnelshift_l(word, word, by); }

// Unpack a word to four pairs of bfloat16. Each element is multiplied by 2^-126.
__device__ __forceinline__ void unpack_pairs(unsigned (&pairs)[4], unsigned word) {
    pairs[0] = word << 6 & PAIR_BITS;
    pairs[1] = word << 2 & PAIR_BITS;
    pairs[2] = rotate_left(word, 12) & PAIR_BITS;
    pairs[3] = (word & 0x81808180) | (rotate_left(word, 8) & 0x00400040);
}

// Inverse of unpack_pairs.
__device__ __forceinline__ unsigned pack_pairs(const unsigned (&pairs)[4]) {
    return pairs[0] >> 6 | pairs[1] >> 2 | rotate_left(pairs[2], 20) | (pairs[3] & 0x81808180) |
           rotate_left(pairs[3] & 0x00400040, 24);
}
