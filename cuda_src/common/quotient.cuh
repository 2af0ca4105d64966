// Quotients, rounded as IEEE division rounds them, without a division for each.
#pragma once
#include "common/numeric.cuh"

// What Quotient may rely on.
//
//   SMALL   |x| <= 448 scale. The scale is infinite, or such that remainders are exact and its reciprocal is a normal
//           number.
//   LARGE   The same, but x may be larger, or infinite.
//   ANY     x and the scale may be anything.
enum Size { SMALL, LARGE, ANY };

// x / scale by a product with the reciprocal instead of a division. An fma gives the remainder of the product exactly,
// and correcting by it gives the quotient rounded to nearest. Where the corrected one is NaN (infinities, overflow, a
// scale of 0), the product is already what the division would give.
template <int SIZE> struct Quotient {
    float scale, reciprocal;
    float raise = 1.f; // power of two that keeps scale and remainders normal; both x and scale are multiplied by it
    __device__ __forceinline__ explicit Quotient(float s) {
        if constexpr (SIZE == ANY) {
            raise = fabsf(s) < 0x1p-64f ? 0x1p64f : fabsf(s) > 0x1p64f ? 0x1p-64f : 1.f;
            s = __fmul_rn(s, raise);
        }
        reciprocal = __frcp_rn(s);
        // An infinite scale gives products of 0; with a scale of 0 in the remainder, the correction is 0 too, not NaN.
        scale = SIZE == SMALL && s == CUDART_INF_F ? 0.f : s;
    }
    __device__ __forceinline__ float operator()(float x) const {
        if constexpr (SIZE == ANY) x = __fmul_rn(x, raise);
        const float product = __fmul_rn(x, reciprocal);
        // The signs are arranged so that a zero keeps its own.
        const float corrected = __fmaf_rn(-__fmaf_rn(product, scale, -x), reciprocal, product);
        return SIZE == SMALL || corrected == corrected ? corrected : product;
    }
};
