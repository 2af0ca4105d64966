// The query rows of a kv head: the tokens that they attend to, and the destination of their results.
#pragma once
#include "common/mma.cuh"
#include "common/numeric.cuh"
#include "common/warp.cuh"
#include "mla_decode/parts.cuh"

constexpr float LN_2 = 0.693147180559945309f;

// The query token and the head of row r.
struct Row {
    int token, head;
    bool valid; // whether the row exists

    __device__ __forceinline__ Row(int token, int head, bool valid) : token(token), head(head), valid(valid) {}

    __device__ __forceinline__ Row(const Params& p, const Visit& visit, int kv_head, int r) {
        const int group = p.group(), of_token = r < group ? 0 : r / group;
        valid = r < p.rows();
        token = visit.token + (valid ? of_token : 0);
        head = kv_head * group + (valid ? r - of_token * group : 0);
    }
};

// Return the first token that the causal mask hides from row r.
__device__ __forceinline__ int causal_end(const Params& p, int length, int r) {
    const int group = p.group();
    return length - p.query_tokens + 1 + (r < group ? 0 : r / group);
}

// Return the factor exp(lse) / (exp(lse) + exp(sink)) of a row's result. `lse` is a base-2 logarithm.
__device__ __forceinline__ float sink_factor(const Params& p, int head, float lse) {
    if (!p.sinks || lse == -CUDART_INF_F) return 1.f;
    return 1.f / (1.f + exp2f(p.sinks[head] * LOG2_E - lse));
}

// Store a row's lse as a natural logarithm; +inf for a row without tokens.
__device__ __forceinline__ void store_lse(const Params& p, const Visit& visit, const Row& row, float lse) {
    p.lse[((long long)visit.batch * p.heads + row.head) * p.query_tokens + row.token] =
        lse == -CUDART_INF_F ? CUDART_INF_F : lse * LN_2;
}

// The destination of query row r: `out` if only this part processes the sequence, else a slot of the partial results
// (`partial`). The unused pointer is null. Both are null if the row does not exist.
template <typename T> struct Destination {
    T* out;
    float* partial;
    float factor; // multiplies the accumulated output

    // The sum of the exponentials of the row's scores is `total * 2^base`. Several lanes share the row, and
    // `writes_lse` is true in only one of them.
    __device__ __forceinline__ Destination(const Params& p, const Part& part, const Visit& visit, int kv_head, int r,
                                           float base, float total, bool bad, bool writes_lse)
        : out(nullptr), partial(nullptr), factor(0.f) {
        const Row row(p, visit, kv_head, r);
        if (!row.valid) return;
        float lse = total == 0.f ? -CUDART_INF_F : base + log2f(total);
        factor = total == 0.f ? 0.f : 1.f / total;
        if (bad) lse = factor = CUDART_NAN_F;
        if (visit.splits <= 1) {
            factor *= sink_factor(p, row.head, lse);
            out = static_cast<T*>(p.out) +
                  (((long long)visit.batch * p.query_tokens + row.token) * p.heads + row.head) * p.head_dim_v;
            if (writes_lse) store_lse(p, visit, row, lse);
        } else {
            const long long split = visit.sequence == part.first ? part.split : 0;
            const long long slot =
                min(max(2 * ((long long)visit.before - visit.sequence) + split, 0ll), 2ll * p.parts - 1);
            const long long at = (slot * p.kv_heads + kv_head) * p.rows() + r;
            partial = p.partial_out + at * p.head_dim_v;
            if (writes_lse) p.partial_lse[at] = lse;
        }
    }

    // Store `8 * N` columns of the row, from column `first` on. The values are in N accumulator fragments (C of
    // m16n8k16), spread over four neighbouring lanes. `half` selects the fragment row: 0 for row lane / 4, 1 for row
    // lane / 4 + 8.
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
        // A lane holds only 4 bytes of the row per fragment. The four lanes of the row transpose four fragments among
        // themselves, so that each lane can store the 16 bytes of one fragment.
        if (!__any_sync(FULL_WARP, out != nullptr)) return;
#pragma unroll
        for (int base = 0; base < N; base += 4) {
            unsigned pairs[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                pairs[i] = base + i < N ? pack<T>(sums[min(base + i, N - 1)][half * 2] * factor,
                                                  sums[min(base + i, N - 1)][half * 2 + 1] * factor)
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
            const int column = first + (base + pair) * 8;
            if (out && base + pair < N && (DIM_V || column < head_dim_v))
                *reinterpret_cast<uint4*>(out + column) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
    }

    // Like `store`, for interleaved fragments: fragments `2 * k` and `2 * k + 1` hold the even and the odd columns of
    // the k-th group of 16 columns.
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

// The exponentials of a row are 2^(score - base). The base is raised to the row's maximum score only when the maximum
// exceeds the base by more than BASE_LAG. The exponentials are therefore at most 2^BASE_LAG: they do not overflow or
// lose precision, and the accumulators are seldom rescaled (counts in notebooks/mla_decode.ipynb).
constexpr float BASE_LAG = 8.f;
