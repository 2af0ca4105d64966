// The online softmax where nothing has been seen: there the largest score is -inf, and all sums are 0.
#pragma once
#include "common/numeric.cuh"

// The result of a row: 0 without weights.
__device__ __forceinline__ float quotient(float sum, float total) {
    return total == 0.f ? 0.f : __fdividef(sum, total);
}

// The score that weights are relative to: the largest, but for -inf, since -inf - -inf would be NaN.
__device__ __forceinline__ float reference(float largest) { return largest == -CUDART_INF_F ? 0.f : largest; }
