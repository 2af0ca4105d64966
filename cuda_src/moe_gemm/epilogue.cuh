// Epilogues of a grouped GEMM: they add the bias to the finished sums and apply the activation.
//
// The template argument ACTIVATION is an activation constant of common/activation.cuh (0 to 15) plus any of the flags
// below. A gated activation computes one column of the result from two rows of weights: activate(gate, up) of the sums
// of the gate row and of its up row.
#pragma once
#include "common/activation.cuh"
#include "moe_gemm/params.cuh"

constexpr int FUNCTIONS = 16;     // the activation constants are below this
constexpr int UNGATED = 16;       // the activation applies to each sum: activate(x, 1)
constexpr int INTERLEAVED = 32;   // weight rows `2 * j` and `2 * j + 1` are gate and up; else rows j and `j + n / 2`
constexpr int BIASED = 64;        // add a bias to the sums
constexpr int BOUNDED = 128;      // swigluoai reads alpha and limit from the kernel's arguments
constexpr int EXPERT_SCALE = 256; // FP8: a_scale has one scale per expert

__host__ __device__ constexpr bool is_gated(int activation) {
    return activation % FUNCTIONS != NO_ACTIVATION && !(activation & UNGATED);
}
// Return whether the gate rows are the first half of the n rows of weights, and the up rows the second half.
__host__ __device__ constexpr bool has_halves(int activation) {
    return is_gated(activation) && !(activation & INTERLEAVED);
}

// Return the activated result. `gate` and `up` are the sums of a gate row and of its up row; if not gated, `gate` is
// the only sum.
template <int ACTIVATION> __device__ __forceinline__ float finish(const GemmParams& p, float gate, float up = 1.f) {
    constexpr int FUNCTION = ACTIVATION % FUNCTIONS;
    if constexpr (ACTIVATION & BOUNDED) return activate<FUNCTION>(gate, up, p.alpha, p.limit);
    return activate<FUNCTION>(gate, up);
}

// Return the row of an expert's weights that produces column `column` of the result. If gated, two rows produce the
// column: `side` 0 selects the gate row, 1 the up row.
template <int ACTIVATION> __device__ __forceinline__ int weight_row(const GemmParams& p, int column, int side) {
    if constexpr (!is_gated(ACTIVATION)) return column;
    return ACTIVATION & INTERLEAVED ? column * 2 + side : column + side * (p.n / 2);
}

// Return the bias for row `row` of an expert's weights. The array of biases is float32 or T.
template <typename T> __device__ __forceinline__ float bias_of(const GemmParams& p, int expert, int row) {
    const long long at = (long long)expert * p.n + row;
    return p.bias_is_float ? static_cast<const float*>(p.bias)[at] : to_float(static_cast<const T*>(p.bias)[at]);
}
