// Quantization to 8 bits. Before the conversion to bytes, each quotient is rounded as IEEE division rounds it. Any
// implementation with IEEE division therefore gives the same bits.
#pragma once
#include "common/fp8.cuh"
#include "common/quotient.cuh"
#include "common/vectors.cuh"

template <int BYTES> using Unit = typename VectorOf<BYTES>::Type;

// INT8_AZP is asymmetric: it has a zero point. MXFP4 and NVFP4 are 4-bit formats. INT8_CUT rounds towards zero.
enum Format { E4M3, INT8, INT8_AZP, MXFP4, NVFP4, INT8_CUT };

// The largest finite value of an 8-bit format.
template <int FORMAT> constexpr float LARGEST = FORMAT == E4M3 ? 448.f : 127.f;

// Saturate x and y to the range -128 to 127, and return them in the two low bytes, with x in the lowest byte. The two
// high bytes are the low half of `above`.
__device__ __forceinline__ unsigned to_int8(int x, int y, unsigned above) {
    unsigned bytes;
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(y), "r"(x), "r"(above));
    return bytes;
}

// Convert the array `quotient` to FORMAT and return one byte per element. EACH is the number of elements. Each quotient
// is rounded to nearest, ties to even (INT8_CUT: towards zero), and saturated. `azp` is the zero point, which is added
// after rounding. If WHOLE is true, the quotients and `azp` are below 2^24, so `azp` can be added as an integer.
template <int FORMAT, int EACH, bool WHOLE = true>
__device__ __forceinline__ Unit<EACH> to_bytes(const float (&quotient)[EACH], float azp) {
    unsigned word[(EACH + 3) / 4] = {};
    if constexpr (FORMAT == E4M3) {
#pragma unroll
        for (int i = 0; i < EACH; i += 2) {
            if constexpr (EACH == 1)
                word[0] = to_fp8<__NV_E4M3>(quotient[0]);
            else
                word[i / 4] |= to_fp8<__NV_E4M3>(quotient[i], quotient[(i + 1) % EACH]) << i % 4 * 8;
        }
    } else {
        int number[EACH];
        const int added = FORMAT == INT8_AZP ? __float2int_rn(azp) : 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            float x = quotient[i];
            if constexpr (FORMAT == INT8_AZP && !WHOLE) {
                x = rintf(x);
                x = __fadd_rn(x == x ? x : 0.f, azp);
            }
            // The conversion saturates, and converts NaN to 0.
            number[i] = FORMAT == INT8_CUT ? __float2int_rz(x) : __float2int_rn(x);
            if constexpr (FORMAT == INT8_AZP && WHOLE) number[i] += added;
        }
        if constexpr (EACH == 1) {
            word[0] = to_int8(number[0], 0, 0);
        } else {
#pragma unroll
            for (int i = 0; i < EACH; i += 4)
                word[i / 4] = to_int8(number[i], number[i + 1], to_int8(number[i + 2], number[i + 3], 0));
        }
    }
    Unit<EACH> out;
    if constexpr (EACH == 8)
        out.x = word[0], out.y = word[1];
    else
        out = (Unit<EACH>)word[0];
    return out;
}

// Return max(largest, smallest) / LARGEST, rounded as by IEEE division. With `power_of_two` it is rounded up to a power
// of two.
template <int FORMAT> __device__ __forceinline__ float scale_of(float largest, float smallest, bool power_of_two) {
    constexpr float RECIPROCAL = 1.f / LARGEST<FORMAT>;
    // The division is a multiplication by the reciprocal and a correction, as in Quotient.
    const float x = fmaxf(largest, smallest), product = __fmul_rn(x, RECIPROCAL);
    const float corrected = __fmaf_rn(-__fmaf_rn(product, LARGEST<FORMAT>, -x), RECIPROCAL, product);
    const float scale = corrected == corrected ? corrected : product;
    return power_of_two ? __uint_as_float((__float_as_uint(scale) + 0x7fffff) & 0x7f800000) : scale;
}
