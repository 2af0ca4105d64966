// The online softmax of a warp's rows. A lane holds two rows, with the indices j = 0 and 1.
#pragma once
#include "common/mma.cuh"
#include "common/warp.cuh"

// A weight is exp2(score - base). The base of a row is raised to the row's maximum score only when the base is more
// than FAR below the maximum. Weights are therefore at most 2^FAR and do not overflow, and the accumulators are seldom
// rescaled. Lanes seldom exchange data: `maximum` covers only the lane's own tokens until a base is raised, and `sum`
// covers only these tokens until `finish`.
template <typename Math, typename Rows, int FRAGMENTS> struct OnlineSoftmax {
    static constexpr float FAR = 8.f; // scores and FAR include the factor log2(e)

    float bases[2] = {-LARGEST_FLOAT, -LARGEST_FLOAT}; // the same in all lanes of a row
    float sum[2] = {0.f, 0.f}, maximum[2] = {-CUDART_INF_F, -CUDART_INF_F};

    // Add the scores of N tiles. `weights` receives the weights as the MMA operand for the values. If a base is raised,
    // `out` is rescaled.
    template <int N>
    __device__ __forceinline__ void add(const float (&scores)[N][Rows::FRAGMENTS][4], float (&out)[FRAGMENTS][4],
                                        unsigned (&weights)[N][Rows::OPERAND]) {
        if (__any_sync(FULL_WARP, raise_maxima(scores))) rescale(out);
#pragma unroll
        for (int tile = 0; tile < N; ++tile)
#pragma unroll
            for (int n = 0; n < Rows::FRAGMENTS; ++n)
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const float low = fast_exp2(scores[tile][n][2 * k] - bases[Rows::row_index(2 * k)]);
                    const float high = fast_exp2(scores[tile][n][2 * k + 1] - bases[Rows::row_index(2 * k + 1)]);
                    Rows::add(sum, k, low, high);
                    weights[tile][n * 2 + k] = Rows::template operand<Math>(low, high);
                }
    }

    // Raise the maxima to the largest scores of N tiles. Return whether a base is more than FAR below its maximum.
    template <int N> __device__ __forceinline__ bool raise_maxima(const float (&scores)[N][Rows::FRAGMENTS][4]) {
        bool far = false;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float most = Rows::most(scores[0], j);
#pragma unroll
            for (int tile = 1; tile < N; ++tile) most = fmaxf(most, Rows::most(scores[tile], j));
            maximum[j] = fmaxf(maximum[j], most);
            far |= maximum[j] > bases[j] + FAR;
        }
        return far;
    }

    // Raise the bases to the maxima and rescale the sums and `out`. A row with only -inf scores keeps its finite base,
    // because subtracting -inf from -inf gives NaN.
    __device__ __forceinline__ void rescale(float (&out)[FRAGMENTS][4]) {
        float corrections[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            maximum[j] = Rows::max_of_lanes(maximum[j]);
            const float base = maximum[j] == -CUDART_INF_F ? bases[j] : maximum[j];
            corrections[j] = fast_exp2(bases[j] - base);
            bases[j] = base;
            sum[j] *= corrections[j];
        }
#pragma unroll
        for (int n = 0; n < FRAGMENTS; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) out[n][i] *= corrections[Rows::row_index(i)];
    }

    // Reduce the maxima and sums over the lanes of each row, after the last tile.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int j = 0; j < 2; ++j) maximum[j] = Rows::max_of_lanes(maximum[j]), sum[j] = Rows::sum_of_lanes(sum[j]);
    }

    // Return the factor that rescales a row's sum and output from its base to its maximum, after `finish`.
    __device__ __forceinline__ float final_correction(int j) const {
        return maximum[j] == -CUDART_INF_F ? 1.f : fast_exp2(bases[j] - maximum[j]);
    }
};
