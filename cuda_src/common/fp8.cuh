// The two 8-bit float formats. Every number of either is a float16, exactly.
#pragma once
#include <cuda_fp8.h>

#include "common/numeric.cuh"

__device__ __forceinline__ float to_float(__nv_fp8_e4m3 x) { return float(x); }
__device__ __forceinline__ float to_float(__nv_fp8_e5m2 x) { return float(x); }

// Four neighbours as two pairs of float16.
template <typename FP8> __device__ __forceinline__ void to_halves(unsigned (&pairs)[2], unsigned four);

template <> __device__ __forceinline__ void to_halves<__nv_fp8_e4m3>(unsigned (&pairs)[2], unsigned four) {
#if __CUDA_ARCH__ >= 890
    asm("{ .reg .b16 low, high;\n"
        "  mov.b32 {low, high}, %2;\n"
        "  cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "  cvt.rn.f16x2.e4m3x2 %1, high; }"
        : "=r"(pairs[0]), "=r"(pairs[1]) : "r"(four));
#else
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(four >> 16 * i), __NV_E4M3);
        pairs[i] = halves.x | unsigned(halves.y) << 16;
    }
#endif
}

template <> __device__ __forceinline__ void to_halves<__nv_fp8_e5m2>(unsigned (&pairs)[2], unsigned four) {
    // A float16 with its low byte cut off.
    pairs[0] = __byte_perm(four, 0, 0x1404), pairs[1] = __byte_perm(four, 0, 0x3424);
}
