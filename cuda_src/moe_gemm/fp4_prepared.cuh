// Layout of the prepared 4-bit weights of gemm_fp4_wgmma. prepare.cu writes it.
//
// A unit is 8 rows of weights and 64 elements along k: 256 bytes of 4-bit elements, then the scales of the rows, one
// byte each (MXFP4: 2 per row, NVFP4: 4 per row). Units are ordered by expert, then by rows, then along k. Elements and
// scales past k are 0.
//
// Elements have the order of A fragments (common/mma.cuh). Lane l reads row `l / 4`: a 32-bit word for each 32 elements
// along k. The word packs four pairs of neighbouring elements; pair i starts at element
// `16 * (i / 2) + 8 * (i % 2) + 2 * (l % 4)`.
//
// An element is unpacked to bit 15 (sign) and bits 6 to 8 (magnitude) of 16 bits. As a bfloat16, these bits are the
// element times 2^-126, also if the element is subnormal. A shift or rotation and a mask unpack each of the pairs 0 to
// 2. Pair 3 has the remaining bits: one bit of each element is rotated separately. Bits of the word (magnitude, sign):
//
//           first element        second element
//   pair 0: bits 0 to 2, 9       16 to 18, 25       shifted left by 6
//   pair 1: bits 4 to 6, 13      20 to 22, 29       shifted left by 2
//   pair 2: bits 26 to 28, 3     10 to 12, 19       rotated left by 12
//   pair 3: bits 7, 8, 15; 30    23, 24, 31; 14     in place; the last bit rotated left by 8
//
// Scales become 16-bit factors by an addition to the exponent (Fp4Factors). An MXFP4 scale is stored as its E8M0 byte,
// capped at 2^34. The factor of 2^34 is infinite. An NVFP4 scale is stored with 5 exponent bits and 3 mantissa bits, so
// that no positive e4m3 scale is subnormal. NVFP4 weights with a scale of 0 are 0. A negative NVFP4 scale is stored as
// positive, and its weights with the opposite sign.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/numeric.cuh"
#include "moe_gemm/params.cuh"

constexpr int UNIT_ROWS = 8, UNIT_K = 64;
constexpr int ROW_ELEMENT_BYTES = UNIT_K / 2, UNIT_ELEMENT_BYTES = UNIT_ROWS * ROW_ELEMENT_BYTES; // of a row, of a unit
constexpr int UNIT_MXFP4 = 272, UNIT_NVFP4 = 288;                                                 // of a unit
constexpr int LARGEST_E8M0 = 161;                                                                 // 2^34

template <int FORMAT> constexpr int UNIT_BYTES = FORMAT == MXFP4 ? UNIT_MXFP4 : UNIT_NVFP4;
template <int FORMAT> constexpr int ROW_SCALE_BYTES = FORMAT == MXFP4 ? 2 : 4; // of a row of a unit

constexpr unsigned PAIR_BITS = 0x81c081c0; // bits of an unpacked pair

__device__ __forceinline__ unsigned rotate_left(unsigned packed, int by) { return __funnelshift_l(packed, packed, by); }

// Unpack 8 elements to four pairs of bfloat16, times 2^-126.
__device__ __forceinline__ void unpack_pairs(unsigned (&pairs)[4], unsigned packed) {
    pairs[0] = packed << 6 & PAIR_BITS;
    pairs[1] = packed << 2 & PAIR_BITS;
    pairs[2] = rotate_left(packed, 12) & PAIR_BITS;
    pairs[3] = (packed & 0x81808180) | (rotate_left(packed, 8) & 0x00400040);
}

// Inverse of unpack_pairs.
__device__ __forceinline__ unsigned pack_pairs(const unsigned (&pairs)[4]) {
    return pairs[0] >> 6 | pairs[1] >> 2 | rotate_left(pairs[2], 20) | (pairs[3] & 0x81808180) |
           rotate_left(pairs[3] & 0x00400040, 24);
}
