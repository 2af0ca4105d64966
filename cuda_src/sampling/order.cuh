// Order the tokens of a row: largest value first, equal values by ascending id.
#pragma once
#include "common/numeric.cuh"

constexpr int NO_ID = 0x7fffffff;

// A bound is the last token of a prefix of the ordered tokens. The bound keeps the tokens of this prefix.
struct Bound {
    float value;
    int id;
};

__device__ __forceinline__ bool keeps(Bound bound, float x, int id) {
    return x > bound.value || (x == bound.value && id <= bound.id);
}

__device__ __forceinline__ Bound tighter(Bound a, Bound b) {
    return a.value > b.value || (a.value == b.value && a.id < b.id) ? a : b;
}

// Return t such that, in a range of ids that ends at `last_id`, the bound keeps a token if and only if `x > t`. The
// range must not contain both bound.id and bound.id + 1.
__device__ __forceinline__ float threshold(Bound bound, int last_id) {
    if (last_id > bound.id) return bound.value;
    const float below = from_sortable(sortable(bound.value) - 1);
    return bound.value == 0 ? -1e-45f : bound.value == -CUDART_INF_F ? -CUDART_INF_F : below;
}

// Return a positive integer. It is larger for a token that comes earlier in the order.
__device__ __forceinline__ unsigned long long order_key(float x, int id) {
    return (unsigned long long)sortable(x == 0 ? 0.f : x) << 32 | ~unsigned(id);
}

__device__ __forceinline__ float max_or_nan(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

__device__ __forceinline__ float min_or_nan(float a, float b) {
    float c;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
