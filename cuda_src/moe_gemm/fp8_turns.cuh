// The order of two warpgroups that multiply.
#pragma once
#include "moe_gemm/fp8_layout.cuh"

// Turns of the two warpgroups, if they take them, by barriers 1 and 2: a warpgroup waits for its own, and hands over to
// the other.
template <bool TURNS> struct Fp8Turns {
    const int side;

    // Warpgroup 0 has the first turn.
    __device__ __forceinline__ void begin() const {
        if (TURNS && side == 1) pass();
    }

    __device__ __forceinline__ void wait() const {
        if constexpr (TURNS) asm volatile("bar.sync %0, %1;" ::"r"(1 + side), "n"(2 * WARPGROUP) : "memory");
    }

    __device__ __forceinline__ void pass() const {
        if constexpr (TURNS) asm volatile("bar.arrive %0, %1;" ::"r"(2 - side), "n"(2 * WARPGROUP) : "memory");
    }

    // Take turns without a product.
    template <int COUNT> __device__ __forceinline__ void skip() const {
        if constexpr (TURNS) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) wait(), pass();
        }
    }

    // What warpgroup 1 handed over last is taken.
    __device__ __forceinline__ void end() const {
        if (TURNS && side == 0) wait();
    }
};
