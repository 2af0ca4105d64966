// The online softmax of attend_mma. It turns the partial scores of each tile into probabilities, 2^(score - base). The
// base of a row may be up to BASE_LAG below the row's maximum (see rows.cuh).
#pragma once
#include "common/warp.cuh"
#include "mla_decode/mma_form.cuh"
#include "mla_decode/mma_ring.cuh"
#include "mla_decode/rows.cuh"

// The softmax state of the rows of a group of warps. A thread has two rows in each fragment. SCALES is the type
// TILE::Scales of the tile.
template <typename F, typename SCALES> struct Softmax {
    static constexpr int M = F::M, N = F::N, V = F::V, OWN = F::OWN;

    // In shared memory.
    float4* const partial_scores;
    char* const probabilities;
    float *const maxima, *const sums;

    float base[M][2], sum[M][2];          // over the tokens so far; a sum is in units of 2^base
    float tile_max[M][2], tile_sum[M][2]; // over the tokens that the warp owns in this tile
    bool lags;                            // whether a base is more than BASE_LAG below its row's maximum
    SCALES scales;

    __device__ __forceinline__ Softmax(const Thread<F>& thread, char* shared)
        : partial_scores(reinterpret_cast<float4*>(shared + F::PARTIAL_SCORES) + thread.lane),
          probabilities(shared + F::PROBABILITIES + thread.group * F::SCALES * F::PROBABILITY_BYTES + thread.lane * 16),
          maxima(reinterpret_cast<float*>(shared + F::MAXIMA) + thread.group * F::MEMBERS * F::GROUP_ROWS),
          sums(reinterpret_cast<float*>(shared + F::SUMS) + thread.group * F::MEMBERS * F::GROUP_ROWS) {}

    // Reset the sums. The base starts at a finite number, because subtracting -inf from -inf gives NaN.
    __device__ __forceinline__ void begin_visit() {
#pragma unroll
        for (int m = 0; m < M; ++m) {
            sum[m][0] = sum[m][1] = 0.f;
            base[m][0] = base[m][1] = -LARGEST_FLOAT;
        }
    }

    __device__ __forceinline__ void begin_tile() {
        lags = false;
#pragma unroll
        for (int m = 0; m < M; ++m) {
            tile_max[m][0] = tile_max[m][1] = -CUDART_INF_F;
            tile_sum[m][0] = tile_sum[m][1] = 0.f;
        }
    }

    // Return the location in shared memory of the `sent`-th fragment of partial scores from warp `sender` of the group.
    __device__ __forceinline__ float4& partial(const Thread<F>& thread, int sender, int sent, int m) const {
        return partial_scores[((thread.group * F::MEMBERS + sender) * F::SENT + sent) * M * 32 + m * 32];
    }

    // Store the partial scores of tokens that other warps own.
    __device__ __forceinline__ void send(const Thread<F>& thread, const float (&scores)[N][M][4]) const {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            if (F::SENT < N ? n < OWN : thread.owns() && n == 0) continue;
#pragma unroll
            for (int m = 0; m < M; ++m)
                partial(thread, thread.member, n - (N - F::SENT), m) =
                    make_float4(scores[n][m][0], scores[n][m][1], scores[n][m][2], scores[n][m][3]);
        }
    }

    // Add up the partial scores of the warp's own tokens, and multiply them by the softmax scale.
    __device__ __forceinline__ void receive(const Params& p, const Thread<F>& thread, float (&scores)[N][M][4]) const {
#pragma unroll
        for (int other = 1; other < F::DEPTHS; ++other) {
            const int sender = (thread.depth + other) % F::DEPTHS;
#pragma unroll
            for (int n = 0; n < OWN; ++n) {
                // Each warp numbers the fragments of a tile from the first one that it owns. `sent` is the sender's
                // number for the fragment that is number n in this warp.
                const int sent = ((thread.depth - sender) * OWN + n) & (N - 1);
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    const float4 four = partial(thread, thread.half * F::DEPTHS + sender, sent - (N - F::SENT), m);
                    scores[n][m][0] += four.x, scores[n][m][1] += four.y;
                    scores[n][m][2] += four.z, scores[n][m][3] += four.w;
                }
            }
        }
