// Bias and activation of the finished sums of a grouped GEMM.
//
// The template argument ACTIVATION is an activation of common/activation.cuh (0 to 15) plus the flags below. A gated
// activation computes a result column from a gate row and an up row of the weights: activate(gate, up).
#pragma once
#include "common/activation.cuh"
#include "moe_gemm/params.cuh"

constexpr int FUNCTIONS = 16;
constexpr int UNGATED = 16; // the activation has no gate: activate(x, 1)
constexpr int INTERLEAVED =
    32; // weight rows `2 * j` and `2 * j + 1` are gate and up; otherwise rows `j` and `j + n / 2`
constexpr int BIASED = 64;
constexpr int BOUNDED = 128;      // swigluoai reads `alpha` and `limit` from the kernel's arguments
constexpr int EXPERT_SCALE = 256; // FP8: a_scale has one scale per expert

__host__ __device__ constexpr bool is_gated(int activation) {
    return activation % FUNCTIONS != NO_ACTIVATION && !(activation & UNGATED);
}
__host__ __device__ constexpr bool has_halves(int activation) {
    return is_gated(activation) && !(activation & INTERLEAVED);
}

// Apply the activation to finished sums. `gate`: the sum of the gate row or, if not gated, the only sum.
template <int ACTIVATION> __device__ __forceinline__ float finish(const GemmParams& p, float gate, float up = 1.f) {
    constexpr int FUNCTION = ACTIVATION % FUNCTIONS;
    if constexpr (ACTIVATION & BOUNDED) return activate<FUNCTION>(gate, up, p.alpha, p.limit);
    return activate<FUNCTION>(gate, up);
}

// Return the row of an expert's weights for result column `column`. `side`: 0 gate, 1 up.
template <int ACTIVATION> __device__ __forceinline__ int weight_row(const GemmParams& p, int column, int side) {
    if constexpr (!is_gated(ACTIVATION)) return column;
    return ACTIVATION & INTERLEAVED ? column * 2 + side : column + side * (p.n / 2);
}

template <typename T> __device__ __forceinline__ float bias_of(const GemmParams& p, int expert, int row) {
    const long long at = (long long)expert * p.n + row;
    return p.bias_is_float ? static_cast<const float*>(p.bias)[at] : to_float(static_cast<const T*>(p.bias)[at]);
}
