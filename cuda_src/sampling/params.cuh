// Parameters that are arrays of one number per row, or one number for all rows.
#pragma once

// The scale log2(e) / temperature of the smallest temperatures, and of 0: the limit of the softmax, all on the best
// token.
constexpr float BEST_ALONE = 1e30f;

__device__ __forceinline__ long long integer_at(const void* array, bool wide, int i) {
    return wide ? static_cast<const long long*>(array)[i] : static_cast<const int*>(array)[i];
}

// A parameter that is a float, from an array of float32, or of integers if `integral`.
__device__ __forceinline__ float float_at(const void* array, bool integral, bool wide, int i) {
    const long long bits = integer_at(array, wide, i);
    return integral ? float(bits) : __int_as_float(int(bits));
}
