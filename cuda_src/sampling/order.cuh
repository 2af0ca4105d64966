// The order of the tokens of a row: by value, largest first, ties by the lower id.
#pragma once
#include "common/numeric.cuh"

constexpr int NO_ID = 0x7fffffff;

// A prefix of the order: the tokens with x > value, and those with x == value up to this id.
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

// What a bound keeps, as the comparison x > threshold alone, of ids that are all up to the bound's id or all behind it.
// `last_id` is the last of them.
__device__ __forceinline__ float threshold(Bound bound, int last_id) {
    if (last_id > bound.id) return bound.value;
    const float below = from_sortable(sortable(bound.value) - 1);
    return bound.value == 0 ? -1e-45f : bound.value == -CUDART_INF_F ? -CUDART_INF_F : below;
}

// An integer that orders as the tokens do, the first of the order being the largest. 0 is below all tokens.
__device__ __forceinline__ unsigned long long candidate(float x, int id) {
    return (unsigned long long)sortable(x == 0 ? 0.f : x) << 32 | ~unsigned(id);
}

// The larger, or NaN if either is.
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
