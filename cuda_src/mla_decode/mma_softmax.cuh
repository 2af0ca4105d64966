// Compute the online softmax of attend_mma. Probabilities are 2^(score - row_max), and row_max may be below the row's
// maximum (RESCALE_THRESHOLD in rows.cuh).
#pragma once
#include "common/warp.cuh"
#include "mla_decode/mma_form.cuh"
#include "mla_decode/mma_ring.cuh"
#include "mla_decode/rows.cuh"

// The softmax state of the rows of a group of warps. A thread has two rows in each fragment.
template <typename F, typename SCALES> struct Softmax {
    static constexpr int M = F::M, N = F::N, V = F::V, OWNED_FRAGMENTS = F::OWNED_FRAGMENTS;

    float4* const partial_scores;
    char* const probabilities;
    float *const maxima, *const sums;

    float row_max[M][2], sum[M][2];       // over the tokens so far
    float tile_max[M][2], tile_sum[M][2]; // over the tokens that the warp owns
    bool needs_rescale;
    SCALES scales;

    __device__ __forceinline__ Softmax(const Thread<F>& thread, char* shared)
        : partial_scores(reinterpret_cast<float4*>(shared + F::PARTIAL_SCORES) + thread.lane),
          probabilities(shared + F::PROBABILITIES + thread.group * F::SCALES * F::PROBABILITY_BYTES + thread.lane * 16),
          maxima(reinterpret_cast<float*>(shared + F::MAXIMA) + thread.group * F::GROUP_WARPS * F::GROUP_ROWS),
          sums(reinterpret_cast<float*>(shared + F::SUMS) + thread.group * F::GROUP_WARPS * F::GROUP_ROWS) {}

    // row_max starts at a finite number, because subtracting -inf from -inf gives NaN.
    __device__ __forceinline__ void begin_split() {
#pragma unroll
        for (int m = 0; m < M; ++m) {
            sum[m][0] = sum[m][1] = 0.f;
            row_max[m][0] = row_max[m][1] = -LARGEST_FLOAT;
        }
    }

    __device__ __forceinline__ void begin_tile() {
        needs_rescale = false;
#pragma unroll
        for (int m = 0; m < M; ++m) {
            tile_max[m][0] = tile_max[m][1] = -CUDART_INF_F;
            tile_sum[m][0] = tile_sum[m][1] = 0.f;
        }
    }

    __device__ __forceinline__ float4& partial(const Thread<F>& thread, int sender, int sent, int m) const {
        return partial_scores[((thread.group * F::GROUP_WARPS + sender) * F::SENT_FRAGMENTS + sent) * M * 32 + m * 32];
    }

    __device__ __forceinline__ void send(const Thread<F>& thread, const float (&scores)[N][M][4]) const {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            if (F::SENT_FRAGMENTS < N ? n < OWNED_FRAGMENTS : thread.owns() && n == 0) continue;
#pragma unroll
            for (int m = 0; m < M; ++m)
                partial(thread, thread.group_warp, n - (N - F::SENT_FRAGMENTS), m) =
                    make_float4(scores[n][m][0], scores[n][m][1], scores[n][m][2], scores[n][m][3]);
        }
    }

    // Add up and scale the partial scores of the tokens that the warp owns.
    __device__ __forceinline__ void receive(const Params& p, const Thread<F>& thread, float (&scores)[N][M][4]) const {
#pragma unroll
        for (int other = 1; other < F::DIM_RANGES; ++other) {
            const int sender = (thread.dim_range + other) % F::DIM_RANGES;
#pragma unroll
            for (int n = 0; n < OWNED_FRAGMENTS; ++n) {
                // Each warp numbers a tile's fragments, starting at the first fragment that it owns. `sent` is the
                // sender's number for fragment n.
                const int sent = ((thread.dim_range - sender) * OWNED_FRAGMENTS + n) & (N - 1);
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    const float4 four =
                        partial(thread, thread.token_range * F::DIM_RANGES + sender, sent - (N - F::SENT_FRAGMENTS), m);
                    scores[n][m][0] += four.x, scores[n][m][1] += four.y;
                    scores[n][m][2] += four.z, scores[n][m][3] += four.w;
                }
            }
        }
