// Define the layout of a token in FlashMLA's FP8 cache. A token has 656 bytes: 512 latents in E4M3, then one float32
// scale per 128 latents, then 64 rotary elements in bfloat16.
#pragma once
#include "kv_cache/format.cuh"

// GROUP latents share a scale.
constexpr int LATENTS = 512, GROUP = 128;
constexpr int SCALES_AT = LATENTS, ROTARY_AT = SCALES_AT + LATENTS / GROUP * 4; // in bytes
constexpr float LARGEST_E4M3 = 448.f, SMALLEST_SCALE = 1e-4f;

// Load a unit with one instruction or, if it is not ALIGNED, byte by byte.
template <typename U, bool ALIGNED> __device__ __forceinline__ U load_unit(const char* from) {
    if constexpr (ALIGNED) {
        return __ldg(reinterpret_cast<const U*>(from));
    } else {
        U unit;
#pragma unroll
        for (int i = 0; i < int(sizeof(U)); ++i) reinterpret_cast<char*>(&unit)[i] = __ldg(from + i);
        return unit;
    }
}

template <bool ALIGNED, typename U> __device__ __forceinline__ void store_unit(char* to, const U& unit) {
    if constexpr (ALIGNED) {
        *reinterpret_cast<U*>(to) = unit;
    } else {
#pragma unroll
        for (int i = 0; i < int(sizeof(U)); ++i) to[i] = reinterpret_cast<const char*>(&unit)[i];
    }
}

// Convert between T and bfloat16. If T is bfloat16, all bits are kept, even those of a NaN.
template <typename T> __device__ __forceinline__ __nv_bfloat16 to_bfloat16(T x) {
    return from_float<__nv_bfloat16>(to_float(x));
}
template <> __device__ __forceinline__ __nv_bfloat16 to_bfloat16<__nv_bfloat16>(__nv_bfloat16 x) { return x; }

template <typename T> __device__ __forceinline__ T from_bfloat16(__nv_bfloat16 x) { return from_float<T>(to_float(x)); }
template <> __device__ __forceinline__ __nv_bfloat16 from_bfloat16<__nv_bfloat16>(__nv_bfloat16 x) { return x; }
