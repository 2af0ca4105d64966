// Reductions and scans over LANES neighbouring lanes of a warp (a power of two): a warp that works on
// several rows at once gives each row its own LANES lanes. Every lane of the warp must take part.
#pragma once

constexpr unsigned FULL_WARP = 0xffffffffu;

template <int LANES> __device__ __forceinline__ float lanes_max(float value) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2)
        value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, step));
    return value;
}

template <int LANES> __device__ __forceinline__ float lanes_min(float value) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2)
        value = fminf(value, __shfl_xor_sync(FULL_WARP, value, step));
    return value;
}

template <int LANES, typename T> __device__ __forceinline__ T lanes_sum(T value) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2)
        value += __shfl_xor_sync(FULL_WARP, value, step);
    return value;
}

// The sum of `value` over this lane and those before it.
template <int LANES> __device__ __forceinline__ int lanes_inclusive_sum(int value, int lane) {
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
        const int before = __shfl_up_sync(FULL_WARP, value, step, LANES);
        if (lane >= step) value += before;
    }
    return value;
}
