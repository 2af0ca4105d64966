// Handle the start of an online softmax: before the first cache entry, row_max is -inf and all sums are 0.
#pragma once
#include "common/numeric.cuh"

// Return sum / row_sum, or 0 if all weights are 0.
__device__ __forceinline__ float normalized(float sum, float row_sum) {
    return row_sum == 0.f ? 0.f : __fdividef(sum, row_sum);
}

// Return row_max, or 0 if it is -inf, because -inf - -inf is NaN.
__device__ __forceinline__ float softmax_offset(float row_max) { return row_max == -CUDART_INF_F ? 0.f : row_max; }
