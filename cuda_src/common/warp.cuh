// Reductions and scans over LANES neighbouring lanes of a warp (a power of two): a warp that works on
// several rows at once gives each row its own LANES lanes. Every lane of the warp must take part.
#pragma once
#include "common/numeric.cuh"

constexpr unsigned FULL_WARP = 0xffffffffu;

template <int LANES> __device__ __forceinline__ float lanes_max(float value) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, step));
    return value;
}

template <int LANES> __device__ __forceinline__ float lanes_min(float value) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) value = fminf(value, __shfl_xor_sync(FULL_WARP, value, step));
    return value;
}

// Neighbours first, so that 16 lanes sum like the first 16 of 32 whose others hold 0.
template <int LANES, typename T> __device__ __forceinline__ T lanes_sum(T value) {
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) value += __shfl_xor_sync(FULL_WARP, value, step);
    return value;
}

// The sum of `value` over this lane and those before it.
template <int LANES> __device__ __forceinline__ int lanes_inclusive_sum(int value) {
    // The last lane of a segment, and in the high byte which bits of the lane number name the segment.
    constexpr int SEGMENT = (32 - LANES) << 8;
#pragma unroll
    for (int step = 1; step < LANES; step *= 2)
        // The shuffle's own predicate says whether there is such a lane, so that no comparison is needed.
        asm volatile("{ .reg .pred in; .reg .s32 before;\n"
                     "  shfl.sync.up.b32 before|in, %0, %1, %2, -1;\n"
                     "  @in add.s32 %0, %0, before; }"
                     : "+r"(value)
                     : "r"(step), "n"(SEGMENT));
    return value;
}

template <int LANES> __device__ __forceinline__ float lanes_inclusive_sum(float value) {
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
        const float before = __shfl_up_sync(FULL_WARP, value, step, LANES);
        if (threadIdx.x % LANES >= step) value += before;
    }
    return value;
}

// The rank-th largest of the lanes' keys (1: the largest), or a smaller one where keys are equal.
template <int LANES> __device__ __forceinline__ unsigned lanes_kth_largest(unsigned key, int rank) {
    if constexpr (LANES == 32) {
        // Strike out the largest, rank - 1 times; a reduction over a whole warp is one instruction.
        unsigned largest = __reduce_max_sync(FULL_WARP, key);
        for (int i = 1; i < rank; ++i) {
            if (key == largest) key = 0;
            largest = __reduce_max_sync(FULL_WARP, key);
        }
        return largest;
    } else {
        // Count the larger keys; the smallest of those that fewer than `rank` beat is the one.
        int minus_larger = 0;
#pragma unroll
        for (int flip = 1; flip < LANES; ++flip)
            minus_larger = minus_if_greater(minus_larger, __shfl_xor_sync(FULL_WARP, key, flip), key);
        unsigned smallest = -minus_larger < rank ? key : ~0u;
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2)
            smallest = min(smallest, __shfl_xor_sync(FULL_WARP, smallest, step));
        return smallest;
    }
}
