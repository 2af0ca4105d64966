// Division by a scale that is the same for many values. The quotients are rounded as in IEEE division, but only
// multiplications are needed per value.
#pragma once
#include "common/numeric.cuh"

// The assumptions of Quotient about its operands.
//
//   SMALL   |x| <= 448 * scale. The scale is infinite, or the remainders are exact and 1 / scale is a normal float (not
//           subnormal).
//   LARGE   As SMALL, but x may be larger, or infinite.
//   ANY     x and the scale may be anything.
enum Size { SMALL, LARGE, ANY };

// Computes x / scale without a division. First x is multiplied by the reciprocal of the scale. An fma gives the exact
// remainder of this product, and a correction by the remainder gives the quotient rounded to nearest. If the corrected
// quotient is NaN (infinities, overflow, a scale of 0), the product is already the result of the division.
template <int SIZE> struct Quotient {
    float scale, reciprocal;
    float raise = 1.f; // power of two that multiplies x and scale, so that scale and remainders are not subnormal
    __device__ __forceinline__ explicit Quotient(float s) {
        if constexpr (SIZE == ANY) {
            raise = fabsf(s) < 0x1p-64f ? 0x1p64f : fabsf(s) > 0x1p64f ? 0x1p-64f : 1.f;
            s = __fmul_rn(s, raise);
        }
        reciprocal = __frcp_rn(s);
        // With an infinite scale the product is 0, which is already the quotient. The scale in the remainder is then
        // set to 0, so that the correction is 0 instead of NaN.
        scale = SIZE == SMALL && s == CUDART_INF_F ? 0.f : s;
    }
    __device__ __forceinline__ float operator()(float x) const {
        if constexpr (SIZE == ANY) x = __fmul_rn(x, raise);
        const float product = __fmul_rn(x, reciprocal);
        // The signs are arranged so that a quotient of 0 keeps its sign.
        const float corrected = __fmaf_rn(-__fmaf_rn(product, scale, -x), reciprocal, product);
        return SIZE == SMALL || corrected == corrected ? corrected : product;
    }
};
