// Locate the query rows of a kv head, and store their results.
#pragma once
#include "common/mma.cuh"
#include "common/numeric.cuh"
#include "common/warp.cuh"
#include "mla_decode/parts.cuh"

constexpr float LN_2 = 0.693147180559945309f;

struct Row {
    int token, head;
    bool valid;

    __device__ __forceinline__ Row(int token, int head, bool valid) : token(token), head(head), valid(valid) {}

    __device__ __forceinline__ Row(const Params& p, const Split& split, int kv_head, int r) {
        const int group = p.group(), of_token = r < group ? 0 : r / group;
        valid = r < p.rows();
        token = split.token + (valid ? of_token : 0);
        head = kv_head * group + (valid ? r - of_token * group : 0);
    }
};

// Return the first token that the causal mask hides from row r.
__device__ __forceinline__ int causal_end(const Params& p, int length, int r) {
    const int group = p.group();
    return length - p.query_tokens + 1 + (r < group ? 0 : r / group);
}

// Return exp(lse) / (exp(lse) + exp(sink)). `lse` is a base-2 logarithm.
__device__ __forceinline__ float sink_factor(const Params& p, int head, float lse) {
    if (!p.sinks || lse == -CUDART_INF_F) return 1.f;
    return 1.f / (1.f + exp2f(p.sinks[head] * LOG2_E - lse));
}

// Store `lse` as a natural logarithm, or +inf for a row without tokens.
__device__ __forceinline__ void store_lse(const Params& p, const Split& split, const Row& row, float lse) {
    p.lse[((long long)split.batch * p.heads + row.head) * p.query_tokens + row.token] =
        lse == -CUDART_INF_F ? CUDART_INF_F : lse * LN_2;
}

// The destination of a query row: `out` if the sequence has one split, else `partial`. The other pointer is null. If
// the row does not exist, both are null.
template <typename T> struct Destination {
    T* out;
    float* partial;
    float factor;

    // The row's softmax sum is `total * 2^row_max`. `writes_lse`: true in one lane of the row.
    __device__ __forceinline__ Destination(const Params& p, const SmPart& sm_part, const Split& split, int kv_head,
                                           int r, float row_max, float total, bool bad, bool writes_lse)
        : out(nullptr), partial(nullptr), factor(0.f) {
        const Row row(p, split, kv_head, r);
        if (!row.valid) return;
        float lse = total == 0.f ? -CUDART_INF_F : row_max + log2f(total);
        factor = total == 0.f ? 0.f : 1.f / total;
        if (bad) lse = factor = CUDART_NAN_F;
        if (split.splits <= 1) {
            factor *= sink_factor(p, row.head, lse);
            out = static_cast<T*>(p.out) +
                  (((long long)split.batch * p.query_tokens + row.token) * p.heads + row.head) * p.head_dim_v;
            if (writes_lse) store_lse(p, split, row, lse);
        } else {
            const long long split_index = split.sequence == sm_part.first_sequence ? sm_part.first_split : 0;
            const long long slot =
                min(max(2 * ((long long)split.earlier_splits - split.sequence) + split_index, 0ll), 2ll * p.parts - 1);
            const long long at = (slot * p.kv_heads + kv_head) * p.rows() + r;
            partial = p.partial_out + at * p.head_dim_v;
            if (writes_lse) p.partial_lse[at] = lse;
        }
    }

    // Store `8 * N` columns from `first` on. Four neighbouring lanes hold the row in N accumulator fragments (C of
    // m16n8k16). `half` selects the fragment row: 0 for row lane / 4, 1 for row lane / 4 + 8.
    template <int N, int DIM_V>
    __device__ __forceinline__ void store(const Params& p, const float (*sums)[4], int half, int first) const {
        const int pair = threadIdx.x % 4, head_dim_v = DIM_V ? DIM_V : p.head_dim_v;
        if (partial) {
#pragma unroll
            for (int n = 0; n < N; ++n)
                if (DIM_V || first + n * 8 < head_dim_v)
                    *reinterpret_cast<float2*>(partial + first + n * 8 + pair * 2) =
                        make_float2(sums[n][half * 2] * factor, sums[n][half * 2 + 1] * factor);
        }
        // A lane holds only 4 bytes of the row per fragment. The four lanes transpose four fragments, so that each lane
        // stores 16 bytes.
        if (!__any_sync(FULL_WARP, out != nullptr)) return;
#pragma unroll
        for (int first_fragment = 0; first_fragment < N; first_fragment += 4) {
            unsigned pairs[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                pairs[i] = first_fragment + i < N ? pack<T>(sums[min(first_fragment + i, N - 1)][half * 2] * factor,
                                                            sums[min(first_fragment + i, N - 1)][half * 2 + 1] * factor)
                                                  : 0;
#pragma unroll
            for (int step = 1; step < 4; step *= 2) {
                const bool upper = pair & step;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (i & step) continue;
                    const unsigned got = __shfl_xor_sync(FULL_WARP, upper ? pairs[i] : pairs[i + step], step);
                    pairs[i] = upper ? got : pairs[i], pairs[i + step] = upper ? pairs[i + step] : got;
                }
            }
            const int column = first + (first_fragment + pair) * 8;
            if (out && first_fragment + pair < N && (DIM_V || column < head_dim_v))
                *reinterpret_cast<uint4*>(out + column) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
    }

    // Like `store`, but fragments `2 * k` and `2 * k + 1` hold the even and odd columns of the k-th group of 16
    // columns.
    template <int N>
    __device__ __forceinline__ void store_interleaved(const float (*sums)[4], int half, int first) const {
        const int pair = threadIdx.x % 4;
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            const int column = first + n * 8 + pair * 4;
            const float4 four = make_float4(sums[n][half * 2] * factor, sums[n + 1][half * 2] * factor,
                                            sums[n][half * 2 + 1] * factor, sums[n + 1][half * 2 + 1] * factor);
            if (partial) *reinterpret_cast<float4*>(partial + column) = four;
            if (out)
                *reinterpret_cast<uint2*>(out + column) = make_uint2(pack<T>(four.x, four.y), pack<T>(four.z, four.w));
        }
    }
};

// Probabilities are 2^(score - row_max). row_max is raised to the row's maximum only when the maximum exceeds it by
// more than RESCALE_THRESHOLD. Probabilities are therefore at most 2^RESCALE_THRESHOLD and do not overflow or lose
// precision, and the accumulators are seldom rescaled (counts in notebooks/mla_decode_combine.ipynb).
constexpr float RESCALE_THRESHOLD = 8.f;
