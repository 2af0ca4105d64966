// Helpers for an online softmax. Before the first cache entry, the largest score is -inf and all sums are 0.
#pragma once
#include "common/numeric.cuh"

// Return the result of a row, sum / total, or 0 if the weights sum to 0.
__device__ __forceinline__ float quotient(float sum, float total) {
    return total == 0.f ? 0.f : __fdividef(sum, total);
}

// Return the score that weights are relative to: the largest score, or 0 if it is -inf, because subtracting -inf from
// -inf gives NaN.
__device__ __forceinline__ float reference(float largest) { return largest == -CUDART_INF_F ? 0.f : largest; }
