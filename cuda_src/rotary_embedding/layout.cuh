// Define the vectors of a thread, and the positions of rotated pairs in them.
#pragma once
#include "common/numeric.cuh"
#include "common/vectors.cuh"

enum { HALVES, PAIRS };

// COUNT consecutive elements, accessed 16 bytes at a time if possible, else one by one.
template <typename T, int COUNT> struct Elements {
    static constexpr int BYTES = COUNT * int(sizeof(T)) % 16 == 0 ? 16 : int(sizeof(T));
    static constexpr int LOADS = COUNT * int(sizeof(T)) / BYTES;
    alignas(16) Vector<BYTES> vector[LOADS];
    __device__ __forceinline__ void load(const char* from) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) vector[i] = reinterpret_cast<const Vector<BYTES>*>(from)[i];
    }
    __device__ __forceinline__ void load_readonly(const char* from) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) vector[i] = __ldg(reinterpret_cast<const Vector<BYTES>*>(from) + i);
    }
    __device__ __forceinline__ void store(char* to) const {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) reinterpret_cast<Vector<BYTES>*>(to)[i] = vector[i];
    }
    __device__ __forceinline__ float get(int i) const { return to_float(reinterpret_cast<const T*>(vector)[i]); }
    __device__ __forceinline__ void set(int i, float value) { reinterpret_cast<T*>(vector)[i] = from_float<T>(value); }
};

// A thread has two vectors of COUNT elements. Return the byte offset of vector `side` (0 or 1) in the head. With
// HALVES, the vectors are in the two halves of the rotated elements. With PAIRS, vector 1 follows vector 0.
template <typename T, int COUNT, int LAYOUT> __device__ __forceinline__ int offset_of(int vector, int side, int half) {
    const int element = LAYOUT == PAIRS ? (2 * vector + side) * COUNT : vector * COUNT + side * half;
    return element * int(sizeof(T));
}

// Return the index of element `side` (0 or 1) of rotated pair i in a thread's two vectors. With HALVES, the pair has
// the same index in both vectors. With PAIRS, the pair is contiguous.
template <int COUNT, int LAYOUT> __device__ __forceinline__ constexpr int pair_element(int i, int side) {
    return LAYOUT == PAIRS ? 2 * i + side : side * COUNT + i;
}
