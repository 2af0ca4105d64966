// Find the largest magnitude among the elements that a thread has loaded, and the maximum over a block.
#pragma once
#include "common/warp.cuh"
#include "quantization/load.cuh"

template <typename T> struct PairOf;
template <> struct PairOf<__half> {
    using Type = __half2;
};
template <> struct PairOf<__nv_bfloat16> {
    using Type = __nv_bfloat162;
};

// Return the larger of a and b, or NaN if either is NaN.
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

// Whether elements are reduced in pairs: one instruction computes two magnitudes or two maxima of packed 16-bit
// elements.
template <typename T, int EACH> constexpr bool IN_PAIRS = sizeof(T) == 2 && EACH % 2 == 0;

// Reduce the loaded pairs: apply `map` to each pair, and fold the results from left to right with `combine`.
template <typename Map, typename Combine, typename T, int EACH, int BYTES>
__device__ __forceinline__ auto reduce_pairs(const Loaded<T, NO_ACTIVATION, EACH, BYTES>& loaded, Map map,
                                             Combine combine) {
    using Pair = typename PairOf<T>::Type;
    const Pair* pair = reinterpret_cast<const Pair*>(loaded.unit[0]);
    Pair best = map(pair[0]);
#pragma unroll
    for (int i = 1; i < EACH / 2; ++i) best = combine(best, map(pair[i]));
    return best;
}

// Return the maximum of `largest` and the magnitudes of the loaded elements. If NANS, a NaN element makes the result
// NaN; otherwise NaN is ignored.
template <bool NANS, typename T, int EACH, int BYTES>
__device__ __forceinline__ float magnitude(const Loaded<T, NO_ACTIVATION, EACH, BYTES>& loaded, float largest) {
    if constexpr (IN_PAIRS<T, EACH>) {
        const auto best = reduce_pairs(
            loaded, [](auto a) { return __habs2(a); },
            [](auto a, auto b) { return NANS ? __hmax2_nan(a, b) : __hmax2(a, b); });
        const float low = to_float(best.x), high = to_float(best.y);
        return NANS ? max_or_nan(largest, max_or_nan(low, high)) : fmaxf(largest, fmaxf(low, high));
    } else {
        float value[EACH];
        loaded.values(value);
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            largest = NANS ? max_or_nan(largest, fabsf(value[i])) : fmaxf(largest, fabsf(value[i]));
        return largest;
    }
}

// Return the maximum of `value` over all threads of the block. All threads must call this function, and all get the
// result. No value may be negative or NaN.
__device__ __forceinline__ float block_max(float value) {
    __shared__ unsigned of_warp[32];
    unsigned largest = __reduce_max_sync(FULL_WARP, __float_as_uint(value));
    if (blockDim.x > 32) {
        if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
        __syncthreads();
        const unsigned lane = threadIdx.x % 32;
        largest = __reduce_max_sync(FULL_WARP, lane < blockDim.x / 32 ? of_warp[lane] : 0);
    }
    return __uint_as_float(largest);
}

// Set `first` and `second` to their maxima over all threads of the block. All threads must call this function. Values
// may be negative but not NaN.
__device__ __forceinline__ void block_max(float& first, float& second) {
    __shared__ uint2 of_warp[32];
    uint2 key;
    key.x = __reduce_max_sync(FULL_WARP, sortable(first)), key.y = __reduce_max_sync(FULL_WARP, sortable(second));
    if (blockDim.x > 32) {
        const int lane = threadIdx.x % 32;
        if (lane == 0) of_warp[threadIdx.x / 32] = key;
        __syncthreads();
        const bool there = lane < blockDim.x / 32;
        key.x = __reduce_max_sync(FULL_WARP, there ? of_warp[lane].x : 0);
        key.y = __reduce_max_sync(FULL_WARP, there ? of_warp[lane].y : 0);
    }
    first = from_sortable(key.x), second = from_sortable(key.y);
}
