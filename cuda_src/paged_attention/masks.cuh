// What the scores of a tile go through after the product. A thread has those of two rows, for four tokens each.
#pragma once
#include "paged_attention/scores.cuh"
#include "paged_attention/team.cuh"

// What the scores of a thread's two rows are made with.
struct ScoreTerms {
    int positions[2];             // the last token that the row sees
    float factors[2];             // of the product, times log2(e)
    float slopes[2] = {0.f, 0.f}; // times log2(e)

    __device__ __forceinline__ void load_slopes(const Params& p, const Row (&rows)[2]) {
        for (int j = 0; j < 2; ++j)
            if (p.slopes && rows[j].valid) slopes[j] = p.slopes[rows[j].head] * LOG2_E;
    }
};

// Whether one of a thread's rows sees the block of the block-sparse pattern that `token` is in.
template <typename F>
__device__ __forceinline__ bool seen(const Params& p, const Team<F>& team, const Segment& segment, int token) {
    const Row first = team.row_of(p, segment, 0), second = team.row_of(p, segment, 1);
    return (first.valid && in_pattern(p, segment, first.head, token)) ||
           (second.valid && in_pattern(p, segment, second.head, token));
}

// Scale the scores; with EXTRAS, modify them and mask what the block-sparse pattern leaves out.
template <typename F>
__device__ __forceinline__ void scale_scores(float (&scores)[2][4], const Params& p, const Segment& segment,
                                             const Row (&rows)[2], const ScoreTerms& terms, int token, int pair) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            scores[n][i] *= terms.factors[i / 2];
            if constexpr (F::EXTRAS) {
                const int t = token + F::Tile::token(n, pair * 2 + i % 2);
                scores[n][i] = modify(p, scores[n][i], terms.slopes[i / 2], t - terms.positions[i / 2]);
                if (p.sparse_stride && !in_pattern(p, segment, rows[i / 2].head, t)) scores[n][i] = -CUDART_INF_F;
            }
        }
}

// Mask the tokens after each row's position, and those before its window.
template <typename F>
__device__ __forceinline__ void mask_scores(float (&scores)[2][4], const Params& p, const ScoreTerms& terms, int token,
                                            int pair) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int t = token + F::Tile::token(n, pair * 2 + i % 2), position = terms.positions[i / 2];
            if (t > position || (p.window && t <= position - p.window)) scores[n][i] = -CUDART_INF_F;
        }
}
