// 4-bit floats (e2m1), for MXFP4 and NVFP4: a sign and the magnitudes 0, .5, 1, 1.5, 2, 3, 4 and 6.
#pragma once
#include "common/quantize.cuh"

// Elements that share a scale.
template <int FORMAT> constexpr int FP4_GROUP = FORMAT == MXFP4 ? 32 : 16;

// Return the sign bits of 8 elements, given as loaded from memory. The sign of element i is the high bit of nibble i.
template <typename T> __device__ __forceinline__ unsigned signs(const unsigned* words) {
    unsigned even, odd; // the high bytes of elements 0, 2, 4, 6 and of 1, 3, 5, 7
    if constexpr (sizeof(T) == 2) {
        const unsigned low = __byte_perm(words[0], words[1], 0x7351), high = __byte_perm(words[2], words[3], 0x7351);
        even = __byte_perm(low, high, 0x5410), odd = __byte_perm(low, high, 0x7632);
    } else {
        even = __byte_perm(__byte_perm(words[0], words[2], 0x73), __byte_perm(words[4], words[6], 0x73), 0x5410);
        odd = __byte_perm(__byte_perm(words[1], words[3], 0x73), __byte_perm(words[5], words[7], 0x73), 0x5410);
    }
    return (even >> 4 & 0x08080808) | (odd & 0x80808080);
}

// Round the 8 numbers `2 * half[i]` to e2m1, to nearest, ties to the even code. Return the codes, one per nibble.
// half[i] must not be negative. Numbers above 6 become 6, and NaN becomes 0.
//
// The codes 0 to 7 of the magnitudes count steps from 0: four steps up to 2, two steps from 2 to 4, one step from 4 to
// 6. For each of these ranges, a saturating instruction computes how much of the number lies in the range. This amount,
// in steps, is added to ROUNDER, whose unit in the last place is 1, so each addition rounds to an integer, ties to
// even. Each range begins at an even code, so ties go to the even code.
__device__ __forceinline__ unsigned to_e2m1(const float (&half)[8]) {
    constexpr float ROUNDER = 12582912.f;
    constexpr unsigned BITS = 0x4b400000u; // bits of ROUNDER
    unsigned codes = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) {
        const float x = half[i];
        float code = __fmaf_rn(__saturatef(x), 4.f, ROUNDER);
        code = __fmaf_rn(__saturatef(__fadd_rn(x, -1.f)), 2.f, code);
        code = __fadd_rn(__saturatef(__fadd_rn(x, -2.f)), code);
        codes = codes * 16 + __float_as_uint(code);
    }
    return codes - BITS * 0x11111111u;
}

// Return the same codes as to_e2m1, but use float16 instructions on pairs. half[i] must be below 4 and exact in
// float16.
__device__ __forceinline__ unsigned to_e2m1_in_pairs(const float (&half)[8]) {
    constexpr unsigned short ROUNDER = 0x6400; // 1024, whose unit in the last place is 1
    // Each 16-bit `code` is ROUNDER plus an e2m1 code. LOW and HIGH are the ROUNDERs in the two __byte_perm results.
    // They are subtracted at the end.
    constexpr unsigned BASE = ROUNDER * 0x10001u * 0x101u;
    constexpr unsigned LOW = (BASE & 0xffff) * 0x10001u, HIGH = (BASE >> 16) * 0x10001u;
    const auto number = [](float x) { return __float2half2_rn(x); };
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const __half2 x = __floats2half2_rn(half[2 * i], half[2 * i + 1]);
        __half2 code = __hfma2(__hadd2_sat(x, number(0.f)), number(4.f), __half2(__half2_raw{ROUNDER, ROUNDER}));
        code = __hfma2(__hadd2_sat(x, number(-1.f)), number(2.f), code);
        code = __hadd2(__hadd2_sat(x, number(-2.f)), code);
        words[i] = reinterpret_cast<const unsigned&>(code);
    }
    const unsigned first = words[0] + words[1] * 256, second = words[2] + words[3] * 256;
    return __byte_perm(first, second, 0x5410) + __byte_perm(first, second, 0x7632) * 16 - (LOW + HIGH * 16);
}

// Return the scale of an MXFP4 group in E8M0, and set `half` to half of its reciprocal. `largest` is max |x| of the
// group, or NaN.
__device__ __forceinline__ unsigned mxfp4_scale(float largest, float& half) {
    const int exponent = max(int(__float_as_uint(largest) >> 23) - 2, 0);
    const bool number = exponent < 253;
    half = number ? __uint_as_float(unsigned(253 - exponent) << 23) : 0.f;
    return number ? exponent : 255;
}

// Return the scale of an NVFP4 group as an e4m3 byte. Set `half` to half of global / scale, or to 0 if the scale is 0.
// `is_usual` means that divisions with `global` have exact remainders. If it is set and `largest` is in range, a
// product with a reciprocal replaces each IEEE division. The remainder corrects the product, so the bits are the same.
// This is faster.
__device__ __forceinline__ unsigned nvfp4_scale(float largest, float global, bool is_usual, float& half) {
    constexpr float RECIPROCAL = 1.f / 6.f;
    constexpr unsigned SMALLEST = 37u << 23, RANGE = 217u << 23; // float bits of `largest`: from 2^-90, to 2^127
    const auto number = [](unsigned byte) {
        __nv_fp8_e4m3 scale;
        scale.__x = (__nv_fp8_storage_t)byte;
        return to_float(scale);
    };
    if (is_usual && __float_as_uint(largest) - SMALLEST < RANGE) {
        const float estimate = __fmul_rn(largest, RECIPROCAL);
        const float sixth = __fmaf_rn(-__fmaf_rn(estimate, 6.f, -largest), RECIPROCAL, estimate);
        const unsigned byte = to_fp8<__NV_E4M3>(__fmul_rn(global, sixth));
        const float scale = number(byte), guess = fast_reciprocal(scale);
        const float reciprocal = __fmaf_rn(__fmaf_rn(-guess, scale, 1.f), guess, guess);
        const float product = __fmul_rn(.5f * global, reciprocal);
        const float quotient = __fmaf_rn(-__fmaf_rn(product, scale, -.5f * global), reciprocal, product);
        half = byte == 0 ? 0.f : quotient;
        return byte;
    }
    const unsigned byte = to_fp8<__NV_E4M3>(__fmul_rn(global, __fdiv_rn(largest, 6.f)));
    const float scale = number(byte);
    half = scale == 0 ? 0.f : .5f * __fdiv_rn(global, scale);
    return byte;
}
