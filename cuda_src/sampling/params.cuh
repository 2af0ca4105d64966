// Read the parameters of the samplers.
#pragma once
#include "common/numeric.cuh"

// At temperature 0 this constant replaces `2 * log2(e) / temperature`. Only the best token then has a weight above 0.
constexpr float GREEDY_SCALE = 2e30f;
// At an infinite temperature this constant replaces `2 * log2(e) / temperature`. All finite logits then have the same
// weight. A scale of 0 would turn -inf into NaN.
constexpr float UNIFORM_SCALE = 0x1p-149f;

__device__ __forceinline__ float scale_of(float temperature) {
    const float scale = temperature == CUDART_INF_F ? UNIFORM_SCALE : 2 * LOG2_E / temperature;
    return scale > 0 && scale < GREEDY_SCALE ? scale : GREEDY_SCALE;
}

__device__ __forceinline__ long long integer_at(const void* array, bool wide, int i) {
    return wide ? static_cast<const long long*>(array)[i] : static_cast<const int*>(array)[i];
}

// `integral`: the array holds integers, else float32. `wide`: the integers have 64 bits.
__device__ __forceinline__ float float_at(const void* array, bool integral, bool wide, int i) {
    const long long bits = integer_at(array, wide, i);
    return integral ? float(bits) : __int_as_float(int(bits));
}
