// What the kernels of rotary embedding share: units of elements, and where the numbers of a rotation are.
#pragma once
#include "common/numeric.cuh"
#include "common/units.cuh"

enum { HALVES, PAIRS };

// COUNT elements in the widest units that they fill.
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

// Where the two units of a thread are: in halves one in each, in pairs one after the other.
template <typename T, int UNIT, int LAYOUT> __device__ __forceinline__ int offset_of(int unit, int side, int half) {
    const int element = LAYOUT == PAIRS ? (2 * unit + side) * UNIT : unit * UNIT + side * half;
    return element * int(sizeof(T));
}

// Element i of a side, which are one after the other in halves and every second one in pairs.
template <int UNIT, int LAYOUT> __device__ __forceinline__ constexpr int place_of(int i, int side) {
    return LAYOUT == PAIRS ? 2 * i + side : side * UNIT + i;
}
