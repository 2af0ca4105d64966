// Division of many values by one scale, rounded as by IEEE division, but with only multiplications per value.
#pragma once
#include "common/numeric.cuh"

// Assumptions of Quotient:
//
//   SMALL   |x| <= 448 * scale. The scale is infinite, or the remainders are exact and 1 / scale is not subnormal.
//   LARGE   As SMALL, but x may be larger, or infinite.
//   ANY     None.
enum Size { SMALL, LARGE, ANY };

// x / scale is computed as x times the reciprocal of the scale. An fma computes the exact remainder, which corrects
// this product. If the corrected quotient is NaN (infinities, overflow, a scale of 0), the product is already the
// quotient.
template <int SIZE> struct Quotient {
    float scale, reciprocal;
    float prescale = 1.f; // power of two that keeps scale and remainders from being subnormal
    __device__ __forceinline__ explicit Quotient(float s) {
        if constexpr (SIZE == ANY) {
            prescale = fabsf(s) < 0x1p-64f ? 0x1p64f : fabsf(s) > 0x1p64f ? 0x1p-64f : 1.f;
            s = __fmul_rn(s, prescale);
        }
        reciprocal = __frcp_rn(s);
        // If the scale is infinite, the product is 0, which is the quotient. The member `scale` is then 0, so that the
        // correction is 0 and not NaN.
        scale = SIZE == SMALL && s == CUDART_INF_F ? 0.f : s;
    }
    __device__ __forceinline__ float operator()(float x) const {
        if constexpr (SIZE == ANY) x = __fmul_rn(x, prescale);
        const float product = __fmul_rn(x, reciprocal);
        // With these minus signs, a quotient of 0 has the correct sign.
        const float corrected = __fmaf_rn(-__fmaf_rn(product, scale, -x), reciprocal, product);
        return SIZE == SMALL || corrected == corrected ? corrected : product;
    }
};