#pragma unroll
        for (int n = 0; n < OWNED_FRAGMENTS; ++n)
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) scores[n][m][i] *= p.scale_log2;
    }

    // Set the scores of missing and of causally masked tokens to -inf. `token` is the first token of the tile.
    __device__ __forceinline__ void mask(const Params& p, const Thread<F>& thread, float (&scores)[N][M][4],
                                         const Split& split, const Arrival& arrival, int token) const {
#pragma unroll
        for (int n = 0; n < OWNED_FRAGMENTS; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int t =
                    (thread.token_range * N + thread.dim_range * OWNED_FRAGMENTS + n) * 8 + thread.pair * 2 + i;
                const bool exists =
                    arrival.valid >> (t / F::COPIED_TOKENS * (64 / F::COPY_WARPS) + t % F::COPIED_TOKENS) & 1;
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const int row = thread.first_row() + thread.row_of(m, j);
                        if (!exists || (p.causal && token + t >= causal_end(p, split.length, row)))
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
                for (int n = 0; n < OWNED_FRAGMENTS; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        tile_max[m][j] = fmaxf(tile_max[m][j], scores[n][m][2 * j + i] + scales.exponent(n, i));
                tile_max[m][j] = lanes_max<4>(tile_max[m][j]);
                needs_rescale |= tile_max[m][j] > row_max[m][j] + RESCALE_THRESHOLD;
            }
    }

    // Store the probabilities of the warp's own tokens as A fragments.
    __device__ __forceinline__ void exponentiate(const Thread<F>& thread, const float (&scores)[N][M][4]) {
#pragma unroll
        for (int m = 0; m < M; ++m) {
            float values[OWNED_FRAGMENTS][4];
            tile_sum[m][0] = tile_sum[m][1] = 0.f;
#pragma unroll
            for (int n = 0; n < OWNED_FRAGMENTS; ++n)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        values[n][2 * j + i] = fast_exp2(scores[n][m][2 * j + i] - row_max[m][j]);
                    tile_sum[m][j] += values[n][2 * j] + values[n][2 * j + 1];
                }
            const int first_fragment = thread.token_range * N + thread.dim_range * OWNED_FRAGMENTS;
            char* const to = probabilities + (m * (F::TILE / 16) + first_fragment / 2) * 512;
#pragma unroll
            for (int scale = 0; scale < F::SCALES; ++scale) {
                unsigned pairs[OWNED_FRAGMENTS][2];
#pragma unroll
                for (int n = 0; n < OWNED_FRAGMENTS; ++n)
#pragma unroll
                    for (int j = 0; j < 2; ++j)
                        pairs[n][j] = scales.pack_scaled(n, scale, values[n][2 * j], values[n][2 * j + 1]);
                if constexpr (OWNED_FRAGMENTS == 2)
                    *reinterpret_cast<uint4*>(to + scale * F::PROBABILITY_BYTES) = make_uint4(
                        pairs[0][0], pairs[0][1], pairs[OWNED_FRAGMENTS - 1][0], pairs[OWNED_FRAGMENTS - 1][1]);
                else
                    *reinterpret_cast<uint2*>(to + scale * F::PROBABILITY_BYTES + first_fragment % 2 * 8) =
                        make_uint2(pairs[0][0], pairs[0][1]);
            }
        }
    }

    // Raise row_max to each row's maximum, rescale the sums and the output, and store the probabilities again.
    __device__ __forceinline__ void rescale(const Thread<F>& thread, const float (&scores)[N][M][4],
                                            float (&out)[M][V][4]) {
        if (thread.pair == 0)
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    maxima[thread.group_warp * F::GROUP_ROWS + thread.row_of(m, j)] = tile_max[m][j];
        thread.group_barrier(); // the maxima are in shared memory
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float new_max = row_max[m][j];
#pragma unroll
                for (int i = 0; i < F::GROUP_WARPS; ++i)
                    new_max = fmaxf(new_max, maxima[i * F::GROUP_ROWS + thread.row_of(m, j)]);
                const float factor = fast_exp2(row_max[m][j] - new_max);
                row_max[m][j] = new_max;
                sum[m][j] *= factor;
#pragma unroll
                for (int n = 0; n < V; ++n) out[m][n][2 * j] *= factor, out[m][n][2 * j + 1] *= factor;
            }
        if (thread.owns()) exponentiate(thread, scores);
        thread.group_barrier(); // the probabilities are in shared memory
    }

    __device__ __forceinline__ void end_tile() {
#pragma unroll
        for (int m = 0; m < M; ++m) sum[m][0] += tile_sum[m][0], sum[m][1] += tile_sum[m][1];
    }

    // Store the sums. If both groups compute all rows (RINGS == 2), also store row_max, and replace the sums by NaN if
    // `bad`.
    __device__ __forceinline__ void store_sums(const Thread<F>& thread, bool bad) const {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float total = lanes_sum<4>(sum[m][j]);
                const int at = thread.group_warp * F::GROUP_ROWS + thread.row_of(m, j);
                if (thread.pair == 0) {
                    sums[at] = F::RINGS == 2 && bad ? CUDART_NAN_F : total;
                    if constexpr (F::RINGS == 2) maxima[at] = row_max[m][j];
                }
            }
    }
};
