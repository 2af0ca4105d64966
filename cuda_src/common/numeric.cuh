// Number formats, fast approximations of elementary functions, and an order-preserving map of floats to integers.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

constexpr float LARGEST_FLOAT = 3.402823466e+38f;
constexpr float LOG2_E = 1.44269504088896341f;

template <typename T> constexpr bool IS_BFLOAT16 = false;
template <> constexpr bool IS_BFLOAT16<__nv_bfloat16> = true;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Round to nearest, ties to even.
template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}

// Each of these functions is one instruction. They flush subnormals to zero (.ftz), because handling subnormals would
// take more instructions.
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

__device__ __forceinline__ float fast_log2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Return log(1 + exp(x)) = max(x, 0) + log(1 + e) with e = exp(-|x|). For small e, 1 + e would lose most bits of e, so
// log(1 + e) is computed as a series.
__device__ __forceinline__ float softplus(float x) {
    constexpr float LN_2 = 0.693147180559945309f;
    const float e = fast_exp2(__fmul_rn(fabsf(x), -LOG2_E));
    const float series = e * (1.f - e * (0.5f - e * (1.f / 3 - e * 0.25f)));
    return __fadd_rn(fmaxf(x, 0.f), e < 0.03f ? series : __fmul_rn(fast_log2(__fadd_rn(1.f, e)), LN_2));
}

// Map floats to unsigned integers in the same order, with -0 below +0. x must not be NaN. The integer is never 0.
__device__ __forceinline__ unsigned sortable(float x) {
    const unsigned bits = __float_as_uint(x);
    return bits ^ (unsigned(int(bits) >> 31) | 0x80000000u);
}

// The inverse of `sortable`; -inf if `key` is 0.
__device__ __forceinline__ float from_sortable(unsigned key) {
    if (key == 0) return -CUDART_INF_F;
    return __uint_as_float(key ^ (unsigned(int(~key) >> 31) | 0x80000000u));
}

// Return `count - (other > mine)`. The comparison is the borrow of a subtraction, so it takes two instructions and no
// predicate.
__device__ __forceinline__ int minus_if_greater(int count, unsigned other, unsigned mine) {
    asm("{ .reg .u32 difference;\n"
        "  sub.cc.u32 difference, %1, %2;\n"
        "  subc.u32 %0, %0, 0; }"
        : "+r"(count)
        : "r"(mine), "r"(other));
    return count;
}

__device__ __forceinline__ int minus_if_greater(int count, unsigned long long other, unsigned long long mine) {
    asm("{ .reg .u32 difference;\n"
        "  sub.cc.u32 difference, %1, %3;\n"
        "  subc.cc.u32 difference, %2, %4;\n"
        "  subc.u32 %0, %0, 0; }"
        : "+r"(count)
        : "r"(unsigned(mine)), "r"(unsigned(mine >> 32)), "r"(unsigned(other)), "r"(unsigned(other >> 32)));
    return count;
}
