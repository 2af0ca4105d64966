// The online softmax of a warp's 16 rows, of which a thread has two: j = 0 is row lane / 4, j = 1 is row lane / 4 + 8.
#pragma once
#include "common/mma.cuh"
#include "common/warp.cuh"

// A weight is exp2(score - base). The base follows the maximum of the scores only when it is more than FAR below: until
// then weights are at most 2^FAR, so nothing overflows, and the accumulators need no correction at every new maximum.
template <typename Math, int FRAGMENTS> struct OnlineSoftmax {
    static constexpr float FAR = 8.f; // times log2(e), as scores are

    float bases[2] = {-LARGEST_FLOAT, -LARGEST_FLOAT};
    float sum[2] = {0.f, 0.f}, maximum[2] = {-CUDART_INF_F, -CUDART_INF_F};

    // Take the scores of N tiles. `weights` are the fragments A of the products with the values; `out` is corrected if
    // need be.
    template <int N>
    __device__ __forceinline__ void add(const float (&scores)[N][2][4], float (&out)[FRAGMENTS][4],
                                        unsigned (&weights)[N][4]) {
        if (__any_sync(FULL_WARP, raise_maxima(scores))) rescale(out);
#pragma unroll
        for (int tile = 0; tile < N; ++tile)
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const float low = fast_exp2(scores[tile][n][2 * j] - bases[j]);
                    const float high = fast_exp2(scores[tile][n][2 * j + 1] - bases[j]);
                    sum[j] += low + high;
                    weights[tile][n * 2 + j] = pack<Math>(low, high);
                }
    }

    // Raise the maxima to the scores of N tiles; whether a base is now more than FAR below.
    template <int N> __device__ __forceinline__ bool raise_maxima(const float (&scores)[N][2][4]) {
        bool far = false;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float most = fmaxf(scores[0][0][2 * j], scores[0][0][2 * j + 1]);
#pragma unroll
            for (int i = 1; i < 2 * N; ++i)
                most = fmaxf(most, fmaxf(scores[i / 2][i % 2][2 * j], scores[i / 2][i % 2][2 * j + 1]));
            most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 1));
            most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 2));
            maximum[j] = fmaxf(maximum[j], most);
            far |= maximum[j] > bases[j] + FAR;
        }
        return far;
    }

    // Raise the bases to the maxima, and correct what was summed. A row with no score but -inf keeps its finite base:
    // -inf - -inf would be NaN.
    __device__ __forceinline__ void rescale(float (&out)[FRAGMENTS][4]) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float base = maximum[j] == -CUDART_INF_F ? bases[j] : maximum[j];
            const float correction = fast_exp2(bases[j] - base);
            bases[j] = base;
            sum[j] *= correction;
#pragma unroll
            for (int n = 0; n < FRAGMENTS; ++n) out[n][2 * j] *= correction, out[n][2 * j + 1] *= correction;
        }
    }

    // The correction of a row's sum and output after the last tile, from its base to its maximum.
    __device__ __forceinline__ float final_correction(int j) const {
        return maximum[j] == -CUDART_INF_F ? 1.f : fast_exp2(bases[j] - maximum[j]);
    }
};
