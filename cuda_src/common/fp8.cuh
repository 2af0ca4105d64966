// The 8-bit float formats e4m3 and e5m2. float16 represents all their values exactly.
#pragma once
#include <cuda_fp8.h>

#include "common/numeric.cuh"

// The scale of a quantized array.
struct Scale {
    const float* array; // one float; null: `number` is the scale
    float number;
    __device__ __forceinline__ float load() const { return array ? __ldg(array) : number; }
};

__device__ __forceinline__ float to_float(__nv_fp8_e4m3 x) { return float(x); }
__device__ __forceinline__ float to_float(__nv_fp8_e5m2 x) { return float(x); }

// Round x to the nearest FP8 value, ties to even, and return its byte. Values saturate to the largest finite value; NaN
// gives 0x7f.
template <__nv_fp8_interpretation_t KIND> __device__ __forceinline__ unsigned to_fp8(float x) {
#if __CUDA_ARCH__ >= 890
    return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, KIND);
#else
    // GPUs before sm_89 lack the conversion instruction. The fallback of cuda_fp8.h converts through double, which
    // takes seconds to compile.
    constexpr bool IS_E4M3 = KIND == __NV_E4M3;
    constexpr int MANTISSA = IS_E4M3 ? 3 : 2, BIAS = IS_E4M3 ? 7 : 15, SHIFT = 23 - MANTISSA;
    constexpr float LARGEST = IS_E4M3 ? 448.f : 57344.f, SMALLEST_NORMAL = IS_E4M3 ? 0x1p-6f : 0x1p-14f;
    // The unit in the last place of ROUNDER is the smallest subnormal, so adding ROUNDER rounds to a multiple of this
    // subnormal.
    constexpr float ROUNDER = IS_E4M3 ? 0x1p14f : 0x1p7f;
    if (x != x) return 0x7f;
    const float magnitude = fminf(fabsf(x), LARGEST);
    const unsigned bits = __float_as_uint(magnitude);
    unsigned byte = (bits + (1u << (SHIFT - 1)) - 1 + (bits >> SHIFT & 1)) >> SHIFT;
    byte -= (127 - BIAS) << MANTISSA;
    if (magnitude < SMALLEST_NORMAL) byte = __float_as_uint(__fadd_rn(magnitude, ROUNDER)) - __float_as_uint(ROUNDER);
    return byte | (__float_as_uint(x) >> 24 & 0x80);
#endif
}

// Convert x and y to two bytes, with x in the low byte.
template <__nv_fp8_interpretation_t KIND> __device__ __forceinline__ unsigned to_fp8(float x, float y) {
#if __CUDA_ARCH__ >= 890
    return __nv_cvt_float2_to_fp8x2(make_float2(x, y), __NV_SATFINITE, KIND);
#else
    return to_fp8<KIND>(x) | to_fp8<KIND>(y) << 8;
#endif
}

// Convert the four FP8 values in `four` to two pairs of float16.
template <typename FP8> __device__ __forceinline__ void to_halves(unsigned (&pairs)[2], unsigned four);

template <> __device__ __forceinline__ void to_halves<__nv_fp8_e4m3>(unsigned (&pairs)[2], unsigned four) {
#if __CUDA_ARCH__ >= 890
    asm("{ .reg .b16 low, high;\n"
        "  mov.b32 {low, high}, %2;\n"
        "  cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "  cvt.rn.f16x2.e4m3x2 %1, high; }"
        : "=r"(pairs[0]), "=r"(pairs[1])
        : "r"(four));
#else
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(four >> 16 * i), __NV_E4M3);
        pairs[i] = halves.x | unsigned(halves.y) << 16;
    }
#endif
}

template <> __device__ __forceinline__ void to_halves<__nv_fp8_e5m2>(unsigned (&pairs)[2], unsigned four) {
    // An e5m2 value is the high byte of the equal float16 value.
    pairs[0] = __byte_perm(four, 0, 0x1404), pairs[1] = __byte_perm(four, 0, 0x3424);
}
