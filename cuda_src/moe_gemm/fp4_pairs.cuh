// Multiplication of packed pairs of 16-bit floats. The kernels use it to apply scales to unpacked 4-bit weights.
#pragma once
#include "common/numeric.cuh"

// Return `a * b` for two packed pairs. GPUs before sm_90 have no bfloat16 multiplication, so bfloat16 uses an fma that
// adds -0.
template <typename T> __device__ __forceinline__ unsigned multiply_pairs(unsigned a, unsigned b) {
    unsigned product;
    if constexpr (IS_BFLOAT16<T>)
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000));
    else
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}
