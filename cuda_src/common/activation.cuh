// The activations of a gated feed-forward layer. What a token's gate and up projections become, in float32:
//
//   silu        gate / (1 + exp(-gate)) * up
//   gelu        gate * (1 + erf(gate / sqrt(2))) / 2 * up
//   gelu_tanh   gate * (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 gate^3))) / 2 * up
//   swigluoai   gate' / (1 + exp(-1.702 gate')) * (up' + 1), with gate' = min(gate, 7), up' = clamp(up, -7, 7)
//   relu2       max(gate, 0)^2 * up
#pragma once

enum Activation { NO_ACTIVATION, SILU, GELU, GELU_TANH, SWIGLUOAI, RELU2 };  // as in cukern/runtime/activation.py

__device__ __forceinline__ float sigmoid_of(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

template <int ACTIVATION> __device__ __forceinline__ float activate(float gate, float up) {
    if constexpr (ACTIVATION == SILU) return gate * sigmoid_of(gate) * up;
    if constexpr (ACTIVATION == GELU) return .5f * gate * (1.f + erff(gate * .70710678f)) * up;
    // (1 + tanh(z)) / 2 is the sigmoid of 2 z, which keeps its digits where tanh is near -1.
    if constexpr (ACTIVATION == GELU_TANH)
        return gate * sigmoid_of(1.5957691f * (gate + .044715f * gate * gate * gate)) * up;
    if constexpr (ACTIVATION == SWIGLUOAI) {
        // Comparisons, not fminf: NaN stays NaN.
        gate = gate > 7.f ? 7.f : gate;
        up = up > 7.f ? 7.f : up < -7.f ? -7.f : up;
        return gate * sigmoid_of(1.702f * gate) * (up + 1.f);
    }
    if constexpr (ACTIVATION == RELU2) {
        gate = gate < 0.f ? 0.f : gate;
        return gate * gate * up;
    }
    return gate;
}
