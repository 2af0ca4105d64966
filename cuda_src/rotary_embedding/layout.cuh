// Shared by the kernels of rotary embedding: units of elements, and the positions of a rotation's numbers.
#pragma once
#include "common/numeric.cuh"
#include "common/units.cuh"

enum { HALVES, PAIRS };

// COUNT elements, moved as units of 16 bytes if they fill such units, else one by one.
template <typename T, int COUNT> struct Some {
    static constexpr int BYTES = COUNT * int(sizeof(T)) % 16 == 0 ? 16 : int(sizeof(T));
    static constexpr int LOADS = COUNT * int(sizeof(T)) / BYTES;
    alignas(16) typename UnitOf<BYTES>::Type unit[LOADS];
    __device__ __forceinline__ void load(const char* from) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) unit[i] = reinterpret_cast<const typename UnitOf<BYTES>::Type*>(from)[i];
    }
    __device__ __forceinline__ void load_shared(const char* from) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            unit[i] = __ldg(reinterpret_cast<const typename UnitOf<BYTES>::Type*>(from) + i);
    }
    __device__ __forceinline__ void store(char* to) const {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) reinterpret_cast<typename UnitOf<BYTES>::Type*>(to)[i] = unit[i];
    }
    __device__ __forceinline__ float get(int i) const { return to_float(reinterpret_cast<const T*>(unit)[i]); }
    __device__ __forceinline__ void set(int i, float value) { reinterpret_cast<T*>(unit)[i] = from_float<T>(value); }
};

// Return the byte offset of unit `side` of a thread's two units. With HALVES one unit is in each half of the head; with
// PAIRS one follows the other.
template <typename T, int UNIT, int LAYOUT> __device__ __forceinline__ int offset_of(int unit, int side, int half) {
    const int element = LAYOUT == PAIRS ? (2 * unit + side) * UNIT : unit * UNIT + side * half;
    return element * int(sizeof(T));
}

// Return the index of element i of a side within a thread's two units. With HALVES the elements of a side are
// consecutive; with PAIRS they alternate with the elements of the other side.
template <int UNIT, int LAYOUT> __device__ __forceinline__ constexpr int place_of(int i, int side) {
    return LAYOUT == PAIRS ? 2 * i + side : side * UNIT + i;
}
