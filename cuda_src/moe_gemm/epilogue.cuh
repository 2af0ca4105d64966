// What a grouped product does with its finished sums.
//
// ACTIVATION of its kernels is a number of common/activation.cuh, of at most 15, plus some of the flags below.
#pragma once
#include "common/activation.cuh"
#include "moe_gemm/params.cuh"

constexpr int FUNCTIONS = 16;   // more than the largest number of an activation
constexpr int UNGATED = 16;     // the activation is of each sum: activate(x, 1)
constexpr int INTERLEAVED = 32; // rows 2 j and 2 j + 1 of the weights are gate j and its up; else each has a half of n
constexpr int BIASED = 64;      // sums get a bias
constexpr int BOUNDED = 128;    // swigluoai has the alpha and the limit of the arguments
constexpr int EXPERT_SCALE = 256; // FP8: a_scale is of each expert

__host__ __device__ constexpr bool is_gated(int activation) {
    return activation % FUNCTIONS != NO_ACTIVATION && !(activation & UNGATED);
}
// Whether gates have the first half of n.
__host__ __device__ constexpr bool has_halves(int activation) {
    return is_gated(activation) && !(activation & INTERLEAVED);
}

// The result of a sum or, gated, of a gate and its up.
template <int ACTIVATION> __device__ __forceinline__ float finish(const GemmParams& p, float gate, float up = 1.f) {
    constexpr int FUNCTION = ACTIVATION % FUNCTIONS;
    if constexpr (ACTIVATION & BOUNDED) return activate<FUNCTION>(gate, up, p.alpha, p.limit);
    return activate<FUNCTION>(gate, up);
}

// The row of an expert's weights for a column of the result; gated, of its gate (side 0) or its up (side 1).
template <int ACTIVATION> __device__ __forceinline__ int weight_row(const GemmParams& p, int column, int side) {
    if constexpr (!is_gated(ACTIVATION)) return column;
    return ACTIVATION & INTERLEAVED ? column * 2 + side : column + side * (p.n / 2);
}

// The bias of a row of an expert's weights: float32, or of the type of the result.
template <typename T> __device__ __forceinline__ float bias_of(const GemmParams& p, int expert, int row) {
    const long long at = (long long)expert * p.n + row;
    return p.bias_is_float ? static_cast<const float*>(p.bias)[at] : to_float(static_cast<const T*>(p.bias)[at]);
}
