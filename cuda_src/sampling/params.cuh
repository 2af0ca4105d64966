// Parameters that are arrays of one number per row, or one number for all rows.
#pragma once

// The scale log2(e) / temperature of the smallest temperatures, and of 0: the limit of the softmax, all on the best
// token.
constexpr float BEST_ALONE = 1e30f;

__device__ __forceinline__ long long integer_at(const void* array, bool wide, int i) {
    return wide ? static_cast<const long long*>(array)[i] : static_cast<const int*>(array)[i];
}
