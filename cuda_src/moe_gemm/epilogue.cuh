// Epilogues of a grouped GEMM: they add the bias to the finished sums and apply the activation.
//
// The template argument ACTIVATION is a number of common/activation.cuh, at most 15, plus any of the flags below.
#pragma once
#include "common/activation.cuh"
#include "moe_gemm/params.cuh"

constexpr int FUNCTIONS = 16;   // upper bound of the activation numbers
constexpr int UNGATED = 16;     // the activation applies to each sum: activate(x, 1)
constexpr int INTERLEAVED = 32; // weight rows 2 j and 2 j + 1 are gate j and its up; else gates and ups are halves of n
constexpr int BIASED = 64;      // add a bias to the sums
constexpr int BOUNDED = 128;    // swigluoai takes alpha and limit from the arguments
constexpr int EXPERT_SCALE = 256; // FP8: a_scale has one scale per expert

__host__ __device__ constexpr bool is_gated(int activation) {
    return activation % FUNCTIONS != NO_ACTIVATION && !(activation & UNGATED);
}
// Return whether the gates are the first half of n.
__host__ __device__ constexpr bool has_halves(int activation) {
    return is_gated(activation) && !(activation & INTERLEAVED);
}

// Return the activation of a sum or, if gated, of a gate and its up (the sum that the activated gate multiplies).
template <int ACTIVATION> __device__ __forceinline__ float finish(const GemmParams& p, float gate, float up = 1.f) {
    constexpr int FUNCTION = ACTIVATION % FUNCTIONS;
    if constexpr (ACTIVATION & BOUNDED) return activate<FUNCTION>(gate, up, p.alpha, p.limit);
    return activate<FUNCTION>(gate, up);
}

// Return the row of an expert's weights that produces a column of the result. If gated, two rows produce a column: side
// 0 is the gate, side 1 the up.
template <int ACTIVATION> __device__ __forceinline__ int weight_row(const GemmParams& p, int column, int side) {
    if constexpr (!is_gated(ACTIVATION)) return column;
    return ACTIVATION & INTERLEAVED ? column * 2 + side : column + side * (p.n / 2);
}

// Return the bias of a row of an expert's weights. Biases are float32 or T.
template <typename T> __device__ __forceinline__ float bias_of(const GemmParams& p, int expert, int row) {
    const long long at = (long long)expert * p.n + row;
    return p.bias_is_float ? static_cast<const float*>(p.bias)[at] : to_float(static_cast<const T*>(p.bias)[at]);
}
