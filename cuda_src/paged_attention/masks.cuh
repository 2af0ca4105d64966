// Scale and mask the scores of a tile. A lane holds the scores of two rows, for two or four tokens per row.
#pragma once
#include "paged_attention/scores.cuh"
#include "paged_attention/team.cuh"

struct ScoreTerms {
    int positions[2];             // last token that each row attends to
    float factors[2];             // of the dot products, times log2(e)
    float slopes[2] = {0.f, 0.f}; // ALiBi, times log2(e)

    __device__ __forceinline__ void load_slopes(const Params& p, const Row (&rows)[2]) {
        for (int j = 0; j < 2; ++j)
            if (p.slopes && rows[j].valid) slopes[j] = p.slopes[rows[j].head] * LOG2_E;
    }
};

// Return whether one of a lane's two rows attends to `token` in the block-sparse pattern.
template <typename F>
__device__ __forceinline__ bool seen(const Params& p, const Team<F>& team, const KvSplit& kv_split, int token) {
    const Row first = team.row_of(p, kv_split, 0), second = team.row_of(p, kv_split, 1);
    return (first.valid && in_pattern(p, kv_split, first.head, token)) ||
           (second.valid && in_pattern(p, kv_split, second.head, token));
}

template <int FRAGMENTS>
__device__ __forceinline__ void add_scores(float (&scores)[FRAGMENTS][4], const float (&second)[FRAGMENTS][4]) {
#pragma unroll
    for (int n = 0; n < FRAGMENTS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[n][i] += second[n][i];
}

template <typename F>
__device__ __forceinline__ void scale_scores(float (&scores)[F::Rows::FRAGMENTS][4], const Params& p,
                                             const KvSplit& kv_split, const Row (&rows)[2], const ScoreTerms& terms,
                                             int token, int lane) {
#pragma unroll
    for (int n = 0; n < F::Rows::FRAGMENTS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int j = F::Rows::row_index(i);
            scores[n][i] *= terms.factors[j];
            if constexpr (F::EXTRAS) {
                const int t = token + F::token(n, i, lane);
                scores[n][i] = modify(p, scores[n][i], terms.slopes[j], t - terms.positions[j]);
                if (p.sparse_stride && !in_pattern(p, kv_split, rows[j].head, t)) scores[n][i] = -CUDART_INF_F;
            }
        }
}

template <typename F>
__device__ __forceinline__ void mask_scores(float (&scores)[F::Rows::FRAGMENTS][4], const Params& p,
                                            const ScoreTerms& terms, int token, int lane) {
#pragma unroll
    for (int n = 0; n < F::Rows::FRAGMENTS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int t = token + F::token(n, i, lane), position = terms.positions[F::Rows::row_index(i)];
            if (t > position || (p.window && t <= position - p.window)) scores[n][i] = -CUDART_INF_F;
        }
}
