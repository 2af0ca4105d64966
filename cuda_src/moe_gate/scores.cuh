// Load a token's logits and compute their scores, for all gates.
#pragma once
#include "common/numeric.cuh"
#include "common/warp.cuh"

enum Scoring { ANY, SIGMOID, SOFTMAX, SQRTSOFTPLUS };

// Round a float64 bias to float32.
__device__ __forceinline__ float to_float(double x) { return __double2float_rn(x); }

// Use the widest loads that COUNT allows.
template <typename T, int COUNT>
__device__ __forceinline__ void load_floats(const T* __restrict__ from, float (&to)[COUNT]) {
    constexpr int BYTES = COUNT * sizeof(T);
    constexpr int WIDTH = BYTES % 16 == 0 ? 16 : BYTES % 8 == 0 ? 8 : BYTES % 4 == 0 ? 4 : sizeof(T);
    constexpr int PER_LOAD = WIDTH / sizeof(T);
    struct alignas(WIDTH) Pack {
        T item[PER_LOAD];
    };
#pragma unroll
    for (int i = 0; i < COUNT / PER_LOAD; ++i) {
        const Pack pack = reinterpret_cast<const Pack*>(from)[i];
#pragma unroll
        for (int j = 0; j < PER_LOAD; ++j) to[i * PER_LOAD + j] = to_float(pack.item[j]);
    }
}

template <typename Params> __device__ __forceinline__ int load_valid(const Params& p) {
    int valid = p.valid;
    if (p.valid_on_device)
        valid = p.valid_is_int64 ? int(min(*static_cast<const long long*>(p.valid_on_device), (long long)p.tokens))
                                 : *static_cast<const int*>(p.valid_on_device);
    return valid;
}

// Compute scores of logits. Multiplications and additions are intrinsics, which the compiler does not fuse, so that all
// kernel instances give the same bits.
template <bool DYNAMIC> struct Scores {
    const float softcap; // 0: off; always off unless DYNAMIC
    const int scoring;
    float inverse_sum = 1.f, largest = 0.f; // softmax: 1 / sum of the row's exponentials; the row's largest logit

    // The softcap is monotonic, so it keeps the order of the logits.
    __device__ __forceinline__ float softmax_argument(float x) const {
        if constexpr (DYNAMIC)
            if (softcap != 0.f) return softcap * tanhf(x / softcap);
        return fmaxf(fminf(x, LARGEST_FLOAT), -LARGEST_FLOAT);
    }
    // The sum is in fixed point, so the number of lanes does not change it.
    template <int LANES, int VALUES>
    __device__ __forceinline__ void sum_exponentials(const float (&logit)[VALUES], unsigned existing) {
        largest = -CUDART_INF_F;
#pragma unroll
        for (int i = 0; i < VALUES; ++i) largest = fmaxf(largest, logit[i]);
        largest = softmax_argument(lanes_max<LANES>(largest));
        unsigned long long sum = 0;
#pragma unroll
        for (int i = 0; i < VALUES; ++i)
            if (existing >> i & 1 && logit[i] > -CUDART_INF_F)
                sum += __float2uint_rn(fast_exp2((softmax_argument(logit[i]) - largest) * LOG2_E) * 0x1p31f);
        inverse_sum = __fdividef(0x1p31f, float(lanes_sum<LANES>(sum)));
    }
    __device__ __forceinline__ float sigmoid(float x) const {
        return fast_reciprocal(__fadd_rn(1.f, fast_exp2(__fmul_rn(x, -LOG2_E))));
    }
    __device__ __forceinline__ float softmax(float x) const {
        return __fmul_rn(fast_exp2(__fmul_rn(__fsub_rn(softmax_argument(x), largest), LOG2_E)), inverse_sum);
    }
    __device__ __forceinline__ float sqrtsoftplus(float x) const { return sqrtf(softplus(fminf(x, LARGEST_FLOAT))); }
    __device__ __forceinline__ float of(float x) const {
        return scoring == SIGMOID ? sigmoid(x) : scoring == SOFTMAX ? softmax(x) : sqrtsoftplus(x);
    }
};
