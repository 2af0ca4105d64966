// Compute the online softmax of a warp's rows. A lane has two rows.
#pragma once
#include "common/mma.cuh"
#include "common/warp.cuh"

// A weight is exp2(score - row_max). row_max is raised to the row's maximum only when it is more than RESCALE_THRESHOLD
// below the maximum. Weights are therefore at most 2^RESCALE_THRESHOLD and do not overflow, and the accumulators are
// seldom rescaled. Lanes seldom exchange data: `maximum` covers only the lane's own tokens until row_max is raised.
// `sum` covers only the lane's own tokens until `finish`.
template <typename Math, typename Rows, int FRAGMENTS> struct OnlineSoftmax {
    static constexpr float RESCALE_THRESHOLD = 8.f; // scores include the factor log2(e)

    float row_max[2] = {-LARGEST_FLOAT, -LARGEST_FLOAT}; // the same in all lanes of a row
    float sum[2] = {0.f, 0.f}, maximum[2] = {-CUDART_INF_F, -CUDART_INF_F};

    // `weights` receives the weights as the MMA operand for the values.
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
                    const float low = fast_exp2(scores[tile][n][2 * k] - row_max[Rows::row_index(2 * k)]);
                    const float high = fast_exp2(scores[tile][n][2 * k + 1] - row_max[Rows::row_index(2 * k + 1)]);
                    Rows::add(sum, k, low, high);
                    weights[tile][n * 2 + k] = Rows::template operand<Math>(low, high);
                }
    }

    // Update `maximum`. Return whether a row_max is more than RESCALE_THRESHOLD below its `maximum`.
    template <int N> __device__ __forceinline__ bool raise_maxima(const float (&scores)[N][Rows::FRAGMENTS][4]) {
        bool needs_rescale = false;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float max_score = Rows::max_score(scores[0], j);
#pragma unroll
            for (int tile = 1; tile < N; ++tile) max_score = fmaxf(max_score, Rows::max_score(scores[tile], j));
            maximum[j] = fmaxf(maximum[j], max_score);
            needs_rescale |= maximum[j] > row_max[j] + RESCALE_THRESHOLD;
        }
        return needs_rescale;
    }

    // A row with only -inf scores keeps its finite row_max, because subtracting -inf from -inf gives NaN.
    __device__ __forceinline__ void rescale(float (&out)[FRAGMENTS][4]) {
        float corrections[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            maximum[j] = Rows::max_of_lanes(maximum[j]);
            const float new_max = maximum[j] == -CUDART_INF_F ? row_max[j] : maximum[j];
            corrections[j] = fast_exp2(row_max[j] - new_max);
            row_max[j] = new_max;
            sum[j] *= corrections[j];
        }
#pragma unroll
        for (int n = 0; n < FRAGMENTS; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) out[n][i] *= corrections[Rows::row_index(i)];
    }

    // Reduce `maximum` and `sum` over the lanes of each row. Call this after the last tile.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int j = 0; j < 2; ++j) maximum[j] = Rows::max_of_lanes(maximum[j]), sum[j] = Rows::sum_of_lanes(sum[j]);
    }

    // Return the factor that rescales from row_max to the row's maximum. Call this after `finish`.
    __device__ __forceinline__ float final_correction(int j) const {
        return maximum[j] == -CUDART_INF_F ? 1.f : fast_exp2(row_max[j] - maximum[j]);
    }
};
