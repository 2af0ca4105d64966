// Load and store elements, and compute the positions of the two elements of each rotated pair, for the rotary embedding
// kernels.
#pragma once
#include "common/numeric.cuh"
#include "common/vectors.cuh"

enum { HALVES, PAIRS };

// COUNT consecutive elements. They are loaded and stored in accesses of 16 bytes if their size is a multiple of 16
// bytes, else one by one.
template <typename T, int COUNT> struct Some {
    static constexpr int BYTES = COUNT * int(sizeof(T)) % 16 == 0 ? 16 : int(sizeof(T));
    static constexpr int LOADS = COUNT * int(sizeof(T)) / BYTES;
    alignas(16) typename VectorOf<BYTES>::Type unit[LOADS];
    __device__ __forceinline__ void load(const char* from) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) unit[i] = reinterpret_cast<const typename VectorOf<BYTES>::Type*>(from)[i];
    }
    __device__ __forceinline__ void load_shared(const char* from) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            unit[i] = __ldg(reinterpret_cast<const typename VectorOf<BYTES>::Type*>(from) + i);
    }
    __device__ __forceinline__ void store(char* to) const {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) reinterpret_cast<typename VectorOf<BYTES>::Type*>(to)[i] = unit[i];
    }
    __device__ __forceinline__ float get(int i) const { return to_float(reinterpret_cast<const T*>(unit)[i]); }
    __device__ __forceinline__ void set(int i, float value) { reinterpret_cast<T*>(unit)[i] = from_float<T>(value); }
};

// Return the byte offset in the head of a thread's first (side 0) or second (side 1) unit. A unit is UNIT consecutive
// elements. With HALVES, one unit is in the first half of the rotated elements and the other in the second half. With
// PAIRS, the second unit follows the first.
template <typename T, int UNIT, int LAYOUT> __device__ __forceinline__ int offset_of(int unit, int side, int half) {
    const int element = LAYOUT == PAIRS ? (2 * unit + side) * UNIT : unit * UNIT + side * half;
    return element * int(sizeof(T));
}

// Return the index, within a thread's two units, of the first (side 0) or second (side 1) element of rotated pair i.
// With HALVES, the first elements fill the first unit, and the second elements the second unit. With PAIRS, first and
// second elements alternate.
template <int UNIT, int LAYOUT> __device__ __forceinline__ constexpr int place_of(int i, int side) {
    return LAYOUT == PAIRS ? 2 * i + side : side * UNIT + i;
}
