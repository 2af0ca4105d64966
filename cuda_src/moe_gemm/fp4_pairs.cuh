// Products of pairs of 16-bit numbers, by which weights of 4 bits get their scales.
#pragma once
#include "common/numeric.cuh"

// a * b of two pairs. Before sm_90 there is no product of bfloat16, only a product and sum: -0 is added.
template <typename T> __device__ __forceinline__ unsigned multiply_pairs(unsigned a, unsigned b) {
    unsigned product;
    if constexpr (IS_BFLOAT16<T>)
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000));
    else
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}
