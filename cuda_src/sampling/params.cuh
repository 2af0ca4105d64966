// Parameters that are arrays of one number per row, or one number for all rows.
#pragma once
#include "common/numeric.cuh"

// The scale 2 log2(e) / temperature of the smallest temperatures, and of 0: the limit of the softmax, all on the best
// token.
constexpr float BEST_ALONE = 2e30f;
// The scale of an infinite temperature: no difference of finite logits counts. A scale of 0 would make NaN of -inf.
constexpr float ALL_ALIKE = 0x1p-149f;

// 2 log2(e) / temperature, within these: the scale of halves of differences.
__device__ __forceinline__ float scale_of(float temperature) {
    const float scale = temperature == CUDART_INF_F ? ALL_ALIKE : 2 * LOG2_E / temperature;
    return scale > 0 && scale < BEST_ALONE ? scale : BEST_ALONE;
}

__device__ __forceinline__ long long integer_at(const void* array, bool wide, int i) {
    return wide ? static_cast<const long long*>(array)[i] : static_cast<const int*>(array)[i];
}

// A parameter that is a float, from an array of float32, or of integers if `integral`.
__device__ __forceinline__ float float_at(const void* array, bool integral, bool wide, int i) {
    const long long bits = integer_at(array, wide, i);
    return integral ? float(bits) : __int_as_float(int(bits));
}
