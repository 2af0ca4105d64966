#pragma once
#include "common/numeric.cuh"

// Return `a * b` for two packed pairs. GPUs before sm_90 multiply bfloat16 only by fma, here with an addend of -0.
template <typename T> __device__ __forceinline__ unsigned multiply_pairs(unsigned a, unsigned b) {
    unsigned product;
    if constexpr (IS_BFLOAT16<T>)
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000));
    else
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}
