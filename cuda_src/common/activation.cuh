// Activations of a gated feed-forward layer. They are computed in float32 from a token's gate and up projections:
//
//   silu        gate / (1 + exp(-gate)) * up
//   gelu        gate * (1 + erf(gate / sqrt(2))) / 2 * up
//   gelu_tanh   gate * (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 gate^3))) / 2 * up
//   swigluoai   gate' / (1 + exp(-alpha gate')) * (up' + 1), with gate' = min(gate, limit) and
//               up' = clamp(up, -limit, limit)
//   relu2       max(gate, 0)^2 * up
#pragma once
#include "common/numeric.cuh"

// The host parses the names of the activations from this line.
enum Activation { NO_ACTIVATION, SILU, GELU, GELU_TANH, SWIGLUOAI, RELU2, ACTIVATIONS };

constexpr float ALPHA = 1.702f, LIMIT = 7.f; // defaults of swigluoai, as in cukern/runtime/activation.py

__device__ __forceinline__ float sigmoid_of(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

template <int ACTIVATION>
__device__ __forceinline__ float activate(float gate, float up, float alpha = ALPHA, float limit = LIMIT) {
    if constexpr (ACTIVATION == SILU) return gate * sigmoid_of(gate) * up;
    if constexpr (ACTIVATION == GELU) {
        // tail = (1 - erf(|gate| / sqrt(2))) / 2 = 2^exponent. The exponent is computed by a minimax polynomial in
        // |gate|. The error of tail * |gate| is at most 2e-8 * max(1, |gate|).
        const float x = fabsf(gate);
        float exponent = -1.84005739e-06f;
        exponent = fmaf(exponent, x, 2.74955746e-05f);
        exponent = fmaf(exponent, x, -1.29809356e-04f);
        exponent = fmaf(exponent, x, -2.73151789e-04f);
        exponent = fmaf(exponent, x, 7.24194944e-03f);
        exponent = fmaf(exponent, x, -5.26207723e-02f);
        exponent = fmaf(exponent, x, -4.59166259e-01f);
        exponent = fmaf(exponent, x, -1.15111053f);
        exponent = fmaf(exponent, x, -9.99999881e-01f);
        const float tail = fast_exp2(exponent);
        return gate * (gate < 0.f ? tail : 1.f - tail) * up;
    }
    // (1 + tanh(z)) / 2 = sigmoid(2 z). The sigmoid stays accurate where tanh is near -1.
    if constexpr (ACTIVATION == GELU_TANH)
        return gate * sigmoid_of(1.5957691f * (gate + .044715f * gate * gate * gate)) * up;
    if constexpr (ACTIVATION == SWIGLUOAI) {
        // A comparison leaves a NaN unchanged; fminf would return `limit`.
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up < -limit ? -limit : up;
        return gate * sigmoid_of(alpha * gate) * (up + 1.f);
    }
    if constexpr (ACTIVATION == RELU2) {
        gate = gate < 0.f ? 0.f : gate;
        return gate * gate * up;
    }
    return gate;
}
