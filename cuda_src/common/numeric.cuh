// Number formats and the elementary functions on the hardware's own approximations.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

constexpr float LARGEST_FLOAT = 3.402823466e+38f;
constexpr float LOG2_E = 1.44269504088896341f;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// The .ftz forms are one instruction each; without it the compiler adds code for denormal arguments.
__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float fast_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// An unsigned integer that orders as the float does (no NaN; -0 sorts below +0).
__device__ __forceinline__ unsigned sortable(float x) {
    const unsigned bits = __float_as_uint(x);
    return bits ^ (unsigned(int(bits) >> 31) | 0x80000000u);
}
