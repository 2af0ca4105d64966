// Reductions and scans over LANES neighbouring lanes of a warp. LANES is a power of two. All 32 lanes must call these
// functions.
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

// Neighbours are added first, so 16 lanes give the same bits as 32 lanes whose upper 16 hold 0.
template <int LANES, typename T> __device__ __forceinline__ T lanes_sum(T value) {
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) value += __shfl_xor_sync(FULL_WARP, value, step);
    return value;
}

template <int LANES> __device__ __forceinline__ int lanes_inclusive_sum(int value) {
    // Operand c of shfl. Bits 8 to 12 are a mask: the bits of a lane index that select its segment of LANES lanes. Bits
    // 0 to 4 are 0: the first lane of a segment that `shfl.up` may read.
    constexpr int SEGMENT = (32 - LANES) << 8;
#pragma unroll
    for (int step = 1; step < LANES; step *= 2)
        // The predicate of shfl says whether the source lane is in the segment, which saves a comparison.
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

// Return the k-th largest of the lanes' keys (k = 1: the largest). With LANES == 32 equal keys are counted only once.
template <int LANES> __device__ __forceinline__ unsigned lanes_kth_largest(unsigned key, int k) {
    if constexpr (LANES == 32) {
        // A reduction over a warp is one instruction.
        unsigned largest = __reduce_max_sync(FULL_WARP, key);
        for (int i = 1; i < k; ++i) {
            if (key == largest) key = 0;
            largest = __reduce_max_sync(FULL_WARP, key);
        }
        return largest;
    } else {
        // The result is the smallest key with fewer than k larger keys.
        int minus_larger = 0;
#pragma unroll
        for (int flip = 1; flip < LANES; ++flip)
            minus_larger = minus_if_greater(minus_larger, __shfl_xor_sync(FULL_WARP, key, flip), key);
        unsigned smallest = -minus_larger < k ? key : ~0u;
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2)
            smallest = min(smallest, __shfl_xor_sync(FULL_WARP, smallest, step));
        return smallest;
    }
}