#pragma unroll
        for (int n = 0; n < OWN; ++n)
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) scores[n][m][i] *= p.scale_log2;
    }

    // Set the scores of missing tokens and of causally masked tokens to -inf. `token` is the first token of the tile.
    __device__ __forceinline__ void mask(const Params& p, const Thread<F>& thread, float (&scores)[N][M][4],
                                         const Visit& visit, const Arrival& arrival, int token) const {
#pragma unroll
        for (int n = 0; n < OWN; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int t = (thread.half * N + thread.depth * OWN + n) * 8 + thread.pair * 2 + i;
                const bool there = arrival.valid >> (t / F::COPIED * (64 / F::COPIERS) + t % F::COPIED) & 1;
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const int row = thread.first_row() + thread.row_of(m, j);
                        if (!there || (p.causal && token + t >= causal_end(p, visit.length, row)))
                            scores[n][m][2 * j + i] = -CUDART_INF_F;
                    }
            }
    }

    __device__ __forceinline__ void find_maxima(const float (&scores)[N][M][4]) {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
#pragma unroll
                for (int n = 0; n < OWN; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        tile_max[m][j] = fmaxf(tile_max[m][j], scores[n][m][2 * j + i] + scales.exponent(n, i));
                tile_max[m][j] = lanes_max<4>(tile_max[m][j]);
                lags |= tile_max[m][j] > base[m][j] + BASE_LAG;
            }
    }

    // Store the probabilities of the warp's own tokens as A fragments, relative to the base.
    __device__ __forceinline__ void exponentiate(const Thread<F>& thread, const float (&scores)[N][M][4]) {
#pragma unroll
        for (int m = 0; m < M; ++m) {
            float values[OWN][4];
            tile_sum[m][0] = tile_sum[m][1] = 0.f;
#pragma unroll
            for (int n = 0; n < OWN; ++n)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) values[n][2 * j + i] = fast_exp2(scores[n][m][2 * j + i] - base[m][j]);
                    tile_sum[m][j] += values[n][2 * j] + values[n][2 * j + 1];
                }
            const int eight = thread.half * N + thread.depth * OWN; // first own token, in units of 8 tokens
            char* const to = probabilities + (m * (F::TILE / 16) + eight / 2) * 512;
#pragma unroll
            for (int scale = 0; scale < F::SCALES; ++scale) {
                unsigned pairs[OWN][2];
#pragma unroll
                for (int n = 0; n < OWN; ++n)
#pragma unroll
                    for (int j = 0; j < 2; ++j)
                        pairs[n][j] = scales.pack_scaled(n, scale, values[n][2 * j], values[n][2 * j + 1]);
                if constexpr (OWN == 2)
                    *reinterpret_cast<uint4*>(to + scale * F::PROBABILITY_BYTES) =
                        make_uint4(pairs[0][0], pairs[0][1], pairs[OWN - 1][0], pairs[OWN - 1][1]);
                else
                    *reinterpret_cast<uint2*>(to + scale * F::PROBABILITY_BYTES + eight % 2 * 8) =
                        make_uint2(pairs[0][0], pairs[0][1]);
            }
        }
    }

    // Raise every row's base to its maximum, rescale the sums and the output, and store the probabilities again.
    __device__ __forceinline__ void rescale(const Thread<F>& thread, const float (&scores)[N][M][4],
                                            float (&out)[M][V][4]) {
        if (thread.pair == 0)
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    maxima[thread.member * F::GROUP_ROWS + thread.row_of(m, j)] = tile_max[m][j];
        thread.group_barrier(); // the group's maxima are in shared memory
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float higher = base[m][j];
#pragma unroll
                for (int i = 0; i < F::MEMBERS; ++i)
                    higher = fmaxf(higher, maxima[i * F::GROUP_ROWS + thread.row_of(m, j)]);
                const float factor = fast_exp2(base[m][j] - higher);
                base[m][j] = higher;
                sum[m][j] *= factor;
#pragma unroll
                for (int n = 0; n < V; ++n) out[m][n][2 * j] *= factor, out[m][n][2 * j + 1] *= factor;
            }
        if (thread.owns()) exponentiate(thread, scores);
        thread.group_barrier(); // the new probabilities are in shared memory
    }

    __device__ __forceinline__ void end_tile() {
#pragma unroll
        for (int m = 0; m < M; ++m) sum[m][0] += tile_sum[m][0], sum[m][1] += tile_sum[m][1];
    }

    // Store the row sums of the warp. If both groups compute all rows (RINGS == 2), also store the bases, and store NaN
    // instead of the sums if `bad`.
    __device__ __forceinline__ void store_sums(const Thread<F>& thread, bool bad) const {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float total = lanes_sum<4>(sum[m][j]);
                const int at = thread.member * F::GROUP_ROWS + thread.row_of(m, j);
                if (thread.pair == 0) {
                    sums[at] = F::RINGS == 2 && bad ? CUDART_NAN_F : total;
                    if constexpr (F::RINGS == 2) maxima[at] = base[m][j];
                }
            }
    }
};
