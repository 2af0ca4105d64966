// Define the order of the tokens of a row: by value, largest first, ties to the lower id.
#pragma once
#include "common/numeric.cuh"

constexpr int NO_ID = 0x7fffffff;

// A Bound selects a prefix of the tokens in this order, and stores the last token of the prefix. It keeps the tokens
// with `x > value`, and the tokens with `x == value` whose id is at most `id`.
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

// Return a value t for a range of ids that ends with `last_id`: within the range, `x > t` holds exactly for the tokens
// that the bound keeps. Either all ids of the range must be at most bound.id, or all must be larger.
__device__ __forceinline__ float threshold(Bound bound, int last_id) {
    if (last_id > bound.id) return bound.value;
    const float below = from_sortable(sortable(bound.value) - 1);
    return bound.value == 0 ? -1e-45f : bound.value == -CUDART_INF_F ? -CUDART_INF_F : below;
}

// Return a 64-bit integer that has the same order as the tokens: a token that comes earlier has a larger integer. 0 is
// smaller than the integer of any token.
__device__ __forceinline__ unsigned long long candidate(float x, int id) {
    return (unsigned long long)sortable(x == 0 ? 0.f : x) << 32 | ~unsigned(id);
}

// Return the larger of a and b, or NaN if either is NaN.
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
