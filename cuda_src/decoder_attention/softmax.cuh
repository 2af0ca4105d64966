// What the online softmax's weights are relative to, and what they come to.
#pragma once
#include "common/numeric.cuh"

// The result; without weights, 0.
__device__ __forceinline__ float quotient(float sum, float total) {
    return total == 0.f ? 0.f : __fdividef(sum, total);
}

// The largest score that weights are relative to: -inf - -inf would be NaN.
__device__ __forceinline__ float reference(float largest) { return largest == -CUDART_INF_F ? 0.f : largest; }
