// Quantization to 8 bits. Each quotient is rounded as by IEEE division, so any implementation with IEEE division gives
// the same bits.
#pragma once
#include "common/fp8.cuh"
#include "common/quotient.cuh"
#include "common/vectors.cuh"

// INT8_AZP has a zero point. INT8_TRUNCATE rounds towards zero.
enum Format { E4M3, INT8, INT8_AZP, MXFP4, NVFP4, INT8_TRUNCATE };

template <int FORMAT> constexpr float LARGEST = FORMAT == E4M3 ? 448.f : 127.f;

// Saturate x and y to int8, and return them in the two low bytes, x in the lowest. The two high bytes are the low half
// of `above`.
__device__ __forceinline__ unsigned to_int8(int x, int y, unsigned above) {
    unsigned bytes;
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(y), "r"(x), "r"(above));
    return bytes;
}

// Round the quotients to nearest, ties to even (INT8_TRUNCATE: towards zero), add the zero point `azp`, saturate, and
// return one byte per element. INTEGER_AZP: the quotients and `azp` are below 2^24, so `azp` is added as an integer.
template <int FORMAT, int VECTOR, bool INTEGER_AZP = true>
__device__ __forceinline__ Vector<VECTOR> to_bytes(const float (&quotient)[VECTOR], float azp) {
    unsigned packed[(VECTOR + 3) / 4] = {};
    if constexpr (FORMAT == E4M3) {
#pragma unroll
        for (int i = 0; i < VECTOR; i += 2) {
            if constexpr (VECTOR == 1)
                packed[0] = to_fp8<__NV_E4M3>(quotient[0]);
            else
                packed[i / 4] |= to_fp8<__NV_E4M3>(quotient[i], quotient[(i + 1) % VECTOR]) << i % 4 * 8;
        }
    } else {
        int number[VECTOR];
        const int integer_azp = FORMAT == INT8_AZP ? __float2int_rn(azp) : 0;
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            float x = quotient[i];
            if constexpr (FORMAT == INT8_AZP && !INTEGER_AZP) {
                x = rintf(x);
                x = __fadd_rn(x == x ? x : 0.f, azp);
            }
            // The conversion saturates, and converts NaN to 0.
            number[i] = FORMAT == INT8_TRUNCATE ? __float2int_rz(x) : __float2int_rn(x);
            if constexpr (FORMAT == INT8_AZP && INTEGER_AZP) number[i] += integer_azp;
        }
        if constexpr (VECTOR == 1) {
            packed[0] = to_int8(number[0], 0, 0);
        } else {
#pragma unroll
            for (int i = 0; i < VECTOR; i += 4)
                packed[i / 4] = to_int8(number[i], number[i + 1], to_int8(number[i + 2], number[i + 3], 0));
        }
    }
    Vector<VECTOR> out;
    if constexpr (VECTOR == 8)
        out.x = packed[0], out.y = packed[1];
    else
        out = (Vector<VECTOR>)packed[0];
    return out;
}

// Return max(largest, smallest) / LARGEST, rounded as by IEEE division. If `power_of_two`, round it up to a power of
// two.
template <int FORMAT> __device__ __forceinline__ float scale_of(float largest, float smallest, bool power_of_two) {
    constexpr float RECIPROCAL = 1.f / LARGEST<FORMAT>;
    // The division is a multiplication and a correction, as in Quotient.
    const float x = fmaxf(largest, smallest), product = __fmul_rn(x, RECIPROCAL);
    const float corrected = __fmaf_rn(-__fmaf_rn(product, LARGEST<FORMAT>, -x), RECIPROCAL, product);
    const float scale = corrected == corrected ? corrected : product;
    return power_of_two ? __uint_as_float((__float_as_uint(scale) + 0x7fffff) & 0x7f800000) : scale;
}
