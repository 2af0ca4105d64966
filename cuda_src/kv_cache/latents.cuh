// A token in FlashMLA's FP8 cache has 656 bytes: 512 latents in E4M3, one float32 scale per 128 latents, and 64 rotary
// elements in bfloat16.
#pragma once
#include "kv_cache/format.cuh"

constexpr int LATENTS = 512, GROUP = 128;                                       // GROUP latents share a scale
constexpr int SCALES_AT = LATENTS, ROTARY_AT = SCALES_AT + LATENTS / GROUP * 4; // in bytes
constexpr float LARGEST_E4M3 = 448.f, SMALLEST_SCALE = 1e-4f;

// If not ALIGNED, load byte by byte.
template <typename V, bool ALIGNED> __device__ __forceinline__ V load_vector(const char* from) {
    if constexpr (ALIGNED) {
        return __ldg(reinterpret_cast<const V*>(from));
    } else {
        V vector;
#pragma unroll
        for (int i = 0; i < int(sizeof(V)); ++i) reinterpret_cast<char*>(&vector)[i] = __ldg(from + i);
        return vector;
    }
}

template <bool ALIGNED, typename V> __device__ __forceinline__ void store_vector(char* to, const V& vector) {
    if constexpr (ALIGNED) {
        *reinterpret_cast<V*>(to) = vector;
    } else {
#pragma unroll
        for (int i = 0; i < int(sizeof(V)); ++i) to[i] = reinterpret_cast<const char*>(&vector)[i];
    }
}

// A bfloat16 `x` keeps all its bits, even if it is a NaN.
template <typename T> __device__ __forceinline__ __nv_bfloat16 to_bfloat16(T x) {
    return from_float<__nv_bfloat16>(to_float(x));
}
template <> __device__ __forceinline__ __nv_bfloat16 to_bfloat16<__nv_bfloat16>(__nv_bfloat16 x) { return x; }

template <typename T> __device__ __forceinline__ T from_bfloat16(__nv_bfloat16 x) { return from_float<T>(to_float(x)); }
template <> __device__ __forceinline__ __nv_bfloat16 from_bfloat16<__nv_bfloat16>(__nv_bfloat16 x) { return x; }
