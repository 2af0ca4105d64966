// The largest magnitude of the elements that a thread has loaded, and the maximum over a block.
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

// Return the maximum, or NaN if a or b is NaN.
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

// True if the elements are processed in pairs: one instruction computes two magnitudes or two maxima of packed 16-bit
// elements.
template <typename T, int VECTOR> constexpr bool IN_PAIRS = sizeof(T) == 2 && VECTOR % 2 == 0;

// Apply `map` to each loaded pair, and fold the results from left to right with `combine`.
template <typename Map, typename Combine, typename T, int VECTOR, int BYTES>
__device__ __forceinline__ auto reduce_pairs(const Loaded<T, NO_ACTIVATION, VECTOR, BYTES>& loaded, Map map,
                                             Combine combine) {
    using Pair = typename PairOf<T>::Type;
    const Pair* pair = reinterpret_cast<const Pair*>(loaded.vector[0]);
    Pair folded = map(pair[0]);
#pragma unroll
    for (int i = 1; i < VECTOR / 2; ++i) folded = combine(folded, map(pair[i]));
    return folded;
}

// Return the maximum of `largest` and the magnitudes of the loaded elements. NaN elements are ignored; if NANS, they
// make the result NaN.
template <bool NANS, typename T, int VECTOR, int BYTES>
__device__ __forceinline__ float magnitude(const Loaded<T, NO_ACTIVATION, VECTOR, BYTES>& loaded, float largest) {
    if constexpr (IN_PAIRS<T, VECTOR>) {
        const auto folded = reduce_pairs(
            loaded, [](auto a) { return __habs2(a); },
            [](auto a, auto b) { return NANS ? __hmax2_nan(a, b) : __hmax2(a, b); });
        const float low = to_float(folded.x), high = to_float(folded.y);
        return NANS ? max_or_nan(largest, max_or_nan(low, high)) : fmaxf(largest, fmaxf(low, high));
    } else {
        float value[VECTOR];
        loaded.values(value);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i)
            largest = NANS ? max_or_nan(largest, fabsf(value[i])) : fmaxf(largest, fabsf(value[i]));
        return largest;
    }
}

// Return the maximum of `value` over the block. All threads must call this function. No value may be negative or NaN.
__device__ __forceinline__ float block_max(float value) {
    __shared__ unsigned warp_max[32];
    unsigned largest = __reduce_max_sync(FULL_WARP, __float_as_uint(value));
    if (blockDim.x > 32) {
        if (threadIdx.x % 32 == 0) warp_max[threadIdx.x / 32] = largest;
        __syncthreads();
        const unsigned lane = threadIdx.x % 32;
        largest = __reduce_max_sync(FULL_WARP, lane < blockDim.x / 32 ? warp_max[lane] : 0);
    }
    return __uint_as_float(largest);
}

// Replace two values by their maxima over the block. The values may be negative.
__device__ __forceinline__ void block_max(float& first, float& second) {
    __shared__ uint2 warp_max[32];
    uint2 key;
    key.x = __reduce_max_sync(FULL_WARP, sortable(first)), key.y = __reduce_max_sync(FULL_WARP, sortable(second));
    if (blockDim.x > 32) {
        const int lane = threadIdx.x % 32;
        if (lane == 0) warp_max[threadIdx.x / 32] = key;
        __syncthreads();
        const bool in_range = lane < blockDim.x / 32;
        key.x = __reduce_max_sync(FULL_WARP, in_range ? warp_max[lane].x : 0);
        key.y = __reduce_max_sync(FULL_WARP, in_range ? warp_max[lane].y : 0);
    }
    first = from_sortable(key.x), second = from_sortable(key.y);
}
