// Read the parameters of a row from arrays of different types, and convert the temperature to a scale.
#pragma once
#include "common/numeric.cuh"

// The scale is 2 * log2(e) / temperature. This scale is used for temperature 0, and for temperatures so small that only
// the best token has a weight above 0.
constexpr float BEST_ALONE = 2e30f;
// The scale for an infinite temperature. It makes all finite logits equally probable. A scale of 0 would turn -inf into
// NaN.
constexpr float ALL_ALIKE = 0x1p-149f;

// Return 2 * log2(e) / temperature, or BEST_ALONE if the quotient is not between 0 and BEST_ALONE.
__device__ __forceinline__ float scale_of(float temperature) {
    const float scale = temperature == CUDART_INF_F ? ALL_ALIKE : 2 * LOG2_E / temperature;
    return scale > 0 && scale < BEST_ALONE ? scale : BEST_ALONE;
}

__device__ __forceinline__ long long integer_at(const void* array, bool wide, int i) {
    return wide ? static_cast<const long long*>(array)[i] : static_cast<const int*>(array)[i];
}

// Return element i of a parameter array as a float. The array holds float32, or integers if `integral`.
__device__ __forceinline__ float float_at(const void* array, bool integral, bool wide, int i) {
    const long long bits = integer_at(array, wide, i);
    return integral ? float(bits) : __int_as_float(int(bits));
}
